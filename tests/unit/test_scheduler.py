"""One decision: what it sees, what it changes, what it tells."""

import itertools
import json
import random
from collections import Counter

import pytest
from support.candidates import policy as policy_named
from support.prompts import prompt_of, shared_prompt, unique_prompt

from events import (
    BlocksRemoved,
    BlocksStored,
    EngineHash,
    Event,
    EventBatch,
    Tier,
    WorkerRank,
)
from indexer import PredictedBlocks, RadixIndex
from kvrouter.load import Load, Outcome
from kvrouter.policy import NoCandidate, Reason, TierCredit
from kvrouter.prompt import Prompt
from kvrouter.scheduler import Placement, Scheduler

A = WorkerRank("a")
B = WorkerRank("b")
C = WorkerRank("c")


class Stage:
    """A scheduler and what it decides from."""

    def __init__(
        self,
        policy: str = "kv",
        *,
        temperature: float = 0.0,
        seed: int = 0,
        credit: TierCredit | None = None,
    ) -> None:
        self.index = RadixIndex()
        self.predicted = PredictedBlocks()
        self.load = Load()
        self._names = itertools.count()
        self.scheduler = Scheduler(
            self.index,
            self.predicted,
            self.load,
            policy_named(policy, temperature=temperature),
            random.Random(seed),
            credit=credit,
            prediction_ttl_s=lambda rank: 100.0 if rank == B else 2.0,
        )

    def store(
        self, rank: WorkerRank, prompt: Prompt, size: int = 16, *, tier: Tier = Tier.GPU
    ) -> None:
        """The rank computed the prompt; where it is not kept on the GPU, it moved to `tier`."""
        blocks = len(prompt.token_ids) // size
        names: list[EngineHash] = [next(self._names) for _ in range(blocks)]
        tokens = list(prompt.token_ids[: blocks * size])
        events: list[Event] = [BlocksStored(block_hashes=names, token_ids=tokens, block_size=size)]
        if tier is not Tier.GPU:
            events.append(BlocksStored(block_hashes=names, tier=tier))
            events.append(BlocksRemoved(block_hashes=names))
        self.index.apply(rank, EventBatch(ts_s=0.0, events=events))

    def place(self, prompt: Prompt, *ranks: WorkerRank, now: float = 0.0) -> Placement:
        return self.scheduler.place(prompt, ranks or (A, B), now)


@pytest.fixture
def stage() -> Stage:
    return Stage()


def test_no_candidates_is_an_error_of_its_own(stage: Stage) -> None:
    with pytest.raises(NoCandidate):
        stage.scheduler.place(unique_prompt(0, 10), [], 0.0)
    with pytest.raises(NoCandidate):
        stage.scheduler.decide(unique_prompt(0, 10), [], 0.0)


def test_a_prompt_goes_where_its_prefix_is_and_is_booked_by_what_is_missing(stage: Stage) -> None:
    prompt = unique_prompt(0, 100)
    stage.store(B, prompt_of(prompt.token_ids[:64]))
    placed = stage.place(prompt)
    decision, lease = placed.decision, placed.lease
    assert (decision.winner, decision.reason) == (B, Reason.LEAST_COST)
    assert decision.chosen.overlap.gpu == 4
    assert lease.prefill_tokens == 36
    assert stage.load.of(B).active_requests == 1


def test_the_last_token_of_a_cached_prompt_is_still_prefilled(stage: Stage) -> None:
    """I11: a prompt of n full blocks is worth n - 1."""
    prompt = unique_prompt(0, 64)
    stage.store(B, prompt)
    placed = stage.place(prompt)
    decision, lease = placed.decision, placed.lease
    assert decision.chosen.overlap.gpu == 3
    assert lease.prefill_tokens == 16


def test_a_prompt_just_routed_is_expected_where_it_went(stage: Stage) -> None:
    """C6: no event can be there yet."""
    first = stage.place(unique_prompt(0, 100))
    second = stage.place(unique_prompt(0, 100))
    assert second.decision.winner == first.decision.winner
    assert second.decision.chosen.predicted_blocks == 6
    assert second.lease.prefill_tokens == 4


def test_an_expectation_ends_when_its_time_is_over(stage: Stage) -> None:
    """A request can fail before its blocks are computed."""
    prompt = unique_prompt(0, 100)
    for rank in (A, B):
        stage.place(prompt, rank).lease.settle(Outcome.ENGINE_FAILED, 0.1)
    rated = {each.rank: each for each in stage.scheduler.decide(prompt, [A, B], 50.0).rated}
    assert (rated[A].predicted_blocks, rated[B].predicted_blocks) == (0, 6)


