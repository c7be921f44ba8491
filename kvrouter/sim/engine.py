"""The simulated engine's scheduler: continuous batching over the paged prefix cache.

Life of a request: `add` puts it into the waiting line; a step admits it, which looks up its cached
prefix, takes blocks for what is missing and names those that become full at once, before they are
computed; further steps prefill the rest in chunks and then append one output token each; it is
finished with its last output, and its blocks go back, tail first. When a running sequence needs a
block and none is free, the sequence admitted last loses its blocks and goes back to the head of the
waiting line, to be recomputed.

A step has two halves, because an engine computes in between: `begin_step` schedules, the caller
lets the time pass that its timing model asks for, and `finish_step` returns the outputs and the
events of the whole step. Between the halves only `add` is legal: an engine reads its other
commands between steps.
"""

from array import array
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from events import BlocksCleared, BlocksRemoved, BlocksStored, Event
from kvrouter.sim.cache import PrefixCache
from kvrouter.sim.naming import BlockNamer, extra_keys, token_array
from kvrouter.sim.settings import CoreSettings
from kvrouter.sim.timing import StepLoad


class SimStateError(RuntimeError):
    """The caller broke the order of calls; nothing was changed."""


class RequestTooLongError(ValueError):
    """The request can never run on this engine."""


@dataclass(frozen=True, kw_only=True, eq=False)
class EngineRequest:
    """What the engine is asked for.

    `outputs` are the tokens that it will "sample", one a step; at least one. `report_hits` makes
    it announce a cached prefix again (vLLM's `kv_cache_report_mode: full`), `skip_cache_read` makes
    it compute the whole prompt (as vLLM does for prompt logprobs).
    """

    request_id: str
    prompt: Sequence[int]
    outputs: Sequence[int]
    lora_name: str | None = None
    cache_salt: str | None = None
    report_hits: bool = False
    skip_cache_read: bool = False


class Output(NamedTuple):
    """One output token, the `position`-th of its request from 0 on.

    `cached_tokens` is what the request's first lookup found.
    """

    request_id: str
    token: int
    position: int
    finished: bool
    cached_tokens: int


class Step(NamedTuple):
    """A scheduled step: what it computes, and for how many sequences."""

    load: StepLoad
    sequences: int


class QuietRun(NamedTuple):
    """Steps that only decode. `load` is that of the first one.

    Each later step has one more context token for each decoding sequence.
    """

    steps: int
    load: StepLoad
    request_ids: list[str]


class StepResult(NamedTuple):
    """What came out of a step; events in the order in which they happened."""

    outputs: list[Output]
    events: list[Event]


@dataclass
class CoreCounters:
    """Running totals since the start, in tokens and requests."""

    queried_tokens: int = 0
    hit_tokens: int = 0
    prompt_tokens: int = 0
    output_tokens: int = 0
    finished: int = 0
    aborted: int = 0
    preempted: int = 0


@dataclass(eq=False, slots=True)
class _Sequence:
    """A request inside the engine. `announced` counts its blocks that have been named."""

    request: EngineRequest
    tokens: "array[int]"
    namer: BlockNamer
    prompt_tokens: int
    blocks: list[int] = field(default_factory=list)
    announced: int = 0
    computed: int = 0
    sampled: int = 0
    cached_tokens: int = -1

    @property
    def decoding(self) -> bool:
        """Whether its next token is all that is left to compute."""
        return self.sampled > 0 and self.computed == len(self.tokens) - 1

    def quiet_steps(self, block_size: int) -> int:
        """How many steps do no more to it than to append a token that is not the last."""
        in_block = self.computed % block_size
        if not in_block or not self.decoding:
            return 0
        return min(block_size - 1 - in_block, len(self.request.outputs) - self.sampled - 1)

    def append(self, count: int, block_size: int) -> None:
        """Compute and sample so many tokens in quiet steps."""
        self.computed += count
        self.tokens.extend(self.request.outputs[self.sampled : self.sampled + count])
        self.sampled += count
        if len(self.tokens) % block_size == 0:
            self.namer.extend(self.tokens)


