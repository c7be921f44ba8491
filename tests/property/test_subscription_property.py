"""A subscription against a publisher that restarts, forgets, loses, repeats and reorders.

The oracle is the engine's own log. Whatever happens, the batches that were delivered since the last
resync are one unbroken run of one engine's log, each once and in order; and when things calm down,
the run ends where the engine's log ends, and begins where its buffer allows.
"""

from dataclasses import dataclass, field

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule
from support.streams import number_of, payload

from events.stream import (
    CloseReplay,
    Command,
    Deliver,
    RequestReplay,
    Resync,
    StreamState,
    SubscriptionSettings,
)
from events.subscription import Subscription

END = b"\xff" * 8
RUN = 100_000  # engine n numbers its batches from n * RUN, so that each is told apart


@dataclass
class Engine:
    """A publisher: its log, how much of it a replay still has, what is on its way."""

    number: int
    buffer_steps: int
    published: int = 0
    sent: list[int] = field(default_factory=list)

    def replies(self, start: int) -> list[int]:
        kept = range(max(0, self.published - self.buffer_steps), self.published)
        return [seqno for seqno in kept if seqno >= start]

    def frames(self, seqno: int) -> list[bytes]:
        body = payload(self.number * RUN + seqno)
        return [b"t", seqno.to_bytes(8, "big"), body]


class Stream(RuleBasedStateMachine):
    """Time is the machine's; the replay socket answers when it is told to."""

    @initialize(
        buffer_steps=st.integers(10, 40), portion=st.integers(1, 8), waiting=st.integers(3, 50)
    )
    def begin(self, buffer_steps: int, portion: int, waiting: int) -> None:
        self.core = Subscription(
            SubscriptionSettings(
                replay_tries=2,
                work_portion=portion,
                max_waiting_batches=waiting,
                remembered_batches=16,
                overlap_batches=4,
            )
        )
        self.now = 0.0
        self.buffer_steps = buffer_steps
        self.engine = Engine(0, buffer_steps)
        self.connected = False
        self.request: RequestReplay | None = None
        self.replies: list[int] | None = None
        self.run_held: list[int] = []

    def carry_out(self, commands: list[Command]) -> None:
        for command in commands:
            if isinstance(command, Deliver):
                self.run_held.append(number_of(command.batch))
            elif isinstance(command, Resync):
                self.run_held.clear()
            elif isinstance(command, RequestReplay):
                self.request, self.replies = command, None
            elif isinstance(command, CloseReplay):
                self.request, self.replies = None, None

    @rule(count=st.integers(1, 6), lost=st.sets(st.integers(0, 5)))
    def publish(self, count: int, lost: set[int]) -> None:
        for at in range(count):
            seqno, self.engine.published = self.engine.published, self.engine.published + 1
            if self.connected and at not in lost:
                self.engine.sent.append(seqno)

    @rule(data=st.data())
    def receive(self, data: st.DataObject) -> None:
        """Sometimes twice, sometimes one that should have come later."""
        for _ in range(min(4, len(self.engine.sent))):
            sent = self.engine.sent
            seqno = sent[data.draw(st.integers(0, min(1, len(sent) - 1)))]
            if data.draw(st.integers(0, 5)):
                sent.remove(seqno)
            self.carry_out(self.core.live(self.engine.frames(seqno), self.now))

    @precondition(lambda self: not self.connected)
    @rule()
    def connect(self) -> None:
        self.connected = True
        self.carry_out(self.core.connected(self.now))

    @precondition(lambda self: self.connected)
    @rule(restarted=st.booleans(), ahead=st.integers(0, 30))
    def lose_connection(self, restarted: bool, ahead: int) -> None:
        """All that was received is fed first, as the shell does."""
        for seqno in self.engine.sent:
            self.carry_out(self.core.live(self.engine.frames(seqno), self.now))
        self.engine.sent.clear()
        self.connected = False
        self.carry_out(self.core.disconnected(self.now))
        if restarted:
            self.engine = Engine(self.engine.number + 1, self.buffer_steps, ahead)

    @rule(lost=st.sets(st.integers(0, 40), max_size=2), finish=st.booleans())
    def answer(self, lost: set[int], finish: bool) -> None:
        """The engine answers what was asked, perhaps not all of it."""
        if self.request is None:
            return
        request = self.request
        for at, seqno in enumerate(self.engine.replies(request.start)):
            if at not in lost and self.request is request:
                frames = [b"", *self.engine.frames(seqno)]
                self.carry_out(self.core.replayed(request.attempt, frames, self.now))
        if finish:
            self.carry_out(self.core.replayed(request.attempt, [b"", b"", END, b""], self.now))

    @rule(seconds=st.sampled_from([1, 6, 40]))
    def wait(self, seconds: int) -> None:
        self.now += seconds
        self.carry_out(self.core.tick(self.now))

    @rule()
    def work(self) -> None:
        self.carry_out(self.core.work(self.now))

    @rule()
    def distrust(self) -> None:
        self.carry_out(self.core.resync(self.now))

    @rule()
    def calm_down(self) -> None:
        """A good network, a working replay, and one more batch: all is known again."""
        if not self.connected:
            self.connect()
        self.receive_all()
        self.answer_all()
        self.now = max(self.now, self.core.deadline() or self.now)
        self.carry_out(self.core.tick(self.now))
        self.answer_all()
        self.publish(1, set())
        self.receive_all()
        self.answer_all()
        last = self.engine.number * RUN + self.engine.published - 1
        assert self.core.state is StreamState.LIVE
        assert self.run_held[-1] == last
        if not self.core.stats.cold:
            assert self.run_held[0] == self.engine.number * RUN

    def receive_all(self) -> None:
        while self.engine.sent:
            seqno = self.engine.sent.pop(0)
            self.carry_out(self.core.live(self.engine.frames(seqno), self.now))
            self.answer_all()

    def answer_all(self) -> None:
        while self.request is not None or self.core.has_work:
            self.answer(set(), finish=True)
            self.work()

    @invariant()
    def what_is_held_is_one_unbroken_run(self) -> None:
        self.core.check()
        if self.run_held:
            first = self.run_held[0]
            assert self.run_held == list(range(first, first + len(self.run_held)))
            assert first // RUN == self.run_held[-1] // RUN


Stream.TestCase.settings = settings(max_examples=120, stateful_step_count=40, deadline=None)
TestStream = Stream.TestCase
