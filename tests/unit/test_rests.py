"""Engines that did not answer rest, longer each time."""

from itertools import pairwise
from random import Random

import pytest

from kvrouter.tokenize.rests import FIRST_S, MAX_S, Rests

A, B = "http://a", "http://b"


@pytest.fixture
def rests() -> Rests:
    return Rests(Random(1), question_s=4.0)


def test_each_has_its_turn(rests: Rests) -> None:
    assert [rests.choose([A, B], turn, 0.0) for turn in range(3)] == [A, B, A]
    assert rests.choose([], 0, 0.0) is None


def test_one_that_failed_is_left_out_until_it_has_rested(rests: Rests) -> None:
    rests.failed(A, 0.0, 4.0)
    assert rests.choose([A, B], 0, 4.1) == B
    assert rests.choose([A], 0, 4.0 + 0.7 * FIRST_S) is None
    assert rests.choose([A], 0, 4.0 + 1.3 * FIRST_S) == A


def test_after_a_rest_one_question_goes_out_and_its_answer_decides(rests: Rests) -> None:
    rests.failed(A, 0.0, 0.0)
    assert rests.choose([A], 0, 2.0) == A
    assert rests.choose([A], 0, 2.1) is None
    rests.answered(A)
    assert rests.choose([A], 0, 2.2) == A
    assert rests.resting([A, B]) == 0


def test_a_question_that_nobody_answered_for_is_asked_again(rests: Rests) -> None:
    """Its thread died."""
    rests.failed(A, 0.0, 0.0)
    assert rests.choose([A], 0, 2.0) == A
    assert rests.choose([A], 0, 6.1) == A


def test_rests_grow_up_to_a_bound(rests: Rests) -> None:
    now, lengths = 0.0, []
    for _ in range(9):
        rests.failed(A, now, now)
        began = now
        while rests.choose([A], 0, now) is None:
            now += 0.01
        lengths.append(now - began)
    assert 0.7 * FIRST_S < lengths[0] < 1.3 * FIRST_S
    assert all(1.1 * one < other for one, other in pairwise(lengths[:6]))
    assert 0.7 * MAX_S < lengths[-1] < 1.3 * MAX_S


def test_questions_that_were_under_way_make_a_rest_no_longer(rests: Rests) -> None:
    """Sixteen prompts wait for an engine that hangs; it is one failure."""
    for _ in range(16):
        rests.failed(A, 0.0, 4.0)
    assert rests.choose([A], 0, 4.0 + 1.3 * FIRST_S) == A


def test_what_is_long_gone_is_forgotten(rests: Rests) -> None:
    rests.failed(A, 0.0, 0.0)
    rests.failed(B, 200.0, 200.0)
    assert rests.resting([A, B]) == 1