def test_predictions_continue_what_the_index_knows(stage: Stage) -> None:
    """The second turn of a chat arrives before the events of the first turn's last blocks."""
    prompt = unique_prompt(0, 100)
    stage.store(A, prompt_of(prompt.token_ids[:32]))
    stage.place(prompt, A)
    chosen = stage.scheduler.decide(prompt, [A], 1.0).chosen
    assert (chosen.overlap.gpu, chosen.predicted_blocks) == (2, 4)


def test_a_prompt_under_way_is_waited_for_and_not_computed_twice(stage: Stage) -> None:
    """C6: the queue in front is this very prompt."""
    stage.place(unique_prompt(0, 100), A)
    rated = stage.scheduler.decide(unique_prompt(0, 100), [A, B], 0.0).rated
    assert rated[0].cost < rated[1].cost


def test_a_prompt_under_way_is_worth_no_wait_where_another_rank_holds_it(stage: Stage) -> None:
    """C5: a rank that already has the prefix can answer at once."""
    stage.place(unique_prompt(0, 100), A)
    stage.store(B, unique_prompt(0, 100))
    assert stage.scheduler.decide(unique_prompt(0, 100), [A, B], 0.0).winner == B


@pytest.mark.parametrize("policy", ["kv", "least_requests", "least_tokens"])
def test_prompts_that_nobody_could_read_fall_to_the_least_loaded(policy: str) -> None:
    """T8: there is no tokenizer for the model. Their cost is their length, not 0 for all."""
    stage = Stage(policy)
    placed = [stage.place(Prompt.blind(500, "no tokenizer"), A, B, C) for _ in range(9)]
    assert Counter(each.decision.winner for each in placed) == {A: 3, B: 3, C: 3}
    assert stage.load.of(A).prefill_tokens == 1500
    if policy == "kv":
        assert placed[0].decision.cost == 500


def test_round_robin_is_fair_when_candidates_come_and_go() -> None:
    """Workers drain and return; a breaker opens for a moment."""
    stage = Stage("round_robin")
    for number in range(300):
        ranks = [A, B, C] if number % 2 else [A, B]
        stage.place(unique_prompt(number, 20), *ranks).lease.settle(Outcome.OK, 0.0)
    counts = Counter(stage.place(unique_prompt(n, 20), A, B, C).decision.winner for n in range(9))
    assert counts == {A: 3, B: 3, C: 3}


def test_round_robin_gives_a_returning_rank_no_burst() -> None:
    stage = Stage("round_robin")
    for number in range(100):
        stage.place(unique_prompt(number, 20), A, B)
    counts = Counter(stage.place(unique_prompt(n, 20), A, B, C).decision.winner for n in range(30))
    assert counts == {A: 10, B: 10, C: 10}


@pytest.mark.parametrize("temperature", [0.0, 8.0])
@pytest.mark.parametrize("policy", ["kv", "round_robin", "random", "least_requests"])
def test_deciding_tells_what_placing_would_do_and_changes_nothing(
    policy: str, temperature: float
) -> None:
    """`/explain` is asked before, between and instead of real requests."""
    ranks = [WorkerRank("w", number) for number in range(5)]
    asked, quiet = Stage(policy, temperature=temperature), Stage(policy, temperature=temperature)
    for number in range(40):
        prompt = shared_prompt(64, number % 5, 40)
        told = [asked.scheduler.decide(prompt, ranks, number).as_dict() for _ in range(3)]
        placed = asked.place(prompt, *ranks, now=number)
        assert told == [placed.decision.as_dict()] * 3
        assert placed.decision.winner == quiet.place(prompt, *ranks, now=number).decision.winner
    assert asked.load.totals == quiet.load.totals


def test_health_checks_and_explanations_leave_no_booking(stage: Stage) -> None:
    """B4: a hundred looks are not one request."""
    for _ in range(100):
        stage.scheduler.decide(unique_prompt(0, 100), [A, B], 0.0)
    assert stage.load.totals.active_requests == 0
    assert stage.load.ranks() == ()
    assert stage.scheduler.decide(unique_prompt(0, 100), [A], 0.0).chosen.predicted_blocks == 0


