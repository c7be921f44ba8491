"""The router before two real engines: what it predicts is what they report, on every response."""

import asyncio
import random
import re
from collections.abc import AsyncIterator, Iterator
from contextlib import AsyncExitStack, suppress
from dataclasses import dataclass, field
from typing import Any

import aiohttp
import openai
import pytest
from support.logged_process import LoggedProcess
from support.vllm_front import COMPLETIONS, VIEW_TIMEOUT_S, Body, Front, completion
from support.vllm_probe import EngineProbe
from support.vllm_requests import random_ids, random_text
from support.vllm_router import (
    EXPLAIN,
    ROUTER_READY_TIMEOUT_S,
    WORKER_HEADER,
    Admin,
    RouterProcess,
)
from support.vllm_server import (
    BLOCK_SIZE,
    ENGINE_READY_TIMEOUT_S,
    USABLE_BLOCKS,
    VllmServer,
    free_ports,
)
from support.vllm_tally import Tally

pytestmark = pytest.mark.vllm

OUTPUT_TOKENS = 96  # of each request in the traffic around the kill
_TOKENS_SO_FAR = re.compile(rb'"completion_tokens":(\d+)')


@pytest.fixture(scope="module")
def router(
    engines: list[VllmServer],
    processes: list[LoggedProcess],
    tmp_path_factory: pytest.TempPathFactory,
) -> Iterator[RouterProcess]:
    """It joins engines that have been in use: their blocks are known from the replay."""
    port, admin_port = free_ports(2)
    process = RouterProcess(
        [engine.url for engine in engines],
        port=port,
        admin_port=admin_port,
        log=tmp_path_factory.mktemp("router") / "router.log",
    )
    processes.append(process)
    try:
        process.start()
        process.wait_ready(ROUTER_READY_TIMEOUT_S)
        yield process
    finally:
        process.stop()


@pytest.fixture
async def front(
    router: RouterProcess, engines: list[VllmServer], probes: list[EngineProbe], tally: Tally
) -> AsyncIterator[Front]:
    names = [engine.url.removeprefix("http://") for engine in engines]
    async with AsyncExitStack() as stack:
        http = await stack.enter_async_context(aiohttp.ClientSession())
        client = await stack.enter_async_context(
            openai.AsyncOpenAI(base_url=f"{router.url}/v1", api_key="none", max_retries=0)
        )
        yield Front(
            router=router,
            engines=dict(zip(names, engines, strict=True)),
            probes=dict(zip(names, probes, strict=True)),
            http=http,
            client=client,
            admin=Admin(http, router.admin_url),
            tally=tally,
        )


def conversations(rng: random.Random, count: int) -> list[list[Any]]:
    """Beginnings of chats: the first two have one system prompt, the others their own."""
    shared = random_text(rng, 40)
    systems = [shared, shared, *(random_text(rng, 40) for _ in range(count - 2))]
    return [[{"role": "system", "content": text}] for text in systems]


async def test_turns_of_interleaved_chats(front: Front) -> None:
    rng = random.Random(21)
    chats = conversations(rng, 4)
    for _ in range(5):
        for messages in chats:
            messages.append({"role": "user", "content": random_text(rng, 20)})
            text = await front.chat("chat, 4 conversations", messages)
            messages.append({"role": "assistant", "content": text})
    front.check()
    assert front.tally.scenarios["chat, 4 conversations"].cached_tokens > 0


async def test_streamed_turns_with_usage(front: Front) -> None:
    rng = random.Random(22)
    chats = conversations(rng, 3)
    for _ in range(4):
        for messages in chats:
            messages.append({"role": "user", "content": random_text(rng, 20)})
            text = await front.stream_chat("chat, streamed", messages)
            messages.append({"role": "assistant", "content": text})
    front.check()
    assert front.tally.scenarios["chat, streamed"].cached_tokens > 0


async def test_parts_tools_and_a_developer_message(front: Front) -> None:
    """Forms of a chat that a template renders differently."""
    text = random_text(random.Random(23), 60)
    parts = [{"type": "text", "text": text}, {"type": "text", "text": "And then?"}]
    function = {"name": "find", "parameters": {"type": "object", "properties": {}}}
    tools = {"tools": [{"type": "function", "function": function}], "tool_choice": "none"}
    forms: list[tuple[list[Any], Body]] = [
        ([{"role": "user", "content": parts}], {}),
        ([{"role": "developer", "content": text}, {"role": "user", "content": "Why?"}], {}),
        ([{"role": "user", "content": text}], tools),
    ]
    for messages, fields in forms:
        await front.chat("chat, forms", messages, **fields)
        await front.chat("chat, forms", messages, **fields)
    front.check()
    assert front.tally.scenarios["chat, forms"].cached_tokens > 0


