"""vLLM's wire format: msgpack `[ts, events, dp_rank]`, where an event has one of two shapes.

Since 0.24 an event is a map with its name under "type", from which optional fields may be absent;
before, it was an array with the name first, which each release made longer. The structs below say
both at once: fields in the array's order, with the map's names.

Decoding takes the whole payload in one typed pass, first as maps, then as arrays. Only when both
fail (a mixed batch, a negative hash, an event that cannot be used) is each event decoded by itself:
slower, but one bad event never costs its neighbours.

Fields that say nothing about residency (`locality`, `ownership`, `session_id`, ...) are ignored.
"""

from array import array
from collections.abc import Callable, Mapping
from functools import lru_cache
from typing import Annotated, Any, Literal, TypeAlias

import msgspec
from msgspec import Meta, Raw, Struct, msgpack

from events.model import (
    BlocksCleared,
    BlocksRemoved,
    BlocksStored,
    Event,
    EventBatch,
    GroupKind,
    SkipCause,
    Tier,
)


class MalformedBatch(ValueError):  # noqa: N818  the public name says what it is
    """The payload as a whole is not a batch: not msgpack, or not `[ts, events, ...]`."""


# ---------------------------------------------------------------------------------------------
# What stands on the wire

_Unsigned: TypeAlias = Annotated[int, Meta(ge=0)]
_Hash: TypeAlias = _Unsigned | bytes
_ExtraKeys: TypeAlias = list[list[Any] | None]


class _StoredFields(Struct, gc=False):
    block_hashes: list[_Hash]
    parent_block_hash: _Hash | None
    token_ids: list[int]  # bounds are checked by what takes them out of here, at less cost
    block_size: _Unsigned
    lora_id: int | None = None
    medium: str | None = None
    lora_name: str | None = None
    extra_keys: _ExtraKeys | None = None
    group_idx: _Unsigned | None = None
    kv_cache_spec_kind: str | None = None
    kv_cache_spec_sliding_window: _Unsigned | None = None


class _RemovedFields(Struct, gc=False):
    block_hashes: list[_Hash]
    medium: str | None = None
    group_idx: _Unsigned | None = None


class _StoredMap(_StoredFields, tag_field="type", tag="BlockStored", gc=False): ...


class _RemovedMap(_RemovedFields, tag_field="type", tag="BlockRemoved", gc=False): ...


class _ClearedMap(Struct, tag_field="type", tag="AllBlocksCleared", gc=False): ...


class _StoredArray(_StoredFields, array_like=True, tag="BlockStored", gc=False): ...


class _RemovedArray(_RemovedFields, array_like=True, tag="BlockRemoved", gc=False): ...


class _ClearedArray(Struct, array_like=True, tag="AllBlocksCleared", gc=False): ...


_MapEvent: TypeAlias = _StoredMap | _RemovedMap | _ClearedMap
_ArrayEvent: TypeAlias = _StoredArray | _RemovedArray | _ClearedArray


class _MapBatch(Struct, array_like=True, gc=False):
    ts: float
    events: list[_MapEvent]
    dp_rank: _Unsigned | None = None


class _ArrayBatch(Struct, array_like=True, gc=False):
    ts: float
    events: list[_ArrayEvent]
    dp_rank: _Unsigned | None = None


class _RawBatch(Struct, array_like=True, gc=False):
    ts: float
    events: list[Raw]
    dp_rank: Any = None


_map_batch = msgpack.Decoder(_MapBatch)
_array_batch = msgpack.Decoder(_ArrayBatch)
_raw_batch = msgpack.Decoder(_RawBatch)
_anything = msgpack.Decoder()

_FIELDS: dict[str, tuple[str, ...]] = {
    "BlockStored": _StoredFields.__struct_fields__,
    "BlockRemoved": _RemovedFields.__struct_fields__,
    "AllBlocksCleared": (),
}
_REQUIRED: dict[str, tuple[str, ...]] = {
    "BlockStored": ("block_hashes", "parent_block_hash", "token_ids", "block_size"),
    "BlockRemoved": ("block_hashes",),
    "AllBlocksCleared": (),
}
_TIERS: dict[str | None, Tier] = {
    None: Tier.GPU,  # before 0.10.2 there was no other
    "GPU": Tier.GPU,
    "CPU": Tier.CPU,
    "cpu": Tier.CPU,
    "STORAGE": Tier.DISK,
}
_KINDS: dict[str | None, GroupKind] = {
    "full_attention": GroupKind.FULL,
    "mla_attention": GroupKind.FULL,
    "sink_full_attention": GroupKind.FULL,
    "sliding_window": GroupKind.SLIDING,
    "sliding_window_mla": GroupKind.SLIDING,
}
_CLEARED = BlocksCleared()

