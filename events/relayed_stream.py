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
* A question without an answer is asked again. When that was of no use several times and batches
  wait, the gap is lost: the blocks go, the waiting batches are applied, and the rank is DEGRADED
  and asked about from time to time. When nothing is heard at all there is no relay: CONNECTING.
* Relays say again and again how far they are. One that has been silent for `relay_silent_s` is
  lost, whatever it was at: CONNECTING. Its next word begins with a question.
* What waits is bounded; when it is too much it is dropped, which is a gap like any other.
"""

from typing import TypeAlias

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


class RelayedStream:
    """One rank. Feed it what happens, carry out what it returns; `now` is monotonic, in seconds.

    Call `tick` when `deadline()` has come. `rule` is the version of our own hash rule.
    `silent_since` is when the relay was last heard if it is lost for its silence, else None.
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
        self._rule = rule
        self._settings = settings or SubscriptionSettings()
        self._relay_silent_s = relay_silent_s
        self._heard_at = 0.0
        """When the relay was heard last; since the connect at the earliest."""
        self._epoch_since = 0.0
        self._phase = StreamState.CONNECTING
        self._announced = StreamState.CONNECTING
        self._relay_hears = StreamState.LIVE
        self._is_linked = False
        self._next = 0
        self._head = 0
        self._waiting: dict[int, Batch] = {}
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
        if self._phase is not StreamState.LIVE:
            return self._phase
        if self._relay_hears is not StreamState.LIVE:
            return self._relay_hears
        return StreamState.SILENT if self._silent else StreamState.LIVE

    def deadline(self) -> float | None:
        """When `tick` is due; None if nothing is waited for."""
        waited_for = (self._ask_again_at, self._silence_due(), self._relay_lost_at())
        return min((at for at in waited_for if at is not None), default=None)

    # What happens

    def connected(self, now: float) -> list[Command]:
        """There is a connection, and the subscriptions stand."""
        self._is_linked = True
        self._hear(now)
        self._begin_asking(now)
        return self._commands()

    def disconnected(self) -> list[Command]:
        """There is none any more."""
        self._is_linked = False
        self.silent_since = None
        self._lose_touch()
        return self._commands()

    def live(self, message: Batch | Head, now: float) -> list[Command]:
        """A published message."""
        if isinstance(message, Head) and message.rule != self._rule:
            self._out.append(
                Complain(f"blocks are hashed by rule {message.rule}, not {self._rule}")
            )
            return self._commands()
        if self._is_linked and self._is_of_now(message, now):
            if isinstance(message, Head):
                self._take_head(message, now)
            else:
                self._take_batch(message, now)
        return self._commands()

    def answered(self, answer: Answer, now: float) -> list[Command]:
        """A part of an answer."""
        if answer.attempt != self._attempt or self._phase is not StreamState.REPLAYING:
            return []
        epoch = answer.bodies[-1].epoch if answer.bodies else 0
        if epoch < self._answers_epoch:
            return []  # of the other of two relays; both hear the question
        if epoch > self._answers_epoch:
            self._answers, self._answers_epoch = {}, epoch
        self._hear(now)
        self._answers[answer.number] = answer
        self._ask_again_at = now + self._settings.replay_timeout_s
        if len(self._answers) == answer.total:
            bodies = [
                body for number in sorted(self._answers) for body in self._answers[number].bodies
            ]
            self._answers = {}
            self._take_answer(bodies, now)
        return self._commands()

    def tick(self, now: float) -> list[Command]:
        """Time has passed."""
        lost_at = self._relay_lost_at()
        if lost_at is not None and now >= lost_at:
            self.silent_since = self._heard_at
            self._lose_touch()
        silence = self._silence_due()
        if silence is not None and now >= silence:
            self._silent = True
        if self._ask_again_at is not None and now >= self._ask_again_at:
            if self._phase is StreamState.REPLAYING and self._tries >= self._settings.replay_tries:
                self._give_up(now)
            else:
                self._ask(now)
        return self._commands()

    def expect_blocks(self, now: float) -> None:
        """A request that should make the engine store blocks was sent to it."""
        if self._expecting_since is None:
            self._expecting_since = now

    def resync(self, now: float) -> list[Command]:
        """The index does not trust the rank's blocks: drop them and ask for the state."""
        self._drop_blocks(ResyncReason.REQUESTED, "the index asked for it")
        self._wants_state = True
        if self._is_linked:
            self._begin_asking(now)
        return self._commands()

    # Live messages

    def _is_of_now(self, message: Batch | Head, now: float) -> bool:
        if message.epoch < self.epoch and now < self._heard_at + self._relay_silent_s:
            self._ignore_older(message, now)
            return False
        if message.epoch != self.epoch:
            self._begin_epoch(message.epoch, now)
            self._begin_asking(now)
        self._hear(now)
        return True

    def _ignore_older(self, message: Batch | Head, now: float) -> None:
        self.stats.duplicates += 1
        if isinstance(message, Head) and now >= self._epoch_since + self._relay_silent_s:
            self._out.append(  # nothing is late for so long
                Complain("two relays publish the events of this engine; one is to be stopped")
            )

    def _begin_epoch(self, epoch: int, now: float) -> None:
        if self.epoch:
            older = "another relay is heard, with an older beginning; the later one is silent"
            detail = older if epoch < self.epoch else "the relay has begun anew"
            self._drop_blocks(ResyncReason.RESTART, detail)
        self.epoch, self._epoch_since = epoch, now
        self._next, self._head = 0, 0
        self._waiting.clear()

    def _hear(self, now: float) -> None:
        self._heard_at = now
        self.silent_since = None

    def _take_head(self, head: Head, now: float) -> None:
        self._relay_hears = _stream_state(head.stream)
        self._head = max(self._head, head.next)
        if self._phase is StreamState.CONNECTING:
            self._begin_asking(now)
        elif self._phase is not StreamState.REPLAYING and self._head > self._next:
            self.stats.gaps += 1
            self._begin_asking(now)

    def _take_batch(self, batch: Batch, now: float) -> None:
        if batch.seqno < self._next or batch.seqno in self._waiting:
            self.stats.duplicates += 1
            return
        asking = self._phase in (StreamState.REPLAYING, StreamState.CONNECTING)
        if batch.seqno == self._next and not asking:
            self._deliver(batch, now, replayed=False)
            return
        self._hold(batch)
        if not asking:
            self.stats.gaps += 1
        if self._phase is not StreamState.REPLAYING:
            self._begin_asking(now)

    def _hold(self, batch: Batch) -> None:
        if len(self._waiting) >= self._settings.max_waiting_batches:
            self.stats.overflows += 1
            self._waiting.clear()
        self._waiting[batch.seqno] = batch

    # Asking

    def _begin_asking(self, now: float) -> None:
        self._tries = 0
        self._ask(now)

    def _ask(self, now: float) -> None:
        self._phase = StreamState.REPLAYING
        self._attempt += 1
        self._tries += 1
        self._answers, self._answers_epoch = {}, self.epoch
        self.stats.replays += 1
        self._ask_again_at = now + self._settings.replay_timeout_s
        start = WHOLE_STATE if self._wants_state else self._next
        self._out.append(RequestReplay(start, self._attempt))

    def _give_up(self, now: float) -> None:
        self._ask_again_at = now + self._settings.replay_pause_s
        self._tries = self._settings.replay_tries - 1
        if self._waiting:
            first = min(self._waiting)
            if first > self._next:
                self._drop_blocks(ResyncReason.REPLAY_FAILED, f"no answer about batch {self._next}")
                self._next = first
                self._wants_state = True
            self._phase = StreamState.DEGRADED
            self._drain(now)
        else:
            self._phase = StreamState.CONNECTING

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
        self._ask_again_at = None
        self._phase = StreamState.LIVE
        self._drain(now)

    def _drain(self, now: float) -> None:
        """Apply what waits and is next; ask again if there is a gap before the rest."""
        while self._next in self._waiting:
            self._deliver(self._waiting.pop(self._next), now, replayed=False)
        for seqno in [seqno for seqno in self._waiting if seqno < self._next]:
            del self._waiting[seqno]
        if self._phase is StreamState.LIVE and (self._waiting or self._head > self._next):
            self._begin_asking(now)
        elif self._phase is StreamState.DEGRADED:
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

    def _lose_touch(self) -> None:
        """Nobody is there to be asked, or to go on with what waits."""
        self._phase = StreamState.CONNECTING
        self._ask_again_at = None
        self._waiting.clear()
        self._expecting_since, self._silent = None, False

    def _relay_lost_at(self) -> float | None:
        if not self.epoch or self._phase is StreamState.CONNECTING:
            return None
        return self._heard_at + self._relay_silent_s

    def _silence_due(self) -> float | None:
        if self._expecting_since is None or self._silent or self._phase is not StreamState.LIVE:
            return None
        return self._expecting_since + self._settings.silent_after_s

    def _commands(self) -> list[Command]:
        if self.state is not self._announced:
            self._announced = self.state
            self._out.append(StateChanged(self._announced))
        out, self._out = self._out, []
        return out


def _stream_state(name: str) -> StreamState:
    try:
        return StreamState(name)
    except ValueError:
        return StreamState.DEGRADED
