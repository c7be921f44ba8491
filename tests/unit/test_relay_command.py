"""What `kvrouter relay` makes of its command line."""

import argparse

import pytest

from kvrouter.commands import relay
from kvrouter.config import ConfigError, worker_name


def names(*engines: str) -> list[tuple[str, str]]:
    """Name and URL of each worker that the command would relay."""
    parser = argparse.ArgumentParser()
    relay.add_command(parser.add_subparsers())
    flags = [f"--engine={engine}" for engine in engines]
    options = parser.parse_args(["relay", "--nats=nats://n:4222", *flags])
    workers = relay.configuration(options).workers
    return [(worker_name(worker), worker.url) for worker in workers]


@pytest.mark.parametrize(
    ("engine", "name", "url"),
    [
        ("http://localhost:8000", "localhost:8000", "http://localhost:8000"),
        ("gpu1:8000=http://localhost:8000", "gpu1:8000", "http://localhost:8000"),
        ("gpu1=unix:/run/vllm.sock", "gpu1", "unix:/run/vllm.sock"),
        ("unix:/run/a=b.sock", "run:a=b.sock", "unix:/run/a=b.sock"),
    ],
)
def test_an_engine_may_be_given_the_name_that_routers_know_it_by(
    engine: str, name: str, url: str
) -> None:
    """A relay beside an engine reaches it by another address than routers do."""
    assert names(engine) == [(name, url)]


def test_one_engine_under_two_names_is_refused() -> None:
    with pytest.raises(ConfigError, match="http://h:1 is the worker 'a' already"):
        names("a=http://h:1", "b=http://h:1")


def test_engines_of_one_name_are_refused() -> None:
    with pytest.raises(ConfigError, match="another worker named 'a'"):
        names("a=http://h:1", "a=http://h:2")
