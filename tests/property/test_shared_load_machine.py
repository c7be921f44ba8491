"""The load as each replica sees it, against one load that has everybody's bookings."""

import random
from collections.abc import Sequence

import pytest
from support.prompts import prompt_of

from events import WorkerRank
from events.replica import Ledger, LedgerSettings, Mirror
from events.replica.mirror import Added, Dropped, Grown, Prefilled
from kvrouter.load import Lease, Load, Outcome
from kvrouter.prompt import Prompt
from kvrouter.rank_load import RankLoad
from kvrouter.shared_load import SharedLoad

RANKS = [WorkerRank("a"), WorkerRank("a", 1), WorkerRank("b")]
BLOCK = 4


class Replica:
    """A router's load and what it knows of the others."""

    def __init__(self, name: str, *, grow_blocks: int = 1) -> None:
        self.ledger = Ledger(name, 1, LedgerSettings(grow_blocks=grow_blocks))
        self.mirror = Mirror(name, 1, random.Random(0))
        self.load = Load()
        self.shared = SharedLoad(self.load, self.ledger)
        self.load.journal = self.shared

    def hear(self, other: "Replica", now: float) -> None:
        for ops in other.said:
            for command in self.mirror.hear(ops, now):
                if isinstance(command, Added):
                    self.shared.add(command.key, command.booking, now)
                elif isinstance(command, Prefilled):
                    self.shared.prefilled(command.key, now)
                elif isinstance(command, Grown):
                    self.shared.grow(command.key, command.own_blocks)
                else:
                    assert isinstance(command, Dropped)
                    self.shared.drop(command.key, now)

    def flush(self) -> None:
        self.said = self.ledger.flush()


class World:
    def __init__(self, seed: int, max_tokens: int) -> None:
        self.rng = random.Random(seed)
        self.max_tokens = max_tokens
        self.replicas = [Replica(f"r{number}") for number in range(3)]
        self.central = Load()
        self.leases: list[tuple[Lease, Lease]] = []
        self.now = 0.0

    def prompt(self) -> Prompt:
        """Branches off one of two trunks somewhere."""
        shared = self.rng.randrange(self.max_tokens)
        tail = self.rng.randrange(self.max_tokens - shared)
        trunk = self.rng.choice([1, 1000])
        own = self.rng.randrange(10_000, 10_003)
        return prompt_of([*range(trunk, trunk + shared), *[own] * tail, 7])

    def step(self) -> None:
        self.now += self.rng.random()
        if not self.leases or self.rng.random() < 0.4:
            self._book()
        else:
            pair = self.rng.choice(self.leases)
            what = self.rng.random()
            for lease in pair:
                if what < 0.3:
                    lease.prefill_done(self.now)
                elif what < 0.7:
                    lease.add_output_tokens(5, self.now)
                else:
                    lease.settle(Outcome.OK, self.now)
            if what >= 0.7:
                self.leases.remove(pair)
        self.talk()

    def _book(self) -> None:
        replica = self.rng.choice(self.replicas)
        prompt, rank = self.prompt(), self.rng.choice(RANKS)
        overlap = self.rng.randrange(len(prompt.token_ids) // BLOCK + 1)
        both = [
            load.book(rank, prompt, overlap_blocks=overlap, block_size=BLOCK, now=self.now)
            for load in (replica.shared, self.central)
        ]
        self.leases.append((both[0], both[1]))

    def talk(self) -> None:
        for replica in self.replicas:
            replica.flush()
        for replica in self.replicas:
            for other in self.replicas:
                if other is not replica:
                    replica.hear(other, self.now)
            replica.shared.check()
            replica.load.check()


def exact(load: RankLoad, now: float) -> tuple[int, ...]:
    recent = round(load.recent_tokens(now))
    queued = round(load.queued_tokens(now + 0.5))
    counts = (load.active_requests, load.prefill_tokens, load.decode_tokens)
    return (*counts, recent, queued, round(1000 * load.prefill_rate))


def views(replicas: Sequence[Replica], world: World) -> list[list[tuple[int, ...]]]:
    return [[exact(each, world.now) for each in r.shared.of_each(RANKS).each] for r in replicas]


@pytest.mark.parametrize("seed", range(3))
def test_each_replica_sees_what_one_router_with_all_requests_would_see(seed: int) -> None:
    """R6: prompts of up to 16 blocks are sampled in full, so nothing is approximate."""
    world = World(seed, max_tokens=15 * BLOCK)
    for _ in range(250):
        world.step()
        expected = [exact(each, world.now) for each in world.central.of_each(RANKS).each]
        prompt = world.prompt()
        for replica in world.replicas:
            assert views([replica], world) == [expected]
            active = replica.shared.active_blocks(prompt, BLOCK)
            assert active == world.central.active_blocks(prompt, BLOCK)


@pytest.mark.parametrize("seed", range(2))
def test_long_prompts_are_seen_to_within_what_samples_can_tell(seed: int) -> None:
    """Shared blocks may be counted once per replica where the last sample is before them."""
    world = World(seed, max_tokens=400 * BLOCK)
    for _ in range(100):
        world.step()
        prompt = world.prompt()
        for replica in world.replicas:
            active = replica.shared.active_blocks(prompt, BLOCK)
            for rank, blocks in world.central.active_blocks(prompt, BLOCK).items():
                assert blocks * 8 / 9 - 1 <= active.get(rank, 0) <= blocks
            for rank in RANKS:
                seen = replica.shared.of(rank)
                truth = world.central.of(rank)
                assert exact(seen, world.now)[:2] == exact(truth, world.now)[:2]
                assert truth.decode_tokens <= seen.decode_tokens <= 1.2 * truth.decode_tokens


def test_without_others_all_figures_are_the_own_ones() -> None:
    world = World(1, max_tokens=400 * BLOCK)
    world.replicas = world.replicas[:1]
    for _ in range(200):
        world.step()
        (replica,) = world.replicas
        assert replica.shared.of_each(RANKS) == replica.load.of_each(RANKS)
        assert replica.shared.of_each(RANKS) == world.central.of_each(RANKS)


def test_nothing_is_left_when_all_is_over() -> None:
    world = World(3, max_tokens=60 * BLOCK)
    for _ in range(200):
        world.step()
    for pair in world.leases:
        for lease in pair:
            lease.settle(Outcome.CLIENT_GONE, world.now)
    world.talk()
    for replica in world.replicas:
        for load in replica.shared.of_each(RANKS).each:
            assert exact(load, world.now)[:3] == (0, 0, 0)
        replica.shared.tidy(world.now + 1000)
        assert replica.shared.others_requests == 0
        assert not replica.shared._others
        assert len(replica.ledger) == 0
