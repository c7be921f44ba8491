"""Where a segment of text between special tokens can be cut, for which tokenizers, and why.

Between an ASCII letter and a space that another ASCII letter follows:
`...word| word...`. Four things have to hold there.

1. *Normalization does not look over the cut.* It maps single characters, or composes combining
   marks with what is before them; neither a space nor what precedes it is changed by the other.
   So NFC, NFD, NFKC, NFKD, Lowercase, and Replace of a single space. Not Prepend: it would put its
   sign before every piece.
2. *Words end there.* A regex is known by its alternatives (`_ALTERNATIVES`). None of them matches
   a letter and a space behind it, so no word spans the cut. None looks further back than its own
   beginning, so the words behind the cut are the same without what is before. None that ends in a
   letter depends on what follows, and runs of white space with their look-ahead end before the
   letter: so the words before are the same without what is behind. One alternative takes a space
   with the letters behind it, so the cut lies at a match and not within what nothing matches.
   Metaspace, or a Replace of the space by `\u2581`, begin a piece with that sign, to which a prefix
   space is never added.
3. *Where there are no words* (SentencePiece kinds), merges have to stop there by themselves: no
   entry of the vocabulary has a letter with the sign of the space behind it. BPE only ever makes
   entries of the vocabulary, and merges on both sides do not see each other. The sign itself has
   to be in the vocabulary: runs of unknown characters are fused.
4. *No added token* lies across such a place or swallows the white space behind a letter.

Unigram is not cut: its best path is a sum of floating point numbers, where a piece's own sum may
be rounded to another winner. Nor is WordPiece, which nobody generates with.
"""

import re
import unicodedata
from collections.abc import Iterable
from typing import Any

Json = dict[str, Any]

PLACE = re.compile(r" (?<=[A-Za-z] )(?=[A-Za-z])")
"""A place within a segment; the cut is before the space. (Begun by the space, it is found fast.)"""

_SIGN = "\u2581"
_ACROSS = re.compile(r"[A-Za-z][ \u2581\u0120][A-Za-z]")
_SPANNING = re.compile(r"[A-Za-z][ \u2581]")
_NEUTRAL_NORMALIZERS = frozenset({"NFC", "NFD", "NFKC", "NFKD", "Lowercase"})
_NEUTRAL_SPLITS = frozenset(
    {r"\p{N}{1,3}", r"\p{N}", "[\u4e00-\u9fa5\u3040-\u309f\u30a0-\u30ff]+", "[0-9]"}
)
"""Regexes that match neither letters of ASCII nor spaces: they leave the place as it is."""
_UPPER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]"
_LOWER = r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
_SHORT_FORMS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_WORD_ALTERNATIVES = frozenset(
    {
        r" ?\p{L}+",
        r"[^\r\n\p{L}\p{N}]?\p{L}+",
        r"[^\r\n\p{L}\p{N}]?[\p{L}\p{M}]+",
        r"[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+",
        *(
            rf"[^\r\n\p{{L}}\p{{N}}]?{_UPPER}{first}{_LOWER}{second}{short}"
            for first, second in (("*", "+"), ("+", "*"))
            for short in ("", f"{_SHORT_FORMS}?")
        ),
    }
)
_ALTERNATIVES = _WORD_ALTERNATIVES | {
    _SHORT_FORMS,
    *("'s", "'t", "'re", "'ve", "'m", "'ll", "'d"),
    *(r"\p{N}", r"\p{N}{1,3}", r" ?\p{N}+"),
    *(r" ?[^\s\p{L}\p{N}]+", r" ?[^\s\p{L}\p{N}]+[\r\n]*", r" ?[^\s\p{L}\p{N}]+[\r\n/]*"),
    *(r" ?[\p{P}\p{S}]+[\r\n]*", r"""[!"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+"""),
    *(r"\s*[\r\n]+", r"\s*[\r\n]", r"\s+(?!\S)", r"\s+"),
}


