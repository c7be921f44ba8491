"""A subscriber of one engine's batches: SUB for the stream, a DEALER for each replay.

The shell of `Subscription`: it reads the sockets, feeds what it read, and carries the commands out.
All of it runs in one task on the event loop, a few milliseconds at a time, without threads.
"""

import asyncio
import logging
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, replace
from typing import Protocol

import zmq
import zmq.asyncio
from zmq.utils.monitor import parse_monitor_message

from events.history import Position
from events.model import EventBatch, WorkerRank
from events.opening import Opening, Restorer
from events.sparingly import TOLD_AT_ONCE, Sparingly
from events.stream import (
    CloseReplay,
    Command,
    Complain,
    Deliver,
    RequestReplay,
    Resync,
    ResyncReason,
    StateChanged,
    StreamState,
    StreamStats,
    SubscriptionSettings,
)
from events.subscription import SEQNO_BYTES, Subscription

log = logging.getLogger(__name__)

_TURN_S = 0.002
"""How long one turn may keep the event loop; a single batch may take longer."""

_HANDSHAKE_FAILED = (
    zmq.Event.HANDSHAKE_FAILED_NO_DETAIL
    | zmq.Event.HANDSHAKE_FAILED_PROTOCOL
    | zmq.Event.HANDSHAKE_FAILED_AUTH
)
_WATCHED = zmq.Event.HANDSHAKE_SUCCEEDED | zmq.Event.DISCONNECTED | _HANDSHAKE_FAILED


class EventSink(Protocol):
    """Whoever keeps an index. Called on the event loop; must not block or call back."""

    def on_batch(self, rank: WorkerRank, batch: EventBatch) -> None:
        """Apply `batch`."""

    def on_resync(self, rank: WorkerRank, reason: ResyncReason) -> None:
        """Drop all blocks of `rank`; the batches that follow start anew."""

    def on_state(self, rank: WorkerRank, state: StreamState) -> None:
        """How well `rank` is heard has changed."""


@dataclass(frozen=True)
class SourceSettings:
    """How to attach to a publisher, and how patient to be.

    `bind`: wait for the engine to connect to us; by default so if the endpoint has a `*`. Lost
    connections are tried again after `reconnect_s`, then twice as long, up to `reconnect_max_s`.
    A peer that does not answer for `heartbeat_timeout_s` counts as gone.
    """

    bind: bool | None = None
    reconnect_s: float = 0.1
    reconnect_max_s: float = 5.0
    connect_timeout_s: float = 5.0
    heartbeat_s: float = 10.0
    heartbeat_timeout_s: float = 30.0
    complain_every_s: float = 60.0
    first_batch_s: float = 0.5
    """How long to wait for a first batch before another router is asked how far it is."""
    subscription: SubscriptionSettings = field(default_factory=SubscriptionSettings)


