"""The channel between replicas: what a shell needs of it, whatever it is made of.

A bus delivers at most once and says nothing of what it loses; the messages' own numbers show that.
"""

import asyncio
from collections.abc import Callable, Sequence
from typing import Protocol, TypeAlias

Hear: TypeAlias = Callable[[bytes], None]
"""Called with each payload that comes, on the event loop; must not block or raise.
What was published by oneself may be among them."""


class Bus(Protocol):
    """Carries payloads to all other replicas, or to one."""

    @property
    def is_connected(self) -> bool:
        """Whether what is published now has a chance to be heard."""

    @property
    def dropped(self) -> int:
        """Messages that were not even sent, because there was no connection or no room."""

    def publish(self, payload: bytes) -> None:
        """To all others. Never blocks; lost where that is not possible at once."""

    def send(self, to: str, payload: bytes) -> None:
        """To the replica of this name, likewise."""

    async def run(self, hear: Hear) -> None:
        """Be connected until cancelled."""


class Buses:
    """Several buses as one: what comes over two of them is heard twice, which does no harm."""

    def __init__(self, buses: Sequence[Bus]) -> None:
        self._buses = buses

    @property
    def is_connected(self) -> bool:
        """Whether one of them is."""
        return any(bus.is_connected for bus in self._buses)

    @property
    def dropped(self) -> int:
        """Messages that one of them could not send."""
        return sum(bus.dropped for bus in self._buses)

    def publish(self, payload: bytes) -> None:
        """To all others."""
        for bus in self._buses:
            bus.publish(payload)

    def send(self, to: str, payload: bytes) -> None:
        """To the replica of this name."""
        for bus in self._buses:
            bus.send(to, payload)

    async def run(self, hear: Hear) -> None:
        """Be connected to all until cancelled."""
        async with asyncio.TaskGroup() as group:
            for bus in self._buses:
                group.create_task(bus.run(hear))
