"""Stepping in virtual time is the same as stepping one by one."""

from random import Random

import pytest

from kvrouter.replay.engine import VirtualEngine
from kvrouter.sim.engine import EngineCore, EngineRequest, SimStateError
from kvrouter.sim.settings import CoreSettings
from kvrouter.sim.timing import PolynomialTiming

TIMING = PolynomialTiming()


def request(number: int, prompt_tokens: int, output_tokens: int) -> EngineRequest:
    prompt = [number % 3] * min(prompt_tokens, 40) + [100 + number] * max(0, prompt_tokens - 40)
    outputs = range(1000 + number, 1000 + number + output_tokens)
    return EngineRequest(request_id=str(number), prompt=prompt, outputs=outputs)


def workload(rng: Random, requests: int) -> list[tuple[float, EngineRequest]]:
    at_s, arrivals = 0.0, []
    for number in range(requests):
        at_s += rng.choice([0.0, 0.01, rng.expovariate(10.0)])
        made = request(number, rng.randint(1, 120), rng.randint(1, 60))
        arrivals.append((at_s, made))
    return arrivals


def settings(num_blocks: int, *, reserve: bool) -> CoreSettings:
    return CoreSettings(
        block_size=8,
        num_blocks=num_blocks,
        max_num_seqs=6,
        max_batched_tokens=64,
        max_model_len=184,
        reserve_prompt=reserve,
    )


def one_by_one(
    core: EngineCore, arrivals: list[tuple[float, EngineRequest]]
) -> list[tuple[object, ...]]:
    """Outputs and events with their times, from the core alone."""
    story: list[tuple[object, ...]] = []
    pending, now = list(arrivals), 0.0
    while pending or not core.idle:
        if core.idle:
            now = max(now, pending[0][0])
        while pending and pending[0][0] <= now:
            core.add(pending.pop(0)[1])
        step = core.begin_step()
        assert step is not None
        now += TIMING.step_s(step.load)
        result = core.finish_step()
        story += [(now, *output[::2]) for output in result.outputs]
        story += [(now, repr(event)) for event in result.events]
    return story


def is_next_output(entry: tuple[object, ...]) -> bool:
    """Whether this is an output, not the first: those of a run are told by number only."""
    return len(entry) == 4 and entry[2] != 0


def in_virtual_time(
    engine: VirtualEngine, arrivals: list[tuple[float, EngineRequest]]
) -> tuple[list[tuple[object, ...]], dict[str, int]]:
    """The same from a virtual engine that is asked for outputs at odd times, too."""
    story: list[tuple[object, ...]] = []
    positions: dict[str, int] = {}
    pending, now = list(arrivals), 0.0

    def hear(until_s: float) -> None:
        tokens, request_ids = engine.outputs(until_s)
        for request_id in request_ids if tokens else ():
            positions[request_id] += tokens

    while pending or engine.due_s is not None:
        due_s = engine.due_s
        if due_s is not None and (not pending or due_s <= pending[0][0]):
            now = due_s
            hear(now)
            result = engine.end()
            for output in result.outputs:
                positions[output.request_id] = output.position
                story.append((now, output.request_id, output.position, output.cached_tokens))
            story += [(now, repr(event)) for event in result.events]
        else:
            now = pending[0][0]
            hear(now)
        while pending and pending[0][0] <= now:
            engine.add(pending.pop(0)[1], now)
        engine.begin(now)
    return story, positions


@pytest.mark.parametrize("num_blocks", [24, 40, 400])
@pytest.mark.parametrize("seed", range(4))
def test_many_steps_at_once_are_the_same_steps(num_blocks: int, seed: int) -> None:
    """With few blocks requests wait for room and are preempted; nothing may happen in between."""
    arrivals = workload(Random(seed), 60)
    chosen = settings(num_blocks, reserve=bool(seed % 2))
    plain, engine = EngineCore(chosen), VirtualEngine(chosen, TIMING)
    expected = one_by_one(plain, arrivals)
    story, positions = in_virtual_time(engine, arrivals)
    assert story == [entry for entry in expected if entry in story or not is_next_output(entry)]
    assert positions == {each.request_id: len(each.outputs) - 1 for _, each in arrivals}
    assert vars(engine.core.counters) == vars(plain.counters)
    engine.core.check()


def test_a_run_is_cut_by_an_arrival_at_the_end_of_the_step_that_it_falls_into() -> None:
    """A real engine looks at its queue between two steps."""
    engine = VirtualEngine(settings(400, reserve=False), TIMING)
    engine.add(request(0, 9, 50), 0.0)
    engine.begin(0.0)
    while not engine.outputs(float("inf"))[1]:
        due_s = engine.due_s
        assert due_s is not None
        engine.end()
        engine.begin(due_s)
    last = engine.due_s
    assert last is not None
    engine.add(request(1, 9, 5), last - 0.015)
    cut = engine.due_s
    assert cut is not None
    assert last - 0.015 <= cut < last - 0.005


def test_a_slow_engine_takes_longer_for_each_step() -> None:
    chosen = settings(400, reserve=False)
    ends = []
    for factor in (1.0, 3.0):
        engine = VirtualEngine(chosen, TIMING, slow_factor=factor)
        engine.add(request(0, 9, 50), 0.0)
        engine.begin(0.0)
        assert engine.due_s is not None
        ends.append(engine.due_s)
    assert ends[1] == pytest.approx(3 * ends[0])


def test_only_quiet_steps_can_be_skipped() -> None:
    core = EngineCore(settings(400, reserve=False))
    core.add(request(0, 9, 50))
    assert core.quiet_run() is None
    with pytest.raises(SimStateError):
        core.skip_steps(1)
