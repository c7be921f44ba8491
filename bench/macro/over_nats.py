"""Events through a relay and NATS beside ZMQ, bookings, and a warm start: what each costs.

    python bench/macro/over_nats.py [--blocks 100000] [--warm-blocks 500000] [--seed 1]

Relay and router are processes of their own, whose CPU time is read; the engine's side and the
server are not counted. Figures of one run are for comparison with each other: all of it shares the
machine. Prints one JSON object, and a short table on standard error.
"""

import argparse
import asyncio
import importlib.metadata
import json
import multiprocessing
import platform
import random
import statistics
import subprocess
import sys
import time
from array import array
from collections.abc import Callable
from multiprocessing.connection import Connection
from typing import Any

import zmq.asyncio

from events import BlocksRemoved, BlocksStored, EventBatch, WorkerRank, encode_batch
from events.history import Position
from events.nats_bus import NatsBus
from events.nats_link import NatsLink, NatsSettings
from events.nats_source import NatsSource
from events.relayed import Want, encode
from events.replica import (
    Added,
    Dropped,
    IndexMessage,
    Ledger,
    Mirror,
    Prefilled,
    decode_message,
    encode_message,
)
from events.stream import ResyncReason, StreamState, StreamStats
from events.subjects import Subjects
from events.zmq_publisher import ZmqPublisher
from events.zmq_source import ZmqSource
from indexer import RadixIndex, block_hashes
from indexer.hashing import RULE_VERSION
from kvrouter.config import Config, WorkerConfig
from kvrouter.demo.nats_server import NatsServer
from kvrouter.handing_over import HandingOver
from kvrouter.load import Load, Outcome
from kvrouter.prompt import Prompt
from kvrouter.relay.service import Relay
from kvrouter.relay.stream import RankStream
from kvrouter.replication import Replication
from kvrouter.shared_load import SharedLoad
from kvrouter.warm_start import WarmStart
from kvrouter.wiring import new_fleet
from kvrouter.workers import ServedModel, WorkerFacts

RANK = WorkerRank("engine")
BLOCK_SIZE = 16
CHAIN_BLOCKS = 64
SUBJECTS = Subjects("bench")
PACE_BATCHES = 400


