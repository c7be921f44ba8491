"""Before each recorded request the index knows what the engine is going to find in its cache.

A real vLLM was recorded: its events as they arrived, and what each response said of the cache. With
the events that had arrived before a request, the index has to say exactly `cached_tokens`; only
requests that no consumer of events can predict are left out, each for a reason with a name.
"""

import re
from collections import Counter
from collections.abc import Iterator
from functools import cache
from typing import Any

import pytest
from support import captures
from support.captures import Capture, RecordedEvent, RecordedRequest

from events import WorkerRank, decode_batch
from indexer import Applied, Overlap, RadixIndex, block_hashes, namespace

CHECKED = {
    "a_single": 12,
    "a_single_bs16": 12,
    "b_repeat": 18,
    "c2_chat_roundtrip": 5,
    "c_chat": 5,
    "d2_dup": 10,
    "d_evict": 17,
    "d_evict_bs16": 17,
    "e_reset": 3,
    "f_salt": 9,
    "g_lora": 10,
    "h_restart": 5,
    "i_replay": 30,
    "j_dp": 6,
    "k_hash_sha256_cbor_int0": 3,
    "k_hash_sha256_cbor_int1": 3,
    "k_hash_sha256_int0": 3,
    "k_hash_sha256_int1_seed0": 3,
    "k_hash_xxhash_cbor_int1_seed0": 3,
    "l_chatforms": 9,
    "l_chatforms_parts_template": 9,
    "legacy_0.14.1_a_single": 12,
    "legacy_0.14.1_d_evict": 17,
    "legacy_0.14.1_e_reset": 3,
    "legacy_0.14.1_f_salt": 8,
    "legacy_0.23.0_a_single": 12,
    "legacy_0.23.0_d_evict": 17,
    "legacy_0.23.0_e_reset": 3,
    "legacy_0.23.0_f_salt": 9,
    "legacy_0.9.2_a_single": 12,
    "legacy_0.9.2_d_evict": 17,
    "legacy_0.9.2_e_reset": 3,
    "legacy_0.9.2_f_salt": 8,
    "m_batch": 4,
    "p_chunked": 4,
    "q_scaleout": 3,
    "r_hwm_replay": 0,
    "s_swa": 16,
    "t_connect": 2,
    "t_connect_2": 1,
    "v_report_full": 6,
    "w2_concurrent": 43,
    "y_pretokenized": 5,
    "z_death": 1,
}
"""How many requests of each capture are predicted."""

UNMARKED_SALT = {"legacy_0.9.2_f_salt": "salt A again", "legacy_0.14.1_f_salt": "salt A again"}
"""Before 0.17 nothing on the wire marks salted blocks, so they are taken for plain ones."""

PHANTOMS = {"v_report_full": "after eviction (really gone)"}
"""A request's report mode "full" announced hits as if they were new copies."""

JOINED_LATE = {"e_reset", "legacy_0.14.1_e_reset", "legacy_0.23.0_e_reset", "legacy_0.9.2_e_reset"}
"""Recorded from a moment when the engine already had blocks, which are then removed unknown."""


