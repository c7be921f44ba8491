"""What a simulated engine can be told; the words are vLLM's where vLLM has one."""

from dataclasses import dataclass, field

from kvrouter.sim.timing import LinearTiming, TimingModel


class SettingsError(ValueError):
    """These settings make no engine."""


@dataclass(frozen=True, kw_only=True)
class CoreSettings:
    """The scheduler's and the cache's limits.

    `num_blocks` counts as vLLM's `--num-gpu-blocks-override` does: one block is never used.
    `max_batched_tokens` bounds the tokens of one step (longer prompts are prefilled in chunks).
    `reserve_prompt`: a request starts only when its whole prompt fits, not just its first chunk.
    `hash_seed`: engines with different seeds name equal blocks differently.
    `events`: whether steps report what happened to the cache.
    """

    block_size: int = 16
    num_blocks: int = 4097
    max_num_seqs: int = 256
    max_batched_tokens: int = 8192
    max_model_len: int = 32_768
    reserve_prompt: bool = True
    hash_seed: int = 0
    events: bool = True

    def __post_init__(self) -> None:
        for name in ("block_size", "max_num_seqs", "max_batched_tokens", "max_model_len"):
            if getattr(self, name) < 1:
                raise SettingsError(f"{name} must be at least 1, not {getattr(self, name)}")
        if self.capacity_tokens < self.max_model_len:
            raise SettingsError(
                f"{self.num_blocks - 1} usable blocks of {self.block_size} tokens can't hold one "
                f"sequence of max_model_len {self.max_model_len}: raise num_blocks or lower "
                "max_model_len"
            )

    @property
    def capacity_tokens(self) -> int:
        """The tokens that the whole cache can hold."""
        return (self.num_blocks - 1) * self.block_size


@dataclass(frozen=True, kw_only=True)
class SimSettings:
    """A simulated engine process: its core, its speed, and what it listens on.

    With `uds`, a path, the server listens there and at no port, as vLLM's does.
    `port` 0 takes any free one, and so do `kv_events_port` and `replay_port`; None for these two
    means no events, or no replay. With `dp_size` > 1 rank r publishes on both ports plus r, as vLLM
    does. `tokenizer` is a folder or hub id; without one a token is four bytes of text. All step
    durations are divided by `speed`; infinity means as fast as possible. `buffer_steps` batches can
    be replayed.
    `keep_alive_s`: idle connections are closed after that time, uvicorn's default.
    """

    core: CoreSettings = field(default_factory=CoreSettings)
    timing: TimingModel = field(default_factory=LinearTiming)
    speed: float = 1.0
    model: str = "sim"
    tokenizer: str | None = None
    loras: tuple[str, ...] = ()
    host: str = "127.0.0.1"
    port: int = 0
    uds: str | None = None
    kv_events_port: int | None = 0
    replay_port: int | None = 0
    topic: str = "kv-events"
    buffer_steps: int = 10_000
    dp_size: int = 1
    api_key: str | None = None
    prompt_tokens_details: bool = True
    keep_alive_s: float = 5.0

    def __post_init__(self) -> None:
        if not self.speed > 0:
            raise SettingsError(f"speed must be above 0 (inf: as fast as possible): {self.speed}")
        if self.dp_size < 1:
            raise SettingsError(f"dp_size must be at least 1, not {self.dp_size}")
        events, replay = self.kv_events_port, self.replay_port
        if events and replay and abs(events - replay) < self.dp_size:
            raise SettingsError(
                f"the ports of {self.dp_size} ranks overlap: {events} and {replay} and up"
            )

    def rank_ports(self, rank: int) -> tuple[int | None, int | None]:
        """Return a rank's ports for events and replay: base + rank, unless any free one will do."""
        events, replay = self.kv_events_port, self.replay_port
        return (events + rank if events else events, replay + rank if replay else replay)
