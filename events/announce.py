"""Workers that are announced. Pure.

A relay announces each of its engines again and again, and says so when it stops. A worker that is
not announced for its lease stays for as long as its engine answers: a relay or NATS that hangs
says nothing about engines. One whose relay stopped stays for one more lease, as it may be about
to start again; without an answer of its engine it goes at once. While there is no connection to
hear announcements on, no lease runs out.

An announcement may also tell what the relay knows of the engine. That part stands for itself, so
that what is wrong with it does not cost the worker.
"""

from collections.abc import Collection
from dataclasses import dataclass
from typing import Annotated

import msgspec
from msgspec import Meta, Struct, msgpack

MAX_MODELS = 256
MAX_RANKS = 1024
MAX_LEASE_S = 86_400
"""Whoever wants a worker to stay announces it again; nothing else would end a longer one."""
_ModelName = Annotated[str, Meta(min_length=1, max_length=512)]
_DpRank = Annotated[int, Meta(ge=0, lt=2**16)]


class AnnouncedModel(Struct, array_like=True, frozen=True):
    """One entry of the engine's list of models, as the engine has it."""

    id: _ModelName
    root: Annotated[str, Meta(max_length=4096)] | None = None
    parent: _ModelName | None = None
    max_model_len: Annotated[int, Meta(ge=1, le=2**40)] | None = None


class Told(Struct, array_like=True, frozen=True):
    """What a relay knows of its engine. Whatever it does not know is empty or None."""

    models: Annotated[tuple[AnnouncedModel, ...], Meta(max_length=MAX_MODELS)] = ()
    ranks: Annotated[tuple[_DpRank, ...], Meta(max_length=MAX_RANKS)] = ()
    """Those whose events it relays."""
    block_size: Annotated[int, Meta(ge=1, le=2**20)] | None = None
    """In tokens."""
    capacity_blocks: Annotated[int, Meta(ge=1, le=2**40)] | None = None
    """Usable blocks of each rank."""


class Announcement(Struct, array_like=True, tag="worker", frozen=True):
    """A worker is there and can be reached at `url`; a `lease_s` of 0: not any more."""

    worker: str
    url: str
    lease_s: Annotated[float, Meta(ge=0, le=MAX_LEASE_S)]
    told: msgspec.Raw = msgspec.Raw()
    """A `Told`, for `decode_told`; older relays send none."""


class MalformedAnnouncement(ValueError):  # noqa: N818  the name says what it is
    """Bytes that are no announcement."""


_decoder = msgpack.Decoder(Announcement)
_told_decoder = msgpack.Decoder(Told)


def encode_told(told: Told) -> msgspec.Raw:
    """What an announcement carries of it."""
    return msgspec.Raw(msgpack.encode(told))


def decode_told(announcement: Announcement) -> Told | None:
    """What the relay knows; None where it tells nothing. Raises MalformedAnnouncement."""
    if not bytes(announcement.told):
        return None
    try:
        told = _told_decoder.decode(announcement.told)
    except (msgspec.DecodeError, ValueError, RecursionError) as error:
        raise MalformedAnnouncement(str(error)) from error
    names = [name for model in told.models for name in (model.id, model.parent or model.id)]
    if not all(name.isprintable() for name in names):
        raise MalformedAnnouncement("a model's name has characters that cannot be shown")
    if told.models and all(model.parent is not None for model in told.models):
        raise MalformedAnnouncement("none of the models is a base model")
    return told


def encode_announcement(announcement: Announcement) -> bytes:
    """The bytes of an announcement; as in older versions where it tells nothing of the engine."""
    if not bytes(announcement.told):
        return msgpack.encode(
            ("worker", announcement.worker, announcement.url, announcement.lease_s)
        )
    return msgpack.encode(announcement)


def decode_announcement(payload: bytes) -> Announcement:
    """The announcement in these bytes. Raises MalformedAnnouncement."""
    try:
        return _decoder.decode(payload)
    except (msgspec.DecodeError, ValueError, RecursionError) as error:
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

    def heard(self, announcement: Announcement, now: float) -> bool:
        """A worker was announced, or its relay stops. False if that means nothing.

        So is another URL of a worker that is still announced at one: by a second relay, or by one
        that writes the same URL otherwise. The worker would go and come with each word of theirs.
        """
        name, url, lasts_s = announcement.worker, announcement.url, announcement.lease_s
        lease = self._leases.get(name)
        lasts = lease is not None and not lease.withdrawn and now < lease.ends_at
        if lease is not None and lease.url != url and (lasts or not lasts_s):
            return False
        if lasts_s > 0:
            self._leases[name] = _Lease(url, lasts_s, now + lasts_s)
        elif lease is not None and not lease.withdrawn:
            lease.withdrawn = True
            lease.ends_at = now + lease.lasts_s
        return True

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
