"""Keeping one worker: joining it, listening to its events, probing its health.

The only requests that the router sends of its own: what a worker says of itself when it joins or
may be another, and `GET /health` every few seconds. Load is never asked for.
"""

import asyncio
import logging
import random
import time
from dataclasses import replace

import aiohttp

from kvrouter.config import HealthConfig
from kvrouter.fleet import Fleet
from kvrouter.http.engine import lacks_descriptors
from kvrouter.joining import ANSWERS_S, JoinError, Learned, completed, learn, reason
from kvrouter.listening import Listeners
from kvrouter.worker_url import http_base
from kvrouter.workers import Worker, WorkerEvent, WorkerFacts, WorkerState

log = logging.getLogger(__name__)


class Keeper:
    """Keeps one worker up to date until it is cancelled."""

    def __init__(
        self,
        worker: Worker,
        fleet: Fleet,
        listeners: Listeners,
        session: aiohttp.ClientSession,
        settings: HealthConfig,
    ) -> None:
        self._worker = worker
        self._fleet = fleet
        self._listeners = listeners
        self._session = session
        self._settings = settings
        self._failures_in_row = 0
        self._told = ""
        self._health_url = http_base(worker.url) + "/health"

    async def run(self) -> None:
        """Join, then probe for ever; a worker that was lost joins again when it is back.

        One that may be another engine is asked again, without being left out meanwhile.
        """
        async with self._listeners:
            while True:
                if self._worker.state is WorkerState.JOINING:
                    await self._join()
                else:
                    await self._probe()
                # Spread, so that a fleet's probes don't go out together.
                await asyncio.sleep(self._settings.interval_s * random.uniform(0.8, 1.2))

    async def _join(self) -> None:
        doubt = self._worker.doubt
        doubt.looking()
        try:
            learned = await self._learn(ANSWERS_S)
        except JoinError as error:
            self._failed(f"cannot join: {error}")
            return
        doubt.looked(time.monotonic(), answered_all=not learned.unanswered)
        self._failures_in_row = 0
        self._told = ""
        self._worker.problem = ""
        self._take(learned.facts, "joined")

    async def _learn(self, within_s: float) -> Learned:
        """What the worker says of itself, or its relay of it. Raises JoinError.

        What fails for a moment is no reason to believe the relay of one that is at work.
        """
        worker, told = self._worker, self._worker.told
        try:
            learned = await learn(self._session, worker.config, worker.facts, within_s=within_s)
        except JoinError as error:
            may_pass = worker.state is WorkerState.READY and not error.is_answer
            if told is None or not told.models or may_pass or await self._illness() != "":
                raise
            facts = replace(told, notes=(f"{error}; its relay says what it serves",))
            return Learned(facts, () if error.is_answer else (str(error),))
        if told is None:
            return learned
        return learned._replace(facts=completed(learned.facts, told))

    def _take(self, facts: WorkerFacts, how: str) -> None:
        self._fleet.joined(self._worker, facts)
        self._listeners.listen(facts)
        self._worker.happened(WorkerEvent.JOINED)
        log.info("worker %s %s: %s", self._worker.name, how, _summary(facts))
        for note in facts.notes:
            log.warning("worker %s: %s", self._worker.name, note)

    async def _probe(self) -> None:
        problem = await self._illness()
        if problem == "" and self._is_in_doubt():
            problem = await self._look_again()
        if problem is None:
            return
        if problem:
            self._worker.doubt.arise()
            self._failed(problem)
            return
        self._failures_in_row = 0
        if not self._worker.happened(WorkerEvent.PROBE_OK):
            self._worker.problem = ""  # else it is to join, and what kept it from that may stand

    def _is_in_doubt(self) -> bool:
        """Whether it is to be learned anew while it is at work; others join before they are."""
        is_due = self._worker.doubt.calls_for_a_look(time.monotonic())
        return is_due and self._worker.state is WorkerState.READY

    async def _look_again(self) -> str:
        """Learn the worker anew; nothing happens if it is what it was.

        Gives what is wrong with what answers there, in words; empty if nothing is.
        """
        doubt = self._worker.doubt
        doubt.looking()
        try:
            learned = await self._learn(self._settings.timeout_s)
        except JoinError as error:
            doubt.looked(time.monotonic(), answered_all=False)
            return f"cannot be learned anew: {error}" if error.is_answer else ""
        doubt.looked(time.monotonic(), answered_all=not learned.unanswered)
        if self._worker.state is WorkerState.READY and learned.facts != self._worker.facts:
            self._take(learned.facts, "is another by now")
        return ""

    async def _illness(self) -> str | None:
        """What a probe finds, in words: empty if all is well, None if it could not be made."""
        timeout = aiohttp.ClientTimeout(total=self._settings.timeout_s)
        try:
            async with self._session.get(self._health_url, timeout=timeout) as response:
                return "" if response.status < 500 else f"/health says {response.status}"  # noqa: PLR2004
        except (aiohttp.ClientError, OSError, TimeoutError) as error:
            if lacks_descriptors(error):
                return None  # which says nothing about the worker
            return f"/health failed: {reason(error)}"

    def _failed(self, problem: str) -> None:
        self._failures_in_row += 1
        self._worker.problem = problem
        if self._failures_in_row < self._settings.failures:
            return
        if self._worker.happened(WorkerEvent.PROBES_FAILED) and problem != self._told:
            self._told = problem
            log.warning("worker %s is unreachable: %s", self._worker.name, problem)


def _summary(facts: WorkerFacts) -> str:
    models = ", ".join(model.id for model in facts.models)
    listening = sum(endpoint is not None for endpoint in facts.events.values())
    return (
        f"models {models}; {len(facts.events)} rank(s), {listening} with KV events; "
        f"block size {facts.block_size or 'unknown'}, "
        f"capacity {facts.capacity_blocks or 'unknown'} blocks"
    )
