"""Pieces of a text, encoded as what they are within it."""

from collections.abc import Sequence

from kvrouter.tokenize.backend import ID_BYTES, Library
from kvrouter.tokenize.cuts import Cuts

Piece = str | tuple[str]
"""A piece of a text; one that begins its text, alone in a tuple, is another."""


def piece_at(text: str, start: int, end: int) -> Piece:
    """The piece between two places."""
    return text[start:end] if start else (text[:end],)


def text_of(piece: Piece) -> str:
    """The text of a piece, wherever it stands."""
    return piece if isinstance(piece, str) else piece[0]


class PieceEncoder:
    """Encodes pieces apart, so that their ids in a row are those of the whole.

    A tokenizer may put a space before a text. So a special token goes before each piece that does
    not begin its text, and its id is taken away again.
    """

    def __init__(self, library: Library, cuts: Cuts) -> None:
        self._library = library
        self._lead = cuts.lead or ""

    def encode_each(self, pieces: Sequence[Piece]) -> list[bytes]:
        """The ids of each piece, `ID_BYTES` each."""
        lead = self._lead
        texts = [lead + piece if isinstance(piece, str) else piece[0] for piece in pieces]
        encoded = self._library.encode_each(texts)
        if not lead:
            return encoded
        return [
            ids[ID_BYTES:] if isinstance(piece, str) else ids
            for piece, ids in zip(pieces, encoded, strict=True)
        ]
