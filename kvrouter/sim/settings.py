"""What a simulated engine can be told; the words are vLLM's where vLLM has one."""

from dataclasses import dataclass


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
