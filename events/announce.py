"""Workers that are announced. Pure.

A relay announces each of its engines again and again, and says so when it stops. A worker that is
not announced for its lease stays for as long as its engine answers: a relay or NATS that hangs
says nothing about engines. One whose relay stopped stays for one more lease, as it may be about
to start again; without an answer of its engine it goes at once. While there is no connection to
hear announcements on, no lease runs out.
"""

from collections.abc import Collection
from dataclasses import dataclass

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


@dataclass(slots=True)
class _Lease:
    url: str
    lasts_s: float
    ends_at: float
    withdrawn: bool = False


class Announced:
    """The workers that are there. `now` is monotonic, in seconds."""

    def __init__(self) -> None:
        self._leases: dict[str, _Lease] = {}
        self._is_connected = False

    @property
    def workers(self) -> dict[str, str]:
        """The URL of each."""
        return {name: lease.url for name, lease in self._leases.items()}

    def heard(self, announcement: Announcement, now: float) -> None:
        """A worker was announced, or its relay stops."""
        name, lasts_s = announcement.worker, announcement.lease_s
        if lasts_s > 0:
            self._leases[name] = _Lease(announcement.url, lasts_s, now + lasts_s)
            return
        lease = self._leases.get(name)
        if lease is not None and not lease.withdrawn:
            lease.withdrawn = True
            lease.ends_at = now + lease.lasts_s

    def connection_changed(self, now: float, *, connected: bool) -> None:
        """Announcements can be heard, or not. Every lease begins anew when they can."""
        self._is_connected = connected
        for lease in self._leases.values():
            lease.ends_at = now + lease.lasts_s

    def tick(self, now: float, answering: Collection[str]) -> None:
        """Time has passed; the engines of the workers `answering` can be reached."""
        if not self._is_connected:
            return
        lasting = {each.url for each in self._leases.values() if now < each.ends_at}
        for name, lease in list(self._leases.items()):
            if now < lease.ends_at:
                gone = lease.withdrawn and name not in answering
            else:  # nor is it needed where the same engine has another name by now
                gone = lease.withdrawn or name not in answering or lease.url in lasting
            if gone:
                del self._leases[name]
