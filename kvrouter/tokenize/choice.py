"""Which backend encodes a model's text, and why."""

import json
from collections.abc import Sequence
from dataclasses import dataclass
from time import perf_counter
from typing import Literal

from kvrouter.tokenize import parity
from kvrouter.tokenize.backend import Backend
from kvrouter.tokenize.fast import FastBackend
from kvrouter.tokenize.hf import HfBackend
from kvrouter.tokenize.ladder import Ladder
from kvrouter.tokenize.location import TokenizerError

BackendWish = Literal["auto", "hf"]

_TOKENS_PROVEN = 48
"""Of a model's special tokens: many models reserve hundreds that differ in a number."""


@dataclass(frozen=True)
class BackendSettings:
    """How a backend is chosen and watched."""

    wish: BackendWish = "auto"
    """`hf` takes the reference and asks no further."""
    check_every: int = 1000
    """One of so many prompts is encoded by the reference too; 0 for none."""


def choose(hf: HfBackend, rendered: Sequence[str], settings: BackendSettings) -> Ladder:
    """Take the fastest backend that is proven equal to `tokenizers`. Up to two seconds of CPU.

    `rendered` are prompts that the model's own chat template made.
    """
    if settings.wish == "hf":
        return Ladder([hf], "configured", check_every=0)
    try:
        fast = FastBackend(hf.spec)
    except TokenizerError as error:
        return Ladder([hf], str(error), check_every=0)
    started = perf_counter()
    compared = list(parity.texts(_special_tokens(hf), rendered))
    found = parity.difference(hf, fast, compared)
    if found is not None:
        return Ladder([hf], f"fastokens gives other ids: {found}", check_every=0)
    took_s = perf_counter() - started
    reason = f"ids equal to tokenizers on {len(compared)} texts ({took_s:.1f} s)"
    return Ladder([fast, hf], reason, check_every=settings.check_every)


def _special_tokens(hf: HfBackend) -> list[str]:
    tokens: list[Backend | dict[str, str]] = json.loads(hf.spec)["added_tokens"]
    return [token["content"] for token in tokens if isinstance(token, dict)][:_TOKENS_PROVEN]
