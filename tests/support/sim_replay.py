"""Drive the simulated engine's core with the requests of a recording, and compare the events.

The recording says which requests came and when, but not in which engine step each was seen. What
is derived from it: a request is added when all batches that the engine stamped before its start
have been produced and all earlier responses have ended. The prompts of one body reach the engine in
one step or one step apart; both are tried. Requests without a time of their own (they ran together)
start together, right before the first batch that stores a block of theirs. A request without a
rank header went to the rank that stored it.
"""

import copy
import itertools
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from support.captures import Capture, RecordedEvent, RecordedRequest

from events import BlocksCleared, BlocksRemoved, BlocksStored, Event
from kvrouter.sim import CoreSettings, EngineCore, EngineRequest

FLAGS = {
    "--block-size": "block_size",
    "--num-gpu-blocks-override": "num_blocks",
    "--max-num-batched-tokens": "max_batched_tokens",
    "--max-num-seqs": "max_num_seqs",
    "--max-model-len": "max_model_len",
}


def settings_of(capture: Capture) -> CoreSettings:
    """Return the recorded server's limits."""
    servers = list(capture.meta["servers"].values())
    command = servers[0]["cmdline"]
    known: dict[str, Any] = {
        FLAGS[flag]: int(command[i + 1]) for i, flag in enumerate(command) if flag in FLAGS
    }
    return CoreSettings(**known, hash_seed=7)


@dataclass
class Arrival:
    """The engine requests of one HTTP request, or a reset (no prompts)."""

    source: RecordedRequest
    start: float
    end: float
    requests: list[EngineRequest] = field(default_factory=list)

    @property
    def is_reset(self) -> bool:
        return self.source.path.startswith("/reset_prefix_cache")

    @property
    def clears(self) -> bool:
        return self.is_reset and self.source.response == {"success": True}


@dataclass(frozen=True)
class Life:
    """One rank of one engine process: what it published, and what reached it."""

    recorded: list[RecordedEvent]
    arrivals: list[Arrival]


def lives(capture: Capture) -> list[Life]:
    """Split a recording by rank and by engine process, and leave out what can't be compared.

    That is what came before the first reset of an engine that had run before, and the batches
    after the last request on record.
    """
    found = []
    for rank, source in enumerate(sorted({event.src for event in capture.events})):
        batches = [event for event in capture.events if event.src == source]
        arrived = [a for a in arrivals(capture) if a.is_reset or _rank(capture, a) == rank]
        for start, end in _processes(capture, source):
            life = Life(
                [batch for batch in batches if start <= stamp(batch) < end],
                [arrival for arrival in arrived if start <= arrival.start < end],
            )
            found.append(_comparable(life))
    return found


def stamp(batch: RecordedEvent) -> float:
    """Return when the engine says it made this batch."""
    return float(batch.decoded[0])


def _processes(capture: Capture, source: str) -> list[tuple[float, float]]:
    ends = [s.t for s in capture.sockets if s.src == source and s.what == "disconnected"]
    return list(itertools.pairwise([0.0, *ends, math.inf]))


def _comparable(life: Life) -> Life:
    resets = [arrival.start for arrival in life.arrivals if arrival.clears]
    since = resets[0] if resets and life.recorded[0].seqno > 0 else 0.0
    arrived = [arrival for arrival in life.arrivals if arrival.start >= since]
    until = max((arrival.end for arrival in arrived), default=0.0)
    return Life([b for b in life.recorded if since <= stamp(b) <= until], arrived)


def _rank(capture: Capture, arrival: Arrival) -> int:
    """Return the rank that served a request: asked for, or seen to store it, or (a hit) any."""
    asked = arrival.source.headers.get("X-data-parallel-rank", "")
    if asked.isdecimal():
        return int(asked)
    sources = sorted({event.src for event in capture.events})
    stored = [
        batch
        for batch in capture.events
        if arrival.start <= stamp(batch) <= arrival.end
        and _stores(batch, arrival.requests[0].prompt)
    ]
    return sources.index(stored[0].src) if stored else 0


