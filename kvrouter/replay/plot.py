"""A picture of several results side by side. Needs matplotlib: `pip install kvrouter[plot]`."""

from collections.abc import Callable, Sequence
from pathlib import Path

from kvrouter.replay.result import Result

_PANELS: tuple[tuple[str, Callable[[Result], float]], ...] = (
    ("reuse, % of prompt tokens", lambda result: 100 * result.reuse),
    ("TTFT mean, ms", lambda result: result.ttft_ms.mean),
    ("TTFT p99, ms", lambda result: result.ttft_ms.p99),
    ("end to end, mean, ms", lambda result: result.e2e_ms.mean),
)


def plot(results: Sequence[Result], title: str, path: Path) -> None:
    """Write the picture; its form goes by the name (`.png`, `.svg`).

    Raises ImportError without matplotlib, OSError and ValueError if it cannot be written so.
    """
    from matplotlib.figure import Figure  # noqa: PLC0415  # an extra

    figure = Figure(figsize=(3.2 * len(_PANELS), 1.2 + 0.4 * len(results)), layout="constrained")
    figure.suptitle(title)
    names = [result.policy for result in results]
    for axes, (label, value) in zip(figure.subplots(1, len(_PANELS)), _PANELS, strict=True):
        bars = axes.barh(names, [value(result) for result in results])
        axes.bar_label(bars, fmt="%.4g", padding=3)
        axes.margins(x=0.25)
        axes.invert_yaxis()
        axes.set_title(label, fontsize="medium")
        axes.tick_params(labelleft=axes.get_subplotspec().is_first_col())
    figure.savefig(path)
