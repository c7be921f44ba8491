"""The index's table: matching, applying, removing, branching off, memory, pauses.

    python bench/micro/index.py [--rounds 9] [--seed 1] [--only match apply ...]

Where `ai-dynamo-runtime` is installed, its `RadixTree` does the same work in the same run, in
turns with ours: once from events as it wants them, with hashed tokens in JSON, and once from the
same payloads as ours. Times are CPU time of the process, all threads; each figure is the median and
the best over the rounds. Prints a table to stderr and one JSON object to stdout.

`steady` is the figure of those pieces of work beside which nobody disturbed the processor (see
`steady.py`), and `steady_share` their part of all `pieces`: of times the median, of rates the
blocks over the time, of the longest the longest. Undisturbed is measured by the least probe of the
whole run; the table, printed on the way, knows the least so far, from 2 s of probes on. Where
fewer than `ENOUGH` pieces were undisturbed, ours works on alone, for `MORE_S` or so, and that
counts for the steady figure only. Ratios to Dynamo are of plain medians. Of its own, matching alone
has a steady figure: a probe sees the processor of the thread it runs in, and a tree's events wait
for another one, without pauses in which to probe.

"Base costs" are the two figures that the goals were set by, measured in the same rounds: what they
were "there" says how this machine compares.
"""

import argparse
import gc
import json
import platform
import random
import struct
import subprocess
import time
import tracemalloc
from array import array
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from typing import TypeVar

import msgspec
from index_cases import (
    Chain,
    Prompt,
    Rival,
    drawn_names,
    hashed,
    load_rival,
    ours_of,
    stored,
)
from index_table import RATE, Sample, Side, Table, figure, figures, together
from msgspec import msgpack
from steady import Piece, in_pieces, probed
from xxhash import xxh3_64_digest

from events import (
    BlocksCleared,
    BlocksRemoved,
    Event,
    EventBatch,
    WorkerRank,
    decode_batch,
    encode_batch,
)
from indexer import PredictedBlocks, RadixIndex
from indexer.snapshot import Loader, dump
from kvrouter.heap import Heap

RANK = WorkerRank("w")
T = TypeVar("T")
Work = Callable[[], object]


def calls(work: Work, times: int) -> Sample:
    """So many calls in a row; nothing is collected meanwhile."""

    def each(part: Sequence[int]) -> None:
        for _ in part:
            work()

    return in_pieces(each, range(times), 1)


