"""The proof that two backends give the same ids, on texts that break tokenizers.

The texts ship with the package: what is written in `parity_corpus.txt` (prose of many scripts,
marks, emoji, code, markup, special tokens of many models), this package's own source code, and
mixtures of both with the model's own special tokens, made by a generator with a fixed seed, so
that each start proves the same. About 500 KB; both libraries together take 0.4 to 0.8 s for it.
"""

import random
from array import array
from collections.abc import Iterator, Sequence
from importlib import resources
from itertools import chain
from typing import NamedTuple

from kvrouter.tokenize.backend import Backend

MIXTURES = 250
_LONG_TEXT = 30_000  # characters
_SHOWN = 40  # characters of the text where two backends part

_ATOMS = (
    *("", " ", "  ", "   ", "\t", "\n", "\n\n", "\r\n", "\r\n\r\n", "\r", " \n", "\n ", "\t\n  \n"),
    *(
        "\u00a0",
        "\u2003",
        "\u3000",
        "\u200b",
        "\u200d",
        "\ufeff",
        "\u0085",
        "\u2028",
        "\x00",
        "\x1b",
    ),
    *(
        "'s",
        "'S",
        "'re",
        "'LL",
        "'d",
        "'",
        "\u2019s",
        '"',
        ".",
        ",",
        "!?",
        "...",
        "--",
        "/",
        "_",
        "\\",
    ),
    *("0", "12", "345", "6789", "00000", "3.14", "\u0663\u0664", "\u00bd", "\u2167", "\u4e09"),
    *(
        "a",
        "Z",
        "the",
        "The",
        "THE",
        " of",
        "word",
        "\u00e9",
        "e\u0301",
        "\u1ec7",
        "\u0130",
        "\u00df",
    ),
    *(
        "\u0436",
        "\u03a3",
        "\u05e9\u05c1",
        "\u0631\u064e",
        "\u0915\u094d\u0937",
        "\u0e19\u0e49\u0e33",
    ),
    *("\u4e2d\u6587", "\u304c", "\u304b\u3099", "\ud55c", "\u1112\u1161\u11ab", "\U00020bb7"),
    *("\U0001f600", "\U0001f44d\U0001f3fd", "\U0001f468\u200d\U0001f469", "\u2764\ufe0f", "\ufb01"),
    *(
        "\u0301",
        "\u0345",
        "\u20dd",
        "\ufffd",
        "\U0010ffff",
        "<",
        "<|",
        "|>",
        "</",
        "[",
        "]",
        "\u2581",
    ),
)


class Difference(NamedTuple):
    """Where two backends part."""

    text: str
    """From a little before the first token that differs, or all of a short text."""
    expected: list[int]
    found: list[int]

    def __str__(self) -> str:
        return f"{self.text!r} gives {self.found}, not {self.expected}"


def texts(special_tokens: Sequence[str] = (), rendered: Sequence[str] = ()) -> Iterator[str]:
    """All texts of the proof; `rendered` are prompts as the model's own template makes them."""
    written = resources.files(__package__).joinpath("parity_corpus.txt").read_text("utf-8")
    lines = written.split("\n")
    yield from _short(special_tokens)
    yield from lines
    yield written
    yield written.replace("\n", "\r\n")
    yield from _sources()
    yield from rendered
    yield from _mixtures(lines, special_tokens, random.Random(20))
    yield (written * (_LONG_TEXT // len(written) + 1))[:_LONG_TEXT]


def difference(
    reference: Backend, backend: Backend, compared: Iterator[str] | Sequence[str]
) -> Difference | None:
    """The first text that the two encode differently; None when there is none.

    Raises `EncodeError` when one of them can't encode one.
    """
    for text in compared:
        expected, found = reference.encode(text), backend.encode(text)
        if expected != found:
            return shown(text, expected, found)
    return None


def shown(text: str, expected: "array[int]", found: "array[int]") -> Difference:
    """Where these ids of a text part."""
    pairs = enumerate(zip(expected, found, strict=False))
    at = next((place for place, (one, other) in pairs if one != other), 0)
    share = at / max(1, len(expected))
    start = max(0, int(len(text) * share) - _SHOWN // 2) if len(text) > _SHOWN else 0
    around = slice(max(0, at - 2), at + 6)
    return Difference(
        text[start : start + _SHOWN], expected[around].tolist(), found[around].tolist()
    )


def _short(special_tokens: Sequence[str]) -> Iterator[str]:
    yield from _ATOMS
    yield from map(chr, range(128))
    for token in special_tokens:
        yield from (token, token * 2, f" {token} ", f"x{token}y", f"\n{token}\n", token[:-1])


def _sources() -> Iterator[str]:
    folder = resources.files(__package__)
    for entry in sorted(folder.iterdir(), key=lambda each: each.name):
        if entry.name.endswith(".py"):
            yield entry.read_text("utf-8")


def _mixtures(
    lines: Sequence[str], special_tokens: Sequence[str], rng: random.Random
) -> Iterator[str]:
    words = list(chain.from_iterable(line.split(" ") for line in lines))
    kinds = [words, words, _ATOMS, _ATOMS, lines, special_tokens or _ATOMS]
    for _ in range(MIXTURES):
        weights = [rng.random() ** 2 for _ in kinds]
        drawn = rng.choices(kinds, weights, k=rng.randint(1, 120))
        glue = rng.choice(("", "", " "))
        yield glue.join(rng.choice(kind) for kind in drawn)
