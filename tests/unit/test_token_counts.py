"""Prompt tokens as the engine counts them, against the router's."""

from kvrouter.token_counts import MIN_EQUAL, TEXT_EVERY, WINDOW, TokenCounts


def counts(*differences: int) -> TokenCounts:
    """Answers to prompts of 100 tokens that the engine counts so many more of."""
    made = TokenCounts()
    for difference in differences:
        made.observe(100, 100 + difference, "a")
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
    assert different.observe(100, 103, "a")
    assert not different.observe(100, 104, "a")
    assert "104" in different.problem


def test_the_problem_is_over_when_it_has_left_the_window() -> None:
    different = counts(3, *[0] * (WINDOW - 1))
    assert different.problem
    different.observe(100, 100, "a")
    assert not different.problem
    assert different.observe(100, 103, "a")


def test_ids_are_sent_when_enough_counts_were_equal() -> None:
    made = counts(*[0] * (MIN_EQUAL - 1))
    assert not made.lets_ids_be_sent(["a"])
    made.observe(100, 100, "a")
    assert made.lets_ids_be_sent(["a"])


def test_now_and_then_a_text_is_sent_so_that_the_engine_counts_by_itself() -> None:
    made = counts(*[0] * MIN_EQUAL)
    sent = [made.lets_ids_be_sent(["a"]) for _ in range(3 * TEXT_EVERY)]
    assert sent.count(False) == 3


def test_no_ids_are_sent_after_a_difference() -> None:
    assert not counts(*[0] * MIN_EQUAL, 1).lets_ids_be_sent(["a"])


def test_no_ids_are_sent_where_one_that_may_get_them_has_not_counted() -> None:
    """An engine with another tokenizer would answer to what the ids mean there."""
    made = counts(*[0] * MIN_EQUAL)
    assert not made.lets_ids_be_sent(["a", "b"])
    made.observe(100, 100, "b")
    assert made.lets_ids_be_sent(["a", "b"])
    made.doubt("b")
    assert not made.lets_ids_be_sent(["a", "b"])
    assert made.lets_ids_be_sent(["a"])


def test_an_engine_that_may_be_another_has_to_count_anew() -> None:
    made = counts(*[0] * MIN_EQUAL)
    made.doubt("a")
    for _ in range(MIN_EQUAL):
        assert not made.lets_ids_be_sent(["a"])
        made.observe(100, 100, "a")
    assert made.lets_ids_be_sent(["a"])


def test_with_another_tokenizer_everything_is_counted_anew() -> None:
    made = counts(*[0] * MIN_EQUAL, 3)
    made.begin_anew()
    assert (made.problem, made.equal_total, made.different_total) == ("", MIN_EQUAL, 1)
    made.observe(100, 100, "a")
    assert not made.lets_ids_be_sent(["a"])
