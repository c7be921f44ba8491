"""The state machine of one publisher, without sockets."""

from dataclasses import replace
from typing import Any

import pytest
from support.streams import number_of, payload

from events import BlocksCleared, EventBatch, encode_batch
from events.history import Backlog, History, Message
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
    SubscriptionSettings,
)
from events.subscription import Input, Subscription

END = b"\xff" * 8
SETTINGS = SubscriptionSettings(
    replay_timeout_s=5, replay_total_s=60, replay_tries=2, replay_pause_s=30, silent_after_s=20
)


class Desk:
    """A subscription and what became of its commands."""

    def __init__(self, *, replay: bool = True, **settings: Any) -> None:
        self.core = Subscription(replace(SETTINGS, replay=replay, **settings))
        self.now = 0.0
        self.held: list[int] = []
        self.resyncs: list[ResyncReason] = []
        self.asked: list[int] = []
        self.complaints: list[str] = []
        self.replay_open = False

    def connect(self) -> None:
        self._carry_out(self.core.connected(self.now))

    def disconnect(self) -> None:
        self._carry_out(self.core.disconnected(self.now))

    def live(self, *seqnos: int, of: int = 0, dp_rank: int = 0) -> None:
        for seqno in seqnos:
            frames = [b"t", seqno.to_bytes(8, "big"), payload(of + seqno, dp_rank=dp_rank)]
            self._carry_out(self.core.live(frames, self.now))

    def raw(self, *frames: bytes) -> None:
        self._carry_out(self.core.live(frames, self.now))

    def reply(self, *seqnos: int, of: int = 0, attempt: int | None = None) -> None:
        for seqno in seqnos:
            frames = [b"", b"t", seqno.to_bytes(8, "big"), payload(of + seqno)]
            self._reply(frames, attempt)

    def end(self, attempt: int | None = None) -> None:
        self._reply([b"", b"", END, b""], attempt)

    def _reply(self, frames: list[bytes], attempt: int | None) -> None:
        attempt = self.core._attempt if attempt is None else attempt
        self._carry_out(self.core.replayed(attempt, frames, self.now))

    def wait(self, seconds: float) -> None:
        """Let time pass, in steps, with a tick whenever one is due."""
        until = self.now + seconds
        while (due := self.core.deadline()) is not None and due <= until:
            self.now = max(self.now, due)
            self._carry_out(self.core.tick(self.now))
        self.now = until
        self._carry_out(self.core.tick(self.now))

    def work(self) -> None:
        self._carry_out(self.core.work(self.now))

    def work_off(self) -> None:
        """Apply all that waits."""
        while self.core.has_work:
            self.work()

    def resync(self) -> None:
        self._carry_out(self.core.resync(self.now))

    @property
    def state(self) -> StreamState:
        return self.core.state

    def _carry_out(self, commands: list[Command]) -> None:
        self.core.check()
        for command in commands:
            if isinstance(command, Deliver):
                self.held.append(number_of(command.batch))
            elif isinstance(command, Resync):
                self.held.clear()
                self.resyncs.append(command.reason)
            elif isinstance(command, RequestReplay):
                self.asked.append(command.start)
                self.replay_open = True
            elif isinstance(command, CloseReplay):
                self.replay_open = False
            elif isinstance(command, Complain):
                self.complaints.append(command.detail)
        assert self.replay_open is (self.state is StreamState.REPLAYING)


def following(count: int = 0, **settings: Any) -> Desk:
    """A desk that has followed a fresh engine for `count` batches."""
    desk = Desk(**settings)
    desk.connect()
    if settings.get("replay", True):
        desk.end()
    desk.live(*range(count))
    assert desk.state is StreamState.LIVE
    desk.asked.clear()
    return desk


