"""Clients before the router: requests whose prediction is compared with the engine's report."""

import asyncio
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import aiohttp
import openai
from openai.types.chat import ChatCompletion, ChatCompletionChunk
from support.vllm_probe import EngineProbe
from support.vllm_requests import cached_tokens
from support.vllm_router import (
    EXPLAIN,
    PREDICTED_HEADER,
    WORKER_HEADER,
    Admin,
    RankView,
    RouterProcess,
)
from support.vllm_server import VllmServer
from support.vllm_tally import Tally

COMPLETIONS = "/v1/completions"
VIEW_TIMEOUT_S = 30.0

Ranks = dict[str, RankView]
Body = dict[str, Any]


@dataclass
class Front:
    """The router, the engines behind it by worker name, and what is true of them."""

    router: RouterProcess
    engines: dict[str, VllmServer]
    probes: dict[str, EngineProbe]
    http: aiohttp.ClientSession
    client: openai.AsyncOpenAI
    admin: Admin
    tally: Tally
    wrong: list[str] = field(default_factory=list)

    async def catch_up(self) -> None:
        """Wait until the router has applied every batch that the engines have to tell of."""
        settled = (asyncio.to_thread(probe.settle) for probe in self.probes.values())
        newest = dict(zip(self.probes, await asyncio.gather(*settled), strict=True))
        await self.until(
            lambda ranks: all(_heard(ranks[name], seqno) for name, seqno in newest.items()),
            f"seqnos {newest}",
        )

    async def until(self, holds: Callable[[Ranks], bool], what: str) -> None:
        """Poll the router's view until the condition holds."""
        ranks: Ranks = {}
        try:
            async with asyncio.timeout(VIEW_TIMEOUT_S):
                while not holds(ranks := await self.admin.ranks()):  # noqa: ASYNC110 - polls
                    await asyncio.sleep(0.02)
        except TimeoutError:
            raise AssertionError(f"not seen in {VIEW_TIMEOUT_S} s: {what}; but {ranks}") from None

    def judge(self, scenario: str, headers: Mapping[str, str], usage: Body) -> int:
        """Compare one response's prediction with its report; returns the reported tokens."""
        worker, predicted = headers[WORKER_HEADER], int(headers[PREDICTED_HEADER])
        reported = cached_tokens(usage)
        self.tally.add(scenario, worker, predicted=predicted, reported=reported)
        if predicted != reported:
            self.wrong.append(f"{scenario}: {worker} predicted {predicted}, reported {reported}")
        return reported

    async def complete(self, scenario: str, prompt: list[int], **fields: Any) -> tuple[str, int]:
        """One judged completion over aiohttp; the worker and the reported cached tokens."""
        await self.catch_up()
        body = completion(prompt, **fields)
        async with self.http.post(self.router.url + COMPLETIONS, json=body, headers=EXPLAIN) as got:
            assert got.status == 200, await got.text()
            reported = self.judge(scenario, got.headers, (await got.json())["usage"])
            return got.headers[WORKER_HEADER], reported

    async def chat(self, scenario: str, messages: list[Any], **fields: Any) -> str:
        """One judged chat completion by the openai client; its text."""
        await self.catch_up()
        answer = await self.client.chat.completions.with_raw_response.create(
            **chat_fields(messages, fields)
        )
        parsed = answer.parse()
        self.judge(scenario, answer.headers, usage_of(parsed))
        return parsed.choices[0].message.content or ""

    async def stream_chat(self, scenario: str, messages: list[Any], **fields: Any) -> str:
        """The same as a stream, with the usage in its last chunk."""
        await self.catch_up()
        answer = await self.client.chat.completions.with_raw_response.create(
            **chat_fields(messages, fields), stream=True, stream_options={"include_usage": True}
        )
        chunks = [chunk async for chunk in answer.parse()]
        self.judge(scenario, answer.headers, usage_of(chunks[-1]))
        return "".join(c.choices[0].delta.content or "" for c in chunks if c.choices)

    def check(self) -> None:
        """Every prediction of this test was right."""
        assert self.wrong == []


def _heard(rank: RankView, newest: int) -> bool:
    """Whether the view is the engine's; one that has published nothing yet holds nothing."""
    return rank.last_seqno == newest if newest >= 0 else rank.blocks == 0


def usage_of(answer: ChatCompletion | ChatCompletionChunk) -> Body:
    """What an answer, or the last chunk of a stream, says it used."""
    assert answer.usage is not None
    return answer.usage.model_dump()


def completion(prompt: list[int], **fields: Any) -> Body:
    """A body for /v1/completions that always makes `max_tokens` tokens."""
    plain = {"model": "tiny", "prompt": prompt, "max_tokens": 4, "temperature": 0}
    return {**plain, "ignore_eos": True, **fields}


def chat_fields(messages: list[Any], fields: Body) -> Body:
    """Arguments for the openai client."""
    plain = {"model": "tiny", "messages": messages, "max_tokens": 24, "temperature": 1.0}
    return {**plain, "extra_headers": EXPLAIN, "extra_body": {"ignore_eos": True, **fields}}
