"""Replicas over a network that loses, repeats, delays, reorders and parts, against an oracle."""

import random
from collections import defaultdict
from dataclasses import dataclass, field

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from events import WorkerRank
from events.replica import (
    Added,
    Ask,
    Dropped,
    Grown,
    Ledger,
    LedgerSettings,
    Mirror,
    MirrorSettings,
    Prefilled,
    SendAsk,
    blocks_of,
    decode_message,
    encode_message,
)
from events.replica.mirror import Command, Key

NAMES = ("r0", "r1", "r2", "r3")
RANKS = [WorkerRank("a"), WorkerRank("b"), WorkerRank("b", 1)]
SETTINGS = LedgerSettings(max_ops=4, part_bookings=3)
PATIENCE = MirrorSettings(lease_s=5.0, max_kept=16)


@dataclass
class View:
    """What a user of a mirror makes of its commands: each booking's (waiting, own blocks)."""

    held: dict[Key, tuple[bool, int]] = field(default_factory=dict)

    def do(self, commands: list[Command]) -> list[SendAsk]:
        asks: list[SendAsk] = []
        for command in commands:
            if isinstance(command, Added):
                assert command.key not in self.held, "a booking is added once"
                self.held[command.key] = (command.booking.waiting, command.booking.own_blocks)
            elif isinstance(command, Prefilled):
                self.held[command.key] = (False, self.held[command.key][1])
            elif isinstance(command, Grown):
                self.held[command.key] = (self.held[command.key][0], command.own_blocks)
            elif isinstance(command, Dropped):
                del self.held[command.key]
            elif isinstance(command, SendAsk):
                asks.append(command)
        return asks


class Process:
    """One router process: a ledger, a mirror, what its user made of it, and the plain truth."""

    def __init__(self, name: str, epoch: int, seed: int) -> None:
        self.name = name
        self.ledger = Ledger(name, epoch, SETTINGS)
        self.mirror = Mirror(name, epoch, random.Random(seed), PATIENCE)
        self.view = View()
        self.live: dict[int, tuple[bool, int, int]] = {}  # lease -> waiting, blocks, told blocks
        self.leases = 0


