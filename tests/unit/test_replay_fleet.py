"""What a replay finds, on traces small enough to reckon by hand."""

from dataclasses import replace
from random import Random

import msgspec
import pytest
from support.candidates import policy as policy_named

from kvrouter.replay import FleetSettings, Result, Trace, TraceRequest, replay
from kvrouter.replay.synthetic import synthetic_trace
from kvrouter.sim.settings import CoreSettings

CORE = CoreSettings(
    block_size=64, num_blocks=4097, max_model_len=4096 * 64, max_batched_tokens=8192
)
FLEET = FleetSettings(workers=2, core=CORE)


def run(trace: Trace, policy: str = "kv", fleet: FleetSettings = FLEET) -> Result:
    return replay(trace, policy_named(policy), fleet)


def trace_of(*requests: TraceRequest) -> Trace:
    return Trace("t", requests, 64)


def prefill_ms(tokens: int) -> float:
    return 16.50142 + 0.01518344 * tokens + 4.209989e-7 * tokens**2


def test_a_single_request_takes_what_the_timing_says() -> None:
    result = run(trace_of(TraceRequest(0.0, 640, 3, tuple(range(10)))))
    assert result.ttft_ms.mean == pytest.approx(prefill_ms(640), abs=1e-3)
    share = 641.5 / (4096 * 64)
    assert result.itl_ms.mean == pytest.approx(5.74 + 54.01 * share, abs=1e-3)
    assert result.e2e_ms.mean == pytest.approx(
        result.ttft_ms.mean + 2 * result.itl_ms.mean, abs=2e-3
    )


def test_arrivals_of_one_instant_are_prefilled_together() -> None:
    """Traces have times in whole steps, and a real front end a burst."""
    requests = [TraceRequest(1.0, 64, 1, (number,)) for number in range(4)]
    result = run(trace_of(*requests), fleet=replace(FLEET, workers=1))
    assert result.ttft_ms.p50 == result.ttft_ms.p99 == pytest.approx(prefill_ms(256), abs=1e-3)


def test_a_repeated_prompt_is_reused_but_for_its_last_block() -> None:
    requests = [TraceRequest(at_s, 640, 1, tuple(range(10))) for at_s in (0.0, 1.0)]
    result = run(trace_of(*requests))
    assert result.reuse == result.best_holder_reuse == pytest.approx(576 / 1280)
    assert sorted(result.shares) == [0, 2]


def test_speed_brings_arrivals_closer() -> None:
    requests = [TraceRequest(number * 1.0, 6400, 1, (number,)) for number in range(20)]
    slow, fast = (
        run(trace_of(*requests), fleet=replace(FLEET, speed=speed)) for speed in (1.0, 1000.0)
    )
    assert slow.ttft_ms.p99 == pytest.approx(prefill_ms(6400), abs=1e-3)
    assert fast.ttft_ms.p99 > 5 * slow.ttft_ms.p99


def test_until_the_events_are_here_predictions_lead_to_the_prefix() -> None:
    """A second turn may come before the engine has said a word."""
    requests = [TraceRequest(at_s, 640, 1, tuple(range(10))) for at_s in (0.0, 0.5)]
    result = run(trace_of(*requests), fleet=replace(FLEET, event_lag_s=60.0))
    assert result.reuse == pytest.approx(576 / 1280)
    assert result.best_holder_reuse == 0.0


@pytest.mark.parametrize(("rate", "most"), [(4.0, 0.25), (20.0, 0.7)])
def test_a_slowed_worker_is_spared_and_more_so_while_others_have_room(
    rate: float, most: float
) -> None:
    """One GPU of a fleet throttles; under load it is needed all the same."""
    trace = synthetic_trace("unique", requests=200, rate=rate, rng=Random(1))
    fleet = replace(FLEET, workers=4, slow={2: 3.0})
    slow = run(trace, fleet=fleet).shares[2]
    assert 0 < slow < most * 200 / 4


def test_routers_that_share_nothing_lose_the_burst_that_one_router_keeps_together() -> None:
    """Several router processes without a bus: each only knows its own bookings."""
    trace = synthetic_trace("bursts", requests=160, rate=10.0, rng=Random(1))
    fleet = replace(FLEET, workers=4, routers=4)
    alone, synced = (run(trace, fleet=replace(fleet, sync_s=sync_s)) for sync_s in (None, 0.0001))
    assert alone.reuse < synced.reuse
    assert synced.reuse == pytest.approx(
        run(trace, fleet=replace(fleet, routers=1)).reuse, abs=0.05
    )


@pytest.mark.slow
def test_three_routers_that_share_serve_as_one_does() -> None:
    """R6: the same load by one router or three, at about 80 % of what the fleet can do."""
    trace = synthetic_trace("rag", requests=800, rate=41.0, rng=Random(2))
    one = replace(FLEET, workers=8, core=replace(FLEET.core, num_blocks=8193, block_size=64))
    several = replace(one, routers=3, sync_s=0.001)
    alone, shared, single = (
        run(trace, fleet=fleet) for fleet in (replace(several, sync_s=None), several, one)
    )
    assert shared.reuse == pytest.approx(single.reuse, rel=0.05)
    assert shared.ttft_ms.mean == pytest.approx(single.ttft_ms.mean, rel=0.05)
    assert shared.ttft_ms.p99 < 1.1 * single.ttft_ms.p99
    assert alone.ttft_ms.p99 > 1.3 * single.ttft_ms.p99


@pytest.mark.parametrize("policy", ["kv", "round_robin", "random", "least_tokens"])
def test_a_replay_depends_on_nothing_but_its_arguments(policy: str) -> None:
    trace = synthetic_trace("chat", requests=100, rate=20.0, rng=Random(1))
    fleet = replace(FLEET, routers=2, seed=3)
    first, second = (
        msgspec.structs.replace(run(trace, policy, fleet), decisions_per_s=0) for _ in range(2)
    )
    assert first == second
    assert sum(first.shares) == first.requests == 100


def test_an_overfull_engine_preempts_and_still_finishes_all() -> None:
    core = replace(CORE, num_blocks=41, max_model_len=40 * 64)
    requests = [TraceRequest(0.0, 640, 200, (number, *range(9))) for number in range(6)]
    result = run(trace_of(*requests), fleet=replace(FLEET, workers=1, core=core))
    assert result.preempted > 0
    assert result.shares == [6]
