"""A backend in production is checked by samples, and put aside when it is wrong."""

from array import array

import pytest

from kvrouter.tokenize.backend import Backend, EncodeError
from kvrouter.tokenize.ladder import Ladder


class Letters:
    """One id for each letter; `wrong` letters get another one, `refused` ones none."""

    def __init__(
        self, name: str, wrong: str = "", refused: str = "", *, panics: bool = False
    ) -> None:
        self._panics = panics
        self.name = name
        self.texts: list[str] = []
        self._wrong = wrong
        self._refused = refused

    def encode(self, text: str) -> "array[int]":
        self.texts.append(text)
        if set(self._refused) & set(text):
            raise EncodeError("match limit", panicked=self._panics)
        return array("I", [0 if letter in self._wrong else ord(letter) for letter in text])


def ladder(*steps: Backend, check_every: int = 1) -> Ladder:
    return Ladder(steps, "proven", check_every=check_every)


def test_the_first_step_encodes_and_the_reference_is_not_asked() -> None:
    fast, hf = Letters("fast"), Letters("hf")
    both = ladder(fast, hf, check_every=0)
    assert list(both.encode("ab")) == [97, 98]
    assert (both.name, both.has_sample, hf.texts) == ("fast", False, [])


def test_one_of_n_is_compared_later() -> None:
    hf = Letters("hf")
    both = ladder(Letters("fast"), hf, check_every=3)
    for text in "abcde":
        both.encode(text)
    assert (both.has_sample, hf.texts) == (True, [])
    both.check_sample()
    assert (both.has_sample, hf.texts) == (False, ["c"])
    assert (both.stats.checked, both.stats.mismatched) == (1, 0)
    both.check_sample()
    assert both.stats.checked == 1


def test_a_difference_switches_to_the_reference_and_says_so(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """A library's bug that the corpus did not meet."""
    both = ladder(Letters("fast", wrong="x"), Letters("hf"))
    both.encode("axb")
    both.check_sample()
    assert both.name == "hf"
    assert both.stats.mismatched == 1
    assert "fast gave other ids" in both.reason
    assert "'axb'" in caplog.text
    assert list(both.encode("axb")) == [97, 120, 98]
    assert not both.has_sample


def test_the_next_step_that_is_right_is_taken() -> None:
    steps = [
        Letters("fast", wrong="x"),
        Letters("also", wrong="x"),
        Letters("third"),
        Letters("hf"),
    ]
    all_four = ladder(*steps)
    all_four.encode("x")
    all_four.check_sample()
    assert all_four.name == "third"


def test_a_text_that_the_first_can_not_encode_is_encoded_by_the_reference() -> None:
    """A pathological text meets a limit of a regex engine."""
    both = ladder(Letters("fast", refused="x"), Letters("hf"), check_every=0)
    assert list(both.encode("x")) == [120]
    assert (both.name, both.stats.failed) == ("fast", 1)


def test_one_that_panicked_is_not_asked_again(caplog: pytest.LogCaptureFixture) -> None:
    """Whatever its library locked then stays locked."""
    fast = Letters("fast", refused="x", panics=True)
    both = ladder(fast, Letters("also"), Letters("hf"), check_every=0)
    assert list(both.encode("x")) == [120]
    assert (both.name, both.reason, both.stats.failed) == ("also", "match limit", 1)
    assert "match limit" in caplog.text
    both.encode("x")
    assert len(fast.texts) == 1


def test_a_sample_of_a_backend_that_was_put_aside_blames_no_other(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """Two samples of a wrong backend are compared at the same time, or one after it panicked."""
    fast = Letters("fast", wrong="x", refused="y", panics=True)
    all_three = ladder(fast, Letters("also"), Letters("hf"))
    all_three.encode("x")
    all_three.encode("y")
    assert all_three.name == "also"
    all_three.check_sample()
    assert (all_three.name, all_three.stats.mismatched) == ("also", 1)
    assert "also gave" not in caplog.text


def test_a_sample_that_the_reference_can_not_encode_says_nothing() -> None:
    both = ladder(Letters("fast"), Letters("hf", refused="x"))
    both.encode("x")
    both.check_sample()
    assert (both.name, both.stats.checked) == ("fast", 0)


def test_the_reference_alone_checks_nothing() -> None:
    alone = ladder(Letters("hf"))
    alone.encode("a")
    assert not alone.has_sample
