"""A cache of encoded pieces of text, and the backend that makes use of it.

Prompts repeat: a system prompt, the turns before, a document. A text is cut where its pieces are
independent (`cuts`), each piece is looked up by its text, and only those that are new are encoded.
The pieces of a long segment begin at the same places as long as the segment is the same from its
beginning, so one that grows or changes at its end keeps all pieces before that. What is the same
from the beginning of the whole text is not even cut (`stretches`).

The texts themselves are the keys, not their hashes: ids may be sent on to an engine, and then a
collision would be another prompt.
"""

import threading
from array import array
from collections import OrderedDict
from collections.abc import Iterator
from sys import getsizeof
from typing import NamedTuple

from kvrouter.tokenize.backend import Allowance, Library
from kvrouter.tokenize.cuts import Cuts
from kvrouter.tokenize.pieces import Piece, PieceEncoder, piece_at, text_of
from kvrouter.tokenize.stretches import Part, Stretches, joined
from kvrouter.tokenize.within import PLACE

PIECE = 512
"""Characters of a segment up to the next place where it is cut. Longer pieces cost less to look
up, and more to encode when one changes."""

PART = 128
"""Of the last piece of a segment, which may grow: it is cut again, so that less is encoded anew
then. Each part costs a call of the library 10 us."""

_ENTRY_BYTES = 150
"""What an entry takes besides text and ids, about: the dictionary's slots."""


class CacheStats(NamedTuple):
    """Counters since the start, and the size now."""

    hits: int
    misses: int
    entries: int
    bytes: int


class SegmentCache:
    """Ids by piece, bounded in bytes; the least recently used go first. Thread-safe."""

    def __init__(self, max_bytes: int) -> None:
        self._max_bytes = max_bytes
        self._entries: OrderedDict[Piece, bytes] = OrderedDict()
        self._bytes = 0
        self._hits = 0
        self._misses = 0
        self._lock = threading.Lock()

    @property
    def stats(self) -> CacheStats:
        """The counters as they are now."""
        return CacheStats(self._hits, self._misses, len(self._entries), self._bytes)

    def find(self, pieces: list[Piece]) -> list[bytes | None]:
        """The ids of each piece, None where they are not known."""
        entries = self._entries
        touch = entries.move_to_end
        with self._lock:
            found = list(map(entries.get, pieces))
            for piece, ids in zip(pieces, found, strict=True):
                if ids is not None:
                    touch(piece)
            misses = found.count(None)
            self._misses += misses
            self._hits += len(found) - misses
        return found

    def knows(self, piece: Piece) -> bool:
        """Whether its ids are known; makes nothing of its being asked for."""
        with self._lock:
            return piece in self._entries

    def add(self, pieces: list[Piece], ids: list[bytes]) -> None:
        """Keep these too; what is too large for the cache is dropped."""
        with self._lock:
            for piece, each in zip(pieces, ids, strict=True):
                size = _size(piece, each)
                # Another thread may have met the same text.
                if size <= self._max_bytes and piece not in self._entries:
                    self._entries[piece] = each
                    self._bytes += size
            while self._bytes > self._max_bytes:
                self._bytes -= _size(*self._entries.popitem(last=False))

    def clear(self) -> None:
        """Forget all pieces."""
        with self._lock:
            self._entries.clear()
            self._bytes = 0

    def check(self) -> None:
        """Raise AssertionError unless the count of bytes is right and within its bound."""
        counted = sum(_size(piece, ids) for piece, ids in self._entries.items())
        if not counted == self._bytes <= self._max_bytes:
            raise AssertionError(f"{counted} bytes, counted {self._bytes} of {self._max_bytes}")


def _size(piece: Piece, ids: bytes) -> int:
    text = text_of(piece)
    # A string of one character is shared by the process: it grows when somebody encodes it.
    own_bytes = getsizeof(text) if len(text) > 1 else 0
    return own_bytes + getsizeof(ids) + _ENTRY_BYTES


class CachedBackend:
    """A backend that encodes each piece of text once, as long as the cache remembers it."""

    def __init__(
        self, library: Library, cuts: Cuts, cache: SegmentCache, stretches: Stretches
    ) -> None:
        self._library = library
        self._pieces = PieceEncoder(library, cuts)
        self._cuts = cuts
        self.name = library.name
        self.cache = cache
        self.stretches = stretches
        self._tokens = {
            content: array("I", [number]).tobytes() for content, number in cuts.plain_ids.items()
        }

    def encode(self, text: str, allowance: Allowance | None = None) -> "array[int]":
        """See `SparingBackend`."""
        known = self.stretches.follow(text)
        pieces: list[Piece] = []
        behind: list[bytes] = []
        ends: list[int] = []
        for piece, token_ids, end in self._cut(text, known.end):
            pieces.append(piece)
            behind.append(token_ids)
            ends.append(end)
        found = self.cache.find(pieces)
        if None in found:
            self._encode_missing(pieces, found, allowance)
        new = [ids + token for ids, token in zip(found, behind, strict=True) if ids is not None]
        self.stretches.remember(text, known, list(map(Part, ends, new)))
        return joined(known, new)

    def _encode_missing(
        self, pieces: list[Piece], found: list[bytes | None], allowance: Allowance | None
    ) -> None:
        """Encode what was not found, and fill it in."""
        places = [place for place, ids in enumerate(found) if ids is None]
        new = [pieces[place] for place in places]
        if allowance is not None:
            allowance.spend(sum(len(text_of(piece)) for piece in new))
        encoded = self._pieces.encode_each(new)
        self.cache.add(new, encoded)
        for place, ids in zip(places, encoded, strict=True):
            found[place] = ids

    def _cut(self, text: str, start: int) -> Iterator[tuple[Piece, bytes, int]]:
        """The pieces, each with the ids of the special token behind it, if any, and its end."""
        for end, token in self._segments(text, start):
            edge = start
            for cut in self._places(text, start, end) if self._cuts.within else ():
                yield piece_at(text, edge, cut), b"", cut
                edge = cut
            start = end + len(token)
            yield piece_at(text, edge, end), self._tokens.get(token, b""), start

    def _places(self, text: str, start: int, end: int) -> Iterator[int]:
        """Where a segment is cut."""
        while match := PLACE.search(text, start + PIECE, end):
            cut = match.start()
            if self._was_last(text, start, cut):
                yield from _parts(text, start, cut)
            yield cut
            start = cut
        yield from _parts(text, start, end)

    def _was_last(self, text: str, start: int, end: int) -> bool:
        """Whether the piece is known by its parts only: it was the last one, and has grown."""
        if self.cache.knows(piece_at(text, start, end)):
            return False
        cut = next(_parts(text, start, end), None)
        return cut is not None and self.cache.knows(piece_at(text, start, cut))

    def _segments(self, text: str, start: int) -> Iterator[tuple[int, str]]:
        """Where each segment ends, and the token behind it; none behind the last."""
        if self._cuts.tokens is not None:
            for match in self._cuts.tokens.finditer(text, start):
                token = match.group()
                if token in self._tokens:
                    yield match.start(), token
        yield len(text), ""


def _parts(text: str, start: int, end: int) -> Iterator[int]:
    """Where a piece is cut into parts."""
    while match := PLACE.search(text, start + PART, end):
        start = match.start()
        yield start
