"""The scheduler's core: budget, chunks, admission, preemption, aborts, and what it reports."""

import random
from collections.abc import Sequence
from typing import Any

import pytest

from events import BlocksCleared, BlocksRemoved, BlocksStored, Event
from kvrouter.sim import CoreSettings, EngineCore, EngineRequest, StepLoad, StepResult
from kvrouter.sim.engine import RequestTooLongError, SimStateError
from kvrouter.sim.settings import SettingsError


def core(**changes: Any) -> EngineCore:
    settings: dict[str, Any] = {"block_size": 4, "num_blocks": 17, "max_model_len": 64}
    return EngineCore(CoreSettings(**settings | changes))


def request(name: str, prompt: Sequence[int], outputs: int = 1, **more: Any) -> EngineRequest:
    return EngineRequest(request_id=name, prompt=prompt, outputs=range(500, 500 + outputs), **more)


def step(engine: EngineCore) -> StepResult:
    assert engine.begin_step() is not None
    result = engine.finish_step()
    engine.check()
    return result


def drain(engine: EngineCore) -> list[StepResult]:
    results = []
    while not engine.idle:
        results.append(step(engine))
    return results


def stored(events: list[Event]) -> list[list[int]]:
    return [list(event.token_ids) for event in events if isinstance(event, BlocksStored)]


def test_an_idle_engine_has_no_step() -> None:
    assert core().begin_step() is None


def test_outputs_come_one_a_step_from_the_step_that_ends_the_prefill_on() -> None:
    engine = core()
    engine.add(request("a", range(6), outputs=3))
    results = drain(engine)
    assert [o.token for r in results for o in r.outputs] == [500, 501, 502]
    assert [o.finished for r in results for o in r.outputs] == [False, False, True]
    assert len(results) == 3


def test_exactly_the_full_blocks_of_prompt_and_outputs_but_the_last_are_stored() -> None:
    engine = core()
    engine.add(request("a", range(7), outputs=2))
    first, second = drain(engine)
    assert stored(first.events) == [[0, 1, 2, 3]]
    assert stored(second.events) == [[4, 5, 6, 500]]
    engine.add(request("b", range(100, 107)))
    assert stored(drain(engine)[0].events) == [[100, 101, 102, 103]]


def test_an_exact_repeat_recomputes_and_stores_its_last_block_again() -> None:
    """A prompt of n full blocks is worth n-1, because the last token is always computed."""
    engine = core()
    engine.add(request("a", range(8)))
    drain(engine)
    engine.add(request("b", range(8)))
    (result,) = drain(engine)
    assert result.outputs[0].cached_tokens == 4
    assert stored(result.events) == [[4, 5, 6, 7]]


def test_equal_prompts_in_one_step_are_computed_once() -> None:
    engine = core()
    for name in "abc":
        engine.add(request(name, range(9)))
    (result,) = drain(engine)
    assert [output.cached_tokens for output in result.outputs] == [0, 8, 8]
    assert len(stored(result.events)) == 1


def test_long_prompts_are_prefilled_in_chunks_that_share_the_budget() -> None:
    engine = core(max_batched_tokens=6)
    engine.add(request("a", range(10), outputs=2))
    engine.add(request("b", range(20, 30)))
    loads = []
    while not engine.idle:
        begun = engine.begin_step()
        assert begun is not None
        loads.append(begun.load)
        engine.finish_step()
    assert loads == [
        StepLoad(6, 0, 0, 64),
        StepLoad(6, 0, 0, 64),
        StepLoad(5, 1, 11, 64),
        StepLoad(3, 0, 0, 64),
    ]


def test_no_more_sequences_run_than_allowed() -> None:
    engine = core(max_num_seqs=2)
    for name in "abc":
        engine.add(request(name, range(3), outputs=2))
    step(engine)
    assert (engine.running, engine.waiting) == (2, 1)


def test_a_prompt_that_does_not_fit_as_a_whole_waits_and_holds_up_those_behind_it() -> None:
    engine = core(max_batched_tokens=8)
    engine.add(request("a", range(40), outputs=4))
    for _ in range(5):
        step(engine)
    engine.add(request("b", range(100, 140)))
    engine.add(request("c", range(200, 203)))
    step(engine)
    assert (engine.running, engine.waiting) == (1, 2)


def test_without_the_reserve_rule_the_first_chunk_is_enough() -> None:
    engine = core(max_batched_tokens=8, reserve_prompt=False)
    engine.add(request("a", range(40), outputs=4))
    for _ in range(5):
        step(engine)
    engine.add(request("b", range(100, 140)))
    step(engine)
    assert (engine.running, engine.waiting) == (2, 0)


def test_the_sequence_admitted_last_is_preempted_and_computes_again_what_was_taken() -> None:
    """Too many long generations for the cache: the youngest gives way and resumes later."""
    engine = core(num_blocks=9, max_model_len=32)
    engine.add(request("old", range(14), outputs=8))
    engine.add(request("young", range(20, 34), outputs=8))
    results = drain(engine)
    assert engine.counters.preempted == 1
    finished = [o.request_id for r in results for o in r.outputs if o.finished]
    assert finished == ["old", "young"]
    tokens = [o.token for r in results for o in r.outputs if o.request_id == "young"]
    assert tokens == list(range(500, 508))
    assert {o.cached_tokens for r in results for o in r.outputs} == {0}


