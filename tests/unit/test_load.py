"""The accounting of requests in flight."""

import pytest
from support.prompts import prompt_of, shared_prompt, unique_prompt

from events import WorkerRank
from kvrouter.load import Lease, Load, Outcome
from kvrouter.prompt import Prompt
from kvrouter.rank_load import IDLE

A = WorkerRank("a")
B = WorkerRank("b")
BLOCK = 16


@pytest.fixture
def load() -> Load:
    return Load()


def book(
    load: Load, prompt: Prompt, rank: WorkerRank = A, overlap: float = 0, now: float = 0.0
) -> Lease:
    return load.book(rank, prompt, overlap_blocks=overlap, block_size=BLOCK, now=now)


def assert_idle(load: Load, rank: WorkerRank = A) -> None:
    load.check()
    now = load.of(rank)
    assert (now.active_requests, now.prefill_tokens, now.decode_tokens) == (0, 0, 0)


def test_a_booking_counts_the_request_its_uncached_tokens_and_its_blocks(load: Load) -> None:
    book(load, unique_prompt(0, 40), overlap=1)
    now = load.of(A)
    assert (now.active_requests, now.prefill_tokens, now.decode_blocks) == (1, 24, 3)
    assert load.of(B) == IDLE


def test_a_prompt_costs_at_least_one_prefill_token(load: Load) -> None:
    """An engine recomputes the last token even of a prompt that it has cached in full."""
    book(load, unique_prompt(0, 32), overlap=2)
    book(load, Prompt.blind(0, "no tokenizer"))
    assert load.of(A).prefill_tokens == 2


def test_a_prompt_without_hashes_counts_by_its_length(load: Load) -> None:
    lease = book(load, Prompt.blind(33, "no tokenizer"))
    assert load.of(A).decode_blocks == 3
    lease.settle(Outcome.OK, 1.0)
    assert_idle(load)


def test_a_prompt_known_in_part_counts_its_unknown_rest(load: Load) -> None:
    """A chat with an image is known up to the image; its length is an estimate."""
    known = prompt_of(range(1, 33))
    known.prompt_tokens = 100
    lease = book(load, known)
    now = load.of(A)
    assert (now.prefill_tokens, now.decode_blocks) == (100, 7)
    lease.settle(Outcome.OK, 1.0)
    assert_idle(load)


def test_a_prefix_shared_by_requests_in_flight_counts_once(load: Load) -> None:
    """C7: hundreds of generations over one document do not fill the cache hundreds of times."""
    leases = [book(load, shared_prompt(160, number, 16)) for number in range(5)]
    assert load.of(A).decode_blocks == 10 + 5
    for lease in leases[:4]:
        lease.settle(Outcome.OK, 1.0)
    assert load.of(A).decode_blocks == 10 + 1
    leases[4].settle(Outcome.OK, 1.0)
    assert_idle(load)


def test_the_prefill_ends_at_the_first_output_byte(load: Load) -> None:
    lease = book(load, unique_prompt(0, 40), now=1.0)
    lease.prefill_done(3.0)
    lease.prefill_done(4.0)
    now = load.of(A)
    assert (now.prefill_tokens, now.decode_blocks, now.active_requests) == (0, 3, 1)
    assert lease.prefill_done_at == 3.0


def test_output_says_that_the_prefill_is_over(load: Load) -> None:
    lease = book(load, unique_prompt(0, 40))
    lease.add_output_tokens(1, 2.0)
    assert load.of(A).prefill_tokens == 0
    assert lease.prefill_done_at == 2.0


def test_decode_blocks_grow_as_output_fills_them(load: Load) -> None:
    lease = book(load, unique_prompt(0, 40))
    lease.add_output_tokens(8, 1.0)
    assert load.of(A).decode_blocks == 3
    lease.add_output_tokens(1, 1.0)
    assert load.of(A).decode_blocks == 4
    lease.add_output_tokens(100, 1.0)
    assert load.of(A).decode_blocks == 10
    lease.settle(Outcome.OK, 2.0)
    assert_idle(load)


@pytest.mark.parametrize("outcome", Outcome)
def test_a_lease_is_settled_once_whatever_the_outcome(load: Load, outcome: Outcome) -> None:
    """B1, B5: `finally` blocks may settle on top of a handler that did so already."""
    lease = book(load, unique_prompt(0, 40))
    assert lease.settle(outcome, 1.0)
    assert not lease.settle(Outcome.INTERNAL_ERROR, 2.0)
    assert (lease.outcome, lease.settled_at) == (outcome, 1.0)
    assert load.totals.settled == {outcome: 1}
    assert_idle(load)


def test_nothing_moves_after_a_lease_is_settled(load: Load) -> None:
    """B1: the last bytes of an engine can be read after its client has gone."""
    lease = book(load, unique_prompt(0, 40))
    lease.settle(Outcome.CLIENT_GONE, 1.0)
    lease.prefill_done(2.0)
    lease.add_output_tokens(500, 2.0)
    assert (lease.prefill_done_at, lease.output_tokens) == (None, 0)
    assert_idle(load)