def arrivals(capture: Capture) -> list[Arrival]:
    """Return what reached the engine, in order, up to the first prompt that is not on record.

    Requests that were refused are left out.
    """
    found = []
    for number, request in enumerate(capture.requests):
        asked = _engine_requests(request, number)
        if not asked and _ran(request):
            break
        if request.t0 is not None and request.t1 is not None:
            found.append(Arrival(request, request.t0, request.t1, asked))
        elif asked:
            start = _first_store(capture.events, asked[0].prompt)
            found.append(Arrival(request, start - 1e-6, math.inf, asked))
    relevant = [arrival for arrival in found if arrival.requests or arrival.is_reset]
    together = min((a.start for a in relevant if a.end == math.inf), default=0.0)
    relevant.sort(key=lambda arrival: arrival.start)
    for arrival in relevant:
        if arrival.end == math.inf:
            arrival.start = together
    return sorted(relevant, key=lambda arrival: arrival.start)


def _ran(request: RecordedRequest) -> bool:
    return request.status == 200 and isinstance(request.body, dict) and "model" in request.body


def _first_store(batches: list[RecordedEvent], prompt: Sequence[int]) -> float:
    return min(stamp(batch) for batch in batches if _stores(batch, prompt))


def _stores(batch: RecordedEvent, prompt: Sequence[int]) -> bool:
    """Whether this batch stores the prompt's first block."""
    stored = [event for event in batch.decoded[1] if event["type"] == "BlockStored"]
    return any(
        event["parent_block_hash"] is None and event["token_ids"][:16] == list(prompt[:16])
        for event in stored
    )


def _engine_requests(request: RecordedRequest, number: int) -> list[EngineRequest]:
    body = request.body or {}
    if request.status not in (200, None) or not (body or request.prompt_ids):
        return []
    lora = body.get("model") if str(body.get("model")).startswith("lora") else None
    xargs = body.get("vllm_xargs") or {}
    return [
        EngineRequest(
            request_id=f"{number}-{position}",
            prompt=prompt,
            outputs=outputs,
            lora_name=lora,
            cache_salt=body.get("cache_salt"),
            report_hits=xargs.get("kv_cache_report_mode") == "full",
            skip_cache_read="prompt_logprobs" in body,
        )
        for position, (prompt, outputs) in enumerate(_sequences(request))
    ]


def _sequences(request: RecordedRequest) -> Iterator[tuple[list[int], list[int]]]:
    """Yield the prompt and output ids of each choice; outputs not on record are zeros."""
    prompts: dict[int, list[int]] = {}
    outputs: dict[int, list[int]] = {}
    for answer in request.answers:
        for choice in answer.get("choices") or []:
            index = choice["index"]
            ids = answer.get("prompt_token_ids") or choice.get("prompt_token_ids")
            if ids:
                prompts[index] = ids
            outputs.setdefault(index, []).extend(choice.get("token_ids") or [])
    if not prompts:
        prompts = {0: _ids_without_report(request)}
    completion = (request.usage or {}).get("completion_tokens", 1)
    for index in sorted(outputs or prompts):
        prompt = prompts.get(index, prompts[0])
        if prompt:
            yield prompt, outputs.get(index) or [0] * completion


def _ids_without_report(request: RecordedRequest) -> list[int]:
    prompt = (request.body or {}).get("prompt")
    if isinstance(prompt, list) and prompt and isinstance(prompt[0], int):
        return prompt
    return request.tokenize_ids or []


@dataclass
class Run:
    """A core in the middle of a recording, the batches it made and the cached tokens it found."""

    core: EngineCore
    batches: list[list[Event]] = field(default_factory=list)
    cached: dict[str, int] = field(default_factory=dict)
    finished: set[str] = field(default_factory=set)

    def step(self) -> bool:
        if self.core.begin_step() is None:
            return False
        result = self.core.finish_step()
        self.core.check()
        if result.events:
            self.batches.append(result.events)
        for output in result.outputs:
            self.cached[output.request_id] = output.cached_tokens
            if output.finished:
                self.finished.add(output.request_id)
        return True

    def run_until(self, batches: int, ended: set[str]) -> None:
        """Step until there are that many batches and these requests have ended."""
        while len(self.batches) < batches or not ended <= self.finished:
            if not self.step():
                return


