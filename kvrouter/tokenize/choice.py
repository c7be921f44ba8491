"""Which backend encodes a model's text, and why."""

import json
from collections.abc import Sequence
from dataclasses import dataclass
from time import perf_counter
from typing import Any, Literal

from kvrouter.tokenize import parity
from kvrouter.tokenize.backend import Backend, EncodeError
from kvrouter.tokenize.cuts import Cuts, cuts_of
from kvrouter.tokenize.fast import FastBackend
from kvrouter.tokenize.guarded import GuardedLibrary
from kvrouter.tokenize.hf import HfBackend
from kvrouter.tokenize.ladder import Ladder
from kvrouter.tokenize.location import TokenizerError
from kvrouter.tokenize.segments import CachedBackend, SegmentCache
from kvrouter.tokenize.stretches import StretchedBackend, Stretches

BackendWish = Literal["auto", "hf"]

_TOKENS_PROVEN = 48
"""Of a model's special tokens: many models reserve hundreds that differ in a number."""


@dataclass(frozen=True)
class BackendSettings:
    """How a backend is chosen and watched."""

    wish: BackendWish = "auto"
    """`hf` does not ask for `fastokens`."""
    check_every: int = 1000
    """One of so many prompts is encoded by the reference too; 0 for none."""
    cache_bytes: int = 128 * 1024 * 1024
    """For the ids of text that was met before; 0 for no cache."""


def choose(hf: HfBackend, rendered: Sequence[str], settings: BackendSettings) -> Ladder:
    """Take the fastest backend that is proven equal to `tokenizers`. Up to two seconds of CPU.

    `rendered` are prompts that the model's own chat template made.
    """
    reference = GuardedLibrary(hf)
    spec = json.loads(hf.spec)
    compared = list(parity.texts(_special_tokens(spec), rendered))
    cuts = cuts_of(spec)
    steps: list[Backend] = [reference]
    cached = None
    if settings.cache_bytes:
        half = settings.cache_bytes // 2
        cache, stretches = SegmentCache(half), Stretches(half, cuts)
        cached = CachedBackend(reference, cuts, cache, stretches)
        steps.insert(0, cached)
    fast, reason = None, "configured"
    if settings.wish == "auto":
        fast, reason = _proven_fast(hf.spec, reference, compared, cuts, settings.cache_bytes)
    if fast is not None:
        return Ladder([fast, *steps], reason, check_every=settings.check_every)
    if cached is not None:
        problem = _problem(reference, cached, compared)
        cache.clear()
        stretches.clear()
        if problem:
            return Ladder([reference], f"{reason}; no cache: {problem}", check_every=0)
    return Ladder(steps, reason, check_every=settings.check_every, sparing=cached)


def _proven_fast(
    spec: str, reference: Backend, compared: Sequence[str], cuts: Cuts, cache_bytes: int
) -> tuple[Backend | None, str]:
    """The library where it is right about all of these, and why or why not."""
    try:
        library = GuardedLibrary(FastBackend(spec))
    except TokenizerError as error:
        return None, str(error)
    fast: Backend = library
    if cuts.within and cache_bytes:
        stretches = Stretches(cache_bytes, cuts)
        fast = StretchedBackend(library, cuts, stretches)
    started = perf_counter()
    problem = _problem(reference, fast, compared)
    if problem:
        return None, problem
    took_s = perf_counter() - started
    return fast, f"ids equal to tokenizers on {len(compared)} texts ({took_s:.1f} s)"


def _problem(reference: Backend, backend: Backend, compared: Sequence[str]) -> str:
    """Why a backend is not proven, empty where it is."""
    try:
        found = parity.difference(reference, backend, compared)
    except EncodeError as error:
        return f"in the proof, {error}"
    return "" if found is None else f"{backend.name} gives other ids: {found}"


def _special_tokens(spec: dict[str, Any]) -> list[str]:
    return [token["content"] for token in spec["added_tokens"]][:_TOKENS_PROVEN]