class TestFollowing:
    def test_batches_are_applied_as_they_come(self) -> None:
        desk = following(3)
        assert desk.held == [0, 1, 2]
        assert desk.resyncs == []
        assert desk.core.stats.last_seqno == 2

    def test_a_new_connection_asks_for_the_history(self) -> None:
        """E12: the subscriber restarts, the engine is warm."""
        desk = Desk()
        desk.connect()
        desk.reply(0, 1, 2)
        desk.end()
        desk.live(3)
        assert (desk.asked, desk.held, desk.state) == ([0], [0, 1, 2, 3], StreamState.LIVE)

    def test_a_batch_may_be_read_before_the_news_of_its_connection(self) -> None:
        desk = Desk()
        desk.live(4)
        assert desk.state is StreamState.REPLAYING
        desk.reply(0, 1, 2, 3, 4)
        desk.end()
        assert desk.held == [0, 1, 2, 3, 4]

    def test_a_first_seqno_above_0_is_a_gap(self) -> None:
        """E8: the engine has been serving for a while."""
        desk = Desk(replay=False)
        desk.connect()
        desk.live(500, 501)
        assert (desk.held, desk.resyncs) == ([500, 501], [ResyncReason.GAP])
        assert desk.core.stats.gaps == 1

    @pytest.mark.parametrize(
        "frames",
        [
            (b"alone",),
            (b"", b"\x00" * 8),
            (b"", b"\x00" * 7, b"x"),
            (b"", END, b"x"),
            (b"", b"\x00" * 8, b"x", b"y"),
            (),
        ],
    )
    def test_a_malformed_message_changes_nothing(self, frames: tuple[bytes, ...]) -> None:
        """E3"""
        desk = following(2)
        desk.raw(*frames)
        desk.live(2)
        assert desk.held == [0, 1, 2]
        assert desk.core.stats.malformed_frames == len(desk.complaints) == 1

    def test_an_unreadable_payload_costs_the_blocks_and_advances(self) -> None:
        """E3: it may have been a removal."""
        desk = following(2)
        desk.raw(b"t", (2).to_bytes(8, "big"), b"noise")
        desk.live(3)
        assert (desk.held, desk.resyncs) == ([3], [ResyncReason.MALFORMED])
        assert desk.core.stats.malformed_payloads == 1
        assert desk.core.stats.gaps == 0

    def test_a_skipped_event_is_no_trouble_for_the_seqnos(self) -> None:
        """E2"""
        desk = following(0)
        body = encode_batch(EventBatch(7.0, [], 0)).replace(b"\x90", b"\x91\x81\xa4type\xa1X")
        desk.raw(b"t", (0).to_bytes(8, "big"), body)
        desk.live(1)
        assert (desk.held, desk.resyncs) == ([7, 1], [])
        assert desk.core.stats.skipped.total() == 1


