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


def check_can_plot(path: Path) -> None:
    """Raise ImportError without matplotlib, ValueError if it has no such form of picture.

    For those who replay for minutes first.
    """
    from matplotlib.backends.backend_agg import FigureCanvasAgg  # noqa: PLC0415  # an extra

    forms = FigureCanvasAgg.get_supported_filetypes()
    if path.suffix.removeprefix(".") not in forms:
        raise ValueError(f"--plot {path}: the name must end with one of .{', .'.join(forms)}")
    if not path.parent.is_dir():
        raise ValueError(f"--plot {path}: there is no folder {path.parent}")


def plot(results: Sequence[Result], title: str, path: Path) -> None:
    """Write the picture; its form goes by the name (`.png`, `.svg`).

    Raises ImportError without matplotlib, OSError if it cannot be written.
    """
    from matplotlib.figure import Figure  # noqa: PLC0415  # an extra

    figure = Figure(figsize=(3.2 * len(_PANELS), 1.2 + 0.4 * len(results)), layout="constrained")
    figure.suptitle(title, parse_math=False)  # a file's name may have dollars
    names = [result.policy for result in results]
    for axes, (label, value) in zip(figure.subplots(1, len(_PANELS)), _PANELS, strict=True):
        bars = axes.barh(names, [value(result) for result in results])
        axes.bar_label(bars, fmt="%.4g", padding=3)
        axes.margins(x=0.25)
        axes.invert_yaxis()
        axes.set_title(label, fontsize="medium")
        axes.tick_params(labelleft=axes.get_subplotspec().is_first_col())
    figure.savefig(path)
