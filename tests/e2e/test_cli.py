"""The commands as a user starts them: what they say when all is well, and when it isn't."""

import asyncio
import json
import os
import signal
import socket
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from tempfile import NamedTemporaryFile

import aiohttp
import pytest
from support.processes import Command, command, run
from support.stack import engine_settings, until

from kvrouter.cli import main
from kvrouter.demo.processes import free_port
from kvrouter.sim.server import SimServer
from kvrouter.sim.timing import LinearTiming


@asynccontextmanager
async def engine(**changes: object) -> AsyncIterator[SimServer]:
    server = SimServer(engine_settings(**changes))
    await server.start()
    try:
        yield server
    finally:
        await server.stop()


async def serving(running: Command) -> tuple[str, str]:
    """The addresses of a router that has just started: clients, second port."""
    clients = (await running.line_with("clients: ")).split("clients: ")[1].strip()
    admin = (await running.line_with("second port: ")).split("second port: ")[1].strip()
    await running.line_with("prompts are encoded by")
    return clients, admin


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        (["serve"], "--worker"),
        (["serve", "--worker", "gpu1:8000"], "workers[0].url"),
        (["serve", "--worker", "http://gpu1:8000/v1"], "workers[0].url"),
        (["serve", "--worker", "http://a:1", "--worker", "http://a:1"], "another worker"),
        (["serve", "--config", "/nonexistent.toml"], "/nonexistent.toml"),
        (["check", "/nonexistent.toml"], "/nonexistent.toml"),
        (["explain", "/nonexistent.json"], "/nonexistent.json"),
        (["demo", "--conversations", "0"], "--conversations"),
        (["demo", "--replicas", "0"], "--replicas"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else None,
)
def test_a_mistake_gets_one_clear_line_and_status_2(
    arguments: list[str], text: str, capsys: pytest.CaptureFixture[str]
) -> None:
    try:
        status: int | str | None = main(arguments)
    except SystemExit as ended:  # by the parser of arguments
        status = ended.code
    assert status == 2
    assert text in capsys.readouterr().err


