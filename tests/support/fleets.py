"""Fleets without any network, for tests of what is decided about workers."""

import random

from events import WorkerRank
from events.stream import StreamStats
from indexer import PredictedBlocks, RadixIndex
from kvrouter.config import BreakerConfig, PolicyConfig, PredictionConfig, WorkerConfig
from kvrouter.fleet import Fleet
from kvrouter.load import Load
from kvrouter.policy import build_policy
from kvrouter.pool import Pool
from kvrouter.scheduler import Scheduler
from kvrouter.workers import ServedModel, WorkerEvent, WorkerFacts

BASE = WorkerFacts(models=(ServedModel("m"), ServedModel("lora-a", parent="m")), block_size=4)
OTHER = WorkerFacts(models=(ServedModel("n"),), block_size=4)


class FakeSource:
    """A source that counts what it is asked for."""

    def __init__(self) -> None:
        self.stats = StreamStats()
        self.absence = "no connection"
        self.warning = ""
        self.expected = 0
        self.resyncs = 0

    @property
    def place(self) -> dict[str, str | None]:
        return {"endpoint": "tcp://h:1", "replay_endpoint": None}

    def position(self) -> None: ...

    def expect_blocks(self, now: float) -> None:
        self.expected += now > 0

    def request_resync(self) -> None:
        self.resyncs += 1


def new_fleet() -> Fleet:
    load = Load()

    def make_pool(model: str) -> Pool:
        index, predicted = RadixIndex(), PredictedBlocks()
        scheduler = Scheduler(
            index,
            predicted,
            load,
            build_policy(PolicyConfig()),
            random.Random(1),
            said_block_size=lambda _: 4,
        )
        return Pool(model, index, predicted, scheduler)

    return Fleet(load, make_pool, breaker=BreakerConfig(), prediction=PredictionConfig())


def join(fleet: Fleet, name: str, facts: WorkerFacts = BASE) -> WorkerRank:
    worker = fleet.workers.get(name) or fleet.add(WorkerConfig(url=f"http://{name}:1", name=name))
    fleet.joined(worker, facts)
    worker.happened(WorkerEvent.JOINED)
    return worker.ranks[0]
