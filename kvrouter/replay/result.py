"""What a replay found, as figures."""

from collections.abc import Sequence
from statistics import fmean

import msgspec


class Spread(msgspec.Struct, frozen=True):
    """A distribution in three figures, in milliseconds."""

    mean: float
    p50: float
    p99: float


class Result(msgspec.Struct, frozen=True, kw_only=True):
    """One trace under one policy.

    `reuse`: the share of prompt tokens that engines found in their caches. `best_holder_reuse`: the
    share that the best holder known at each decision had. `pooled_bound`: what one cache of the
    fleet's total size would reuse. `ttft_ms` is from arrival to the first token, `e2e_ms` to the
    last one, `itl_ms` the mean time between a request's tokens, for those with more than one.
    `span_s`: from the first arrival to the last token. `shares`: the requests of each worker.
    `decisions_per_s`: by the CPU time that they took here, the one figure that differs between
    runs.
    """

    policy: str
    workers: int
    requests: int
    reuse: float
    best_holder_reuse: float
    pooled_bound: float | None
    ttft_ms: Spread
    itl_ms: Spread
    e2e_ms: Spread
    span_s: float
    shares: list[int]
    preempted: int
    routers: int
    decisions_per_s: float


def spread(values_s: Sequence[float]) -> Spread:
    """Three figures for these durations in seconds; zeros if there are none."""
    if not values_s:
        return Spread(0.0, 0.0, 0.0)
    ordered = sorted(values_s)
    return Spread(
        *(round(1000 * each, 3) for each in (fmean(ordered), at(ordered, 0.5), at(ordered, 0.99)))
    )


def at(ordered: Sequence[float], share: float) -> float:
    """The value at this share of the way through sorted values, between two if need be."""
    position = share * (len(ordered) - 1)
    below = int(position)
    above = min(below + 1, len(ordered) - 1)
    return ordered[below] + (position - below) * (ordered[above] - ordered[below])
