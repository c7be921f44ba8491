"""Tokenization in a running router: the chosen encoder, ids for engines, counts compared."""

import asyncio
import json
import shutil
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from random import Random

import aiohttp
import pytest
from support.processes import command
from support.stack import TINYMODEL, Stack, engine_settings, stack

from kvrouter.commands.explain import table
from kvrouter.sim.server import SimServer
from kvrouter.token_counts import MIN_EQUAL

LONG = "The harbour lay quiet in the morning, and the ships were still at anchor. " * 4


async def model(running: Stack) -> dict[str, object]:
    async with running.session.get(f"{running.admin}/workers") as response:
        found: dict[str, object] = (await response.json())["models"][0]
        return found


async def metrics(running: Stack) -> str:
    async with running.session.get(f"{running.admin}/metrics") as response:
        return await response.text()


async def prompt_tokens(running: Stack) -> int:
    """What the engine says about one more equal chat."""
    body = {"messages": [{"role": "user", "content": LONG}], "max_tokens": 2}
    async with running.session.post(f"{running.url}/v1/chat/completions", json=body) as response:
        return int((await response.json())["usage"]["prompt_tokens"])


async def test_the_encoder_in_use_and_the_reason_are_shown() -> None:
    async with stack(engine_settings(), tokenizer={"backend": "auto"}) as running:
        backend = (await model(running))["tokenizer_backend"]
        assert isinstance(backend, dict)
        assert backend["name"] == "fastokens"
        assert "equal to tokenizers" in backend["why"]
        assert 'kvrouter_tokenizer_backend{backend="fastokens",model="tiny"} 1.0' in await metrics(
            running
        )


@pytest.mark.parametrize(
    ("name", "content", "why"),
    [
        ("chat_template.jinja", b"\xff\xfe", "can't decode byte 0xff"),
        (
            "tokenizer_config.json",
            b'{"chat_template": [{"name": "default", "template": 5}]}',
            "does not compile",
        ),
    ],
)
async def test_a_folder_with_a_broken_file_costs_tokens_and_says_why(
    tmp_path: Path, name: str, content: bytes, why: str
) -> None:
    """T8: whatever is wrong with it, the router gets ready and serves."""
    shutil.copytree(TINYMODEL, tmp_path, dirs_exist_ok=True)
    (tmp_path / name).write_bytes(content)
    wish = {"backend": "auto", "path": str(tmp_path)}
    async with stack(engine_settings(), tokenizer=wish) as running:
        problem = (await model(running))["tokenizer"]
        assert isinstance(problem, str)
        assert why in problem
        assert (await running.chat("Hello")).status == 200


async def test_prompts_go_as_ids_when_the_engine_has_counted_the_same() -> None:
    """Opt-in: the engine need not tokenize again, and answers the same."""
    async with stack(engine_settings(), tokenizer={"send_ids": ["tiny"]}) as running:
        answers = [await prompt_tokens(running) for _ in range(MIN_EQUAL + 2)]
        bodies = [json.loads(each.body) for each in running.posts(0)]
        as_ids = ["kv_transfer_params" in body for body in bodies]
        assert as_ids == [False] * MIN_EQUAL + [True] * 2
        assert len(set(answers)) == 1
        assert len(bodies[-1]["kv_transfer_params"]["prompt_token_ids"]) == answers[0]
        assert bodies[-1]["messages"] == bodies[0]["messages"]
        assert (await model(running))["tokenizer"] == "exact"
        assert "kvrouter_prompts_sent_as_ids_total 2.0" in await metrics(running)


async def test_without_being_asked_for_nobody_gets_ids() -> None:
    async with stack(engine_settings()) as running:
        for _ in range(MIN_EQUAL + 2):
            await running.chat(LONG)
        assert all(b"kv_transfer_params" not in each.body for each in running.posts(0))


