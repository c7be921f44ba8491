"""What the processor does when nobody else wants it, told apart by a fixed loop beside the work.

A virtual machine shares its cores with others, and is slower by a factor while they are busy: the
loop then takes 1.35 to 2.1 times its least, else up to 1.3 times, hardly ever anything in between.
So it runs before and after each piece of work, and the pieces beside which it took no longer than
`STEADY` times its least are told apart, with their share. It runs twice, and the second time
counts: the work before it has put it out of the caches, which alone costs it a quarter.

The least is that of the slower one of two probes in a row, or around a piece: one probe in
millions takes nothing at all, by the clock of a virtual machine. Else there are no freaks: of a
million loops the least is 2 to 4 % below the fastest hundredth. A low percentile would be one of
the slow ones where hardly any are fast. What the loop does not see is a neighbour who comes and
goes in between, so pieces are short: those of a millisecond that were kept took 2 % longer than
those of 50 us. Nor does it see one who takes caches and memory but no cycles, for it hardly needs
them.
"""

import gc
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from typing import NamedTuple, TypeVar

STEADY = 1.3
STEPS = tuple(range(400))
SEEN = dict.fromkeys(range(64), 0)
PIECE_S = 1e-3
GROWTH = 8

T = TypeVar("T")
Clock = Callable[[], float]


def probe_us() -> float:
    """Thread time of the fixed loop, some 15 us of bytecodes, once the caches know it again."""
    _loop()
    started = time.thread_time()
    _loop()
    return (time.thread_time() - started) * 1e6


def _loop() -> None:
    """Takes no memory: how long that takes depends on what the work has left of it."""
    seen = SEEN
    for step in STEPS:
        seen[step & 63] = step


def undisturbed(what: Iterable[T], probes_us: Iterable[float], least_us: float) -> list[T]:
    """Those beside which nobody disturbed the processor."""
    most_us = STEADY * least_us
    return [each for each, probe in zip(what, probes_us, strict=True) if probe <= most_us]


class Piece(NamedTuple):
    """Some calls or blocks, the CPU time of all, and the slower one of the probes around them."""

    amount: float
    took_s: float
    probe_us: float


def probed(amount: float, work: Callable[[], object], clock: Clock = time.process_time) -> Piece:
    """Work that is not cut."""
    before_us = probe_us()
    started = clock()
    work()
    took_s = clock() - started
    return Piece(amount, took_s, max(before_us, probe_us()))


def in_pieces(
    work: Callable[[Sequence[T]], object], items: Sequence[T], each: float
) -> list[Piece]:
    """Work on items in a row, a millisecond of them a piece; nothing is collected meanwhile.

    An item is so many calls or blocks. How many make a piece is learned on the way.
    """
    gc.collect()
    gc.disable()
    try:
        return list(_pieces(work, items, each))
    finally:
        gc.enable()


def _pieces(
    work: Callable[[Sequence[T]], object], items: Sequence[T], each: float
) -> Iterator[Piece]:
    at, count = 0, 1
    while part := items[at : at + count]:
        done = probed(len(part) * each, partial(work, part))
        yield done
        at += len(part)
        count = max(1, min(GROWTH * count, int(count * PIECE_S / max(done.took_s, 1e-9))))


def warm_up(seconds: float) -> float:
    """The least that the probe took around nothing, in so much time."""
    end = time.monotonic() + seconds
    least_us = float("inf")
    while time.monotonic() < end:
        least_us = min(least_us, max(probe_us(), probe_us()))
    return least_us
