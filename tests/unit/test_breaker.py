"""The breaker's whole table, and the retry budget."""

import pytest

from kvrouter.breaker import Answer, Breaker, BreakerState, RetryBudget
from kvrouter.config import BreakerConfig

SETTINGS = BreakerConfig(failures=3, open_s=2.0, max_open_s=5.0, backoff_s=1.0)


def breaker_in(state: BreakerState) -> Breaker:
    """A breaker in this state at time 10."""
    breaker = Breaker(SETTINGS)
    if state is BreakerState.CLOSED:
        return breaker
    for _ in range(SETTINGS.failures):
        breaker.record(Answer.FAILURE, 8.0)
    if state is BreakerState.HALF_OPEN:
        breaker.sending(10.0)
    return breaker


@pytest.mark.parametrize("state", list(BreakerState))
@pytest.mark.parametrize("answer", list(Answer))
def test_each_answer_moves_each_state_as_the_table_says(
    state: BreakerState, answer: Answer
) -> None:
    breaker = breaker_in(state)
    assert breaker.state is state
    breaker.record(answer, 10.0)
    failed = answer is Answer.FAILURE
    expected = {
        BreakerState.CLOSED: BreakerState.CLOSED,
        BreakerState.OPEN: BreakerState.OPEN if failed else BreakerState.CLOSED,
        BreakerState.HALF_OPEN: BreakerState.OPEN if failed else BreakerState.CLOSED,
    }
    assert breaker.state is expected[state]


def test_failures_in_a_row_open_it_and_a_success_between_them_does_not() -> None:
    breaker = Breaker(SETTINGS)
    for answer in (Answer.FAILURE, Answer.FAILURE, Answer.SUCCESS, Answer.FAILURE, Answer.FAILURE):
        breaker.record(answer, 0.0)
    assert breaker.allows(0.0)
    breaker.record(Answer.FAILURE, 0.0)
    assert not breaker.allows(1.9)
    assert breaker.opened_total == 1


def test_one_trial_is_let_through_when_the_time_is_over() -> None:
    breaker = breaker_in(BreakerState.OPEN)
    assert breaker.allows(10.0)
    breaker.sending(10.0)
    assert not breaker.allows(100.0)


def test_answers_in_a_row_that_begin_well_and_break_off_open_it() -> None:
    """A GPU that fails while it decodes: each stream has a good head."""
    breaker = Breaker(SETTINGS)
    for whole in (False, False, True, False, False, False):
        assert breaker.allows(0.0)
        breaker.record(Answer.SUCCESS, 0.0)
        breaker.ended(0.0, whole=whole)
    assert not breaker.allows(1.9)
    assert breaker.opened_total == 1


def test_a_trial_that_breaks_off_opens_it_again_and_one_that_does_not_closes_it() -> None:
    breaker = Breaker(SETTINGS)
    for at in (0.0, 0.0, 0.0, 10.0):
        breaker.sending(at)
        breaker.record(Answer.SUCCESS, at)
        breaker.ended(at, whole=False)
    assert not breaker.allows(11.9)
    assert breaker.opened_total == 2
    for whole in (True, False, False):
        breaker.sending(20.0)
        breaker.record(Answer.SUCCESS, 20.0)
        breaker.ended(20.0, whole=whole)
    assert breaker.allows(20.0)


def test_old_answers_that_come_to_their_end_say_nothing_about_new_requests() -> None:
    """A worker that takes no more connections still has streams of ten minutes."""
    breaker = Breaker(SETTINGS)
    for _ in range(SETTINGS.failures):
        breaker.record(Answer.FAILURE, 0.0)
        breaker.ended(0.0, whole=True)
    assert not breaker.allows(1.9)


def test_each_failed_trial_doubles_the_time_up_to_the_limit() -> None:
    breaker = breaker_in(BreakerState.HALF_OPEN)
    breaker.record(Answer.FAILURE, 10.0)
    assert not breaker.allows(13.9)
    assert breaker.allows(14.0)
    breaker.sending(14.0)
    breaker.record(Answer.FAILURE, 14.0)
    assert not breaker.allows(18.9)
    assert breaker.allows(19.0)


def test_a_trial_whose_client_left_does_not_close_the_door_for_good() -> None:
    """The trial request's client disconnects before the engine has said anything."""
    breaker = breaker_in(BreakerState.HALF_OPEN)
    breaker.abandoned(11.0)
    assert breaker.allows(11.0)


def test_backpressure_is_a_pause_and_not_a_failure() -> None:
    """F8: a full engine answers 503 for minutes."""
    breaker = Breaker(SETTINGS)
    for _ in range(50):
        breaker.record(Answer.BACKPRESSURE, 0.0)
    assert breaker.allows(0.0)
    assert breaker.backs_off_until > 0.9
    assert breaker.backs_off_until <= 1.0


def test_retry_after_is_honoured_but_not_without_limit() -> None:
    breaker = Breaker(SETTINGS)
    breaker.record(Answer.BACKPRESSURE, 0.0, retry_after_s=3.0)
    assert breaker.backs_off_until > 2.9
    breaker.record(Answer.BACKPRESSURE, 0.0, retry_after_s=86_400.0)
    assert breaker.backs_off_until <= 5.0


def test_requests_earn_retries_and_an_outage_uses_them_up() -> None:
    budget = RetryBudget(ratio=0.2, reserve=2.0)
    assert [budget.spend() for _ in range(3)] == [True, True, False]
    for _ in range(5):
        budget.earn()
    assert [budget.spend() for _ in range(2)] == [True, False]
