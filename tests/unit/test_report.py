"""What the second port says of ranks: every view short of exact comes with its reason."""

import pytest
from support.fleets import BASE, FakeSource, join, new_fleet
from support.nats import link_to
from support.stack import TINYMODEL

from events import BlocksStored, EventBatch
from events.nats_link import LinkState
from events.stream import StreamState
from kvrouter import report
from kvrouter.collector import FleetCollector
from kvrouter.fleet import Fleet
from kvrouter.proof import Measurement, Verdict
from kvrouter.tokenize import EncodingThreads, ModelTokenizer, ThreadSettings
from kvrouter.workers import WorkerFacts

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
    state.source = source = FakeSource()
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
    source.warning = "two relays publish"
    assert judged() == (Verdict.DEGRADED, "two relays publish")
    source.warning = ""
    pool.tokenizer_problem = "no such folder"
    assert judged() == (Verdict.DEGRADED, "tokenizer: no such folder")
    pool.tokenizer = ModelTokenizer.load(TINYMODEL)
    assert judged()[0] is Verdict.BLIND
    assert "nothing to compare" in judged()[1]
    state.proof.observe(AGREES)
    assert judged() == (Verdict.EXACT, "")
    state.stream = StreamState.REPLAYING
    assert judged() == (Verdict.STALE, "events that were missed are being asked for")
    state.stream = StreamState.LIVE
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
    link = link_to("nats://127.0.0.1:9")
    assert "none can be announced: NATS connecting)" in report.readiness(fleet, link)[0]
    link.problem = "nats://127.0.0.1:9: refused"
    assert "NATS connecting, nats://127.0.0.1:9: refused)" in report.readiness(fleet, link)[0]
    link.state = LinkState.CONNECTED
    assert "none is announced on NATS" in report.readiness(fleet, link)[0]
    join(fleet, "a")
    assert "tokenizer of m" in report.readiness(fleet)[0]
    fleet.pools["m"].tokenizer_problem = "none to be had"
    assert report.readiness(fleet) == []


def samples(fleet: Fleet) -> dict[str, float]:
    """The value of each metric of the one rank, by its name."""
    tokenizers = EncodingThreads(ThreadSettings())
    try:
        metrics = list(FleetCollector(fleet, tokenizers).collect())
    finally:
        tokenizers.close()
    return {
        sample.name: sample.value
        for metric in metrics
        for sample in metric.samples
        if set(sample.labels) == {"worker", "dp_rank"}
    }


def test_another_block_size_than_was_said_is_adopted_logged_once_and_shown(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """E16: 16 is configured, the events have 768 (a hybrid model aligns its groups)."""
    fleet = new_fleet()
    rank = join(fleet, "a", WorkerFacts(models=BASE.models, block_size=16))
    pool = fleet.pools["m"]
    assert pool.block_size_of(rank) == 16
    for number in (1, 2):
        event = BlocksStored(
            block_hashes=[number], token_ids=[number] * 768, block_size=768, parent=None
        )
        fleet.on_batch(rank, EventBatch(0.0, [event]))
    assert pool.block_size_of(rank) == 768
    assert pool.block_sizes() == {768}
    (warning,) = [record.getMessage() for record in caplog.records]
    assert "worker a" in warning
    assert "768" in warning
    assert "16" in warning
    (shown,) = report.workers(fleet)["workers"][0]["ranks"]
    assert shown["block_size"] == 768
    assert samples(fleet)["kvrouter_rank_block_size_tokens"] == 768


def test_the_prefixes_that_most_ranks_hold_are_shown() -> None:
    """An operator asks what is cached everywhere: a system prompt, and what two of three have."""
    fleet = new_fleet()
    for worker, blocks in (("a", 5), ("b", 3), ("c", 5)):
        event = BlocksStored(
            block_hashes=list(range(blocks)), token_ids=[7] * 16 * blocks, block_size=16
        )
        fleet.on_batch(join(fleet, worker), EventBatch(0.0, [event]))
    (shown,) = report.prefixes(fleet)["models"]
    assert shown["model"] == "m"
    assert [
        (each["blocks"], each["tokens"], [rank["worker"] for rank in each["ranks"]])
        for each in shown["prefixes"]
    ] == [(3, 48, ["a", "b", "c"]), (5, 80, ["a", "c"])]


def test_what_was_predicted_and_what_was_reported_is_told_apart() -> None:
    """An operator asks which way the predictions err: evictions, or blocks that no event told."""
    fleet = new_fleet()
    rank = join(fleet, "a")
    for measured in (AGREES, Measurement(64, 48, 100, 100), Measurement(0, 32, 100, 90)):
        fleet.ranks[rank].proof.observe(measured)
    shown = samples(fleet)
    assert shown["kvrouter_proof_compared_total"] == 3
    assert shown["kvrouter_proof_equal_total"] == 1
    assert shown["kvrouter_proof_predicted_tokens_total"] == 128
    assert shown["kvrouter_proof_reported_tokens_total"] == 144
    assert shown["kvrouter_proof_over_tokens_total"] == 16
    assert shown["kvrouter_proof_under_tokens_total"] == 32
    assert shown["kvrouter_proof_miscounted_prompts_total"] == 1
    (rank_shown,) = report.workers(fleet)["workers"][0]["ranks"]
    assert rank_shown["proof"] == {
        "compared": 3,
        "equal": 1,
        "predicted_tokens": 128,
        "reported_tokens": 144,
    }
