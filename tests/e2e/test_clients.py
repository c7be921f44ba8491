"""Clients that people use, before a router with simulated engines."""

import asyncio
import json
from collections.abc import AsyncIterator
from typing import Any

import openai
import pytest
from support.stack import Stack, engine_settings, stack

MESSAGES: Any = [{"role": "user", "content": "Tell me about the harbour."}]


@pytest.fixture
async def running() -> AsyncIterator[Stack]:
    async with stack(engine_settings(loras=("lora-a",)), engine_settings()) as started:
        yield started


@pytest.fixture
async def client(running: Stack) -> AsyncIterator[openai.AsyncOpenAI]:
    async with openai.AsyncOpenAI(
        base_url=f"{running.url}/v1", api_key="unused", max_retries=0
    ) as made:
        yield made


async def test_openai_chats(client: openai.AsyncOpenAI) -> None:
    answer = await client.chat.completions.create(
        model="tiny",
        messages=MESSAGES,
        max_tokens=5,
    )
    assert answer.usage is not None
    assert answer.usage.completion_tokens == 5
    assert answer.choices[0].message.content


async def test_openai_streams_chats_with_usage(client: openai.AsyncOpenAI) -> None:
    streamed = await client.chat.completions.create(
        model="tiny",
        messages=MESSAGES,
        max_tokens=5,
        stream=True,
        stream_options={"include_usage": True},
    )
    chunks = [chunk async for chunk in streamed]
    text = "".join(c.choices[0].delta.content or "" for c in chunks if c.choices)
    assert text
    assert chunks[-1].usage is not None
    assert chunks[-1].usage.completion_tokens == 5


async def test_openai_completes_text_and_token_ids(client: openai.AsyncOpenAI) -> None:
    ids = list(range(100, 140))
    for prompt in ("plain text", ids, [ids, ids], ["one", "two"]):
        answer = await client.completions.create(model="tiny", prompt=prompt, max_tokens=2)
        assert answer.usage is not None
        assert answer.usage.prompt_tokens > 0


async def test_openai_lists_models_and_adapters(client: openai.AsyncOpenAI) -> None:
    assert [model.id async for model in client.models.list()] == ["tiny", "lora-a"]


async def test_openai_creates_responses(client: openai.AsyncOpenAI) -> None:
    answer = await client.responses.create(model="tiny", input="hello", max_output_tokens=3)
    again = await client.responses.retrieve(answer.id)
    assert again.id == answer.id
    assert answer.output_text == again.output_text


async def test_openai_raises_its_own_errors(client: openai.AsyncOpenAI) -> None:
    with pytest.raises(openai.NotFoundError, match="does not exist"):
        await client.chat.completions.create(model="none", messages=MESSAGES)
    with pytest.raises(openai.BadRequestError):
        await client.completions.create(model="tiny", prompt="word " * 9000, max_tokens=1)


async def test_openai_sees_an_error_when_the_engine_is_lost_in_mid_stream(
    running: Stack, client: openai.AsyncOpenAI
) -> None:
    """F6, as the most used client shows it."""
    for engine in running.engines:
        engine.faults.die_after_chunks = 3
    streamed = await client.chat.completions.create(
        model="tiny",
        messages=MESSAGES,
        max_tokens=20,
        stream=True,
    )
    with pytest.raises(openai.APIError, match="engine was lost"):
        async for _ in streamed:
            pass


async def curl(*arguments: str) -> tuple[int, bytes]:
    process = await asyncio.create_subprocess_exec(
        "curl", "-s", *arguments, stdout=asyncio.subprocess.PIPE
    )
    output, _ = await process.communicate()
    return process.returncode or 0, output


async def test_curl_streams(running: Stack) -> None:
    body = {"model": "tiny", "messages": MESSAGES, "max_tokens": 3, "stream": True}
    status, output = await curl("-N", f"{running.url}/v1/chat/completions", "-d", json.dumps(body))
    assert status == 0
    assert output.endswith(b"data: [DONE]\n\n")


async def test_curl_waits_for_100_continue_and_speaks_http_1_0(running: Stack) -> None:
    body = json.dumps({"model": "tiny", "prompt": [1, 2, 3], "max_tokens": 1, "pad": "x" * 2000})
    for flags in (["-H", "Expect: 100-continue"], ["--http1.0"], ["-H", "Connection: close"]):
        status, output = await curl(*flags, f"{running.url}/v1/completions", "-d", body)
        assert status == 0
        assert json.loads(output)["object"] == "text_completion"


async def test_curl_sends_a_chunked_body(running: Stack) -> None:
    body = json.dumps({"model": "tiny", "prompt": [1, 2, 3], "max_tokens": 1})
    status, output = await curl(
        "-H", "Transfer-Encoding: chunked", f"{running.url}/v1/completions", "-d", body
    )
    assert status == 0
    assert json.loads(output)["object"] == "text_completion"


async def test_aiohttp_keeps_its_connection(running: Stack) -> None:
    for number in range(5):
        response = await running.chat(f"{number}")
        assert response.status == 200