def test_evictions_are_reported_before_the_store_that_needed_them() -> None:
    engine = core(num_blocks=5, max_model_len=16)
    engine.add(request("a", range(13)))
    drain(engine)
    engine.add(request("b", range(100, 109)))
    (result,) = drain(engine)
    kinds = [type(event) for event in result.events]
    assert kinds == [BlocksRemoved, BlocksRemoved, BlocksStored]


def test_an_abort_frees_the_blocks_and_keeps_what_is_cached() -> None:
    engine = core()
    engine.add(request("a", range(9), outputs=5))
    step(engine)
    assert engine.abort("a")
    assert engine.cache.in_use == 0
    engine.add(request("b", range(9)))
    assert drain(engine)[0].outputs[0].cached_tokens == 8


def test_a_waiting_request_can_be_aborted_and_an_unknown_one_cannot() -> None:
    engine = core()
    engine.add(request("a", range(9)))
    assert engine.abort("a")
    assert not engine.abort("a")
    assert engine.idle


def test_a_clear_is_reported_with_the_next_step_only() -> None:
    engine = core()
    engine.add(request("a", range(9)))
    drain(engine)
    assert engine.clear_cache()
    assert engine.begin_step() is None
    engine.add(request("b", range(9)))
    (result,) = drain(engine)
    assert result.events[0] == BlocksCleared()
    assert result.outputs[0].cached_tokens == 0


def test_a_clear_while_requests_run_is_refused_unless_they_may_be_preempted() -> None:
    engine = core()
    engine.add(request("a", range(9), outputs=3))
    step(engine)
    assert not engine.clear_cache()
    assert engine.clear_cache(preempt_running=True)
    result = step(engine)
    assert result.events[0] == BlocksCleared()
    assert stored(result.events) == [[0, 1, 2, 3, 4, 5, 6, 7]]
    assert result.outputs[0].position == 1


def test_lora_and_salt_share_nothing_with_the_base_model() -> None:
    engine = core()
    engine.add(request("base", range(9)))
    engine.add(request("lora", range(9), lora_name="a"))
    engine.add(request("salt", range(9), cache_salt="s"))
    (result,) = drain(engine)
    assert [output.cached_tokens for output in result.outputs] == [0, 0, 0]
    assert [e.lora_name for e in result.events if isinstance(e, BlocksStored)] == [None, "a", None]


def test_a_request_that_skips_the_cache_read_stores_everything_again() -> None:
    engine = core()
    engine.add(request("a", range(9)))
    drain(engine)
    engine.add(request("b", range(9), skip_cache_read=True))
    (result,) = drain(engine)
    assert result.outputs[0].cached_tokens == 0
    assert stored(result.events) == [[0, 1, 2, 3, 4, 5, 6, 7]]


def test_reported_hits_are_announced_from_the_first_block_on() -> None:
    engine = core()
    engine.add(request("a", range(9)))
    drain(engine)
    engine.add(request("b", range(9), report_hits=True))
    assert stored(drain(engine)[0].events) == [[0, 1, 2, 3, 4, 5, 6, 7]]


def test_commands_between_the_halves_of_a_step_raise_and_change_nothing() -> None:
    engine = core()
    engine.add(request("a", range(9), outputs=2))
    engine.begin_step()
    for command in (engine.begin_step, engine.clear_cache, lambda: engine.abort("a")):
        with pytest.raises(SimStateError):
            command()
    assert len(engine.finish_step().outputs) == 1
    with pytest.raises(SimStateError):
        engine.finish_step()


@pytest.mark.parametrize(("prompt", "outputs"), [(0, 1), (1, 0), (60, 5)])
def test_a_request_that_can_never_run_is_refused(prompt: int, outputs: int) -> None:
    with pytest.raises(RequestTooLongError):
        core().add(request("a", range(prompt), outputs=outputs))


def test_settings_that_cannot_hold_one_sequence_are_refused() -> None:
    with pytest.raises(SettingsError, match="raise num_blocks"):
        CoreSettings(block_size=4, num_blocks=10, max_model_len=64)


def test_without_events_nothing_is_reported() -> None:
    engine = core(events=False)
    engine.add(request("a", range(9)))
    assert drain(engine)[0].events == []


@pytest.mark.parametrize("seed", range(5))
def test_any_mix_of_requests_and_aborts_ends_with_every_output_and_no_block_in_use(
    seed: int,
) -> None:
    rng = random.Random(seed)
    engine = core(num_blocks=14, max_model_len=48, max_batched_tokens=24, max_num_seqs=5)
    wanted: dict[str, int] = {}
    got: dict[str, int] = {}
    for number in range(60):
        outputs = rng.randint(1, 12)
        start = rng.choice([0, 0, 100, 200])
        engine.add(request(str(number), range(start, start + rng.randint(1, 36)), outputs=outputs))
        wanted[str(number)] = outputs
        for _ in range(rng.randint(0, 4)):
            if not engine.idle:
                _count(step(engine), got)
        if rng.random() < 0.1 and engine.abort(str(number)):
            del wanted[str(number)]
    for result in drain(engine):
        _count(result, got)
    assert {name: got[name] for name in wanted} == wanted
    assert engine.cache.in_use == 0
    assert engine.counters.preempted > 0


def _count(result: StepResult, got: dict[str, int]) -> None:
    for output in result.outputs:
        got[output.request_id] = output.position + 1
