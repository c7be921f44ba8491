"""The messages between replicas and their bytes (msgpack arrays, version 1).

Every message names its sender by `replica` (a name that no two running replicas share) and `epoch`
(of two processes with one name, the later one has the higher). Fields may be added at the end of
each; what an older replica does not know it ignores.

Whoever decodes a message can rely on its numbers: those that cannot be make it malformed.
"""

from typing import Annotated, TypeAlias

import msgspec
from msgspec import Meta, Struct, msgpack

from events.history import Position
from events.replica.sampling import HASH_BYTES, MAX_SAMPLES

MAX_BLOCK_SIZE = 2**24
"""In tokens."""
MAX_PARTS = 2**16

_MAX = 2**62

Count: TypeAlias = Annotated[int, Meta(ge=0, le=_MAX)]
Name: TypeAlias = Annotated[
    str, Meta(min_length=1, max_length=1024, pattern=r"\A[^\x00-\x1f\x7f-\x9f\u2028\u2029]+\Z")
]
"""It is written to logs: a line break in it would begin a line of somebody else's."""


class MalformedMessage(ValueError):  # noqa: N818  the name says what it is
    """Bytes that are no message of this version."""


class Booking(Struct, array_like=True, frozen=True, gc=False):
    """One request in flight, as far as its cost needs it.

    `prefill_tokens` are uncached prompt tokens; they count while `waiting` for the first output
    byte. `samples` are the sampled hashes of the prompt's blocks (see `sampling`), the first
    `cached_samples` of which the rank was expected to hold; `own_blocks` are the blocks that the
    samples don't stand for: the rest of the prompt, and output. `age_ms` is since it was booked.
    """

    lease: Count
    worker: Name
    dp_rank: Count
    block_size: Annotated[int, Meta(ge=1, le=MAX_BLOCK_SIZE)]
    prefill_tokens: Count
    waiting: bool
    own_blocks: Count
    cached_samples: Count
    samples: Annotated[bytes, Meta(max_length=MAX_SAMPLES * HASH_BYTES)]
    age_ms: Count = 0


class Book(Struct, array_like=True, tag=0, frozen=True, gc=False):
    """A request was placed."""

    booking: Booking


class PrefillDone(Struct, array_like=True, tag=1, frozen=True, gc=False):
    """Its first output byte is here."""

    lease: Count


class Grow(Struct, array_like=True, tag=2, frozen=True, gc=False):
    """It has so many blocks of its own now."""

    lease: Count
    own_blocks: Count


class Settle(Struct, array_like=True, tag=3, frozen=True, gc=False):
    """It is over."""

    lease: Count


Op: TypeAlias = Book | PrefillDone | Grow | Settle


class Ops(Struct, array_like=True, tag="ops", frozen=True, gc=False):
    """What happened, in order. Numbered from 1 on in each epoch."""

    replica: Name
    epoch: Count
    seqno: Count
    ops: list[Op]


class Beat(Struct, array_like=True, tag="beat", frozen=True, gc=False):
    """The sender lives; `seqno` is that of its latest `Ops`."""

    replica: Name
    epoch: Count
    seqno: Count


class Bye(Struct, array_like=True, tag="bye", frozen=True, gc=False):
    """The sender stops; its bookings are over."""

    replica: Name
    epoch: Count


class Ask(Struct, array_like=True, tag="ask", frozen=True, gc=False):
    """`replica` wants the state of `of`, or of everybody if that is empty."""

    replica: Name
    epoch: Count
    of: str = ""


class State(Struct, array_like=True, tag="state", frozen=True, gc=False):
    """All bookings right after the `Ops` of `seqno`, in one or more parts.

    `lately` are bookings that are settled, but whose blocks may not have been reported yet.
    """

    replica: Name
    epoch: Count
    seqno: Count
    part: Count
    parts: Annotated[int, Meta(ge=1, le=MAX_PARTS)]
    bookings: list[Booking]
    lately: list[Booking]


class IndexQuestion(Struct, array_like=True, tag="index?", frozen=True, gc=False):
    """`replica` wants the blocks of a rank: who has them? `number` is that of its question."""

    replica: Name
    epoch: Count
    number: Count
    worker: Name
    dp_rank: Count


class IndexOffer(Struct, array_like=True, tag="index!", frozen=True, gc=False):
    """The sender has so many of them, at this position of the engine's stream; None: it has not."""

    replica: Name
    epoch: Count
    number: Count
    blocks: Count
    position: Position | None


class IndexTake(Struct, array_like=True, tag="index", frozen=True, gc=False):
    """`replica` takes the offer that answered its question `number`."""

    replica: Name
    epoch: Count
    number: Count
    worker: Name
    dp_rank: Count


class IndexPart(Struct, array_like=True, tag="part", frozen=True, gc=False):
    """Part `part` of the blocks, from 0 on: a chunk of a snapshot; an empty one is the end.

    The first part has the position that the blocks are of.
    """

    replica: Name
    epoch: Count
    number: Count
    part: Count
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
        message = _decoder.decode(payload)
    except (msgspec.DecodeError, ValueError, RecursionError) as error:
        raise MalformedMessage(str(error)) from error
    _check(message)
    return message


def _check(message: Message) -> None:
    """What no single field shows."""
    if isinstance(message, Ops):
        for op in message.ops:
            if isinstance(op, Book):
                _check_booking(op.booking)
    elif isinstance(message, State):
        if message.part >= message.parts:
            raise MalformedMessage(f"part {message.part} of {message.parts}")
        for booking in message.bookings:
            _check_booking(booking)
        for booking in message.lately:
            _check_booking(booking)
    elif isinstance(message, IndexOffer | IndexPart):
        position = message.position
        if position is not None and not len(position.digests) <= position.next <= _MAX:
            raise MalformedMessage(f"{len(position.digests)} digests below {position.next}")


def _check_booking(booking: Booking) -> None:
    samples, odd = divmod(len(booking.samples), HASH_BYTES)
    if odd or booking.cached_samples > samples:
        raise MalformedMessage(
            f"{booking.cached_samples} cached of {len(booking.samples)} bytes of samples"
        )
