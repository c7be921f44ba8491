"""Filters remove candidates before one is picked."""

from collections.abc import Sequence
from typing import Protocol

import msgspec

from kvrouter.policy.candidate import Survey


class Filter(Protocol):
    """Keeps some candidates, by position. Where it would keep none, it is passed over."""

    def keep(self, survey: Survey, kept: Sequence[int]) -> Sequence[int]:
        """Those of `kept` that stay."""


class LoadGuard(msgspec.Struct, frozen=True):
    """Keeps the ranks with at most `ratio * mean + slack` active requests.

    The mean is that of all candidates. A cost that loves a cached prefix would otherwise pile
    requests on its holder; the slack lets small fleets and bursts have a holder at all.
    """

    ratio: float
    slack: float

    def keep(self, survey: Survey, kept: Sequence[int]) -> Sequence[int]:
        """Those of `kept` that are not overloaded."""
        active = survey.loads.active_requests
        limit = self.ratio * sum(active) / len(active) + self.slack
        if max(active) <= limit:
            return kept
        return [position for position in kept if active[position] <= limit]
