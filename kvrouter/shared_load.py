"""The load of all replicas: this router's own bookings, and what the others tell of theirs. Pure.

`Load` stays the one source of truth about own bookings; this is a view on top of it that adds the
others' per rank, and the journal that has the own ones told. What is said of others lags by a
message, and that costs a worse choice, never a booking.

Active requests, queued prefill and recent tokens add up. Active blocks don't: a prefix that two
replicas have in use on one rank is there once. So the sampled prompts of everybody's bookings stand
in one tree, those of the own ones in another, and the difference between what the two hold on a
rank is what the others add to the exact own count. A prefix in common is seen up to the last sample
in it, at most a ninth too short; what is not seen counts twice. Without other replicas all figures
are the exact ones.

Turns (round robin) are each router's own.
"""

from collections.abc import Callable, Sequence
from typing import NamedTuple

import msgspec

from events import WorkerRank
from events.replica import Booking, Ledger, blocks_of, sample
from events.replica.mirror import Key
from kvrouter.active_blocks import ActiveBlocks, Hold
from kvrouter.load import Lease, Load
from kvrouter.prefills import Prefills
from kvrouter.prompt import HASH_BYTES, Prompt
from kvrouter.rank_load import IDLE, RECENT_HALF_LIFE_S, Loads, RankLoad, recency

_FADED_HALF_LIVES = 10


class Sampler:
    """Samples of hashes, remembered for the last ones: a decision asks for them again and again."""

    def __init__(self) -> None:
        self._hashes = b""
        self._samples = b""

    def __call__(self, hashes: bytes) -> bytes:
        """The samples of these hashes."""
        if hashes is not self._hashes:
            self._hashes, self._samples = hashes, sample(hashes)
        return self._samples