class World:
    """A network of processes under a seeded chance."""

    def __init__(self, seed: int) -> None:
        self.rng = random.Random(seed)
        self.now = 0.0
        self.epoch = 0
        self.processes = {name: self._start(name) for name in NAMES}
        self.queues: dict[tuple[str, str], list[bytes]] = defaultdict(list)
        self.cut: set[str] = set()
        self.loss = 0.1

    def _start(self, name: str) -> Process:
        self.epoch += 1
        return Process(name, self.epoch, self.epoch)

    # What the processes do

    def work(self, process: Process) -> None:
        lease = self.rng.choice([*process.live, 0])
        what = self.rng.random()
        if not lease or what < 0.3:
            self._book(process)
        elif what < 0.5:
            process.ledger.prefill_done(lease)
            _, blocks, told = process.live[lease]
            process.live[lease] = (False, blocks, told)
        elif what < 0.7:
            waiting, blocks, told = process.live[lease]
            blocks += self.rng.randrange(6)
            process.ledger.grow(lease, blocks)
            told = blocks if blocks >= told + SETTINGS.grow_blocks else told
            process.live[lease] = (waiting, blocks, told)
        else:
            process.ledger.settle(lease)
            del process.live[lease]

    def _book(self, process: Process) -> None:
        process.leases += 1
        hashes, own = bytes(8 * self.rng.randrange(40)), self.rng.randrange(3)
        blocks = len(hashes) // 8 + own
        booking = process.ledger.book(
            process.leases,
            self.rng.choice(RANKS),
            hashes=hashes,
            cached_blocks=self.rng.randrange(9),
            all_blocks=blocks,
            block_size=16,
            prefill_tokens=100,
            now=self.now,
        )
        assert booking.own_blocks >= own
        process.live[process.leases] = (True, blocks, blocks)

    def flush(self, process: Process) -> None:
        for ops in process.ledger.flush():
            self.publish(process, encode_message(ops))

    def beat(self, process: Process) -> None:
        self.flush(process)
        self.publish(process, encode_message(process.ledger.beat()))
        self.carry_out(process, process.mirror.tick(self.now))

    def restart(self, name: str) -> None:
        if self.rng.random() < 0.5:
            self.publish(self.processes[name], encode_message(self.processes[name].ledger.bye()))
        self.processes[name] = self._start(name)
        if self.rng.random() < 0.5:
            self.publish(self.processes[name], encode_message(self._hello(name)))

    def _hello(self, name: str) -> Ask:
        return Ask(name, self.processes[name].ledger.epoch)

    # What the network does

    def publish(self, sender: Process, payload: bytes) -> None:
        for name in NAMES:
            if name != sender.name:
                self.send(sender.name, name, payload)

    def send(self, sender: str, to: str, payload: bytes) -> None:
        if (sender in self.cut) != (to in self.cut):
            return
        copies = 0 if self.rng.random() < self.loss else 1 + (self.rng.random() < self.loss)
        queue = self.queues[sender, to]
        for _ in range(copies):
            late = self.rng.random() < self.loss and queue
            queue.insert(self.rng.randrange(len(queue)) if late else len(queue), payload)

    def deliver_one(self) -> bool:
        ways = [way for way, queue in self.queues.items() if queue]
        if not ways:
            return False
        sender, to = self.rng.choice(ways)
        self.arrive(sender, to, self.queues[sender, to].pop(0))
        return True

    def arrive(self, sender: str, to: str, payload: bytes) -> None:
        process, message = self.processes[to], decode_message(payload)
        self.carry_out(process, process.mirror.hear(message, self.now))
        if isinstance(message, Ask) and message.of in ("", to):
            self.flush(process)
            for state in process.ledger.state(self.now):
                self.send(to, sender, encode_message(state))

    def carry_out(self, process: Process, commands: list[Command]) -> None:
        for ask in process.view.do(commands):
            message = Ask(process.name, process.ledger.epoch, ask.replica)
            self.send(process.name, ask.replica, encode_message(message))
        process.mirror.check()

    # Chaos and peace

    def step(self) -> None:
        self.now += self.rng.random() * 0.1
        process = self.processes[self.rng.choice(NAMES)]
        what = self.rng.random()
        if what < 0.35:
            self.work(process)
        elif what < 0.5:
            self.flush(process)
        elif what < 0.6:
            self.beat(process)
        elif what < 0.602:
            self.restart(process.name)
        elif what < 0.606:
            self.cut = set(self.rng.sample(NAMES, self.rng.randrange(3)))
        elif what < 0.61:
            self.loss = self.rng.choice([0.0, 0.1, 0.5])
        else:
            self.deliver_one()

    def heal(self) -> None:
        """A network that works, until all has been said: a few beats."""
        self.cut, self.loss = set(), 0.0
        for _ in range(40):
            self.now += 0.5
            for process in self.processes.values():
                self.beat(process)
            while self.deliver_one():
                pass

    def check(self) -> None:
        """Every replica sees of every other what that one has: no more, no less."""
        for process in self.processes.values():
            expected = {
                Key(other.name, other.ledger.epoch, lease): (waiting, told)
                for other in self.processes.values()
                if other is not process
                for lease, (waiting, _, told) in other.live.items()
            }
            told_of = process.mirror.bookings()
            assert process.view.held.keys() == told_of.keys() == expected.keys()
            for key, (waiting, told) in expected.items():
                booking = told_of[key]
                sampled = blocks_of(len(booking.samples) // 8)
                assert booking.own_blocks == told - sampled
                assert (booking.waiting, booking.own_blocks) == process.view.held[key]
                assert booking.waiting == waiting
            assert process.mirror.uncertain() == []


@pytest.mark.parametrize("seed", range(4))
def test_replicas_agree_after_10_000_steps_of_loss_and_restarts(seed: int) -> None:
    """R1, R2, R3: whatever happened to the network, what is seen afterwards is what is there."""
    world = World(seed)
    for step in range(10_000):
        world.step()
        if step % 2500 == 2499:
            world.heal()
            world.check()
    gaps = sum(process.mirror.stats.gaps for process in world.processes.values())
    assert gaps > 0


@given(st.integers(0, 2**32), st.integers(1, 400))
@settings(max_examples=60, deadline=None)
def test_replicas_agree_however_short_the_trouble_was(seed: int, steps: int) -> None:
    world = World(seed)
    for _ in range(steps):
        world.step()
    world.heal()
    world.check()