class TestGaps:
    def test_a_gap_is_asked_for_and_live_batches_wait(self) -> None:
        """E5: the engine dropped messages for us; the overlap shows that it is still the same."""
        desk = following(20)
        desk.live(22, 23)
        assert desk.asked == [12]
        assert desk.held == list(range(20))
        desk.reply(*range(12, 24))
        desk.live(24)
        desk.end()
        assert desk.held == list(range(25))
        assert (desk.resyncs, desk.core.stats.gaps) == ([], 1)

    def test_a_gap_that_shows_up_after_the_replay_is_asked_for_again(self) -> None:
        """E7: three batches, the end marker, then the live batch that exposes the gap."""
        desk = Desk()
        desk.connect()
        desk.reply(0, 1, 2)
        desk.end()
        desk.live(5)
        desk.reply(0, 1, 2, 3, 4, 5)
        desk.end()
        assert (desk.held, desk.resyncs) == (list(range(6)), [])

    def test_a_gap_before_a_batch_that_came_after_the_question_is_asked_for_again(self) -> None:
        """The subscription became effective only after the replay was answered."""
        desk = Desk()
        desk.connect()
        desk.live(5)
        desk.reply(0, 1, 2)
        desk.end()
        assert desk.asked == [0, 0]
        desk.reply(0, 1, 2, 3, 4, 5)
        desk.end()
        assert (desk.held, desk.resyncs) == (list(range(6)), [])

    def test_a_gap_that_was_known_and_not_filled_is_lost(self) -> None:
        """E9: the replay ends before the gap does."""
        desk = following(3)
        desk.live(6)
        desk.reply(0, 1, 2, 3)
        desk.end()
        assert (desk.held, desk.resyncs) == ([6], [ResyncReason.REPLAY_HOLE])
        assert (desk.state, desk.core.stats.cold) == (StreamState.LIVE, True)

    def test_a_replay_that_begins_later_is_a_loss(self) -> None:
        """E9: the engine's buffer does not reach back."""
        desk = Desk()
        desk.connect()
        desk.reply(14, 15)
        desk.end()
        assert (desk.held, desk.resyncs) == ([14, 15], [ResyncReason.REPLAY_LATE])

    def test_a_hole_in_the_replay_is_a_loss_though_the_end_marker_comes(self) -> None:
        """E9: measured: 2842 of 3000 replies, and the end marker."""
        desk = Desk()
        desk.connect()
        desk.reply(0, 1, 4, 5)
        desk.end()
        assert (desk.held, desk.resyncs) == ([4, 5], [ResyncReason.REPLAY_HOLE])

    def test_without_replay_a_gap_is_lost_at_once(self) -> None:
        desk = following(2, replay=False)
        desk.live(4)
        assert (desk.held, desk.resyncs) == ([4], [ResyncReason.GAP])
        assert desk.state is StreamState.DEGRADED

    def test_a_clear_makes_a_cold_rank_known_again(self) -> None:
        desk = following(2, replay=False)
        desk.live(4)
        assert desk.core.stats.cold
        cleared = encode_batch(EventBatch(5.0, [BlocksCleared()], 0))
        desk.raw(b"t", (5).to_bytes(8, "big"), cleared)
        assert not desk.core.stats.cold


class TestDuplicates:
    def test_a_batch_that_the_replay_gave_is_not_applied_again(self) -> None:
        """E6: subscribed first, then replayed: both have the newest batches."""
        desk = Desk()
        desk.connect()
        desk.live(2, 3)
        desk.reply(0, 1, 2, 3)
        desk.end()
        desk.live(3, 4)
        assert (desk.held, desk.resyncs) == ([0, 1, 2, 3, 4], [])

    def test_a_repeated_batch_is_dropped(self) -> None:
        desk = following(4)
        desk.live(3, 1, 4)
        assert (desk.held, desk.resyncs) == ([0, 1, 2, 3, 4], [])
        assert desk.core.stats.duplicates == 2

    def test_batches_out_of_order_are_put_in_order(self) -> None:
        desk = following(4)
        desk.live(6, 5, 4, 6)
        desk.reply(*range(4))
        desk.end()
        assert (desk.held, desk.resyncs) == (list(range(7)), [])

    def test_a_live_stream_that_lags_behind_a_long_replay_is_no_restart(self) -> None:
        """E6: we were slow to read it; the replay went far beyond what is remembered."""
        desk = Desk(remembered_batches=4)
        desk.connect()
        desk.live(100)
        desk.reply(*range(200))
        desk.live(101, 102)
        desk.end()
        desk.live(*range(103, 202))
        assert (desk.held, desk.resyncs) == (list(range(202)), [])

    def test_what_waits_from_before_a_late_replay_is_dropped(self) -> None:
        """The engine's buffer moved on while the request was under way."""
        desk = Desk()
        desk.connect()
        desk.live(1)
        desk.reply(2, 3, 4)
        desk.end()
        assert (desk.held, desk.resyncs) == ([2, 3, 4], [ResyncReason.REPLAY_LATE])
        assert desk.state is StreamState.LIVE


