"""Where the proof at start lets `fastokens` be used, it equals `tokenizers` on every text."""

import pytest
from hypothesis import given
from support.shapes import SHAPES, shaped
from support.texts import TEXTS

from kvrouter.tokenize.choice import BackendSettings, choose
from kvrouter.tokenize.hf import HfBackend


@pytest.mark.parametrize("name", SHAPES)
def test_what_is_proven_at_start_holds_for_every_text(name: str) -> None:
    hf = HfBackend(shaped(name))
    chosen = choose(hf, [], BackendSettings(check_every=0))

    @given(TEXTS)
    def check(text: str) -> None:
        assert chosen.encode(text) == hf.encode(text)

    check()