def batches(blocks: int, seed: int, *, evict: bool = True) -> list[EventBatch]:
    """Prompts of 64 blocks with ids of a large vocabulary; half of them may be evicted again."""
    rng = random.Random(seed)
    made, name = [], 0
    for number in range(blocks // CHAIN_BLOCKS):
        names = list(range(name, name + CHAIN_BLOCKS))
        name += CHAIN_BLOCKS
        tokens = [rng.randrange(150_000) for _ in range(CHAIN_BLOCKS * BLOCK_SIZE)]
        stored = BlocksStored(block_hashes=[*names], token_ids=tokens, block_size=BLOCK_SIZE)
        events: list[Any] = [stored]
        if evict and number % 2:
            events.append(BlocksRemoved(block_hashes=[*names]))
        made.append(EventBatch(time.time(), events, 0))
    return made


class Sink:
    """An index, and how late each batch came."""

    def __init__(self, *, clock: bool = False) -> None:
        self.index = RadixIndex()
        self.lags_s: list[float] = []
        self.batches = 0
        self._clock = clock

    def on_batch(self, rank: WorkerRank, batch: EventBatch) -> None:
        """Apply it, and note its age."""
        self.index.apply(rank, batch)
        self.batches += 1
        if self._clock:
            self.lags_s.append(time.time() - batch.ts_s)

    def on_resync(self, rank: WorkerRank, reason: ResyncReason) -> None:
        """Forget the blocks."""
        del reason
        self.index.clear(rank)

    def on_state(self, rank: WorkerRank, state: StreamState) -> None:
        """Is looked at, not told."""


async def until(holds: Callable[[], bool]) -> None:
    """Wait for a state that nobody tells of."""
    while not holds():  # noqa: ASYNC110  nobody does
        await asyncio.sleep(0.005)


# Processes


async def _router(pipe: Connection, way: str, where: str, replay: str, expected: int) -> None:
    """Follow until `expected` batches are applied; tell CPU seconds and lags."""
    sink = Sink(clock=True)
    with zmq.asyncio.Context() as context:
        if way == "zmq":
            source: Any = ZmqSource(RANK, where, sink, replay_endpoint=replay, context=context)
            tasks = [asyncio.create_task(source.run())]
        else:
            link = NatsLink(NatsSettings((where,)))
            source = NatsSource(
                RANK, sink, link, SUBJECTS, router="bench", number=1, rule=RULE_VERSION
            )
            tasks = [asyncio.create_task(link.run()), asyncio.create_task(source.run())]
        await until(lambda: source.state is StreamState.LIVE)
        started = time.process_time()
        pipe.send("ready")
        await until(lambda: sink.batches >= expected)
        cpu_s = time.process_time() - started
        pipe.send((cpu_s, sink.lags_s, sink.index.blocks(RANK), source.stats.gaps))
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


async def _relay(pipe: Connection, nats: str, where: str, replay: str, expected: int) -> None:
    link = NatsLink(NatsSettings((nats,)))
    relay = Relay(link, SUBJECTS)
    relay.add(RANK)
    with zmq.asyncio.Context() as context:
        source = ZmqSource(RANK, where, relay, replay_endpoint=replay, context=context)
        tasks = [asyncio.create_task(each()) for each in (link.run, relay.run, source.run)]
        await until(lambda: source.state is StreamState.LIVE and link.is_connected)
        relay.published_bytes = 0
        started = time.process_time()
        pipe.send("ready")
        await until(lambda: relay.streams[RANK].next >= expected)
        pipe.send((time.process_time() - started, relay.published_bytes))
        await asyncio.to_thread(pipe.recv)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


def _process(run: Callable[..., Any], pipe: Connection, *arguments: Any) -> None:
    asyncio.run(run(pipe, *arguments))


async def start(run: Callable[..., Any], *arguments: Any) -> Connection:
    """A process of its own; returns when it is ready."""
    ours, theirs = multiprocessing.Pipe()
    spawn = multiprocessing.get_context("spawn")
    spawn.Process(target=_process, args=(run, theirs, *arguments), daemon=True).start()
    await asyncio.to_thread(ours.recv)
    return ours


# Measures


async def events(way: str, made: list[EventBatch], server: NatsServer, pace_s: float) -> Any:
    """One way from an engine into an index; `pace_s` between batches, 0 for all at once."""
    with zmq.asyncio.Context() as context:
        publisher = ZmqPublisher(
            "tcp://127.0.0.1:*", replay_endpoint="tcp://127.0.0.1:*", context=context
        )
        answering = asyncio.create_task(publisher.run())
        where = (publisher.endpoint, publisher.replay_endpoint or "")
        relay = None
        if way == "nats":
            relay = await start(_relay, server.url, *where, len(made))
            router = await start(_router, way, server.url, "", len(made))
        else:
            router = await start(_router, way, *where, len(made))
        wall = time.perf_counter()
        for batch in made:
            publisher.publish(encode_batch(EventBatch(time.time(), batch.events, 0)))
            await asyncio.sleep(pace_s)
        cpu_s, lags_s, blocks, gaps = await asyncio.to_thread(router.recv)
        wall = time.perf_counter() - wall
        result = {
            "router_cpu_s": cpu_s,
            "lags_s": lags_s,
            "blocks": blocks,
            "gaps": gaps,
            "wall_s": wall,
        }
        if relay is not None:
            result["relay_cpu_s"], result["bytes"] = await asyncio.to_thread(relay.recv)
            relay.send("end")
        answering.cancel()
        await asyncio.gather(answering, return_exceptions=True)
        publisher.close()
        return result


def booking(count: int) -> dict[str, float]:
    """CPU of telling and of hearing a booking's life: booked, prefilled, settled."""
    ledger, mirror = Ledger("a", 1), Mirror("b", 1, random.Random(1))
    telling = SharedLoad(Load(), ledger)
    telling.load.journal = telling
    hearing = SharedLoad(Load(), Ledger("b", 1))
    prompts = [Prompt(_ids(number), namespace=b"") for number in range(count)]
    for prompt in prompts:
        prompt.prehash([BLOCK_SIZE])
    plain = Load()
    told_s = heard_s = plain_s = 0.0
    size = 0
    for prompt in prompts:
        for load in (telling, plain):
            started = time.thread_time()
            lease = load.book(RANK, prompt, overlap_blocks=8, block_size=BLOCK_SIZE, now=0.0)
            lease.prefill_done(0.0)
            lease.settle(Outcome.OK, 0.0)
            spent = time.thread_time() - started
            if load is plain:
                plain_s += spent
            else:
                told_s += spent
        started = time.thread_time()
        payloads = [encode_message(ops) for ops in ledger.flush()]
        told_s += time.thread_time() - started
        size += sum(map(len, payloads))
        started = time.thread_time()
        for payload in payloads:
            for command in mirror.hear(decode_message(payload), 0.0):
                if isinstance(command, Added):
                    hearing.add(command.key, command.booking, 0.0)
                elif isinstance(command, Prefilled):
                    hearing.prefilled(command.key, 0.0)
                elif isinstance(command, Dropped):
                    hearing.drop(command.key, 0.0)
        heard_s += time.thread_time() - started
    return {
        "tell_us": 1e6 * (told_s - plain_s) / count,
        "hear_us": 1e6 * heard_s / count,
        "bytes": size / count,
    }


def _ids(number: int) -> "array[int]":
    """32,768 tokens of this prompt's own."""
    return array("I", range(number * 100_000, number * 100_000 + 2048 * BLOCK_SIZE))


class Followed:
    """A source of a rank that is followed up to here."""

    def __init__(self) -> None:
        self.stats = StreamStats()
        self.absence = self.warning = ""
        self.place: dict[str, str | None] = {}

    def position(self) -> Position:
        """Somewhere."""
        return Position(1000, [], cold=False)

    def expect_blocks(self, now: float) -> None:
        """Is not asked for here."""

    def request_resync(self) -> None:
        """Likewise."""


class Router:
    """The parts of a router that warm starts are made of."""

    def __init__(self, name: str, server: NatsServer) -> None:
        self.link = NatsLink(NatsSettings((server.url,)))
        ledger = Ledger(name, 1)
        shared = SharedLoad(Load(), ledger)
        mirror = Mirror(name, 1, random.Random(1))
        self.replication = Replication(ledger, mirror, shared, NatsBus(self.link, SUBJECTS, name))
        self.fleet = new_fleet(Config(), shared.load, None)
        worker = self.fleet.add(WorkerConfig(url="http://engine:1", name=RANK.worker))
        self.fleet.joined(worker, WorkerFacts(models=(ServedModel("m"),), block_size=BLOCK_SIZE))
        self.taking = WarmStart(self.fleet, self.replication, random.Random(1))
        self.giving = HandingOver(self.fleet, self.replication)
        self.replication.on_index = self._hear
        self.runs = (self.link.run, self.replication.run, self.giving.run)
        self.index = self.fleet.pools["m"].index

    def _hear(self, message: IndexMessage) -> None:
        self.taking.hear(message)
        self.giving.hear(message)


async def warm_start_from_router(blocks: int, server: NatsServer, seed: int) -> dict[str, float]:
    """Seconds until a starting router's index equals another's; the longest hold of the loop.

    Both routers share one process here, so the CPU time is that of giving and taking.
    """
    old, new = Router("old", server), Router("new", server)
    made = batches(blocks, seed, evict=False)
    for batch in made:
        old.fleet.on_batch(RANK, batch)
    old.fleet.ranks[RANK].source = Followed()
    tasks = [asyncio.create_task(each()) for router in (old, new) for each in router.runs]
    await until(lambda: bool(new.replication.mirror.replicas()))
    started, cpu = time.perf_counter(), time.process_time()
    loading = asyncio.create_task(new.taking.restore(RANK, lambda _: True))
    longest_s = 0.0
    while not loading.done():
        slept = time.perf_counter()
        await asyncio.sleep(0.001)
        longest_s = max(longest_s, time.perf_counter() - slept - 0.001)
    took = {
        "blocks": new.index.blocks(RANK),
        "wall_s": time.perf_counter() - started,
        "cpu_s": time.process_time() - cpu,
        "loop_held_ms": 1e3 * longest_s,
        "equal": float(_chains(new.index, made[:500]) == _chains(old.index, made[:500])),
    }
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
    return took


def _chains(index: RadixIndex, made: list[EventBatch]) -> list[int]:
    """How much of each prompt the index finds."""
    found = []
    for batch in made:
        (stored, *_) = batch.events
        if isinstance(stored, BlocksStored):
            overlaps = index.match(block_hashes(stored.token_ids, BLOCK_SIZE))
            found.append(sum(overlap.total for overlap in overlaps.values()))
    return found


async def warm_start(blocks: int, server: NatsServer, seed: int) -> dict[str, float]:
    """Seconds from a router's start until its index equals the engine's, over NATS."""
    stream = RankStream(1)
    stream.stream = StreamState.LIVE
    for batch in batches(blocks, seed, evict=False):
        stream.take(batch)
    link, relay_link = (NatsLink(NatsSettings((server.url,))) for _ in range(2))
    relay = Relay(relay_link, SUBJECTS)
    relay.add(RANK)
    relay.streams[RANK] = stream
    sink = Sink()
    source = NatsSource(RANK, sink, link, SUBJECTS, router="w", number=1, rule=RULE_VERSION)
    tasks = [asyncio.create_task(each()) for each in (relay_link.run, link.run, relay.run)]
    await until(lambda: link.is_connected and relay_link.is_connected)
    started, cpu = time.perf_counter(), time.process_time()
    tasks.append(asyncio.create_task(source.run()))
    await until(lambda: sink.index.blocks(RANK) >= stream.blocks and not source.backlog)
    took = {
        "blocks": stream.blocks,
        "wall_s": time.perf_counter() - started,
        "cpu_s": time.process_time() - cpu,
        "bytes_per_block": sum(len(encode(answer)) for answer in stream.answer(Want(1, 0, 0)))
        / stream.blocks,
    }
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
    return took


async def measure(options: argparse.Namespace) -> dict[str, Any]:
    """All figures."""
    server = NatsServer()
    await server.start()
    try:
        made = batches(options.blocks, options.seed)
        blocks = len(made) * CHAIN_BLOCKS
        paced = made[:PACE_BATCHES]
        result: dict[str, Any] = {}
        for way in ("zmq", "nats"):
            full = await events(way, made, server, 0.0)
            calm = await events(way, paced, server, 0.005)
            lags = sorted(calm["lags_s"])
            result[way] = {
                "router_blocks_per_cpu_s": round(blocks / full["router_cpu_s"]),
                "lag_p50_ms": round(1e3 * statistics.median(lags), 2),
                "lag_p99_ms": round(1e3 * lags[int(0.99 * len(lags))], 2),
                "gaps": full["gaps"],
            }
            sys.stderr.write(f"{way} {result[way]}\n")
            if way == "nats":
                result[way]["relay_blocks_per_cpu_s"] = round(blocks / full["relay_cpu_s"])
                result[way]["bytes_per_stored_block"] = round(full["bytes"] / blocks, 1)
            else:
                size = sum(len(encode_batch(batch)) for batch in made)
                result[way]["bytes_per_stored_block"] = round(size / blocks, 1)
        result["booking"] = {k: round(v, 1) for k, v in booking(options.bookings).items()}
        warm = await warm_start(options.warm_blocks, server, options.seed)
        result["warm_start_from_relay"] = {key: round(value, 2) for key, value in warm.items()}
        warm = await warm_start_from_router(options.warm_blocks, server, options.seed)
        result["warm_start_from_router"] = {key: round(value, 2) for key, value in warm.items()}
        return result
    finally:
        await server.stop()


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n", maxsplit=1)[0])
    parser.add_argument("--blocks", type=int, default=100_000)
    parser.add_argument("--warm-blocks", type=int, default=500_000)
    parser.add_argument("--bookings", type=int, default=2000)
    parser.add_argument("--seed", type=int, default=1)
    options = parser.parse_args()
    commit = subprocess.run(
        ["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True, check=False
    ).stdout.strip()
    result = asyncio.run(measure(options))
    versions = {name: importlib.metadata.version(name) for name in ("nats-py", "pyzmq", "msgspec")}
    about = {"commit": commit, "python": platform.python_version(), "seed": options.seed}
    print(json.dumps(about | {"versions": versions} | result, indent=2))
    for name, figures in result.items():
        sys.stderr.write(f"{name:<12}" + "  ".join(f"{k} {v}" for k, v in figures.items()) + "\n")


if __name__ == "__main__":
    main()