class ZmqSource:
    """The batches of one worker rank, in order, into a sink."""

    def __init__(
        self,
        rank: WorkerRank,
        endpoint: str,
        sink: EventSink,
        *,
        replay_endpoint: str | None = None,
        topic: str = "",
        settings: SourceSettings | None = None,
        restorer: Restorer | None = None,
        context: zmq.asyncio.Context,
    ) -> None:
        self.rank = rank
        self.endpoint = endpoint
        self.replay_endpoint = replay_endpoint
        self._topic = topic
        self._sink = sink
        # The plain sockets of the same context: a coroutine for each message would cost too much.
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context(shadow=context.underlying)
        self._settings = settings = settings or SourceSettings()
        self._core = Subscription(
            replace(settings.subscription, replay=replay_endpoint is not None, dp_rank=rank.dp_rank)
        )
        self._restorer = restorer
        self._wake = asyncio.Event()
        self._replay: _Replay | None = None
        self._resync_wanted = False
        self._complaints = Sparingly(settings.complain_every_s)
        self._resyncs = Sparingly(settings.complain_every_s / TOLD_AT_ONCE, burst=TOLD_AT_ONCE)
        self._states = Sparingly(settings.complain_every_s / TOLD_AT_ONCE, burst=TOLD_AT_ONCE)

    @property
    def state(self) -> StreamState:
        """How well the publisher is heard."""
        return self._core.state

    @property
    def stats(self) -> StreamStats:
        """Counters since the start."""
        return self._core.stats

    @property
    def absence(self) -> str:
        """Why there is no connection to the stream, in words."""
        return "no connection to the event stream"

    @property
    def warning(self) -> str:
        """Nothing: who listens at an endpoint of the engine hears this engine."""
        return ""

    @property
    def place(self) -> dict[str, str | None]:
        """Where it listens, for people."""
        return {"endpoint": self.endpoint, "replay_endpoint": self.replay_endpoint}

    def position(self) -> Position | None:
        """How far the sink is, for another router; None while that is in doubt."""
        return None if self._resync_wanted else self._core.position()

    def expect_blocks(self, now: float) -> None:
        """A request that should make the engine store blocks was sent; `now` is `time.monotonic`.

        If no batch comes within `silent_after_s` the state becomes SILENT.
        """
        due = self._core.deadline()
        self._core.expect_blocks(now)
        if self._core.deadline() != due:
            self._wake.set()

    def request_resync(self) -> None:
        """The index does not trust this rank's blocks: `on_resync`, then the history once more.

        May be called from within the sink.
        """
        self._resync_wanted = True
        self._wake.set()

    async def run(self) -> None:
        """Subscribe and follow until cancelled. Raises what the sink raises, or a ZMQError."""
        with self._subscribed() as (sub, monitor):
            if self._restorer is not None:
                restorer, self._restorer = self._restorer, None
                await self._begin_with(restorer, sub, monitor)
            while True:
                self._wake.clear()
                if self._turn(sub, monitor):
                    await asyncio.sleep(0)
                else:
                    await self._sleep()

    # Sockets

    @contextmanager
    def _subscribed(self) -> Iterator[tuple["zmq.Socket[bytes]", "zmq.Socket[bytes]"]]:
        sub = self._context.socket(zmq.SUB)
        try:
            self._configure(sub)
            with (
                _monitor(sub) as monitor,
                _readable(sub, self._wake),
                _readable(monitor, self._wake),
            ):
                self._attach(sub)
                yield sub, monitor
        finally:
            self._close_replay()
            sub.close(linger=0)

    def _configure(self, sub: "zmq.Socket[bytes]") -> None:
        settings = self._settings
        sub.setsockopt(zmq.RCVHWM, 0)  # a dropped message costs more than the memory
        sub.setsockopt(zmq.RECONNECT_IVL, _ms(settings.reconnect_s))
        sub.setsockopt(zmq.RECONNECT_IVL_MAX, _ms(settings.reconnect_max_s))
        sub.setsockopt(zmq.CONNECT_TIMEOUT, _ms(settings.connect_timeout_s))
        sub.setsockopt(zmq.HEARTBEAT_IVL, _ms(settings.heartbeat_s))
        sub.setsockopt(zmq.HEARTBEAT_TIMEOUT, _ms(settings.heartbeat_timeout_s))
        sub.setsockopt(zmq.IPV6, int("[" in self.endpoint))
        sub.setsockopt_string(zmq.SUBSCRIBE, self._topic)

    def _attach(self, sub: "zmq.Socket[bytes]") -> None:
        bind = self._settings.bind
        if "*" in self.endpoint if bind is None else bind:
            sub.bind(self.endpoint)
            self.endpoint = sub.getsockopt_string(zmq.LAST_ENDPOINT)
        else:
            sub.connect(self.endpoint)

    # The beginning

    async def _begin_with(
        self, restorer: Restorer, sub: "zmq.Socket[bytes]", monitor: "zmq.Socket[bytes]"
    ) -> None:
        """Go on from where another router is, and hold meanwhile what the engine publishes."""
        opening = Opening()
        restoring = asyncio.create_task(self._restored(restorer, opening))
        restoring.add_done_callback(lambda _: self._wake.set())
        try:
            while not restoring.done():
                self._wake.clear()
                until = time.monotonic() + _TURN_S
                if self._read(sub, opening.hold_batch, until) or self._read(
                    monitor, opening.hold_news, until
                ):
                    await asyncio.sleep(0)
                else:
                    await self._wake.wait()
            position = restoring.result()
        finally:
            restoring.cancel()
        if position is not None:
            self._core.restore(position)
        for held in opening.behind(position):
            now = time.monotonic()
            feed = self._connection_changed if held.is_news else self._core.live
            self._do(feed(held.frames, now), now)

    async def _restored(self, restorer: Restorer, opening: Opening) -> Position | None:
        """What is heard first shows that we are subscribed; of an idle engine nothing is heard."""
        with suppress(TimeoutError):
            async with asyncio.timeout(self._settings.first_batch_s):
                await opening.heard.wait()
        async with restorer.turn() as is_worth_it:
            return await restorer.restore(self.rank, opening.joins) if is_worth_it else None

    # The loop

    async def _sleep(self) -> None:
        due = self._core.deadline()
        timer = None
        if due is not None:
            delay = max(0.0, due - time.monotonic())
            timer = asyncio.get_running_loop().call_later(delay, self._wake.set)
        try:
            await self._wake.wait()
        finally:
            if timer is not None:
                timer.cancel()

    def _turn(self, sub: "zmq.Socket[bytes]", monitor: "zmq.Socket[bytes]") -> bool:
        """Do what there is to do, for a short while; True if there is more.

        The news of a lost connection is read after what came on that connection.
        """
        until = time.monotonic() + _TURN_S
        more = self._read(sub, self._core.live, until)
        if not more:
            more = self._read(monitor, self._connection_changed, until)
        if self._replay is not None:
            more |= self._read(self._replay.socket, self._replay_reply, until)
        self._advance(time.monotonic())
        return more or self._core.has_work

    def _advance(self, now: float) -> None:
        if self._resync_wanted:
            self._resync_wanted = False
            self._do(self._core.resync(now), now)
        if self._core.has_work:
            self._do(self._core.work(now), now)
        self._do(self._core.tick(now), now)

    def _read(
        self,
        socket: "zmq.Socket[bytes]",
        feed: Callable[[list[bytes], float], list[Command]],
        until: float,
    ) -> bool:
        """Feed what can be read, at least one message; True if time ran out before it was all."""
        while not socket.closed:
            try:
                frames = socket.recv_multipart(zmq.NOBLOCK)
            except zmq.Again:
                return False
            now = time.monotonic()
            self._do(feed(frames, now), now)
            if now >= until:
                return True
        return False

    def _connection_changed(self, frames: list[bytes], now: float) -> list[Command]:
        event = parse_monitor_message(frames)["event"]
        if event == zmq.Event.HANDSHAKE_SUCCEEDED:
            return self._core.connected(now)
        if event == zmq.Event.DISCONNECTED:
            return self._core.disconnected(now)
        return [Complain("no publisher of events answers there")]

    def _replay_reply(self, frames: list[bytes], now: float) -> list[Command]:
        return (
            [] if self._replay is None else self._core.replayed(self._replay.attempt, frames, now)
        )

    # Commands

    def _do(self, commands: list[Command], now: float) -> None:
        for command in commands:
            if isinstance(command, Deliver):
                self._deliver(command)
            elif isinstance(command, Resync):
                self._resync(command, now)
            elif isinstance(command, RequestReplay):
                self._request_replay(command)
            elif isinstance(command, CloseReplay):
                self._close_replay()
            elif isinstance(command, StateChanged):
                if self._states.due(now):
                    log.info("%s: events %s", _name(self.rank), command.state)
                self._sink.on_state(self.rank, command.state)
            else:
                self._complain(command, now)

    def _deliver(self, command: Deliver) -> None:
        if not command.replayed:
            self.stats.lag_s = time.time() - command.batch.ts_s
        self._sink.on_batch(self.rank, command.batch)

    def _resync(self, command: Resync, now: float) -> None:
        times = self._resyncs.due(now)
        if times:
            log.warning(
                "%s: blocks dropped, %s: %s (%d such since the last line)",
                _name(self.rank),
                command.reason,
                command.detail,
                times,
            )
        self._sink.on_resync(self.rank, command.reason)

    def _complain(self, complaint: Complain, now: float) -> None:
        times = self._complaints.due(now)
        if not times:
            return
        log.warning(
            "%s: %s sends what it should not: %s (%d such since the last line)",
            _name(self.rank),
            self.endpoint,
            complaint.detail,
            times,
        )

    def _request_replay(self, command: RequestReplay) -> None:
        """Each request has a socket of its own: replies to an older one can't be taken for its."""
        self._close_replay()
        if self.replay_endpoint is None:
            return
        dealer = self._context.socket(zmq.DEALER)
        dealer.setsockopt(zmq.RCVHWM, 0)  # the engine drops replies that nobody reads
        dealer.setsockopt(zmq.IPV6, int("[" in self.replay_endpoint))
        dealer.connect(self.replay_endpoint)
        dealer.send_multipart([b"", command.start.to_bytes(SEQNO_BYTES, "big")], zmq.NOBLOCK)
        self._replay = _Replay(dealer, command.attempt, self._wake)
        self._wake.set()  # sending may have used up the signal that something can be read

    def _close_replay(self) -> None:
        if self._replay is not None:
            self._replay.close()
            self._replay = None


