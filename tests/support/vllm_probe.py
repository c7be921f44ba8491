"""An engine's event history, asked for over its replay socket, without any code of ours.

The tests' source of truth: what they compare the router's view with.
"""

from collections.abc import Iterator
from types import TracebackType
from typing import Self

import zmq

END = b"\xff" * 8
REPLY_TIMEOUT_MS = 10_000


class EngineProbe:
    """Knows the newest seqno of one engine, and the payloads up to there."""

    def __init__(self, replay_endpoint: str, context: zmq.Context[zmq.Socket[bytes]]) -> None:
        self._dealer = context.socket(zmq.DEALER)
        self._dealer.setsockopt(zmq.RCVHWM, 0)
        self._dealer.setsockopt(zmq.LINGER, 0)
        self._dealer.setsockopt(zmq.RCVTIMEO, REPLY_TIMEOUT_MS)
        self._dealer.connect(replay_endpoint)
        self.payloads: list[bytes] = []
        """By seqno."""

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._dealer.close()

    @property
    def last_seqno(self) -> int:
        """Of the newest batch that was fetched; -1 before the first."""
        return len(self.payloads) - 1

    def restarted(self) -> None:
        """The engine has begun a new history."""
        self.payloads.clear()

    def settle(self) -> int:
        """Fetch until the engine has nothing left to publish; returns the newest seqno.

        Call it after a response: its batches stand in the publisher's queue by then, but maybe
        not on the wire. The publisher takes one batch from that queue, or finds it empty, between
        two replays; so a replay that was asked for after an answer and brings nothing new means
        that the queue was empty.
        """
        self._fetch()
        while self._fetch():
            pass
        return self.last_seqno

    def replay(self, first: int) -> Iterator[list[bytes]]:
        """The replies to one request, as a DEALER sees them, without the end marker."""
        self._dealer.send_multipart([b"", first.to_bytes(8, "big")])
        while True:
            frames = self._dealer.recv_multipart()
            if frames[-2] == END:
                return
            yield frames

    def _fetch(self) -> int:
        before = len(self.payloads)
        for frames in self.replay(before):
            if int.from_bytes(frames[-2], "big") != len(self.payloads):
                raise AssertionError(f"hole in the replay at {len(self.payloads)}: {frames[-2]!r}")
            self.payloads.append(frames[-1])
        return len(self.payloads) - before
