"""Several processes behind one port, as a user starts them."""

import asyncio
import os
import signal
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import aiohttp
import pytest
import trustme
from support.processes import Command, command, run
from support.stack import engine_settings, until

from kvrouter.sim.server import SimServer
from kvrouter.sim.timing import LinearTiming

SLOW = LinearTiming(base_s=0.02, prefill_token_s=1e-6, decode_sequence_s=0.0)


class Served:
    """A front door of two processes before one engine."""

    def __init__(self, running: Command, url: str, admin: str) -> None:
        self.running = running
        self.url = url
        self.admin = admin

    async def get(self, path: str) -> Any:
        async with aiohttp.ClientSession() as session, session.get(self.admin + path) as response:
            is_json = response.content_type == "application/json"
            return await (response.json() if is_json else response.text())

    async def processes(self) -> dict[int, int]:
        """The process ids by number."""
        report = await self.get("/workers")
        return {each["process"]: each["pid"] for each in report["processes"]}

    async def is_ready(self) -> bool:
        return (await self.get("/ready"))["ready"] and len(await self.processes()) == 2

    async def chat(self, tokens: int = 2, *, stream: bool = False) -> tuple[int, str]:
        """A chat on a connection of its own."""
        body = {
            "model": "tiny",
            "messages": [{"role": "user", "content": "hello"}],
            "max_tokens": tokens,
            "stream": stream,
        }
        async with (
            aiohttp.ClientSession() as session,
            session.post(f"{self.url}/v1/chat/completions", json=body) as response,
        ):
            return response.status, await response.text()


@asynccontextmanager
async def served(*flags: str) -> AsyncIterator[Served]:
    engine = SimServer(engine_settings(timing=SLOW))
    await engine.start()
    try:
        async with command(
            *("serve", "--processes", "2", "--port", "0", "--admin-port", "0"),
            *("--worker", engine.url, *flags),
        ) as running:
            url = (await running.line_with("clients:")).split("clients: ")[1].strip()
            admin = (await running.line_with("second port:")).split("second port: ")[1].strip()
            made = Served(running, url.removesuffix("/v1"), admin)
            await until(made.is_ready, deadline_s=60)
            yield made
    finally:
        await engine.stop()


def is_alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True


def total(metrics: str, name: str) -> float:
    lines = [line for line in metrics.splitlines() if line.startswith(name)]
    return sum(float(line.rsplit(" ", 1)[1]) for line in lines)


@pytest.mark.slow
async def test_two_processes_are_one_front_door() -> None:
    async with served() as made:
        answers = await asyncio.gather(*(made.chat() for _ in range(40)))
        assert {status for status, _ in answers} == {200}
        metrics = await made.get("/metrics")
        assert total(metrics, "kvrouter_requests_total") == 40
        seen = {line for line in metrics.splitlines() if 'process="' in line}
        assert any('process="0"' in line for line in seen)
        assert any('process="1"' in line for line in seen)

        async def share() -> bool:
            processes = (await made.get("/workers"))["processes"]
            return all(each["replicas"]["company"] == "shared" for each in processes)

        await until(share, deadline_s=30)
        worker = (await made.get("/workers"))["workers"][0]["name"]
        async with aiohttp.ClientSession() as session:
            for move, status in (("drain", 503), ("resume", 200)):
                async with session.post(f"{made.admin}/workers/{worker}/{move}") as response:
                    assert response.status == 200

                async def all_say(status: int = status) -> bool:
                    said = await asyncio.gather(*(made.chat() for _ in range(8)))
                    return {each for each, _ in said} == {status}

                await until(all_say, deadline_s=30)
        assert await made.running.stop() == 0


@pytest.mark.slow
async def test_both_ports_certificates_are_read_again_on_sighup(tmp_path: Path) -> None:
    """The second port is the keeper's, the first one its processes'."""
    authority = trustme.CA()
    chain = authority.issue_cert("127.0.0.1").private_key_and_cert_chain_pem
    (tmp_path / "ca.pem").write_bytes(authority.cert_pem.bytes())
    (tmp_path / "cert.pem").write_bytes(chain.bytes())
    settings = tmp_path / "kvrouter.toml"
    settings.write_text(
        f'[server]\ntls_cert = "{tmp_path}/cert.pem"\nadmin_tls_cert = "{tmp_path}/cert.pem"\n'
    )
    question = tmp_path / "question.json"
    question.write_text('{"prompt": "a"}')
    engine = SimServer(engine_settings())
    await engine.start()
    try:
        async with command(
            *("serve", "--processes", "2", "--port", "0", "--admin-port", "0"),
            *("--worker", engine.url, "--config", str(settings)),
        ) as running:
            admin = (await running.line_with("second port:")).split("second port: ")[1].strip()
            assert admin.startswith("https://")
            for _ in range(2):
                await running.line_with("prompts are encoded by")
            status, said = await run(
                *("explain", str(question), "--admin", admin, "--ca", str(tmp_path / "ca.pem"))
            )
            assert status == 0, said
            running.process.send_signal(signal.SIGHUP)
            for _ in range(3):
                await running.line_with(f"was read again: {tmp_path}/cert.pem")
            assert await running.stop() == 0
    finally:
        await engine.stop()


@pytest.mark.slow
async def test_a_process_that_dies_is_replaced() -> None:
    async with served() as made:
        before = await made.processes()
        os.kill(before[1], signal.SIGKILL)

        async def is_replaced() -> bool:
            now = await made.processes()
            return now.keys() == before.keys() and now[1] != before[1] and await made.is_ready()

        await until(is_replaced, deadline_s=60)
        assert (await made.processes())[0] == before[0]
        answers = await asyncio.gather(*(made.chat() for _ in range(20)))
        assert {status for status, _ in answers} == {200}


@pytest.mark.slow
async def test_replacing_all_processes_refuses_no_connection_and_cuts_no_stream() -> None:
    """An update of the router, or of its configuration."""
    async with served() as made:
        before = await made.processes()
        streams = [asyncio.create_task(made.chat(200, stream=True)) for _ in range(10)]
        made.running.process.send_signal(signal.SIGUSR2)
        statuses: list[int] = []

        async def is_replaced() -> bool:
            statuses.append((await made.chat())[0])
            now = await made.processes()
            return len(now) == 2 and not set(now.values()) & set(before.values())

        await until(is_replaced, deadline_s=90)
        assert set(statuses) == {200}
        for status, text in await asyncio.gather(*streams):
            assert status == 200
            assert "[DONE]" in text
            assert '"error"' not in text


@pytest.mark.slow
async def test_stopping_lets_streams_end_and_processes_end_with_their_keeper() -> None:
    async with served() as made:
        pids = (await made.processes()).values()
        stream = asyncio.create_task(made.chat(100, stream=True))
        await asyncio.sleep(0.3)
        assert await made.running.stop() == 0
        assert "[DONE]" in (await stream)[1]
    async with served() as made:
        pids = (await made.processes()).values()
        made.running.process.kill()
        await until(lambda: not any(map(is_alive, pids)), deadline_s=60)


@pytest.mark.slow
async def test_what_no_process_can_start_with_ends_all_of_them(tmp_path: Path) -> None:
    """They would be started again for ever."""
    config = tmp_path / "kvrouter.toml"
    config.write_text('[server]\ntls_cert = "/nowhere/cert.pem"\nport = 0\nadmin_port = 0\n')
    async with command(
        *("serve", "--processes", "2", "--config", str(config)),
        *("--worker", "http://127.0.0.1:1"),
    ) as running:
        await running.line_with("/nowhere/cert.pem")
        async with asyncio.timeout(30):
            assert await running.process.wait() == 2
