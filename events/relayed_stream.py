"""The state machine of one rank that is heard through a relay: what to apply, and what to ask for.

Rules

* A batch at `next` is applied; one below it is a duplicate; one above it, or a head that is, is a
  gap. Then the relay is asked for all from `next` on, and live batches wait.
* A higher epoch is another beginning: the rank's blocks go, and the relay is asked for what it has.
  A lower one is late, or another relay's, and means nothing, so what was removed never comes back;
  unless the higher one has been silent for `relay_silent_s`. Then whoever speaks is followed: the
  relay that was stopped was the second of two, or was started again by a clock that went back.
* An answer counts when all of its messages are there. It has the missing batches, or a state (which
  begins with a clear) and the batches on top of it.
* After each connect the relay is asked: what was published meanwhile is lost, and nothing tells.
* A question without an answer is asked again; when the relay is heard for the first time since the
  connect, from the start: it was not there to be asked. When that was of no use several times and
  batches wait, the gap is lost: the blocks go, the waiting batches are applied, and the rank is
  DEGRADED and asked about from time to time. When nothing is heard at all there is no relay:
  CONNECTING.
* A batch that was there before the question and is beyond the end that the answer tells is no batch
  of this relay's, and dropped: waiting for what is before it would be to ask for ever.
* Relays say again and again how far they are. One that has been silent for `relay_silent_s` is
  lost, whatever it was at: CONNECTING. Its next word begins with a question.
* What waits is bounded; when it is too much it is dropped, which is a gap like any other.
* Blocks that are hashed by another rule cannot be used: neither heads, batches nor answers of such
  a relay count.

The table at the end of the class says which handler takes which input in which phase.
"""

from collections.abc import Callable
from enum import Enum, auto
from typing import Any, ClassVar, TypeAlias

