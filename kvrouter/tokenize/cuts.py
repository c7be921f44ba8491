"""Where a text can be cut so that its pieces, encoded apart, give the ids of the whole.

What is cut in this way can be cached piece by piece. Two kinds of cut are exact, each for the
tokenizers for which it is argued here; others are not cut at all.

**At special tokens.** `tokenizers` first looks for the added tokens that are matched before
normalization, from left to right, the longest of those that begin at the same place. What lies
between them is normalized, cut into words and encoded by itself. So the text may be cut before and
behind every such token, unless another token's flags let it look over the cut: `single_word` reads
the neighbouring characters, `lstrip` and `rstrip` swallow white space, which may be a token itself.
Only what begins the whole text is special (a space may be put before it): it is kept apart.

**Within a segment**, for some kinds: see `within`.
"""

import re
from collections.abc import Iterable
from dataclasses import dataclass

from kvrouter.tokenize.within import Json, may_cut_within


@dataclass(frozen=True)
class Cuts:
    """How one tokenizer's texts may be cut."""

    tokens: re.Pattern[str] | None
    """Finds every token that is matched before normalization; None if texts are not cut there."""
    plain_ids: dict[str, int]
    """Those of them at which the text is cut: they swallow nothing."""
    lead: str | None
    """One of them, to stand before a piece that does not begin its text."""
    within: bool
    """Whether segments are cut too."""
    longest_token: int = 0
    """Characters of the longest of the tokens."""

    @property
    def looks_ahead(self) -> int:
        """How many characters behind a place decide, with those before it, if it is a cut."""
        return self.longest_token + len(" a")


UNCUT = Cuts(None, {}, None, within=False)


def cuts_of(spec: Json) -> Cuts:
    """Read the rule off a `tokenizer.json`."""
    added: list[Json] = spec.get("added_tokens") or []
    raw = [token for token in added if not token["normalized"] and token["content"]]
    plain = {t["content"]: t["id"] for t in raw if not (t["lstrip"] or t["rstrip"])}
    if any(token["single_word"] for token in added) or _may_swallow_tokens(added, plain):
        return UNCUT
    lead = _lead(plain, [token["content"] for token in raw])
    if lead is None and added:
        return UNCUT
    contents = sorted((token["content"] for token in raw), key=len, reverse=True)
    tokens = re.compile("|".join(map(re.escape, contents))) if contents else None
    longest = len(contents[0]) if contents else 0
    return Cuts(tokens, plain, lead, may_cut_within(spec), longest)


def _may_swallow_tokens(added: list[Json], plain: Iterable[str]) -> bool:
    strips = any(token["lstrip"] or token["rstrip"] for token in added)
    return strips and any(content != content.strip() for content in plain)


def _lead(plain: Iterable[str], contents: list[str]) -> str | None:
    """A token that stays itself whatever stands behind it."""
    for token in plain:
        starts = (token[at:] for at in range(len(token)))
        others = [content for content in contents if content != token]
        if not any(each.startswith(start) for start in starts for each in others):
            return token
    return None
