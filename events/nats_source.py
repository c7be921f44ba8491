"""The batches of one worker rank over NATS, from its relay: the shell of `RelayedStream`."""

import asyncio
import datetime as dt
import logging
import time
from collections import deque

from events.model import WorkerRank
from events.nats_link import NatsLink, Received
from events.relayed import (
    RELAY_SILENT_S,
    Answer,
    Batch,
    Head,
    MalformedRelayed,
    Want,
    decode,
    encode,
)
from events.relayed_stream import RelayedStream
from events.sparingly import TOLD_AT_ONCE, Sparingly
from events.stream import (
    Command,
    Complain,
    Deliver,
    RequestReplay,
    Resync,
    StateChanged,
    StreamState,
    StreamStats,
    SubscriptionSettings,
)
from events.subjects import Subjects
from events.zmq_source import EventSink

log = logging.getLogger(__name__)

_TURN_S = 0.002
"""How long one turn may keep the event loop: a whole state is thousands of blocks."""
_COMPLAIN_EVERY_S = 60.0


class NatsSource:
    """The batches of `rank`, in order, into a sink. `router` and `number` name this source."""

    def __init__(
        self,
        rank: WorkerRank,
        sink: EventSink,
        link: NatsLink,
        subjects: Subjects,
        *,
        router: str,
        number: int,
        rule: int,
        settings: SubscriptionSettings | None = None,
        relay_silent_s: float = RELAY_SILENT_S,
    ) -> None:
        self.rank = rank
        self._sink = sink
        self._link = link
        self._events = subjects.events(rank.worker, rank.dp_rank)
        self._history = subjects.history(rank.worker, rank.dp_rank)
        self._answers = subjects.answers(router, number)
        settings = settings or SubscriptionSettings(replay_timeout_s=1.0)
        self._rule = rule
        self._relay_silent_s = relay_silent_s
        self._core = RelayedStream(rule, settings, relay_silent_s=relay_silent_s)
        self._todo: deque[Command] = deque()
        self._wake = asyncio.Event()
        self._complaints = Sparingly(_COMPLAIN_EVERY_S)
        self._resyncs = Sparingly(_COMPLAIN_EVERY_S / TOLD_AT_ONCE, burst=TOLD_AT_ONCE)

    @property
    def state(self) -> StreamState:
        """How well the rank is heard."""
        return self._core.state

    @property
    def stats(self) -> StreamStats:
        """Counters since the start."""
        return self._core.stats

    @property
    def absence(self) -> str:
        """Why there is no connection to the stream, in words."""
        if not self._link.is_connected:
            return "no connection to the event stream: none to NATS"
        if self._core.other_rule is not None:
            return (
                f"its relay hashes blocks by rule {self._core.other_rule}, not {self._rule}: "
                "relay and router must be of versions with the same hash rule"
            )
        if self._core.is_followed:
            return "no connection to the event stream: its relay has none to the engine's events"
        if self._core.silent_since is None and self._core.is_heard:
            return "its relay is heard, but does not answer when it is asked: see its log"
        if self._core.silent_since is None:
            return f"no connection to the event stream: no relay publishes it as {self.rank.worker}"
        unix_s = time.time() - (time.monotonic() - self._core.silent_since)
        since = dt.datetime.fromtimestamp(unix_s, dt.UTC).isoformat(timespec="seconds")
        return f"its relay is silent since {since}"

    @property
    def warning(self) -> str:
        """Why the events may not be the engine's although they are heard; empty if they should."""
        rival_at = self._core.rival_heard_at
        if rival_at is None or time.monotonic() >= rival_at + self._relay_silent_s:
            return ""
        return (
            f"two relays publish as {self.rank.worker}, and the one that began last is followed: "
            "one is to be stopped, or to have another name"
        )

    @property
    def place(self) -> dict[str, str | None]:
        """Where it listens, for people."""
        return {"subject": self._events}

    @property
    def backlog(self) -> int:
        """Commands that are still to be carried out."""
        return len(self._todo)

    def position(self) -> None:
        """Nobody goes on from here: relays tell the whole state themselves."""

    def expect_blocks(self, now: float) -> None:
        """A request that should make the engine store blocks was sent."""
        self._core.expect_blocks(now)
        self._wake.set()

    def request_resync(self) -> None:
        """The index does not trust this rank's blocks. May be called from within the sink."""
        self._take(self._core.resync(time.monotonic()))

    async def run(self) -> None:
        """Follow until cancelled. Raises what the sink raises."""
        subscriptions = [
            self._link.subscribe(self._events, self._hear),
            self._link.subscribe(self._answers, self._hear),
        ]
        self._link.watch(self._link_changed)
        if self._link.is_connected:
            self._link_changed(connected=True)
        try:
            while True:
                self._wake.clear()
                self._take(self._core.tick(time.monotonic()))
                if self._carry_out():
                    await asyncio.sleep(0)
                else:
                    await self._sleep()
        finally:
            self._link.unwatch(self._link_changed)
            for subscription in subscriptions:
                self._link.unsubscribe(subscription)

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

    def _link_changed(self, *, connected: bool) -> None:
        if connected:
            self._take(self._core.connected(time.monotonic()))
        else:
            self._take(self._core.disconnected())

    def _hear(self, message: Received) -> None:
        if not message.payload:
            return  # the server's word for: nobody listens to what was asked
        now = time.monotonic()
        try:
            body = decode(message.payload)
        except MalformedRelayed as error:
            self.stats.malformed_frames += 1
            self._take([Complain(str(error))])
            return
        if isinstance(body, Answer):
            self._take(self._core.answered(body, now))
        elif isinstance(body, Batch | Head):
            self._take(self._core.live(body, now))

    # Commands: at once where nothing waits, else in order and a little at a time.

    def _take(self, commands: list[Command]) -> None:
        if not commands:
            return
        self._todo += commands
        self._wake.set()

    def _carry_out(self) -> bool:
        """Carry out what there is time for; True if there is more."""
        until = time.monotonic() + _TURN_S
        while self._todo:
            self._do(self._todo.popleft())
            if time.monotonic() >= until:
                break
        return bool(self._todo)

    def _do(self, command: Command) -> None:
        if isinstance(command, Deliver):
            if not command.replayed:
                self.stats.lag_s = time.time() - command.batch.ts_s
            self._sink.on_batch(self.rank, command.batch)
        elif isinstance(command, Resync):
            if self._resyncs.due(time.monotonic()):
                log.warning(
                    "%s: blocks dropped, %s: %s", self._name, command.reason, command.detail
                )
            self._sink.on_resync(self.rank, command.reason)
        elif isinstance(command, RequestReplay):
            want = Want(command.attempt, self._core.epoch, command.start)
            self._link.publish(self._history, encode(want), self._answers)
        elif isinstance(command, StateChanged):
            why = f": {self.absence}" if command.state is StreamState.CONNECTING else ""
            log.info("%s: events %s (by its relay)%s", self._name, command.state, why)
            self._sink.on_state(self.rank, command.state)
        elif isinstance(command, Complain):
            self._complain(command)

    def _complain(self, complaint: Complain) -> None:
        times = self._complaints.due(time.monotonic())
        if not times:
            return
        log.warning(
            "%s: trouble with its relay: %s (%d such since the last line)",
            self._name,
            complaint.detail,
            times,
        )

    @property
    def _name(self) -> str:
        return f"{self.rank.worker}/{self.rank.dp_rank}"
