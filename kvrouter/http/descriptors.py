"""How many files the process may have open, and who gets the last of them.

A new descriptor gets the lowest number that is free, so that number says how many are taken.
"""

import socket

MOST_SPARE = 256
NONE_LEFT = "the router has no file descriptors left (raise its limit with ulimit -n)"


class Descriptors:
    """Who may have which: clients at first, each with one for its request, then the rest.

    The rest are probes, events, NATS and the second port, which must answer when all else is full.
    """

    def __init__(self, allowed: int) -> None:
        self.coming = 0
        """Connections of clients that were accepted and have yet to begin."""
        self.clients = 0
        """Those that are served."""
        self.engines = 0
        """Connections to engines."""
        spare = min(allowed // 4, MOST_SPARE)
        self._of_clients = allowed - spare
        self._of_requests = allowed - spare // 2

    def suffice(self, connections: int) -> bool:
        """Whether so many clients, with a request each, cannot take them all."""
        return self._of_clients >= 2 * connections + MOST_SPARE

    def welcome(self, number: int) -> bool:
        """Whether a client whose socket has this number can be served, and its request too."""
        return number + self._promised < self._of_clients

    def left_to_accept(self) -> bool:
        """Whether there are any for clients, be it only to turn them away. Raises OSError."""
        return lowest_free() + self._promised < self._of_requests

    def left_to_connect(self) -> bool:
        """Whether there are any for engines. Raises OSError."""
        return lowest_free() < self._of_requests

    @property
    def _promised(self) -> int:
        """For requests of clients that are here, beyond the connections that engines have."""
        return max(0, self.coming + self.clients - self.engines)


def plenty() -> Descriptors:
    """Where nobody says how many there are."""
    return Descriptors(1_048_576)


def lowest_free() -> int:
    """The number that the next socket gets. Raises OSError where there is none."""
    with socket.socket(socket.AF_UNIX) as probe:
        return probe.fileno()
