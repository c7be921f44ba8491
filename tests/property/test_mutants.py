"""A test of the tests: the comparison with the oracle has to notice each of these bugs.

Each mutant is one function with one change in its text, put in its place for one comparison.
"""

import inspect
import textwrap
from collections.abc import Callable
from struct import error as StructError  # noqa: N812  it is a class
from types import ModuleType
from typing import NamedTuple

import pytest
from support.index_comparison import compare

from indexer import holdings, lookup, origin, radix, run, tree


class Mutant(NamedTuple):
    """`old` stands exactly once in the function and becomes `new`."""

    owner: type | ModuleType
    function: str
    old: str
    new: str


MUTANTS = {
    "who has a part of a node has all of it": Mutant(
        tree.Node, "show", "leading >= self.blocks", "leading"
    ),
    "a cut leaves runs of the upper part in the lower one": Mutant(
        tree.Tree, "_cut", "run.node = upper", "pass"
    ),
    "a leaf grows for holders that do not have what is new": Mutant(
        tree.Tree, "_grow", "leaf.show(holder, holder.runs[leaf])", "pass"
    ),
    "nodes are joined whoever holds them": Mutant(
        tree.Tree, "_can_join", "node.full == child.full", "True"
    ),
    "a run that is gone from a node is still entered there": Mutant(
        tree.Tree, "_leave", "node.forget(holder)", "pass"
    ),
    "blocks on a lower tier count as on the GPU": Mutant(
        lookup._View, "__init__", "known & ~(run.lower >> at)", "known"
    ),
    "a removed middle block hides nothing": Mutant(
        run.Run, "erase", "self.missing |= 1 << position", "pass"
    ),
    "one removal takes all copies of an evicted tail": Mutant(
        holdings.Holdings, "_evict_tail", "not self.copies.keys().isdisjoint(gone)", "False"
    ),
    "an evicted tail is cut off whoever has a part of it": Mutant(
        tree.Tree, "cut_back", "and not node.some", ""
    ),
    "decoding lengthens a leaf that others have in full too": Mutant(
        holdings.Holdings, "lengthen", "node.full != self.bit", "not node.full & self.bit"
    ),
    "decoding goes on behind any block of a run": Mutant(
        holdings.Holdings,
        "lengthen",
        'or not held.endswith(parent.to_bytes(HASH_BYTES, "big"))',
        "",
    ),
    "decoding begins a leaf that is nobody's": Mutant(
        holdings.Holdings, "lengthen", "leaf.full = self.bit", "pass"
    ),
    "the heir of a place forgets the other names": Mutant(
        holdings.Holdings, "_inherit", "self.aliases[heir] = others", "pass"
    ),
    "a clear leaves the counts": Mutant(
        holdings.Holdings,
        "_forget_all",
        "self.copies: dict[int, int] = {}",
        "self.copies = getattr(self, 'copies', {})",
    ),
    "removals wait for the end of the batch": Mutant(
        radix.RadixIndex,
        "apply",
        "if evicted:\n            _evict(holdings, evicted, applied)\n            evicted = []",
        "if False: pass",
    ),
    "ranks that end within a node count as ended before it": Mutant(
        lookup, "gpu_overlaps", "ended &= ~node.some", "pass"
    ),
    "a prompt that ends within a node counts to the end of its holders": Mutant(
        lookup, "_ends", "end if end.gpu < most.gpu else most", "end"
    ),
    "who has ended before a node ends in it": Mutant(
        lookup, "_ends", "others := node.some & ~ended", "others := 0"
    ),
    "a salt does not matter": Mutant(origin, "origin", "salt=salt", "salt=None"),
}


def mutated(mutant: Mutant) -> Callable[..., object]:
    original = inspect.unwrap(getattr(mutant.owner, mutant.function))
    source = textwrap.dedent(inspect.getsource(original))
    assert source.count(mutant.old) == 1, "the mutant does not fit the function any more"
    names: dict[str, Callable[..., object]] = {}
    code = compile(source.replace(mutant.old, mutant.new), f"<{mutant.function}>", "exec")
    exec(code, original.__globals__, names)  # noqa: S102  our own source, changed in one place
    return names[mutant.function]


@pytest.mark.slow
@pytest.mark.parametrize("bug", MUTANTS)
def test_the_oracle_notices(bug: str, monkeypatch: pytest.MonkeyPatch) -> None:
    mutant = MUTANTS[bug]
    replacement = mutated(mutant)
    for module in [mutant.owner, radix, lookup]:
        if hasattr(module, mutant.function):
            monkeypatch.setattr(module, mutant.function, replacement)
    with pytest.raises((AssertionError, LookupError, StructError, ExceptionGroup)):
        compare(examples=3000, steps=15)