async def test_completions_with_token_ids(front: Front) -> None:
    """Shared heads, whole blocks (the last one is recomputed), and more than the caches hold."""
    rng = random.Random(24)
    heads = [random_ids(rng, 160) for _ in range(6)]
    for number in range(40):
        tail = random_ids(rng, rng.choice((0, 1, 32, 33, rng.randint(2, 400))))
        prompt = [*rng.choice(heads), *tail]
        await front.complete("completions with ids", prompt, max_tokens=1 + number % 40)
    front.check()
    row = front.tally.scenarios["completions with ids"]
    assert row.cached_tokens > 0
    assert len(row.by_worker) == 2


async def test_an_adapter_by_its_name(front: Front) -> None:
    """Blocks of the base model are of no use to an adapter, and the other way round."""
    prompt = random_ids(random.Random(25), 3 * BLOCK_SIZE + 5)
    hits = [
        (await front.complete("LoRA adapter", prompt, model=model))[1]
        for model in ("tiny", "lora-a", "lora-a", "tiny")
    ]
    messages = [{"role": "user", "content": random_text(random.Random(26), 60)}]
    for model in ("lora-a", "lora-a", "tiny"):
        await front.chat("LoRA adapter", messages, model=model)
    front.check()
    assert hits[:3] == [0, 0, 3 * BLOCK_SIZE]


async def test_a_cache_salt(front: Front) -> None:
    """Tenants do not share blocks, and nor do an adapter and the base model under one salt."""
    prompt = random_ids(random.Random(27), 3 * BLOCK_SIZE + 5)
    hits = [
        (await front.complete("cache salt", prompt, **fields))[1]
        for fields in (
            {"cache_salt": "S1"},
            {"cache_salt": "S1"},
            {"cache_salt": "S2"},
            {"cache_salt": "S1", "model": "lora-a"},
            {},
        )
    ]
    messages = [{"role": "user", "content": random_text(random.Random(28), 60)}]
    for salt in ("S1", "S1", "S2"):
        await front.chat("cache salt", messages, cache_salt=salt)
    front.check()
    assert hits == [0, 3 * BLOCK_SIZE, 0, 0, 0]


async def test_an_explanation_says_what_the_response_will_say(front: Front) -> None:
    prompt = random_ids(random.Random(29), 3 * BLOCK_SIZE + 5)
    holder, _ = await front.complete("explained", prompt)
    await front.catch_up()
    winner, predicted = await front.admin.explain(COMPLETIONS, completion(prompt))
    other = next(name for name in front.engines if name != holder)
    assert winner == holder
    assert predicted == {holder: 3 * BLOCK_SIZE, other: 0}
    assert await front.complete("explained", prompt) == (holder, 3 * BLOCK_SIZE)
    front.check()


async def test_the_second_port_proves_the_predictions(front: Front) -> None:
    """What an operator looks at: all answers so far were compared, and were as predicted."""
    await front.catch_up()
    ranks = await front.admin.ranks()
    assert {rank.view for rank in ranks.values()} == {"exact"}
    assert all(0 < rank.blocks <= USABLE_BLOCKS for rank in ranks.values())
    proof = await front.admin.proof()
    assert proof["compared"] == proof["equal"] > 0
    assert proof["over_tokens"] == proof["under_tokens"] == proof["miscounted_prompts"] == 0
    assert proof["predicted_tokens"] == proof["reported_tokens"] > 0


