"""Filters remove candidates before they are rated."""

from collections.abc import Sequence
from typing import Protocol

from kvrouter.policy.candidate import Candidate


class Filter(Protocol):
    """Keeps some candidates. Where it would keep none, it is passed over."""

    def __call__(self, candidates: Sequence[Candidate]) -> Sequence[Candidate]:
        """Those that are kept."""