class TestRestart:
    def test_a_seqno_that_goes_back_is_a_restart(self) -> None:
        """E11: 900 -> 0, replay off: the blocks go at once."""
        desk = following(901, replay=False)
        desk.live(0, 1, of=5000)
        assert (desk.held, desk.resyncs) == ([5000, 5001], [ResyncReason.RESTART])
        assert (desk.state, desk.core.stats.cold) == (StreamState.LIVE, False)

    def test_a_restart_seen_late_is_asked_for_from_the_beginning(self) -> None:
        desk = following(901)
        desk.live(3, of=5000)
        assert (desk.asked, desk.held) == ([0], [])
        desk.reply(0, 1, 2, 3, of=5000)
        desk.end()
        assert (desk.held, desk.resyncs) == ([5000, 5001, 5002, 5003], [ResyncReason.RESTART])

    def test_an_idle_restarted_engine_shows_in_the_replay(self) -> None:
        """E11: it sends nothing until it has a request, and gets none while it seems to be full."""
        desk = following(901)
        desk.disconnect()
        desk.connect()
        assert desk.asked == [893]
        desk.end()
        assert (desk.held, desk.resyncs) == ([], [ResyncReason.RESTART])
        assert desk.asked == [893, 0]
        desk.end()
        assert desk.state is StreamState.LIVE

    def test_a_restarted_engine_that_is_ahead_of_us_shows_in_the_overlap(self) -> None:
        """It served more in our absence than its predecessor ever had."""
        desk = following(5)
        desk.disconnect()
        desk.connect()
        desk.reply(0, of=5000)
        assert (desk.resyncs, desk.asked) == ([ResyncReason.RESTART], [0, 0])
        desk.reply(1, 2, 3, of=5000, attempt=desk.core._attempt - 1)
        desk.reply(*range(8), of=5000)
        desk.end()
        assert desk.held == list(range(5000, 5008))

    def test_a_restart_that_looks_like_a_gap_shows_in_the_overlap(self) -> None:
        """The new engine's batch is read before the news that the connection was lost."""
        desk = following(5)
        desk.live(7, of=5000)
        desk.reply(0, of=5000)
        desk.reply(*range(8), of=5000)
        desk.end()
        assert (desk.held, desk.resyncs) == (list(range(5000, 5008)), [ResyncReason.RESTART])

    def test_a_replay_without_overlap_proves_nothing(self) -> None:
        """The engine's buffer begins right behind what we know, or it is another engine's."""
        desk = following(5)
        desk.disconnect()
        desk.connect()
        desk.reply(5, 6)
        desk.end()
        assert (desk.held, desk.resyncs) == ([5, 6], [ResyncReason.REPLAY_LATE])

    def test_an_engine_that_lives_keeps_its_blocks_over_a_lost_connection(self) -> None:
        """E19"""
        desk = following(20)
        desk.disconnect()
        assert desk.state is StreamState.CONNECTING
        desk.connect()
        desk.reply(*range(12, 23))
        desk.end()
        assert (desk.held, desk.resyncs) == (list(range(23)), [])

    def test_last_words_of_a_dead_engine_do_not_wait_for_the_next(self) -> None:
        desk = following(3)
        desk.live(8)
        desk.disconnect()
        desk.connect()
        desk.end()
        desk.end()
        desk.live(0, of=5000)
        assert (desk.held, desk.resyncs) == ([5000], [ResyncReason.RESTART])

    def test_a_late_reply_brings_nothing_back(self) -> None:
        """A reply of an earlier request arrives after the blocks were dropped."""
        desk = following(901)
        desk.live(903)
        late = desk.core._attempt
        desk.live(0, of=5000)
        desk.reply(901, 902, attempt=late)
        desk.end(attempt=late)
        assert desk.held == [5000]

    def test_a_low_seqno_is_no_straggler_of_a_replay_when_the_stream_was_further(self) -> None:
        """What was replayed is not remembered any more; the news of the lost connection is late."""
        desk = following(remembered_batches=2)
        desk.live(99)
        desk.reply(*range(99))
        desk.end()
        desk.live(100, 101, 102)
        desk.live(5, of=5000)
        assert (desk.held, desk.resyncs) == ([], [ResyncReason.RESTART])
        assert desk.asked[-1] == 0

    def test_a_late_reply_changes_nothing_while_the_backlog_is_applied(self) -> None:
        desk = following(5, work_portion=1)
        desk.live(7, 8, 9)
        desk.reply(*range(5), 5, 6)
        desk.end()
        assert desk.core.has_work
        desk.reply(8, of=5000)
        desk.end()
        desk.work_off()
        assert (desk.held, desk.resyncs) == (list(range(10)), [])

    def test_without_replay_the_first_batch_after_a_reconnect_decides(self) -> None:
        desk = following(5, replay=False)
        desk.disconnect()
        desk.connect()
        assert (desk.held, desk.state) == ([0, 1, 2, 3, 4], StreamState.LIVE)
        desk.live(5)
        assert desk.resyncs == []
        desk.disconnect()
        desk.connect()
        desk.live(1, of=5000)
        assert desk.held == [5001]
        assert desk.resyncs == [ResyncReason.RESTART, ResyncReason.GAP]


