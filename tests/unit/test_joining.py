"""Reading what a worker says of itself."""

import json

import pytest
from support.captures import load

from kvrouter.config import RankEvents, WorkerConfig
from kvrouter.joining import (
    JoinError,
    completed,
    configured_events,
    reachable,
    read_cache_config,
    read_models,
    read_sources,
)
from kvrouter.workers import ServedModel, WorkerFacts

BINDING = {
    "enable_kv_cache_events": True,
    "publisher": "zmq",
    "endpoint": "tcp://*:5557",
    "replay_endpoint": "tcp://127.0.0.1:5657",
    "topic": "kv-events",
}


def sources(*ranks: dict[str, object]) -> bytes:
    return json.dumps({str(rank): source for rank, source in enumerate(ranks)}).encode()


def test_the_recorded_sources_of_two_dp_ranks_are_both_heard() -> None:
    """E17: recorded from a vLLM with --data-parallel-size 2."""
    reply = next(r.response for r in load("j_dp").requests if r.path == "/kv_event_sources")
    notes: list[str] = []
    events = read_sources(json.dumps(reply).encode(), "http://10.0.0.7:8100", notes)
    assert events == {
        0: RankEvents(
            endpoint="tcp://10.0.0.7:5557",
            replay_endpoint="tcp://10.0.0.7:5567",
            topic="kv-events",
        ),
        1: RankEvents(
            endpoint="tcp://10.0.0.7:5558",
            replay_endpoint="tcp://10.0.0.7:5568",
            topic="kv-events",
            dp_rank=1,
        ),
    }
    assert notes == []


@pytest.mark.parametrize(
    ("source", "note"),
    [
        (BINDING | {"enable_kv_cache_events": False}, "no KV events"),
        (BINDING | {"publisher": "null"}, "no KV events"),
        (BINDING | {"endpoint": "tcp://127.0.0.1:5557"}, "engine connects"),
        (BINDING | {"replay_endpoint": None}, "no replay"),
    ],
)
def test_what_is_missing_is_said_with_what_to_do(source: dict[str, object], note: str) -> None:
    notes: list[str] = []
    read_sources(sources(source), "http://gpu:8000", notes)
    assert len(notes) == 1
    assert note in notes[0]
    assert "--kv-events-config" in notes[0]


def test_an_engine_without_the_route_is_blind_and_says_so() -> None:
    notes: list[str] = []
    assert read_sources(b"", "http://gpu:8000", notes) == {0: None}
    assert "no KV events" in notes[0]


@pytest.mark.parametrize("reply", [b"[]", b"<html>", b'{"a": {}}', b'{"0": 3}'])
def test_a_strange_reply_is_a_note_and_no_crash(reply: bytes) -> None:
    notes: list[str] = []
    assert read_sources(reply, "http://gpu:8000", notes) == {0: None}
    assert notes


def test_an_ephemeral_port_is_reported_with_the_nodes_own_address() -> None:
    notes: list[str] = []
    events = read_sources(
        sources(BINDING | {"endpoint": "tcp://10.1.2.3:41234"}), "http://gpu:8000", notes
    )
    assert events[0] is not None
    assert events[0].endpoint == "tcp://10.1.2.3:41234"


def test_wildcards_and_loopback_become_the_host_that_was_reached() -> None:
    assert reachable("tcp://*:1", "http://gpu:8000") == "tcp://gpu:1"
    assert reachable("tcp://[::]:1", "http://[fd00::7]:8000") == "tcp://[fd00::7]:1"
    assert reachable("tcp://localhost:1", "http://gpu:8000") == "tcp://gpu:1"
    assert reachable("ipc:///tmp/x", "http://gpu:8000") == "ipc:///tmp/x"


def test_configured_endpoints_win() -> None:
    rank = RankEvents(endpoint="tcp://h:1", dp_rank=3)
    assert configured_events(WorkerConfig(url="http://h:2", kv_events=[rank])) == {3: rank}
    assert configured_events(WorkerConfig(url="http://h:2")) == {}


def test_block_size_and_capacity_come_from_the_metrics() -> None:
    metrics = (
        "# TYPE vllm:cache_config_info gauge\n"
        'vllm:cache_config_info{block_size="32",engine="0",num_gpu_blocks="64",'
        'num_gpu_blocks_override="64"} 1.0\n'
    )
    assert read_cache_config(metrics) == (32, 63)
    assert read_cache_config('vllm:cache_config_info{block_size="None"} 1.0') == (None, None)
    assert read_cache_config("") == (None, None)


def test_models_and_adapters_are_read() -> None:
    reply = {"data": [{"id": "m", "root": "/models/m"}, {"id": "a", "parent": "m", "root": "/a"}]}
    base, adapter = read_models(json.dumps(reply).encode())
    assert (base.id, base.root, base.parent) == ("m", "/models/m", None)
    assert adapter.parent == "m"


RELAYED = WorkerFacts(
    models=(ServedModel("other"),),
    events={0: RankEvents(endpoint="relay"), 1: RankEvents(endpoint="relay", dp_rank=1)},
    block_size=32,
    capacity_blocks=200,
)


def test_a_relay_fills_in_what_the_engine_does_not_say() -> None:
    """An engine without /kv_event_sources, whose relay was told where its events are."""
    facts = completed(WorkerFacts(models=(ServedModel("m"),), notes=("no events",)), RELAYED)
    assert facts.base_model == "m"
    assert (facts.events, facts.notes) == (RELAYED.events, ())
    assert (facts.block_size, facts.capacity_blocks) == (32, 200)


def test_what_the_engine_says_goes_before_what_its_relay_says() -> None:
    said = WorkerFacts(
        models=(ServedModel("m"),),
        events={0: RankEvents(endpoint="tcp://h:1"), 1: None},
        block_size=16,
        capacity_blocks=100,
        notes=("a note",),
    )
    assert completed(said, RELAYED) == said
    assert completed(said, WorkerFacts()) == said


@pytest.mark.parametrize("reply", [b"", b"{}", b'{"data": 3}', b'{"data": [3]}', b'{"data": []}'])
def test_a_server_that_lists_no_model_cannot_join(reply: bytes) -> None:
    with pytest.raises(JoinError):
        read_models(reply)
