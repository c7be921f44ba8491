"""A rank heard through a relay, over a network that loses and repeats, against the engine."""

import random

import pytest

from events import BlocksCleared, BlocksRemoved, BlocksStored, EventBatch, WorkerRank
from events.relayed import Answer, Batch, Head, Want, decode, encode
from events.relayed_stream import RelayedStream
from events.stream import (
    Command,
    Deliver,
    RequestReplay,
    Resync,
    ResyncReason,
    StreamState,
    SubscriptionSettings,
)
from indexer import RadixIndex, block_hashes
from indexer.hashing import RULE_VERSION
from kvrouter.relay.stream import RankStream

RANK = WorkerRank("w")
IMPATIENT = SubscriptionSettings(
    replay_timeout_s=1.0, replay_pause_s=5.0, max_waiting_batches=50, silent_after_s=10.0
)


class Router:
    """A stream with the index that it feeds."""

    def __init__(self) -> None:
        self.core = RelayedStream(RULE_VERSION, IMPATIENT)
        self.index = RadixIndex()

    def do(self, commands: list[Command]) -> list[Want]:
        wanted = []
        for command in commands:
            if isinstance(command, Deliver):
                self.index.apply(RANK, command.batch)
            elif isinstance(command, Resync):
                self.index.clear(RANK)
            elif isinstance(command, RequestReplay):
                wanted.append(Want(command.attempt, self.core.epoch, command.start))
        return wanted


class World:
    """An engine, its relay, a network, and two routers, of which one restarts."""

    def __init__(self, seed: int) -> None:
        self.rng = random.Random(seed)
        self.now = 0.0
        self.epoch = 1_000
        self.relay = RankStream(self.epoch)
        self.relay.stream = StreamState.LIVE
        self.truth = RadixIndex()
        self.names: dict[int, list[int]] = {}
        self.routers = [Router(), Router()]
        self.down: list[list[bytes]] = [[], []]
        self.up: list[list[bytes]] = [[], []]
        self.linked = [False, False]
        self.loss = 0.1

    # The engine and its relay

    def engine(self) -> None:
        tokens = [self.rng.randrange(3) for _ in range(self.rng.randint(1, 8))]
        hashes = block_hashes(tokens, 1)
        names = [int.from_bytes(hashes[at : at + 8], "big") for at in range(0, len(hashes), 8)]
        if self.rng.random() < 0.02:
            event: BlocksStored | BlocksRemoved | BlocksCleared = BlocksCleared()
        elif self.rng.random() < 0.4:
            event = BlocksRemoved(block_hashes=[*self.rng.sample(names, 1)])
        else:
            event = BlocksStored(block_hashes=[*names], token_ids=tokens, block_size=1)
        batch = EventBatch(self.now, [event])
        self.truth.apply(RANK, batch)
        self.publish(self.relay.take(batch))

    def engine_restarts(self) -> None:
        self.truth.clear(RANK)
        self.publish(self.relay.restart())

    def relay_restarts(self) -> None:
        """It hears the engine's whole history again, or else what the engine has is unknown."""
        self.epoch += 1_000
        self.relay = RankStream(self.epoch)
        self.relay.stream = StreamState.LIVE
        self.truth.clear(RANK)

    def publish(self, message: Batch | Head) -> None:
        for at in range(2):
            self.send(self.down[at], at, encode(message))

    def send(self, queue: list[bytes], at: int, payload: bytes) -> None:
        if not self.linked[at] or self.rng.random() < self.loss:
            return
        for _ in range(1 + (self.rng.random() < self.loss)):
            late = queue and self.rng.random() < self.loss
            queue.insert(self.rng.randrange(len(queue)) if late else len(queue), payload)

    # The routers

    def carry(self, at: int, commands: list[Command]) -> None:
        for want in self.routers[at].do(commands):
            self.send(self.up[at], at, encode(want))

    def link(self, at: int, *, up: bool) -> None:
        if up == self.linked[at]:
            return
        self.linked[at] = up
        core = self.routers[at].core
        self.carry(at, core.connected(self.now) if up else core.disconnected())

    def deliver(self, at: int) -> None:
        if self.up[at] and self.rng.random() < 0.5:
            want = decode(self.up[at].pop(0))
            assert isinstance(want, Want)
            for answer in self.relay.answer(want):
                self.send(self.down[at], at, encode(answer))
        elif self.down[at]:
            message = decode(self.down[at].pop(0))
            core = self.routers[at].core
            if isinstance(message, Answer):
                self.carry(at, core.answered(message, self.now))
            elif isinstance(message, Batch | Head):
                self.carry(at, core.live(message, self.now))

    def step(self) -> None:
        self.now += self.rng.random() * 0.1
        at = self.rng.randrange(2)
        what = self.rng.random()
        if what < 0.4:
            self.engine()
        elif what < 0.85:
            self.deliver(at)
        elif what < 0.9:
            self.publish(self.relay.head())
        elif what < 0.97:
            self.carry(at, self.routers[at].core.tick(self.now))
        elif what < 0.98:
            self.link(at, up=self.rng.random() < 0.7)
        elif what < 0.985:
            self.rng.choice([self.engine_restarts, self.relay_restarts])()
        elif what < 0.99:
            self.routers[1], self.down[1], self.up[1], self.linked[1] = Router(), [], [], False
        else:
            self.loss = self.rng.choice([0.0, 0.1, 0.4])

    def heal(self) -> None:
        self.loss = 0.0
        for at in range(2):
            self.link(at, up=True)
        for _ in range(60):
            self.now += 0.5
            self.publish(self.relay.head())
            for at in range(2):
                self.carry(at, self.routers[at].core.tick(self.now))
                while self.down[at] or self.up[at]:
                    self.deliver(at)

    def check(self) -> None:
        prompts = [block_hashes([self.rng.randrange(3) for _ in range(8)], 1) for _ in range(200)]
        for router in self.routers:
            router.index.check()
            assert router.core.state is StreamState.LIVE
            assert router.index.blocks(RANK) == self.truth.blocks(RANK)
            assert [router.index.match(p) for p in prompts] == [
                self.truth.match(p) for p in prompts
            ]


@pytest.mark.parametrize("seed", range(4))
def test_routers_end_with_what_the_engine_has(seed: int) -> None:
    """E9, E11, E12, R5: 10,000 steps of loss, repetition, restarts and cut connections."""
    world = World(seed)
    for step in range(10_000):
        world.step()
        if step % 1000 == 999:
            world.heal()
            world.check()
    stats = [router.core.stats for router in world.routers]
    assert sum(each.gaps for each in stats) > 0
    assert sum(each.resyncs[ResyncReason.RESTART] for each in stats) > 0
