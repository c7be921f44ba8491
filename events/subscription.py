"""The state machine of one publisher: which batches to apply, what to ask for, what to give up.

A publisher numbers its batches 0, 1, 2, ... and keeps the newest of them for replay; a restarted
one begins at 0 again and says nothing. It sends no heartbeat, so an idle one is not heard at all.
`Subscription` is told what the sockets saw and answers with commands; it does no I/O.

Rules

* `next` is the seqno to apply next: every batch below it was applied or given up. A live batch at
  `next` is applied. One above it is a gap (0 is where everything begins, so a first batch above 0
  is one too): a replay is asked for and live batches wait. One below it that we remember is a
  duplicate and dropped, and so is one that the live stream brings in order while a replay is
  ahead of it; any other is another engine's: a restart.
* After each connect the history is asked for from a little before `next`, so that the answer shows
  whether it is still the one we know: the digests of the newest batches are kept for that. An
  answer that differs, or that ends before `next`, is a restart; one that begins only at `next` or
  behind it proves nothing, and counts as a loss. A gap is asked for in the same way: a restarted
  engine that is ahead of us looks like a gap at first.
* What the replay does not give is lost: the rank is resynced (its blocks go, it is `cold`), and
  what did come is applied. Whether it gives everything is seen from the seqnos alone; the end
  marker proves nothing, since engines drop replies to slow readers.
* A gap that was known when the replay was asked for, and is still there when it ends, is lost. One
  that shows up only later (the subscription became effective after the answer was made) is asked
  for again.
* A replay that makes no progress is tried again, `replay_tries` times in all. Then live batches go
  on without it (DEGRADED). After `replay_pause_s`, and after twice as long each time that fails,
  it is tried once more; gaps in the meantime are lost at once.
* Without a replay socket a gap is lost at once, and a reconnect is judged by the first batch after
  it. Blocks stay until then: dropping them at each blip of the network would cost more than the
  few requests that a restarted, idle engine gets wrongly.
* A payload that cannot be read loses what it said, removals among it: the rank is resynced.
* Waiting batches are bounded. When there are too many they are dropped, which is a gap like any
  other.

The table at the end of the class says which handler takes which input in which state.
"""

from collections.abc import Callable, Sequence
from enum import Enum, auto
from typing import ClassVar, TypeAlias

from events.codec import MalformedBatch, decode_batch
from events.history import Backlog, History, Message, Position
from events.model import BlocksCleared, EventBatch
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

END_OF_REPLAY = 2**64 - 1
SEQNO_BYTES = 8


class Input(Enum):
    """What can happen to a subscription."""

    CONNECTED = auto()
    DISCONNECTED = auto()
    LIVE = auto()
    REPLAYED = auto()
    REPLAY_ENDED = auto()
    OVERDUE = auto()
    WORK = auto()
    RESYNC = auto()


_NOTHING = Message(-1, b"")


