"""How long a step of the simulated engine takes."""

from dataclasses import dataclass
from typing import NamedTuple, Protocol

_LEAST_MS, _MOST_MS = 1e-6, 3_600_000.0
"""What a step can take."""


class StepLoad(NamedTuple):
    """What one step computes.

    `prefill_tokens` are prompt tokens that no cache held (recomputed ones after a preemption
    included), `decode_sequences` the sequences that get one more token, `context_tokens` the
    lengths of those sequences summed, `capacity_tokens` what the whole cache can hold.
    """

    prefill_tokens: int
    decode_sequences: int
    context_tokens: int
    capacity_tokens: int


class TimingModel(Protocol):
    """The speed of an engine."""

    def step_s(self, load: StepLoad) -> float:
        """Return how many seconds a step with this load takes."""
        ...


@dataclass(frozen=True, kw_only=True)
class LinearTiming:
    """A fixed cost for each step, one for each prefill token and one for each decoding sequence.

    The defaults are those of a mid-size model on one fast GPU: 10,000 prefill tokens a second and
    5 ms between output tokens while few sequences run.
    """

    base_s: float = 0.005
    prefill_token_s: float = 0.0001
    decode_sequence_s: float = 0.00005

    def step_s(self, load: StepLoad) -> float:
        """Return the sum of the three costs, in seconds."""
        prefill_s = self.prefill_token_s * load.prefill_tokens
        return self.base_s + prefill_s + self.decode_sequence_s * load.decode_sequences


@dataclass(frozen=True, kw_only=True)
class PolynomialTiming:
    """Second-degree polynomials in the prefill tokens and in the share of the cache being decoded.

    Each has its coefficients in milliseconds, constant first. The prefill part counts if anything
    is prefilled, the decode part if anything decodes. The defaults are those of Dynamo's mock
    engine, so that replays can be compared.
    """

    prefill_ms: tuple[float, float, float] = (16.50142, 0.01518344, 4.209989e-7)
    decode_ms: tuple[float, float, float] = (5.74, 54.01, -25.74)

    def check(self, most_prefill_tokens: int) -> None:
        """Raise ValueError if a step with up to so many prefill tokens takes no time, or too much.

        That is less than a nanosecond, or more than an hour.
        """
        _require_time("prefill", self.prefill_ms, 1, most_prefill_tokens)
        _require_time("decode", self.decode_ms, 0, 1)

    def step_s(self, load: StepLoad) -> float:
        """Return both parts' sum, in seconds."""
        total_ms = 0.0
        if load.prefill_tokens:
            total_ms += _polynomial(self.prefill_ms, load.prefill_tokens)
        if load.decode_sequences:
            total_ms += _polynomial(self.decode_ms, load.context_tokens / load.capacity_tokens)
        return total_ms / 1000


def _polynomial(coefficients: tuple[float, float, float], x: float) -> float:
    constant, linear, square = coefficients
    return constant + x * (linear + x * square)


def _require_time(
    name: str, coefficients: tuple[float, float, float], least: float, most: float
) -> None:
    """Raise ValueError unless the polynomial is a time from `least` to `most`."""
    _, linear, square = coefficients
    ends = [least, most]
    if square:
        ends.append(min(max(least, -linear / (2 * square)), most))
    for x in ends:
        if not _LEAST_MS <= _polynomial(coefficients, x) <= _MOST_MS:
            raise ValueError(
                f"the time to {name} would be {_polynomial(coefficients, x):g} ms at {x:g}"
            )
