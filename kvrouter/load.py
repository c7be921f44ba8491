"""The load of each worker rank: the one source of truth about requests in flight. Pure.

A request is booked in the decision that places it, its prefill is done at the first output byte,
its decode blocks grow with its output, and it is settled once. Nothing expires: a stream of ten
minutes stays booked, and who holds a lease settles it in a `finally`.

What is counted, per rank:

    active requests   leases that are not settled
    prefill tokens    uncached prompt tokens of leases without a first output byte
    decode tokens     distinct active prompt blocks by hash (shared by the rank's requests), blocks
                      of a prompt that have no hash, and blocks that output filled, in tokens
    recent tokens     uncached tokens of the latest bookings, decayed; for ties only
    prefill rate      tokens per second, from the times of first output bytes
    slowness          from the times of outputs, see `pace`

All counts but these last three are integers, so that they come back to 0 exactly. Booking and
settling cost as much as the prompt's hashes take to be compared once, and memory is proportional to
the distinct active blocks.

A removed rank takes its counts with it. Its leases are then detached: they can still be settled,
but touch nothing, not even a rank of the same name that has come back meanwhile.
"""

from collections import Counter
from collections.abc import Mapping, Sequence
from enum import StrEnum
from typing import Protocol

import msgspec

from events import WorkerRank
from kvrouter.active_blocks import ActiveBlocks, Hold
from kvrouter.pace import Paces
from kvrouter.prefills import Prefills
from kvrouter.prompt import HASH_BYTES, Prompt
from kvrouter.rank_load import IDLE, RECENT_HALF_LIFE_S, Loads, RankLoad, decayed, recency

_MOST_STALE, _MOST_VIEWS = 1000, 16
"""Notes and views that are kept; with more of them all begins anew, which costs a look at each."""


class Outcome(StrEnum):
    """How a request ended on a rank: a closed set, used as a metric label."""

    OK = "ok"
    REFUSED = "refused"
    """The engine answered with a 4xx that says the request is wrong."""
    BACKPRESSURE = "backpressure"
    """The engine answered 429 or 503."""
    ENGINE_FAILED = "engine_failed"
    """No connection, a lost one, another 5xx, or an error within the stream."""
    TIMED_OUT = "timed_out"
    CLIENT_GONE = "client_gone"
    INTERNAL_ERROR = "internal_error"
    """Our own bug."""


OK, REFUSED = Outcome.OK, Outcome.REFUSED
"""By names of their own: looking one up in its class costs as much as a call."""


class Journal(Protocol):
    """Who is told of each booking as it changes, right after it was counted."""

    def booked(self, lease: "Lease", hashes: bytes, cached_blocks: int) -> None:
        """A request was booked; `hashes` are its prompt's, of which so many blocks are cached."""

    def prefill_done(self, lease: "Lease", now: float) -> None:
        """Its first output byte is here."""

    def grown(self, lease: "Lease") -> None:
        """Its output fills another block."""

    def over(self, lease: "Lease", now: float) -> None:
        """It is not counted any more."""


class LoadView(Protocol):
    """What a decision needs of the load: that of this router's requests, or of all replicas'."""

    def book(
        self,
        rank: WorkerRank,
        prompt: Prompt,
        *,
        overlap_blocks: float,
        block_size: int,
        now: float,
    ) -> "Lease":
        """Count a request."""

    def of_each(self, ranks: Sequence[WorkerRank]) -> Loads:
        """The load of each of these ranks."""

    def slowness(self, ranks: Sequence[WorkerRank]) -> list[float]:
        """How many times as long as elsewhere outputs take on each rank; empty if on none."""

    def active_blocks(self, prompt: Prompt, block_size: int) -> dict[WorkerRank, int]:
        """How many leading blocks of the prompt are active already, for each rank with any."""


class Totals(msgspec.Struct, frozen=True):
    """Sums over all present ranks, and how many leases were settled with which outcome."""

    active_requests: int
    prefill_tokens: int
    decode_tokens: int
    settled: Mapping[Outcome, int]


