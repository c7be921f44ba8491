"""Prompt tokens as the engine counts them, against the router's."""

from kvrouter.token_counts import MIN_EQUAL, TEXT_EVERY, WINDOW, TokenCounts


def counts(*differences: int) -> TokenCounts:
    """Answers to prompts of 100 tokens that the engine counts so many more of."""
    made = TokenCounts()
    for difference in differences:
        made.observe(100, 100 + difference)
    return made


def test_equal_counts_are_no_problem() -> None:
    equal = counts(0, 0)
    assert (equal.problem, equal.equal_total, equal.different_total) == ("", 2, 0)


def test_one_difference_is_a_problem_that_names_both_numbers() -> None:
    """A tokenizer that is not the engine's, another chat template."""
    different = counts(0, 0, 3)
    assert "100" in different.problem
    assert "103" in different.problem


def test_only_the_difference_that_brings_the_problem_is_told() -> None:
    """One line in the log, however many answers differ."""
    different = counts(0)
    assert different.observe(100, 103)
    assert not different.observe(100, 104)
    assert "104" in different.problem


def test_the_problem_is_over_when_it_has_left_the_window() -> None:
    different = counts(3, *[0] * (WINDOW - 1))
    assert different.problem
    different.observe(100, 100)
    assert not different.problem
    assert different.observe(100, 103)


def test_ids_are_sent_when_enough_counts_were_equal() -> None:
    made = counts(*[0] * (MIN_EQUAL - 1))
    assert not made.lets_ids_be_sent()
    made.observe(100, 100)
    assert made.lets_ids_be_sent()


def test_now_and_then_a_text_is_sent_so_that_the_engine_counts_by_itself() -> None:
    made = counts(*[0] * MIN_EQUAL)
    sent = [made.lets_ids_be_sent() for _ in range(3 * TEXT_EVERY)]
    assert sent.count(False) == 3


def test_no_ids_are_sent_after_a_difference() -> None:
    assert not counts(*[0] * MIN_EQUAL, 1).lets_ids_be_sent()
