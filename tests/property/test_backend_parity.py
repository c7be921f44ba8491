"""What encodes in place of `tokenizers` gives its ids, on every text.

    pytest --hypothesis-profile thorough tests/property/test_backend_parity.py

asks 10,000 times for each shape.
"""

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.shapes import SHAPES, shaped
from support.texts import LONG_WORDS, TEXTS

from kvrouter.tokenize import segments
from kvrouter.tokenize.choice import BackendSettings, choose
from kvrouter.tokenize.cuts import cuts_of
from kvrouter.tokenize.hf import HfBackend
from kvrouter.tokenize.segments import CachedBackend, SegmentCache


@pytest.mark.parametrize("name", SHAPES)
def test_what_is_proven_at_start_holds_for_every_text(name: str) -> None:
    hf = HfBackend(shaped(name))
    chosen = choose(hf, [], BackendSettings(check_every=0))

    @given(TEXTS)
    def check(text: str) -> None:
        assert chosen.encode(text) == hf.encode(text)

    check()


GROWING = st.lists(TEXTS | LONG_WORDS, min_size=1, max_size=4)


@pytest.mark.parametrize("piece", [1, 40])
@pytest.mark.parametrize("name", SHAPES)
def test_cached_pieces_give_the_ids_of_the_whole(
    name: str, piece: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Texts that share beginnings with those before, cut at as many places as there are."""
    monkeypatch.setattr(segments, "PIECE", piece)
    hf = HfBackend(shaped(name))
    cache = SegmentCache(100_000)
    cached = CachedBackend(hf, cuts_of(json.loads(hf.spec)), cache)

    @given(GROWING)
    def check(parts: list[str]) -> None:
        for end in range(1, len(parts) + 1):
            text = "".join(parts[:end])
            assert cached.encode(text) == hf.encode(text)
        cache.check()

    check()
