"""The table that `index.py` fills: each row's figures, and what is steady among its pieces."""

import statistics
import sys
import time
from collections.abc import Callable, Sequence
from itertools import accumulate
from typing import Any

from steady import Piece, undisturbed, warm_up

RATE = "M blocks/s"
IN_A_SECOND = {"s": 1.0, "ms": 1e3, "us": 1e6, "ns": 1e9}
SIDES = ("ours", "dynamo", "dynamo_payload")
WARM_UP_S = 2.0
ENOUGH = 40
MORE_S = 2.0

Figures = dict[str, Any]
Sample = list[Piece]
Side = Callable[[], Sample]


def figure(unit: str, sample: Sample) -> float:
    """Millions of blocks a second, or the time of a call."""
    amount = sum(piece.amount for piece in sample)
    took_s = sum(piece.took_s for piece in sample)
    return amount / took_s / 1e6 if unit == RATE else took_s / amount * IN_A_SECOND[unit]


def figures(unit: str, samples: Sequence[Sample]) -> list[float]:
    """The figure of each sample."""
    return [figure(unit, sample) for sample in samples]


def together(samples: Sequence[Sample]) -> Sample:
    """The pieces of all."""
    return [piece for sample in samples for piece in sample]


def median_of_calls(unit: str, sample: Sample) -> float:
    """The median time of a call, each taken for the mean of its piece."""
    ordered = sorted(sample, key=lambda piece: piece.took_s / piece.amount)
    sums = accumulate(piece.amount for piece in ordered)
    half = sum(piece.amount for piece in ordered) / 2
    middle = next(piece for piece, so_far in zip(ordered, sums, strict=True) if so_far >= half)
    return figure(unit, [middle])


class Table:
    """Rows by name; the least probe of all pieces says which of them nobody disturbed."""

    def __init__(self) -> None:
        self._rows: dict[str, tuple[Figures, list[Sample]]] = {}
        self._row = ""  # the last one that is not indented
        self._least_us = warm_up(WARM_UP_S)

    def row(
        self,
        name: str,
        unit: str,
        goal: str,
        values: Sequence[Sequence[float]],
        pieces: Sequence[Sample] = (),
        *,
        longest: bool = False,
    ) -> None:
        """Keep one row: ours, and the rival's where there is one; `pieces` of as many as have any.

        An indented name belongs to the row above it, and is kept under both.
        """
        row: Figures = {"unit": unit, "goal": goal, "longest": longest}
        for who, each in zip(SIDES, values, strict=False):
            row |= {who: statistics.median(each), f"{who}_best": _best(each, unit)}
        if "dynamo" in row:
            row["ratio"] = row["ours"] / row["dynamo"]
        if "dynamo_payload" in row:
            row["payload_ratio"] = row["ours"] / row["dynamo_payload"]
        if not name.startswith(" "):
            self._row = name
        self._look_at(*pieces)
        key = name if name == self._row else f"{self._row}: {name.strip()}"
        self._rows[key] = row, list(pieces)
        print(_line(name, self._with_steady(row, pieces)), file=sys.stderr, flush=True)

    def with_more(self, samples: Sequence[Sample], ours: Side) -> Sample:
        """The pieces of all samples, and of more until enough of them are undisturbed."""
        pieces = together(samples)
        self._look_at(pieces)
        end = time.monotonic() + MORE_S
        while len(self._undisturbed(pieces)) < ENOUGH and time.monotonic() < end:
            more = ours()
            self._look_at(more)
            pieces += more
        return pieces

    def figures(self) -> dict[str, Figures]:
        """All rows, by the least probe of the whole run."""
        return {name: self._with_steady(*row) for name, row in self._rows.items()}

    def probes_us(self) -> dict[str, float]:
        """The least of all, and the median beside the pieces: what the machine was like."""
        seen = [piece.probe_us for _, rows in self._rows.values() for row in rows for piece in row]
        median_us = statistics.median(seen or [self._least_us])
        return {"least": round(self._least_us, 1), "median": round(median_us, 1)}

    def _look_at(self, *samples: Sample) -> None:
        probes_us = [piece.probe_us for piece in together(samples)]
        self._least_us = min([self._least_us, *probes_us])

    def _undisturbed(self, pieces: Sample) -> Sample:
        return undisturbed(pieces, [piece.probe_us for piece in pieces], self._least_us)

    def _with_steady(self, row: Figures, pieces: Sequence[Sample]) -> Figures:
        row = dict(row)
        longest = row.pop("longest")
        for who, each in zip(SIDES, pieces, strict=False):
            prefix = "" if who == "ours" else f"{who}_"
            kept = self._undisturbed(each)
            row |= {
                f"{prefix}steady": _steady(row["unit"], kept, longest=longest),
                f"{prefix}steady_share": round(len(kept) / len(each), 3),
                f"{prefix}pieces": len(each),
            }
        return row


def _steady(unit: str, kept: Sample, *, longest: bool) -> float | None:
    if not kept:
        return None
    if longest:
        return max(figure(unit, [piece]) for piece in kept)
    return figure(unit, kept) if unit == RATE else median_of_calls(unit, kept)


def _best(values: Sequence[float], unit: str) -> float:
    return max(values) if unit.endswith("/s") else min(values)


def _line(name: str, row: Figures) -> str:
    parts = [f"{name:58}", f"{row['ours']:9.2f} (best {row['ours_best']:8.2f}) {row['unit']:10}"]
    parts.append(f"{_steady_text(row, ''):30}")
    if "dynamo" in row:
        parts.append(f"dynamo {row['dynamo']:9.2f}, ours/dynamo {row['ratio']:5.2f}")
    if "dynamo_steady" in row:
        parts.append(f"its {_steady_text(row, 'dynamo_')}")
    if "dynamo_payload" in row:
        parts.append(f"from payloads {row['dynamo_payload']:5.2f}, {row['payload_ratio']:5.2f}")
    parts.append(f"goal {row['goal']}")
    return "  ".join(parts)


def _steady_text(row: Figures, prefix: str) -> str:
    """The steady figure, and how many of how many pieces it is of."""
    if f"{prefix}steady" not in row:
        return ""
    value, share, pieces = (row[prefix + key] for key in ("steady", "steady_share", "pieces"))
    text = "none" if value is None else f"{value:.2f}"
    return f"steady {text:>8} ({share:.0%} of {pieces})"