async def test_a_tokenizer_that_is_not_the_engines_is_found_out(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """Another template, another version: every overlap of the model would be a guess."""
    async with stack(engine_settings(tokenizer=None), tokenizer={"path": TINYMODEL}) as running:
        for _ in range(3):
            await running.chat(LONG)
        shown = await model(running)
        assert "degraded: tokenizer: the router counts" in str(shown["tokenizer"])
        explained = await running.explain(model="tiny", prompt=LONG)
        assert explained["degraded"] in str(shown["tokenizer"])
        assert f"degraded: {explained['degraded']}\n" in table(explained)
        text = await metrics(running)
        assert 'kvrouter_tokenizer_degraded{model="tiny"} 1.0' in text
        assert 'kvrouter_token_counts_total{model="tiny",result="different"} 3.0' in text
    told = [each for each in caplog.records if "prompt tokens" in each.getMessage()]
    assert len(told) == 1


async def test_an_engine_is_asked_for_the_ids_of_a_model_whose_tokenizer_it_alone_has() -> None:
    """A model with a tokenizer of its own code."""
    async with stack(engine_settings(), tokenizer={"backend": "remote"}) as running:
        assert (await model(running))["tokenizer"] == "exact"
        for _ in range(3):
            await prompt_tokens(running)
        await running.caught_up()
        prompt = {"messages": [{"role": "user", "content": LONG}]}
        explained = await running.explain(**prompt)
        assert explained["candidates"][0]["overlap_blocks"]["gpu"] > 0
        text = await metrics(running)
        assert 'kvrouter_token_counts_total{model="tiny",result="equal"} 3.0' in text
        assert 'kvrouter_prompts_total{fidelity="exact"} 3.0' in text


async def test_completions_and_other_dialects_are_asked_for_too() -> None:
    async with stack(engine_settings(), tokenizer={"backend": "remote"}) as running:
        for path, body in (
            ("/v1/completions", {"prompt": LONG}),
            ("/v1/responses", {"input": LONG}),
            ("/v1/messages", {"messages": [{"role": "user", "content": LONG}]}),
        ):
            asked = {**body, "max_tokens": 2, "max_output_tokens": 2}
            async with running.session.post(running.url + path, json=asked) as response:
                assert response.status == 200, await response.text()
        text = await metrics(running)
        assert 'kvrouter_token_counts_total{model="tiny",result="equal"} 3.0' in text


async def test_an_engine_that_does_not_answer_costs_the_overlap_not_the_request() -> None:
    async with stack(engine_settings(), tokenizer={"backend": "remote"}) as running:
        odd = {"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}
        explained = await running.explain(**odd)
        assert explained["prompt"]["fidelity"] == "blind"
        assert (await model(running))["tokenizer"] == "exact"


async def test_bytes_are_taken_for_tokens_if_asked() -> None:
    """T8: it is said in the state of the model."""
    settings = {"backends": {"tiny": "bytes"}}
    async with stack(engine_settings(), tokenizer=settings) as running:
        shown = await model(running)
        assert "approximate" in str(shown["tokenizer"])
        await prompt_tokens(running)
        explained = await running.explain(messages=[{"role": "user", "content": LONG}])
        assert explained["prompt"]["fidelity"] == "approximate"
        assert sum(each["predicted_blocks"] for each in explained["candidates"]) > 0


@pytest.mark.slow
async def test_health_answers_in_time_while_eight_prompts_of_128k_tokens_arrive_at_once() -> None:
    """T6: a probe that is not answered in time makes an orchestrator kill the router."""
    bodies = [
        {"model": "tiny", "prompt": "".join(Random(number).choices("abcdefg hijk lm", k=300_000))}
        for number in range(8)
    ]
    async with refusing_engine(400, times=len(bodies)) as url:
        flags = ("--worker", url, "--tokenizer", TINYMODEL, "--port", "0", "--admin-port", "0")
        async with command("serve", *flags) as router, aiohttp.ClientSession() as session:
            clients = (await router.line_with("clients: ")).split("clients: ")[1].strip()
            admin = (await router.line_with("second port: ")).split("second port: ")[1].strip()
            await router.line_with("prompts are encoded by")
            waits_s: list[float] = []

            async def ask_for_health() -> None:
                asked_at = time.monotonic()
                async with session.get(f"{admin}/health") as response:
                    assert response.status == 200
                waits_s.append(time.monotonic() - asked_at)

            async def send(body: dict[str, str]) -> int:
                async with session.post(f"{clients}/completions", json=body) as response:
                    return response.status

            async with asyncio.TaskGroup() as group:
                sent = [group.create_task(send(body)) for body in bodies]
                while not all(task.done() for task in sent):
                    group.create_task(ask_for_health())
                    await asyncio.sleep(0.02)
            assert [task.result() for task in sent] == [400] * 8, "what the engine answers"
            async with session.get(f"{admin}/metrics") as response:
                metrics = dict(line.rsplit(" ", 1) for line in (await response.text()).splitlines())
            assert float(metrics['kvrouter_prompts_total{fidelity="exact"}']) == 8
            assert float(metrics["kvrouter_prompt_tokens_total"]) >= 8 * 128_000
            assert len(waits_s) >= 8
            waits_s.sort()
            p99_s = waits_s[int(len(waits_s) * 0.99)]
            assert p99_s < 0.25, f"{len(waits_s)} asked, worst {waits_s[-1]:.3f} s"


@asynccontextmanager
async def refusing_engine(status: int, *, times: int) -> AsyncIterator[str]:
    """The URL of an engine that spends no time on prompts."""
    server = SimServer(engine_settings())
    server.faults.refuse_next(status, times)
    await server.start()
    try:
        yield server.url
    finally:
        await server.stop()
