"""A publisher of batches as an engine has it: PUB for the stream, ROUTER for replays.

Used by the simulated engine and by tests; it follows vLLM's in what it sends, keeps and refuses.
"""

import asyncio
import logging
from collections import deque
from collections.abc import Iterator

import zmq
import zmq.asyncio

from events.subscription import END_OF_REPLAY, SEQNO_BYTES

log = logging.getLogger(__name__)

_END = END_OF_REPLAY.to_bytes(SEQNO_BYTES, "big")
_REQUEST_FRAMES = 3  # client id, empty, first wanted seqno


def rank_endpoint(endpoint: str, dp_rank: int) -> str:
    """Where data-parallel rank `dp_rank` of an engine is, if its rank 0 is at `endpoint`.

    Engines add the rank to the port; `inproc://` names get a suffix. Raises ValueError for
    endpoints that can't be shared by ranks.
    """
    if dp_rank == 0:
        return endpoint
    if endpoint.startswith("inproc://"):
        return f"{endpoint}_dp{dp_rank}"
    base, _, port = endpoint.rpartition(":")
    if not endpoint.startswith("tcp://") or not port.isdecimal():
        raise ValueError(f"no endpoint for dp rank {dp_rank} follows from {endpoint!r}")
    return f"{base}:{int(port) + dp_rank}"


class ZmqPublisher:
    """Numbers payloads, publishes them and keeps the newest `buffer_steps` for replay.

    The PUB socket binds if `endpoint` contains `*` or `::` or is `ipc://` or `inproc://`, and
    connects otherwise, as engines do; the replay socket always binds. `endpoint` and
    `replay_endpoint` tell the addresses, with the ports that were chosen for `*` or 0.
    `replay_topic=False` leaves the topic out of replies, as before 0.26; `replay_hwm` bounds the
    replies that wait for a slow reader, above which they are dropped (1000 up to 0.32; by default
    none is, as since 0.33).
    """

    def __init__(
        self,
        endpoint: str,
        *,
        replay_endpoint: str | None = None,
        topic: str = "",
        buffer_steps: int = 10_000,
        hwm: int = 100_000,
        replay_topic: bool = True,
        replay_hwm: int | None = None,
        context: zmq.asyncio.Context,
    ) -> None:
        self._topic = topic.encode()
        self._replay_topic = replay_topic
        self._next = 0
        self._buffer: deque[tuple[int, bytes]] = deque(maxlen=buffer_steps)
        self._wanted = asyncio.Event()
        self._wanted.set()
        plain: zmq.Context[zmq.Socket[bytes]] = zmq.Context(shadow=context.underlying)
        self._pub = plain.socket(zmq.PUB)
        self._pub.setsockopt(zmq.SNDHWM, hwm)
        self._router: zmq.Socket[bytes] | None = None
        self.replay_endpoint: str | None = None
        try:
            self.endpoint = _attach(self._pub, endpoint)
            if replay_endpoint is not None:
                self._router = plain.socket(zmq.ROUTER)
                roomy = 2 * (buffer_steps + 1)
                self._router.setsockopt(zmq.SNDHWM, roomy if replay_hwm is None else replay_hwm)
                self._router.bind(replay_endpoint)
                self.replay_endpoint = _address(self._router)
        except BaseException:
            self.close()
            raise

    def publish(self, payload: bytes) -> int:
        """Send `payload` to who is subscribed now; returns its seqno. Never blocks."""
        seqno = self._next
        self._next += 1
        self._buffer.append((seqno, payload))
        self._send(seqno, payload)
        return seqno

    async def run(self) -> None:
        """Answer replay requests until cancelled."""
        if self._router is None:
            await asyncio.Event().wait()
            return
        loop, fd = asyncio.get_running_loop(), self._router.fileno()
        loop.add_reader(fd, self._wanted.set)
        try:
            while True:
                await self._wanted.wait()
                # Sending may use up the signal of the next request, so ask until there is none.
                if not self._answer_one():
                    self._wanted.clear()
                await asyncio.sleep(0)
        finally:
            loop.remove_reader(fd)

    def close(self) -> None:
        """Release the sockets; what was not sent is dropped."""
        self._pub.close(linger=0)
        if self._router is not None:
            self._router.close(linger=0)

    def _send(self, seqno: int, payload: bytes) -> None:
        frames = [self._topic, seqno.to_bytes(SEQNO_BYTES, "big"), payload]
        self._pub.send_multipart(frames, zmq.NOBLOCK)

    def _replies(self, start: int) -> Iterator[tuple[int, bytes]]:
        return ((seqno, payload) for seqno, payload in self._buffer if seqno >= start)

    def _answer_one(self) -> bool:
        """Answer one request; False if there is none."""
        if self._router is None:
            return False
        try:
            request = self._router.recv_multipart(zmq.NOBLOCK)
        except zmq.Again:
            return False
        if len(request) != _REQUEST_FRAMES:
            log.warning("a replay request of %d frames is not answered", len(request))
            return True
        client, start = request[0], int.from_bytes(request[2], "big")
        for seqno, payload in self._replies(start):
            self._reply(client, self._topic, seqno.to_bytes(SEQNO_BYTES, "big"), payload)
        self._end(client)
        return True

    def _end(self, client: bytes) -> None:
        self._reply(client, b"", _END, b"")

    def _reply(self, client: bytes, topic: bytes, seqno: bytes, payload: bytes) -> None:
        if self._router is None:
            return
        middle = [topic, seqno] if self._replay_topic else [seqno]
        self._router.send_multipart([client, b"", *middle, payload], zmq.NOBLOCK)


def _attach(pub: "zmq.Socket[bytes]", endpoint: str) -> str:
    if "*" in endpoint or "::" in endpoint or endpoint.startswith(("ipc://", "inproc://")):
        pub.bind(endpoint)
        return _address(pub)
    pub.connect(endpoint)
    return endpoint


def _address(bound: "zmq.Socket[bytes]") -> str:
    return bound.getsockopt_string(zmq.LAST_ENDPOINT)
