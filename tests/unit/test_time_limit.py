"""Foreign code ends in time, in whatever thread, and nobody else notices."""

import contextlib
import threading
import time

import pytest

from kvrouter.tokenize.time_limit import OverrunError, TimeLimit

LIMIT = TimeLimit(0.04)


def for_ever() -> None:
    while True:
        pass


def test_what_ends_in_time_gives_its_result_or_its_error() -> None:
    assert LIMIT.run(divmod, 7, 2) == (3, 1)
    with pytest.raises(ZeroDivisionError):
        LIMIT.run(divmod, 7, 0)


def test_what_does_not_end_is_ended() -> None:
    with pytest.raises(OverrunError):
        LIMIT.run(for_ever)


def test_code_that_catches_exceptions_is_ended_too() -> None:
    def stubborn() -> None:
        while True:
            with contextlib.suppress(Exception):
                for_ever()

    with pytest.raises(OverrunError):
        LIMIT.run(stubborn)


@pytest.mark.parametrize("goes_on", [False, True])
def test_an_exception_may_get_lost_on_its_way(*, goes_on: bool) -> None:
    """In what the garbage collector calls, say: it is not waited for, and comes again."""

    def deaf() -> None:
        with contextlib.suppress(BaseException):
            for_ever()
        while goes_on:
            pass

    with pytest.raises(OverrunError):
        LIMIT.run(deaf)
    assert LIMIT.run(int, "1") == 1


def test_only_the_thread_that_takes_too_long_is_ended() -> None:
    turns: list[int] = []

    def patient() -> None:
        until = time.monotonic() + 0.2
        while time.monotonic() < until:
            turns.append(LIMIT.run(int, "1"))

    other = threading.Thread(target=patient)
    other.start()
    with pytest.raises(OverrunError):
        LIMIT.run(for_ever)
    other.join()
    assert len(turns) > 100


@pytest.mark.slow
def test_an_exception_never_comes_after_its_call() -> None:
    """The call ends in the same moment: it is either over or cut short, and nothing comes later."""
    late = TimeLimit(0.01)
    ended = 0
    for turn in range(600):
        try:
            late.run(time.sleep, 0.01 + turn % 30 / 10_000)
        except OverrunError:
            ended += 1
    assert 0 < ended < 600