class _Entry:
    """The counts of one rank from its first booking to its removal.

    Whoever changes one of them calls `changed`.
    """

    __slots__ = (
        "block_size",
        "decode_tokens",
        "dispatched_at",
        "dispatched_tokens",
        "half_life_s",
        "last_turn",
        "leases",
        "prefills",
        "rank",
        "seen",
        "stale",
    )

    def __init__(self, rank: WorkerRank, half_life_s: float, stale: "list[_Entry]") -> None:
        self.rank = rank
        self.half_life_s = half_life_s
        self.stale = stale
        """Where entries are noted whose counts have changed since somebody saw them."""
        self.block_size = 1
        self.prefills: Prefills[Lease] = Prefills()
        self.decode_tokens = 0
        self.dispatched_tokens = 0.0
        self.dispatched_at = 0.0
        self.last_turn = 0
        self.leases: set[Lease] = set()
        self.seen: RankLoad | None = None
        """The counts as one value, until they change."""

    def changed(self) -> None:
        """One of the counts is another now."""
        if self.seen is not None:
            self.seen = None
            self.stale.append(self)

    def look(self) -> RankLoad:
        """The counts; made anew only after a change, for decisions look at all ranks each time."""
        if self.seen is not None:
            return self.seen
        prefills = self.prefills
        oldest = prefills.oldest
        self.seen = RankLoad(
            len(self.leases),
            prefills.tokens,
            self.decode_tokens,
            self.last_turn,
            self.block_size,
            prefills.rate,
            oldest.tokens,
            oldest.booked_at,
            prefills.working_since,
            self.dispatched_tokens,
            self.dispatched_at,
            self.half_life_s,
            recency(self.dispatched_tokens, self.dispatched_at, self.half_life_s),
        )
        return self.seen

    def dispatched(self, uncached_tokens: int, turn: int, block_size: int, now: float) -> None:
        """A request is booked."""
        self.last_turn = turn
        self.block_size = block_size
        age_s = now - self.dispatched_at
        recent = decayed(self.dispatched_tokens, age_s, self.half_life_s)
        self.dispatched_tokens = recent + uncached_tokens
        self.dispatched_at = now
        self.changed()

    def refused(self, uncached_tokens: int, booked_at: float, now: float) -> None:
        """A request that was booked then turned out to be no work."""
        faded = 0.5 ** (max(0.0, now - booked_at) / self.half_life_s)
        recent = self.look().recent_tokens(now) - uncached_tokens * faded
        self.dispatched_tokens = recent if recent >= 1.0 else 0.0  # no crumbs of rounding
        self.dispatched_at = now
        self.changed()


