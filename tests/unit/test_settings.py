"""The reference of all settings, and what is said of a wrong one."""

import tomllib
from pathlib import Path

import msgspec
import pytest

from kvrouter.commands.settings import text
from kvrouter.config import Config, ConfigError, RankEvents, WorkerConfig, parse_config
from kvrouter.settings import reference

DOCUMENT = Path(__file__).parents[2] / "docs" / "kvrouter.toml"


def problem(tables: dict[str, object]) -> str:
    with pytest.raises(ConfigError) as raised:
        parse_config(tables)
    return str(raised.value)


def test_the_reference_is_a_configuration_of_all_defaults() -> None:
    worker = WorkerConfig(
        url="http://gpu1:8000", kv_events=[RankEvents(endpoint="tcp://gpu1:5557")]
    )
    assert parse_config(tomllib.loads(reference(Config))) == Config(workers=[worker])


def test_each_setting_stands_in_the_reference() -> None:
    lines = [line.removeprefix("# ").split(" =")[0] for line in reference(Config).splitlines()]
    for section in msgspec.structs.fields(Config):
        kind = WorkerConfig if section.name == "workers" else section.type
        for field in msgspec.structs.fields(kind):
            assert field.name in lines or f"[[{section.name}.{field.name}]]" in lines


def test_the_document_holds_the_reference() -> None:
    assert DOCUMENT.read_text() == text(), "kvrouter settings > docs/kvrouter.toml"


@pytest.mark.parametrize(
    ("tables", "said"),
    [
        ({"policy": {"nam": "kv"}}, "policy: there is no nam here; did you mean name?"),
        ({"health": {"x": 1}}, "health: there is no x here; there are interval_s, timeout_s, "),
        ({"policy": {"name": "best"}}, "policy.name: must be one of kv, kv_blocks, "),
        ({"policy": {"w": -1}}, "policy.w: must be a number, at least 0"),
        ({"policy": {"w": 1e13}}, "policy.w: must be a number, at least 0, at most 1e+12"),
        ({"policy": {"fill_limit": 2}}, "policy.fill_limit: must be a number, 0 to 1"),
        ({"timeouts": {"idle_s": 0}}, "timeouts.idle_s: must be a number, above 0"),
        ({"server": {"port": 70_000}}, "server.port: must be a whole number, 0 to 65535"),
        ({"server": {"access_log": 1}}, "server.access_log: must be true or false"),
        (
            {"limits": {"extra_paths": "/x"}},
            "limits.extra_paths: must be a list, each a path: /...",
        ),
        ({"limits": {"extra_paths": ["x"]}}, "limits.extra_paths[0]: must be a path: /..."),
        ({"workers": [{"url": "http://me:pw@a:1"}]}, "without a user"),
        ({"workers": [{"url": "http://a:1", "name": "x y"}]}, "name: must be letters, digits and"),
        ({"server": {"port": 8001}}, "server.admin_port: 8001 is the port for clients already"),
        ({"policy": 3}, "policy: Expected `object`, got `int`"),
        ({"workers": [{"url": "http://a:1/v1"}]}, "or a path such as /v1"),
        (
            {"tokenizer": {"backends": {"m": "rust"}}},
            "tokenizer.backends[...]: must be one of auto, bytes, hf, remote",
        ),
        (
            {"workers": [{"url": "http://a:1", "kv_events": [{"endpoint": "5557"}]}]},
            "workers[0].kv_events[0].endpoint: must be tcp://host:port or ipc://path",
        ),
    ],
)
def test_what_a_setting_must_be_is_said(tables: dict[str, object], said: str) -> None:
    assert said in problem(tables)


def test_ranks_of_a_worker_are_numbered_apart() -> None:
    """E17: else one of them would be left out, or be taken for the other."""
    events = [{"endpoint": "tcp://gpu1:5557"}, {"endpoint": "tcp://gpu1:5558"}]
    assert "workers[0].kv_events[1].dp_rank" in problem(
        {"workers": [{"url": "http://gpu1:8000", "kv_events": events}]}
    )


def test_workers_cannot_be_discovered_without_nats() -> None:
    assert "nats.discover" in problem({"nats": {"discover": True}})


def test_a_wildcard_that_the_engine_listens_on_is_no_address_to_connect_to() -> None:
    """It is what stands in --kv-events-config, and is copied from there."""
    events = {"endpoint": "tcp://gpu1:5557", "replay_endpoint": "tcp://*:5657"}
    worker = {"url": "http://gpu1:8000", "kv_events": [events]}
    assert "workers[0].kv_events[0].replay_endpoint" in problem({"workers": [worker]})
    bound = parse_config({"workers": [worker | {"kv_events": [events | {"bind": True}]}]})
    assert bound.workers[0].kv_events