@dataclass
class Traffic:
    """Unjudged requests beside each other, until told to stop; what came of them."""

    front: Front
    rng: random.Random
    statuses: list[int] = field(default_factory=list)
    streams: list[str] = field(default_factory=list)
    workers: list[str] = field(default_factory=list)
    begun: set[str] = field(default_factory=set)
    stopped: bool = False

    async def unary(self) -> None:
        while not self.stopped:
            await self._send(stream=False)

    async def streamed(self) -> None:
        while not self.stopped:
            self.streams.append(await self._send(stream=True))

    async def reaches(self, answers: int) -> None:
        """Wait until there are that many unary answers."""
        async with asyncio.timeout(VIEW_TIMEOUT_S * 2):
            while len(self.statuses) < answers:  # noqa: ASYNC110 - polls with a deadline
                await asyncio.sleep(0.02)

    async def streams_from(self, worker: str) -> None:
        """Wait until a stream of this worker has begun and is far from its end."""
        async with asyncio.timeout(VIEW_TIMEOUT_S * 2):
            while worker not in self.begun:  # noqa: ASYNC110 - polls with a deadline
                await asyncio.sleep(0.001)

    async def _send(self, *, stream: bool) -> str:
        told = {"include_usage": True, "continuous_usage_stats": True}
        options = {"stream": True, "stream_options": told} if stream else {}
        body = completion(random_ids(self.rng, 100), max_tokens=OUTPUT_TOKENS, **options)
        url = self.front.router.url + COMPLETIONS
        async with self.front.http.post(url, json=body, headers=EXPLAIN) as got:
            self.workers.append(got.headers[WORKER_HEADER])
            text = b""
            with suppress(aiohttp.ClientPayloadError):  # a broken stream ends without its end
                async for piece in got.content.iter_any():
                    text += piece
                    self._note_begun(got.headers[WORKER_HEADER], text)
            if not stream:
                self.statuses.append(got.status)
            return text.decode()

    def _note_begun(self, worker: str, text: bytes) -> None:
        """A busy engine puts many tokens into one chunk, so it has to tell how many there were."""
        told = _TOKENS_SO_FAR.findall(text)
        if told and int(told[-1]) <= OUTPUT_TOKENS // 4:
            self.begun.add(worker)
        else:
            self.begun.discard(worker)


async def test_an_engine_that_is_killed_in_traffic_and_comes_back(front: Front) -> None:
    """Unary requests go on elsewhere, streams end with an error, and its blocks are forgotten."""
    prompt = random_ids(random.Random(30), 3 * BLOCK_SIZE + 5)
    victim, _ = await front.complete("before the kill", prompt)
    assert await front.complete("before the kill", prompt) == (victim, 3 * BLOCK_SIZE)
    await killed_in_traffic(front, victim)

    survivors = {name: probe for name, probe in front.probes.items() if name != victim}
    gone, front.probes = front.probes[victim], survivors
    for _ in range(2):
        worker, _ = await front.complete("while it is down", prompt)
        assert worker != victim

    await come_back(front, victim)
    gone.restarted()
    front.probes = {victim: gone, **survivors}
    await front.catch_up()
    assert (await front.admin.ranks())[victim].blocks == 0
    for seed in range(100, 116):
        fresh = random_ids(random.Random(seed), 3 * BLOCK_SIZE + 5)
        first, _ = await front.complete("after the restart", fresh)
        assert await front.complete("after the restart", fresh) == (first, 3 * BLOCK_SIZE)
    front.check()
    assert victim in front.tally.scenarios["after the restart"].by_worker


async def killed_in_traffic(front: Front, victim: str) -> None:
    """Kill the engine while both serve, and judge what the clients saw."""
    traffic = Traffic(front, random.Random(31))
    async with asyncio.TaskGroup() as group:
        for _ in range(4):
            group.create_task(traffic.unary())
        for _ in range(4):
            group.create_task(traffic.streamed())
        await traffic.reaches(12)
        await traffic.streams_from(victim)
        front.engines[victim].kill()
        await traffic.reaches(len(traffic.statuses) + 24)
        traffic.stopped = True
    assert set(traffic.statuses) == {200}
    assert set(traffic.workers) == set(front.engines)
    ended = ["[DONE]" in text for text in traffic.streams]
    failed = ['"error"' in text for text in traffic.streams]
    assert all(done != broken for done, broken in zip(ended, failed, strict=True))
    assert any(ended)
    assert any(failed)
    front.tally.note(
        f"killed in traffic: {len(traffic.statuses)} unary requests, all answered; "
        f"{len(traffic.streams)} streams, {sum(failed)} of them ended with an error"
    )
    await front.until(lambda ranks: ranks[victim].worker_state != "ready", "that it is down")


async def come_back(front: Front, victim: str) -> None:
    """Start the engine again on its ports, and wait until the router uses it."""
    front.engines[victim].start()
    await asyncio.to_thread(front.engines[victim].wait_ready, ENGINE_READY_TIMEOUT_S)
    await front.until(
        lambda ranks: (ranks[victim].worker_state, ranks[victim].stream_state) == ("ready", "live"),
        "that it is back",
    )
