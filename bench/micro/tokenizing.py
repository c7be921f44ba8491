"""CPU from the bytes of a body to block hashes, split by part, per backend.

    python bench/micro/tokenizing.py [--tokenizer tests/data/tinymodel] [--repeat 25] [--seed 1]

Four cases, for prompts of 1, 32 and 262 KB:

- `cold`: the first document that a new backend meets (its regexes are compiled, its caches empty);
- `grown`: a message that was seen before and is 200 characters longer now;
- `turn`: a chat of 50 turns, of which all but the last two messages were seen before;
- `question`: a document that was seen before with another question behind it, in one message.

Each repetition asks for a text that was never asked for. The time is the CPU time of the process,
all its threads; the least and the median of the repetitions are reported, in milliseconds. Parts:
`parse` (scan the body, decode the messages), `encode` (text to ids), `hash` (block hashes, 16
tokens each); `render` is the rest of `all`: the chat template above all.

Then the memory of the cache of pieces, where `tokenizers` encodes: bytes that Python allocated for
each MB of text, by its own count and by the cache's.

Prints one JSON object, and a table of the least times to standard error.
"""

import argparse
import gc
import json
import platform
import random
import statistics
import subprocess
import sys
import sysconfig
import time
import tracemalloc
from array import array
from collections.abc import Callable
from importlib.metadata import version
from pathlib import Path
from typing import Any

from kvrouter.openai.body import Endpoint, parse_body
from kvrouter.tokenize import BackendSettings, ModelTokenizer, ThreadSettings
from kvrouter.tokenize.backend import Allowance
from kvrouter.tokenize.cuts import cuts_of
from kvrouter.tokenize.hash_runs import HashRuns
from kvrouter.tokenize.hf import HfBackend
from kvrouter.tokenize.ladder import Ladder
from kvrouter.tokenize.location import find_tokenizer
from kvrouter.tokenize.segments import CachedBackend, SegmentCache
from kvrouter.tokenize.stretches import Stretches

SIZES = {"1 KB": 1_000, "32 KB": 32_768, "262 KB": 262_000}
BACKENDS = ("auto", "hf")
PARTS = ("parse", "render", "encode", "hash", "all")
BLOCK_SIZE = 16
TURNS = 50
MORE = 200
Messages = list[dict[str, Any]]
Case = Callable[["Corpus", int], tuple[Messages, Messages]]


class Corpus:
    """Source code of the standard library, another slice each time."""

    def __init__(self, seed: int) -> None:
        folder = Path(sysconfig.get_path("stdlib"))
        sources = [path.read_text("utf-8", "replace") for path in sorted(folder.glob("*.py"))]
        self._text = "\n".join(sources)
        self._rng = random.Random(seed)

    def take(self, size: int) -> str:
        """So many characters."""
        start = self._rng.randrange(len(self._text) - size)
        return self._text[start : start + size]

    def apart(self, size: int, count: int) -> list[str]:
        """So many slices of so many characters that have nothing in common."""
        starts = self._rng.sample(range(0, len(self._text) - size, size), count)
        return [self._text[start : start + size] for start in starts]


def user(text: str) -> Messages:
    """A chat of one message."""
    return [{"role": "user", "content": text}]


def cold(corpus: Corpus, size: int) -> tuple[Messages, Messages]:
    """Before it, only enough to compile regexes."""
    return user(corpus.take(500)), user(corpus.take(size))


def grown(corpus: Corpus, size: int) -> tuple[Messages, Messages]:
    """The same message, longer."""
    text = corpus.take(size)
    return user(text), user(text + corpus.take(MORE))


