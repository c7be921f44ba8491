"""Runs one simulated rank in real time: steps its core and hands outputs and events out."""

import asyncio
from collections.abc import AsyncIterator, Callable, Iterable
from contextlib import asynccontextmanager
from typing import TypeVar

from events import Event
from kvrouter.sim.engine import EngineCore, EngineRequest, Output
from kvrouter.sim.faults import Faults
from kvrouter.sim.timing import TimingModel

_MAX_LAG_S = 0.1

T = TypeVar("T")
Outputs = asyncio.Queue["Output | None"]


class EngineDiedError(Exception):
    """The simulated engine was killed with this request inside it."""


class Driver:
    """Steps one core; a step's duration is its timing divided by `speed`.

    `publish` is called with the events of each step that has any, before its outputs go out. A
    driver that falls behind (the machine is slower than the simulated engine) catches up at most
    0.1 s.
    """

    def __init__(
        self,
        core: EngineCore,
        timing: TimingModel,
        *,
        speed: float,
        faults: Faults,
        publish: Callable[[list[Event]], None],
    ) -> None:
        self.core = core
        self._faults = faults
        self._timing = timing
        self._speed = speed
        self._publish = publish
        self._wake = asyncio.Event()
        self._between_steps: list[Callable[[], object]] = []
        self._outputs: dict[str, Outputs] = {}
        self._due = 0.0

    async def run(self) -> None:
        """Step until cancelled."""
        self._due = asyncio.get_running_loop().time()
        while True:
            self._run_commands()
            step = self.core.begin_step()
            if step is None:
                self._wake.clear()
                await self._wake.wait()
                self._due = asyncio.get_running_loop().time()
                continue
            await self._pass_time(self._timing.step_s(step.load))
            result = self.core.finish_step()
            if result.events:
                self._publish(result.events)
            for output in result.outputs:
                self._outputs[output.request_id].put_nowait(output)

    @asynccontextmanager
    async def running(
        self, requests: Iterable[EngineRequest]
    ) -> AsyncIterator[AsyncIterator[Output]]:
        """Run requests; yields their outputs as they come, and aborts what is left on leaving.

        Raises RequestTooLongError (nothing is started then). The outputs raise EngineDiedError
        when the engine is killed.
        """
        wanted = list(requests)
        outputs: Outputs = asyncio.Queue()
        for request in wanted:
            self._outputs[request.request_id] = outputs
        unfinished = {request.request_id for request in wanted}
        try:
            for request in wanted:
                self.core.add(request)
            self._wake.set()
            yield _until_finished(outputs, unfinished)
        finally:
            self._command(lambda: self._drop(wanted, unfinished))

    async def call(self, command: Callable[[EngineCore], T]) -> T:
        """Run a command on the core between two steps, as an engine does; return its result."""
        done: asyncio.Future[T] = asyncio.get_running_loop().create_future()

        def run() -> None:
            if not done.cancelled():
                done.set_result(command(self.core))

        self._command(run)
        return await done

    def die(self) -> None:
        """Tell all running requests that the engine is gone; the caller cancels `run`."""
        for outputs in set(self._outputs.values()):
            outputs.put_nowait(None)

    def _command(self, command: Callable[[], object]) -> None:
        self._between_steps.append(command)
        self._wake.set()

    def _run_commands(self) -> None:
        commands, self._between_steps = self._between_steps, []
        for command in commands:
            command()

    def _drop(self, requests: Iterable[EngineRequest], unfinished: Iterable[str]) -> None:
        for request_id in unfinished:
            self.core.abort(request_id)
        for request in requests:
            del self._outputs[request.request_id]

    async def _pass_time(self, duration_s: float) -> None:
        """Sleep until the step is due; steps follow each other without drift."""
        loop = asyncio.get_running_loop()
        now = loop.time()
        self._due = (
            max(self._due, now - _MAX_LAG_S) + duration_s * self._faults.slow_factor / self._speed
        )
        await asyncio.sleep(max(0.0, self._due - now))


async def _until_finished(outputs: Outputs, unfinished: set[str]) -> AsyncIterator[Output]:
    while unfinished:
        output = await outputs.get()
        if output is None:
            raise EngineDiedError
        if output.finished:
            unfinished.discard(output.request_id)
        yield output
