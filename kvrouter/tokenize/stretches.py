"""Long stretches of text whose ids are known, followed from the beginning of a text.

A prompt of 262 KB that has grown by a line costs a millisecond even if each word of it is known:
its words have to be found. So its ids are remembered by the stretch, some 8,000 characters each,
that begins where the stretch before it ends. To follow them is to hash and to compare memory.

A stretch ends where its text was cut (`cuts`, `within`), and whether a text may be cut somewhere
depends on what is behind that place, though never on more than a special token and a character. So
much of it has to be the same too, or the stretch is not the same. For each beginning the last
stretch that began so is remembered: a text that parts from it in the middle is encoded from there.
"""

import itertools
import threading
from array import array
from collections import OrderedDict
from collections.abc import Iterable
from sys import getsizeof
from typing import NamedTuple

from kvrouter.tokenize.backend import Library
from kvrouter.tokenize.cuts import Cuts
from kvrouter.tokenize.pieces import PieceEncoder, piece_at
from kvrouter.tokenize.within import PLACE

STRETCH = 8192
"""Characters of a stretch, up to the next cut. Of longer ones more has to be encoded anew when a
text changes at its end; of shorter ones there are more to look up, 4 us each."""

_ENTRY_BYTES = 300
"""What an entry takes besides text and ids, about."""


class _Stretch(NamedTuple):
    text: str
    """With what is behind it, as far as that matters."""
    length: int
    """Characters of its own."""
    ids: bytes
    size_bytes: int
    """As it was when it came; a text may keep its UTF-8 form later."""


class Stretches:
    """Ids by stretch, bounded in bytes; the least recently used go first. Thread-safe."""

    def __init__(self, max_bytes: int, cuts: Cuts) -> None:
        self._max_bytes = max_bytes
        self._behind = cuts.looks_ahead
        self._known: OrderedDict[tuple[bool, int], _Stretch] = OrderedDict()
        self._bytes = 0
        self._lock = threading.Lock()

    @property
    def size_bytes(self) -> int:
        """What is remembered, in bytes."""
        return self._bytes

    def follow(self, text: str) -> tuple[list[bytes], int]:
        """The ids of the known stretches that the text begins with, and where they end."""
        found: list[bytes] = []
        at = 0
        while len(text) - at > STRETCH:
            key = _key(text, at)
            with self._lock:
                stretch = self._known.get(key)
                if stretch is not None:
                    self._known.move_to_end(key)
            if stretch is None or not text.startswith(stretch.text, at):
                break
            found.append(stretch.ids)
            at += stretch.length
        return found, at

    def remember(self, text: str, start: int, pieces: Iterable[tuple[int, bytes]]) -> None:
        """Keep what follows `start`, given as pieces: where each ends, and its ids."""
        if len(text) - start < STRETCH:
            return
        ids: list[bytes] = []
        for end, more in pieces:
            ids.append(more)
            if end - start >= STRETCH and end + self._behind <= len(text):
                shown, joined = text[start : end + self._behind], b"".join(ids)
                size = getsizeof(shown) + getsizeof(joined) + _ENTRY_BYTES
                self._add(_key(text, start), _Stretch(shown, end - start, joined, size))
                start, ids = end, []

    def _add(self, key: tuple[bool, int], stretch: _Stretch) -> None:
        with self._lock:
            before = self._known.pop(key, None)
            if before is not None:
                self._bytes -= before.size_bytes
            self._known[key] = stretch
            self._bytes += stretch.size_bytes
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


def _key(text: str, at: int) -> tuple[bool, int]:
    """What may be put before the whole text is not put before a stretch within it."""
    return at == 0, hash(text[at : at + STRETCH])


class StretchedBackend:
    """A backend that takes known stretches as they are, and else encodes what it is given.

    For a library that is fast enough for everything else; it has to be one whose texts may be cut
    within segments.
    """

    def __init__(self, library: Library, cuts: Cuts, stretches: Stretches) -> None:
        self._library = library
        self._pieces = PieceEncoder(library, cuts)
        self.stretches = stretches

    @property
    def name(self) -> str:
        """That of the library."""
        return self._library.name

    def encode(self, text: str) -> "array[int]":
        """See `Backend`."""
        if len(text) <= STRETCH:
            return self._library.encode(text)
        known, start = self.stretches.follow(text)
        edges = [start]
        while match := PLACE.search(text, edges[-1] + STRETCH):
            edges.append(match.start())
        edges.append(len(text))
        new = self._pieces.encode_each(
            [piece_at(text, *ends) for ends in itertools.pairwise(edges)]
        )
        self.stretches.remember(text, start, zip(edges[1:], new, strict=True))
        ids = array("I")
        ids.frombytes(b"".join([*known, *new]))
        return ids
