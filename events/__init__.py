"""KV-cache events of inference engines: what they mean, how they travel, how none gets lost."""

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

__all__ = [
    "BlocksCleared",
    "BlocksRemoved",
    "BlocksStored",
    "EngineHash",
    "Event",
    "EventBatch",
    "GroupKind",
    "SkipCause",
    "Tier",
    "WorkerRank",
]
