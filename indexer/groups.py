"""How far a prefix is usable where a model has more than one cache group.

Layers with full attention need every block of the prefix. Layers with a sliding window need only
the blocks that their window reaches back to from the end of the prefix, and an engine keeps no
more than those. So the usable length is the largest one whose end has a whole window behind it in
every such group.
"""

from collections.abc import Callable, Sequence
from typing import NamedTuple


class Window(NamedTuple):
    """One group's demand: the last `blocks` blocks of the prefix (None: all of them).

    `first_missing` gives the first position that the group lacks, of those from one to before
    another; None if it has them all. One call for a whole window: most are there.
    """

    blocks: int | None
    first_missing: Callable[[int, int], int | None]


def window_blocks(window_tokens: int, block_size: int) -> int:
    """The blocks that a window reaches back to from a block's boundary.

    The next token looks at itself and at `window_tokens - 1` tokens before it.
    """
    return -(-(window_tokens - 1) // block_size)


def usable_blocks(leading: int, windows: Sequence[Window]) -> int:
    """The largest length up to `leading` whose windows are all held (fewer near the start).

    A missing block rules out every length whose window reaches it, and those are all lengths from
    the one at hand down to that block's own position; so each step goes straight there.
    """
    length = leading
    while (missing := _first_missing(length, windows)) is not None:
        length = missing
    return length


def _first_missing(length: int, windows: Sequence[Window]) -> int | None:
    for window in windows:
        start = 0 if window.blocks is None else max(0, length - window.blocks)
        missing = window.first_missing(start, length)
        if missing is not None:
            return missing
    return None
