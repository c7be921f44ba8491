"""Having the conversations with a router, and measuring what its users see."""

import asyncio
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import aiohttp
import msgspec

from kvrouter.demo.processes import MODEL
from kvrouter.demo.workload import Conversation

CONCURRENT_CONVERSATIONS = 10


@dataclass
class Result:
    """What one policy achieved. Times in seconds."""

    policy: str
    ttft_s: list[float] = field(default_factory=list)
    prompt_tokens: int = 0
    cached_tokens: int = 0
    shares: Counter[str] = field(default_factory=Counter)
    """Requests by worker."""
    compared: int = 0
    """Responses whose cached tokens the router compared with its prediction."""
    equal: int = 0
    took_s: float = 0.0

    @property
    def reuse(self) -> float:
        """The share of prompt tokens that engines found in their caches, 0 to 1."""
        return self.cached_tokens / self.prompt_tokens if self.prompt_tokens else 0.0

    def ttft_percentile_s(self, percent: float) -> float:
        """The time to first token that `percent` of all requests stay below."""
        ordered = sorted(self.ttft_s)
        return ordered[min(len(ordered) - 1, int(len(ordered) * percent / 100))]


class Talk:
    """All conversations with one router."""

    def __init__(
        self, url: str, admin: str, result: Result, output_tokens: int, progress: Callable[[], None]
    ) -> None:
        self._url = url
        self._admin = admin
        self._result = result
        self._output_tokens = output_tokens
        self._progress = progress

    async def have(self, talks: Sequence[Conversation]) -> None:
        """Have them, a few at a time. Raises aiohttp.ClientError when a request fails."""
        waiting = asyncio.Semaphore(CONCURRENT_CONVERSATIONS)
        started_at = time.perf_counter()
        async with aiohttp.ClientSession(raise_for_status=True) as session:

            async def one(talk: Conversation) -> None:
                async with waiting:
                    await self._converse(session, talk)

            async with asyncio.TaskGroup() as tasks:
                for talk in talks:
                    tasks.create_task(one(talk))
            self._result.took_s = time.perf_counter() - started_at
            await self._read_proof(session)

    async def _converse(self, session: aiohttp.ClientSession, talk: Conversation) -> None:
        messages = [{"role": "system", "content": talk.system}]
        for question in talk.questions:
            messages.append({"role": "user", "content": question})
            answer = await self._ask(session, messages)
            messages.append({"role": "assistant", "content": answer})
            self._progress()

    async def _ask(self, session: aiohttp.ClientSession, messages: list[dict[str, str]]) -> str:
        body = {
            "model": MODEL,
            "messages": messages,
            "max_tokens": self._output_tokens,
            "stream": True,
            "stream_options": {"include_usage": True},
        }
        asked_at = time.perf_counter()
        answer = ""
        url, headers = f"{self._url}/v1/chat/completions", {"x-kvrouter-explain": "1"}
        async with session.post(url, json=body, headers=headers) as response:
            self._result.shares[response.headers["x-kvrouter-worker"]] += 1
            async for line in response.content:
                chunk = _chunk(line)
                if chunk is None:
                    continue
                text = _text(chunk)
                if text and not answer:
                    self._result.ttft_s.append(time.perf_counter() - asked_at)
                answer += text
                self._count(chunk.get("usage"))
        return answer

    def _count(self, usage: dict[str, Any] | None) -> None:
        if usage:
            self._result.prompt_tokens += usage["prompt_tokens"]
            self._result.cached_tokens += usage["prompt_tokens_details"]["cached_tokens"]

    async def _read_proof(self, session: aiohttp.ClientSession) -> None:
        async with session.get(f"{self._admin}/workers") as response:
            shown = await response.json()
        for worker in shown["workers"]:
            for rank in worker["ranks"]:
                self._result.compared += rank["proof"]["compared"]
                self._result.equal += rank["proof"]["equal"]


def _chunk(line: bytes) -> dict[str, Any] | None:
    """The object of one event, None for other lines and the last event."""
    if not line.startswith(b"data: {"):
        return None
    chunk: dict[str, Any] = msgspec.json.decode(line[6:])
    return chunk


def _text(chunk: dict[str, Any]) -> str:
    return "".join(choice["delta"].get("content") or "" for choice in chunk["choices"])
