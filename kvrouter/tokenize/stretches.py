"""Stretches of text whose ids are known, followed from the beginning of a text.

A prompt of 262 KB that has grown by a line costs a millisecond even if each word of it is known:
its words have to be found. So its ids are remembered by the stretch, some 8,000 characters each,
that begins where the stretch before it ends; and what is left behind the long ones, by short ones.
To follow them is to hash and to compare memory.

A stretch ends where its text was cut (`cuts`, `within`), and whether a text may be cut somewhere
depends on what is behind that place, though never on more than a special token and a character. So
much of it has to be the same too, or the stretch is not the same. Of the stretches of one length
that begin with the same characters, so many of them, the last one is remembered: a text that parts
from it behind these is encoded from there.
"""

import threading
from array import array
from collections import OrderedDict
from collections.abc import Iterator, Sequence
from sys import getsizeof
from typing import NamedTuple

from xxhash import xxh3_64_intdigest

from kvrouter.tokenize.backend import Library
from kvrouter.tokenize.cuts import Cuts
from kvrouter.tokenize.pieces import PieceEncoder, piece_at
from kvrouter.tokenize.within import PLACE

LONG = 8192
"""Characters of a long stretch, up to the next cut. Of longer ones more has to be followed by short
ones, or encoded, where texts part."""
SHORT = 1024
"""Characters of a short one. Of longer ones more has to be encoded anew when a text changes at its
end; of shorter ones there are more to look up, 1 us each."""

_ENTRY_BYTES = 300
"""What an entry takes besides text and ids, about."""
_Key = tuple[bool, int, int]


class _Stretch(NamedTuple):
    text: str
    """With what is behind it, as far as that matters."""
    length: int
    """Characters of its own."""
    ids: bytes
    size_bytes: int
    """As it was when it came; a text may keep its UTF-8 form later."""


class Part(NamedTuple):
    """A part of a text, which follows the part before it: where it ends, and its ids."""

    end: int
    ids: bytes


class _Keys:
    """The keys of the stretches of one text."""

    __slots__ = ("_ascii", "_text")

    def __init__(self, text: str) -> None:
        self._text = text
        self._ascii = memoryview(text.encode()) if text.isascii() else None
        """Where bytes are characters they are all made in one go."""

    def of(self, start: int, length: int) -> _Key:
        """What may be put before the whole text is not put before a stretch within it."""
        if self._ascii is not None:
            return start == 0, length, xxh3_64_intdigest(self._ascii[start : start + length])
        return start == 0, length, xxh3_64_intdigest(self._text[start : start + length].encode())


class Followed(NamedTuple):
    """The known stretches that a text begins with."""

    keys: _Keys
    long: list[bytes]
    """The ids of each long one."""
    long_end: int
    short: list[Part]
    """Those behind the long ones."""
    end: int


class Stretches:
    """Ids by stretch, bounded in bytes; the least recently used go first. Thread-safe."""

    def __init__(self, max_bytes: int, cuts: Cuts) -> None:
        self._max_bytes = max_bytes
        self._behind = cuts.looks_ahead
        self._known: OrderedDict[_Key, _Stretch] = OrderedDict()
        self._bytes = 0
        self._lock = threading.Lock()

    @property
    def size_bytes(self) -> int:
        """What is remembered, in bytes."""
        return self._bytes

    def follow(self, text: str) -> Followed:
        """What is known of the text from its beginning on."""
        keys = _Keys(text)
        long: list[bytes] = []
        at = 0
        while stretch := self._find(text, at, keys, LONG):
            long.append(stretch.ids)
            at += stretch.length
        long_end = at
        short: list[Part] = []
        while stretch := self._find(text, at, keys, SHORT):
            at += stretch.length
            short.append(Part(at, stretch.ids))
        return Followed(keys, long, long_end, short, at)

    def remember(self, text: str, known: Followed, new: Sequence[Part]) -> None:
        """Keep what follows the stretches that are known."""
        if len(text) - known.end <= SHORT and len(text) - known.long_end <= LONG:
            return
        keys, parts = known.keys, [*known.short, *new]
        start, rest = self._join(text, known.long_end, keys, parts, LONG)
        if start == known.long_end:
            start, rest = known.end, new
        self._join(text, start, keys, rest, SHORT)

    def _find(self, text: str, at: int, keys: _Keys, length: int) -> _Stretch | None:
        if len(text) - at <= length:
            return None
        key = keys.of(at, length)
        with self._lock:
            stretch = self._known.get(key)
            if stretch is None:
                return None
            self._known.move_to_end(key)
        return stretch if text.startswith(stretch.text, at) else None

    def _join(
        self, text: str, start: int, keys: _Keys, parts: Sequence[Part], length: int
    ) -> tuple[int, Sequence[Part]]:
        """Keep stretches of this length from `start` on; gives where they end, and what is left."""
        first = 0
        for place, (end, _) in enumerate(parts):
            if end - start >= length and end + self._behind <= len(text):
                ids = b"".join([part.ids for part in parts[first : place + 1]])
                shown = text[start : end + self._behind]
                self._add(keys.of(start, length), shown, end - start, ids)
                start, first = end, place + 1
        return start, parts[first:]

    def _add(self, key: _Key, shown: str, length: int, ids: bytes) -> None:
        size = getsizeof(shown) + getsizeof(ids) + _ENTRY_BYTES
        with self._lock:
            before = self._known.pop(key, None)
            if before is not None:
                self._bytes -= before.size_bytes
            self._known[key] = _Stretch(shown, length, ids, size)
            self._bytes += size
            while self._bytes > self._max_bytes:
                self._bytes -= self._known.popitem(last=False)[1].size_bytes

    def clear(self) -> None:
        """Forget all."""
        with self._lock:
            self._known.clear()
            self._bytes = 0

    def check(self) -> None:
        """Raise AssertionError unless the count of bytes is right and within its bound."""
        counted = sum(stretch.size_bytes for stretch in self._known.values())
        if not counted == self._bytes <= self._max_bytes:
            raise AssertionError(f"{counted} bytes, counted {self._bytes} of {self._max_bytes}")


class StretchedBackend:
    """A backend that takes known stretches as they are, and else encodes what it is given.

    For a library that is fast enough for everything else; it has to be one whose texts may be cut
    within segments.
    """

    def __init__(self, library: Library, cuts: Cuts, stretches: Stretches) -> None:
        self._library = library
        self._pieces = PieceEncoder(library, cuts)
        self.stretches = stretches
        self.name = library.name

    def encode(self, text: str) -> "array[int]":
        """See `Backend`."""
        if len(text) <= LONG:
            return self._library.encode(text)
        known = self.stretches.follow(text)
        ends = list(_ends(text, known))
        starts = [known.end, *ends[:-1]]
        new = self._pieces.encode_each(
            [piece_at(text, start, end) for start, end in zip(starts, ends, strict=True)]
        )
        self.stretches.remember(text, known, list(map(Part, ends, new)))
        return joined(known, new)


def _ends(text: str, known: Followed) -> Iterator[int]:
    """Where what is not known is cut: as few stretches as can be followed later."""
    start, end = known.long_end, known.end
    while match := PLACE.search(text, max(start + LONG, end + 1)):
        start = end = match.start()
        yield end
    while match := PLACE.search(text, end + SHORT):
        end = match.start()
        yield end
    yield len(text)


def joined(known: Followed, new: Sequence[bytes]) -> "array[int]":
    """The ids of a text."""
    ids = array("I")
    ids.frombytes(b"".join([*known.long, *[part.ids for part in known.short], *new]))
    return ids