class _Replay:
    """The socket of one replay request."""

    def __init__(self, socket: "zmq.Socket[bytes]", attempt: int, wake: asyncio.Event) -> None:
        self.socket = socket
        self.attempt = attempt
        asyncio.get_running_loop().add_reader(socket.fileno(), wake.set)

    def close(self) -> None:
        """Want no replies any more."""
        asyncio.get_running_loop().remove_reader(self.socket.fileno())
        self.socket.close(linger=0)


@contextmanager
def _monitor(socket: "zmq.Socket[bytes]") -> Iterator["zmq.Socket[bytes]"]:
    """A socket that tells of the connections of `socket`."""
    monitor = socket.get_monitor_socket(int(_WATCHED))
    try:
        yield monitor
    finally:
        socket.disable_monitor()  # first: it tells of its own end, and would wait for a reader
        monitor.close(linger=0)


@contextmanager
def _readable(socket: "zmq.Socket[bytes]", wake: asyncio.Event) -> Iterator[None]:
    """Set `wake` when `socket` may be readable."""
    loop, fd = asyncio.get_running_loop(), socket.fileno()
    loop.add_reader(fd, wake.set)
    try:
        yield
    finally:
        loop.remove_reader(fd)


def _ms(seconds: float) -> int:
    return round(seconds * 1000)


def _name(rank: WorkerRank) -> str:
    return f"{rank.worker}/{rank.dp_rank}"
