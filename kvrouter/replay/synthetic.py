"""Made-up traces for users who have none: what prompts share is what tells them apart.

    chat      conversations of some turns behind one of a few system prompts
    rag       a question behind one to three documents of a library, some much more wanted
    agents    long contexts that grow quickly by short steps, one step right after the other
    code      completions in files of repositories: all share the repository's beginning
    unique    no prompt shares anything
    bursts    sixteen equal prompts within milliseconds, now and then

Arrivals are a Poisson process of `rate` requests a second on average; those of `chat` and `agents`
are once as many sessions end as begin, after some minutes, for they begin without any. All is
drawn from `rng`.
"""

import itertools
from collections.abc import Callable, Iterator
from random import Random

from kvrouter.replay.trace import Trace, TraceRequest

CHUNK_TOKENS = 64
BURST = 16
BURST_GAP_S = 0.0005


class _Text:
    """A growing text, as chunks. Its last chunk changes until it is full."""

    def __init__(self, numbers: Iterator[int], chunks: tuple[int, ...] = ()) -> None:
        self._numbers = numbers
        self._chunks = list(chunks)
        self.tokens = len(chunks) * CHUNK_TOKENS

    def grow(self, tokens: int) -> None:
        """Append this many tokens."""
        self._chunks = self._chunks[: self.tokens // CHUNK_TOKENS]
        self.tokens += tokens
        missing = -(-self.tokens // CHUNK_TOKENS) - len(self._chunks)
        self._chunks += itertools.islice(self._numbers, missing)

    def prompt(self, at_s: float, output_tokens: int) -> TraceRequest:
        """A request whose prompt is the text so far."""
        return TraceRequest(at_s, self.tokens, output_tokens, tuple(self._chunks))


def synthetic_trace(kind: str, *, requests: int, rate: float, rng: Random) -> Trace:
    """A trace of this kind; raises ValueError if there is no such kind.

    `rate` is in requests per second.
    """
    generator = GENERATORS.get(kind)
    if generator is None:
        raise ValueError(
            f"no synthetic trace is called {kind!r}; there are {', '.join(GENERATORS)}"
        )
    # Sessions overlap, so the last ones begin when earlier ones still have requests to come.
    made = itertools.islice(generator(rng, rate), 2 * requests)
    first = sorted(made, key=lambda request: request.at_s)[:requests]
    return Trace(f"synthetic {kind}", first, CHUNK_TOKENS)


def _times(rng: Random, rate: float) -> Iterator[float]:
    at_s = 0.0
    while True:
        at_s += rng.expovariate(rate)
        yield at_s


def _length(rng: Random, typical: int) -> int:
    """Around `typical` tokens, sometimes several times that."""
    return max(1, round(rng.lognormvariate(0.0, 0.8) * typical))


def _shared(numbers: Iterator[int], count: int, tokens: int) -> list[tuple[int, ...]]:
    """Texts that requests have in common."""
    return [tuple(itertools.islice(numbers, tokens // CHUNK_TOKENS)) for _ in range(count)]


def _chat(rng: Random, rate: float) -> Iterator[TraceRequest]:
    numbers, turns = itertools.count(), 4
    systems = _shared(numbers, 4, 1024)
    for started_s in _times(rng, rate / turns):
        text, at_s = _Text(numbers, rng.choice(systems)), started_s
        for _ in range(rng.randint(1, 2 * turns - 1)):
            text.grow(_length(rng, 200))
            output = _length(rng, 250)
            yield text.prompt(at_s, output)
            text.grow(output)
            at_s += 0.02 * output + rng.expovariate(1 / 20)


def _rag(rng: Random, rate: float) -> Iterator[TraceRequest]:
    numbers = itertools.count()
    library = _shared(numbers, 500, 2048)
    weights = [1 / (rank + 1) for rank in range(len(library))]
    for at_s in _times(rng, rate):
        documents = rng.choices(library, weights, k=rng.randint(1, 3))
        text = _Text(numbers, tuple(itertools.chain.from_iterable(documents)))
        text.grow(_length(rng, 80))
        yield text.prompt(at_s, _length(rng, 150))


def _agents(rng: Random, rate: float) -> Iterator[TraceRequest]:
    numbers, steps = itertools.count(), 20
    tools = _shared(numbers, 3, 4096)
    for started_s in _times(rng, rate / steps):
        text, at_s = _Text(numbers, rng.choice(tools)), started_s
        text.grow(_length(rng, 500))
        for _ in range(rng.randint(1, 2 * steps - 1)):
            output = _length(rng, 60)
            yield text.prompt(at_s, output)
            text.grow(output + _length(rng, 600))
            at_s += 0.02 * output + rng.expovariate(1 / 3)


def _code(rng: Random, rate: float) -> Iterator[TraceRequest]:
    numbers = itertools.count()
    repositories = _shared(numbers, 20, 4096)
    files = [
        tuple(repository) + tuple(itertools.islice(numbers, rng.randint(8, 64)))
        for repository in repositories
        for _ in range(30)
    ]
    for at_s in _times(rng, rate):
        file = rng.choice(files)
        begun = len(repositories[0])
        text = _Text(numbers, file[: rng.randint(begun, len(file))])
        text.grow(_length(rng, 100))
        yield text.prompt(at_s, _length(rng, 30))


def _unique(rng: Random, rate: float) -> Iterator[TraceRequest]:
    numbers = itertools.count()
    for at_s in _times(rng, rate):
        text = _Text(numbers)
        text.grow(_length(rng, 2000))
        yield text.prompt(at_s, _length(rng, 200))


def _bursts(rng: Random, rate: float) -> Iterator[TraceRequest]:
    numbers = itertools.count()
    for at_s in _times(rng, rate / BURST):
        text = _Text(numbers)
        text.grow(_length(rng, 3000))
        for place in range(BURST):
            yield text.prompt(at_s + place * BURST_GAP_S, _length(rng, 200))


GENERATORS: dict[str, Callable[[Random, float], Iterator[TraceRequest]]] = {
    "chat": _chat,
    "rag": _rag,
    "agents": _agents,
    "code": _code,
    "unique": _unique,
    "bursts": _bursts,
}
