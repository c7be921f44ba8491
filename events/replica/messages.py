"""The messages between replicas and their bytes (msgpack arrays, version 1).

Every message names its sender by `replica` (a name that no two running replicas share) and `epoch`
(of two processes with one name, the later one has the higher). Fields may be added at the end of
each; what an older replica does not know it ignores.
"""

from typing import TypeAlias

import msgspec
from msgspec import Struct, msgpack

from events.history import Position


class MalformedMessage(ValueError):  # noqa: N818  the name says what it is
    """Bytes that are no message of this version."""


class Booking(Struct, array_like=True, frozen=True, gc=False):
    """One request in flight, as far as its cost needs it.

    `prefill_tokens` are uncached prompt tokens; they count while `waiting` for the first output
    byte. `samples` are the sampled hashes of the prompt's blocks (see `sampling`), the first
    `cached_samples` of which the rank was expected to hold; `own_blocks` are the blocks that the
    samples don't stand for: the rest of the prompt, and output. `age_ms` is since it was booked.
    """

    lease: int
    worker: str
    dp_rank: int
    block_size: int
    prefill_tokens: int
    waiting: bool
    own_blocks: int
    cached_samples: int
    samples: bytes
    age_ms: int = 0


class Book(Struct, array_like=True, tag=0, frozen=True, gc=False):
    """A request was placed."""

    booking: Booking


class PrefillDone(Struct, array_like=True, tag=1, frozen=True, gc=False):
    """Its first output byte is here."""

    lease: int


class Grow(Struct, array_like=True, tag=2, frozen=True, gc=False):
    """It has so many blocks of its own now."""

    lease: int
    own_blocks: int


class Settle(Struct, array_like=True, tag=3, frozen=True, gc=False):
    """It is over."""

    lease: int


Op: TypeAlias = Book | PrefillDone | Grow | Settle


class Ops(Struct, array_like=True, tag="ops", frozen=True, gc=False):
    """What happened, in order. Numbered from 1 on in each epoch."""

    replica: str
    epoch: int
    seqno: int
    ops: list[Op]


class Beat(Struct, array_like=True, tag="beat", frozen=True, gc=False):
    """The sender lives; `seqno` is that of its latest `Ops`."""

    replica: str
    epoch: int
    seqno: int


class Bye(Struct, array_like=True, tag="bye", frozen=True, gc=False):
    """The sender stops; its bookings are over."""

    replica: str
    epoch: int


class Ask(Struct, array_like=True, tag="ask", frozen=True, gc=False):
    """`replica` wants the state of `of`, or of everybody if that is empty."""

    replica: str
    epoch: int
    of: str = ""


class State(Struct, array_like=True, tag="state", frozen=True, gc=False):
    """All bookings right after the `Ops` of `seqno`, in one or more parts.

    `lately` are bookings that are settled, but whose blocks may not have been reported yet.
    """

    replica: str
    epoch: int
    seqno: int
    part: int
    parts: int
    bookings: list[Booking]
    lately: list[Booking]


class IndexQuestion(Struct, array_like=True, tag="index?", frozen=True, gc=False):
    """`replica` wants the blocks of a rank: who has them? `number` is that of its question."""

    replica: str
    epoch: int
    number: int
    worker: str
    dp_rank: int


class IndexOffer(Struct, array_like=True, tag="index!", frozen=True, gc=False):
    """The sender has so many of them, at this position of the engine's stream; None: it has not."""

    replica: str
    epoch: int
    number: int
    blocks: int
    position: Position | None


class IndexTake(Struct, array_like=True, tag="index", frozen=True, gc=False):
    """`replica` takes the offer that answered its question `number`."""

    replica: str
    epoch: int
    number: int
    worker: str
    dp_rank: int


class IndexPart(Struct, array_like=True, tag="part", frozen=True, gc=False):
    """Part `part` of the blocks, from 0 on: a chunk of a snapshot; an empty one is the end.

    The first part has the position that the blocks are of.
    """

    replica: str
    epoch: int
    number: int
    part: int
    chunk: bytes
    position: Position | None


IndexMessage: TypeAlias = IndexQuestion | IndexOffer | IndexTake | IndexPart
Message: TypeAlias = Ops | Beat | Bye | Ask | State | IndexMessage

_decoder: "msgpack.Decoder[Message]" = msgpack.Decoder(Message)
_encoder = msgpack.Encoder()


def encode_message(message: Message) -> bytes:
    """The bytes of a message."""
    return _encoder.encode(message)


def decode_message(payload: bytes) -> Message:
    """The message in these bytes. Raises MalformedMessage."""
    try:
        return _decoder.decode(payload)
    except (msgspec.DecodeError, ValueError, RecursionError) as error:
        raise MalformedMessage(str(error)) from error