@pytest.mark.parametrize("silent", [True, False])
def test_a_long_request_stays_booked(load: Load, silent: bool) -> None:
    """B2: ten minutes of stream, or of silence, are not the end of a request."""
    lease = book(load, unique_prompt(0, 40))
    for second in range(600) if not silent else ():
        lease.add_output_tokens(1, float(second))
    now = load.of(A)
    assert now.active_requests == 1
    assert now.oldest_prefill_age_s(600.0) == (600.0 if silent else 0.0)
    assert now.prefill_tokens == (40 if silent else 0)


def test_a_removed_rank_takes_its_counts_with_it(load: Load) -> None:
    """B3: a worker leaves while requests run on it."""
    lease = book(load, unique_prompt(0, 40))
    load.remove(A)
    assert load.of(A) == IDLE
    assert load.totals.active_requests == 0
    lease.add_output_tokens(64, 1.0)
    assert lease.settle(Outcome.ENGINE_FAILED, 2.0)
    assert load.of(A) == IDLE
    assert load.totals.settled == {Outcome.ENGINE_FAILED: 1}
    load.check()


def test_old_leases_do_not_touch_a_rank_that_came_back(load: Load) -> None:
    """B3: a pod restarts under its old name while streams of the old one still end."""
    prompt = unique_prompt(0, 40)
    old = [book(load, prompt), book(load, prompt)]
    old[1].prefill_done(0.5)
    load.remove(A)
    new = book(load, prompt)
    before = load.of(A)
    for lease in old:
        lease.prefill_done(1.0)
        lease.add_output_tokens(64, 1.0)
        lease.settle(Outcome.ENGINE_FAILED, 1.0)
        load.check()
    assert load.of(A) == before
    new.settle(Outcome.OK, 2.0)
    assert_idle(load)


def test_removing_a_rank_that_has_no_load_is_fine(load: Load) -> None:
    load.remove(A)
    load.check()


def test_looking_changes_nothing(load: Load) -> None:
    """B4: health checks and dashboards ask all day."""
    prompt = shared_prompt(64, 1, 8)
    book(load, prompt)
    before = load.of(A)
    for _ in range(100):
        load.of(B)
        load.active_blocks(prompt, BLOCK)
        load.totals  # noqa: B018 - reading it is the point
    assert load.of(A) == before
    assert load.ranks() == (A,)


def test_a_refused_request_was_no_recent_work(load: Load) -> None:
    book(load, unique_prompt(0, 640)).settle(Outcome.OK, 1.0)
    refused = book(load, unique_prompt(1, 900), now=3.0)
    refused.settle(Outcome.REFUSED, 5.0)
    assert load.of(A).recent_tokens(10.0) == pytest.approx(320)
    alone = book(load, unique_prompt(1, 900), B, now=3.0)
    alone.settle(Outcome.REFUSED, 5.3)
    assert load.of(B).recency == IDLE.recency
    load.check()


def test_recent_tokens_halve_in_each_half_life(load: Load) -> None:
    lease = book(load, unique_prompt(0, 1000))
    lease.settle(Outcome.OK, 0.1)
    assert load.of(A).recent_tokens(0.0) == 1000
    assert load.of(A).recent_tokens(10.0) == pytest.approx(500)
    book(load, unique_prompt(1, 100), now=20.0)
    assert load.of(A).recent_tokens(20.0) == pytest.approx(350)


def test_a_rank_busy_long_ago_looks_idle(load: Load) -> None:
    """C8: no count stays behind, and what only breaks ties fades."""
    for number in range(50):
        book(load, unique_prompt(number, 1000)).settle(Outcome.OK, 1.0)
    now = load.of(A)
    assert (now.active_requests, now.prefill_tokens, now.decode_tokens) == (0, 0, 0)
    assert now.recent_tokens(600.0) < 1e-6


def test_the_oldest_waiting_request_gives_the_prefill_age(load: Load) -> None:
    first = book(load, unique_prompt(0, 10), now=1.0)
    book(load, unique_prompt(1, 10), now=4.0)
    assert load.of(A).oldest_prefill_age_s(6.0) == 5.0
    first.prefill_done(6.0)
    assert load.of(A).oldest_prefill_age_s(6.0) == 2.0


def test_bookings_are_numbered_across_ranks(load: Load) -> None:
    book(load, unique_prompt(0, 10))
    book(load, unique_prompt(0, 10), B)
    assert (load.of(A).last_turn, load.of(B).last_turn) == (1, 2)


def test_a_changed_block_size_keeps_older_bookings_right(load: Load) -> None:
    """E16: the first requests are booked before an event tells the engine's block size."""
    prompt = unique_prompt(0, 64)
    old = load.book(A, prompt, overlap_blocks=0, block_size=16, now=0.0)
    new = load.book(A, prompt, overlap_blocks=0, block_size=32, now=0.0)
    assert load.of(A).decode_tokens == 128
    old.settle(Outcome.OK, 1.0)
    load.check()
    assert load.of(A).decode_blocks == 2
    new.settle(Outcome.OK, 1.0)
    assert_idle(load)