class Lease:
    """One booked request on one rank. Every method may be called late, early or again.

    A new one enters the request into its rank's counts; see `Load.book`.
    """

    __slots__ = (
        "_entry",
        "_full_at",
        "_hashed_blocks",
        "_hold",
        "_length",
        "_load",
        "_own_blocks",
        "block_size",
        "booked_at",
        "number",
        "outcome",
        "output_tokens",
        "prefill_done_at",
        "prefill_tokens",
        "rank",
        "settled_at",
    )

    def __init__(
        self,
        load: "Load",
        entry: _Entry,
        prompt: Prompt,
        hashes: bytes,
        prefill_tokens: int,
        block_size: int,
        now: float,
    ) -> None:
        self.rank = entry.rank
        self.number = entry.last_turn
        """Of all bookings of this load, from 1 on."""
        self.prefill_tokens = prefill_tokens
        """Prompt tokens that the rank was expected not to have cached."""
        self.block_size = block_size
        self.booked_at = now
        self.prefill_done_at: float | None = None
        self.output_tokens = 0
        self.outcome: Outcome | None = None
        self.settled_at: float | None = None
        self._load = load
        self._entry: _Entry | None = entry
        self._length = max(prompt.prompt_tokens, len(prompt.token_ids))
        self._hashed_blocks = len(hashes) // HASH_BYTES
        blocks = -(-self._length // block_size)
        self._own_blocks = blocks - self._hashed_blocks
        """Blocks that no hash names: the prompt's last part, and output."""
        self._full_at = blocks * block_size - self._length
        """So many output tokens fill the blocks that are counted."""
        self._hold: tuple[ActiveBlocks, Hold] | None = None
        added_blocks = self._own_blocks
        if hashes:
            tree = load._tree(block_size)  # noqa: SLF001 - a lease is a part of its load
            hold = tree.hold(entry.rank, hashes)
            self._hold = (tree, hold)
            added_blocks += hold.added_blocks
        entry.decode_tokens += added_blocks * block_size
        entry.leases.add(self)
        entry.prefills.add(self, prefill_tokens, now)

    def prefill_done(self, now: float) -> None:
        """The first output byte is here."""
        if self.prefill_done_at is not None or self.outcome is not None:
            return
        self.prefill_done_at = now
        if self._entry is not None:
            self._entry.prefills.done(self, now)
            self._entry.changed()
            if self._load.journal is not None:
                self._load.journal.prefill_done(self, now)

    @property
    def blocks(self) -> int:
        """The blocks that the request fills by now, shared ones and the last, part-filled one."""
        return self._hashed_blocks + self._own_blocks

    def add_output_tokens(self, n: int, now: float) -> None:
        """The engine sent `n` more tokens, which also says that the prefill is over, by `now`."""
        if n <= 0 or self.outcome is not None:
            return
        if self.prefill_done_at is None:
            self.prefill_done(now)
        self.output_tokens += n
        if self.output_tokens > self._full_at and self._grow() and self._load.journal is not None:
            self._load.journal.grown(self)

    def settle(self, outcome: Outcome, now: float) -> bool:
        """The request is over on this rank. True the first time; the first outcome stands."""
        if self.outcome is not None:
            return False
        self.outcome = outcome
        self.settled_at = now
        self._load._settled[outcome] += 1  # noqa: SLF001 - a lease is a part of its load
        entry = self._entry
        if entry is None:
            return True
        if outcome is OK and self.prefill_done_at is not None and self.output_tokens > 1:
            self._load.paces.learn(
                self.rank,
                active=len(entry.leases),
                tokens=self.output_tokens - 1,
                taken_s=now - self.prefill_done_at,
                now=now,
            )
        if outcome is REFUSED:
            entry.refused(self.prefill_tokens, self.booked_at, now)
        self.detach(now)
        return True

    def detach(self, now: float) -> None:
        """Take the request out of its rank's counts; nothing that comes later touches them.

        Called by `settle` and `Load.remove`.
        """
        entry = self._entry
        if entry is None:
            return
        self._entry = None
        if self.prefill_done_at is None:
            entry.prefills.drop(self, now)
        entry.leases.discard(self)
        freed_blocks = self._own_blocks
        if self._hold is not None:
            tree, hold = self._hold
            freed_blocks += tree.release(hold)
            self._hold = None
        entry.decode_tokens -= freed_blocks * self.block_size
        entry.changed()
        if self._load.journal is not None:
            self._load.journal.over(self, now)

    def _grow(self) -> bool:
        """Count the blocks that output has come to fill. True if their number has changed."""
        length, size = self._length + self.output_tokens, self.block_size
        blocks = -(-length // size) - self._hashed_blocks
        self._full_at = (self._hashed_blocks + blocks) * size - self._length
        if self._entry is not None and blocks != self._own_blocks:
            self._entry.decode_tokens += (blocks - self._own_blocks) * self.block_size
            self._entry.changed()
            self._own_blocks = blocks
            return True
        return False


class _View:
    """The loads of ranks that are asked for again and again, as of when they were last."""

    __slots__ = ("_positions", "loads", "ranks", "seen")

    def __init__(self, ranks: tuple[WorkerRank, ...], loads: Loads, seen: int) -> None:
        self.ranks = ranks
        self.loads = loads
        self.seen = seen
        """How many of the notes of stale entries it has taken in."""
        self._positions = {rank: position for position, rank in enumerate(ranks)}

    def update(self, stale: Sequence[_Entry]) -> None:
        """Take in what was noted since."""
        for entry in stale[self.seen :]:
            position = self._positions.get(entry.rank)
            if position is not None:
                self.loads.put(position, entry.look())
        self.seen = len(stale)


class Load:
    """The load of all ranks that had a booking since they were last removed.

    `journal`, where there is one, is told of every change.
    """

    def __init__(self, *, recent_half_life_s: float = RECENT_HALF_LIFE_S) -> None:
        self.journal: Journal | None = None
        self.paces = Paces()
        self._half_life_s = recent_half_life_s
        self._entries: dict[WorkerRank, _Entry] = {}
        self._trees: dict[int, ActiveBlocks] = {}
        self._views: dict[int, _View] = {}  # by the identity of the tuple that is asked for
        self._stale: list[_Entry] = []  # whose counts changed since they were seen
        self._turn = 0
        self._settled: Counter[Outcome] = Counter()

    def book(
        self,
        rank: WorkerRank,
        prompt: Prompt,
        *,
        overlap_blocks: float,
        block_size: int,
        now: float,
    ) -> Lease:
        """Count a request on `rank`, of whose prompt it holds `overlap_blocks` (with credit)."""
        uncached = max(1, prompt.prompt_tokens - int(overlap_blocks * block_size))
        entry = self._entries.get(rank)
        if entry is None:
            entry = self._entries[rank] = _Entry(rank, self._half_life_s, self._stale)
            self._stale.append(entry)
        self._turn += 1
        entry.dispatched(uncached, self._turn, block_size, now)
        hashes = prompt.hashes(block_size)
        lease = Lease(self, entry, prompt, hashes, uncached, block_size, now)
        if self.journal is not None:
            self.journal.booked(lease, hashes, int(overlap_blocks))
        return lease

    def of(self, rank: WorkerRank) -> RankLoad:
        """The load of `rank`; idle if it never had a booking."""
        entry = self._entries.get(rank)
        return entry.look() if entry is not None else IDLE

    def of_each(self, ranks: Sequence[WorkerRank]) -> Loads:
        """The load of each of these ranks, of which none is there twice.

        Who asks for the same tuple again and again pays for what has changed alone.
        """
        view = self._views.get(id(ranks))
        if view is None or len(self._stale) > _MOST_STALE:
            view = self._look(ranks)
        elif view.seen < len(self._stale):
            view.update(self._stale)
        return view.loads.copy()

    def slowness(self, ranks: Sequence[WorkerRank]) -> list[float]:
        """How many times as long as elsewhere outputs take on each rank; empty if on none."""
        return self.paces.slowness(ranks) if self.paces.slow else []

    def _look(self, ranks: Sequence[WorkerRank]) -> _View:
        """A new view, which is kept if it is one of a tuple: that can't change."""
        if len(self._stale) > _MOST_STALE or len(self._views) == _MOST_VIEWS:
            self._stale.clear()
            self._views.clear()
        view = _View(tuple(ranks), Loads.of(list(map(self.of, ranks))), len(self._stale))
        if view.ranks is ranks:
            self._views[id(ranks)] = view
        return view

    def active_blocks(self, prompt: Prompt, block_size: int) -> dict[WorkerRank, int]:
        """How many leading blocks of the prompt are active already, for each rank with any."""
        return self._tree(block_size).leading(prompt.hashes(block_size))

    def remove(self, rank: WorkerRank) -> None:
        """Forget the rank and detach its leases."""
        entry = self._entries.pop(rank, None)
        self.paces.forget(rank)
        if entry is not None:
            for lease in tuple(entry.leases):
                lease.detach(lease.booked_at)
            entry.seen = IDLE  # for ever: nobody has it any more who could change it
            self._stale.append(entry)

    def ranks(self) -> Sequence[WorkerRank]:
        """The ranks that had a booking since they were last removed."""
        return tuple(self._entries)

    @property
    def totals(self) -> Totals:
        """Sums over all present ranks."""
        entries = self._entries.values()
        return Totals(
            active_requests=sum(len(entry.leases) for entry in entries),
            prefill_tokens=sum(entry.prefills.tokens for entry in entries),
            decode_tokens=sum(entry.decode_tokens for entry in entries),
            settled=dict(self._settled),
        )

    def check(self) -> None:
        """Raise AssertionError unless every count equals a recount over the leases."""
        hashed_tokens: Counter[WorkerRank] = Counter()
        for block_size, tree in self._trees.items():
            tree.check()
            for rank, blocks in tree.recount().items():
                hashed_tokens[rank] += blocks * block_size
        _require(hashed_tokens.keys() <= self._entries.keys(), "removed ranks hold no blocks")
        for rank, entry in self._entries.items():
            _check_entry(entry, hashed_tokens[rank])
        for view in tuple(self._views.values()):  # to look may begin anew
            seen = Loads.of(list(map(self.of, view.ranks)))
            _require(self.of_each(view.ranks) == seen, "a view is what a look at each rank gives")

    def _tree(self, block_size: int) -> ActiveBlocks:
        tree = self._trees.get(block_size)
        if tree is None:
            tree = self._trees[block_size] = ActiveBlocks()
        return tree


def _check_entry(entry: _Entry, hashed_tokens: int) -> None:
    waiting = {lease for lease in entry.leases if lease.prefill_done_at is None}
    prefill_tokens = sum(lease.prefill_tokens for lease in waiting)
    own_tokens = sum(lease._own_blocks * lease.block_size for lease in entry.leases)  # noqa: SLF001 - a recount
    _require(all(lease.outcome is None for lease in entry.leases), "no settled lease is counted")
    _require(
        waiting == entry.prefills.waiting.keys(), "waiting are those without a first output byte"
    )
    _require(prefill_tokens == entry.prefills.tokens, "prefill tokens are those of the waiting")
    _require(hashed_tokens + own_tokens == entry.decode_tokens, "decode tokens are shared and own")
    _require(prefill_tokens >= 0 <= own_tokens, "no count is negative")
    seen = entry.look()
    entry.seen = None
    _require(seen == entry.look(), "what was seen is true until a change")


def _require(holds: bool, rule: str) -> None:
    if not holds:
        raise AssertionError(f"load: {rule}")