def may_cut_within(spec: Json) -> bool:
    """Whether segments may be cut at `PLACE`, read off a `tokenizer.json`."""
    if not _merges_plainly(spec["model"]) or any(map(_is_in_the_way, spec["added_tokens"])):
        return False
    normalizers = _flat(spec.get("normalizer"), "normalizers")
    if not all(_is_neutral(each) for each in normalizers):
        return False
    splits = _flat(spec.get("pre_tokenizer"), "pretokenizers")
    if any(_ends_words(each) for each in splits):
        return all(_ends_words(each) or _leaves_place(each) for each in splits)
    signed = any(_is_space_to_sign(each) for each in normalizers)
    if not all(_is_metaspace(each) or (signed and _is_split_at_space(each)) for each in splits):
        return False
    return (signed or bool(splits)) and _merges_stop(spec["model"]["vocab"])


def _merges_plainly(model: Json) -> bool:
    affixes = model.get("continuing_subword_prefix") or model.get("end_of_word_suffix")
    return model["type"] == "BPE" and not model.get("dropout") and not affixes


def _is_in_the_way(token: Json) -> bool:
    """Whether the added token may lie over a place, or swallow the space there."""
    content = token["content"]
    folded = unicodedata.normalize("NFKC", content)
    if _ACROSS.search(content) or _ACROSS.search(folded):
        return True
    return bool(token["rstrip"]) and folded[-1:].isalpha()


def _flat(part: Json | None, name: str) -> list[Json]:
    """A sequence of parts, of sequences too, as one list."""
    if part is None:
        return []
    if part["type"] != "Sequence":
        return [part]
    return [each for inner in part[name] for each in _flat(inner, name)]


def _is_neutral(normalizer: Json) -> bool:
    return normalizer["type"] in _NEUTRAL_NORMALIZERS or _is_space_to_sign(normalizer)


def _is_space_to_sign(normalizer: Json) -> bool:
    if normalizer["type"] != "Replace":
        return False
    return bool(normalizer["pattern"] == {"String": " "} and normalizer["content"] == _SIGN)


def _is_metaspace(split: Json) -> bool:
    return bool(split["type"] == "Metaspace" and split.get("replacement") == _SIGN)


def _is_split_at_space(split: Json) -> bool:
    """Behind a Replace of the space there is none to split at."""
    return bool(split["type"] == "Split" and split["pattern"] == {"String": " "})


def _ends_words(split: Json) -> bool:
    if split["type"] == "ByteLevel":
        return bool(split["use_regex"])  # GPT-2's own, of the alternatives above
    pattern = _regex(split)
    if pattern is None or not _keeps_all(split):
        return False
    alternatives = set(_alternatives(pattern))
    return alternatives <= _ALTERNATIVES and not alternatives.isdisjoint(_WORD_ALTERNATIVES)


def _leaves_place(split: Json) -> bool:
    if split["type"] == "ByteLevel":
        return not split["use_regex"]
    if split["type"] == "Digits":
        return True
    return _keeps_all(split) and _regex(split) in _NEUTRAL_SPLITS


def _regex(split: Json) -> str | None:
    pattern: Json = split.get("pattern") or {}
    regex = pattern.get("Regex")
    return regex if split["type"] == "Split" and isinstance(regex, str) else None


def _keeps_all(split: Json) -> bool:
    """Matches and what is between them become pieces; nothing is merged, nothing dropped."""
    return bool(split.get("behavior") == "Isolated" and not split.get("invert"))


def _alternatives(pattern: str) -> list[str]:
    """The alternatives of a regex: its parts between bars outside of brackets."""
    parts, depth, in_class, at, start = [], 0, False, 0, 0
    while at < len(pattern):
        character = pattern[at]
        if character == "\\":
            at += 1
        elif in_class:
            in_class = character != "]"
        elif character == "[":
            in_class = True
        elif character in "()":
            depth += 1 if character == "(" else -1
        elif character == "|" and depth == 0:
            parts.append(pattern[start:at])
            start = at + 1
        at += 1
    return [*parts, pattern[start:]]


def _merges_stop(vocabulary: Iterable[str]) -> bool:
    entries = set(vocabulary)
    return _SIGN in entries and not any(_SPANNING.search(entry) for entry in entries)
