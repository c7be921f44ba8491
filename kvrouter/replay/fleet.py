"""A fleet in virtual time: routers place the trace's requests on simulated engines.

Only engines and time are simulated. Scheduler, load accounting, index and predictions are the
ones that serve real traffic; a router hears of an engine what a real one would, no earlier.

At one instant, things happen in this order: steps end, news arrive (events, what another router
did), requests arrive, steps begin. So a step sees all requests that came before it began.
"""

import heapq
import itertools
import math
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from enum import IntEnum
from functools import partial
from random import Random

from events import EventBatch, WorkerRank
from events.replica import Added, Dropped, Grown, Ledger, Mirror, Ops, Prefilled
from indexer import PredictedBlocks, RadixIndex
from kvrouter.joint_predictions import Expectations, JointPredictions, expect_sampled
from kvrouter.load import Lease, Load, Outcome
from kvrouter.policy import Policy
from kvrouter.prompt import Prompt
from kvrouter.replay.engine import VirtualEngine
from kvrouter.replay.result import Result, spread
from kvrouter.replay.trace import Trace
from kvrouter.scheduler import PREDICTION_TTL_S, Placement, Scheduler
from kvrouter.shared_load import SharedLoad
from kvrouter.sim.engine import EngineRequest, Output
from kvrouter.sim.settings import CoreSettings
from kvrouter.sim.timing import PolynomialTiming, TimingModel

Progress = Callable[[int], None]
"""Is told how many requests have arrived."""


@dataclass(frozen=True, kw_only=True)
class FleetSettings:
    """The fleet that a trace is sent to.

    `speed` divides the time between arrivals. `event_lag_s` is how long a router does not know what
    a step stored or evicted. Of `routers` each request takes one by chance; what they tell each
    other of their bookings arrives after `sync_s`, or never if that is None. `slow` multiplies the
    durations of a worker's steps, by its number.
    """

    workers: int = 8
    core: CoreSettings = field(default_factory=CoreSettings)
    timing: TimingModel = field(default_factory=PolynomialTiming)
    speed: float = 1.0
    event_lag_s: float = 0.002
    routers: int = 1
    sync_s: float | None = 0.01
    slow: Mapping[int, float] = field(default_factory=dict)
    seed: int = 0


class _Phase(IntEnum):
    STEP_ENDS = 0
    NEWS = 1
    ARRIVAL = 2
    STEP_BEGINS = 3


class _Router:
    """What one router process knows. One that shares tells and hears as in production."""

    def __init__(
        self, name: str, index: RadixIndex, policy: Policy, settings: FleetSettings, rng: Random
    ) -> None:
        self.ledger = Ledger(name, 1)
        self.predicted: Expectations = PredictedBlocks()
        self._mirror = Mirror(name, 1, Random(0))
        self._of_others = PredictedBlocks()
        load = Load()
        self._shared = SharedLoad(load, self.ledger)
        shares = settings.routers > 1 and settings.sync_s is not None
        if shares:
            load.journal = self._shared
            self.predicted = JointPredictions(PredictedBlocks(), self._of_others)
        block_size = settings.core.block_size
        self.scheduler = Scheduler(
            index,
            self.predicted,
            self._shared if shares else load,
            policy,
            rng,
            said_block_size=lambda _: block_size,
        )

    def hear(self, news: Ops, now: float) -> None:
        """Another router tells what it did."""
        shared = self._shared
        for command in self._mirror.hear(news, now):
            if isinstance(command, Added):
                shared.add(command.key, command.booking, now)
                self._of_others.expire(now)
                expect_sampled(self._of_others, command.booking, now=now, ttl_s=PREDICTION_TTL_S)
            elif isinstance(command, Prefilled):
                shared.prefilled(command.key, now)
            elif isinstance(command, Grown):
                shared.grow(command.key, command.own_blocks)
            elif isinstance(command, Dropped):
                shared.drop(command.key, now)


