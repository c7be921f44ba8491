"""KV-cache events of inference engines: what they mean, how they travel, how none gets lost."""

from events.codec import MalformedBatch, decode_batch, encode_batch
from events.model import (
    BlocksCleared,
    BlocksRemoved,
    BlocksStored,
    EngineHash,
    Event,
    EventBatch,
    GroupKind,
    SkipCause,
    Tier,
    WorkerRank,
)
from events.stream import ResyncReason, StreamState, StreamStats

__all__ = [
    "BlocksCleared",
    "BlocksRemoved",
    "BlocksStored",
    "EngineHash",
    "Event",
    "EventBatch",
    "GroupKind",
    "MalformedBatch",
    "ResyncReason",
    "SkipCause",
    "StreamState",
    "StreamStats",
    "Tier",
    "WorkerRank",
    "decode_batch",
    "encode_batch",
]
