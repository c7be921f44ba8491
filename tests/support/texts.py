"""Texts for properties of tokenizers: what people write, and what breaks regexes."""

from hypothesis import strategies as st

from kvrouter.tokenize import parity

_WRITTEN = [text for text in parity.texts() if 0 < len(text) < 400][:300]
_SPECIAL = [
    *("<|begin|>", "<|start|>", "<|end|>", "<s>", "</s>", "<unk>", "<tool_call>", "<|user|>"),
    *("[CLS]", "[SEP]", "<|end", "|>", "▁", "▁▁"),
]
_SPACES = st.text(st.sampled_from(" \t\n\r\u00a0\u2003\u200b\u0301'"), min_size=1, max_size=6)
_WORDS = st.text(st.sampled_from("abcdeXYZ '"), min_size=1, max_size=30)

PIECES = st.one_of(
    st.sampled_from(_WRITTEN),
    st.sampled_from(_SPECIAL),
    _SPACES,
    _WORDS,
    st.text(st.characters(codec="utf-8"), max_size=8),
)

TEXTS = st.lists(PIECES, max_size=12).map("".join)

LONG_WORDS = st.text(st.sampled_from("abXY   ,.1'é\u0301\n"), min_size=20, max_size=120)
"""Many places where a segment may be cut, and many where it may not."""