def test_requests_know_which_ranks_have_their_blocks_active(load: Load) -> None:
    first = book(load, shared_prompt(64, 1, 16))
    book(load, shared_prompt(48, 2, 16), B)
    prompt = shared_prompt(64, 3, 16)
    assert load.active_blocks(prompt, BLOCK) == {A: 4, B: 3}
    first.settle(Outcome.OK, 1.0)
    assert load.active_blocks(prompt, BLOCK) == {B: 3}


def test_totals_sum_over_ranks(load: Load) -> None:
    book(load, unique_prompt(0, 40)).prefill_done(1.0)
    book(load, unique_prompt(1, 20), B)
    totals = load.totals
    assert (totals.active_requests, totals.prefill_tokens, totals.decode_tokens) == (2, 20, 80)


def test_check_finds_a_wrong_count(load: Load) -> None:
    book(load, unique_prompt(0, 40))
    load._entries[A].prefills.tokens += 1
    with pytest.raises(AssertionError, match="prefill tokens"):
        load.check()


def test_the_oldest_waiting_prefill_is_taken_to_make_progress_at_the_learned_rate(
    load: Load,
) -> None:
    """A prompt that was sent a second ago is half done; nobody polls the engine for that."""
    book(load, unique_prompt(0, 1000)).prefill_done(0.5)
    book(load, unique_prompt(1, 4000), now=10.0)
    book(load, unique_prompt(2, 3000), now=10.5)
    later = load.of(A)
    assert (later.prefill_rate, later.prefill_tokens) == (2000.0, 7000)
    assert later.queued_tokens(11.0) == 5000.0
    assert load.of(A).queued_tokens(60.0) == 3000.0


def test_without_a_first_token_yet_no_progress_is_assumed(load: Load) -> None:
    book(load, unique_prompt(0, 1000))
    assert load.of(A).queued_tokens(5.0) == 1000.0


def test_prefills_that_end_together_count_as_one_for_the_rate(load: Load) -> None:
    """An engine batches prompts: their first tokens come at the same moment."""
    leases = [book(load, unique_prompt(number, 1000)) for number in range(4)]
    for lease in leases:
        lease.prefill_done(2.0)
    assert load.of(A).prefill_rate == pytest.approx(2000.0)


def test_a_pause_between_prefills_does_not_slow_the_rate(load: Load) -> None:
    for start in (0.0, 100.0):
        book(load, unique_prompt(int(start), 1000), now=start).prefill_done(start + 1.0)
    assert load.of(A).prefill_rate == pytest.approx(1000.0)


def test_the_rate_follows_a_gpu_that_throttles(load: Load) -> None:
    for second in range(120):
        book(load, unique_prompt(second, 1000), now=float(second)).prefill_done(second + 0.1)
    for second in range(120, 240):
        book(load, unique_prompt(second, 1000), now=float(second)).prefill_done(second + 1.0)
    assert load.of(A).prefill_rate == pytest.approx(1000.0, rel=0.2)


def test_a_request_that_ends_without_a_first_token_teaches_no_rate(load: Load) -> None:
    """The client left while it waited; its time says nothing about how fast the engine is."""
    lease = book(load, unique_prompt(0, 1000))
    waiting = book(load, unique_prompt(1, 1000))
    lease.settle(Outcome.CLIENT_GONE, 30.0)
    waiting.prefill_done(30.5)
    assert load.of(A).prefill_rate == pytest.approx(2000.0)


def test_what_was_told_of_ranks_stays_as_it_was(load: Load) -> None:
    """A decision is explained some time after it fell."""
    ranks = (A, B)
    before = load.of_each(ranks)
    book(load, unique_prompt(0, 40))
    after = load.of_each(ranks)
    assert (before.active_requests, after.active_requests) == ([0, 0], [1, 0])
    assert before.each == [IDLE, IDLE]


def test_notes_of_changes_do_not_pile_up(load: Load) -> None:
    """A router runs for months with the same workers."""
    ranks = (A, B)
    for number in range(600):
        load.of_each(ranks)
        lease = book(load, Prompt.blind(number, "no tokenizer"))
        load.of_each(ranks)
        lease.settle(Outcome.OK, 1.0)
    assert len(load._stale) <= 1001
    assert load.of_each(ranks).active_requests == [0, 0]
    load.check()


def test_views_of_fleets_that_change_do_not_pile_up(load: Load) -> None:
    for number in range(100):
        load.of_each((A, WorkerRank(f"worker-{number}")))
    assert len(load._views) <= 16


def test_ranks_that_go_without_a_booking_leave_no_notes(load: Load) -> None:
    """Workers of a model that nobody asks for come and go; no decision ever takes notes in."""
    for number in range(2000):
        load.remove(WorkerRank(f"worker-{number}"))
    assert not load._stale


def test_a_check_may_find_more_notes_than_are_kept(load: Load) -> None:
    views = [(A, B), (A,)]
    for ranks in views:
        load.of_each(ranks)
    for number in range(600):
        lease = book(load, Prompt.blind(number, "no tokenizer"))
        load.of(A)
        lease.settle(Outcome.OK, 1.0)
        load.of(A)
    assert len(load._stale) > 1000
    load.check()
