"""What `kvrouter doctor` finds at healthy and at lacking workers."""

import socket
from pathlib import Path

import aiohttp
from support.stack import TINYMODEL, engine_settings

from kvrouter.config import RankEvents, WorkerConfig
from kvrouter.doctor import Examination, Finding, Verdict
from kvrouter.sim.server import SimServer
from kvrouter.sim.settings import SimSettings


async def examine(settings: SimSettings, tokenizer: str | None = None) -> list[Finding]:
    server = SimServer(settings)
    await server.start()
    try:
        async with aiohttp.ClientSession() as session:
            examination = Examination(WorkerConfig(url=server.url), session, tokenizer)
            return [finding async for finding in examination.run()]
    finally:
        await server.stop()


async def test_a_worker_that_has_everything_is_well() -> None:
    findings = await examine(engine_settings(dp_size=2))
    assert {finding.verdict for finding in findings} == {Verdict.OK}
    assert sum("KV events of dp rank" in finding.text for finding in findings) == 2


async def test_what_is_missing_is_said_with_the_flag_that_brings_it() -> None:
    settings = engine_settings(kv_events_port=None, prompt_tokens_details=False)
    texts = [f.text for f in await examine(settings) if f.verdict is Verdict.WARNING]
    assert any("--kv-events-config" in text for text in texts)
    assert any("--enable-prompt-tokens-details" in text for text in texts)


def _sister_model(folder: Path) -> Path:
    """The tiny model's tokenizer with another chat template."""
    for file in Path(TINYMODEL).glob("tokenizer*.json"):
        text = file.read_text(encoding="utf-8").replace("assistant", "helper")
        (folder / file.name).write_text(text, encoding="utf-8")
    return folder


async def test_another_tokenizer_than_the_engines_is_a_problem(tmp_path: Path) -> None:
    """The router was given the tokenizer of a sister model."""
    sister = _sister_model(tmp_path)
    problems = [
        f.text for f in await examine(engine_settings(), str(sister)) if f.verdict == "PROBLEM"
    ]
    assert any("differ" in text for text in problems)


async def test_a_port_without_a_vllm_behind_it_is_a_problem() -> None:
    async with aiohttp.ClientSession() as session:
        examination = Examination(WorkerConfig(url="http://127.0.0.1:9"), session)
        findings = [finding async for finding in examination.run()]
    assert [finding.verdict for finding in findings] == [Verdict.PROBLEM]


async def test_events_that_cannot_be_reached_are_a_problem() -> None:
    """A firewall lets the HTTP port through and nothing else."""
    server = SimServer(engine_settings())
    await server.start()
    with socket.socket() as closed:
        closed.bind(("127.0.0.1", 0))
        endpoint = f"tcp://127.0.0.1:{closed.getsockname()[1]}"
        worker = WorkerConfig(url=server.url, kv_events=[RankEvents(endpoint=endpoint)])
        async with aiohttp.ClientSession() as session:
            findings = [finding async for finding in Examination(worker, session).run()]
    await server.stop()
    assert any(f.verdict is Verdict.PROBLEM and endpoint in f.text for f in findings)
