"""The decoder against everything that is not what it expects."""

from array import array
from functools import partial
from typing import Any

from hypothesis import given
from hypothesis import strategies as st
from msgspec import msgpack

from events import (
    BlocksCleared,
    BlocksRemoved,
    BlocksStored,
    Event,
    EventBatch,
    GroupKind,
    MalformedBatch,
    Tier,
    decode_batch,
    encode_batch,
)

hashes = st.one_of(st.integers(0, 2**64 - 1), st.binary(min_size=16, max_size=32))
tokens = st.lists(st.integers(0, 2**32 - 1), max_size=20).map(partial(array, "I"))
extra = st.lists(st.none() | st.lists(st.text(max_size=5), min_size=1, max_size=2), max_size=4)
stored = st.builds(
    BlocksStored,
    block_hashes=st.lists(hashes, max_size=5),
    parent=st.none() | hashes,
    token_ids=tokens,
    block_size=st.integers(0, 4096),
    tier=st.sampled_from(Tier),
    lora_name=st.none() | st.text(max_size=8),
    extra_keys=st.none() | extra,
    group=st.integers(0, 5),
    group_kind=st.sampled_from([GroupKind.FULL, GroupKind.OPAQUE]),
)
removed = st.builds(
    BlocksRemoved,
    block_hashes=st.lists(hashes, max_size=5),
    tier=st.sampled_from(Tier),
    group=st.integers(0, 5),
)
events: st.SearchStrategy[Event] = st.one_of(stored, removed, st.builds(BlocksCleared))
batches = st.builds(
    EventBatch,
    st.floats(0, 1e10),
    st.lists(events, max_size=6),
    st.none() | st.integers(0, 300),
)

scalars = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(-(2**63), 2**64 - 1),
    st.floats(),
    st.text(max_size=6),
    st.binary(max_size=6),
    st.sampled_from(["type", "BlockStored", "BlockRemoved", "AllBlocksCleared", "block_hashes"]),
)
foreign = st.recursive(
    scalars,
    lambda inner: st.one_of(st.lists(inner, max_size=5), st.dictionaries(scalars, inner)),
    max_leaves=15,
)


def batch_or_refusal(payload: bytes) -> EventBatch | None:
    try:
        return decode_batch(payload)
    except MalformedBatch:
        return None


@given(batches)
def test_every_batch_survives_both_shapes(batch: EventBatch) -> None:
    assert decode_batch(encode_batch(batch)) == batch
    assert decode_batch(encode_batch(batch, shape="array")) == batch


@given(st.binary(max_size=200))
def test_noise_is_refused_or_read_but_never_anything_else(noise: bytes) -> None:
    """E3"""
    batch_or_refusal(noise)


@given(foreign)
def test_foreign_msgpack_is_refused_or_read(value: Any) -> None:
    """E3"""
    batch_or_refusal(msgpack.encode(value))


@given(batches, st.data())
def test_a_damaged_batch_is_refused_or_read(batch: EventBatch, data: st.DataObject) -> None:
    """E3: bits that flip, messages that end early."""
    payload = bytearray(encode_batch(batch))
    position = data.draw(st.integers(0, len(payload) - 1))
    payload[position] = data.draw(st.integers(0, 255))
    batch_or_refusal(bytes(payload[: data.draw(st.integers(0, len(payload)))]))
    batch_or_refusal(bytes(payload))


@given(st.lists(st.tuples(events, st.none() | foreign), max_size=5))
def test_foreign_events_never_cost_their_neighbours(pairs: list[tuple[Event, Any]]) -> None:
    """E2"""
    wire: list[Any] = []
    for event, intruder in pairs:
        wire += msgpack.decode(encode_batch(EventBatch(0.0, [event])))[1]
        if intruder is not None:
            wire.append(intruder)
    batch = decode_batch(msgpack.encode([0.0, wire, 0]))
    good = iter(batch.events)
    assert all(any(event == ours for event in good) for ours, _ in pairs)
    assert len(batch.events) + sum(batch.skipped.values()) == len(wire)