class Bench:
    """The cases, and what came out of them."""

    def __init__(self, rounds: int, seed: int, rival: type[Rival] | None) -> None:
        self.rounds = rounds
        self.rng = random.Random(seed)
        self.rival = rival
        self.table = Table()

    def turns(self, sides: Sequence[Side]) -> list[list[Sample]]:
        """Each side once per round, in turns."""
        samples: list[list[Sample]] = [[] for _ in sides]
        for _ in range(self.rounds):
            for side, values in zip(sides, samples, strict=True):
                values.append(side())
        return samples

    def alone(self, name: str, unit: str, goal: str, side: Side) -> None:
        """One row of ours without a rival."""
        (samples,) = self.turns([side])
        pieces = self.table.with_more(samples, side)
        self.table.row(name, unit, goal, [figures(unit, samples)], [pieces])

    # Matching

    def match(self) -> None:
        """A prompt that many ranks hold, all of it or each to its own depth."""
        for blocks, holders, goal in (
            (512, 8, "4 us, 0.4x"),
            (512, 100, "8 us, 0.4x"),
            (512, 500, "25 us, 0.4x"),
            (8192, 100, "40 us, 0.3x"),
        ):
            prompt = Prompt(self.rng, blocks)
            depths = [blocks] * holders
            self._match(f"match {blocks} blocks, {holders} holders", goal, prompt, depths)
        prompt = Prompt(self.rng, 512)
        depths = [1 + at * 512 // 500 for at in range(500)]
        self.rng.shuffle(depths)
        self._match("match 512 blocks, 500 own depths", "120 us", prompt, depths)

    def _match(self, name: str, goal: str, prompt: Prompt, depths: list[int]) -> None:
        index = RadixIndex()
        chains = [Chain(self.rng, prompt, depth) for depth in depths]
        for number, chain in enumerate(chains):
            index.apply(WorkerRank(f"w{number}"), EventBatch(0.0, [stored(chain)]))
        hashes = ours_of(prompt)
        if len(index.match(hashes)) != len(depths):
            raise AssertionError("a holder was not found")
        sides: list[Side] = [lambda: calls(lambda: index.match(hashes), 200)]
        if self.rival is not None:
            tree = self.rival(prompt)
            tree.clear()
            for number, chain in enumerate(chains):
                tree.apply(number, tree.stored(chain))
            sides.append(lambda: calls(tree.match, 100))
        taken = self.turns(sides)
        its = [together(samples) for samples in taken[1:]]
        ours = self.table.with_more(taken[0], sides[0])
        self.table.row(name, "us", goal, [figures("us", each) for each in taken], [ours, *its])

    # Applying

    def apply(self) -> None:
        """Payloads as an engine publishes them, to the index; one-block events are decoding."""
        chains = [Chain(self.rng, Prompt(self.rng, 512), 512) for _ in range(32)]
        for per_event, per_batch, goal in (
            (256, 1, "1.0 M/s, 1x"),
            (16, 4, "0.7 M/s, 1.2x"),
            (1, 32, "0.3 M/s, 3x"),
            (1, 1, "-"),
        ):
            batches = list(_batches(chains, per_event, per_batch))
            name = f"payload -> index, {per_event} blocks an event, {per_batch} events a batch"
            payloads = list(map(encode_batch, batches))
            sides: list[Side] = [partial(_apply_payloads, payloads)]
            if self.rival is not None:
                tree, events = self._rival_events(chains, per_event)
                sides.append(partial(_apply_to_rival, tree, tree.apply, events))
                sides.append(partial(_apply_to_rival, tree, tree.apply_payload, payloads))
            bases = [partial(_hash, chains), partial(_decode, chains)]
            *rates, hashing, decoding = self.turns([*sides, *bases])
            ours = self.table.with_more(rates[0], sides[0])
            values = [figures(RATE, samples) for samples in rates]
            self.table.row(name, RATE, goal, values, [ours])
            self._report_base(values[0], hashing, decoding)
            self.alone("  ours without decoding", RATE, "-", partial(_apply, batches))
            self.table.row("  ours, least times", RATE, "-", [[_least(payloads, decode_batch)]])

    def _report_base(
        self, rates: list[float], hashing: list[Sample], decoding: list[Sample]
    ) -> None:
        """What hashing blocks and making their token ids costs by itself, on this machine."""
        both = []
        for what, goal, samples in (
            ("hash a block", "140 ns there", hashing),
            ("decode its token ids", "380 ns there", decoding),
        ):
            both.append(figures("ns", samples))
            pieces = together(samples)
            self.table.row(f"  base costs: to {what}", "ns", goal, both[-1:], [pieces])
        base_ns = map(sum, zip(*both, strict=True))
        shares = [rate * ns / 10 for rate, ns in zip(rates, base_ns, strict=True)]
        self.table.row("  their share of the time", "%", "-", [shares])

    def _rival_events(self, chains: list[Chain], per_event: int) -> tuple[Rival, list[bytes]]:
        rivals = [Rival(chain.prompt) for chain in chains]
        events = [
            rival.stored(chain, at, per_event)
            for rival, chain in zip(rivals, chains, strict=True)
            for at in range(0, 512, per_event)
        ]
        return rivals[0], events

    def remove(self) -> None:
        """One hash an event, as engines evict: the deepest block of a prompt first."""
        for run, goal in ((512, "1.7 M/s"), (1, "0.6 M/s")):
            chains = [Chain(self.rng, Prompt(self.rng, run), run) for _ in range(16_384 // run)]
            names = [name for chain in chains for name in reversed(chain.names)]
            events: list[Event] = [BlocksRemoved(block_hashes=[name]) for name in names]
            batches = [EventBatch(0.0, events[at : at + 32], 0) for at in range(0, 16_384, 32)]
            payloads = list(map(encode_batch, batches))
            name = f"removal, one hash an event, runs of {run}"
            self.alone(name, RATE, goal, partial(_apply, batches, chains))
            least = _least(batches, lambda batch: batch, chains)
            self.table.row("  least times", RATE, "-", [[least]])
            decoding = partial(_apply_payloads, payloads, chains)
            self.alone("  with decoding", RATE, "-", decoding)

    def branch(self) -> None:
        """One of many ranks that hold a prompt goes on from its middle with a block of its own."""
        for holders, goal in ((100, "p50 100 us, max 5 ms"), (500, "p50 400 us, max 5 ms")):
            trunk = Prompt(self.rng, 512)
            chains = [Chain(self.rng, trunk, 512) for _ in range(holders)]
            once = partial(self._branch_off, chains)
            first = once()
            times = [figure("us", [piece]) for piece in first]
            pieces = self.table.with_more([first], once)
            self.table.row(f"branch off {holders} holders", "us", goal, [times], [pieces])
            name = "  the slowest of 60"
            self.table.row(name, "us", "5 ms", [[max(times)]], [pieces], longest=True)

    def _branch_off(self, chains: list[Chain]) -> Sample:
        """Sixty times, each in the middle of one of these; collected as ever."""
        index = RadixIndex()
        for number, each in enumerate(chains):
            index.apply(WorkerRank(f"w{number}"), EventBatch(0.0, [stored(each)]))
        pieces = []
        gc.collect()
        for at in self.rng.sample(range(1, 511), 60):
            number = self.rng.randrange(len(chains))
            own = Chain(self.rng, Prompt(self.rng, 1), 1)
            event = stored(own, parent=chains[number].names[at - 1])
            batch = EventBatch(0.0, [event])
            pieces.append(probed(1, partial(index.apply, WorkerRank(f"w{number}"), batch)))
        return pieces

    def clear(self) -> None:
        """One of a hundred ranks loses its 20,000 blocks; half of each prompt is shared."""
        for length, goal in ((512, "1 ms"), (64, "-")):

            def once(length: int = length) -> Sample:
                index = RadixIndex()
                self._fill(index, 100, length // 2, 20_000 // (length // 2), length // 2)
                return calls(lambda: index.clear(WorkerRank("w0")), 1)

            self.alone(f"clear 20,000 blocks, prompts of {length}", "ms", goal, once)

    def _fill(self, index: RadixIndex, ranks: int, head: int, prompts: int, tail: int) -> bytes:
        """Ranks that hold one head and prompts of their own behind it; returns its hashes."""
        hashes = self.rng.randbytes(head * 8)
        for number in range(ranks):
            rank = WorkerRank(f"w{number}")
            names = drawn_names(self.rng, head)
            index.apply(rank, EventBatch(0.0, [hashed(names, hashes)]))
            for _ in range(prompts):
                own, behind = drawn_names(self.rng, tail), self.rng.randbytes(tail * 8)
                index.apply(rank, EventBatch(0.0, [hashed(own, behind, names[-1])]))
        return hashes

    # Memory and pauses

    def memory(self) -> None:
        """Traced bytes per worker-block: four ranks of 20,000 blocks, then after churn."""
        for length, rounds in ((512, 10), (16, 10), (1, 2)):
            tracemalloc.start()
            index = RadixIndex()
            prompts = 4 * (20_000 // length)
            names = [array("Q") for _ in range(prompts)]  # made once: not the index's
            for at in range(prompts):
                names[at].extend([0] * length)
            base = _traced()
            for at in range(prompts):
                self._store_anew(index, at, names[at])
            fresh = (_traced() - base) / index.stats().blocks
            for at in list(range(prompts)) * rounds:
                rank = WorkerRank(f"w{at % 4}")
                gone: list[Event] = [
                    BlocksRemoved(block_hashes=[name]) for name in reversed(names[at])
                ]
                index.apply(rank, EventBatch(0.0, gone))
                self._store_anew(index, at, names[at])
            churned = (_traced() - base) / index.stats().blocks
            tracemalloc.stop()
            self.table.row(f"memory a block, runs of {length}", "bytes", "95", [[fresh]])
            self.table.row(f"  after churn of {rounds}x the capacity", "bytes", "125", [[churned]])

    def _store_anew(self, index: RadixIndex, at: int, names: "array[int]") -> None:
        drawn = drawn_names(self.rng, len(names))
        names[:] = array("Q", drawn)
        event = hashed(drawn, self.rng.randbytes(len(names) * 8))
        index.apply(WorkerRank(f"w{at % 4}"), EventBatch(0.0, [event]))

    def pause(self) -> None:
        """The longest turn of 32 one-block events and a match, beside two million entries.

        CPU time of the thread; a pause of the collector falls into one of the turns.
        """
        index = RadixIndex()
        head = self._fill(index, 100, 64, 40, 500)
        for how, goal in (("as it is", "-"), ("frozen", "5 ms")):
            if how == "frozen":
                Heap().start()
            chains = [Chain(self.rng, Prompt(self.rng, 512), 512) for _ in range(64)]
            turns = []
            for at, batch in enumerate(_batches(chains, 1, 32)):
                rank, payload = WorkerRank(f"w{at // 512}"), encode_batch(batch)

                def turn(rank: WorkerRank = rank, payload: bytes = payload) -> None:
                    index.apply(rank, decode_batch(payload))
                    index.match(head)

                turns.append(probed(1, turn, time.thread_time))
            times = [figure("ms", [each]) for each in turns]
            name = f"the longest turn, heap {how}"
            self.table.row(name, "ms", goal, [[max(times)]], [turns], longest=True)
            self.table.row("  the median turn", "ms", "-", [times], [turns])
        gc.unfreeze()

    def snapshot(self) -> None:
        """Dumping and loading five million worker-blocks: in all, and the longest step."""
        index = RadixIndex()
        self._fill(index, 250, 64, 40, 500)
        heap = Heap()
        heap.start()
        chunks: list[bytes] = []
        steps = dump(index)
        dumping = list(_timed(lambda: chunks.append(next(steps)), StopIteration))
        copy = RadixIndex()
        loader = Loader(copy)
        waiting = iter(chunks)

        def load() -> None:
            loader.feed(next(waiting))
            heap.tick(copy.stats().blocks)

        loading = list(_timed(load, StopIteration))
        gc.unfreeze()
        for what, steps_taken in (("dump", dumping), ("load", loading)):
            times = [figure("ms", [step]) for step in steps_taken]
            name = f"{what} {index.stats().blocks / 1e6:.1f} million worker-blocks"
            self.table.row(name, "s", "-", [[sum(times) / 1e3]])
            name = "  the longest step"
            self.table.row(name, "ms", "5 ms", [[max(times)]], [steps_taken], longest=True)

    def predicted(self) -> None:
        """Expecting and expiring one prompt of 512 blocks."""
        prompts = [ours_of(Prompt(self.rng, 512)) for _ in range(50)]

        def once() -> Sample:
            predicted = PredictedBlocks()
            times = iter(range(1_000_000))

            def work() -> None:
                now = float(next(times))
                hashes = prompts[int(now) % len(prompts)]
                predicted.expire(now)
                predicted.expect(WorkerRank("w"), hashes, now=now, ttl_s=10.0)

            return calls(work, 200)

        self.alone("predicted, expect and expire 512", "us", "-", once)


class _TokenIds(msgspec.Struct, gc=False):
    token_ids: list[int]


def _hash(chains: list[Chain]) -> Sample:
    """To hash blocks, not chained to the ones before."""
    cut = struct.Struct("64s" * 512).unpack
    prompts = [array("I", chain.prompt.token_ids).tobytes() for chain in chains]

    def work(part: Sequence[bytes]) -> None:
        for prompt in part:
            list(map(xxh3_64_digest, cut(prompt)))

    return in_pieces(work, prompts, 512)


def _decode(chains: list[Chain]) -> Sample:
    """To decode the token ids of blocks, and to let go of them."""
    decode = msgpack.Decoder(_TokenIds).decode
    messages = [msgpack.encode({"token_ids": chain.prompt.token_ids}) for chain in chains]

    def work(part: Sequence[bytes]) -> None:
        for message in part:
            decode(message)

    return in_pieces(work, messages, 512)


def _filled(chains: list[Chain]) -> RadixIndex:
    index = RadixIndex()
    for chain in chains:
        index.apply(RANK, EventBatch(0.0, [stored(chain)]))
    return index


def _apply(batches: list[EventBatch], before: list[Chain] = []) -> Sample:  # noqa: B006  not changed
    """Blocks from batches, each of as many."""
    index = _filled(before)

    def work(part: Sequence[EventBatch]) -> None:
        for batch in part:
            index.apply(RANK, batch)

    return in_pieces(work, batches, _blocks_of(batches) / len(batches))


def _apply_payloads(payloads: list[bytes], before: list[Chain] = []) -> Sample:  # noqa: B006
    """Blocks from payloads, each of as many."""
    index = _filled(before)

    def work(part: Sequence[bytes]) -> None:
        for payload in part:
            index.apply(RANK, decode_batch(payload))

    return in_pieces(work, payloads, _blocks_of(map(decode_batch, payloads)) / len(payloads))


def _least(what: list[T], to_batch: Callable[[T], EventBatch], before: list[Chain] = []) -> float:  # noqa: B006
    """Millions of blocks a second, if each batch takes the least time that it took in 15 rounds.

    This is what is left of the figure on a machine that others use too.
    """
    least = [float("inf")] * len(what)
    gc.disable()
    for _ in range(15):
        index = _filled(before)
        for at, each in enumerate(what):
            started = time.process_time()
            index.apply(RANK, to_batch(each))
            least[at] = min(least[at], time.process_time() - started)
    gc.enable()
    return _blocks_of(map(to_batch, what)) / sum(least) / 1e6


def _apply_to_rival(tree: Rival, apply: Callable[[int, bytes], int], what: list[bytes]) -> Sample:
    """Blocks in one piece; the match waits for its thread."""
    tree.clear()
    blocks = 0

    def work(_: Sequence[None]) -> None:
        nonlocal blocks
        blocks = sum([apply(1, each) for each in what])
        tree.match()

    (whole,) = in_pieces(work, [None], 1)
    return [whole._replace(amount=blocks)]


def _blocks_of(batches: Iterable[EventBatch]) -> int:
    events = (event for batch in batches for event in batch.events)
    return sum(len(event.block_hashes) for event in events if not isinstance(event, BlocksCleared))


def _batches(chains: list[Chain], per_event: int, per_batch: int) -> Iterator[EventBatch]:
    """Events of one step come from `per_batch` requests, as far as there are so many."""
    group = max(1, min(per_batch, len(chains)))
    for first in range(0, len(chains), group):
        for at in range(0, 512, per_event):
            events: list[Event] = [
                stored(chain, at, per_event) for chain in chains[first : first + group]
            ]
            yield EventBatch(0.0, events, dp_rank=0)


def _timed(step: Work, end: type[Exception]) -> Iterator[Piece]:
    """Each step until `end` is raised."""
    while True:
        try:
            yield probed(1, step, time.thread_time)
        except end:
            return


def _traced() -> int:
    gc.collect()
    return tracemalloc.get_traced_memory()[0]


def _versions() -> dict[str, str | None]:
    commit = subprocess.run(
        ["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True, check=False
    )
    return {"commit": commit.stdout.strip() or None, "python": platform.python_version()}


CASES = ("match", "apply", "remove", "branch", "clear", "memory", "pause", "snapshot", "predicted")


def main() -> None:
    """Run the cases and print them."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--only", nargs="+", choices=CASES, default=CASES)
    options = parser.parse_args()
    rival, rival_version = load_rival()
    bench = Bench(options.rounds, options.seed, rival)
    for name in options.only:
        getattr(bench, name)()
    versions = {**_versions(), "ai-dynamo-runtime": rival_version}
    found = {"probe_us": bench.table.probes_us(), "figures": bench.table.figures()}
    print(json.dumps({"seed": options.seed, **versions, **found}, indent=2))


if __name__ == "__main__":
    main()
