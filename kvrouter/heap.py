"""The garbage collector and the index: millions of objects that never are garbage.

The index makes no cycles, but a full collection looks at all of its entries, and the loop stands
still meanwhile (some 80 ms at two million). So what has lived through a warm-up is frozen, which
takes it out of the collector's sight, and again whenever the index has grown by so much that a look
at what is new takes 2 ms: a snapshot that is loaded brings millions of entries within seconds.
Garbage in cycles that is frozen along is never freed: little, as a collection of what is young
comes before.
"""

import gc

THRESHOLDS = (50_000, 20, 100)
"""Objects to a young collection, young ones to a middle one, middle ones to a full one."""

GROWTH_BLOCKS = 100_000


class Heap:
    """Freezes what has come to stay."""

    def __init__(self) -> None:
        self._frozen_blocks = 0

    def start(self) -> None:
        """Everything that a router is made of is there."""
        gc.set_threshold(*THRESHOLDS)
        gc.collect()
        gc.freeze()

    def tick(self, blocks: int) -> None:
        """The index has so many blocks now."""
        self._frozen_blocks = min(self._frozen_blocks, blocks)
        if blocks >= self._frozen_blocks + GROWTH_BLOCKS:
            self._frozen_blocks = blocks
            gc.collect(0)
            gc.freeze()
