"""The bus between replicas on different hosts: NATS."""

import asyncio

from events.bus import Hear
from events.nats_link import NatsLink, Received
from events.subjects import Subjects


class NatsBus:
    """One replica's part of the bus. The link is run by whoever made it."""

    def __init__(self, link: NatsLink, subjects: Subjects, name: str) -> None:
        self.name = name
        self._link = link
        self._subjects = subjects
        self._to_all = subjects.bookings(name)

    @property
    def is_connected(self) -> bool:
        """Whether there is a connection."""
        return self._link.is_connected

    @property
    def dropped(self) -> int:
        """Messages that could not be sent."""
        return self._link.stats.unsent

    def publish(self, payload: bytes) -> None:
        """To all others."""
        self._link.publish(self._to_all, payload)

    def send(self, to: str, payload: bytes) -> None:
        """To one."""
        self._link.publish(self._subjects.mail(to), payload)

    async def run(self, hear: Hear) -> None:
        """Listen until cancelled.

        What we publish comes back and is passed on: on its subject speaks also another process
        that has our name, if there is one, and only the message tells the two apart.
        """

        def take(message: Received) -> None:
            hear(message.payload)

        topics = (self._subjects.all_bookings, self._subjects.mail(self.name))
        subscriptions = [self._link.subscribe(subject, take) for subject in topics]
        try:
            await asyncio.Event().wait()
        finally:
            for subscription in subscriptions:
                self._link.unsubscribe(subscription)
