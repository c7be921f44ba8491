"""Engines that listen at unix sockets, as sidecars do: all that is done over a port goes there."""

import asyncio
import socket
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
from support.loops import on_uvloop
from support.stack import engine_settings, stack, until

from kvrouter import commands
from kvrouter.asking import Sessions
from kvrouter.config import (
    ConfigError,
    EngineTlsConfig,
    TimeoutConfig,
    WorkerConfig,
    parse_config,
    worker_name,
)
from kvrouter.doctor import Examination, Verdict
from kvrouter.http.engine import EngineClient, EngineError, EngineFailure, EngineRequest
from kvrouter.sim.server import SimServer
from kvrouter.tls import engine_tls
from kvrouter.workers import WorkerState


@pytest.fixture
def path(tmp_path: Path) -> str:
    return str(tmp_path / "engine.sock")


def test_an_engine_at_a_socket_is_joined_followed_and_served(path: str) -> None:
    async def test() -> None:
        in_turn = {"name": "round_robin"}
        async with stack(engine_settings(uds=path), engine_settings(), policy=in_turn) as made:
            name = path.strip("/").replace("/", ":")
            assert made.name(0) == name
            worker = made.router.fleet.workers[name]
            assert worker.state is WorkerState.READY
            await until(lambda: bool(made.router.fleet.pools["tiny"].tokenizer))
            answers = [await made.chat("hello " * 60) for _ in range(4)]
            at_socket = [each for each in answers if each.headers["x-kvrouter-worker"] == name]
            assert {each.status for each in answers} == {200}
            assert len(at_socket) == len(made.posts(0)) == 2
            assert made.posts(0)[0].headers["Host"] == "localhost"
            await made.caught_up()
            async with made.session.get(f"{made.admin}/workers") as response:
                report = {each["name"]: each for each in (await response.json())["workers"]}
            assert report[name]["url"] == f"unix:{path}"
            assert report[name]["ranks"][0]["events"]["endpoint"].startswith("tcp://127.0.0.1:")
            assert report[name]["ranks"][0]["blocks"] > 0
            async with made.session.post(f"{made.admin}/workers/{name}/drain") as response:
                assert response.status == 200

    on_uvloop(test())


def test_an_engine_at_a_socket_is_missed_and_found_again(path: str) -> None:
    """Its socket file stays where it was killed: connecting is refused, not "no such file"."""

    async def test() -> None:
        async with stack(engine_settings(uds=path)) as made:
            worker = next(iter(made.router.fleet.workers.values()))
            await made.engines[0].kill()
            assert (await made.chat("hello")).status == 502
            await until(lambda: worker.state is WorkerState.JOINING or bool(worker.problem))
            await made.engines[0].start()
            await until(lambda: worker.state is WorkerState.READY and not worker.problem)
            assert (await made.chat("hello")).status == 200

    on_uvloop(test())


def test_an_engine_at_a_socket_can_be_asked_for_tokens(path: str) -> None:
    async def test() -> None:
        tokenizer = {"backend": "remote"}
        async with stack(engine_settings(uds=path), tokenizer=tokenizer) as made:
            await until(lambda: bool(made.router.fleet.pools["tiny"].tokenizer))
            decision = await made.explain(model="tiny", prompt="hello there", max_tokens=1)
            assert decision["prompt"]["fidelity"] == "exact"
            assert any(each.path == "/tokenize" for each in made.posts(0))

    on_uvloop(test())


def test_a_full_socket_is_waited_for(path: str) -> None:
    """Connecting to one fails at once where a port would let the client wait."""
    request = EngineRequest("GET", f"unix:{path}", "/", [], b"")

    async def test(listener: socket.socket) -> None:
        async with EngineClient(TimeoutConfig(connect_s=0.1)) as engines:
            with pytest.raises(EngineError, match="no connection within") as caught:
                await engines.send(request)
            assert caught.value.failure is EngineFailure.UNREACHABLE
        async with EngineClient(TimeoutConfig(connect_s=5)) as engines:
            asking = asyncio.create_task(engines.send(request))
            await asyncio.sleep(0.05)
            assert not asking.done()
            answering = threading.Thread(target=answer_all, args=[listener])
            answering.start()
            response = await asking
            assert response.status == 204
            response.close()
            answering.join()

    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(path)
        listener.listen(0)
        waiting = list(fill(path))
        on_uvloop(test(listener))
        for each in waiting:
            each.close()


def fill(path: str) -> Iterator[socket.socket]:
    """Connect until no more is possible."""
    while True:
        client = socket.socket(socket.AF_UNIX)
        client.setblocking(False)
        try:
            client.connect(path)
        except BlockingIOError:
            client.close()
            return
        yield client


def answer_all(listener: socket.socket) -> None:
    """Answer whoever asks, until one has."""
    asked = False
    while not asked:
        connection, _ = listener.accept()
        with connection:
            connection.settimeout(0.05)
            try:
                asked = bool(connection.recv(1000))
            except TimeoutError:
                continue
            connection.sendall(b"HTTP/1.1 204 No Content\r\n\r\n")


def test_the_socket_of_a_worker_is_written_as_its_path() -> None:
    def named(url: str) -> str:
        return worker_name(parse_config({"workers": [{"url": url}]}).workers[0])

    assert named("unix:/run/vllm.sock") == "run:vllm.sock"
    assert named("unix:///run/vllm.sock") == "run:vllm.sock"
    wrong = ["unix:vllm.sock", "unix://host/vllm.sock", "unix:", "unix:/", "unix:/a b", "unix:/a?b"]
    for url in [*wrong, "http+unix://%2Frun%2Fvllm.sock", "unix:/" + "a" * 107, "/run/vllm.sock"]:
        with pytest.raises(ConfigError, match=r"workers\[0\]\.url.*unix"):
            named(url)


async def test_an_engine_at_a_socket_can_be_examined(path: str) -> None:
    server = SimServer(engine_settings(uds=path))
    await server.start()
    async with Sessions(engine_tls(EngineTlsConfig())) as sessions:
        found = await examine(f"unix:{path}", sessions)
        assert set(found.values()) == {Verdict.OK}
        assert any("KV events of dp rank 0 at tcp://127.0.0.1:" in text for text in found)
        await server.stop()
        found = await examine(f"unix:{path}.none", sessions)
        assert set(found.values()) == {Verdict.PROBLEM}
        assert any("No such file" in text for text in found)


async def examine(url: str, sessions: Sessions) -> dict[str, Verdict]:
    examination = Examination(WorkerConfig(url=url), sessions.of(url))
    return {finding.text: finding.verdict async for finding in examination.run()}


def test_the_check_of_a_file_names_the_socket(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "kvrouter.toml"
    file.write_text('[[workers]]\nurl = "unix:/run/vllm.sock"\n')
    assert commands.run(["check", str(file)]) == 0
    assert "run:vllm.sock" in capsys.readouterr().out
