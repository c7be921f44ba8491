"""What encodes in place of `tokenizers` gives its ids, on every text.

    pytest --hypothesis-profile thorough tests/property/test_backend_parity.py

asks 10,000 times for each shape. The texts are then composed from a seed, as Hypothesis would take
hours to draw so many.
"""

import json
from collections.abc import Iterator
from random import Random
from typing import NamedTuple

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.shapes import SHAPES, shaped
from support.texts import LONG_WORDS, TEXTS, composed

from kvrouter.tokenize import segments, stretches
from kvrouter.tokenize.choice import BackendSettings, choose
from kvrouter.tokenize.cuts import cuts_of
from kvrouter.tokenize.hf import HfBackend
from kvrouter.tokenize.segments import CachedBackend, SegmentCache
from kvrouter.tokenize.stretches import StretchedBackend, Stretches

THOROUGH = settings().max_examples > 1000
A_FEW = settings() if THOROUGH else settings(max_examples=30)
"""Each example is up to seven texts."""
SEEDS = st.integers(0, 1 << 48).map(Random)
TEXT = SEEDS.map(composed) if THOROUGH else TEXTS


class Growing(NamedTuple):
    """A text in parts, and how those go on that part from it: from where (a share), with what."""

    parts: list[str]
    forks: list[tuple[float, str]]

    def texts(self) -> Iterator[str]:
        """Each with one part more, then the forks."""
        text = ""
        for part in self.parts:
            text += part
            yield text
        for share, end in self.forks:
            yield text[: round(share * len(text))] + end


ENDS = ("", "x", " y", "\n", "\u0301", "<|end|>", "|>", "</s>", "'s")


def grown(rng: Random) -> Growing:
    """One of them from a seed."""
    parts = [composed(rng) for _ in range(rng.randint(1, 4))]
    forks = [(rng.random(), rng.choice((*ENDS, composed(rng)))) for _ in range(3)]
    return Growing(parts, forks)


DRAWN = st.builds(
    Growing,
    st.lists(TEXTS | LONG_WORDS, min_size=1, max_size=4),
    st.lists(st.tuples(st.floats(0, 1), st.sampled_from(ENDS) | TEXTS), max_size=3),
)
GROWING = SEEDS.map(grown) if THOROUGH else DRAWN


@pytest.mark.parametrize("name", SHAPES)
def test_what_is_proven_at_start_holds_for_every_text(name: str) -> None:
    hf = HfBackend(shaped(name))
    chosen = choose(hf, [], BackendSettings(check_every=0))

    @given(TEXT)
    def check(text: str) -> None:
        assert chosen.encode(text) == hf.encode(text)

    check()


CUT_WITHIN = ("gpt_2", "llama_3", "qwen", "o200k", "deepseek", "mistral", "gemma", "nfkc_metaspace")


@pytest.mark.parametrize(("piece", "short", "long"), [(4, 9, 30), (40, 100, 250)])
@pytest.mark.parametrize("name", SHAPES)
def test_cached_pieces_give_the_ids_of_the_whole(
    name: str, piece: int, short: int, long: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Texts that share beginnings with those before, cut at as many places as there are."""
    monkeypatch.setattr(segments, "PIECE", piece)
    monkeypatch.setattr(segments, "PART", piece // 4)
    monkeypatch.setattr(stretches, "SHORT", short)
    monkeypatch.setattr(stretches, "LONG", long)
    hf = HfBackend(shaped(name))
    cuts = cuts_of(json.loads(hf.spec))
    known = Stretches(100_000, cuts)
    cached = CachedBackend(hf, cuts, SegmentCache(100_000), known)

    @A_FEW
    @given(GROWING)
    def check(growing: Growing) -> None:
        for text in growing.texts():
            assert cached.encode(text) == hf.encode(text)
        cached.cache.check()
        known.check()

    check()


@pytest.mark.parametrize("name", CUT_WITHIN)
def test_known_stretches_give_the_ids_of_the_whole(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The same for a library that is given all that is not known."""
    monkeypatch.setattr(stretches, "SHORT", 9)
    monkeypatch.setattr(stretches, "LONG", 30)
    hf = HfBackend(shaped(name))
    cuts = cuts_of(json.loads(hf.spec))
    known = Stretches(100_000, cuts)
    stretched = StretchedBackend(hf, cuts, known)

    @A_FEW
    @given(GROWING)
    def check(growing: Growing) -> None:
        for text in growing.texts():
            assert stretched.encode(text) == hf.encode(text)
        known.check()

    check()
