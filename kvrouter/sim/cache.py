"""The paged prefix cache of the simulated engine.

A block is a number. It is in use (references > 0) or free, and named (its content can be hit) or
not. Free blocks stand in one line: the next block to be taken is at its head. A freed block goes
to the tail if it is named and to the head if it isn't, so blocks without a use for anybody are
taken first, and then named ones by the time they were freed. A named block that is taken loses its
name: that is an eviction. Several blocks can have one name (a recomputed prompt end, two sequences
that decode the same tokens); a hit takes the oldest copy.

Source of truth: `_references` and `_names` by block. `_free` and `_copies` are derived from them
(plus the order); `check()` says how.
"""

from collections import OrderedDict
from collections.abc import Iterable, Sequence


class PrefixCache:
    """The blocks of one engine rank."""

    def __init__(self, num_blocks: int) -> None:
        self.usable = num_blocks - 1  # like vLLM's, block 0 stays out of the game
        self._references = [0] * num_blocks
        self._names: list[int | None] = [None] * num_blocks
        self._free: OrderedDict[int, None] = OrderedDict.fromkeys(range(1, num_blocks))
        self._copies: dict[int, list[int]] = {}

    @property
    def free(self) -> int:
        """Blocks that can be taken."""
        return len(self._free)

    @property
    def in_use(self) -> int:
        """Blocks that sequences hold."""
        return self.usable - len(self._free)

    def leading(self, names: Iterable[int]) -> list[int]:
        """Return the blocks that hold the longest cached beginning of `names`."""
        blocks: list[int] = []
        copies = self._copies
        for name in names:
            found = copies.get(name)
            if found is None:
                break
            blocks.append(found[0])
        return blocks

    def idle(self, blocks: Iterable[int]) -> int:
        """Count those of `blocks` that stand in the free line."""
        return sum(1 for block in blocks if not self._references[block])

    def hold(self, blocks: Iterable[int]) -> None:
        """Add a reference to each of these hit blocks."""
        for block in blocks:
            if not self._references[block]:
                del self._free[block]
            self._references[block] += 1

    def take(self, count: int) -> tuple[list[int], list[int]]:
        """Take blocks for new tokens; return them and the names that were evicted for them.

        At most `free` blocks can be taken.
        """
        taken: list[int] = []
        evicted: list[int] = []
        for _ in range(count):
            block, _ = self._free.popitem(last=False)
            self._references[block] = 1
            name = self._names[block]
            if name is not None:
                self._forget(block, name)
                evicted.append(name)
            taken.append(block)
        return taken, evicted

    def name(self, block: int, name: int) -> None:
        """From now on this full block, which is in use, can be hit under `name`."""
        self._names[block] = name
        self._copies.setdefault(name, []).append(block)

    def release(self, blocks: Sequence[int]) -> None:
        """Drop a sequence's references, its tail first, so that its head is evicted last."""
        unnamed: list[int] = []
        for block in reversed(blocks):
            self._references[block] -= 1
            if self._references[block]:
                continue
            if self._names[block] is None:
                unnamed.append(block)
            else:
                self._free[block] = None
        for block in reversed(unnamed):
            self._free[block] = None
            self._free.move_to_end(block, last=False)

    def clear(self) -> bool:
        """Take all names away, unless a block is in use: then nothing happens, and False."""
        if self.in_use:
            return False
        self._names = [None] * len(self._names)
        self._copies.clear()
        return True

    def check(self) -> None:
        """Raise AssertionError where the derived views depart from the source of truth."""
        free = {block for block in range(1, self.usable + 1) if not self._references[block]}
        if free != set(self._free):
            raise AssertionError(f"free line {sorted(self._free)} is not {sorted(free)}")
        named = {(name, block) for block, name in enumerate(self._names) if name is not None}
        copies = [(name, block) for name, blocks in self._copies.items() for block in blocks]
        if named != set(copies) or len(named) != len(copies):
            raise AssertionError("copies by name are not the blocks' names")
        if self._references[0] or self._names[0] is not None:
            raise AssertionError("block 0 is in use")

    def _forget(self, block: int, name: int) -> None:
        self._names[block] = None
        copies = self._copies[name]
        copies.remove(block)
        if not copies:
            del self._copies[name]

    def __repr__(self) -> str:
        return f"<PrefixCache {self.in_use}/{self.usable} blocks in use, {len(self._copies)} names>"
