"""Predicted against reported cached tokens, counted by scenario for the summary at the end."""

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field


@dataclass
class Scenario:
    """The responses of one scenario that had to be predicted, and by worker."""

    responses: int = 0
    equal: int = 0
    cached_tokens: int = 0
    by_worker: Counter[str] = field(default_factory=Counter)


class Tally:
    """Collects over a whole test session."""

    def __init__(self) -> None:
        self.scenarios: dict[str, Scenario] = {}
        self._notes: list[str] = []

    def add(self, scenario: str, worker: str, *, predicted: int, reported: int) -> None:
        """Count one response."""
        row = self.scenarios.setdefault(scenario, Scenario())
        row.responses += 1
        row.equal += predicted == reported
        row.cached_tokens += reported
        row.by_worker[worker] += 1

    def note(self, line: str) -> None:
        """Something else that the summary should say."""
        self._notes.append(line)

    def lines(self) -> Iterator[str]:
        """A table for people."""
        yield f"{'scenario':34}{'responses':>10}{'equal':>8}{'different':>11}{'cached':>9}  workers"
        for name, row in self.scenarios.items():
            shares = "/".join(str(count) for _, count in sorted(row.by_worker.items()))
            different = row.responses - row.equal
            yield (
                f"{name:34}{row.responses:10}{row.equal:8}{different:11}"
                f"{row.cached_tokens:9}  {shares}"
            )
        responses = sum(row.responses for row in self.scenarios.values())
        equal = sum(row.equal for row in self.scenarios.values())
        yield f"{'all':34}{responses:10}{equal:8}{responses - equal:11}"
        yield from self._notes
