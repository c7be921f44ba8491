"""Token ids in place of text: a real engine answers the same and counts the same.

`KVROUTER_TEST_SEND_IDS=1 make test-vllm` runs all other tests here in that way too.
"""

import json
import random
from collections.abc import AsyncIterator, Iterator
from typing import Any, NamedTuple

import aiohttp
import pytest
from support.logged_process import LoggedProcess
from support.vllm_requests import random_text
from support.vllm_router import ROUTER_READY_TIMEOUT_S, Admin, RouterProcess
from support.vllm_server import VllmServer, free_ports

from kvrouter.token_counts import MIN_EQUAL

pytestmark = pytest.mark.vllm

CHAT = "/v1/chat/completions"
COMPLETIONS = "/v1/completions"
Body = dict[str, Any]

TEXT = random_text(random.Random(61), 60)
MESSAGES = [{"role": "system", "content": "Be short."}, {"role": "user", "content": TEXT}]
TOOL = {"type": "function", "function": {"name": "find", "parameters": {"type": "object"}}}
RANDOM = {"temperature": 1.0, "seed": 7}
SPELLED = "caf\u00e9 \U0001f600 <|im_end|> it's 12345\r\n\r\n  x"


class Answer(NamedTuple):
    """What must not depend on how the prompt was sent."""

    texts: list[str]
    logprobs: list[Any]
    prompt_tokens: int
    completion_tokens: int


class Sender(NamedTuple):
    """A client of the router and of the engine behind it."""

    http: aiohttp.ClientSession
    router: RouterProcess
    engine: VllmServer
    admin: Admin

    async def ask(self, url: str, path: str, body: Body) -> Answer:
        plain = {"model": "tiny", "max_tokens": 12, "temperature": 0, "ignore_eos": True, "seed": 1}
        async with self.http.post(url + path, json={**plain, **body}) as got:
            text = await got.text()
            assert got.status == 200, text
        if not body.get("stream"):
            return answer([json.loads(text)])
        data = [line.removeprefix("data: ") for line in text.split("\n") if "{" in line]
        return answer([json.loads(each) for each in data])

    async def compare(self, path: str, body: Body) -> int:
        """Ask directly and through the router; how many prompts went as ids meanwhile."""
        before = await self.admin.prompts_sent_as_ids()
        await self.ask(self.engine.url, path, body)  # from here on the prompt is cached for both
        direct = await self.ask(self.engine.url, path, body)
        routed = await self.ask(self.router.url, path, body)
        assert routed == direct
        return await self.admin.prompts_sent_as_ids() - before


def answer(chunks: list[Body]) -> Answer:
    usage = next(chunk["usage"] for chunk in reversed(chunks) if chunk.get("usage"))
    choices = [choice for chunk in chunks for choice in chunk["choices"]]
    texts = [
        "".join(_said(choice) for choice in choices if choice["index"] == index)
        for index in range(2)
    ]
    rated = [choice["logprobs"] for choice in choices if choice.get("logprobs")]
    return Answer(texts, rated, usage["prompt_tokens"], usage["completion_tokens"])


def _said(choice: Body) -> str:
    """The text of a choice, or a piece of it: how a stream is cut is a matter of timing."""
    spoken = choice.get("message") or choice.get("delta") or {}
    return choice.get("text") or spoken.get("content") or ""


@pytest.fixture(scope="module")
def router(
    engines: list[VllmServer],
    processes: list[LoggedProcess],
    tmp_path_factory: pytest.TempPathFactory,
) -> Iterator[RouterProcess]:
    port, admin_port = free_ports(2)
    log = tmp_path_factory.mktemp("ids") / "router.log"
    urls = [engines[0].url]
    process = RouterProcess(urls, port=port, admin_port=admin_port, log=log, send_ids=True)
    processes.append(process)
    try:
        process.start()
        process.wait_ready(ROUTER_READY_TIMEOUT_S)
        yield process
    finally:
        process.stop()


@pytest.fixture
async def sender(router: RouterProcess, engines: list[VllmServer]) -> AsyncIterator[Sender]:
    """The router has seen the engine count as it does, so ids may be sent."""
    async with aiohttp.ClientSession() as http:
        made = Sender(http, router, engines[0], Admin(http, router.admin_url))
        if not await made.admin.prompts_sent_as_ids():
            for _ in range(MIN_EQUAL):
                await made.ask(router.url, CHAT, {"messages": MESSAGES})
        yield made


@pytest.mark.parametrize(
    ("path", "body"),
    [
        (CHAT, {"messages": MESSAGES}),
        (CHAT, {"messages": [{"role": "user", "content": SPELLED}], "n": 2, **RANDOM}),
        (CHAT, {"messages": [{"role": "user", "content": [{"type": "text", "text": TEXT}] * 2}]}),
        (CHAT, {"messages": MESSAGES, "tools": [TOOL], "tool_choice": "none"}),
        (CHAT, {"messages": MESSAGES, "stream": True, "stream_options": {"include_usage": True}}),
        (CHAT, {"messages": MESSAGES, "cache_salt": "S", "stop": ["zzz"]}),
        (
            CHAT,
            {
                "messages": [*MESSAGES, {"role": "assistant", "content": "It is"}],
                "add_generation_prompt": False,
                "continue_final_message": True,
            },
        ),
        (COMPLETIONS, {"prompt": TEXT}),
        (COMPLETIONS, {"prompt": SPELLED}),
        (COMPLETIONS, {"prompt": TEXT, "stream": True, "stream_options": {"include_usage": True}}),
        (COMPLETIONS, {"prompt": TEXT, "add_special_tokens": False, "n": 2, **RANDOM}),
    ],
)
async def test_ids_give_the_answer_and_the_usage_of_the_text(
    sender: Sender, path: str, body: Body
) -> None:
    assert await sender.compare(path, body) == 1


@pytest.mark.parametrize(
    ("path", "body"),
    [
        (COMPLETIONS, {"prompt": TEXT, "echo": True}),
        (COMPLETIONS, {"prompt": TEXT, "logprobs": 1}),
        (COMPLETIONS, {"prompt": TEXT, "truncate_prompt_tokens": 20}),
        (COMPLETIONS, {"prompt": [1, 2, 3]}),
        (CHAT, {"messages": MESSAGES, "logprobs": True, "top_logprobs": 1}),
        (CHAT, {"messages": MESSAGES, "echo": True}),
        (CHAT, {"messages": MESSAGES, "truncate_prompt_tokens": 20}),
    ],
)
async def test_options_that_concern_the_text_keep_the_text(
    sender: Sender, path: str, body: Body
) -> None:
    assert await sender.compare(path, body) == 0
