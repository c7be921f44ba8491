"""The fleet: pools, routes, and what events do to them."""

import time

import pytest
from support.fleets import BASE, OTHER, FakeSource, join, new_fleet
from support.prompts import prompt_of, unique_prompt

from events import BlocksCleared, BlocksRemoved, BlocksStored, EventBatch, WorkerRank
from events.stream import ResyncReason, StreamState
from kvrouter.breaker import Answer
from kvrouter.config import BreakerConfig, PredictionConfig
from kvrouter.fleet import Fleet
from kvrouter.load import Outcome
from kvrouter.openai.answer import Usage
from kvrouter.openai.errors import Fault, RequestError
from kvrouter.prompt import Fidelity
from kvrouter.proof import Measurement
from kvrouter.report import judge
from kvrouter.token_counts import MIN_EQUAL
from kvrouter.workers import ServedModel, WorkerFacts, WorkerState


def stored(*hashes: int, capacity: int = 4) -> EventBatch:
    tokens = list(range(4 * len(hashes)))
    event = BlocksStored(block_hashes=list(hashes), token_ids=tokens, block_size=capacity)
    return EventBatch(0.0, [event])


def fault_of(fleet: Fleet, model: str | None) -> Fault:
    with pytest.raises(RequestError) as raised:
        fleet.route(model)
    return raised.value.fault


def test_names_lead_to_pools_and_adapters_to_their_base() -> None:
    fleet = new_fleet()
    join(fleet, "a")
    join(fleet, "b", OTHER)
    assert fleet.route("m").pool is fleet.route("lora-a").pool is not fleet.route("n").pool
    assert fleet.route("lora-a").lora == "lora-a"
    assert fleet.route("m").lora is None
    assert fleet.route("m").namespace(None) == b""
    assert len({fleet.route("m").namespace(salt) for salt in (None, "s", "t")}) == 3
    fleet.check()


def test_what_a_model_name_can_be_wrong_about() -> None:
    """F9, F15: unknown, ambiguous, or too early."""
    fleet = new_fleet()
    assert fault_of(fleet, "m") is Fault.NO_WORKER
    join(fleet, "a")
    assert fleet.route(None).model == "m"
    assert fault_of(fleet, "zzz") is Fault.NO_SUCH_MODEL
    join(fleet, "b", OTHER)
    assert fault_of(fleet, None) is Fault.BAD_REQUEST


def test_a_worker_that_comes_back_with_another_model_leaves_its_old_blocks() -> None:
    """A new deployment behind an old address."""
    fleet = new_fleet()
    rank = join(fleet, "a")
    fleet.on_batch(rank, stored(1, 2))
    assert fleet.pools["m"].index.blocks(rank) == 2
    join(fleet, "a", OTHER)
    assert fleet.pools["m"].index.blocks(rank) == 0
    assert fleet.pool_of("a") is fleet.pools["n"]
    fleet.check()


def test_events_of_a_removed_worker_change_nothing() -> None:
    """I12: its last events are still on the way."""
    fleet = new_fleet()
    rank = join(fleet, "a")
    fleet.on_batch(rank, stored(1))
    fleet.remove("a")
    fleet.on_batch(rank, stored(2))
    fleet.on_resync(rank, ResyncReason.GAP)
    fleet.on_state(rank, StreamState.LIVE)
    assert fleet.pools["m"].index.stats().blocks == 0
    assert join(fleet, "a") == rank
    assert fleet.pools["m"].index.blocks(rank) == 0
    fleet.check()


def test_a_dp_rank_that_is_no_more_is_forgotten() -> None:
    fleet = new_fleet()
    two = WorkerFacts(models=BASE.models, events={0: None, 1: None})
    join(fleet, "a", two)
    second = WorkerRank("a", 1)
    fleet.on_batch(second, stored(1))
    join(fleet, "a", BASE)
    assert second not in fleet.ranks
    assert fleet.pools["m"].index.blocks(second) == 0
    fleet.check()


def test_a_resync_drops_blocks_predictions_and_measurements_of_that_rank_only() -> None:
    """E9, E11, E13."""
    fleet = new_fleet()
    first, second = join(fleet, "a"), join(fleet, "b")
    for rank in (first, second):
        fleet.on_batch(rank, stored(1, 2))
    fleet.on_resync(first, ResyncReason.RESTART)
    index = fleet.pools["m"].index
    assert (index.blocks(first), index.blocks(second)) == (0, 2)
    assert fleet.ranks[first].last_resync is ResyncReason.RESTART
    fleet.check()


