"""Rows C1 to C9: where requests go, with real scheduler, load and index in virtual time."""

import itertools
import random
from statistics import mean

import pytest
from support.prompts import shared_prompt, unique_prompt
from support.virtual_fleet import Engine, Fleet, percentile

from events import WorkerRank


def poisson(rate: float, count: int, seed: int = 1, start: float = 0.0) -> list[float]:
    """`count` arrival times at `rate` per second."""
    rng = random.Random(seed)
    times = []
    for _ in range(count):
        start += rng.expovariate(rate)
        times.append(start)
    return times


@pytest.mark.parametrize("pause_s", [0.0, 1.0, 60.0])
@pytest.mark.parametrize("policy", ["kv", "least_requests", "least_tokens", "round_robin"])
def test_sequential_requests_spread_over_equal_workers(policy: str, pause_s: float) -> None:
    """C1: one user tries a fleet by hand, or an evaluation sends one request after the other."""
    fleet = Fleet(2, policy)
    for number in range(100):
        fleet.run_one(unique_prompt(number, 200 + 37 * (number % 7)), pause_s=pause_s)
    assert all(40 <= share <= 60 for share in fleet.shares())


@pytest.mark.parametrize("parallel", [False, True])
def test_prompts_shorter_than_a_block_spread(parallel: bool) -> None:
    """C2: short completions have no block to look up and still cost their prefill."""
    fleet = Fleet(4)
    for number in range(200):
        prompt = unique_prompt(number, 3 + number % 12)
        if parallel:
            fleet.send(number * 0.0001, prompt, output_tokens=20)
        else:
            fleet.run_one(prompt)
    fleet.run()
    assert all(45 <= share <= 55 for share in fleet.shares())


@pytest.mark.parametrize("rate", [20.0, 35.0])
def test_unique_prompts_are_served_as_well_as_by_least_loaded(rate: float) -> None:
    """C3: without reuse a cache-aware router has nothing to win and must lose nothing."""
    p99: dict[str, float] = {}
    for policy in ("kv", "least_requests", "least_tokens"):
        fleet = Fleet(5, policy)
        for number, at in enumerate(poisson(rate, 500)):
            fleet.send(at, unique_prompt(number, 400 + 300 * (number % 5)), output_tokens=60)
        fleet.run()
        p99[policy] = percentile([each.ttft_s for each in fleet.requests], 0.99)
        assert all(0.15 <= share / 500 <= 0.25 for share in fleet.shares())
    assert p99["kv"] <= min(p99["least_requests"], p99["least_tokens"])


def test_a_slow_worker_gets_less() -> None:
    """C4: one GPU throttles, or is shared with another job."""
    fleet = Fleet(5, slow={0: 5.0})
    for number, at in enumerate(poisson(25.0, 800)):
        fleet.send(at, unique_prompt(number, 1000), output_tokens=60)
    fleet.run()
    slow, *others = fleet.shares()
    assert slow < 0.6 * mean(others)
    ttft = [each.ttft_s for each in fleet.requests]
    assert percentile(ttft, 0.99) < 5 * 2 * 1000 / fleet.engine.prefill_tokens_per_s


def test_a_prefix_that_all_share_ends_up_everywhere_it_pays() -> None:
    """C5: one long system prompt, short questions, a high rate."""
    fleet = Fleet(8)
    for number, at in enumerate(poisson(400.0, 1600)):
        fleet.send(at, shared_prompt(4096, number, 48), output_tokens=20 + number * 379 % 121)
    fleet.run()
    holders = [worker for worker in fleet.workers.values() if len(worker.cache) >= 256]
    settled = fleet.shares(fleet.requests[800:])
    assert len(holders) == 8
    assert max(settled) <= 1.3 * mean(settled)
    prefilled = sum(each.prompt.prompt_tokens - each.cached_tokens for each in fleet.requests)
    assert prefilled < 1600 * 64 + 12 * 4096


def test_a_burst_of_equal_prompts_is_prefilled_once() -> None:
    """C6: a batch job or an agent swarm starts with the same prompt within milliseconds."""
    fleet = Fleet(8)
    for number in range(16):
        fleet.send(number * 0.0003, shared_prompt(1024, 0, 9), output_tokens=50)
    fleet.run()
    assert sorted(fleet.shares()) == [0] * 7 + [16]
    assert sum(each.cached_tokens == 0 for each in fleet.requests) == 1