from events.relayed import (
    RELAY_SILENT_S,
    Answer,
    Batch,
    Head,
    MalformedRelayed,
    StatePart,
    to_batch,
)
from events.stream import (
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

WHOLE_STATE = -1
"""The `start` of a request that wants the state whatever the history has."""

_Body: TypeAlias = Batch | StatePart | Head


class Phase(Enum):
    """Where the stream is.

    APART: no connection. UNHEARD: connected, but no relay is heard. ASKING: a question is
    outstanding and live batches wait. FOLLOWING: batches are applied as they come. DEGRADED:
    likewise, but what was missed could not be had.
    """

    APART = auto()
    UNHEARD = auto()
    ASKING = auto()
    FOLLOWING = auto()
    DEGRADED = auto()


class Input(Enum):
    """What can happen to the stream."""

    CONNECTED = auto()
    DISCONNECTED = auto()
    HEAD = auto()
    BATCH = auto()
    OTHER_EPOCH = auto()  # a head or a batch of another beginning
    OTHER_RULE = auto()  # a head, maybe in an answer, of blocks that are hashed otherwise
    ANSWERED = auto()
    OVERDUE = auto()
    SILENCE = auto()  # nothing was heard for `relay_silent_s`
    RESYNC = auto()


_STATES = {
    Phase.APART: StreamState.CONNECTING,
    Phase.UNHEARD: StreamState.CONNECTING,
    Phase.ASKING: StreamState.REPLAYING,
    Phase.FOLLOWING: StreamState.LIVE,
    Phase.DEGRADED: StreamState.DEGRADED,
}
_Fed: TypeAlias = Batch | Head | Answer
_NOTHING = Head(0, 0, "", 0)


class RelayedStream:
    """One rank. Feed it what happens, carry out what it returns; `now` is monotonic, in seconds.

    Call `tick` when `deadline()` has come. `rule` is the version of our own hash rule.
    `silent_since` is when the relay was last heard if it is lost for its silence, else None;
    `other_rule` is the hash rule of a relay that cannot be used, if no other was heard since.
    `rival_heard_at` is when another relay of this rank was last heard, with an older beginning.
    """

    def __init__(
        self,
        rule: int,
        settings: SubscriptionSettings | None = None,
        *,
        relay_silent_s: float = RELAY_SILENT_S,
    ) -> None:
        self.stats = StreamStats()
        self.epoch = 0
        self.silent_since: float | None = None
        self.other_rule: int | None = None
        self.rival_heard_at: float | None = None
        self._rule = rule
        self._other_rule_epoch: int | None = None
        self._settings = settings or SubscriptionSettings()
        self._relay_silent_s = relay_silent_s
        self._heard_at = 0.0
        """When the relay was heard last; since the connect at the earliest."""
        self._is_unheard = True
        """Since the connect."""
        self._epoch_since = 0.0
        self._phase = Phase.APART
        self._announced = StreamState.CONNECTING
        self._relay_hears = StreamState.LIVE
        self._next = 0
        self._head = 0
        self._waiting: dict[int, Batch] = {}
        self._waited_before: frozenset[int] = frozenset()
        """What waited when the question was asked."""
        self._attempt = 0
        self._tries = 0
        self._ask_again_at: float | None = None
        self._wants_state = False
        self._answers: dict[int, Answer] = {}
        self._answers_epoch = 0
        self._expecting_since: float | None = None
        self._silent = False
        self._out: list[Command] = []

    @property
    def state(self) -> StreamState:
        """The state as others should see it: that of the worse half of the way."""
        if self._phase is not Phase.FOLLOWING:
            return _STATES[self._phase]
        if self._relay_hears is not StreamState.LIVE:
            return self._relay_hears
        return StreamState.SILENT if self._silent else StreamState.LIVE

    @property
    def is_followed(self) -> bool:
        """Whether all that the relay has is here, whatever it hears of its engine."""
        return self._phase is Phase.FOLLOWING

    @property
    def is_heard(self) -> bool:
        """Whether the relay was heard since the connect."""
        return not self._is_unheard

    def deadline(self) -> float | None:
        """When `tick` is due; None if nothing is waited for."""
        waited_for = (self._ask_again_at, self._silence_due(), self._relay_lost_at())
        return min((at for at in waited_for if at is not None), default=None)

    # What happens

    def connected(self, now: float) -> list[Command]:
        """There is a connection, and the subscriptions stand."""
        return self._take(Input.CONNECTED, now)

    def disconnected(self) -> list[Command]:
        """There is none any more."""
        return self._take(Input.DISCONNECTED, self._heard_at)

    def live(self, message: Batch | Head, now: float) -> list[Command]:
        """A published message."""
        if isinstance(message, Head):
            is_ours = message.rule == self._rule
        else:
            is_ours = message.epoch != self._other_rule_epoch
        if not is_ours:
            what = Input.OTHER_RULE
        elif message.epoch != self.epoch:
            what = Input.OTHER_EPOCH
        else:
            what = _kind(message)
        return self._take(what, now, message)

    def answered(self, answer: Answer, now: float) -> list[Command]:
        """A part of an answer."""
        if answer.attempt != self._attempt or not answer.bodies:
            return []
        return self._take(Input.ANSWERED, now, answer)

    def tick(self, now: float) -> list[Command]:
        """Time has passed."""
        lost_at = self._relay_lost_at()
        if lost_at is not None and now >= lost_at:
            self._handle(Input.SILENCE, now)
        silence = self._silence_due()
        if silence is not None and now >= silence:
            self._silent = True
        if self._ask_again_at is not None and now >= self._ask_again_at:
            self._handle(Input.OVERDUE, now)
        return self._commands()

    def expect_blocks(self, now: float) -> None:
        """A request that should make the engine store blocks was sent to it."""
        if self._expecting_since is None:
            self._expecting_since = now

    def resync(self, now: float) -> list[Command]:
        """The index does not trust the rank's blocks: drop them and ask for the state."""
        return self._take(Input.RESYNC, now)

    # The machine

    def _take(self, what: Input, now: float, fed: _Fed = _NOTHING) -> list[Command]:
        self._handle(what, now, fed)
        return self._commands()

    def _handle(self, what: Input, now: float, fed: _Fed = _NOTHING) -> None:
        self._handlers[self._phase, what](self, fed, now)

    def _commands(self) -> list[Command]:
        if self.state is not self._announced:
            self._announced = self.state
            self._out.append(StateChanged(self._announced))
        out, self._out = self._out, []
        return out

    def _ignore(self, fed: _Fed, now: float) -> None: ...

    # Connecting

    def _greet(self, _fed: _Fed, now: float) -> None:
        self._hear(now)
        self._is_unheard = True
        self._begin_asking(now)

    def _part(self, _fed: _Fed, _now: float) -> None:
        self.silent_since = self.other_rule = None
        self._lose_touch(Phase.APART)

    def _lose_relay(self, _fed: _Fed, _now: float) -> None:
        self.silent_since = self._heard_at
        self._lose_touch(Phase.UNHEARD)

    def _lose_touch(self, phase: Phase) -> None:
        """Nobody is there to be asked, or to go on with what waits."""
        self._phase = phase
        self._ask_again_at = None
        self._waiting.clear()
        self._expecting_since, self._silent = None, False

    # Other beginnings, and other rules

    def _judge_epoch(self, fed: Batch | Head, now: float) -> None:
        if fed.epoch < self.epoch and now < self._heard_at + self._relay_silent_s:
            self._ignore_older(fed, now)
            return
        self._begin_epoch(fed.epoch, now)
        self._begin_asking(now)
        self._handle(_kind(fed), now, fed)

    def _ignore_older(self, message: Batch | Head, now: float) -> None:
        self.stats.duplicates += 1
        if isinstance(message, Head) and now >= self._epoch_since + self._relay_silent_s:
            self.rival_heard_at = now  # nothing is late for so long
            self._out.append(
                Complain("two relays publish the events of this engine; one is to be stopped")
            )

    def _begin_epoch(self, epoch: int, now: float) -> None:
        if self.epoch:
            older = "another relay is heard, with an older beginning; the later one is silent"
            detail = older if epoch < self.epoch else "the relay has begun anew"
            self._drop_blocks(ResyncReason.RESTART, detail)
        self.epoch, self._epoch_since = epoch, now
        self.rival_heard_at = None
        self._next, self._head = 0, 0
        self._waiting.clear()

    def _hear(self, now: float) -> None:
        self._heard_at = now
        self._is_unheard = False
        self.silent_since = self.other_rule = None

    def _refuse(self, fed: Batch | Head, _now: float) -> None:
        """Batches of its may wait already: they do not say by which rule they are."""
        if not isinstance(fed, Head):
            return
        self.other_rule, self._other_rule_epoch = fed.rule, fed.epoch
        if self.epoch == fed.epoch:
            self._waiting.clear()
        self._out.append(Complain(f"blocks are hashed by rule {fed.rule}, not {self._rule}"))

    # Live messages

    def _meet_head(self, fed: Head, now: float) -> None:
        self._note_head(fed, now)
        self._begin_asking(now)

    def _note_head(self, fed: Head, now: float) -> None:
        self._hear(now)
        self._relay_hears = _stream_state(fed.stream)
        self._head = max(self._head, fed.next)

    def _compare_head(self, fed: Head, now: float) -> None:
        self._note_head(fed, now)
        if self._head > self._next:
            self.stats.gaps += 1
            self._begin_asking(now)

    def _meet_batch(self, fed: Batch, now: float) -> None:
        if self._wait(fed, now):
            self._begin_asking(now)

    def _wait(self, fed: Batch, now: float) -> bool:
        """Keep a batch for later; False if it is none to be kept."""
        self._hear(now)
        if fed.seqno < self._next or fed.seqno in self._waiting:
            self.stats.duplicates += 1
            return False
        if len(self._waiting) >= self._settings.max_waiting_batches:
            self.stats.overflows += 1
            self._waiting.clear()
        self._waiting[fed.seqno] = fed
        return True

    def _hold(self, fed: Batch, now: float) -> None:
        was_unheard = self._is_unheard
        self._wait(fed, now)
        self._ask_who_is_back(now, was_unheard=was_unheard)

    def _heed_head(self, fed: Head, now: float) -> None:
        was_unheard = self._is_unheard
        self._note_head(fed, now)
        self._ask_who_is_back(now, was_unheard=was_unheard)

    def _ask_who_is_back(self, now: float, *, was_unheard: bool) -> None:
        """The first question may be on its way to it; of later ones it can't have heard."""
        if was_unheard and self._tries > 1:
            self._begin_asking(now)

    def _follow(self, fed: Batch, now: float) -> None:
        if fed.seqno == self._next:
            self._hear(now)
            self._deliver(fed, now, replayed=False)
        elif self._wait(fed, now):
            self.stats.gaps += 1
            self._begin_asking(now)

    # Asking

    def _begin_asking(self, now: float) -> None:
        self._tries = 0
        self._ask(_NOTHING, now)

    def _ask(self, _fed: _Fed, now: float) -> None:
        self._phase = Phase.ASKING
        self._attempt += 1
        self._tries += 1
        self._answers, self._answers_epoch = {}, self.epoch
        self._waited_before = frozenset(self._waiting)
        self.stats.replays += 1
        self._ask_again_at = now + self._settings.replay_timeout_s
        start = WHOLE_STATE if self._wants_state else self._next
        self._out.append(RequestReplay(start, self._attempt))

    def _try_again(self, fed: _Fed, now: float) -> None:
        if self._tries < self._settings.replay_tries:
            self._ask(fed, now)
        else:
            self._give_up(now)

    def _give_up(self, now: float) -> None:
        self._ask_again_at = now + self._settings.replay_pause_s
        self._tries = self._settings.replay_tries - 1
        if self._waiting:
            first = min(self._waiting)
            if first > self._next:
                self._drop_blocks(ResyncReason.REPLAY_FAILED, f"no answer about batch {self._next}")
                self._next = first
                self._wants_state = True
            self._phase = Phase.DEGRADED
            self._drain(now)
        else:
            self._phase = Phase.UNHEARD

    def _mistrust(self, _fed: _Fed, _now: float) -> None:
        self._drop_blocks(ResyncReason.REQUESTED, "the index asked for it")
        self._wants_state = True

    def _mistrust_and_ask(self, fed: _Fed, now: float) -> None:
        self._mistrust(fed, now)
        self._begin_asking(now)

    # Answers

    def _take_part(self, fed: Answer, now: float) -> None:
        last = fed.bodies[-1]
        if isinstance(last, Head) and last.rule != self._rule:
            self._handle(Input.OTHER_RULE, now, last)
            return
        if last.epoch < self._answers_epoch:
            return  # of the other of two relays; both hear the question
        if last.epoch > self._answers_epoch:
            self._answers, self._answers_epoch = {}, last.epoch
        self._hear(now)
        self._answers[fed.number] = fed
        self._ask_again_at = now + self._settings.replay_timeout_s
        if len(self._answers) == fed.total:
            bodies = [
                body for number in sorted(self._answers) for body in self._answers[number].bodies
            ]
            self._answers = {}
            self._take_answer(bodies, now)

    def _take_answer(self, bodies: list[_Body], now: float) -> None:
        epoch = bodies[-1].epoch
        if epoch > self.epoch:
            self._begin_epoch(epoch, now)
        for body in bodies:
            if isinstance(body, StatePart):
                self._deliver_state(body)
            elif isinstance(body, Batch):
                if body.seqno == self._next:
                    self._deliver(body, now, replayed=True)
            else:
                self._relay_hears = _stream_state(body.stream)
                self._head = body.next
                self._drop_beyond(body.next)
        self._ask_again_at = None
        self._phase = Phase.FOLLOWING
        self._drain(now)

    def _drop_beyond(self, end: int) -> None:
        for seqno in self._waited_before & self._waiting.keys():
            if seqno >= end:
                del self._waiting[seqno]
                self._out.append(Complain(f"batch {seqno} is dropped: the relay is at {end}"))

    def _drain(self, now: float) -> None:
        """Apply what waits and is next; ask again if there is a gap before the rest."""
        while self._next in self._waiting:
            self._deliver(self._waiting.pop(self._next), now, replayed=False)
        for seqno in [seqno for seqno in self._waiting if seqno < self._next]:
            del self._waiting[seqno]
        if self._phase is Phase.FOLLOWING and (self._waiting or self._head > self._next):
            self._begin_asking(now)
        elif self._phase is Phase.DEGRADED:
            self._waiting.clear()

    # What comes of it

    def _deliver_state(self, part: StatePart) -> None:
        self._wants_state = False
        self.stats.cold = False
        self._next = part.next
        self.stats.last_seqno = part.next - 1 if part.next else None
        self._apply(part.next, 0.0, part, replayed=True)

    def _deliver(self, batch: Batch, now: float, *, replayed: bool) -> None:
        self._next = batch.seqno + 1
        self.stats.last_seqno = batch.seqno
        self.stats.batches += 1
        self.stats.events += len(batch.events)
        self._expecting_since, self._silent = None, False
        if not replayed:
            self.stats.last_batch_at = now
        self._apply(batch.seqno, batch.ts_s, batch, replayed=replayed)

    def _apply(self, seqno: int, ts_s: float, body: Batch | StatePart, *, replayed: bool) -> None:
        try:
            self._out.append(Deliver(seqno, to_batch(ts_s, body.events), replayed))
        except MalformedRelayed as error:
            self.stats.malformed_payloads += 1
            self._out.append(Complain(f"events that cannot be read: {error}"))
            self._drop_blocks(ResyncReason.MALFORMED, "events could not be read")

    def _drop_blocks(self, reason: ResyncReason, detail: str) -> None:
        self.stats.resyncs[reason] += 1
        self.stats.cold = True
        self._out.append(Resync(reason, detail))

    def _relay_lost_at(self) -> float | None:
        if not self.epoch or self._phase in (Phase.APART, Phase.UNHEARD):
            return None
        return self._heard_at + self._relay_silent_s

    def _silence_due(self) -> float | None:
        if self._expecting_since is None or self._silent or self._phase is not Phase.FOLLOWING:
            return None
        return self._expecting_since + self._settings.silent_after_s

    # Which handler takes which input in which phase. Answers that come when no question is
    # outstanding are late ones.
    # Each is fed what belongs to its input, so there is no one type.
    _Handler: TypeAlias = Callable[["RelayedStream", Any, float], None]
    # fmt: off
    _ROWS: ClassVar[dict[Phase, tuple[_Handler, ...]]] = {
        # CONNECTED, DISCONNECTED, HEAD, BATCH, OTHER_EPOCH, OTHER_RULE,
        # ANSWERED, OVERDUE, SILENCE, RESYNC
        Phase.APART:
            (_greet, _part, _ignore, _ignore, _ignore, _ignore,
             _ignore, _ignore, _ignore, _mistrust),
        Phase.UNHEARD:
            (_greet, _part, _meet_head, _meet_batch, _judge_epoch, _refuse,
             _ignore, _ask, _ignore, _mistrust_and_ask),
        Phase.ASKING:
            (_greet, _part, _heed_head, _hold, _judge_epoch, _refuse,
             _take_part, _try_again, _lose_relay, _mistrust_and_ask),
        Phase.FOLLOWING:
            (_greet, _part, _compare_head, _follow, _judge_epoch, _refuse,
             _ignore, _ignore, _lose_relay, _mistrust_and_ask),
        Phase.DEGRADED:
            (_greet, _part, _compare_head, _follow, _judge_epoch, _refuse,
             _ignore, _ask, _lose_relay, _mistrust_and_ask),
    }
    # fmt: on
    _handlers: ClassVar[dict[tuple[Phase, Input], _Handler]] = {
        (phase, what): handler
        for phase, row in _ROWS.items()
        for what, handler in zip(Input, row, strict=True)
    }


def _kind(message: Batch | Head) -> Input:
    return Input.HEAD if isinstance(message, Head) else Input.BATCH


def _stream_state(name: str) -> StreamState:
    try:
        return StreamState(name)
    except ValueError:
        return StreamState.DEGRADED