# What msgspec raises for bytes that are not what was asked for: its own errors, and
# UnicodeDecodeError (a ValueError) for a broken string, RecursionError for endless nesting,
# TypeError for a map as the key of a map.
_NOT_AS_ASKED = (msgspec.DecodeError, ValueError, RecursionError, TypeError)


class _UnusableEventError(Exception):
    """One event cannot be used; `cause` says why."""

    def __init__(self, cause: SkipCause) -> None:
        super().__init__(cause)
        self.cause = cause


# ---------------------------------------------------------------------------------------------
# Decoding


def decode_batch(payload: bytes) -> EventBatch:
    """The batch in `payload`; events that cannot be used are left out and counted in `skipped`.

    Raises `MalformedBatch` when there is no batch at all.
    """
    try:
        return _typed(_map_batch.decode(payload))
    except (*_NOT_AS_ASKED, _UnusableEventError):
        pass
    try:
        return _typed(_array_batch.decode(payload))
    except (*_NOT_AS_ASKED, _UnusableEventError):
        return _event_by_event(payload)


def _typed(wire: _MapBatch | _ArrayBatch) -> EventBatch:
    return EventBatch(
        wire.ts, [_EVENT_OF[type(event)](event) for event in wire.events], wire.dp_rank
    )


def _event_by_event(payload: bytes) -> EventBatch:
    try:
        wire = _raw_batch.decode(payload)
    except _NOT_AS_ASKED as error:
        raise MalformedBatch(f"not a batch of events: {error}") from error
    events: list[Event] = []
    skipped: dict[SkipCause, int] = {}
    for raw in wire.events:
        try:
            wire_event = _loosely(raw)
            events.append(_EVENT_OF[type(wire_event)](wire_event))
        except _UnusableEventError as error:
            skipped[error.cause] = skipped.get(error.cause, 0) + 1
    return EventBatch(wire.ts, events, _rank(wire.dp_rank), skipped)


def _rank(dp_rank: object) -> int | None:
    return dp_rank if type(dp_rank) is int and dp_rank >= 0 else None


def _loosely(raw: Raw) -> _MapEvent:
    """One event of either shape, its hashes made unsigned."""
    try:
        fields = _by_name(_anything.decode(raw))
    except _NOT_AS_ASKED as error:
        raise _UnusableEventError(SkipCause.BAD_FIELD) from error
    required = _REQUIRED.get(fields["type"])
    if required is None:
        raise _UnusableEventError(SkipCause.UNKNOWN_TYPE)
    if not fields.keys() >= set(required):
        raise _UnusableEventError(SkipCause.MISSING_FIELD)
    try:
        converted: _MapEvent = msgspec.convert(_unsigned(fields), _MapEvent)
    except _NOT_AS_ASKED as error:
        raise _UnusableEventError(SkipCause.BAD_FIELD) from error
    return converted


def _by_name(event: Any) -> dict[str, Any]:
    """The event in map form; its "type" is always there, and empty when it has none."""
    if isinstance(event, dict):
        tag = event.get("type")
        return event | {"type": tag if isinstance(tag, str) else ""}
    if not (isinstance(event, list) and event and isinstance(event[0], str)):
        return {"type": ""}
    return {"type": event[0], **dict(zip(_FIELDS.get(event[0], ()), event[1:], strict=False))}


def _unsigned(fields: dict[str, Any]) -> dict[str, Any]:
    """Give the signed hashes of engines before 0.10.2 the name that an unsigned one would have."""
    changed = dict(fields)
    if isinstance(fields.get("block_hashes"), list):
        changed["block_hashes"] = [_wrap(value) for value in fields["block_hashes"]]
    if "parent_block_hash" in fields:
        changed["parent_block_hash"] = _wrap(fields["parent_block_hash"])
    return changed


def _wrap(value: Any) -> Any:
    return value + 2**64 if type(value) is int and value < 0 else value


def _cleared(_wire: Any) -> BlocksCleared:
    return _CLEARED


def _removed(wire: Any) -> BlocksRemoved:
    tier = _TIERS.get(wire.medium)
    if tier is None:
        raise _UnusableEventError(SkipCause.BAD_FIELD)
    return BlocksRemoved(block_hashes=wire.block_hashes, tier=tier, group=wire.group_idx or 0)


def _stored(wire: Any) -> BlocksStored:
    window = wire.kv_cache_spec_sliding_window
    tier, group, kind = _cache_of(wire.medium, wire.group_idx, wire.kv_cache_spec_kind, window)
    token_ids = array("I")
    try:
        token_ids.fromlist(wire.token_ids)  # at three quarters of what the class itself takes
    except OverflowError as error:
        raise _UnusableEventError(SkipCause.BAD_FIELD) from error
    return BlocksStored(  # by position: names cost a quarter more, in each of the commonest events
        wire.block_hashes,
        wire.parent_block_hash,
        token_ids,
        wire.block_size,
        tier,
        wire.lora_name if wire.lora_id is None else _lora_name(wire),
        wire.extra_keys,
        group,
        kind,
        window,
    )


