"""The configuration tree: strict, and every problem with its path."""

from pathlib import Path

import pytest

from kvrouter.config import Config, ConfigError, parse_config, read_toml, worker_name


def problem(tables: dict[str, object]) -> str:
    with pytest.raises(ConfigError) as raised:
        parse_config(tables)
    return str(raised.value)


def test_an_empty_configuration_has_the_documented_defaults() -> None:
    assert parse_config({}) == Config()


def test_a_misspelt_field_is_named_with_its_path() -> None:
    assert "policy" in problem({"policy": {"temprature": 1}})
    assert "temprature" in problem({"policy": {"temprature": 1}})


def test_a_wrong_value_is_named_with_its_path() -> None:
    message = problem({"workers": [{"url": "http://a:1"}, {"url": "gpu2:8000"}]})
    assert message.startswith("workers[1].url:")


def test_all_sections_with_problems_are_reported_at_once() -> None:
    message = problem({"policy": {"w": -1}, "timeouts": {"idle_s": "long"}, "wrokers": []})
    assert "policy.w" in message
    assert "timeouts.idle_s" in message
    assert "wrokers: there is no such section" in message


def test_two_workers_may_not_have_one_name() -> None:
    message = problem({"workers": [{"url": "http://a:1"}, {"url": "https://a:1/"}]})
    assert "'a:1'" in message


def test_one_engine_may_not_have_two_names() -> None:
    """It would be two workers with one cache, and its events would come twice."""
    workers = [{"url": "http://a:1", "name": "x"}, {"url": "http://a:1/", "name": "y"}]
    assert problem({"workers": workers}) == "workers[1].url: http://a:1 is the worker 'x' already"


@pytest.mark.parametrize(
    ("tables", "path"),
    [
        ({"nats": {"servers": ["nats://h:4222", "nats://u:p@h:65536"]}}, "nats.servers[1]"),
        (
            {"workers": [{"url": "http://h:1", "kv_events": [{"endpoint": "tcp://h:65536"}]}]},
            "workers[0].kv_events[0].endpoint",
        ),
        (
            {
                "workers": [
                    {
                        "url": "http://h:1",
                        "kv_events": [
                            {"endpoint": "tcp://[::1]:1", "replay_endpoint": "tcp://h:99999"}
                        ],
                    }
                ]
            },
            "workers[0].kv_events[0].replay_endpoint",
        ),
    ],
)
def test_a_port_that_there_cannot_be_is_refused(tables: dict[str, object], path: str) -> None:
    assert problem(tables).startswith(f"{path}: Port out of range")


def test_passwords_in_a_nats_url_may_look_like_anything() -> None:
    parse_config({"nats": {"servers": ["nats://u:p[99999@h:4222", "nats://[::1]:4222"]}})


@pytest.mark.parametrize(
    "url", ["ftp://a:1", "http://", "http://a:1/v1", "http://a b:1", "a:1", "http://a:99999"]
)
def test_a_worker_url_is_scheme_host_and_port(url: str) -> None:
    """Users paste the base URL of their OpenAI client, with /v1 at its end."""
    assert "workers[0].url" in problem({"workers": [{"url": url}]})


def test_a_trailing_slash_of_a_url_is_no_part_of_the_name() -> None:
    assert worker_name(parse_config({"workers": [{"url": "http://a:1/"}]}).workers[0]) == "a:1"


def test_a_file_that_is_missing_or_no_toml_is_a_clear_error(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="No such file"):
        read_toml(tmp_path / "none.toml")
    broken = tmp_path / "broken.toml"
    broken.write_text("[policy\nw = 1")
    with pytest.raises(ConfigError, match=r"broken\.toml"):
        read_toml(broken)


@pytest.mark.parametrize(
    ("tables", "text"),
    [
        ({"nats": {"token": "t", "nkey_seed": "f"}}, "nats.nkey_seed: there is token already"),
        ({"nats": {"user": "u", "password": "p", "token": "t"}}, "nats.token: there is user"),
        (
            {"nats": {"servers": ["nats://u:p@h:1"], "token": "t"}},
            "nats.token: there is a user in servers already",
        ),
        ({"nats": {"user": "u"}}, "nats.password: is missing"),
        ({"nats": {"password": "p"}}, "nats.user: is missing"),
        ({"nats": {"tls_key": "f"}}, "nats.tls_cert: is missing"),
        ({"replicas": {"beat_s": 8.0, "lease_s": 3.0}}, "replicas.lease_s: 3 is too short"),
        ({"replicas": {"beat_s": 8.0}}, "replicas.lease_s: 5 is too short for beat_s = 8"),
    ],
)
def test_what_cannot_go_together_is_refused(tables: dict[str, object], text: str) -> None:
    assert problem(tables).startswith(text)
    assert parse_config({"replicas": {"beat_s": 1.0, "lease_s": 3.0}}).replicas.lease_s == 3.0