class Replay:
    """One engine life of a recording, played to the end."""

    def __init__(self, settings: CoreSettings, life: Life) -> None:
        self.recorded = life.recorded
        self.run = Run(EngineCore(settings))
        self.cached: list[tuple[RecordedRequest, int]] = []
        self._started: list[Arrival] = []
        for arrival in life.arrivals:
            self._play(arrival)
        while self.run.step():
            pass
        self._collect()

    def _play(self, arrival: Arrival) -> None:
        due = sum(1 for batch in self.recorded if stamp(batch) < arrival.start)
        ended = {
            request.request_id
            for earlier in self._started
            if earlier.end <= arrival.start
            for request in earlier.requests
        }
        self.run.run_until(due, ended)
        if arrival.is_reset:
            running = "reset_running_requests=true" in arrival.source.path
            done = self.run.core.clear_cache(preempt_running=running)
            assert done == arrival.source.response["success"], arrival.source.tag
            return
        self._started.append(arrival)
        self.run = self._best_start(arrival)

    def _best_start(self, arrival: Arrival) -> Run:
        """Add the requests in one step or one step apart, whatever fits the recording."""
        together = _added(copy.deepcopy(self.run), arrival, apart=False)
        if len(arrival.requests) == 1:
            return together
        for apart in (False, True):
            trial = _added(copy.deepcopy(self.run), arrival, apart=apart)
            while trial.step():
                pass
            if not compare(self.recorded[: len(trial.batches)], trial.batches):
                return _added(self.run, arrival, apart=apart)
        return together

    def _collect(self) -> None:
        """Note what usage says: a stream of several choices has the first one's, else the last."""
        for arrival in self._started:
            reported = arrival.requests[0 if arrival.source.sse else -1].request_id
            self.cached.append((arrival.source, self.run.cached[reported]))


def _added(run: Run, arrival: Arrival, *, apart: bool) -> Run:
    for request in arrival.requests:
        run.core.add(request)
        if apart:
            run.step()
    return run


def compare(recorded: list[RecordedEvent], simulated: list[list[Event]]) -> str:
    """Return where the simulated batches depart from the recorded ones; "" if nowhere.

    Hashes are compared as names: each recorded one must always be the same simulated one.
    """
    names: dict[str, int] = {}
    for number, (batch, events) in enumerate(zip(recorded, simulated, strict=False)):
        expected = batch.decoded[1]
        if len(expected) != len(events):
            return f"batch {number}: {[e['type'] for e in expected]}, simulated {events}"
        for event, ours in zip(expected, events, strict=True):
            if not _same(event, ours, names):
                return f"batch {number}: {event}, simulated {ours}"
    if len(set(names.values())) != len(names):
        return "two recorded hashes have one simulated name"
    if len(recorded) != len(simulated):
        return f"{len(recorded)} batches, simulated {len(simulated)}"
    return ""


def _same(recorded: dict[str, Any], ours: Event, names: dict[str, int]) -> bool:
    if isinstance(ours, BlocksCleared):
        return recorded == {"type": "AllBlocksCleared"}
    if not _same_hashes(recorded.get("block_hashes", []), ours.block_hashes, names):
        return False
    if isinstance(ours, BlocksRemoved):
        return bool(recorded["type"] == "BlockRemoved")
    return bool(recorded["type"] == "BlockStored") and _same_store(recorded, ours, names)


def _same_store(recorded: dict[str, Any], ours: BlocksStored, names: dict[str, int]) -> bool:
    parent = recorded["parent_block_hash"]
    return bool(
        (names[repr(parent)] if parent is not None else None) == ours.parent
        and recorded["token_ids"] == ours.token_ids
        and recorded["block_size"] == ours.block_size
        and recorded["lora_name"] == ours.lora_name
        and recorded["extra_keys"] == ours.extra_keys
        and recorded["group_idx"] == ours.group
        and recorded["kv_cache_spec_kind"] == "full_attention"
        and recorded["medium"] == "GPU"
    )


def _same_hashes(recorded: list[Any], ours: list[Any], names: dict[str, int]) -> bool:
    if len(recorded) != len(ours):
        return False
    return all(names.setdefault(repr(r), o) == o for r, o in zip(recorded, ours, strict=True))
