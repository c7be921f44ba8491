"""Telling the other replicas of our bookings, and following theirs: the shell of both.

What is to be told is gathered for one turn of the event loop. Every beat says that we live and how
far we are. States are made for all who asked meanwhile, and never so often that making them takes
more than a small share of our time: replicas that start again and again disturb nobody.
"""

import asyncio
import logging
import time
from collections.abc import Callable
from dataclasses import dataclass
from enum import StrEnum

from events.bus import Bus
from events.replica import (
    Added,
    Ask,
    Booking,
    Dropped,
    Expected,
    Grown,
    IndexMessage,
    Ledger,
    MalformedMessage,
    Mirror,
    Prefilled,
    SendAsk,
    decode_message,
    encode_message,
)
from events.replica.mirror import Command
from events.sparingly import Sparingly
from kvrouter.shared_load import SharedLoad

log = logging.getLogger(__name__)

TICK_S = 0.1
STATE_PAUSE_S = 0.02
STATE_SHARE = 0.05
"""Of our time, what making states may take."""
_COMPLAIN_EVERY_S = 60.0


class Company(StrEnum):
    """Whether other replicas are heard."""

    ALONE = "alone"
    """The bus is not connected: decisions go by the own bookings."""
    SINGLE = "single"
    """It is, and there is no other replica."""
    CATCHING_UP = "catching_up"
    """The bookings of some replica have been asked for."""
    SHARED = "shared"
    """All replicas that are heard are known exactly."""


@dataclass
class ReplicationStats:
    """Counters since the start."""

    told: int = 0
    told_bytes: int = 0
    states_told: int = 0
    malformed: int = 0


