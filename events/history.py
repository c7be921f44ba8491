"""What of a publisher's batches was applied, and what waits to be."""

from bisect import bisect_left
from collections import deque
from typing import NamedTuple

import msgspec
from xxhash import xxh3_64_intdigest


class Message(NamedTuple):
    """One published batch, still encoded."""

    seqno: int
    payload: bytes


class Position(msgspec.Struct, array_like=True, frozen=True):
    """How far somebody has followed a publisher: all below `next`, `digests` of the newest of them.

    `cold`: blocks that the engine holds may be unknown there.
    """

    next: int
    digests: list[int]
    cold: bool

    @property
    def first(self) -> int:
        """The lowest seqno of which there is a digest."""
        return self.next - len(self.digests)

    def has(self, message: Message) -> bool:
        """Whether this very batch is among the newest."""
        at = message.seqno - self.first
        return 0 <= at < len(self.digests) and self.digests[at] == _digest(message.payload)


class History:
    """Which batches were applied: all below `next`, of which the newest are remembered by digest.

    A payload carries its time stamp, so two engines never publish equal ones.
    """

    def __init__(self, remembered_batches: int) -> None:
        self.next = 0
        self._digests: deque[int] = deque(maxlen=remembered_batches)

    def __len__(self) -> int:
        """How many batches are remembered: those right below `next`."""
        return len(self._digests)

    def add(self, message: Message) -> None:
        """`message`, whose seqno is `next`, was applied."""
        self.next = message.seqno + 1
        self._digests.append(_digest(message.payload))

    def skip_to(self, seqno: int) -> None:
        """What is below `seqno` was given up."""
        self.next = seqno
        self._digests.clear()

    def has(self, message: Message) -> bool:
        """Whether this very batch is remembered."""
        return self._digest(message.seqno) == _digest(message.payload)

    def contradicts(self, message: Message) -> bool:
        """Whether another batch of this seqno is remembered."""
        return self._digest(message.seqno) not in (None, _digest(message.payload))

    def position(self, *, cold: bool) -> Position:
        """For somebody who goes on from here."""
        return Position(self.next, list(self._digests), cold)

    def restore(self, position: Position) -> None:
        """Go on from there."""
        self.next = position.next
        self._digests.clear()
        self._digests.extend(position.digests)

    def _digest(self, seqno: int) -> int | None:
        at = seqno - (self.next - len(self._digests))
        return self._digests[at] if 0 <= at < len(self._digests) else None


def _digest(payload: bytes) -> int:
    """The same in every process."""
    return xxh3_64_intdigest(payload)


class Backlog:
    """Batches that wait: in the order of their seqnos, each once, bounded in number and bytes."""

    def __init__(self, max_batches: int, max_bytes: int) -> None:
        self._max_batches = max_batches
        self._max_bytes = max_bytes
        self._messages: deque[Message] = deque()
        self._bytes = 0

    def __len__(self) -> int:
        return len(self._messages)

    @property
    def first(self) -> int | None:
        """The lowest seqno that waits."""
        return self._messages[0].seqno if self._messages else None

    @property
    def last(self) -> int | None:
        """The highest seqno that waits."""
        return self._messages[-1].seqno if self._messages else None

    @property
    def overfull(self) -> bool:
        """Whether there is more than the bounds allow; then `clear` it."""
        return len(self._messages) > self._max_batches or self._bytes > self._max_bytes

    def add(self, message: Message) -> bool:
        """Keep `message`; False if its seqno waits already."""
        messages = self._messages
        if not messages or message.seqno > messages[-1].seqno:
            messages.append(message)
        else:
            at = bisect_left(messages, message.seqno, key=lambda held: held.seqno)
            if messages[at].seqno == message.seqno:
                return False
            messages.insert(at, message)
        self._bytes += len(message.payload)
        return True

    def pop(self) -> Message:
        """Take the lowest."""
        message = self._messages.popleft()
        self._bytes -= len(message.payload)
        return message

    def drop_below(self, seqno: int) -> int:
        """Drop what is below `seqno`; returns how many that were."""
        before = len(self._messages)
        while self._messages and self._messages[0].seqno < seqno:
            self.pop()
        return before - len(self._messages)

    def clear(self) -> None:
        """Drop everything."""
        self._messages.clear()
        self._bytes = 0

    def check(self) -> None:
        """Raise AssertionError if an invariant is broken."""
        seqnos = [message.seqno for message in self._messages]
        size = sum(len(message.payload) for message in self._messages)
        if seqnos != sorted(set(seqnos)) or size != self._bytes or self.overfull:
            raise AssertionError(f"backlog of {len(seqnos)} batches, {self._bytes} bytes")
