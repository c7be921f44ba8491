"""Which worker holds a stored response (`/v1/responses/{id}`): that engine alone knows it."""

from collections import OrderedDict

DEFAULT_CAPACITY = 100_000
"""Ids that are remembered; the oldest is forgotten first. About 20 MB when full."""


class ResponseOwners:
    """Response id -> worker name, bounded."""

    def __init__(self, capacity: int = DEFAULT_CAPACITY) -> None:
        self._capacity = capacity
        self._owners: OrderedDict[str, str] = OrderedDict()

    def remember(self, response_id: str, worker: str) -> None:
        """The worker has made this response."""
        self._owners[response_id] = worker
        self._owners.move_to_end(response_id)
        if len(self._owners) > self._capacity:
            self._owners.popitem(last=False)

    def find(self, response_id: str) -> str | None:
        """The worker that made it, None when that is not known (any more)."""
        return self._owners.get(response_id)
