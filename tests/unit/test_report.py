"""What the second port says of ranks: every view short of exact comes with its reason."""

from support.fleets import FakeSource, join, new_fleet
from support.stack import TINYMODEL

from events.stream import StreamState
from kvrouter import report
from kvrouter.proof import Measurement, Verdict
from kvrouter.tokenize import ModelTokenizer

AGREES = Measurement(64, 64, 100, 100)


def test_each_view_short_of_exact_has_a_reason() -> None:
    """T8: the user must be able to see from /workers what is wrong."""
    fleet = new_fleet()
    rank = join(fleet, "a")
    pool, state = fleet.pools["m"], fleet.ranks[rank]

    def judged() -> tuple[Verdict, str]:
        return report.judge(pool, rank, state)

    assert judged()[0] is Verdict.BLIND
    assert "no KV events" in judged()[1]
    state.source = FakeSource()
    assert "no connection" in judged()[1]
    for stream, word in (
        (StreamState.CONNECTING, "no connection"),
        (StreamState.SILENT, "event-silent"),
        (StreamState.DEGRADED, "replay"),
    ):
        state.stream = stream
        assert judged()[0] is Verdict.DEGRADED
        assert word in judged()[1]
    state.stream = StreamState.LIVE
    pool.tokenizer_problem = "no such folder"
    assert judged() == (Verdict.DEGRADED, "tokenizer: no such folder")
    pool.tokenizer = ModelTokenizer.load(TINYMODEL)
    assert judged()[0] is Verdict.BLIND
    assert "nothing to compare" in judged()[1]
    state.proof.observe(AGREES)
    assert judged() == (Verdict.EXACT, "")
    state.proof.observe(Measurement(64, 0, 100, 100))
    assert judged()[0] is Verdict.STALE
    assert judged()[1]


def test_a_broken_chat_template_shows_at_the_model_and_at_its_ranks() -> None:
    """T8."""
    fleet = new_fleet()
    rank = join(fleet, "a")
    pool, state = fleet.pools["m"], fleet.ranks[rank]
    state.source, state.stream = FakeSource(), StreamState.LIVE
    pool.tokenizer = ModelTokenizer.load(TINYMODEL)
    pool.tokenizer.chat_problem = "the chat template does not render"
    assert report.judge(pool, rank, state)[1] == "the chat template does not render"
    assert report.workers(fleet)["models"][0]["tokenizer"] == "the chat template does not render"


def test_readiness_names_what_is_awaited() -> None:
    fleet = new_fleet()
    assert "none configured" in report.readiness(fleet)[0]
    join(fleet, "a")
    assert "tokenizer of m" in report.readiness(fleet)[0]
    fleet.pools["m"].tokenizer_problem = "none to be had"
    assert report.readiness(fleet) == []
