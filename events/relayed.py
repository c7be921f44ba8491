"""What a relay publishes, and its answers: values and bytes (msgpack arrays, version 1). Pure.

A rank's batches are numbered from 0 on in each epoch of its relay. Whenever the relay has to begin
anew (it was restarted, or the engine was, or batches got lost between the two) the epoch rises,
and what was known of the rank is over.

Blocks travel as their names (the engine's, as unsigned 64-bit numbers) and their hashes, 8 bytes
each, not as tokens. That fixes how both sides hash: `rule` is the version of the hash rule, and
batches of another one cannot be used.
"""

import struct
from typing import TypeAlias

import msgspec
from msgspec import Struct, msgpack

from events.model import (
    BlocksCleared,
    BlocksRemoved,
    BlocksStored,
    Event,
    EventBatch,
    GroupKind,
    Tier,
)

HEAD_S = 0.5
"""How often a relay says how far each rank is: a lost last batch is noticed within that."""

RELAY_SILENT_S = 10 * HEAD_S
"""Without a word for so long a relay is gone: a few heads may be lost or late (a busy host, a
reconnect), ten in a row are not."""

_NAME_BYTES = 8
_TIERS = tuple(Tier)
_KINDS = tuple(GroupKind)


class MalformedRelayed(ValueError):  # noqa: N818  the name says what it is
    """Bytes that are no message of a relay."""


class _Stored(Struct, array_like=True, tag=0, gc=False):
    names: bytes
    hashes: bytes
    parent: int | None
    block_size: int
    tier: int
    group: int
    kind: int
    window: int | None


class _Removed(Struct, array_like=True, tag=1, gc=False):
    names: bytes
    tier: int
    group: int


class _Cleared(Struct, array_like=True, tag=2, gc=False): ...


_WireEvent: TypeAlias = _Stored | _Removed | _Cleared


class Batch(Struct, array_like=True, tag="batch", frozen=True, gc=False):
    """The events of one engine step. `ts_s` is the engine's clock."""

    epoch: int
    seqno: int
    ts_s: float
    events: list[_WireEvent]


class Head(Struct, array_like=True, tag="head", frozen=True, gc=False):
    """How far a rank's batches are: `next` is the seqno of the one to come.

    `stream` is how well the relay hears the engine (a `StreamState`).
    """

    epoch: int
    next: int
    stream: str
    rule: int


class StatePart(Struct, array_like=True, tag="state", frozen=True, gc=False):
    """A part of the events that make an empty index what it is before batch `next`."""

    epoch: int
    next: int
    events: list[_WireEvent]


class Answer(Struct, array_like=True, tag="answer", frozen=True, gc=False):
    """Message `number` of `total` of the answer to request `attempt`."""

    attempt: int
    number: int
    total: int
    bodies: list[Batch | StatePart | Head]


class Want(Struct, array_like=True, tag="want", frozen=True, gc=False):
    """A request for all from batch `start` of `epoch` on, or the state if that is not there."""

    attempt: int
    epoch: int
    start: int


Message: TypeAlias = Batch | Head | Answer | Want

_encoder = msgpack.Encoder()
_decoder: "msgpack.Decoder[Message]" = msgpack.Decoder(Message)


def encode(message: Message | StatePart) -> bytes:
    """The bytes of a message."""
    return _encoder.encode(message)


def decode(payload: bytes) -> Message:
    """The message in these bytes. Raises MalformedRelayed."""
    try:
        return _decoder.decode(payload)
    except (msgspec.DecodeError, ValueError, RecursionError) as error:
        raise MalformedRelayed(str(error)) from error


def to_wire(events: list[Event]) -> list[_WireEvent]:
    """Events as they travel; stored blocks must have been hashed."""
    return [_to_wire(event) for event in events]


def _to_wire(event: Event) -> _WireEvent:
    if isinstance(event, BlocksStored):
        return _Stored(
            _packed(event.block_hashes),
            event.hashes,
            event.parent if isinstance(event.parent, int) else None,
            event.block_size,
            _TIERS.index(event.tier),
            event.group,
            _KINDS.index(event.group_kind),
            event.sliding_window,
        )
    if isinstance(event, BlocksRemoved):
        return _Removed(_packed(event.block_hashes), _TIERS.index(event.tier), event.group)
    return _Cleared()


def _packed(names: list[int | bytes]) -> bytes:
    return struct.pack(f">{len(names)}Q", *names)


def to_batch(ts_s: float, wire: list[_WireEvent]) -> EventBatch:
    """The events as an index takes them. Raises MalformedRelayed."""
    try:
        return EventBatch(ts_s, [_from_wire(event) for event in wire])
    except (struct.error, IndexError) as error:
        raise MalformedRelayed(str(error)) from error


def _from_wire(wire: _WireEvent) -> Event:
    if isinstance(wire, _Stored):
        return BlocksStored(
            block_hashes=_names(wire.names),
            parent=wire.parent,
            block_size=wire.block_size,
            tier=_TIERS[wire.tier],
            group=wire.group,
            group_kind=_KINDS[wire.kind],
            sliding_window=wire.window,
            hashes=wire.hashes,
        )
    if isinstance(wire, _Removed):
        tier = _TIERS[wire.tier]
        return BlocksRemoved(block_hashes=_names(wire.names), tier=tier, group=wire.group)
    return BlocksCleared()


def _names(packed: bytes) -> list[int | bytes]:
    return [*struct.unpack(f">{len(packed) // _NAME_BYTES}Q", packed)]
