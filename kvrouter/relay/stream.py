"""One rank as its relay publishes it: numbered, with a history and a state to answer from. Pure."""

from collections import deque
from typing import TypeAlias

from events import EventBatch
from events.relayed import (
    Answer,
    Batch,
    Head,
    StatePart,
    Want,
    to_wire,
)
from events.stream import StreamState
from indexer.hashing import RULE_VERSION
from kvrouter.relay.copy import RankCopy

HISTORY_BATCHES = 4096
HISTORY_BLOCKS = 500_000
STATE_PART_EVENTS = 64
STATE_AGE_BATCHES = 1024
"""How many batches may come on top of a state before it is made anew."""
ANSWER_BYTES = 256 * 1024
"""What is sent in one message of an answer: well below what NATS allows, 1 MiB by default."""
_OVERHEAD_BYTES = 32

_Body: TypeAlias = Batch | StatePart | Head


class RankStream:
    """What a relay says of one rank. `epoch` must be above that of any stream before."""

    def __init__(self, epoch: int) -> None:
        self.epoch = epoch
        self.next = 0
        self.stream = StreamState.CONNECTING
        self.states_made = 0
        self._copy = RankCopy()
        self._history: deque[Batch] = deque()
        self._history_blocks = 0
        self._state: tuple[int, list[StatePart]] | None = None

    @property
    def blocks(self) -> int:
        """How many blocks the rank has."""
        return len(self._copy)

    @property
    def block_size(self) -> int | None:
        """In tokens, as the events have it; None before the first stored block."""
        return self._copy.block_size

    def take(self, batch: EventBatch) -> Batch:
        """A batch of the engine; what is to be published."""
        events = to_wire(self._copy.apply(batch))
        published = Batch(self.epoch, self.next, batch.ts_s, events)
        self.next += 1
        self._history.append(published)
        self._history_blocks += _blocks(published)
        while len(self._history) > HISTORY_BATCHES or self._history_blocks > HISTORY_BLOCKS:
            self._history_blocks -= _blocks(self._history.popleft())
        return published

    def restart(self) -> Head:
        """What was said of the rank is not true any more; what is to be published."""
        self.epoch += 1
        self.next = 0
        self._copy.clear()
        self._history.clear()
        self._history_blocks = 0
        self._state = None
        return self.head()

    def head(self) -> Head:
        """How far we are."""
        return Head(self.epoch, self.next, self.stream.value, RULE_VERSION)

    def answer(self, want: Want) -> list[Answer]:
        """What was missed, or else the state and what has come since it was made."""
        bodies: list[_Body] = []
        if want.epoch == self.epoch and self._first <= want.start <= self.next:
            bodies += self._since(want.start)
        else:
            at, parts = self._made_state()
            bodies += [*parts, *self._since(at)]
        bodies.append(self.head())
        bundles = _bundles(bodies)
        return [
            Answer(want.attempt, number, len(bundles), bundle)
            for number, bundle in enumerate(bundles)
        ]

    @property
    def _first(self) -> int:
        """The oldest batch that is remembered."""
        return self.next - len(self._history)

    def _since(self, start: int) -> list[Batch]:
        return [batch for batch in self._history if batch.seqno >= start]

    def _made_state(self) -> tuple[int, list[StatePart]]:
        """A state, not too old: routers that start together, or again and again, share one."""
        oldest = max(self._first, self.next - STATE_AGE_BATCHES)
        if self._state is None or self._state[0] < oldest:
            events = to_wire(self._copy.state())
            width = STATE_PART_EVENTS
            parts = [
                StatePart(self.epoch, self.next, events[at : at + width])
                for at in range(0, len(events), width)
            ]
            self._state = (self.next, parts)
            self.states_made += 1
        return self._state


def _bundles(bodies: list[_Body]) -> list[list[_Body]]:
    """Bodies that fit into one message together."""
    bundles: list[list[_Body]] = [[]]
    size = 0
    for body in bodies:
        size += _size(body)
        if bundles[-1] and size > ANSWER_BYTES:
            bundles.append([])
            size = _size(body)
        bundles[-1].append(body)
    return bundles


def _size(body: _Body) -> int:
    """About how many bytes it will be."""
    if isinstance(body, Head):
        return _OVERHEAD_BYTES
    named = (len(getattr(event, "names", b"")) for event in body.events)
    return _OVERHEAD_BYTES + sum(_OVERHEAD_BYTES + 2 * size for size in named)


def _blocks(batch: Batch) -> int:
    return sum(len(getattr(event, "names", b"")) for event in batch.events) // 8
