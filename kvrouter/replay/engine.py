"""A simulated engine in virtual time: the core, its timing, and when its next step ends.

Steps that only decode are taken many at a time. That changes nothing but the cost: the ends of
all of them are computed one by one, and an arrival cuts the run at the end of the step that it
falls into.
"""

from bisect import bisect_left, bisect_right
from collections.abc import Sequence

from kvrouter.sim.engine import EngineCore, EngineRequest, StepResult
from kvrouter.sim.settings import CoreSettings
from kvrouter.sim.timing import StepLoad, TimingModel

NOTHING = StepResult([], [])


class VirtualEngine:
    """One engine rank. Its caller tells the time, and calls `end` when `due_s` has come.

    `slow_factor` multiplies the duration of every step.
    """

    def __init__(
        self, settings: CoreSettings, timing: TimingModel, *, slow_factor: float = 1.0
    ) -> None:
        self.core = EngineCore(settings)
        self._timing = timing
        self._slow_factor = slow_factor
        self._ends: list[float] = []  # of the steps under way
        self._is_run = False
        self._told = 0  # steps of the run whose outputs were told
        self._request_ids: Sequence[str] = ()

    @property
    def due_s(self) -> float | None:
        """When what is under way ends; None if nothing is."""
        return self._ends[-1] if self._ends else None

    def add(self, request: EngineRequest, now: float) -> None:
        """A request arrives; it is seen when the step that is under way has ended."""
        self.core.add(request)
        if self._is_run:
            del self._ends[bisect_left(self._ends, now) + 1 :]

    def begin(self, now: float) -> None:
        """Begin the next step, or several, unless one is under way or there is nothing to do."""
        if self._ends:
            return
        run = self.core.quiet_run()
        if run is not None:
            self._is_run = True
            self._told = 0
            self._request_ids = run.request_ids
            self._ends = self._run_ends(run.load, run.steps, now)
            return
        step = self.core.begin_step()
        if step is not None:
            self._ends = [now + self._timing.step_s(step.load) * self._slow_factor]

    def outputs(self, now: float) -> tuple[int, Sequence[str]]:
        """How many tokens these requests got each, up to `now`, that were not told before."""
        if not self._is_run:
            return 0, ()
        ended = bisect_right(self._ends, now)
        fresh, self._told = ended - self._told, ended
        return fresh, self._request_ids

    def end(self) -> StepResult:
        """End what is under way. After a run of several steps all is told by `outputs`."""
        ends, self._ends = self._ends, []
        if not self._is_run:
            return self.core.finish_step()
        self._is_run = False
        self.core.skip_steps(len(ends))
        return NOTHING

    def _run_ends(self, load: StepLoad, steps: int, now: float) -> list[float]:
        step_s, slow_factor = self._timing.step_s, self._slow_factor
        _, sequences, context, capacity = load
        ends = []
        for grown in range(context, context + steps * sequences, sequences):
            now += step_s(StepLoad(0, sequences, grown, capacity)) * slow_factor
            ends.append(now)
        return ends
