"""The subjects on NATS: one subject, one meaning. Pure.

`PREFIX` separates deployments that share a NATS; `v1` is the version of the payloads. Names stand
in one token each, escaped.

    PREFIX.v1.bookings.REPLICA        what a replica tells all others of its bookings
    PREFIX.v1.mail.REPLICA            what another replica sends to this one: questions, states
    PREFIX.v1.events.WORKER.RANK      a rank's batches of KV events, numbered by its relay
    PREFIX.v1.history.WORKER.RANK     requests to the relay: batches that were missed, or the state
    PREFIX.v1.answers.ROUTER.NUMBER   the relay's answers to one request of a router
    PREFIX.v1.workers.WORKER          a relay says that this worker is there, and what it is
    PREFIX.v1.who                     a router asks all relays to say that now
"""

from urllib.parse import quote, unquote

VERSION = "v1"


class Subjects:
    """The subjects of one deployment."""

    def __init__(self, prefix: str) -> None:
        self._base = f"{prefix}.{VERSION}"

    def bookings(self, replica: str) -> str:
        """What a replica tells all others."""
        return f"{self._base}.bookings.{escape(replica)}"

    @property
    def all_bookings(self) -> str:
        """What all replicas tell."""
        return f"{self._base}.bookings.*"

    def mail(self, replica: str) -> str:
        """What is sent to one replica."""
        return f"{self._base}.mail.{escape(replica)}"

    def events(self, worker: str, dp_rank: int) -> str:
        """A rank's batches."""
        return f"{self._base}.events.{escape(worker)}.{dp_rank}"

    def history(self, worker: str, dp_rank: int) -> str:
        """Requests for a rank's batches or state."""
        return f"{self._base}.history.{escape(worker)}.{dp_rank}"

    def answers(self, router: str, number: int) -> str:
        """Answers to one request."""
        return f"{self._base}.answers.{escape(router)}.{number}"

    def worker(self, worker: str) -> str:
        """That a worker is there."""
        return f"{self._base}.workers.{escape(worker)}"

    @property
    def all_workers(self) -> str:
        """That workers are there."""
        return f"{self._base}.workers.*"

    @property
    def who(self) -> str:
        """A question: who is there."""
        return f"{self._base}.who"


def escape(name: str) -> str:
    """A name as one token of a subject."""
    return quote(name, safe="").replace(".", "%2E").replace("~", "%7E")


def unescape(token: str) -> str:
    """The name of a token."""
    return unquote(token)