class SampledBlocks:
    """Active sampled prompts of one block size, and how many tokens they stand for on each rank."""

    def __init__(self, block_size: int) -> None:
        self._block_size = block_size
        self._tree = ActiveBlocks()
        self.tokens: dict[WorkerRank, int] = {}

    def hold(self, rank: WorkerRank, samples: bytes) -> Hold:
        """A booking with these samples becomes active."""
        hold = self._tree.hold(rank, samples)
        self._count(rank, len(samples) // HASH_BYTES, hold.added_blocks)
        return hold

    def release(self, hold: Hold, samples: int) -> None:
        """The booking, which has so many samples, is over."""
        self._count(hold.rank, samples, -self._tree.release(hold))

    def _count(self, rank: WorkerRank, samples: int, added: int) -> None:
        """Who holds a block holds all before it: what comes and goes are the last samples."""
        blocks = blocks_of(samples) - blocks_of(samples - abs(added))
        tokens = blocks * self._block_size
        total = self.tokens.get(rank, 0) + (tokens if added > 0 else -tokens)
        if total:
            self.tokens[rank] = total
        else:
            self.tokens.pop(rank, None)

    def leading(self, samples: bytes) -> dict[WorkerRank, int]:
        """How many leading blocks are active, for each rank with any."""
        found = self._tree.leading(samples)
        return {rank: blocks_of(count) for rank, count in found.items()}

    def check(self) -> None:
        """Raise AssertionError if an invariant is broken."""
        self._tree.check()
        if self._tree.recount().keys() != self.tokens.keys():
            raise AssertionError("sampled blocks: ranks with blocks are ranks with tokens")
        if any(tokens <= 0 for tokens in self.tokens.values()):
            raise AssertionError("sampled blocks: no count is negative")


class _Others:
    """What the others have booked on one rank."""

    __slots__ = (
        "block_size",
        "own",
        "own_tokens",
        "prefill_tokens",
        "recent",
        "requests",
        "total",
    )

    def __init__(self) -> None:
        self.block_size = 1
        self.requests = 0
        self.prefill_tokens = 0
        self.own_tokens = 0
        self.recent = (0.0, 0.0)
        """Uncached tokens of the latest bookings, and when that was right."""
        self.own: RankLoad | None = None
        """An own load, and `total`, its sum with this, until one of the two changes."""
        self.total = IDLE

    def recent_at(self, now: float, half_life_s: float) -> float:
        tokens, at = self.recent
        decay: float = 0.5 ** (max(0.0, now - at) / half_life_s)
        return tokens * decay


class _Remote(NamedTuple):
    rank: WorkerRank
    booking: Booking
    hold: Hold


class SharedLoad:
    """The load that decisions go by, and the journal of `load`, which tells `ledger`."""

    def __init__(
        self, load: Load, ledger: Ledger, *, recent_half_life_s: float = RECENT_HALF_LIFE_S
    ) -> None:
        self._load = load
        self._ledger = ledger
        self.on_news: Callable[[], None] | None = None
        """Called when the ledger has something to tell."""
        self._half_life_s = recent_half_life_s
        self._sample = Sampler()
        self._own: dict[int, SampledBlocks] = {}
        self._all: dict[int, SampledBlocks] = {}
        self._own_holds: dict[Lease, tuple[Booking, Hold, Hold]] = {}
        self._remote: dict[Key, _Remote] = {}
        self._others: dict[WorkerRank, _Others] = {}
        self._prefills: dict[WorkerRank, Prefills[Lease | Key]] = {}
        """Of all replicas: only together they show how far a rank is and how fast."""

    # Own bookings change: the journal of the load.

    def booked(self, lease: Lease, hashes: bytes, cached_blocks: int) -> None:
        """A request was booked here."""
        size = lease.block_size
        booking = self._ledger.book(
            lease.number,
            lease.rank,
            hashes=hashes,
            cached_blocks=cached_blocks,
            all_blocks=lease.blocks,
            block_size=size,
            prefill_tokens=lease.prefill_tokens,
            now=lease.booked_at,
        )
        own, everybody = self._trees(size)
        place = (lease.rank, booking.samples)
        self._own_holds[lease] = (booking, own.hold(*place), everybody.hold(*place))
        self._prefills_on(lease.rank).add(lease, lease.prefill_tokens, lease.booked_at)
        self._has_news()

    def prefill_done(self, lease: Lease, now: float) -> None:
        """Its first output byte is here."""
        self._prefills_on(lease.rank).done(lease, now)
        self._ledger.prefill_done(lease.number)
        self._has_news()

    def grown(self, lease: Lease) -> None:
        """Its output fills another block."""
        self._ledger.grow(lease.number, lease.blocks)
        if self._ledger.has_news:
            self._has_news()

    def over(self, lease: Lease, now: float) -> None:
        """It is over."""
        self._prefills_on(lease.rank).drop(lease, now)
        self._ledger.settle(lease.number)
        booking, own_hold, hold = self._own_holds.pop(lease)
        own, everybody = self._trees(booking.block_size)
        samples = len(booking.samples) // HASH_BYTES
        own.release(own_hold, samples)
        everybody.release(hold, samples)
        self._has_news()

    def _has_news(self) -> None:
        if self.on_news is not None:
            self.on_news()

    # Bookings of others change.

    def add(self, key: Key, booking: Booking, now: float) -> None:
        """Another replica has this booking."""
        rank = WorkerRank(booking.worker, booking.dp_rank)
        others = self._others.get(rank)
        if others is None:
            others = self._others[rank] = _Others()
        _, everybody = self._trees(booking.block_size)
        hold = everybody.hold(rank, booking.samples)
        self._remote[key] = _Remote(rank, booking, hold)
        others.block_size = booking.block_size
        others.requests += 1
        others.own_tokens += booking.own_blocks * booking.block_size
        others.own = None
        if booking.waiting:
            others.prefill_tokens += booking.prefill_tokens
            booked_at = now - booking.age_ms / 1000
            self._prefills_on(rank).add(key, booking.prefill_tokens, booked_at)
        faded = 0.5 ** (booking.age_ms / 1000 / self._half_life_s)
        recent = others.recent_at(now, self._half_life_s) + booking.prefill_tokens * faded
        others.recent = (recent, now)

    def prefilled(self, key: Key, now: float) -> None:
        """Its first output byte was there, just now."""
        rank = self._remote[key].rank
        others = self._others[rank]
        others.prefill_tokens -= self._prefills_on(rank).done(key, now)
        others.own = None

    def grow(self, key: Key, own_blocks: int) -> None:
        """It has so many blocks of its own by now."""
        remote = self._remote[key]
        booking = remote.booking
        grown = own_blocks - booking.own_blocks
        others = self._others[remote.rank]
        others.own_tokens += grown * booking.block_size
        others.own = None
        changed = msgspec.structs.replace(booking, own_blocks=own_blocks)
        self._remote[key] = remote._replace(booking=changed)

    def drop(self, key: Key, now: float) -> None:
        """It is over, or its replica is."""
        rank, booking, hold = self._remote.pop(key)
        others = self._others[rank]
        others.own = None
        others.prefill_tokens -= self._prefills_on(rank).drop(key, now)
        others.requests -= 1
        others.own_tokens -= booking.own_blocks * booking.block_size
        everybody = self._trees(booking.block_size)[1]
        everybody.release(hold, len(booking.samples) // HASH_BYTES)

    def tidy(self, now: float) -> None:
        """Forget ranks on which the others have had nothing for long."""
        faded_s = _FADED_HALF_LIVES * self._half_life_s
        for rank, others in list(self._others.items()):
            if not others.requests and others.recent[1] + faded_s < now:
                del self._others[rank]
        for rank, prefills in list(self._prefills.items()):
            is_unknown = rank not in self._others and self._load.of(rank) is IDLE
            if is_unknown and not prefills.waiting and prefills.working_since + faded_s < now:
                del self._prefills[rank]

    # Questions

    @property
    def load(self) -> Load:
        """The own bookings."""
        return self._load

    @property
    def others_requests(self) -> int:
        """Bookings of other replicas."""
        return len(self._remote)

    def book(
        self,
        rank: WorkerRank,
        prompt: Prompt,
        *,
        overlap_blocks: float,
        block_size: int,
        now: float,
    ) -> Lease:
        """Count a request of this router."""
        return self._load.book(
            rank, prompt, overlap_blocks=overlap_blocks, block_size=block_size, now=now
        )

    def of(self, rank: WorkerRank) -> RankLoad:
        """The load of `rank` from all replicas."""
        return self.of_each([rank]).each[0]

    def of_each(self, ranks: Sequence[WorkerRank]) -> Loads:
        """The load of each of these ranks from all replicas."""
        loads = self._load.of_each(ranks)
        if not self._others:
            return loads
        get = self._others.get
        return Loads.of(
            [
                own
                if (more := get(rank)) is None
                else more.total
                if more.own is own
                else self._look(rank, own, more)
                for rank, own in zip(ranks, loads.each, strict=True)
            ]
        )

    def _look(self, rank: WorkerRank, own: RankLoad, more: _Others) -> RankLoad:
        """Add both anew, after a change only: decisions look at all ranks each time."""
        more.own, more.total = own, self._sum(rank, own, more)
        return more.total

    def slowness(self, ranks: Sequence[WorkerRank]) -> list[float]:
        """How slow each rank is, by the own requests; empty if none is."""
        return self._load.slowness(ranks)

    def ranks_of_others(self) -> Sequence[WorkerRank]:
        """The ranks on which other replicas have, or lately had, bookings."""
        return tuple(self._others)

    def of_others(self, rank: WorkerRank) -> RankLoad:
        """What the other replicas add to a rank's load."""
        more = self._others.get(rank)
        return IDLE if more is None else self._sum(rank, IDLE, more)

    def _sum(self, rank: WorkerRank, own: RankLoad, more: _Others) -> RankLoad:
        """Both together."""
        shared_tokens = 0
        if more.requests:
            for size, everybody in self._all.items():
                shared_tokens += everybody.tokens.get(rank, 0) - self._own[size].tokens.get(rank, 0)
        recent_at = max(own.dispatched_at, more.recent[1])
        recent = own.recent_tokens(recent_at) + more.recent_at(recent_at, self._half_life_s)
        prefills = self._prefills_on(rank)
        oldest = prefills.oldest
        return msgspec.structs.replace(
            own,
            active_requests=own.active_requests + more.requests,
            prefill_tokens=own.prefill_tokens + more.prefill_tokens,
            decode_tokens=own.decode_tokens + more.own_tokens + shared_tokens,
            prefill_rate=prefills.rate,
            oldest_tokens=oldest.tokens,
            oldest_at=oldest.booked_at,
            working_since=prefills.working_since,
            dispatched_tokens=recent,
            dispatched_at=recent_at,
            recency=recency(recent, recent_at, self._half_life_s),
            block_size=own.block_size if own.last_turn else more.block_size,
        )

    def active_blocks(self, prompt: Prompt, block_size: int) -> dict[WorkerRank, int]:
        """How many leading blocks of the prompt are active already, for each rank with any."""
        found = self._load.active_blocks(prompt, block_size)
        if self._remote and block_size in self._all:
            samples = self._sample(prompt.hashes(block_size))
            for rank, blocks in self._all[block_size].leading(samples).items():
                if blocks > found.get(rank, 0):
                    found[rank] = blocks
        return found

    def check(self) -> None:
        """Raise AssertionError if an invariant is broken."""
        for blocks in (*self._own.values(), *self._all.values()):
            blocks.check()
        for rank, others in self._others.items():
            held = {key: each for key, each in self._remote.items() if each.rank == rank}
            prefills = self._prefills_on(rank).waiting
            waiting = sum(each.booking.prefill_tokens for k, each in held.items() if k in prefills)
            own = sum(each.booking.own_blocks * each.booking.block_size for each in held.values())
            if (others.requests, others.prefill_tokens, others.own_tokens) != (
                len(held),
                waiting,
                own,
            ):
                raise AssertionError(
                    f"shared load: the counts of {rank} are not those of a recount"
                )

    def _prefills_on(self, rank: WorkerRank) -> "Prefills[Lease | Key]":
        prefills = self._prefills.get(rank)
        if prefills is None:
            prefills = self._prefills[rank] = Prefills()
        return prefills

    def _trees(self, block_size: int) -> tuple[SampledBlocks, SampledBlocks]:
        own = self._own.get(block_size)
        if own is None:
            own = self._own[block_size] = SampledBlocks(block_size)
            self._all[block_size] = SampledBlocks(block_size)
        return own, self._all[block_size]