class TestPatience:
    def test_a_silent_replay_socket_is_given_up(self) -> None:
        """E10: bounded tries, then the stream goes on."""
        desk = following(3)
        desk.live(5, 6)
        desk.wait(11)
        assert len(desk.asked) == 2
        assert (desk.held, desk.resyncs) == ([5, 6], [ResyncReason.REPLAY_FAILED])
        assert desk.state is StreamState.DEGRADED

    def test_a_dead_replay_socket_costs_nothing_when_nothing_was_missed(self) -> None:
        """E10"""
        desk = Desk()
        desk.connect()
        desk.live(0, 1)
        desk.wait(11)
        assert (desk.held, desk.resyncs, desk.state) == ([0, 1], [], StreamState.DEGRADED)

    def test_while_replays_fail_a_gap_is_lost_without_waiting(self) -> None:
        desk = following(3)
        desk.live(5)
        desk.wait(11)
        desk.live(8)
        assert desk.held == [8]
        assert desk.resyncs == [ResyncReason.REPLAY_FAILED] * 2

    def test_a_failed_replay_is_tried_again_at_growing_intervals(self) -> None:
        desk = Desk()
        desk.connect()
        desk.wait(3600)
        assert 5 < len(desk.asked) < 13
        desk.asked.clear()
        desk.wait(6 * 650)
        assert 5 <= len(desk.asked) <= 7  # each `replay_max_pause_s`
        while desk.state is not StreamState.REPLAYING:
            desk.wait(1)
        desk.reply(0, 1)
        desk.end()
        assert (desk.held, desk.state) == ([0, 1], StreamState.LIVE)

    def test_a_new_engine_that_is_heard_from_its_first_batch_on_needs_no_replay(self) -> None:
        """The old one's replay socket was dead; of the new one nothing is missing."""
        desk = Desk()
        desk.connect()
        desk.live(0, 1)
        desk.wait(10)
        states = [desk.state]
        desk.live(0, of=5000)
        states.append(desk.state)
        assert (desk.held, states) == ([5000], [StreamState.DEGRADED, StreamState.LIVE])

    def test_after_a_replay_that_answered_the_next_failure_is_tried_again_soon(self) -> None:
        desk = Desk()
        desk.connect()
        desk.wait(3600)
        while desk.state is not StreamState.REPLAYING:
            desk.wait(1)
        desk.reply(0, 1)
        desk.end()
        desk.live(3)
        desk.wait(10)
        assert desk.core.state is StreamState.DEGRADED
        desk.asked.clear()
        desk.wait(30)
        assert len(desk.asked) == 1

    def test_each_reply_buys_time_but_not_without_end(self) -> None:
        desk = Desk()
        desk.connect()
        for seqno in range(14):
            desk.wait(4)
            desk.reply(seqno)
        assert len(desk.asked) == 1
        desk.wait(4)
        assert len(desk.asked) == 2

    def test_too_many_waiting_batches_are_dropped_and_asked_for(self) -> None:
        """An engine that publishes faster than its replay socket answers."""
        desk = Desk(max_waiting_batches=3)
        desk.connect()
        desk.live(*range(5))
        assert desk.core.stats.overflows == 1
        desk.reply(0, 1)
        desk.end()
        desk.reply(*range(5))
        desk.end()
        assert (desk.held, desk.resyncs) == ([0, 1, 2, 3, 4], [])

    def test_waiting_bytes_are_bounded_too(self) -> None:
        desk = Desk(max_waiting_bytes=300)
        desk.connect()
        desk.live(0, 1, 2)
        assert desk.core.stats.overflows == 1

    def test_a_long_backlog_is_applied_in_portions(self) -> None:
        desk = Desk(work_portion=10)
        desk.connect()
        desk.live(*range(25))
        desk.end()
        assert (len(desk.held), desk.state) == (10, StreamState.CATCHING_UP)
        desk.live(25)
        desk.work_off()
        assert (desk.held, desk.state) == (list(range(26)), StreamState.LIVE)


