"""What encodes in place of `tokenizers` gives its ids, on every text.

    pytest --hypothesis-profile thorough tests/property/test_backend_parity.py

asks 10,000 times for each shape (30 minutes in all).
"""

import json
from collections.abc import Iterator

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.shapes import SHAPES, shaped
from support.texts import LONG_WORDS, TEXTS

from kvrouter.tokenize import segments, stretches
from kvrouter.tokenize.choice import BackendSettings, choose
from kvrouter.tokenize.cuts import cuts_of
from kvrouter.tokenize.hf import HfBackend
from kvrouter.tokenize.segments import CachedBackend, SegmentCache
from kvrouter.tokenize.stretches import StretchedBackend, Stretches


@pytest.mark.parametrize("name", SHAPES)
def test_what_is_proven_at_start_holds_for_every_text(name: str) -> None:
    hf = HfBackend(shaped(name))
    chosen = choose(hf, [], BackendSettings(check_every=0))

    @given(TEXTS)
    def check(text: str) -> None:
        assert chosen.encode(text) == hf.encode(text)

    check()


THOROUGH = settings().max_examples > 1000
A_FEW = settings() if THOROUGH else settings(max_examples=30)
"""Each example is up to seven texts."""
CUT_WITHIN = ("gpt_2", "llama_3", "qwen", "o200k", "deepseek", "mistral", "gemma", "nfkc_metaspace")
GROWING = st.lists(TEXTS | LONG_WORDS, min_size=1, max_size=4)
ENDS = st.sampled_from(["", "x", " y", "\n", "\u0301", "<|end|>", "|>", "</s>", "'s"]) | TEXTS


@pytest.mark.parametrize(("piece", "stretch"), [(1, 9), (40, 100)])
@pytest.mark.parametrize("name", SHAPES)
def test_cached_pieces_give_the_ids_of_the_whole(
    name: str, piece: int, stretch: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Texts that share beginnings with those before, cut at as many places as there are."""
    monkeypatch.setattr(segments, "PIECE", piece)
    monkeypatch.setattr(stretches, "STRETCH", stretch)
    hf = HfBackend(shaped(name))
    cuts = cuts_of(json.loads(hf.spec))
    known = Stretches(100_000, cuts)
    cached = CachedBackend(hf, cuts, SegmentCache(100_000), known)

    @A_FEW
    @given(GROWING, st.data())
    def check(parts: list[str], data: st.DataObject) -> None:
        for text in texts_that_grow(parts, data):
            assert cached.encode(text) == hf.encode(text)
        cached.cache.check()
        known.check()

    check()


@pytest.mark.parametrize("name", CUT_WITHIN)
def test_known_stretches_give_the_ids_of_the_whole(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The same for a library that is given all that is not known."""
    monkeypatch.setattr(stretches, "STRETCH", 9)
    hf = HfBackend(shaped(name))
    cuts = cuts_of(json.loads(hf.spec))
    known = Stretches(100_000, cuts)
    stretched = StretchedBackend(hf, cuts, known)

    @A_FEW
    @given(GROWING, st.data())
    def check(parts: list[str], data: st.DataObject) -> None:
        for text in texts_that_grow(parts, data):
            assert stretched.encode(text) == hf.encode(text)
        known.check()

    check()


def texts_that_grow(parts: list[str], data: st.DataObject) -> Iterator[str]:
    """Each with one part more, and then those that part from the last one somewhere."""
    text = ""
    for part in parts:
        text += part
        yield text
    for _ in range(3):
        at = data.draw(st.integers(0, len(text)))
        yield text[:at] + data.draw(ENDS)
