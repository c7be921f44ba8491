"""Rank files as `tiktoken` has them: one token and its rank a line, in base 64.

They say nothing of the regex and the special tokens, so a file is known by its name:
`o200k_base.tiktoken` (or `o200k_harmony`), with harmony's special tokens, is what gpt-oss has.
Its predecessor cl100k_base is refused: where it is still named for such models it is outdated.

The ranks become a tokenizer of the `tokenizers` library, so that everything else holds for them
too. Merging the pair whose union has the lowest rank, which is what `tiktoken` does, is merging by
a list of all pairs in the order of the ranks of their unions.
"""

import base64
from pathlib import Path

from tokenizers import AddedToken, Regex, Tokenizer, models, pre_tokenizers

from kvrouter.tokenize.location import TokenizerError

_UPPER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]"
_LOWER = r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
_SHORT_FORMS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
O200K_PATTERN = (
    rf"[^\r\n\p{{L}}\p{{N}}]?{_UPPER}*{_LOWER}+{_SHORT_FORMS}?"
    rf"|[^\r\n\p{{L}}\p{{N}}]?{_UPPER}+{_LOWER}*{_SHORT_FORMS}?"
    r"|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_HARMONY = {
    199998: "startoftext",
    199999: "endoftext",
    200002: "return",
    200003: "constrain",
    200005: "channel",
    200006: "start",
    200007: "end",
    200008: "message",
    200012: "call",
    200018: "endofprompt",
}
_HARMONY_END = 201088
HARMONY_TOKENS = {
    f"<|{_HARMONY.get(number, f'reserved_{number}')}|>": number
    for number in range(min(_HARMONY), _HARMONY_END)
}
_KNOWN = ("o200k_base", "o200k_harmony")


def load_ranks(path: Path) -> Tokenizer:
    """The tokenizer of a rank file; raises `TokenizerError`."""
    if path.stem not in _KNOWN:
        raise TokenizerError(
            f"{path}: rank files are known by name, this is none of {', '.join(_KNOWN)}"
        )
    return tokenizer_of(read_ranks(path), O200K_PATTERN, HARMONY_TOKENS)


def read_ranks(path: Path) -> dict[bytes, int]:
    """The ranks by token; raises `TokenizerError`."""
    try:
        lines = path.read_bytes().splitlines()
        pairs = (line.split() for line in lines if line)
        return {base64.b64decode(token): int(rank) for token, rank in pairs}
    except (OSError, ValueError) as error:
        raise TokenizerError(f"the rank file {path} can't be read: {error}") from error


def tokenizer_of(
    ranks: dict[bytes, int], pattern: str, special_tokens: dict[str, int]
) -> Tokenizer:
    """A tokenizer with these ranks as its ids. Some seconds for 200,000 ranks."""
    names = {token: _name(token) for token in ranks}
    merges = [
        (names[token[:at]], names[token[at:]])
        for token in sorted(ranks, key=ranks.__getitem__)
        for at in range(1, len(token))
        if token[:at] in ranks and token[at:] in ranks
    ]
    vocabulary = {names[token]: rank for token, rank in ranks.items()}
    # Tokens keep the ids that they have here when they are added below.
    vocabulary |= special_tokens
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=merges, ignore_merges=True))
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(pattern), behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    added = [AddedToken(token, normalized=False, special=True) for token in special_tokens]
    tokenizer.add_special_tokens(added)
    return tokenizer


def _byte_names() -> list[str]:
    """The letter that stands for each byte in a vocabulary of the library."""
    shown = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = iter(range(256, 512))
    return [chr(byte) if byte in shown else chr(next(others)) for byte in range(256)]


_BYTE_NAMES = _byte_names()


def _name(token: bytes) -> str:
    return "".join(_BYTE_NAMES[byte] for byte in token)
