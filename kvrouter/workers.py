"""One worker: its life cycle, as a table, and what is known of it. Pure.

    JOINING      its models, ranks and event endpoints are being learned
    READY        it gets requests
    UNREACHABLE  its probes fail; it gets none
    DRAINING     an operator took it out; running requests finish

A worker that comes back is learned anew: behind the same address there may be another engine,
with other models, another block size and an empty cache.
"""

from dataclasses import dataclass, field
from enum import StrEnum

from events import WorkerRank
from kvrouter.breaker import Breaker
from kvrouter.config import BreakerConfig, RankEvents, WorkerConfig, worker_name
from kvrouter.doubt import Doubt


class WorkerState(StrEnum):
    """Where a worker is in its life."""

    JOINING = "joining"
    READY = "ready"
    UNREACHABLE = "unreachable"
    DRAINING = "draining"


class WorkerEvent(StrEnum):
    """What may happen to a worker."""

    JOINED = "joined"
    PROBES_FAILED = "probes_failed"
    PROBE_OK = "probe_ok"
    DRAIN = "drain"
    RESUME = "resume"


_NEXT = {
    (WorkerState.JOINING, WorkerEvent.JOINED): WorkerState.READY,
    (WorkerState.JOINING, WorkerEvent.PROBES_FAILED): WorkerState.UNREACHABLE,
    (WorkerState.READY, WorkerEvent.PROBES_FAILED): WorkerState.UNREACHABLE,
    (WorkerState.UNREACHABLE, WorkerEvent.PROBE_OK): WorkerState.JOINING,
    (WorkerState.DRAINING, WorkerEvent.RESUME): WorkerState.JOINING,
    (WorkerState.JOINING, WorkerEvent.DRAIN): WorkerState.DRAINING,
    (WorkerState.READY, WorkerEvent.DRAIN): WorkerState.DRAINING,
    (WorkerState.UNREACHABLE, WorkerEvent.DRAIN): WorkerState.DRAINING,
}
"""Pairs that are not here change nothing: a late probe or a second drain is no error."""


@dataclass(slots=True, frozen=True)
class ServedModel:
    """One entry of the engine's /v1/models.

    `parent` names the base model of a LoRA adapter and is None for a base model; `root` is the
    folder or hub id that it was loaded from.
    """

    id: str
    root: str | None = None
    parent: str | None = None
    max_model_len: int | None = None


@dataclass(slots=True, frozen=True)
class WorkerFacts:
    """What a worker said of itself when it joined.

    `events` has one entry per data-parallel rank, None where the rank publishes no KV events;
    `notes` says in words what is missing and what to do about it.
    """

    models: tuple[ServedModel, ...] = ()
    events: dict[int, RankEvents | None] = field(default_factory=lambda: {0: None})
    block_size: int | None = None
    capacity_blocks: int | None = None
    """Usable blocks of each rank."""
    notes: tuple[str, ...] = ()

    @property
    def base_model(self) -> str | None:
        """The first base model: what the worker's blocks belong to."""
        return next((model.id for model in self.models if model.parent is None), None)

    def lora_of(self, model: str) -> str | None:
        """The LoRA name that `model` stands for, None for a base model."""
        entry = next((entry for entry in self.models if entry.id == model), None)
        return None if entry is None or entry.parent is None else entry.id


class Worker:
    """One engine process, as the router sees it."""

    def __init__(self, config: WorkerConfig, breaker: BreakerConfig) -> None:
        self.config = config
        self.name = worker_name(config)
        self.url = config.url.rstrip("/")
        self.breaker = Breaker(breaker)
        self.state = WorkerState.JOINING
        self.problem = ""
        """Why it is not ready, in words."""
        self.ranks: tuple[WorkerRank, ...] = ()
        """What requests can be routed to on this worker."""
        self.names: dict[str, str | None] = {}
        """The models that it lists, each with the LoRA name that it stands for."""
        self.facts = WorkerFacts()
        self.told: WorkerFacts | None = None
        """What its relay says of it, for what cannot be had from itself."""
        self.doubt = Doubt()
        """Whether another engine answers at its address by now."""

    def happened(self, event: WorkerEvent) -> bool:
        """Move along the table; True if the state changed."""
        before = self.state
        self.state = _NEXT.get((before, event), before)
        return self.state is not before

    @property
    def facts(self) -> WorkerFacts:
        """What it said of itself."""
        return self._facts

    @facts.setter
    def facts(self, facts: WorkerFacts) -> None:
        self._facts = facts
        self.ranks = tuple(WorkerRank(self.name, dp_rank) for dp_rank in sorted(facts.events))
        self.names = {model.id: facts.lora_of(model.id) for model in facts.models}

    def serves(self, model: str) -> bool:
        """Whether the worker lists this model or adapter."""
        return model in self.names

    def __repr__(self) -> str:
        return f"<Worker {self.name} {self.state} breaker {self.breaker.state}>"