class Replication:
    """One replica among the others."""

    def __init__(
        self,
        ledger: Ledger,
        mirror: Mirror,
        shared: SharedLoad,
        bus: Bus,
        *,
        beat_s: float = 0.5,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.stats = ReplicationStats()
        self.ledger = ledger
        self.mirror = mirror
        self.shared = shared
        self.bus = bus
        self.expect: Callable[[Booking, float], None] = lambda booking, now: None  # noqa: ARG005
        """Told of prompts that others have placed."""
        self.on_index: Callable[[IndexMessage], None] = lambda message: None  # noqa: ARG005
        """Told of what other replicas want, or tell, of engines' blocks."""
        self.beat_s = beat_s
        self._clock = clock
        self._company = self._said = Company.ALONE
        self._known: frozenset[str] = frozenset()
        self.company_since = time.time()
        """The wall clock's time of its last change."""
        self._is_flush_due = False
        self._is_over = False
        self._asked_by: set[str] = set()
        self._state_not_before = 0.0
        self._namesake_lines = Sparingly(_COMPLAIN_EVERY_S)
        self._malformed_lines = Sparingly(_COMPLAIN_EVERY_S)

    @property
    def company(self) -> Company:
        """Whether other replicas are heard."""
        if not self.bus.is_connected:
            return Company.ALONE
        if not self.mirror.replicas():
            return Company.SINGLE
        return Company.CATCHING_UP if self.mirror.uncertain() else Company.SHARED

    async def run(self) -> None:
        """Tell and follow until cancelled."""
        self.shared.on_news = self._flush_soon
        self._is_over = False
        hearing = asyncio.create_task(self.bus.run(self._hear), name="replica bus")
        try:
            await self._keep_beating(hearing)
        finally:
            self.shared.on_news = None
            self._flush()
            self._is_over = True  # what is still to be flushed would be news of a stranger
            self.bus.publish(encode_message(self.ledger.bye()))
            hearing.cancel()
            await asyncio.gather(hearing, return_exceptions=True)

    async def _keep_beating(self, hearing: "asyncio.Task[None]") -> None:
        next_beat = 0.0
        while not hearing.done():
            now = self._clock()
            if now >= next_beat:
                next_beat = now + self.beat_s
                self._flush()
                self._tell(encode_message(self.ledger.beat()))
                self.shared.tidy(now)
            self._do(self.mirror.tick(now), now)
            self._answer(now)
            self._note_others()
            self._note_company()
            await asyncio.sleep(TICK_S)
        hearing.result()

    def _note_others(self) -> None:
        heard = frozenset(self.mirror.replicas())
        if heard == self._known:
            return
        for name in sorted(heard - self._known):
            log.info("replicas: %s has joined", name)
        for name in sorted(self._known - heard):
            log.info("replicas: %s is gone, and its bookings with it", name)
        self._known = heard

    def _note_company(self) -> None:
        company = self.company
        if company is self._company:
            return
        self._company = company
        self.company_since = time.time()
        if company in (Company.CATCHING_UP, self._said):
            return  # a message was lost, and is asked for: that is counted, and soon over
        self._said = company
        level = logging.WARNING if company is Company.ALONE else logging.INFO
        log.log(level, "replicas: %s (others heard: %d)", company, len(self._known))

    # Telling

    def _flush_soon(self) -> None:
        if not self._is_flush_due:
            self._is_flush_due = True
            asyncio.get_running_loop().call_soon(self._flush)

    def _flush(self) -> None:
        self._is_flush_due = False
        if self._is_over:
            return
        for ops in self.ledger.flush():
            self._tell(encode_message(ops))

    def _tell(self, payload: bytes) -> None:
        self.stats.told += 1
        self.stats.told_bytes += len(payload)
        self.bus.publish(payload)

    def _answer(self, now: float) -> None:
        """Send our state to all who asked for it since the last time."""
        if not self._asked_by or now < self._state_not_before:
            return
        started = time.perf_counter()
        self._flush()
        payloads = [encode_message(state) for state in self.ledger.state(now)]
        for replica in self._asked_by:
            for payload in payloads:
                self.bus.send(replica, payload)
        self.stats.states_told += len(self._asked_by)
        self._asked_by.clear()
        spent_s = time.perf_counter() - started
        self._state_not_before = now + max(STATE_PAUSE_S, spent_s / STATE_SHARE)

    def publish(self, message: IndexMessage) -> None:
        """Ask all others."""
        self.bus.publish(encode_message(message))

    def send(self, to: str, message: IndexMessage) -> None:
        """Tell one of the others."""
        self.bus.send(to, encode_message(message))

    # Following

    def _hear(self, payload: bytes) -> None:
        now = self._clock()
        try:
            message = decode_message(payload)
        except MalformedMessage as error:
            self.stats.malformed += 1
            times = self._malformed_lines.due(now)
            if times:
                log.warning(
                    "replicas: a message that is none, of another version perhaps: %s "
                    "(%d such since the last line)",
                    error,
                    times,
                )
            return
        if isinstance(message, Ask):
            if message.replica != self.ledger.replica and message.of in ("", self.ledger.replica):
                self._asked_by.add(message.replica)
                self._answer(now)
            return
        if isinstance(message, IndexMessage):
            if message.replica != self.ledger.replica:
                self.on_index(message)
            return
        namesakes = self.mirror.stats.namesakes
        self._do(self.mirror.hear(message, now), now)
        if self.mirror.stats.namesakes > namesakes and self._namesake_lines.due(now):
            log.warning(
                "replicas: another running router is named %s too, and neither sees the other's "
                "requests: give each a replicas.name of its own, or none",
                self.ledger.replica,
            )

    def _do(self, commands: list[Command], now: float) -> None:
        shared = self.shared
        for command in commands:
            if isinstance(command, Added):
                shared.add(command.key, command.booking, now)
                self.expect(command.booking, now)
            elif isinstance(command, Prefilled):
                shared.prefilled(command.key, now)
            elif isinstance(command, Grown):
                shared.grow(command.key, command.own_blocks)
            elif isinstance(command, Dropped):
                shared.drop(command.key, now)
            elif isinstance(command, Expected):
                self.expect(command.booking, now)
            elif isinstance(command, SendAsk):
                ask = Ask(self.ledger.replica, self.ledger.epoch, command.replica)
                self.bus.send(command.replica, encode_message(ask))