class _Job:
    """One request on its way."""

    __slots__ = (
        "arrived_at",
        "cached_tokens",
        "done_at",
        "first_token_at",
        "lease",
        "output_tokens",
        "prompt_tokens",
    )

    def __init__(
        self, arrived_at: float, prompt_tokens: int, output_tokens: int, lease: Lease
    ) -> None:
        self.arrived_at = arrived_at
        self.prompt_tokens = prompt_tokens
        self.output_tokens = output_tokens
        self.lease = lease
        self.cached_tokens = 0
        self.first_token_at = math.nan
        self.done_at = math.nan


def replay(
    trace: Trace, policy: Policy, settings: FleetSettings, progress: Progress | None = None
) -> Result:
    """Run a trace to its end. The result depends on nothing but the arguments."""
    fleet = _Fleet(trace, policy, settings, progress or (lambda _: None))
    fleet.run()
    return fleet.result()


class _Fleet:
    def __init__(
        self, trace: Trace, policy: Policy, settings: FleetSettings, progress: Progress
    ) -> None:
        self._trace = trace
        self._policy = policy
        self._settings = settings
        self._progress = progress
        self._rng = Random(settings.seed)
        self._index = RadixIndex()
        self._routers = [
            _Router(f"r{number}", self._index, policy, settings, Random(self._rng.random()))
            for number in range(settings.routers)
        ]
        self._engines = {
            WorkerRank(f"w{number}"): VirtualEngine(
                settings.core, settings.timing, slow_factor=settings.slow.get(number, 1.0)
            )
            for number in range(settings.workers)
        }
        self._ranks = list(self._engines)
        for rank in self._ranks:
            self._index.set_capacity(rank, settings.core.num_blocks - 1)
        self._jobs: dict[str, _Job] = {}
        self._best_holder_tokens = 0
        self._decision_s = 0.0
        self._agenda: list[tuple[float, int, int, Callable[[float], None]]] = []
        self._order = itertools.count()

    def run(self) -> None:
        """From the first arrival to the last token."""
        self._await_arrival(0)
        agenda = self._agenda
        while agenda:
            now, _, _, action = heapq.heappop(agenda)
            action(now)
            self._tell_routers(now)

    def _at(self, time_s: float, phase: _Phase, action: Callable[[float], None]) -> None:
        heapq.heappush(self._agenda, (time_s, phase, next(self._order), action))

    # Requests arrive.

    def _await_arrival(self, number: int) -> None:
        if number < len(self._trace):
            at_s = self._trace.requests[number].at_s / self._settings.speed
            self._at(at_s, _Phase.ARRIVAL, lambda now: self._arrive(number, now))

    def _arrive(self, number: int, now: float) -> None:
        self._await_arrival(number + 1)
        self._progress(number)
        for engine in self._engines.values():
            self._hear_outputs(engine, now)
        request = self._trace.requests[number]
        tokens = self._trace.prompt(number)
        prompt = Prompt(tokens)
        prompt.prehash([self._settings.core.block_size])
        place = self._choose_router(len(self._routers))
        placement = self._place(self._routers[place], prompt, now)
        job = _Job(now, request.prompt_tokens, request.output_tokens, placement.lease)
        self._jobs[str(number)] = job
        rank = placement.decision.winner
        engine = self._engines[rank]
        output = self._trace.output(number)
        engine.add(EngineRequest(request_id=str(number), prompt=tokens, outputs=output), now)
        self._schedule(rank, engine, now)

    def _choose_router(self, routers: int) -> int:
        return self._rng.randrange(routers) if routers > 1 else 0

    def _place(self, router: _Router, prompt: Prompt, now: float) -> Placement:
        started = time.process_time()
        placement = router.scheduler.place(prompt, self._ranks, now)
        self._decision_s += time.process_time() - started
        best = max(overlap.total for overlap in placement.decision.candidates.overlaps)
        self._best_holder_tokens += best * self._settings.core.block_size
        return placement

    # Engines step.

    def _schedule(self, rank: WorkerRank, engine: VirtualEngine, now: float) -> None:
        """See to it that the engine goes on when what is under way has ended, or now."""
        due_s = engine.due_s
        if due_s is None:
            self._at(now, _Phase.STEP_BEGINS, lambda now: self._begin(rank, engine, now))
        else:
            self._at(due_s, _Phase.STEP_ENDS, lambda now: self._end(rank, engine, now))

    def _begin(self, rank: WorkerRank, engine: VirtualEngine, now: float) -> None:
        if engine.due_s is None:
            engine.begin(now)
            if not engine.core.idle:
                self._schedule(rank, engine, now)

    def _end(self, rank: WorkerRank, engine: VirtualEngine, now: float) -> None:
        if engine.due_s != now:
            return  # cut short, or ended by another call for the same instant
        self._hear_outputs(engine, now)
        result = engine.end()
        for output in result.outputs:
            self._hear(output, now)
        if result.events:
            batch = EventBatch(now, result.events)
            at_s = now + self._settings.event_lag_s
            self._at(at_s, _Phase.NEWS, lambda _: self._apply(rank, batch))
        self._schedule(rank, engine, now)

    def _apply(self, rank: WorkerRank, batch: EventBatch) -> None:
        """All routers hear the same events at the same time, so they share one index."""
        applied = self._index.apply(rank, batch)
        if applied.stored:
            for router in self._routers:
                router.predicted.confirm(rank, applied.stored)

    # Routers see outputs.

    def _hear_outputs(self, engine: VirtualEngine, now: float) -> None:
        tokens, request_ids = engine.outputs(now)
        if tokens:
            for request_id in request_ids:
                self._jobs[request_id].lease.add_output_tokens(tokens, now)

    def _hear(self, output: Output, now: float) -> None:
        job = self._jobs[output.request_id]
        job.lease.add_output_tokens(1, now)
        if not output.position:
            job.first_token_at = now
            job.cached_tokens = output.cached_tokens
        if output.finished:
            job.done_at = now
            job.lease.settle(Outcome.OK, now)

    # Routers tell each other.

    def _tell_routers(self, now: float) -> None:
        """What happened at each router is on its way to all others."""
        sync_s = self._settings.sync_s
        for router in self._routers:
            if not router.ledger.has_news:
                continue
            news = router.ledger.flush()
            if sync_s is not None:
                deliver = partial(self._deliver, router, news)
                self._at(now + sync_s, _Phase.NEWS, deliver)

    def _deliver(self, sender: _Router, news: list[Ops], now: float) -> None:
        for router in self._routers:
            if router is not sender:
                for ops in news:
                    router.hear(ops, now)

    def result(self) -> Result:
        """The figures of the whole run."""
        jobs = list(self._jobs.values())
        prompt_tokens = sum(job.prompt_tokens for job in jobs)
        by_rank = dict.fromkeys(self._ranks, 0)
        for job in jobs:
            by_rank[job.lease.rank] += 1
        return Result(
            policy=self._policy.name,
            workers=self._settings.workers,
            requests=len(jobs),
            reuse=sum(job.cached_tokens for job in jobs) / prompt_tokens,
            best_holder_reuse=self._best_holder_tokens / prompt_tokens,
            pooled_bound=None,
            ttft_ms=spread([job.first_token_at - job.arrived_at for job in jobs]),
            itl_ms=spread(
                [
                    (job.done_at - job.first_token_at) / (job.output_tokens - 1)
                    for job in jobs
                    if job.output_tokens > 1
                ]
            ),
            e2e_ms=spread([job.done_at - job.arrived_at for job in jobs]),
            span_s=max(job.done_at for job in jobs) - min(job.arrived_at for job in jobs),
            shares=list(by_rank.values()),
            preempted=sum(engine.core.counters.preempted for engine in self._engines.values()),
            routers=self._settings.routers,
            decisions_per_s=round(len(jobs) / self._decision_s) if self._decision_s else 0,
        )
