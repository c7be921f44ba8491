"""Texts for properties of tokenizers: what people write, and what breaks regexes."""

from random import Random

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


def composed(rng: Random) -> str:
    """A text of the same kinds, made without Hypothesis: a hundredth of the time, for many."""
    kinds = (
        lambda: rng.choice(_WRITTEN),
        lambda: rng.choice(_SPECIAL),
        lambda: "".join(rng.choices(" \t\n\r\u00a0\u2003\u200b\u0301'", k=rng.randint(1, 6))),
        lambda: "".join(rng.choices("abcdeXYZ '", k=rng.randint(1, 30))),
        lambda: "".join(rng.choices("abXY   ,.1'\u00e9\u0301\n", k=rng.randint(20, 120))),
        lambda: "".join(chr(_code_point(rng)) for _ in range(rng.randint(1, 8))),
    )
    return "".join(rng.choice(kinds)() for _ in range(rng.randint(0, 8)))


def _code_point(rng: Random) -> int:
    """Any but a surrogate, small ones more often."""
    number = rng.randrange(rng.choice((0x80, 0x800, 0xD800, 0x110000)))
    return number if not 0xD800 <= number < 0xE000 else 0xFFFD
