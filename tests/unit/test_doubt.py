"""When an engine is asked once more what it is."""

import pytest

from events.stream import ResyncReason, StreamState
from kvrouter.doubt import LONGEST_PAUSE_S, Doubt

CONNECTING, REPLAYING, LIVE = StreamState.CONNECTING, StreamState.REPLAYING, StreamState.LIVE


def looked_at(doubt: Doubt) -> None:
    doubt.looking()
    doubt.looked(0.0, answered_all=True)


def test_an_engine_is_not_asked_without_a_reason() -> None:
    assert not Doubt().calls_for_a_look(1e9)


def test_a_connection_that_comes_or_goes_calls_for_a_look_each_time() -> None:
    """E19: whoever is back at the address may be another, or never be back."""
    doubt = Doubt()
    for state in (LIVE, CONNECTING, StreamState.DEGRADED):
        doubt.stream_changed(0, state)
        assert doubt.calls_for_a_look(0.0)
        looked_at(doubt)
        assert not doubt.calls_for_a_look(0.0)


def test_a_stream_that_is_only_asked_for_is_neither_there_nor_gone() -> None:
    """A relay that is not there is asked again and again; its engine need not be."""
    doubt = Doubt()
    for state in (REPLAYING, CONNECTING, REPLAYING, CONNECTING):
        doubt.stream_changed(0, state)
        assert not doubt.calls_for_a_look(0.0)
    doubt.stream_changed(0, LIVE)
    looked_at(doubt)
    for state in (REPLAYING, LIVE, StreamState.SILENT, LIVE):
        doubt.stream_changed(0, state)
    assert not doubt.calls_for_a_look(0.0)
    doubt.stream_changed(1, LIVE)
    assert doubt.calls_for_a_look(0.0)


@pytest.mark.parametrize("reason", list(ResyncReason))
def test_of_all_new_beginnings_only_a_restart_is_another_engines(reason: ResyncReason) -> None:
    doubt = Doubt()
    doubt.resynced(reason)
    assert doubt.calls_for_a_look(0.0) == (reason is ResyncReason.RESTART)


def test_what_arises_during_a_look_calls_for_another_at_once() -> None:
    """The answers may be those of the engine that was about to go."""
    for answered_all in (True, False):
        doubt = Doubt()
        doubt.arise()
        doubt.looking()
        doubt.arise()
        doubt.looked(5.0, answered_all=answered_all)
        assert doubt.calls_for_a_look(5.0)


def test_a_look_without_all_answers_is_repeated_later_each_time_and_at_once_with_a_reason() -> None:
    doubt, now = Doubt(), 0.0
    doubt.arise()
    pauses = []
    for _ in range(12):
        assert doubt.calls_for_a_look(now)
        doubt.looking()
        doubt.looked(now, answered_all=False)
        began = now
        while not doubt.calls_for_a_look(now):
            now += 0.25
        pauses.append(now - began)
    assert pauses[:4] == [0.25, 0.5, 1.0, 2.0]
    assert pauses[-1] == LONGEST_PAUSE_S
    doubt.looking()
    doubt.looked(now, answered_all=False)
    assert not doubt.calls_for_a_look(now)
    doubt.arise()
    assert doubt.calls_for_a_look(now)
    looked_at(doubt)
    assert not doubt.calls_for_a_look(1e9)
    doubt.looking()
    doubt.looked(0.0, answered_all=False)
    assert doubt.calls_for_a_look(0.25)
