"""Which of several engines may be asked, when some of them don't answer. Pure.

An engine that has failed rests before it is asked again, twice as long each time, so that not every
prompt waits for it in vain. After a rest one question is let through; the others go on without it
until that one is answered.
"""

import threading
from collections.abc import Sequence
from dataclasses import dataclass
from random import Random

FIRST_S = 1.0
MAX_S = 60.0
_JITTER = 0.25
"""Of a rest, more or less: routers that saw the same failure don't come back at once."""


@dataclass(slots=True)
class _Rest:
    began: float
    until: float
    length_s: float
    """Without the jitter."""


class Rests:
    """The engines that rest, by URL. Thread-safe."""

    def __init__(self, rng: Random, *, question_s: float) -> None:
        """`question_s` is how long a question may take."""
        self._rng = rng
        self._question_s = question_s
        self._rests: dict[str, _Rest] = {}
        self._lock = threading.Lock()

    def choose(self, urls: Sequence[str], turn: int, now: float) -> str | None:
        """The one whose turn it is among those that don't rest; None when all do.

        Whoever asks it says how that went.
        """
        with self._lock:
            for at in range(len(urls)):
                url = urls[(turn + at) % len(urls)]
                rest = self._rests.get(url)
                if rest is None:
                    return url
                if now >= rest.until:
                    rest.until = now + self._question_s
                    return url
        return None

    def answered(self, url: str) -> None:
        """It did."""
        with self._lock:
            self._rests.pop(url, None)

    def failed(self, url: str, asked_at: float, now: float) -> None:
        """It did not; it rests from now on, if it was asked since its rest began."""
        with self._lock:
            rest = self._rests.get(url)
            if rest is not None and asked_at < rest.began:
                return
            length_s = FIRST_S if rest is None else min(2 * rest.length_s, MAX_S)
            until = now + length_s * self._rng.uniform(1 - _JITTER, 1 + _JITTER)
            self._rests[url] = _Rest(now, until, length_s)
            for gone in [each for each, old in self._rests.items() if old.until + MAX_S < now]:
                del self._rests[gone]

    def resting(self, urls: Sequence[str]) -> int:
        """How many of these have not answered since they failed."""
        with self._lock:
            return sum(url in self._rests for url in urls)
