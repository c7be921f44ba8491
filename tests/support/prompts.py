"""Prompts for tests of load and choice."""

from array import array
from collections.abc import Sequence

from kvrouter.prompt import Prompt


def prompt_of(token_ids: Sequence[int]) -> Prompt:
    """An exact prompt of these ids."""
    return Prompt(array("I", token_ids))


def unique_prompt(number: int, tokens: int) -> Prompt:
    """A prompt that shares no block with one of another number (for up to 100,000 tokens)."""
    start = 1 + number * 100_000
    return prompt_of(range(start, start + tokens))


def shared_prompt(prefix_tokens: int, number: int, tail_tokens: int) -> Prompt:
    """The same first `prefix_tokens` for all numbers, then a tail of this number's own."""
    start = 1_000_000 + number * 10_000
    tail = array("I", range(start, start + tail_tokens))
    return Prompt(array("I", range(1, prefix_tokens + 1)) + tail)
