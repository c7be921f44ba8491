"""Results as a table for people."""

from collections.abc import Sequence

from kvrouter.replay.result import Result

_HEAD = (
    f"{'policy':<28} {'reuse':>7} {'TTFT ms: mean':>14} {'p50':>7} {'p99':>8} {'ITL ms':>7} "
    f"{'e2e ms':>8} {'requests per worker':>20}\n"
)


def table(title: str, results: Sequence[Result]) -> str:
    """The results, one a line, under a line that says what they are of."""
    first = results[0]
    bound = "" if first.pooled_bound is None else f", one big cache: {first.pooled_bound:.1%}"
    about = f"{title}: {first.requests} requests, {first.workers} workers{bound}\n\n"
    return about + _HEAD + "".join(map(_line, results))


def _line(result: Result) -> str:
    ttft = result.ttft_ms
    shares = f"{min(result.shares)} to {max(result.shares)}"
    return (
        f"{result.policy:<28} {result.reuse:>7.1%} {ttft.mean:>14.1f} {ttft.p50:>7.0f} "
        f"{ttft.p99:>8.0f} {result.itl_ms.mean:>7.2f} {result.e2e_ms.mean:>8.0f} {shares:>20}\n"
    )
