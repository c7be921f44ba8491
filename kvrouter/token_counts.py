"""Whether the engines of a model count the prompt tokens that the router counts.

Where they don't, the tokenizer or the chat template is not the engine's, and every overlap of that
model is a guess. One difference is enough to say so: exact prompts never differ when all is well.
"""

from collections import Counter, deque
from collections.abc import Iterable

WINDOW = 32
MIN_EQUAL = 8
"""Answers that must have counted the same before prompts are sent as ids."""
TEXT_EVERY = 64
"""Of the prompts that might be sent as ids, one of so many goes as text: an engine that gets ids
counts those, so nothing would be learned from it any more."""


class TokenCounts:
    """The latest comparisons of one model, and totals for metrics."""

    def __init__(self) -> None:
        self._latest: deque[tuple[int, int]] = deque(maxlen=WINDOW)
        self._asked = 0
        self._equal_of: Counter[str] = Counter()
        """By worker, since it may have become another engine."""
        self.equal_total = 0
        self.different_total = 0

    def observe(self, ours: int, engines: int, worker: str) -> bool:
        """Take in one answer to a prompt that went as text; True when this brings the problem."""
        if ours == engines:
            self._latest.append((ours, engines))
            self.equal_total += 1
            self._equal_of[worker] += 1
            return False
        was_fine = not self.problem
        self._latest.append((ours, engines))
        self.different_total += 1
        return was_fine

    @property
    def problem(self) -> str:
        """The latest difference, as long as it is in the window; empty when there is none."""
        for ours, engines in reversed(self._latest):
            if ours != engines:
                return f"tokenizer: the router counts {ours} prompt tokens, the engine {engines}"
        return ""

    def doubt(self, worker: str) -> None:
        """The worker may be another engine by now, with another tokenizer."""
        self._equal_of.pop(worker, None)

    def begin_anew(self) -> None:
        """The router counts by another tokenizer from now on."""
        self._latest.clear()
        self._equal_of.clear()

    def lets_ids_be_sent(self, workers: Iterable[str]) -> bool:
        """Whether the next prompt may go as token ids to whichever of these workers.

        An engine takes the ids of any tokenizer, and answers to what they mean in its own.
        """
        if self.problem or self._equal_of.total() < MIN_EQUAL:
            return False
        if any(worker not in self._equal_of for worker in workers):
            return False
        self._asked += 1
        return self._asked % TEXT_EVERY != 0

    def __repr__(self) -> str:
        return f"<TokenCounts {self.equal_total} equal, {self.different_total} different>"
