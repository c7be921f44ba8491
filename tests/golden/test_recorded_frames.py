"""Frames of a real vLLM 0.32 (and their re-encodings in older shapes) through the codec."""

from array import array
from typing import Any

import pytest
from support import captures
from support.captures import Capture

from events import (
    BlocksCleared,
    BlocksRemoved,
    BlocksStored,
    Event,
    EventBatch,
    GroupKind,
    Tier,
    decode_batch,
    encode_batch,
)

MAP_CAPTURES = [name for name in captures.names() if not name.startswith("legacy_")]
LEGACY = [name for name in captures.names() if name.startswith("legacy_")]
END = b"\xff" * 8


def payloads(capture: Capture) -> list[bytes]:
    replies = [reply for replay in capture.replays for reply in replay.replies]
    return [e.payload for e in capture.events] + [r[-1] for r in replies if r[-2] != END]


def lora_ids(decoded: list[Any]) -> dict[str, int]:
    stored = [event for event in decoded[1] if event.get("lora_name")]
    return {event["lora_name"]: event["lora_id"] for event in stored}


def session_ids(decoded: list[Any]) -> dict[int, str]:
    events = enumerate(decoded[1])
    return {at: event["session_id"] for at, event in events if "session_id" in event}


@pytest.mark.parametrize("name", captures.names())
def test_no_recorded_event_is_skipped(name: str) -> None:
    recorded = payloads(captures.load(name))
    assert recorded
    for payload in recorded:
        assert decode_batch(payload).skipped == {}


@pytest.mark.parametrize("name", MAP_CAPTURES)
def test_a_decoded_batch_encodes_to_the_very_bytes_of_the_engine(name: str) -> None:
    """The simulated engine is only as real as its bytes."""
    for event in captures.load(name).events:
        ids, sessions = lora_ids(event.decoded), session_ids(event.decoded)
        batch = decode_batch(event.payload)
        assert encode_batch(batch, lora_ids=ids, session_ids=sessions) == event.payload


@pytest.mark.parametrize("name", [name for name in LEGACY if "0.23.0" in name])
def test_the_array_shape_is_the_one_of_0_23(name: str) -> None:
    for payload in payloads(captures.load(name)):
        assert encode_batch(decode_batch(payload), shape="array") == payload


@pytest.mark.parametrize("name", LEGACY)
def test_positional_events_mean_what_the_maps_mean(name: str) -> None:
    """E1: a fleet in the middle of an upgrade from 0.23 or older sends both shapes."""
    _, version, scenario = name.split("_", 2)
    legacy, modern = captures.load(name).events, captures.load(scenario).events
    assert len(legacy) == len(modern)
    for old, new in zip(legacy, modern, strict=True):
        expected = decode_batch(new.payload)
        assert decode_batch(old.payload) == _without_extras(expected, version)


def _without_extras(batch: EventBatch, version: str) -> EventBatch:
    """`batch` as a release without extra keys (before 0.17) would announce it."""
    if version == "0.23.0":
        return batch
    events: list[Event] = []
    for event in batch.events:
        bare = {**_fields(event), "extra_keys": None} if isinstance(event, BlocksStored) else None
        events.append(BlocksStored(**bare) if bare else event)
    return EventBatch(batch.ts_s, events, batch.dp_rank)


def _fields(event: BlocksStored) -> dict[str, Any]:
    return {name: getattr(event, name) for name in event.__struct_fields__}


def test_a_stored_event_keeps_every_field() -> None:
    event = captures.load("a_single").events[1]
    recorded = event.decoded[1][0]
    batch = decode_batch(event.payload)
    assert (batch.ts_s, batch.dp_rank) == (event.decoded[0], 0)
    assert batch.events == [
        BlocksStored(
            block_hashes=recorded["block_hashes"],
            parent=recorded["parent_block_hash"],
            token_ids=array("I", recorded["token_ids"]),
            block_size=32,
            extra_keys=recorded["extra_keys"],
            group_kind=GroupKind.FULL,
        )
    ]


def test_a_clear_arrives_with_the_next_step() -> None:
    """E14: the engine answers a reset at once and announces it with its next batch."""
    capture = captures.load("a_single")
    reset, flush = capture.requests[:2]
    assert reset.path == "/reset_prefix_cache"
    cleared = [e for e in capture.events if BlocksCleared() in decode_batch(e.payload).events]
    assert reset.t1 is not None
    assert flush.t0 is not None
    assert cleared[0].t > flush.t0 > reset.t1


def test_a_hybrid_model_has_its_full_group_last() -> None:
    """E15: three sliding-window groups and a full one, which is group 3."""
    stored = [
        event
        for recorded in captures.load("s_swa").events
        for event in decode_batch(recorded.payload).events
        if isinstance(event, BlocksStored)
    ]
    kinds = {(event.group, event.group_kind, event.sliding_window) for event in stored}
    sliding = {(group, GroupKind.SLIDING, 128) for group in range(3)}
    assert kinds == sliding | {(3, GroupKind.FULL, None)}
    assert any(not event.block_hashes and event.token_ids for event in stored)


@pytest.mark.parametrize("name", ["k_hash_sha256_int0", "k_hash_sha256_cbor_int0"])
def test_byte_hashes_stay_bytes(name: str) -> None:
    """E4: engines that report the whole digest (integer hashes switched off)."""
    events = decode_batch(captures.load(name).events[-1].payload).events
    stored = next(event for event in events if isinstance(event, BlocksStored))
    assert all(isinstance(h, bytes) and len(h) == 32 for h in stored.block_hashes)


def test_lora_blocks_carry_the_adapters_name() -> None:
    stored = [
        event
        for recorded in captures.load("g_lora").events
        for event in decode_batch(recorded.payload).events
        if isinstance(event, BlocksStored)
    ]
    assert {event.lora_name for event in stored} >= {None, "lora-a"}
    for event in stored:
        named = {keys[0] for keys in event.extra_keys or [] if keys}
        assert named == ({event.lora_name} if event.lora_name else set())


def test_removals_name_their_tier_and_group() -> None:
    removed = [
        event
        for recorded in captures.load("d_evict").events
        for event in decode_batch(recorded.payload).events
        if isinstance(event, BlocksRemoved)
    ]
    assert removed
    assert all(event.tier is Tier.GPU and event.group == 0 for event in removed)