class EngineCore:
    """One rank of a simulated engine."""

    def __init__(self, settings: CoreSettings) -> None:
        self.settings = settings
        self.cache = PrefixCache(settings.num_blocks)
        self.counters = CoreCounters()
        self._waiting: deque[_Sequence] = deque()
        self._running: list[_Sequence] = []
        self._chunks: list[tuple[_Sequence, int]] | None = None
        self._events: list[Event] = []
        self._stuck = False  # what waits found no room, and none was made since
        self._quiet = 0  # steps that may be skipped

    @property
    def running(self) -> int:
        """Requests that hold blocks."""
        return len(self._running)

    @property
    def waiting(self) -> int:
        """Requests that have been added or preempted and hold nothing."""
        return len(self._waiting)

    @property
    def idle(self) -> bool:
        """Whether there is nothing to do."""
        return not self._running and not self._waiting

    @property
    def usage(self) -> float:
        """The share of the cache that running requests hold, 0 to 1."""
        return self.cache.in_use / self.cache.usable

    def add(self, request: EngineRequest) -> None:
        """Put a request at the end of the waiting line; legal at any time.

        Raises RequestTooLongError when prompt and outputs are longer than the engine allows.
        """
        total = len(request.prompt) + len(request.outputs)
        if total > self.settings.max_model_len or not request.prompt or not request.outputs:
            raise RequestTooLongError(
                f"{len(request.prompt)} prompt tokens and {len(request.outputs)} output tokens "
                f"don't make a sequence of 2 to {self.settings.max_model_len} tokens"
            )
        settings = self.settings
        namer = BlockNamer(
            settings.hash_seed, settings.block_size, request.lora_name, request.cache_salt
        )
        tokens = token_array(request.prompt)
        namer.extend(tokens)
        self._waiting.append(_Sequence(request, tokens, namer, len(tokens)))

    def abort(self, request_id: str) -> bool:
        """Forget a request; what it has cached stays cached. False if there is none."""
        self._must_be_between_steps()
        for queue in (self._running, self._waiting):
            for sequence in queue:
                if sequence.request.request_id == request_id:
                    queue.remove(sequence)
                    self._stuck = False
                    self._quiet = 0
                    self.cache.release(sequence.blocks)
                    self.counters.aborted += 1
                    return True
        return False

    def clear_cache(self, *, preempt_running: bool = False) -> bool:
        """Empty the prefix cache; False if running requests stand in the way.

        The event is only reported with the next step. With `preempt_running` they go back to the
        waiting line first and compute everything again.
        """
        self._must_be_between_steps()
        if preempt_running:
            while self._running:
                self._preempt()
        if not self.cache.clear():
            return False
        self._stuck = False
        self._quiet = 0
        self._report(BlocksCleared())
        return True

    def begin_step(self) -> Step | None:
        """Schedule the next step; None if there is nothing to do."""
        self._must_be_between_steps()
        if self.idle:
            return None
        self._stuck = False
        self._quiet = 0
        chunks: list[tuple[_Sequence, int]] = []
        budget = self._continue_running(chunks, self.settings.max_batched_tokens)
        if budget is not None:
            budget = self._admit_waiting(chunks, budget)
            self._stuck = bool(self._waiting and budget)
        self._chunks = chunks
        return Step(self._load(chunks), len(chunks))

    def finish_step(self) -> StepResult:
        """End the step that was begun: sample outputs, let finished requests go."""
        if self._chunks is None:
            raise SimStateError("no step was begun")
        outputs: list[Output] = []
        finished = 0
        for sequence, count in self._chunks:
            sequence.computed += count
            if sequence.computed == len(sequence.tokens):
                output = self._sample(sequence)
                finished += output.finished
                outputs.append(output)
        self._chunks = None
        if finished:
            self._running = [s for s in self._running if s.sampled < len(s.request.outputs)]
            self._stuck = False
            self.counters.finished += finished
        events, self._events = self._events, []
        return StepResult(outputs, events)

    def quiet_run(self) -> QuietRun | None:
        """The steps ahead that are all alike; None if the next one is not.

        In such a step each running sequence gets one token that is not its last, none takes or
        fills a block, and nothing can be admitted: so there are no events, and only the contexts
        grow. Who steps in virtual time can take any number of them at once with `skip_steps`.
        """
        self._must_be_between_steps()
        if not self._running or (self._waiting and not self._stuck):
            return None
        if len(self._running) > self.settings.max_batched_tokens or self._events:
            return None
        size = self.settings.block_size
        steps = min([sequence.quiet_steps(size) for sequence in self._running])
        if steps < 1:
            return None
        self._quiet = steps
        chunks = [(sequence, 1) for sequence in self._running]
        requests = [sequence.request.request_id for sequence in self._running]
        return QuietRun(steps, self._load(chunks), requests)

    def skip_steps(self, count: int) -> None:
        """Do so many steps of the quiet run at once.

        Requests that were added since `quiet_run` wait until the next `begin_step`.
        """
        self._must_be_between_steps()
        if count > self._quiet:
            raise SimStateError(f"{count} steps can't be skipped, {self._quiet} are quiet")
        self._quiet -= count
        self.counters.output_tokens += count * len(self._running)
        for sequence in self._running:
            sequence.append(count, self.settings.block_size)

    def check(self) -> None:
        """Raise AssertionError if the state contradicts itself."""
        self.cache.check()
        held = sum(len(sequence.blocks) for sequence in self._running)
        if held < self.cache.in_use:
            raise AssertionError(f"{self.cache.in_use} blocks in use, {held} held")
        if any(sequence.blocks for sequence in self._waiting):
            raise AssertionError("a waiting request holds blocks")

    def _must_be_between_steps(self) -> None:
        if self._chunks is not None:
            raise SimStateError("a step is being computed")

    def _continue_running(self, chunks: list[tuple[_Sequence, int]], budget: int) -> int | None:
        """Schedule running sequences; return the budget left, None if one had to be preempted."""
        preempted = self.counters.preempted
        position = 0
        while position < len(self._running) and budget:
            sequence = self._running[position]
            count = min(len(sequence.tokens) - sequence.computed, budget)
            if not self._make_room(sequence, count):
                break
            chunks.append((sequence, count))
            budget -= count
            position += 1
        return budget if preempted == self.counters.preempted else None

    def _make_room(self, sequence: _Sequence, count: int) -> bool:
        """Take blocks for `count` more tokens, from the youngest if need be; False if none left."""
        while self._blocks_missing(sequence, sequence.computed + count) > self.cache.free:
            if self._preempt() is sequence:
                return False
        self._grow(sequence, sequence.computed + count)
        return True

    def _preempt(self) -> _Sequence:
        """Send the sequence admitted last back to the head of the waiting line."""
        victim = self._running.pop()
        self.cache.release(victim.blocks)
        victim.blocks = []
        victim.announced = victim.computed = 0
        self._waiting.appendleft(victim)
        self.counters.preempted += 1
        return victim

    def _admit_waiting(self, chunks: list[tuple[_Sequence, int]], budget: int) -> int:
        """Admit while there is room; return the budget left."""
        while self._waiting and budget and len(self._running) < self.settings.max_num_seqs:
            count = self._admit(self._waiting[0], budget)
            if not count:
                break
            sequence = self._waiting.popleft()
            self._running.append(sequence)
            chunks.append((sequence, count))
            budget -= count
        return budget

    def _admit(self, sequence: _Sequence, budget: int) -> int:
        """Look up the cached prefix and take blocks; return the tokens to compute, 0 if no room."""
        size = self.settings.block_size
        length = len(sequence.tokens)
        hit = self._lookup(sequence)
        cached = len(hit) * size
        count = min(length - cached, budget)
        must_fit = length if self.settings.reserve_prompt else cached + count
        missing = -(-must_fit // size) - len(hit)
        if missing + self.cache.idle(hit) > self.cache.free:
            return 0
        self.cache.hold(hit)
        sequence.blocks = hit
        sequence.announced = len(hit)
        sequence.computed = cached
        self._count_lookup(sequence, cached)
        if sequence.request.report_hits and hit:
            self._report_stored(sequence, 0, len(hit))
        self._grow(sequence, cached + count)
        return count

    def _lookup(self, sequence: _Sequence) -> list[int]:
        """Return the cached leading blocks; the last token is always computed."""
        if sequence.request.skip_cache_read:
            return []
        limit = (len(sequence.tokens) - 1) // self.settings.block_size
        return self.cache.leading(sequence.namer.names[:limit])

    def _count_lookup(self, sequence: _Sequence, cached: int) -> None:
        if sequence.cached_tokens >= 0:
            return  # it was preempted: usage reports the first lookup
        sequence.cached_tokens = cached
        self.counters.prompt_tokens += sequence.prompt_tokens
        if not sequence.request.skip_cache_read:
            self.counters.queried_tokens += sequence.prompt_tokens
            self.counters.hit_tokens += cached

    def _blocks_missing(self, sequence: _Sequence, tokens: int) -> int:
        return -(-tokens // self.settings.block_size) - len(sequence.blocks)

    def _grow(self, sequence: _Sequence, tokens: int) -> None:
        """Hold blocks for `tokens` tokens, and name those that are full."""
        missing = self._blocks_missing(sequence, tokens)
        if missing > 0:
            taken, evicted = self.cache.take(missing)
            sequence.blocks += taken
            for name in evicted:
                self._report(BlocksRemoved(block_hashes=[name]))
        full = tokens // self.settings.block_size
        first = sequence.announced
        if full > first:
            for index in range(first, full):
                self.cache.name(sequence.blocks[index], sequence.namer.names[index])
            sequence.announced = full
            self._report_stored(sequence, first, full)

    def _report(self, event: Event) -> None:
        if self.settings.events:
            self._events.append(event)

    def _report_stored(self, sequence: _Sequence, first: int, end: int) -> None:
        if not self.settings.events:
            return
        size = self.settings.block_size
        request = sequence.request
        names = sequence.namer.names
        stored = BlocksStored(
            block_hashes=list(names[first:end]),
            parent=names[first - 1] if first else None,
            token_ids=sequence.tokens[first * size : end * size].tolist(),
            block_size=size,
            lora_name=request.lora_name,
            extra_keys=extra_keys(first, end - first, request.lora_name, request.cache_salt),
        )
        self._events.append(stored)

    def _load(self, chunks: list[tuple[_Sequence, int]]) -> StepLoad:
        prefill = decoding = context = 0
        for sequence, count in chunks:
            if sequence.decoding:
                decoding += 1
                context += len(sequence.tokens)
            else:
                prefill += count
        return StepLoad(prefill, decoding, context, self.settings.capacity_tokens)

    def _sample(self, sequence: _Sequence) -> Output:
        request = sequence.request
        index = sequence.sampled
        token = request.outputs[index]
        sequence.sampled = index + 1
        sequence.tokens.append(token)
        finished = sequence.sampled == len(request.outputs)
        self.counters.output_tokens += 1
        if finished:
            self.cache.release(sequence.blocks)
            sequence.blocks = []
        elif len(sequence.tokens) % self.settings.block_size == 0:
            sequence.namer.extend(sequence.tokens)
        return Output(request.request_id, token, index, finished, sequence.cached_tokens)

    def __repr__(self) -> str:
        return f"<EngineCore {self.running} running, {self.waiting} waiting, {self.cache!r}>"