def test_a_reader_that_leaves_is_no_traceback(monkeypatch: pytest.MonkeyPatch) -> None:
    """`kvrouter settings | head -1`."""
    reading, writing = os.pipe()
    os.close(reading)
    with os.fdopen(writing, "w") as broken:
        monkeypatch.setattr(sys, "stdout", broken)
        assert main(["settings"]) == 1


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs a device that is full")
def test_a_full_disk_is_one_clear_line(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    with Path("/dev/full").open("w") as full:
        monkeypatch.setattr(sys, "stdout", full)
        assert main(["settings"]) == 1
        full.flush()
    assert "the output can't be written: No space left" in capsys.readouterr().err


def test_an_output_that_is_closed_is_nobodys(monkeypatch: pytest.MonkeyPatch) -> None:
    """`kvrouter settings >&-`."""
    monkeypatch.setattr(sys, "stdout", None)
    assert main(["settings"]) == 0
    sys.stdout.close()


@pytest.mark.parametrize("arguments", [["check"], ["serve", "--config"]])
def test_a_chat_template_that_is_missing_is_a_mistake(
    arguments: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Else it would be found out when a worker has joined, and by its chats."""
    path = tmp_path / "kvrouter.toml"
    path.write_text(
        '[[workers]]\nurl = "http://gpu1:8000"\n[tokenizer]\nchat_template = "/nonexistent.jinja"\n'
    )
    assert main([*arguments, str(path)]) == 2
    assert "tokenizer.chat_template: /nonexistent.jinja: can't be read" in capsys.readouterr().err


async def test_a_mistake_is_no_traceback_of_the_process() -> None:
    status, output = await run("explain", "-", "--admin", "http://127.0.0.1:9")
    assert status == 2
    assert "no router answers" in output
    assert "Traceback" not in output


async def test_a_port_that_is_taken_is_said() -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = str(taken.getsockname()[1])
        status, output = await run("serve", "--worker", "http://a:1", "--port", port)
    assert status == 2
    assert "cannot listen" in output
    assert "Traceback" not in output


async def test_check_tells_a_right_file_from_a_wrong_one(tmp_path: Path) -> None:
    right = tmp_path / "right.toml"
    right.write_text('[[workers]]\nurl = "http://gpu1:8000"\n[policy]\nw = 2.0\n')
    assert await run("check", str(right)) == (
        0,
        f"{right} is right. Policy: kv; workers: gpu1:8000\n",
    )
    unused = tmp_path / "unused.toml"
    unused.write_text('[policy]\nname = "round_robin"\ncopy_weight = 9\ncpu_credit = 0.5\n')
    status, output = await run("check", str(unused))
    assert status == 0
    assert output.splitlines()[1:] == ["policy.copy_weight: round_robin does not go by it"]
    wrong = tmp_path / "wrong.toml"
    wrong.write_text("[policy]\nw = -1\n[timeouts]\nidle = 3\n")
    status, output = await run("check", str(wrong))
    assert status == 2
    assert "policy.w" in output
    assert "timeouts" in output


async def test_a_router_learns_its_worker_serves_and_stops_cleanly() -> None:
    """The one line of the README."""
    async with (
        engine() as server,
        command("serve", "--worker", server.url, "--port", "0", "--admin-port", "0") as running,
        aiohttp.ClientSession() as session,
    ):
        clients, admin = await serving(running)
        body = {"model": "tiny", "prompt": "hello", "max_tokens": 2}
        async with session.post(f"{clients}/completions", json=body) as response:
            assert response.status == 200
        status, output = await _explain(admin, body)
        assert status == 0
        assert "winner: " + server.url.removeprefix("http://") in output
        assert await running.stop() == 0
        assert not any("ERROR" in line or "Traceback" in line for line in running.lines)


async def _explain(admin: str, body: dict[str, object]) -> tuple[int, str]:
    with NamedTemporaryFile("w", suffix=".json") as file:
        json.dump(body, file)
        file.flush()
        return await run("explain", file.name, "--admin", admin)


async def test_running_streams_may_finish_when_the_router_stops() -> None:
    """A rolling update must not cut answers."""
    slow = LinearTiming(base_s=0.05, prefill_token_s=0.0, decode_sequence_s=0.0)
    async with (
        engine(timing=slow) as server,
        command("serve", "--worker", server.url, "--port", "0", "--admin-port", "0") as running,
        aiohttp.ClientSession() as session,
    ):
        clients, admin = await serving(running)
        body = {"model": "tiny", "prompt": "hello", "max_tokens": 60, "stream": True}

        async def says(status: int) -> bool:
            async with session.get(f"{admin}/ready") as answer:
                return answer.status == status

        async with session.post(f"{clients}/completions", json=body) as response:
            await response.content.readline()
            assert await says(200)
            running.process.send_signal(signal.SIGTERM)
            await until(lambda: says(503))
            rest = await response.content.read()
        assert rest.endswith(b"data: [DONE]\n\n")
        assert await running.ended() == 0


async def test_ctrl_c_ends_an_idle_router_at_once() -> None:
    async with (
        engine() as server,
        command("serve", "--worker", server.url, "--port", "0", "--admin-port", "0") as running,
    ):
        await serving(running)
        async with asyncio.timeout(10):
            assert await running.stop(signal.SIGINT) == 0


async def test_a_router_starts_before_its_engines(tmp_path: Path) -> None:
    """Everything is started at once by an orchestrator."""
    port = free_port()
    file = tmp_path / "kvrouter.toml"
    file.write_text("[health]\ninterval_s = 0.3\n")
    flags = ("--worker", f"http://127.0.0.1:{port}", "--port", "0", "--admin-port", "0")
    async with (
        command("serve", "--config", str(file), *flags) as running,
        aiohttp.ClientSession() as session,
    ):
        admin = (await running.line_with("second port: ")).split("second port: ")[1].strip()
        await running.line_with("unreachable")
        async with engine(port=port):

            async def ready() -> bool:
                async with session.get(f"{admin}/ready") as response:
                    return response.status == 200

            await until(ready, deadline_s=20)


@pytest.mark.timeout(180)  # two fleets of five processes start for it
async def test_the_demo_compares_two_policies() -> None:
    status, output = await run(
        "demo", "--exit", "--conversations", "2", "--port", "0", "--admin-port", "0"
    )
    assert status == 0, output
    rows = [
        line.split() for line in output.splitlines() if line.startswith(("round_robin ", "kv "))
    ]
    assert [row[0] for row in rows] == ["round_robin", "kv"]
    assert all(row[1].endswith("%") for row in rows)


@pytest.mark.slow
@pytest.mark.timeout(180)
async def test_the_demo_of_several_routers_shows_that_they_agree() -> None:
    ports = ("--port", "0", "--admin-port", "0")
    status, output = await run("demo", "--replicas", "3", "--exit", *ports)
    assert status == 0, output
    rows = [line.split() for line in output.splitlines() if line.startswith("router ")]
    totals = [row[-1] for row in rows if row[2].isdigit()]
    assert totals == ["24"] * 3 + ["16"] * 5
    chosen = {row[4] for row in rows if row[2] == "chose"}
    assert len(chosen) == 1


@pytest.mark.slow
@pytest.mark.timeout(180)
async def test_ctrl_c_ends_the_demo_of_several_routers_with_all_that_it_started() -> None:
    ports = ("--port", "0", "--admin-port", "0")
    async with command("demo", "--replicas", "2", *ports) as running:
        await running.line_with("Ctrl-C ends it")
        children = _descendants(running.process.pid)
        assert len(children) == 7
        assert await running.stop(signal.SIGINT) == 0
        assert not [child for child in children if child.exists()]


def _descendants(pid: int) -> list[Path]:
    children = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
    return [Path(f"/proc/{child}") for child in children]