def test_contradicting_events_ask_for_the_history_once_and_then_let_it_go() -> None:
    """More copies than the worker has blocks: a history that says so will say so again."""
    fleet = new_fleet()
    small = WorkerFacts(models=BASE.models, block_size=4, capacity_blocks=2)
    rank = join(fleet, "a", small)
    source = FakeSource()
    fleet.ranks[rank].source = source
    fleet.on_batch(rank, stored(1, 2, 3))
    assert source.resyncs == 1
    fleet.on_resync(rank, ResyncReason.REQUESTED)
    fleet.on_batch(rank, stored(1, 2, 3))
    assert source.resyncs == 1
    assert fleet.pools["m"].index.blocks(rank) == 0
    fleet.check()


def test_stored_blocks_need_no_prediction_any_more() -> None:
    """Confirmed: once evicted, a block must not be believed in because it was predicted."""
    fleet = new_fleet()
    rank = join(fleet, "a")
    pool = fleet.pools["m"]
    prompt = prompt_of(range(9))
    placed = pool.scheduler.place(prompt, [rank], 0.0)
    assert pool.scheduler.decide(prompt, [rank], 0.1).chosen.held_blocks > 0
    fleet.on_batch(rank, stored(1, 2))
    fleet.on_batch(
        rank, EventBatch(0.0, [BlocksRemoved(block_hashes=[1]), BlocksRemoved(block_hashes=[2])])
    )
    assert pool.scheduler.decide(prompt, [rank], 0.2).chosen.held_blocks == 0
    placed.lease.settle(Outcome.OK, 0.3)
    fleet.check()


@pytest.mark.parametrize("how", ["clear", "resync"])
def test_a_rank_that_lost_all_blocks_is_not_expected_to_have_any(how: str) -> None:
    """E13, E11: what was predicted before a clear or a restart is gone with the rest."""
    fleet = new_fleet()
    rank = join(fleet, "a")
    scheduler = fleet.pools["m"].scheduler
    prompt = prompt_of(range(9))
    scheduler.place(prompt, [rank], 0.0).lease.settle(Outcome.OK, 0.0)
    assert scheduler.decide(prompt, [rank], 0.1).chosen.held_blocks == 2
    if how == "clear":
        fleet.on_batch(rank, EventBatch(0.0, [BlocksCleared()]))
    else:
        fleet.on_resync(rank, ResyncReason.RESTART)
    assert scheduler.decide(prompt, [rank], 0.2).chosen.held_blocks == 0


def test_a_resync_forgets_what_was_measured_before() -> None:
    fleet = new_fleet()
    rank = join(fleet, "a")
    state = fleet.ranks[rank]
    state.proof.observe(Measurement(64, 64, 100, 100))
    assert state.proof.verdict == "exact"
    fleet.on_resync(rank, ResyncReason.RESTART)
    assert state.proof.verdict == "blind"
    assert state.proof.reason.startswith("not measured yet since the engine restarted")


def test_only_exact_prompts_are_compared() -> None:
    """T7: of a prompt with an image only the text before it is known."""
    fleet = new_fleet()
    rank = join(fleet, "a")
    prompt = unique_prompt(1, 33)
    prompt.fidelity = Fidelity.APPROXIMATE
    placed = fleet.pools["m"].scheduler.place(prompt, [rank], 1.0)
    fleet.attempt_ended(placed, Outcome.OK, Usage(500, 1, 0), prompt)
    assert fleet.ranks[rank].proof.compared_total == 0


@pytest.mark.parametrize(
    ("engines", "equal", "different"), [(33, 0, 0), (34, 0, 1)], ids=["as ours", "another"]
)
def test_of_a_prompt_that_went_as_ids_only_another_count_says_something(
    engines: int, equal: int, different: int
) -> None:
    """An engine that ignores ids, or takes them for something else."""
    fleet = new_fleet()
    rank = join(fleet, "a")
    pool = fleet.pools["m"]
    prompt = unique_prompt(1, 33)
    prompt.ids_sent = True
    placed = pool.scheduler.place(prompt, [rank], 1.0)
    fleet.attempt_ended(placed, Outcome.OK, Usage(engines, 1, 0), prompt)
    counts = pool.token_counts
    assert (counts.equal_total, counts.different_total) == (equal, different)
    assert bool(counts.problem) == bool(different)