# By the shape's own class: a step less than asking an event what it is.
_EVENT_OF: dict[type, Callable[[Any], Event]] = {
    _StoredMap: _stored,
    _StoredArray: _stored,
    _RemovedMap: _removed,
    _RemovedArray: _removed,
    _ClearedMap: _cleared,
    _ClearedArray: _cleared,
}


@lru_cache(maxsize=1024)  # an engine has a handful, and repeats them in each event
def _cache_of(
    medium: str | None, group_idx: int | None, kind: str | None, window: int | None
) -> tuple[Tier, int, GroupKind]:
    """The cache that an event speaks of: where it is, its group's number, and what that means."""
    tier = _TIERS.get(medium)
    if tier is None:
        # A guess could delete or claim GPU blocks.
        raise _UnusableEventError(SkipCause.BAD_FIELD)
    return tier, group_idx or 0, _group_kind(group_idx, kind, window)


def _lora_name(wire: _StoredFields) -> str:
    """The adapter's name; before 0.14 there is only a number, which no request can name.

    Such blocks then match nobody, which is better than matching requests for the base model.
    """
    return f"#lora_id={wire.lora_id}" if wire.lora_name is None else wire.lora_name


def _group_kind(group_idx: int | None, kind: str | None, window: int | None) -> GroupKind:
    """What the group's blocks say; a window of unknown length says nothing.

    Before 0.22 engines don't name the kind: then group 0 is taken for the one full group that
    all but hybrid models have.
    """
    if kind is None:
        return GroupKind.OPAQUE if group_idx else GroupKind.FULL
    known = _KINDS.get(kind, GroupKind.OPAQUE)
    if known is GroupKind.SLIDING and not window:
        return GroupKind.OPAQUE
    return known


# ---------------------------------------------------------------------------------------------
# Encoding: the engine's side

_MEDIA = {Tier.GPU: "GPU", Tier.CPU: "CPU", Tier.DISK: "STORAGE"}
_SPEC_KINDS = {
    GroupKind.FULL: "full_attention",
    GroupKind.SLIDING: "sliding_window",
    GroupKind.OPAQUE: "mamba",
}


def encode_batch(
    batch: EventBatch,
    *,
    shape: Literal["map", "array"] = "map",
    lora_ids: Mapping[str, int] | None = None,
    session_ids: Mapping[int, str] | None = None,
) -> bytes:
    """What an engine publishes for `batch`: 0.32's bytes for "map", 0.23's for "array".

    `lora_ids` has the engine's number of each LoRA name in the batch. `session_ids` has the
    session of the request behind an event, by the event's position (maps only). An absent
    `dp_rank` goes out as nil.
    """
    lora_ids, session_ids = lora_ids or {}, session_ids or {}
    events: list[object] = []
    for position, event in enumerate(batch.events):
        fields = _wire_fields(event, lora_ids)
        if shape == "array":
            events.append(list(fields.values()))
        else:
            events.append(_map_form(fields, session_ids.get(position)))
    return msgpack.encode([batch.ts_s, events, batch.dp_rank])


def _wire_fields(event: Event, lora_ids: Mapping[str, int]) -> dict[str, Any]:
    """All fields in the wire's order; the array form has each of them, nil or not."""
    if isinstance(event, BlocksCleared):
        return {"type": "AllBlocksCleared"}
    if isinstance(event, BlocksRemoved):
        return {
            "type": "BlockRemoved",
            "block_hashes": event.block_hashes,
            "medium": _MEDIA[event.tier],
            "group_idx": event.group,
        }
    return {
        "type": "BlockStored",
        "block_hashes": event.block_hashes,
        "parent_block_hash": event.parent,
        "token_ids": list(event.token_ids),
        "block_size": event.block_size,
        "lora_id": lora_ids.get(event.lora_name) if event.lora_name is not None else None,
        "medium": _MEDIA[event.tier],
        "lora_name": event.lora_name,
        "extra_keys": event.extra_keys,
        "group_idx": event.group,
        "kv_cache_spec_kind": _SPEC_KINDS[event.group_kind],
        "kv_cache_spec_sliding_window": event.sliding_window,
    }


_OMITTED_WHEN_NIL = ("extra_keys", "kv_cache_spec_sliding_window")


def _map_form(fields: dict[str, Any], session_id: str | None) -> dict[str, Any]:
    for name in _OMITTED_WHEN_NIL:
        if name in fields and fields[name] is None:
            del fields[name]
    if session_id is not None:
        fields["session_id"] = session_id
    return fields