class TestSilence:
    def test_expected_blocks_that_do_not_come_make_it_silent(self) -> None:
        desk = following(1)
        desk.core.expect_blocks(desk.now)
        desk.wait(19)
        states = [desk.state]
        desk.wait(1)
        states.append(desk.state)
        desk.live(1)
        states.append(desk.state)
        assert states == [StreamState.LIVE, StreamState.SILENT, StreamState.LIVE]

    def test_later_requests_do_not_put_it_off(self) -> None:
        desk = following(1)
        for _ in range(5):
            desk.core.expect_blocks(desk.now)
            desk.wait(4)
        assert desk.state is StreamState.SILENT

    def test_an_idle_stream_is_not_silent(self) -> None:
        """No request, no events."""
        desk = following(1)
        desk.core.expect_blocks(desk.now)
        desk.live(1)
        desk.wait(3600)
        assert desk.state is StreamState.LIVE

    def test_a_replay_is_no_sign_of_life(self) -> None:
        """It is not filtered by topic; the stream is."""
        desk = following(1)
        desk.core.expect_blocks(desk.now)
        desk.wait(20)
        desk.connect()
        desk.reply(0, 1, 2)
        desk.end()
        assert (desk.held, desk.state) == ([0, 1, 2], StreamState.SILENT)

    def test_a_lost_connection_is_not_silence(self) -> None:
        desk = following(1)
        desk.core.expect_blocks(desk.now)
        desk.disconnect()
        desk.wait(60)
        assert desk.state is StreamState.CONNECTING
        desk.connect()
        desk.reply(0)
        desk.end()
        desk.wait(60)
        assert desk.core.state is StreamState.LIVE  # nothing was expected of this connection


class TestDpRank:
    def test_a_foreign_rank_is_counted_and_believed_less_than_the_endpoint(self) -> None:
        """An engine behind an external load balancer counts ranks over all engines."""
        desk = following(0)
        desk.live(0, 1, dp_rank=3)
        assert desk.held == [0, 1]
        assert (desk.core.stats.foreign_dp_rank, len(desk.complaints)) == (2, 1)

    def test_a_foreign_rank_is_refused_where_ranks_are_known(self) -> None:
        """E17: a batch for another rank's blocks must not count here."""
        desk = following(0, strict_dp_rank=True, dp_rank=1)
        desk.live(0, dp_rank=0)
        desk.live(1, dp_rank=1)
        assert (desk.held, desk.resyncs) == ([1], [])