def test_a_decision_does_not_change_with_later_load(stage: Stage) -> None:
    placed = stage.place(unique_prompt(0, 100))
    decision, lease = placed.decision, placed.lease
    before = decision.as_dict()
    lease.add_output_tokens(100, 1.0)
    stage.place(unique_prompt(1, 100))
    assert decision.as_dict() == before


def test_a_candidate_that_is_passed_over_is_shown_with_its_terms(stage: Stage) -> None:
    """`/explain`: the holder of the whole prompt has too many requests already."""
    held = unique_prompt(0, 640)
    stage.store(B, prompt_of(held.token_ids))
    for number in range(60):
        stage.place(unique_prompt(number + 1, 100), B)
    shown = stage.scheduler.decide(held, [A, B], 0.0).as_dict()
    assert shown["winner"]["worker"] == "a"
    assert shown["reason"] == "only_candidate"
    (filtered,) = shown["filtered"]
    assert (filtered["worker"], filtered["active_requests"]) == ("b", 60)
    assert filtered["cost"] == pytest.approx(sum(filtered["terms"].values()))
    assert filtered["overlap_blocks"]["gpu"] > 0


def test_a_decision_can_be_shown_as_json(stage: Stage) -> None:
    stage.store(B, prompt_of(unique_prompt(0, 64).token_ids))
    decision = stage.place(unique_prompt(0, 100)).decision
    shown = json.loads(json.dumps(decision.as_dict(), allow_nan=False))
    assert shown["winner"] == {"worker": "b", "dp_rank": 0}
    assert (shown["policy"], shown["reason"]) == ("kv", "least_cost")
    assert shown["prompt"] == {"tokens": 100, "fidelity": "exact", "reason": ""}
    first, second = shown["candidates"]
    assert (first["worker"], second["worker"]) == ("b", "a")
    assert first["overlap_blocks"] == {"gpu": 4, "cpu": 0, "disk": 0}
    assert first["cost"] == pytest.approx(sum(first["terms"].values()))
    assert first["terms"] == {
        "wait_tokens": 0.0,
        "own_prefill_tokens": 36,
        "copy_tokens": 0.0,
        "active_request_tokens": 0.0,
        "overfill_tokens": 0.0,
        "slowness_tokens": 0.0,
    }


def test_each_rank_is_asked_in_its_own_block_size(stage: Stage) -> None:
    """E16: the block size comes from the events; a rank without any has the default."""
    prompt = unique_prompt(0, 200)
    stage.store(A, prompt_of(prompt.token_ids[:96]), size=32)
    stage.store(B, prompt_of(prompt.token_ids[:48]), size=16)
    rated = {each.rank: each for each in stage.scheduler.decide(prompt, [A, B, C], 0.0).rated}
    assert [rated[rank].block_size for rank in (A, B, C)] == [32, 16, 16]
    assert [rated[rank].overlap.gpu for rank in (A, B, C)] == [3, 3, 0]
    assert rated[A].terms["own_prefill_tokens"] == 104
    assert stage.place(prompt, A, B, C).lease.block_size == 32


@pytest.mark.parametrize(
    ("credit", "uncached_tokens"),
    [(None, [36, 52, 84]), (TierCredit(cpu=0.5, disk=0.0), [36, 68, 100])],
)
def test_slower_tiers_save_less(credit: TierCredit | None, uncached_tokens: list[int]) -> None:
    """An engine that offloads keeps evicted blocks in host memory or on disk."""
    stage = Stage(credit=credit)
    prompt = unique_prompt(0, 100)
    for rank, tier in zip((A, B, C), Tier, strict=True):
        stage.store(rank, prompt_of(prompt.token_ids[:64]), tier=tier)
    placed = stage.place(prompt, A, B, C)
    decision, lease = placed.decision, placed.lease
    assert [each.uncached_tokens for each in decision.rated] == uncached_tokens
    assert (decision.winner, lease.prefill_tokens) == (A, 36)
    assert stage.place(prompt, C).lease.prefill_tokens == uncached_tokens[2]


def test_a_rank_that_left_and_came_back_starts_idle(stage: Stage) -> None:
    """B3: the old requests' leases are settled after the return."""
    old = stage.place(unique_prompt(0, 100), A).lease
    stage.load.remove(A)
    new = stage.place(unique_prompt(1, 100), A).lease
    old.settle(Outcome.ENGINE_FAILED, 1.0)
    assert stage.load.of(A).active_requests == 1
    new.settle(Outcome.OK, 2.0)
    assert stage.load.of(A).active_requests == 0
    stage.load.check()
