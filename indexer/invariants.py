"""What always holds between two batches, as code."""

from collections import Counter
from collections.abc import Iterable, Iterator

from events import Tier
from indexer.hashing import HASH_BYTES
from indexer.holdings import Holdings
from indexer.model import InvariantError
from indexer.run import Run
from indexer.tree import Node, Tree


def check_index(tree: Tree, ranks: Iterable[Holdings], plain: int) -> None:
    """Raise InvariantError unless tree, holdings and masks say the same."""
    nodes = list(_nodes(tree.root))
    _check_shape(tree, nodes)
    bits = 0
    for holdings in ranks:
        own = tree.holders[holdings.bit.bit_length() - 1]
        _require(own is holdings, f"{holdings.rank} has the bit of another")
        _require(bool(plain & holdings.bit) == holdings.is_plain, f"{holdings.rank} in the mask")
        bits |= holdings.bit
        there = {node for node in nodes if (node.full | node.some) & holdings.bit}
        _require(there == holdings.runs.keys(), f"{holdings.rank} is in other nodes than it says")
        _check_runs(holdings)
        _check_holdings(holdings)
    entered = sum(1 << at for at, holder in enumerate(tree.holders) if holder is not None)
    _require(entered == bits, "the tree has holders that are gone")
    for node in nodes:
        _require((node.full | node.some) & ~bits == 0, f"{node!r} has holders that are gone")
    _require(plain & ~bits == 0, "the mask of plain ranks has ranks that are gone")


def _nodes(root: Node) -> Iterator[Node]:
    waiting = list(root.children.values())
    while waiting:
        node = waiting.pop()
        yield node
        waiting += node.children.values()


def _check_shape(tree: Tree, nodes: list[Node]) -> None:
    _require(tree.is_settled, "the tree is not settled")
    root = tree.root
    _require(not (root.label or root.full or root.some), "the root has blocks")
    _require(tree.nodes == len(nodes), f"{tree.nodes} nodes counted, {len(nodes)} found")
    hashes = [node.hash_at(at) for node in nodes for at in range(node.blocks)]
    _require(tree.blocks == len(hashes), f"{tree.blocks} blocks counted, {len(hashes)} found")
    twice = [key.hex() for key, count in Counter(hashes).items() if count > 1]
    _require(not twice, f"blocks at two places: {twice[:3]}")
    for node in [tree.root, *nodes]:
        for key, child in node.children.items():
            _require(child.parent is node, f"{child!r} does not hang on its parent")
            _require(child.first == key, f"{child!r} hangs under a key that is not its first block")
    for node in nodes:
        _check_node(tree, node)


def _check_node(tree: Tree, node: Node) -> None:
    _require(0 < len(node.label) <= tree.label_bytes, f"{node!r} has a bad length")
    _require(len(node.label) % HASH_BYTES == 0, f"{node!r} has a part of a hash")
    above = node.above
    _require(node.start == above.start + above.blocks, f"{node!r} starts at {node.start}")
    partial = list(tree.holders_of(node.some))
    ranks = {holder.rank for holder in partial}
    _require(ranks == set(node.ends or ()), f"{node!r} has ends of others than its mask says")
    _require(node.full & node.some == 0, f"{node!r} has holders both in full and in part")
    _require(node.ends != {}, f"{node!r} has an empty map")
    if not node.children and not node.full:
        reach = max((holder.runs[node].end for holder in partial), default=0)
        _require(reach == node.start + node.blocks, f"nobody knows the end of {node!r}")


def _check_runs(holdings: Holdings) -> None:
    tails: dict[Run, Node] = {}
    for node, run in holdings.runs.items():
        _require(run.start <= node.start < run.end, f"a run does not reach {node!r}")
        leading = min(run.leading(node.start - run.start), node.blocks)
        end = node.start + leading
        counted = _end(node, holdings)
        _require(counted == end, f"{node!r} ends at {counted} for {holdings.rank}, should at {end}")
        if run not in tails or tails[run].start < node.start:
            tails[run] = node
    for run, tail in tails.items():
        _require(run.node is tail, f"a run in {tail!r} says it ends in {run.node!r}")
        _require(run.end <= tail.start + tail.blocks, f"a run is longer than {tail!r}")
        last = len(run.names) // HASH_BYTES - 1
        _require(run.is_known(last), f"a run in {tail!r} ends in a block that is gone")
        _require(run.missing & run.lower == 0, f"a run in {tail!r} has what is missing")
        node = tail
        while node.start > run.start:
            node = node.above
            _require(holdings.runs.get(node) is run, f"a run skips {node!r}")


def _end(node: Node, holdings: Holdings) -> int:
    """The depth behind the leading blocks that a node says its holder has."""
    if node.full & holdings.bit:
        return node.start + node.blocks
    return (node.ends or {})[holdings.rank].gpu


def _check_holdings(holdings: Holdings) -> None:
    rank = holdings.rank
    runs = list(dict.fromkeys(holdings.runs.values()))
    known = {name: run for run in runs for name in run.known_names()}
    _require(known == holdings.where, f"{rank} has other names in the tree than in its own map")
    count = sum(len(list(run.known_names())) for run in runs)
    _require(count == len(known), f"{rank} has a name at two places")
    aliases = {other: main for main, others in holdings.aliases.items() for other in others}
    _require(aliases == holdings.main_of, f"{rank} has aliases that don't fit")
    _require(aliases.keys().isdisjoint(known), f"{rank} has a name that is its own alias")
    _require(known.keys() >= set(aliases.values()), f"{rank} has aliases of unknown names")
    _require(all(holdings.aliases.values()), f"{rank} has empty lists of aliases")
    _check_counts(holdings)
    for name, run in known.items():
        on_gpu = any(holdings.gpu_count(other) for other in holdings.names_of(name))
        shown = not run.lower >> run.position(name) & 1
        _require(shown == on_gpu, f"{rank} block {name}: GPU bit {shown}, copies {on_gpu}")


def _check_counts(holdings: Holdings) -> None:
    rank = holdings.rank
    names = [*holdings.where, *holdings.main_of]
    for name, count in holdings.copies.items():
        _require(holdings.knows(name), f"{rank} counts copies of unknown block {name}")
        lower = any(name in counts for counts in holdings.lower.values())
        _require(count > 1 or (count == 0 and lower), f"{rank} block {name} has {count} copies")
    for tier, counts in holdings.lower.items():
        _require(bool(counts), f"{rank} has an empty map for {tier}")
        for name, count in counts.items():
            _require(count > 0 and holdings.knows(name), f"{rank} block {name} on {tier}: {count}")
    beside = [group.counts.get(Tier.GPU, {}) for group in holdings.groups.values()]
    total = sum(map(holdings.gpu_count, names)) + sum(sum(counts.values()) for counts in beside)
    _require(total == holdings.gpu_copies, f"{rank}: {holdings.gpu_copies} copies, found {total}")


def _require(holds: bool, story: str) -> None:
    if not holds:
        raise InvariantError(story)
