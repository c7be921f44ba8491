"""Engine-neutral events and ids: what a codec produces and the index consumes.

Everything here is a plain value. Which bytes on the wire become which value is the codec's
business; what a value does to an index is the indexer's.
"""

from array import array
from collections.abc import Sequence
from enum import StrEnum
from functools import partial
from typing import Any, NamedTuple, TypeAlias

import msgspec

EngineHash: TypeAlias = int | bytes
"""A block's name in the engine's own words: opaque, and only unique within one worker rank.

Integers are unsigned 64-bit (a codec maps the signed ones of old engines onto them), so that the
same block has one name in every event.
"""


class WorkerRank(NamedTuple):
    """A worker and one of its data-parallel ranks: what a request is routed to."""

    worker: str
    dp_rank: int = 0


class Tier(StrEnum):
    """Where a block is kept; from fastest to slowest."""

    GPU = "gpu"
    CPU = "cpu"
    DISK = "disk"


class GroupKind(StrEnum):
    """What a cache group's blocks say about prefixes.

    FULL: a block is there or it isn't, and the leading ones make the prefix (full, MLA and sink
    attention). SLIDING: a prefix is usable only where the group still holds its window before it.
    OPAQUE: nothing follows from these blocks (Mamba, chunked-local, cross attention, unknown).
    """

    FULL = "full"
    SLIDING = "sliding"
    OPAQUE = "opaque"


class BlocksStored(msgspec.Struct, frozen=True, gc=False):
    """Blocks that became resident, in prompt order, right behind `parent`.

    `token_ids` holds `block_size` tokens for each hash in a FULL group; decoded ones are an array
    of unsigned 32-bit numbers, which takes a seventh of a list's memory. A SLIDING group may name
    fewer hashes than its tokens would make, and then tokens and hashes do not pair up. An
    offloading tier may announce bare hashes (no tokens, block size 0). `extra_keys`, where
    present, has one entry per block: what besides tokens went into the block's hash.

    A relay has hashed the tokens already: `hashes` are the index's own block hashes, 8 bytes each,
    in place of `token_ids` and `extra_keys`.
    """

    block_hashes: list[EngineHash]
    parent: EngineHash | None = None
    token_ids: Sequence[int] = msgspec.field(default_factory=partial(array, "I"))
    block_size: int = 0
    tier: Tier = Tier.GPU
    lora_name: str | None = None
    extra_keys: list[list[Any] | None] | None = None
    group: int = 0
    group_kind: GroupKind = GroupKind.FULL
    sliding_window: int | None = None
    hashes: bytes = b""


class BlocksRemoved(msgspec.Struct, frozen=True, kw_only=True, gc=False):
    """One copy of each named block is gone from `tier` (engines announce each physical copy)."""

    block_hashes: list[EngineHash]
    tier: Tier = Tier.GPU
    group: int = 0


class BlocksCleared(msgspec.Struct, frozen=True, gc=False):
    """The rank dropped all of its blocks."""


Event: TypeAlias = BlocksStored | BlocksRemoved | BlocksCleared


class SkipCause(StrEnum):
    """Why one event of a batch could not be used."""

    UNKNOWN_TYPE = "unknown_type"
    MISSING_FIELD = "missing_field"
    BAD_FIELD = "bad_field"


class EventBatch(msgspec.Struct, frozen=True, gc=False):
    """One published message: the events of one engine step, to be applied in order.

    `ts_s` is the engine's clock (unix seconds). `dp_rank` is None where the engine does not say.
    `skipped` counts the events that had to be left out, by cause.
    """

    ts_s: float
    events: list[Event]
    dp_rank: int | None = None
    skipped: dict[SkipCause, int] = msgspec.field(default_factory=dict)
