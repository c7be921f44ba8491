"""How many files the process may have open, and who gets the last of them.

A new descriptor gets the lowest number that is free, so a socket's number says how many are taken.
"""

import socket
from dataclasses import dataclass

MOST_SPARE = 256
NONE_LEFT = "the router has no file descriptors left (raise its limit with ulimit -n)"


@dataclass(frozen=True, slots=True)
class Descriptors:
    """Who may have which: clients at first, then the requests that they have, then the rest.

    The rest are probes, events, NATS and the second port, which must answer when all else is full.
    """

    allowed: int

    @property
    def _spare(self) -> int:
        return min(self.allowed // 4, MOST_SPARE)

    @property
    def of_clients(self) -> int:
        """Clients whose socket has this number or a higher one are turned away."""
        return self.allowed - self._spare

    @property
    def of_requests(self) -> int:
        """Nor may engines, or clients that are about to be turned away, have this one."""
        return self.allowed - self._spare // 2

    def suffice(self, connections: int) -> bool:
        """Whether so many clients, with a request each, cannot take them all."""
        return self.of_clients >= 2 * connections + MOST_SPARE


PLENTY = Descriptors(1_048_576)
"""Where nobody says how many there are."""


def lowest_free() -> int:
    """The number that the next socket gets. Raises OSError where there is none."""
    with socket.socket(socket.AF_UNIX) as probe:
        return probe.fileno()