def test_a_large_burst_of_equal_prompts_is_split_when_that_is_cheaper() -> None:
    """C6: the load of the one worker outgrows the price of a second prefill."""
    fleet = Fleet(8)
    for number in range(400):
        fleet.send(number * 0.00001, shared_prompt(1024, 0, 9), output_tokens=50)
    fleet.run()
    used = [share for share in fleet.shares() if share]
    assert len(used) > 4
    assert max(used) <= 100
    prefills = sum(each.cached_tokens == 0 for each in fleet.requests)
    assert prefills == len(used)


def test_generations_over_one_prefix_spread_by_decode_load() -> None:
    """C7: 500 users ask about the same long document at once, and go on asking.

    At first its holder is ahead by the price of a second copy, 600 blocks to prefill and to hold.
    """
    fleet = Fleet(8, engine=Engine(prefill_tokens_per_s=20_000))
    fleet.run_one(shared_prompt(9600, 10_000, 32))
    numbers = itertools.count()

    def ask() -> None:
        number = next(numbers)
        prompt = shared_prompt(9600, number, 64)
        fleet.send(fleet.now, prompt, output_tokens=100 + number * 379 % 700)

    fleet.on_done = lambda _: ask()
    for number in range(500):
        fleet.at(number * 0.004, ask)
    fleet.run(until_s=20.0)
    at_first = fleet.shares(fleet.requests[1:501])
    assert min(at_first) > 0.5 * mean(at_first)
    assert max(at_first) < 500 / 3
    decode_blocks = dict.fromkeys(fleet.ranks, 0.0)
    for second in range(21, 27):
        fleet.run(until_s=second)
        for rank in fleet.ranks:
            decode_blocks[rank] += fleet.load.of(rank).decode_blocks
    assert max(decode_blocks.values()) <= 1.3 * mean(decode_blocks.values())


@pytest.mark.parametrize("pause_s", [30.0, 3600.0])
def test_a_worker_that_was_busy_long_ago_gets_traffic_at_once(pause_s: float) -> None:
    """C8: a batch ran on one worker and is over."""
    fleet = Fleet(2)
    busy, other = fleet.ranks
    for number in range(50):
        fleet.send(number * 0.001, unique_prompt(number, 2000), output_tokens=50)
    fleet.workers[other].draining = True
    fleet.run()
    assert fleet.shares() == [50, 0]
    fleet.workers[other].draining = False
    for number in range(100, 120):
        fleet.send(fleet.now + pause_s, unique_prompt(number, 2000), output_tokens=50)
    fleet.run()
    assert fleet.workers[busy].streams == 0
    assert fleet.shares(fleet.requests[50:]) == [10, 10]
    assert busy in {each.rank for each in fleet.requests[50:52]}


@pytest.mark.parametrize("output_tokens", [20, 400])
def test_a_cold_worker_is_not_flooded(output_tokens: int) -> None:
    """C9: the autoscaler adds a worker at 80 % load. Its queue is what is in flight there."""
    fleet = Fleet(5)
    for number, at in enumerate(poisson(32.0, 1200)):
        prompt = shared_prompt(512, number, 1000)
        fleet.send(at, prompt, output_tokens=output_tokens)
    fleet.run(until_s=20.0)
    cold = fleet.add_worker()
    for second in range(20, 35):
        queues = mean_queues(fleet, until_s=second + 1.0)
        assert queues[cold] <= 1.5 * mean(queues.values())
    assert queues[cold] >= 0.5 * mean(queues.values())


def mean_queues(fleet: Fleet, until_s: float) -> dict[WorkerRank, float]:
    """The requests in flight per worker, on average over what happens until then."""
    samples: list[list[int]] = []
    while fleet.now < until_s and fleet.step():
        samples.append([fleet.load.of(rank).active_requests for rank in fleet.ranks])
    return dict(zip(fleet.ranks, map(mean, zip(*samples, strict=True)), strict=True))