@pytest.mark.parametrize("how", ["joins", "restarts", "fails", "goes"])
def test_an_engine_that_may_be_another_gets_no_ids_until_it_has_counted(how: str) -> None:
    """It was started again with another model: it would take the ids for words of its own."""
    fleet = new_fleet()
    rank = join(fleet, "a")
    pool, prompt = fleet.pools["m"], unique_prompt(1, 33)

    def answer(count: int = MIN_EQUAL) -> bool:
        for _ in range(count):
            placed = pool.scheduler.place(prompt, [rank], time.monotonic())
            fleet.attempt_ended(placed, Outcome.OK, Usage(33, 1, 0), prompt)
        return pool.lets_ids_be_sent()

    assert answer()
    if how == "joins":
        join(fleet, "a")
    elif how == "restarts":
        fleet.on_resync(rank, ResyncReason.RESTART)
    elif how == "fails":
        placed = pool.scheduler.place(prompt, [rank], time.monotonic())
        fleet.attempt_ended(placed, Outcome.ENGINE_FAILED, None, prompt)
    else:
        fleet.remove("a")
        join(fleet, "a")
    assert not pool.lets_ids_be_sent()
    assert not answer(MIN_EQUAL - 1)
    assert answer(1)


def test_answers_are_measured_and_events_expected() -> None:
    fleet = new_fleet()
    rank = join(fleet, "a")
    state = fleet.ranks[rank]
    source = state.source = FakeSource()
    prompt = unique_prompt(1, 33)
    placed = fleet.pools["m"].scheduler.place(prompt, [rank], 1.0)
    fleet.attempt_ended(placed, Outcome.OK, Usage(33, 1, 0), prompt)
    assert state.proof.compared_total == state.proof.equal_total == 1
    assert source.expected == 1
    source.stats.last_batch_at = 2.0  # its events came before its response
    fleet.attempt_ended(placed, Outcome.OK, None, prompt)
    assert source.expected == 1
    source.stats.last_batch_at = 0.5  # of an earlier request; then events were switched off
    fleet.attempt_ended(placed, Outcome.OK, None, prompt)
    assert source.expected == 2
    fleet.attempt_ended(placed, Outcome.ENGINE_FAILED, Usage(33, 1, 0), prompt)
    assert state.proof.compared_total == 1
    assert source.expected == 2


@pytest.mark.parametrize("outcome", list(Outcome))
def test_a_request_that_its_engine_failed_casts_doubt_on_the_engine(outcome: Outcome) -> None:
    """E19: it was away between two probes, and nothing else shows that: it has no events."""
    fleet = new_fleet()
    rank = join(fleet, "a")
    prompt = unique_prompt(1, 33)
    placed = fleet.pools["m"].scheduler.place(prompt, [rank], 1.0)
    fleet.attempt_ended(placed, outcome, None, prompt)
    doubted = fleet.workers["a"].doubt.calls_for_a_look(2.0)
    assert doubted == (outcome is Outcome.ENGINE_FAILED)
    fleet.remove("a")
    fleet.attempt_ended(placed, outcome, None, prompt)


def test_a_request_from_before_a_restart_says_nothing_about_the_new_engine() -> None:
    """E11: it was placed by blocks that are gone, and served by whoever was there."""
    fleet = new_fleet()
    rank = join(fleet, "a")
    source = fleet.ranks[rank].source = FakeSource()
    prompt = unique_prompt(1, 33)
    scheduler, proof = fleet.pools["m"].scheduler, fleet.ranks[rank].proof
    before = scheduler.place(prompt, [rank], time.monotonic())
    fleet.on_resync(rank, ResyncReason.RESTART)
    fleet.attempt_ended(before, Outcome.OK, Usage(50, 1, 0), prompt)
    assert (proof.compared_total, source.expected) == (0, 0)
    assert fleet.pools["m"].token_counts.problem == ""
    after = scheduler.place(prompt, [rank], time.monotonic())
    fleet.attempt_ended(after, Outcome.OK, Usage(33, 1, 0), prompt)
    assert (proof.compared_total, source.expected) == (1, 1)


def test_a_prompt_that_is_all_cached_makes_nobody_expect_events() -> None:
    """Its engine has nothing to store: that it is silent says nothing."""
    fleet = new_fleet()
    rank = join(fleet, "a")
    source = fleet.ranks[rank].source = FakeSource()
    fleet.on_batch(rank, stored(1, 2))
    placed = fleet.pools["m"].scheduler.place(prompt_of(range(9)), [rank], 1.0)
    assert placed.decision.chosen.held_blocks == 2
    fleet.attempt_ended(placed, Outcome.OK, None, prompt_of(range(9)))
    assert source.expected == 0