class Subscription:
    """One publisher as its subscriber sees it. Feed it what happens; carry out what it returns.

    Each method returns commands, which have to be carried out in order. `now` is monotonic, in
    seconds. Call `tick` when `deadline()` has come, and `work` soon while `has_work` is true: that
    is how a long backlog is applied in portions.
    """

    def __init__(self, settings: SubscriptionSettings | None = None) -> None:
        self.stats = StreamStats()
        self._settings = settings = settings or SubscriptionSettings()
        self._phase = StreamState.CONNECTING
        self._announced = StreamState.CONNECTING
        self._history = History(settings.remembered_batches)
        self._waiting = Backlog(settings.max_waiting_batches, settings.max_waiting_bytes)
        self._mended = True
        self._attempt = 0
        self._tries = 0
        self._asked_at = 0.0
        self._progress_at = 0.0
        self._live_when_asked = -1
        self._last_live = -1
        self._replayed_to = 0
        self._overlap = 0
        self._replies = 0
        self._no_replay_before = float("-inf")
        self._pause_s = settings.replay_pause_s
        self._expecting_since: float | None = None
        self._silent = False
        self._out: list[Command] = []

    # What is known

    @property
    def state(self) -> StreamState:
        """The state as others should see it."""
        if self._silent and self._phase in _FOLLOWING:
            return StreamState.SILENT
        return self._phase

    @property
    def has_work(self) -> bool:
        """Whether `work` should be called soon."""
        return self._phase is StreamState.CATCHING_UP

    def deadline(self) -> float | None:
        """When `tick` is due; None if nothing is waited for."""
        due = [at for at in (self._replay_due(), self._silence_due()) if at is not None]
        return min(due, default=None)

    def position(self) -> Position | None:
        """How far it is, for somebody who goes on from here; None if something is outstanding."""
        if self._phase not in _FOLLOWING:
            return None
        return self._history.position(cold=self.stats.cold)

    # What happens

    def restore(self, position: Position) -> None:
        """Begin as somebody who has followed the publisher so far, and lost the connection then.

        To be called before anything else has happened. Whether it still is the same publisher shows
        as after any loss of the connection.
        """
        if self._phase is not StreamState.CONNECTING or self._history.next:
            raise ValueError(f"only a subscription that has not begun can be restored: {self!r}")
        self._history.restore(position)
        self.stats.cold = position.cold
        self.stats.last_seqno = position.next - 1 if position.next else None

    def connected(self, now: float) -> list[Command]:
        """The connection stands, for the first time or again."""
        return self._take(Input.CONNECTED, now)

    def disconnected(self, now: float) -> list[Command]:
        """The connection is gone. Feed what had been received on it first."""
        return self._take(Input.DISCONNECTED, now)

    def live(self, frames: Sequence[bytes], now: float) -> list[Command]:
        """A published message: `[topic, seqno, payload]` if it is well formed."""
        if len(frames) != 3 or len(frames[1]) != SEQNO_BYTES:  # noqa: PLR2004  the wire's three
            return self._malformed(frames)
        seqno = int.from_bytes(frames[1], "big")
        if seqno == END_OF_REPLAY:
            return self._malformed(frames)
        commands = self._take(Input.LIVE, now, Message(seqno, frames[2]))
        self._last_live = seqno
        return commands

    def replayed(self, attempt: int, frames: Sequence[bytes], now: float) -> list[Command]:
        """A reply to replay request `attempt`, as a DEALER sees it.

        `[b"", topic, seqno, payload]`, or without the topic (before 0.26); the end marker is a
        seqno of all ones.
        """
        if len(frames) not in {3, 4} or len(frames[-2]) != SEQNO_BYTES:
            return self._malformed(frames)
        if attempt != self._attempt:
            return []
        seqno = int.from_bytes(frames[-2], "big")
        if seqno == END_OF_REPLAY:
            return self._take(Input.REPLAY_ENDED, now)
        return self._take(Input.REPLAYED, now, Message(seqno, frames[-1]))

    def work(self, now: float) -> list[Command]:
        """Apply the next portion of what waits."""
        return self._take(Input.WORK, now)

    def tick(self, now: float) -> list[Command]:
        """Time has passed."""
        silence, replay = self._silence_due(), self._replay_due()
        if silence is not None and now >= silence:
            self._silent = True
        if replay is not None and now >= replay:
            return self._take(Input.OVERDUE, now)
        return self._commands()

    def expect_blocks(self, now: float) -> None:
        """A request that should make the engine store blocks was sent to it."""
        if self._expecting_since is None:
            self._expecting_since = now

    def resync(self, now: float) -> list[Command]:
        """The index does not trust the rank's blocks: drop them and read the history again."""
        return self._take(Input.RESYNC, now)

    # The machine

    def _take(self, what: Input, now: float, message: Message = _NOTHING) -> list[Command]:
        self._handlers[self._phase, what](self, message, now)
        return self._commands()

    def _commands(self) -> list[Command]:
        if self.state is not self._announced:
            self._announced = self.state
            self._out.append(StateChanged(self._announced))
        out, self._out = self._out, []
        return out

    def _malformed(self, frames: Sequence[bytes]) -> list[Command]:
        self.stats.malformed_frames += 1
        sizes = ", ".join(str(len(frame)) for frame in frames[:6])
        return [Complain(f"a message of {len(frames)} frames ({sizes} bytes)")]

    def _ignore(self, message: Message, now: float) -> None: ...

    # Connecting

    def _verify(self, _message: Message, now: float) -> None:
        """See whether it is the engine that we know, and what we missed."""
        self._tries = 0
        if self._settings.replay:
            self._ask(now)
        elif self._phase is StreamState.CONNECTING:
            self._follow_on()

    def _part(self, _message: Message, _now: float) -> None:
        """What waits may be the last words of an engine that is no more; a replay has it too."""
        self._stop_replay()
        self._waiting.clear()
        self._last_live, self._replayed_to = -1, 0
        self._expecting_since, self._silent = None, False
        self._phase = StreamState.CONNECTING

    def _first_sign(self, message: Message, now: float) -> None:
        """A batch may be read before the news of the connection that it came on."""
        self._verify(message, now)
        self._take_in(message, now)

    def _take_in(self, message: Message, now: float) -> None:
        self._handlers[self._phase, Input.LIVE](self, message, now)

    # Following the live stream

    def _follow(self, message: Message, now: float) -> None:
        if message.seqno == self._history.next:
            self._deliver(message, now, replayed=False)
        elif message.seqno > self._history.next:
            self.stats.gaps += 1
            self._hold(message)
            self._bridge(now)
        else:
            self._look_back(message, now)

    def _look_back(self, message: Message, now: float) -> None:
        """A seqno that was passed already: the same batch again, or another engine."""
        if self._history.has(message) or self._lags(message):
            self.stats.duplicates += 1
        else:
            self._meet_new_engine(message, now)

    def _lags(self, message: Message) -> bool:
        """Whether the live stream goes on as it should, and a replay is only further than it."""
        onward = self._last_live < message.seqno < self._replayed_to
        return onward and not self._history.contradicts(message)

    def _meet_new_engine(self, message: Message, now: float) -> None:
        self._forget_history(f"seqno {message.seqno} after {self._history.next - 1}")
        self._waiting.clear()
        self._hold(message)
        if message.seqno == 0:
            self._mended = True
            self._catch_up(now)
        else:
            self._bridge(now)

    def _bridge(self, now: float) -> None:
        """Get what is missing before the first waiting batch, or do without."""
        if self._may_ask(now):
            self._tries = 0
            self._ask(now)
        else:
            self._mended = False
            self._catch_up(now)

    def _may_ask(self, now: float) -> bool:
        return self._settings.replay and now >= self._no_replay_before

    # Waiting while a replay runs

    def _wait(self, message: Message, now: float) -> None:
        if message.seqno < self._history.next:
            self._look_back(message, now)
        else:
            self._hold(message)

    def _hold(self, message: Message) -> None:
        if not self._waiting.add(message):
            self.stats.duplicates += 1
        if self._waiting.overfull:
            self.stats.overflows += 1
            self._waiting.clear()

    # The replay

    def _ask(self, now: float) -> None:
        self._phase = StreamState.REPLAYING
        self._overlap = min(self._settings.overlap_batches, len(self._history))
        self._attempt += 1
        self._tries += 1
        self._replies = 0
        self._asked_at = self._progress_at = now
        self._live_when_asked = -1 if self._waiting.last is None else self._waiting.last
        self.stats.replays += 1
        self._out.append(RequestReplay(self._history.next - self._overlap, self._attempt))

    def _replay_due(self) -> float | None:
        """When the outstanding replay has failed, or a failed one may be tried again."""
        settings = self._settings
        if self._phase is StreamState.DEGRADED and settings.replay:
            return self._no_replay_before
        if self._phase is not StreamState.REPLAYING:
            return None
        patience = self._progress_at + settings.replay_timeout_s
        return min(patience, self._asked_at + settings.replay_total_s)

    def _silence_due(self) -> float | None:
        if self._expecting_since is None or self._silent or self._phase not in _FOLLOWING:
            return None
        return self._expecting_since + self._settings.silent_after_s

    def _stop_replay(self) -> None:
        if self._phase is StreamState.REPLAYING:
            self._out.append(CloseReplay())

    def _apply_reply(self, message: Message, now: float) -> None:
        self._progress_at = now
        self._replies += 1
        if message.seqno < self._history.next:
            if self._history.contradicts(message):
                self._learn_of_restart(f"another batch {message.seqno} than before", now)
            return
        if self._replies == 1 and (self._overlap or message.seqno > self._history.next):
            # Even if it begins right at `next`: nothing shows that it is still the same engine.
            self._skip_to(message.seqno, ResyncReason.REPLAY_LATE)
        elif message.seqno > self._history.next:
            self._skip_to(message.seqno, ResyncReason.REPLAY_HOLE)
        self._deliver(message, now, replayed=True)
        self._replayed_to = self._history.next
        self.stats.duplicates += self._waiting.drop_below(self._history.next)

    def _end_replay(self, _message: Message, now: float) -> None:
        if self._replies == 0 and self._overlap:
            # Even an engine that has published nothing since would have sent our last batch.
            self._learn_of_restart(f"its history ends before seqno {self._history.next - 1}", now)
            return
        self._mended = True
        self._pause_s = self._settings.replay_pause_s
        self._no_replay_before = float("-inf")
        self._catch_up(now)

    def _learn_of_restart(self, detail: str, now: float) -> None:
        """What waits came on the present connection: it is the new engine's."""
        self._forget_history(detail)
        self._tries = 0
        self._ask(now)

    def _try_again(self, _message: Message, now: float) -> None:
        if self._tries < self._settings.replay_tries:
            self._ask(now)
            return
        self._mended = False
        self._no_replay_before = now + self._pause_s
        self._pause_s = min(2 * self._pause_s, self._settings.replay_max_pause_s)
        self._catch_up(now)

    def _probe(self, _message: Message, now: float) -> None:
        """The replay socket may answer again; one try, since live batches wait for it."""
        self._tries = self._settings.replay_tries - 1
        self._ask(now)

    # Applying what waited

    def _catch_up(self, now: float) -> None:
        self._stop_replay()
        self._phase = StreamState.CATCHING_UP
        self._apply_portion(_NOTHING, now)

    def _apply_portion(self, _message: Message, now: float) -> None:
        for _ in range(self._settings.work_portion):
            first = self._waiting.first
            if first is None:
                self._follow_on()
                return
            if first > self._history.next and not self._give_up_gap(first, now):
                return
            self._follow(self._waiting.pop(), now)
            if self._phase is not StreamState.CATCHING_UP:
                return

    def _give_up_gap(self, seqno: int, now: float) -> bool:
        """Skip the gap before waiting `seqno`; False if it is worth asking for instead."""
        if seqno > self._live_when_asked and self._mended and self._may_ask(now):
            self.stats.gaps += 1
            self._bridge(now)
            return False
        self._skip_to(seqno, self._loss())
        return True

    def _loss(self) -> ResyncReason:
        if not self._settings.replay:
            return ResyncReason.GAP
        return ResyncReason.REPLAY_HOLE if self._mended else ResyncReason.REPLAY_FAILED

    def _follow_on(self) -> None:
        self._phase = StreamState.LIVE if self._mended else StreamState.DEGRADED

    # History

    def _deliver(self, message: Message, now: float, *, replayed: bool) -> None:
        self._history.add(message)
        self.stats.last_seqno = message.seqno
        try:
            batch = decode_batch(message.payload)
        except MalformedBatch as error:
            self._lose_payload(message, error)
            return
        if not self._is_ours(batch):
            return
        self._count(batch)
        if not replayed:
            self.stats.last_batch_at = now
            self._expecting_since, self._silent = None, False
        self._out.append(Deliver(message.seqno, batch, replayed))

    def _lose_payload(self, message: Message, error: MalformedBatch) -> None:
        self.stats.malformed_payloads += 1
        self._out.append(Complain(f"batch {message.seqno}: {error}"))
        self._drop_blocks(ResyncReason.MALFORMED, f"batch {message.seqno} could not be read")

    def _is_ours(self, batch: EventBatch) -> bool:
        ours = self._settings.dp_rank
        if batch.dp_rank in (None, ours):
            return True
        self.stats.foreign_dp_rank += 1
        if self.stats.foreign_dp_rank == 1:
            self._out.append(Complain(f"batches of dp rank {batch.dp_rank}, expected {ours}"))
        return not self._settings.strict_dp_rank

    def _count(self, batch: EventBatch) -> None:
        stats = self.stats
        stats.batches += 1
        stats.events += len(batch.events)
        if batch.skipped:
            stats.skipped.update(batch.skipped)
        if stats.cold and any(isinstance(event, BlocksCleared) for event in batch.events):
            stats.cold = False  # whatever we did not know of is gone

    def _skip_to(self, seqno: int, reason: ResyncReason) -> None:
        detail = f"expected batch {self._history.next}, got {seqno}"
        self._history.skip_to(seqno)
        self._waiting.drop_below(seqno)
        self._drop_blocks(reason, detail)

    def _forget_history(self, detail: str) -> None:
        """Another engine: its history begins at 0, and we don't know any of it."""
        self._drop_blocks(ResyncReason.RESTART, detail)
        self._start_over()

    def _start_over(self) -> None:
        self._history.skip_to(0)
        self._replayed_to = 0
        self.stats.cold = False
        self.stats.last_seqno = None

    def _drop_blocks(self, reason: ResyncReason, detail: str) -> None:
        self.stats.resyncs[reason] += 1
        self.stats.cold = True
        self._out.append(Resync(reason, detail))

    def _rewind(self, _message: Message, now: float) -> None:
        self._drop_blocks(ResyncReason.REQUESTED, "the index asked for it")
        if not self._settings.replay:
            return
        self._start_over()
        if self._phase is not StreamState.CONNECTING:
            self._tries = 0
            self._ask(now)

    def check(self) -> None:
        """Raise AssertionError if an invariant is broken."""
        phase, settings = self._phase, self._settings
        holding = phase in {StreamState.REPLAYING, StreamState.CATCHING_UP}
        self._waiting.check()
        for holds, rule in (
            (holding or not self._waiting, "batches wait for a replay, or to be applied"),
            (
                (self._waiting.first or 0) >= self._history.next or not self._waiting,
                "what waits was not passed",
            ),
            (len(self._history) <= self._history.next, "only what was applied is remembered"),
            (settings.replay or phase is not StreamState.REPLAYING, "replays need a socket"),
            (self._tries <= settings.replay_tries, "tries are bounded"),
            (not self._out, "each call returns its commands"),
            (self._announced is self.state, "each change of state is announced"),
        ):
            if not holds:
                raise AssertionError(f"{rule}: {self!r}")

    def __repr__(self) -> str:
        waiting = f" {len(self._waiting)} waiting" if self._waiting else ""
        return f"<Subscription {self.state} next {self._history.next}{waiting}>"

    # Which handler takes which input in which state. Replies that come when none is outstanding
    # are late ones; work is there only while catching up.
    _Handler: TypeAlias = Callable[["Subscription", Message, float], None]
    # fmt: off
    _ROWS: ClassVar[dict[StreamState, tuple[_Handler, ...]]] = {
        # CONNECTED, DISCONNECTED, LIVE, REPLAYED, REPLAY_ENDED, OVERDUE, WORK, RESYNC
        StreamState.CONNECTING:
            (_verify, _ignore, _first_sign, _ignore, _ignore, _ignore, _ignore, _rewind),
        StreamState.REPLAYING:
            (_verify, _part, _wait, _apply_reply, _end_replay, _try_again, _ignore, _rewind),
        StreamState.CATCHING_UP:
            (_verify, _part, _wait, _ignore, _ignore, _ignore, _apply_portion, _rewind),
        StreamState.LIVE:
            (_verify, _part, _follow, _ignore, _ignore, _ignore, _ignore, _rewind),
        StreamState.DEGRADED:
            (_verify, _part, _follow, _ignore, _ignore, _probe, _ignore, _rewind),
    }
    # fmt: on
    _handlers: ClassVar[dict[tuple[StreamState, Input], _Handler]] = {
        (state, what): handler
        for state, row in _ROWS.items()
        for what, handler in zip(Input, row, strict=True)
    }


_FOLLOWING = (StreamState.LIVE, StreamState.DEGRADED)