class Replayed:
    """One capture, fed to an index in the order of time."""

    def __init__(self, capture: Capture) -> None:
        self.capture = capture
        self.index = RadixIndex()
        self.predicted: list[tuple[str, int, int]] = []  # tag, predicted, reported tokens
        self.left_out: Counter[str] = Counter()
        self.seen: Counter[str] = Counter()
        self._last_seqno: dict[WorkerRank, int] = {}
        self._pending_clears: Counter[WorkerRank] = Counter()
        for moment in self._timeline():
            if isinstance(moment, RecordedEvent):
                self._publish(moment)
            elif isinstance(moment, RecordedRequest):
                self._request(moment)
            else:
                self._disconnect(moment)

    def _timeline(self) -> Iterator[RecordedEvent | RecordedRequest | float]:
        """Events, requests, and the times at which the connection to the engine broke."""
        breaks = [change.t for change in self.capture.sockets if change.what == "disconnected"]
        for moment in self.capture.timeline():
            t = moment.t if isinstance(moment, RecordedEvent) else moment.t0
            while breaks and t is not None and breaks[0] < t:
                yield breaks.pop(0)
            yield moment

    def _publish(self, event: RecordedEvent) -> None:
        batch = decode_batch(event.payload)
        rank = WorkerRank("engine", batch.dp_rank or 0)
        if rank not in self._last_seqno:
            self.index.set_capacity(rank, capacity(self.capture))
        assert self._last_seqno.get(rank, -1) < event.seqno
        self._last_seqno[rank] = event.seqno
        applied = self.index.apply(rank, batch)
        pending = self._pending_clears[rank] - applied.cleared
        self._pending_clears[rank] = max(0, pending)
        self.seen += tally(applied)
        self.index.check()

    def _disconnect(self, _t: float) -> None:
        """The engine was restarted, as a source finds out by a replay."""
        for rank in self.index.ranks():
            self.index.clear(rank)
        self._last_seqno.clear()

    def _request(self, request: RecordedRequest) -> None:
        if request.path.startswith("/reset_prefix_cache") and request.response == {"success": True}:
            self._pending_clears.update(self.index.ranks())
            return
        reason = self._unpredictable(request)
        if reason:
            self.left_out[reason] += 1
            return
        rank = rank_of(request)
        assert request.cached_tokens is not None
        tokens = self._cached_tokens(rank, request)
        if self._pending_clears[rank] and tokens:
            self.left_out["a clear is pending in the engine"] += 1
            return
        self.predicted.append((request.tag, tokens, request.cached_tokens))

    def _cached_tokens(self, rank: WorkerRank, request: RecordedRequest) -> int:
        block_size = self.index.block_size(rank)
        if block_size is None:
            return 0
        ids = prompt_ids(request)
        lora = request.body["model"] if request.body.get("model", "").startswith("lora") else None
        space = namespace(lora=lora, salt=request.body.get("cache_salt"))
        hashes = block_hashes(ids, block_size, space)[: (len(ids) - 1) // block_size * 8]
        return self.index.match(hashes).get(rank, Overlap(0)).gpu * block_size

    def _unpredictable(self, request: RecordedRequest) -> str:
        """Why nobody could say what the engine will find; empty if somebody can."""
        name, tag = self.capture.name, request.tag
        reasons = {
            "concurrent: the cache changes meanwhile": request.concurrent,
            "the response does not say": request.cached_tokens is None,
            "no token ids on record": not prompt_ids(request),
            "the engine chose the dp rank": name == "j_dp" and not asks_for_rank(request),
            "usage of several prompts or choices": has_several(request.body),
            "prompt_logprobs: the cache is not read": "prompt_logprobs" in (request.body or {}),
            "salt that the wire does not mark": UNMARKED_SALT.get(name) == tag,
            "phantoms of report mode full": PHANTOMS.get(name) == tag,
        }
        return next((reason for reason, applies in reasons.items() if applies), "")


@cache
def replayed(name: str) -> Replayed:
    """A capture after its last event; shared between tests."""
    return Replayed(captures.load(name))


def rank_of(request: RecordedRequest) -> WorkerRank:
    """The dp rank that the request asks for: the first one, where it asks for none."""
    asked = request.headers.get("X-data-parallel-rank", "0")
    return WorkerRank("engine", int(asked) if asked.isdecimal() else 0)


def asks_for_rank(request: RecordedRequest) -> bool:
    return request.headers.get("X-data-parallel-rank", "").isdecimal()


def prompt_ids(request: RecordedRequest) -> list[int]:
    """The prompt's ids as the engine reports them, or as the client gave them."""
    body = request.body if isinstance(request.body, dict) else {}
    given = body.get("token_ids") or body.get("prompt")
    by_client = given if isinstance(given, list) and isinstance(given[0], int) else []
    return request.prompt_ids or request.tokenize_ids or by_client


def has_several(body: Any) -> bool:
    if not isinstance(body, dict):
        return False
    prompt = body.get("prompt")
    texts = isinstance(prompt, list) and len(prompt) > 1 and not isinstance(prompt[0], int)
    return texts or body.get("n", 1) > 1


def capacity(capture: Capture) -> int | None:
    """Usable blocks: one of those that the engine was started with is its null block."""
    blocks = re.findall(r"--num-gpu-blocks-override', '(\d+)'", str(capture.meta))
    return int(blocks[0]) - 1 if blocks else None


def tally(applied: Applied) -> Counter[str]:
    found = Counter({str(cause): blocks for cause, blocks in applied.ignored.items()})
    found.update(orphans=applied.orphans, unknown_removed=applied.unknown_removed)
    found.update([str(applied.resync)] if applied.resync else [])
    return +found


@pytest.mark.parametrize("name", captures.names())
def test_cached_tokens_are_predicted_exactly(name: str) -> None:
    """I3, I11, E14, E15: chat, salt, LoRA, eviction, duplicates, hybrid models, restarts."""
    predicted = replayed(name).predicted
    assert [(tag, ours, theirs) for tag, ours, theirs in predicted if ours != theirs] == []
    assert len(predicted) == CHECKED[name]


@pytest.mark.parametrize("name", captures.names())
def test_a_recorded_engine_says_nothing_that_the_index_can_not_use(name: str) -> None:
    """No orphan, no ignored block, no unknown removal, no more copies than the engine has room.

    Except for a late start, lost batches, and a report mode that announces copies that aren't.
    """
    expected = set()
    if name in JOINED_LATE or name == "r_hwm_replay":
        expected.add("unknown_removed")
    if name in PHANTOMS:
        expected.add("over_capacity")
    assert replayed(name).seen.keys() == expected


def test_few_requests_are_left_out_and_each_for_a_reason() -> None:
    left_out: Counter[str] = Counter()
    for name in captures.names():
        left_out += replayed(name).left_out
    assert left_out == {
        "a clear is pending in the engine": 4,
        "concurrent: the cache changes meanwhile": 320,
        "phantoms of report mode full": 1,
        "prompt_logprobs: the cache is not read": 1,
        "salt that the wire does not mark": 2,
        "the engine chose the dp rank": 10,
        "the response does not say": 22,
        "usage of several prompts or choices": 6,
    }
    assert sum(CHECKED.values()) == 398
