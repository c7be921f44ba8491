"""The fastest backend that has been right so far.

A backend that passed the proof at start can still be wrong about a text that nobody thought of.
So one prompt of many is encoded by the reference too, off the path; the first difference takes the
backend out of use until the router starts again, and so does a panic.
"""

import itertools
import logging
from array import array
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from kvrouter.tokenize import parity
from kvrouter.tokenize.backend import (
    Allowance,
    Backend,
    EncodeError,
    SparingBackend,
    TooMuchError,
)

_LOG = logging.getLogger(__name__)


@dataclass(slots=True)
class LadderStats:
    """Counters since the start."""

    checked: int = 0
    """Texts that were encoded by the reference too."""
    mismatched: int = 0
    """Of these, with other ids."""
    failed: int = 0
    """Texts that the backend could not encode; the reference did."""


class _Sample(NamedTuple):
    text: str
    ids: "array[int]"
    by: Backend


class Ladder:
    """Backends from the fastest to the reference, which is the last one; the first is in use.

    `reason` says why this one; `sparing` is the step that takes an allowance. Used by several
    threads at once.
    """

    def __init__(
        self,
        steps: Sequence[Backend],
        reason: str,
        *,
        check_every: int,
        sparing: SparingBackend | None = None,
    ) -> None:
        self._steps = list(steps)
        self._sparing = sparing
        self._reference = steps[-1]
        self._check_every = check_every if len(steps) > 1 else 0
        self._turn = itertools.count(1)  # `next` is atomic
        self._sample: _Sample | None = None
        self.reason = reason
        self.stats = LadderStats()

    @property
    def name(self) -> str:
        """The backend in use."""
        return self._steps[0].name

    @property
    def is_sparing(self) -> bool:
        """Whether the backend in use takes an allowance."""
        return self._steps[0] is self._sparing

    def encode(self, text: str, allowance: Allowance | None = None) -> "array[int]":
        """See `SparingBackend`; raises `EncodeError` when the reference can't encode it."""
        backend = self._steps[0]
        if backend is self._reference:
            return backend.encode(text)
        try:
            ids = self._encoded(backend, text, allowance)
        except EncodeError as error:
            self.stats.failed += 1
            if error.panicked and backend is self._steps[0]:
                self._steps = self._steps[1:]
                self._say(str(error))
            return self._reference.encode(text)
        if self._check_every and next(self._turn) % self._check_every == 0:
            self._sample = _Sample(text, ids, backend)
        return ids

    def _encoded(self, backend: Backend, text: str, allowance: Allowance | None) -> "array[int]":
        if allowance is None:
            return backend.encode(text)
        if backend is not self._sparing:
            raise TooMuchError
        return self._sparing.encode(text, allowance)

    @property
    def has_sample(self) -> bool:
        """Whether `check_sample` has something to do."""
        return self._sample is not None

    def check_sample(self) -> None:
        """Encode the sample by the reference and compare: CPU work, at leisure."""
        sample, self._sample = self._sample, None
        if sample is None:
            return
        expected = _encoded(self._reference, sample.text)
        if expected is None:
            return
        self.stats.checked += 1
        if sample.ids != expected:
            self.stats.mismatched += 1
            if sample.by is self._steps[0]:  # else it has been put aside meanwhile
                self._step_down(sample.text, expected)

    def _step_down(self, text: str, expected: "array[int]") -> None:
        """Take the next backend that is right about this text."""
        wrong = self._steps[0]
        found = parity.shown(text, expected, _encoded(wrong, text) or array("I"))
        rest = self._steps[1:]
        while rest[0] is not self._reference and _encoded(rest[0], text) != expected:
            rest = rest[1:]
        self._steps = rest
        self._say(f"{wrong.name} gave other ids for a prompt: {found}")

    def _say(self, reason: str) -> None:
        self.reason = reason
        _LOG.error("tokenizer: %s is used from now on: %s", self.name, reason)


def _encoded(backend: Backend, text: str) -> "array[int] | None":
    try:
        return backend.encode(text)
    except EncodeError:
        return None
