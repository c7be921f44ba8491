"""What router replicas tell one another about the requests that they have in flight.

`messages` are the values and their bytes, `sampling` keeps them small, `ledger` is the telling
side, `mirror` the hearing one. All of it is pure; a bus carries the bytes.

What is consistent when. Each replica is the only writer of its own bookings, so nothing is ever
merged. Messages are numbered per replica and delivered at most once: a lost, repeated or late one
is seen from its number (a lost last one from the next beat), and then that replica is asked for
all of its bookings, never guessed about. So a view is behind by the time of a message, or, after a
loss, by a beat and a question; it drifts no further. What is not exact by design: output is told
in coarse steps, and prefixes in samples (see `sampling`). A replica that is not heard for its
lease is forgotten with all it had.

Beside that, a replica that starts asks the others for what they know of engines' blocks (`Index...`
messages; the shells that use them are the application's).
"""

from events.replica.ledger import Ledger, LedgerSettings
from events.replica.messages import (
    Ask,
    Beat,
    Booking,
    Bye,
    IndexMessage,
    IndexOffer,
    IndexPart,
    IndexQuestion,
    IndexTake,
    MalformedMessage,
    Message,
    Ops,
    State,
    decode_message,
    encode_message,
)
from events.replica.mirror import (
    Added,
    Dropped,
    Expected,
    Grown,
    Mirror,
    MirrorSettings,
    Prefilled,
    SendAsk,
)
from events.replica.sampling import blocks_of, sample

__all__ = [
    "Added",
    "Ask",
    "Beat",
    "Booking",
    "Bye",
    "Dropped",
    "Expected",
    "Grown",
    "IndexMessage",
    "IndexOffer",
    "IndexPart",
    "IndexQuestion",
    "IndexTake",
    "Ledger",
    "LedgerSettings",
    "MalformedMessage",
    "Message",
    "Mirror",
    "MirrorSettings",
    "Ops",
    "Prefilled",
    "SendAsk",
    "State",
    "blocks_of",
    "decode_message",
    "encode_message",
    "sample",
]
