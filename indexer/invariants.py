"""What always holds between two batches, as code."""

from collections import Counter
from collections.abc import Iterator, Mapping

from events import Tier
from indexer.hashing import HASH_BYTES
from indexer.holdings import Holdings
from indexer.model import InvariantError
from indexer.tree import Node, Run, Tree, leading_ones


def check_index(tree: Tree, by_bit: Mapping[int, Holdings], plain: int) -> None:
    """Raise InvariantError unless tree, holdings and masks say the same."""
    nodes = list(_nodes(tree.root))
    _check_shape(tree, nodes)
    for node in nodes:
        for holder in node.runs:
            _require(
                by_bit.get(holder.bit) is holder, f"{node!r} has a run of a holder that is gone"
            )
    for bit, holdings in by_bit.items():
        _require(holdings.bit == bit, f"{holdings.rank} has bit {holdings.bit}, not {bit}")
        _require(bool(plain & bit) == holdings.is_plain, f"{holdings.rank} is wrong in the mask")
        runs = [node.runs[holdings] for node in nodes if holdings in node.runs]
        _check_holdings(holdings, runs)
    _require(plain & ~sum(by_bit) == 0, "the mask of plain ranks has ranks that are gone")


def _nodes(root: Node) -> Iterator[Node]:
    waiting = list(root.children.values())
    while waiting:
        node = waiting.pop()
        yield node
        waiting += node.children.values()


def _check_shape(tree: Tree, nodes: list[Node]) -> None:
    _require(not tree.touched, f"{len(tree.touched)} nodes are not settled")
    _require(not tree.root.label and not tree.root.runs, "the root has blocks")
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
        _check_node(node, tree.label_blocks)


def _check_node(node: Node, label_blocks: int) -> None:
    _require(0 < node.blocks <= label_blocks, f"{node!r} has a bad length")
    _require(len(node.label) % HASH_BYTES == 0, f"{node!r} has a part of a hash")
    reach = max((run.known.bit_length() for run in node.runs.values()), default=0)
    _require(bool(node.children) or reach == node.blocks, f"nobody knows the end of {node!r}")
    full = some = 0
    for holder, run in node.runs.items():
        _check_run(node, run)
        leading = leading_ones(run.gpu)
        full |= holder.bit if leading == node.blocks else 0
        some |= holder.bit if 0 < leading < node.blocks else 0
    _require(node.full == full, f"{node!r} has mask full {node.full:b}, should be {full:b}")
    _require(node.some == some, f"{node!r} has mask some {node.some:b}, should be {some:b}")


def _check_run(node: Node, run: Run) -> None:
    _require(run.node is node, f"a run in {node!r} says it is in {run.node!r}")
    _require(run.known > 0, f"an empty run in {node!r}")
    _require(run.known.bit_length() <= node.blocks, f"a run is longer than {node!r}")
    _require(run.gpu & ~run.known == 0, f"a run in {node!r} has blocks on the GPU it doesn't know")
    _require(
        len(run.names) == run.known.bit_length() * HASH_BYTES,
        f"a run in {node!r} has {len(run.names)} bytes of names for {run.known:b}",
    )


def _check_holdings(holdings: Holdings, runs: list[Run]) -> None:
    rank = holdings.rank
    known = {name: run for run in runs for name in run.known_names()}
    _require(known == holdings.where, f"{rank} has other names in the tree than in its own map")
    count = sum(run.known.bit_count() for run in runs)
    _require(count == len(known), f"{rank} has a name at two places")
    aliases = {other: main for main, others in holdings.aliases.items() for other in others}
    _require(aliases == holdings.main_of, f"{rank} has aliases that don't fit")
    _require(aliases.keys().isdisjoint(known), f"{rank} has a name that is its own alias")
    _require(known.keys() >= set(aliases.values()), f"{rank} has aliases of unknown names")
    _require(all(holdings.aliases.values()), f"{rank} has empty lists of aliases")
    _check_counts(holdings)
    for name, run in known.items():
        on_gpu = any(holdings.gpu_count(other) for other in holdings.names_of(name))
        shown = bool(run.gpu >> run.position(name) & 1)
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
