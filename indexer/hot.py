"""The prefixes that most ranks share, for people who look at a running router."""

import heapq
from itertools import count
from typing import NamedTuple

from events import WorkerRank
from indexer.tree import Node, Tree


class HotPrefix(NamedTuple):
    """A prefix of `blocks` blocks, known by its last hash, and the ranks that hold it."""

    last_hash: bytes
    blocks: int
    ranks: tuple[WorkerRank, ...]


class _Share(NamedTuple):
    """A prefix that ends in some node: the mask of the ranks that hold all of it, its length."""

    mask: int
    blocks: int


def hot_prefixes(tree: Tree, most: int) -> list[HotPrefix]:
    """Up to `most` prefixes that two ranks or more hold, those of most ranks first.

    A prefix that goes on with the same ranks is not given, but what it goes on to: of one chain
    the longest. Costs a look at each first node of the tree (a tenth of a microsecond) and at
    what is behind the prefixes that are given.
    """
    found: list[HotPrefix] = []
    order = count()
    waiting: list[tuple[int, int, int, Node, list[_Share]]] = []
    behind = [
        (node, _shares(tree, node, -1))
        for node in tree.root.children.values()
        if (held := node.full | node.some) & (held - 1)  # a call only where two have something
    ]
    while len(found) < most:
        for node, shares in behind:
            if shares:
                ranks, blocks = shares[-1].mask.bit_count(), shares[-1].blocks
                heapq.heappush(waiting, (-ranks, -blocks, next(order), node, shares))
        if not waiting:
            break
        *_, node, shares = heapq.heappop(waiting)
        mask, blocks = shares.pop()
        if shares:
            behind = [(node, shares)]
        else:
            alive = mask & node.full
            behind = [(child, _shares(tree, child, alive)) for child in node.children.values()]
        if all(not others or others[-1].mask != mask for _, others in behind):
            holders = tuple(holder.rank for holder in tree.holders_of(mask))
            found.append(HotPrefix(node.hash_at(blocks - node.start - 1), blocks, holders))
    return found


def _shares(tree: Tree, node: Node, alive: int) -> list[_Share]:
    """The prefixes that end in a node and that two ranks or more hold, the longest first.

    `alive` is the mask of the ranks that have all that is before the node.
    """
    mask = node.full & alive
    shares = [_Share(mask, node.start + node.blocks)]
    if node.some & alive and node.ends:
        holders = tree.holders_of(node.some & alive)
        ends = [(node.ends[holder.rank].gpu, holder.bit) for holder in holders]
        for end, bit in sorted(ends, reverse=True):
            if end > node.start:
                mask |= bit
                if shares[-1].blocks == end:
                    shares.pop()
                shares.append(_Share(mask, end))
    return [share for share in shares if share.mask & (share.mask - 1)]