class TestRequestedResync:
    def test_the_history_is_read_again(self) -> None:
        desk = following(5)
        desk.resync()
        assert (desk.held, desk.asked) == ([], [0])
        desk.reply(*range(5))
        desk.end()
        assert (desk.held, desk.resyncs) == ([0, 1, 2, 3, 4], [ResyncReason.REQUESTED])

    def test_without_a_connection_it_is_read_when_there_is_one(self) -> None:
        """The blocks go at once: nobody may be sent to them in the meantime."""
        desk = following(5)
        desk.disconnect()
        desk.resync()
        assert (desk.held, desk.resyncs, desk.asked) == ([], [ResyncReason.REQUESTED], [])
        desk.connect()
        assert desk.asked == [0]
        desk.reply(*range(5))
        desk.end()
        assert (desk.held, desk.state) == ([0, 1, 2, 3, 4], StreamState.LIVE)

    @pytest.mark.parametrize("state", ["replaying", "catching up", "degraded"])
    def test_it_is_read_again_whatever_is_under_way(self, state: str) -> None:
        """The index finds a contradiction in the very batches that a replay brings."""
        desk = following(5, work_portion=1)
        desk.live(7, 8, 9)
        if state == "catching up":
            desk.reply(*range(5), 5, 6)
            desk.end()
            assert desk.core.has_work
        if state == "degraded":
            desk.wait(10)
            desk.work_off()
        assert desk.state.name.lower().replace("_", " ") == state
        desk.asked.clear()
        desk.resync()
        assert (desk.held, desk.resyncs[-1]) == ([], ResyncReason.REQUESTED)
        assert (desk.asked, desk.state) == ([0], StreamState.REPLAYING)
        desk.reply(*range(10))
        desk.end()
        desk.work_off()
        assert (desk.held, desk.state) == (list(range(10)), StreamState.LIVE)

    def test_without_replay_the_rank_starts_cold(self) -> None:
        desk = following(5, replay=False)
        desk.resync()
        desk.live(5)
        assert (desk.held, desk.resyncs) == ([5], [ResyncReason.REQUESTED])
        assert desk.core.stats.cold


def at(phase: StreamState) -> Desk:
    """A desk in this phase, with three batches behind it."""
    desk = following(3, work_portion=1)
    if phase is StreamState.CONNECTING:
        desk.disconnect()
    elif phase is not StreamState.LIVE:
        desk.live(5, 6, 7)
    if phase is StreamState.CATCHING_UP:
        desk.reply(*range(5))
        desk.end()
    elif phase is StreamState.DEGRADED:
        desk.wait(11)
        desk.work_off()
    assert desk.state is phase
    return desk


PHASES: list[StreamState] = [phase for phase in StreamState if phase is not StreamState.SILENT]
_C, _R, _U, _L, _D = PHASES

AFTER: dict[Input, tuple[StreamState, ...]] = {
    #                  CONNECTING REPLAYING CATCHING_UP LIVE DEGRADED
    Input.CONNECTED: (_R, _R, _R, _R, _R),
    Input.DISCONNECTED: (_C, _C, _C, _C, _C),
    Input.LIVE: (_R, _R, _U, _L, _D),
    Input.REPLAYED: (_C, _R, _U, _L, _D),
    Input.REPLAY_ENDED: (_C, _R, _U, _L, _D),
    Input.OVERDUE: (_C, _R, _U, _L, _R),
    Input.WORK: (_C, _R, _U, _L, _D),
    Input.RESYNC: (_C, _R, _R, _R, _R),
}


def test_the_table_is_complete() -> None:
    assert set(Subscription._handlers) == {(phase, what) for phase in PHASES for what in Input}
    assert set(AFTER) == set(Input)


