"""Workers that are announced, for as long as their lease lasts. Pure.

A relay announces each of its engines again and again, and says so when it stops. Whoever is not
announced for its lease is gone. While there is no connection to hear announcements on, no lease
runs out: what NATS does says nothing about workers.
"""

import msgspec
from msgspec import Struct, msgpack


class Announcement(Struct, array_like=True, tag="worker", frozen=True):
    """A worker is there and can be reached at `url`; a `lease_s` of 0: not any more."""

    worker: str
    url: str
    lease_s: float


class MalformedAnnouncement(ValueError):  # noqa: N818  the name says what it is
    """Bytes that are no announcement."""


_decoder = msgpack.Decoder(Announcement)


def encode_announcement(announcement: Announcement) -> bytes:
    """The bytes of an announcement."""
    return msgpack.encode(announcement)


def decode_announcement(payload: bytes) -> Announcement:
    """The announcement in these bytes. Raises MalformedAnnouncement."""
    try:
        return _decoder.decode(payload)
    except (msgspec.DecodeError, ValueError) as error:
        raise MalformedAnnouncement(str(error)) from error


class Announced:
    """The workers whose lease lasts. `now` is monotonic, in seconds."""

    def __init__(self) -> None:
        self._leases: dict[str, tuple[Announcement, float]] = {}
        self._is_connected = False

    @property
    def workers(self) -> dict[str, str]:
        """The URL of each."""
        return {name: announcement.url for name, (announcement, _) in self._leases.items()}

    def heard(self, announcement: Announcement, now: float) -> bool:
        """A worker was announced; True if that changes `workers`."""
        before = self.workers
        if announcement.lease_s > 0:
            ends_at = now + announcement.lease_s
            self._leases[announcement.worker] = (announcement, ends_at)
        else:
            self._leases.pop(announcement.worker, None)
        return self.workers != before

    def connection_changed(self, now: float, *, connected: bool) -> None:
        """Announcements can be heard, or not. Every lease begins anew when they can."""
        self._is_connected = connected
        for name, (announcement, _) in self._leases.items():
            self._leases[name] = (announcement, now + announcement.lease_s)

    def tick(self, now: float) -> bool:
        """Time has passed; True if that changes `workers`."""
        if not self._is_connected:
            return False
        over = [name for name, (_, ends_at) in self._leases.items() if now >= ends_at]
        for name in over:
            del self._leases[name]
        return bool(over)