def test_a_rank_that_nobody_listens_to_is_believed_to_hold_nothing() -> None:
    """E19: its events moved, or were switched off; nothing would tell what it loses."""
    fleet = new_fleet()
    rank, other = join(fleet, "a"), join(fleet, "b")
    state, pool = fleet.ranks[rank], fleet.pools["m"]
    state.source = FakeSource()
    fleet.on_state(rank, StreamState.LIVE)
    assert state.hears_events
    for each in (rank, other):
        fleet.on_batch(each, stored(1, 2))
    state.proof.observe(Measurement(64, 64, 100, 100))
    pool.scheduler.place(unique_prompt(1, 33), [rank], 0.0).lease.settle(Outcome.OK, 0.0)
    fleet.unheard(rank)
    assert (pool.index.blocks(rank), pool.index.blocks(other)) == (0, 2)
    held = pool.scheduler.decide(unique_prompt(1, 33), [rank], 0.1).chosen.held_blocks
    assert held == 0
    assert judge(pool, rank, state)[0] == "blind"
    assert state.proof.verdict == "blind"
    state.source = FakeSource()  # of another place, with no connection yet
    assert fleet.prediction_ttl_s(rank) == PredictionConfig().blind_ttl_s
    assert "no connection" in judge(pool, rank, state)[1]
    fleet.check()


def test_predictions_last_longer_where_no_event_will_confirm_them() -> None:
    """E6 of the hard cases: an event-silent rank is judged by predictions alone."""
    fleet = new_fleet()
    rank = join(fleet, "a")
    settings = PredictionConfig()
    assert fleet.prediction_ttl_s(rank) == settings.blind_ttl_s
    fleet.ranks[rank].source = FakeSource()
    fleet.on_state(rank, StreamState.LIVE)
    assert fleet.prediction_ttl_s(rank) == settings.ttl_s
    fleet.on_state(rank, StreamState.SILENT)
    assert fleet.prediction_ttl_s(rank) == settings.blind_ttl_s


def test_models_are_the_union_with_their_parents() -> None:
    fleet = new_fleet()
    join(fleet, "a")
    join(fleet, "b")
    join(fleet, "c", OTHER)
    listed = fleet.models()["data"]
    assert [(each["id"], each["parent"]) for each in listed] == [
        ("m", None),
        ("lora-a", "m"),
        ("n", None),
    ]


@pytest.mark.parametrize("state", list(WorkerState))
def test_only_a_ready_worker_gets_requests(state: WorkerState) -> None:
    """Whatever its load: one that is being drained is often the least loaded."""
    fleet = new_fleet()
    first, second = join(fleet, "a"), join(fleet, "b")
    fleet.workers["a"].state = state
    candidates = fleet.pools["m"].candidates("m", (), 0.0)
    assert candidates == ([first, second] if state is WorkerState.READY else [second])


def test_an_adapters_requests_go_to_workers_that_have_it() -> None:
    """The others would answer 404."""
    fleet = new_fleet()
    plain = WorkerFacts(models=(ServedModel("m"),), block_size=4)
    first, second = join(fleet, "a", plain), join(fleet, "b")
    pool = fleet.pools["m"]
    assert pool.candidates("m", (), 0.0) == [first, second]
    assert pool.candidates("lora-a", (), 0.0) == [second]


def test_an_open_breaker_is_a_reason_to_go_elsewhere_but_not_to_serve_nobody() -> None:
    """A few requests that make every engine fail must not close the door to all others."""
    fleet = new_fleet()
    first, second = join(fleet, "a"), join(fleet, "b")
    pool = fleet.pools["m"]

    def open_breaker(name: str) -> None:
        for _ in range(BreakerConfig().failures):
            fleet.workers[name].breaker.record(Answer.FAILURE, 0.0)

    open_breaker("a")
    assert pool.candidates("m", (), 0.1) == [second]
    assert pool.candidates("m", {"b"}, 0.1) == []
    open_breaker("b")
    assert pool.candidates("m", (), 0.1) == [first, second]


def test_a_worker_that_asked_for_a_pause_gets_nothing_while_others_can_take_it() -> None:
    """F8: 503 with Retry-After."""
    fleet = new_fleet()
    first, second = join(fleet, "a"), join(fleet, "b")
    pool = fleet.pools["m"]
    fleet.workers["a"].breaker.record(Answer.BACKPRESSURE, 0.0, retry_after_s=5.0)
    assert pool.candidates("m", (), 4.9) == [second]
    assert pool.candidates("m", {"b"}, 4.9) == [first]
    assert pool.candidates("m", (), 5.0) == [first, second]


def test_the_longest_sequence_is_what_any_worker_takes_if_all_tell() -> None:
    """Longer texts are not encoded to their end, so a worker that may take them all counts."""
    fleet = new_fleet()

    def joined(name: str, *lengths: int | None) -> None:
        models = tuple(ServedModel("m", max_model_len=length) for length in lengths)
        join(fleet, name, WorkerFacts(models=models, block_size=4))

    joined("a", 1000)
    joined("b", 3000)
    assert fleet.pools["m"].max_model_len() == 3000
    joined("c", None)
    assert fleet.pools["m"].max_model_len() is None