class TestRestoring:
    """A router starts, and another one has followed the engine for 20 batches."""

    def restored(self, **settings: Any) -> Desk:
        desk = Desk(**settings)
        position = following(20, **settings).core.position()
        assert position is not None
        desk.core.restore(position)
        desk.connect()
        return desk

    def test_a_replay_begins_a_little_before_the_position_and_is_compared(self) -> None:
        desk = self.restored(overlap_batches=4)
        assert desk.asked == [16]
        desk.reply(16, 17, 18, 19, 20)
        desk.end()
        desk.live(21)
        assert (desk.held, desk.resyncs) == ([20, 21], [])

    def test_a_replay_shows_that_it_is_another_engine(self) -> None:
        desk = self.restored()
        desk.reply(18, of=500)
        assert desk.resyncs == [ResyncReason.RESTART]

    def test_without_a_replay_the_next_batch_goes_on(self) -> None:
        desk = self.restored(replay=False)
        desk.live(18, 19, 20)
        assert (desk.held, desk.resyncs) == ([20], [])
        assert desk.core.stats.duplicates == 2

    def test_without_a_replay_a_gap_loses_what_was_given(self) -> None:
        desk = self.restored(replay=False)
        desk.live(21)
        assert (desk.held, desk.resyncs) == ([21], [ResyncReason.GAP])

    def test_without_a_replay_a_lower_batch_is_another_engines(self) -> None:
        desk = self.restored(replay=False)
        desk.live(0, of=500)
        assert (desk.held, desk.resyncs) == ([500], [ResyncReason.RESTART])

    def test_there_is_no_position_while_something_is_outstanding(self) -> None:
        desk = following(3)
        desk.live(5)
        assert desk.state is StreamState.REPLAYING
        assert desk.core.position() is None

    def test_what_the_other_did_not_know_is_not_known_here(self) -> None:
        other = following(3, replay=False)
        other.live(7)
        position = other.core.position()
        assert position is not None
        desk = Desk()
        desk.core.restore(position)
        assert desk.core.stats.cold

    def test_only_the_beginning_can_be_restored(self) -> None:
        desk = following(3)
        position = desk.core.position()
        assert position is not None
        with pytest.raises(ValueError, match="not begun"):
            desk.core.restore(position)


@pytest.mark.parametrize("what", Input)
@pytest.mark.parametrize("phase", PHASES)
def test_every_input_is_taken_in_every_state(phase: StreamState, what: Input) -> None:
    """The full product; what would be late or early is ignored, not an error."""
    desk = at(phase)
    upcoming = desk.core._history.next
    message = Message(upcoming, payload(upcoming))
    desk.core._take(what, desk.now, message)
    desk.core.check()
    assert desk.state is AFTER[what][PHASES.index(phase)]


def test_each_change_of_state_is_announced_once() -> None:
    core = Subscription(SETTINGS)
    assert StateChanged(StreamState.REPLAYING) in core.connected(0)
    assert core.connected(0)[-1] == RequestReplay(0, 2)
    assert core.replayed(2, [b"", b"", END, b""], 0) == [
        CloseReplay(),
        StateChanged(StreamState.LIVE),
    ]
    assert core.disconnected(0) == [StateChanged(StreamState.CONNECTING)]


def test_replies_without_a_topic_are_read_too() -> None:
    """E7: engines before 0.26."""
    desk = Desk()
    desk.connect()
    desk._reply([b"", (0).to_bytes(8, "big"), payload(0)], None)
    desk._reply([b"", END, b""], None)
    assert (desk.held, desk.state) == ([0], StreamState.LIVE)


def test_history_remembers_the_newest_batches_only() -> None:
    history = History(2)
    for seqno in range(4):
        history.add(Message(seqno, b"%d" % seqno))
    assert (history.next, len(history)) == (4, 2)
    assert history.has(Message(3, b"3"))
    assert history.contradicts(Message(2, b"other"))
    assert not history.has(Message(1, b"1"))
    assert not history.contradicts(Message(1, b"other"))


def test_a_backlog_keeps_order_and_tells_when_it_is_too_much() -> None:
    backlog = Backlog(max_batches=3, max_bytes=100)
    for seqno in (5, 3, 4):
        assert backlog.add(Message(seqno, b"x"))
    assert not backlog.add(Message(4, b"x"))
    assert (backlog.first, backlog.last, backlog.overfull) == (3, 5, False)
    backlog.check()
    assert backlog.add(Message(6, b"x"))
    assert backlog.overfull
    assert [backlog.pop().seqno for _ in range(4)] == [3, 4, 5, 6]