def turn(corpus: Corpus, size: int) -> tuple[Messages, Messages]:
    """The whole chat of before, its answer and the next question."""
    roles = ("user", "assistant") * TURNS
    chat = [{"role": role, "content": corpus.take(size // len(roles))} for role in roles]
    return chat[:-1], [*chat, *user(corpus.take(MORE))]


def question(corpus: Corpus, size: int) -> tuple[Messages, Messages]:
    """Retrieved text first, then what is asked about it."""
    text = corpus.take(size)
    first, second = (user(f"{text}\n\nQuestion: {corpus.take(MORE)}") for _ in range(2))
    return first, second


CASES: dict[str, Case] = {"cold": cold, "grown": grown, "turn": turn, "question": question}


class Stopwatch:
    """A backend that adds up the CPU time of the one it stands for."""

    def __init__(self, inner: Ladder) -> None:
        self._inner = inner
        self.spent_s = 0.0

    def encode(self, text: str, allowance: Allowance | None = None) -> "array[int]":
        """See `SparingBackend`."""
        started = time.process_time()
        ids = self._inner.encode(text, allowance)
        self.spent_s += time.process_time() - started
        return ids

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)


def measured(tokenizer: ModelTokenizer, runs: HashRuns, body: bytes) -> dict[str, float]:
    """Milliseconds of each part for one body."""
    if not isinstance(tokenizer.backend, Stopwatch):
        tokenizer.backend = Stopwatch(tokenizer.backend)  # type: ignore[assignment]  # stands for it
    watch: Any = tokenizer.backend
    watch.spent_s = 0.0
    started = time.process_time()
    request = parse_body(Endpoint.CHAT, body)
    _ = request.messages
    parsed = time.process_time()
    prompt = tokenizer.prompt(request)
    tokenized = time.process_time()
    prompt.prehash([BLOCK_SIZE], runs.block_hashes)
    ended = time.process_time()
    spent_s = {
        "parse": parsed - started,
        "render": tokenized - parsed - watch.spent_s,
        "encode": watch.spent_s,
        "hash": ended - tokenized,
        "all": ended - started,
    }
    return {part: seconds * 1e3 for part, seconds in spent_s.items()}


def run(
    load: Callable[[], ModelTokenizer], case: str, size: int, repeat: int, corpus: Corpus
) -> dict[str, dict[str, float]]:
    """The least and the median milliseconds of each part."""
    rows: list[dict[str, float]] = []
    shared, runs = load(), HashRuns(ThreadSettings().hash_bytes)
    pairs = [CASES[case](corpus, size) for _ in range(repeat)]
    bodies = [[json.dumps({"messages": each}).encode() for each in pair] for pair in pairs]
    if case != "cold":
        for before, _ in bodies:
            measured(shared, runs, before)
    for before, asked in bodies:
        tokenizer = shared
        if case == "cold":
            tokenizer = load()
            measured(tokenizer, runs, before)
        rows.append(measured(tokenizer, runs, asked))
    return {
        part: {
            "min": round(min(row[part] for row in rows), 4),
            "median": round(statistics.median(row[part] for row in rows), 4),
        }
        for part in PARTS
    }


def cold_to_library(tokenizer: str, corpus: Corpus, count: int) -> dict[str, float]:
    """CPU from body to hashes with `hf`, divided by that of the library for the text alone.

    Both have texts that they have not seen, the same ones, and each goes first every other time.
    """
    settings = BackendSettings("hf", check_every=0)
    whole = ModelTokenizer.load(tokenizer, backends=settings)
    library, runs = HfBackend.load(find_tokenizer(tokenizer)), HashRuns(ThreadSettings().hash_bytes)
    ratios = []
    for turn, text in enumerate([*corpus.apart(500, 2), *corpus.apart(SIZES["32 KB"], count)]):
        body = json.dumps({"messages": user(text)}).encode()
        spent_s = {}
        for first in (turn % 2 == 0, turn % 2 == 1):
            started = time.process_time()
            library.encode(text) if first else measured(whole, runs, body)
            spent_s[first] = time.process_time() - started
        ratios.append(spent_s[False] / spent_s[True])
    quartiles = statistics.quantiles(ratios[2:])
    return dict(zip(("quartile", "median", "third quartile"), quartiles, strict=True))


def memory(tokenizer: str, corpus: Corpus) -> dict[str, float]:
    """MB of memory for each MB of text in the cache of pieces."""
    hf = HfBackend.load(find_tokenizer(tokenizer))
    texts = [corpus.take(32_768) for _ in range(64)]
    cuts = cuts_of(json.loads(hf.spec))
    cached = CachedBackend(hf, cuts, SegmentCache(1 << 30), Stretches(1 << 30, cuts))
    tracemalloc.start()
    for text in texts:
        cached.encode(text)
    allocated = tracemalloc.get_traced_memory()[0]
    tracemalloc.stop()
    size = sum(map(len, texts))
    counted = cached.cache.stats.bytes + cached.stretches.size_bytes
    return {"allocated": round(allocated / size, 2), "counted": round(counted / size, 2)}


def about(seed: int) -> dict[str, Any]:
    """What is measured: commit, seed, versions."""
    command = ("git", "rev-parse", "--short", "HEAD")
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    commit = done.stdout.strip() or "unknown"
    versions = {each: version(each) for each in ("tokenizers", "fastokens", "jinja2", "msgspec")}
    return {"commit": commit, "seed": seed, "python": platform.python_version(), **versions}


def main() -> None:
    """Measure each backend, size and case."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--tokenizer", default="tests/data/tinymodel")
    parser.add_argument("--repeat", type=int, default=25, help="of cold: a third")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--backend", choices=BACKENDS, nargs="+", default=BACKENDS)
    options = parser.parse_args()
    results = []
    gc.disable()
    for wish in options.backend:
        settings = BackendSettings(wish, check_every=0)

        def load(settings: BackendSettings = settings) -> ModelTokenizer:
            return ModelTokenizer.load(options.tokenizer, backends=settings)

        name = load().backend.name
        for label, size in SIZES.items():
            for case in CASES:
                corpus = Corpus(options.seed)
                repeat = max(3, options.repeat // 3) if case == "cold" else options.repeat
                parts = run(load, case, size, repeat, corpus)
                results.append({"backend": name, "size": label, "case": case, **parts})
                figures = " ".join(f"{part} {parts[part]['min']:.3f}" for part in PARTS)
                print(f"{name:10}{label:>7} {case:9} {figures}", file=sys.stderr)
    print(
        json.dumps(
            {
                **about(options.seed),
                "unit": "ms of CPU",
                "results": results,
                "cold_hf_to_library": cold_to_library(options.tokenizer, Corpus(options.seed), 60),
                "cache_mb_per_mb": memory(options.tokenizer, Corpus(options.seed)),
            },
            indent=2,
        )
    )


if __name__ == "__main__":
    main()
