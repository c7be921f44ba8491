"""The simulated engine over HTTP and ZMQ: what a router sees of a vLLM server."""

import asyncio
import json
import math
import struct
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import aiohttp
import pytest
import zmq
import zmq.asyncio
from support.captures import load

from events import BlocksCleared, BlocksStored, EventBatch, decode_batch
from kvrouter.sim import (
    CoreSettings,
    Faults,
    LinearTiming,
    SettingsError,
    SimServer,
    SimSettings,
)
from kvrouter.sim.text import Text, load_text

TINY = str(Path(__file__).parent.parent / "data" / "tinymodel")
END_OF_REPLAY = b"\xff" * 8


class Engine:
    """A running server and a client of it."""

    def __init__(self, server: SimServer, session: aiohttp.ClientSession) -> None:
        self.server = server
        self.session = session

    async def post(self, path: str, headers: dict[str, str] | None = None, **body: Any) -> Any:
        status, answer = await self.ask(path, headers, **body)
        assert status == 200, answer
        return answer

    async def ask(
        self, path: str, headers: dict[str, str] | None = None, **body: Any
    ) -> tuple[int, Any]:
        url = self.server.url + path
        async with self.session.post(url, json=body, headers=headers) as response:
            return response.status, await response.json()

    async def get(self, path: str) -> tuple[int, Any]:
        async with self.session.get(self.server.url + path) as response:
            return response.status, await response.json()

    async def stream(self, path: str, **body: Any) -> list[Any]:
        """Return the data of each event; "[DONE]" stays a string."""
        async with self.session.post(self.server.url + path, json=body | {"stream": True}) as r:
            assert r.status == 200, await r.text()
            assert r.content_type == "text/event-stream"
            return events_of(await r.text())

    async def until(self, condition: Any) -> None:
        async with asyncio.timeout(5):
            while not condition():  # noqa: ASYNC110  # the state is the server's own
                await asyncio.sleep(0.005)


def events_of(text: str) -> list[Any]:
    data = [line.removeprefix("data: ") for line in text.splitlines() if line.startswith("data: ")]
    return [json.loads(item) if item.startswith("{") else item for item in data]


@asynccontextmanager
async def running(
    faults: Faults | None = None, text: Text | None = None, **changes: Any
) -> AsyncIterator[Engine]:
    core = {"block_size": 16, "num_blocks": 513, "max_model_len": 2048} | changes.pop("core", {})
    given: dict[str, Any] = {
        "core": CoreSettings(**core),
        "speed": math.inf,
        "model": "tiny",
    } | changes
    server = SimServer(SimSettings(**given | changes), faults=faults, text=text)
    await server.start()
    try:
        async with aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=20)) as session:
            yield Engine(server, session)
    finally:
        await server.stop()


@pytest.fixture
async def engine() -> AsyncIterator[Engine]:
    async with running() as engine:
        yield engine


@pytest.fixture(scope="module")
def tiny_text() -> Text:
    return load_text(TINY)


@pytest.fixture
async def tiny(tiny_text: Text) -> AsyncIterator[Engine]:
    async with running(text=tiny_text, tokenizer=TINY, core={"block_size": 32}) as engine:
        yield engine


def ids(start: int, count: int) -> list[int]:
    return list(range(start, start + count))


def slow() -> dict[str, Any]:
    """A step takes 20 ms: long enough to look at a request while it runs."""
    return {"speed": 1.0, "timing": LinearTiming(base_s=0.02, prefill_token_s=0)}


# --- Responses and usage ---------------------------------------------------------------------


async def test_a_repeated_prompt_reports_its_cached_tokens_and_gets_the_same_answer(
    engine: Engine,
) -> None:
    first = await engine.post("/v1/completions", prompt=ids(0, 100), max_tokens=5)
    second = await engine.post("/v1/completions", prompt=ids(0, 100), max_tokens=5)
    assert first["usage"]["prompt_tokens_details"]["cached_tokens"] == 0
    assert second["usage"]["prompt_tokens_details"]["cached_tokens"] == 96
    assert first["choices"][0]["text"] == second["choices"][0]["text"]
    assert second["usage"]["prompt_tokens"] == 100
    assert second["usage"]["completion_tokens"] == 5
    assert second["choices"][0]["finish_reason"] == "length"


async def test_a_stream_has_the_same_text_and_usage_as_the_whole_response(engine: Engine) -> None:
    body: dict[str, Any] = {"messages": [{"role": "user", "content": "hello"}], "max_tokens": 8}
    whole = await engine.post("/v1/chat/completions", **body)
    chunks = await engine.stream(
        "/v1/chat/completions", **body, stream_options={"include_usage": True}
    )
    assert chunks[-1] == "[DONE]"
    assert chunks[-2]["choices"] == []
    assert chunks[-2]["usage"]["completion_tokens"] == 8
    assert chunks[0]["choices"][0]["delta"] == {"role": "assistant", "content": ""}
    text = "".join(c["choices"][0]["delta"]["content"] for c in chunks[:-2])
    assert text == whole["choices"][0]["message"]["content"]
    assert [c["choices"][0]["finish_reason"] for c in chunks[:-2]] == [None] * 8 + ["length"]


async def test_without_include_usage_a_stream_has_none(engine: Engine) -> None:
    chunks = await engine.stream("/v1/completions", prompt=ids(0, 20), max_tokens=3)
    assert len(chunks) == 4
    assert not any("usage" in chunk for chunk in chunks[:-1])


async def test_details_are_left_out_by_an_engine_that_is_not_told_to_report_them() -> None:
    async with running(prompt_tokens_details=False) as engine:
        answer = await engine.post("/v1/completions", prompt=ids(0, 20))
        assert answer["usage"]["prompt_tokens_details"] is None


@pytest.mark.parametrize(
    ("capture", "tag", "path"),
    [
        ("l_chatforms", "user only, string content", "/v1/chat/completions"),
        ("m_batch", "list of token ids", "/v1/completions"),
        ("c_chat", "turn 1", "/v1/chat/completions"),
        ("m_batch", "best: n=2 stream", "/v1/completions"),
        ("l_chatforms", "/v1/responses", "/v1/responses"),
        ("l_chatforms", "/v1/messages (Anthropic)", "/v1/messages"),
    ],
)
async def test_responses_have_no_field_that_vllms_lack(
    tiny: Engine, capture: str, tag: str, path: str
) -> None:
    recorded = next(r for r in load(capture).requests if r.tag == tag)
    if recorded.body.get("stream"):
        answers = await tiny.stream(path, **recorded.body)
        answers = [answer for answer in answers if answer != "[DONE]"]
    else:
        answers = [await tiny.post(path, **recorded.body)]
    known = set().union(*map(paths, recorded.answers))
    assert set().union(*map(paths, answers)) <= known


def paths(value: Any, path: str = "") -> set[str]:
    """Return all keys of a JSON value, with those that lead to them."""
    if isinstance(value, dict):
        return set().union(*(paths(v, f"{path}.{k}") | {f"{path}.{k}"} for k, v in value.items()))
    return (
        set().union(*(paths(item, f"{path}[]") for item in value)) if type(value) is list else set()
    )


async def test_a_chat_of_several_turns_finds_the_blocks_of_its_own_answers(tiny: Engine) -> None:
    """Decode blocks are hit only if the text comes back as the same ids."""
    messages = [{"role": "user", "content": "what is this? " * 8}]
    answer = await tiny.post("/v1/chat/completions", messages=messages, max_tokens=100)
    first_tokens = answer["usage"]["prompt_tokens"]
    messages.append(answer["choices"][0]["message"])
    messages.append({"role": "user", "content": "and that?"})
    answer = await tiny.post("/v1/chat/completions", messages=messages, max_tokens=1)
    cached = answer["usage"]["prompt_tokens_details"]["cached_tokens"]
    assert cached == (first_tokens + 99) // 32 * 32


async def test_token_ids_are_the_recorded_ones(tiny: Engine) -> None:
    for recorded in load("c2_chat_roundtrip").requests:
        if recorded.path == "/v1/chat/completions":
            body = {**recorded.body, "stream": False}
            answer = await tiny.post(recorded.path, **body)
            assert answer["prompt_token_ids"] == recorded.prompt_ids


async def test_every_form_of_prompt_is_read(tiny: Engine) -> None:
    """Text, list of texts, ids, list of ids."""
    for prompt, counts in (
        ("hello there", 1),
        (["hello there", "and here"], 2),
        (ids(5, 40), 1),
        ([ids(5, 40), ids(100, 20)], 2),
    ):
        answer = await tiny.post(
            "/v1/completions", prompt=prompt, max_tokens=1, return_token_ids=True
        )
        assert [choice["index"] for choice in answer["choices"]] == list(range(counts))
    assert answer["choices"][1]["prompt_token_ids"] == ids(100, 20)
    assert answer["usage"]["prompt_tokens"] == 60


async def test_several_choices_share_their_prompt_and_differ(engine: Engine) -> None:
    answer = await engine.post("/v1/completions", prompt=ids(0, 100), max_tokens=5, n=3)
    assert len({choice["text"] for choice in answer["choices"]}) == 3
    assert answer["usage"]["prompt_tokens"] == 100
    assert answer["usage"]["completion_tokens"] == 15
    assert answer["usage"]["prompt_tokens_details"]["cached_tokens"] == 96


async def test_an_answer_of_no_given_length_stops_by_itself(engine: Engine) -> None:
    answer = await engine.post("/v1/chat/completions", messages=[{"role": "user", "content": "a"}])
    assert answer["choices"][0]["finish_reason"] == "stop"
    assert 32 <= answer["usage"]["completion_tokens"] <= 256
    answer = await engine.post("/v1/completions", prompt=ids(0, 20))
    assert answer["usage"]["completion_tokens"] == 16


async def test_anthropic_usage_excludes_what_was_cached(engine: Engine) -> None:
    messages = [{"role": "user", "content": "hello " * 40}]
    body: dict[str, Any] = {"messages": messages, "max_tokens": 2}
    first = await engine.post("/v1/messages", **body)
    second = await engine.post("/v1/messages", **body)
    cached = second["usage"]["cache_read_input_tokens"]
    assert cached > 0
    assert second["usage"]["input_tokens"] + cached == first["usage"]["input_tokens"]
    chunks = await engine.stream("/v1/messages", **body)
    assert [chunk["type"] for chunk in chunks][::6] == ["message_start", "message_stop"]
    assert chunks[-2]["usage"]["cache_read_input_tokens"] == cached


async def test_a_response_is_kept_and_continued(engine: Engine) -> None:
    """A stateful path: another engine would answer 404."""
    first = await engine.post("/v1/responses", input="hello " * 40, max_output_tokens=40)
    assert await engine.get(f"/v1/responses/{first['id']}") == (200, first)
    second = await engine.post(
        "/v1/responses", input="go on", previous_response_id=first["id"], max_output_tokens=1
    )
    assert second["usage"]["input_tokens_details"]["cached_tokens"] > 0
    status, _ = await engine.ask(f"/v1/responses/{first['id']}/cancel")
    assert status == 400
    status, answer = await engine.get("/v1/responses/resp_unknown")
    assert (status, answer["error"]["code"]) == (404, 404)


async def test_a_streamed_response_is_numbered_and_kept(engine: Engine) -> None:
    events = await engine.stream("/v1/responses", input="hello", max_output_tokens=2)
    assert [event["sequence_number"] for event in events] == list(range(len(events)))
    last = events[-1]
    assert last["type"] == "response.incomplete"
    assert await engine.get(f"/v1/responses/{last['response']['id']}") == (200, last["response"])


async def test_the_request_id_becomes_the_answers_id(engine: Engine) -> None:
    headers = {"X-Request-Id": "my-req-1"}
    answer = await engine.post("/v1/completions", headers, prompt=ids(0, 9))
    assert answer["id"] == "cmpl-my-req-1"


async def test_tokenize_tells_the_prompt_that_the_engine_sees(tiny: Engine) -> None:
    messages = [{"role": "user", "content": "hello"}]
    tokens = (await tiny.post("/tokenize", messages=messages))["tokens"]
    answer = await tiny.post(
        "/v1/chat/completions", messages=messages, max_tokens=1, return_token_ids=True
    )
    assert answer["prompt_token_ids"] == tokens
    text = (await tiny.post("/tokenize", prompt="hello there"))["tokens"]
    assert await tiny.post("/detokenize", tokens=text) == {"prompt": "hello there"}
    counted = await tiny.post("/v1/messages/count_tokens", messages=messages)
    assert counted == {"input_tokens": len(tokens)}


async def test_given_prompt_ids_replace_a_chats_messages(engine: Engine) -> None:
    answer = await engine.post(
        "/v1/chat/completions",
        messages=[{"role": "user", "content": "something else"}],
        kv_transfer_params={"prompt_token_ids": ids(0, 30)},
        return_token_ids=True,
    )
    assert answer["prompt_token_ids"] == ids(0, 30)


# --- Errors ----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("status", "body"),
    [
        (404, {"model": "other", "prompt": "a"}),
        (400, {"prompt": [1] * 2048}),
        (400, {"prompt": [1] * 2000, "max_tokens": 49}),
        (400, {"prompt": []}),
        (400, {"prompt": "a", "max_tokens": 0}),
        (400, {"prompt": "a", "n": 2, "temperature": 0}),
        (400, {"prompt": "a", "n": 0}),
        (400, {}),
    ],
)
async def test_wrong_requests_get_vllms_error_even_as_a_stream(
    engine: Engine, status: int, body: dict[str, Any]
) -> None:
    """A streaming request that is refused gets plain JSON."""
    for stream in (False, True):
        got, answer = await engine.ask("/v1/completions", **body, stream=stream)
        assert (got, answer["error"]["code"]) == (status, status)
        assert set(answer["error"]) == {"message", "type", "param", "code"}


async def test_bad_json_unknown_paths_and_wrong_methods_are_refused(engine: Engine) -> None:
    async with engine.session.post(engine.server.url + "/v1/completions", data=b"{") as response:
        assert response.status == 400
    assert await engine.get("/nowhere") == (404, {"detail": "Not Found"})
    assert await engine.get("/v1/completions") == (405, {"detail": "Method Not Allowed"})


async def test_the_api_key_guards_only_what_vllm_guards() -> None:
    async with running(api_key="secret") as engine:
        assert await engine.get("/v1/models") == (401, {"error": "Unauthorized"})
        assert (await engine.get("/kv_event_sources"))[0] == 200
        headers = {"Authorization": "Bearer secret"}
        await engine.post("/v1/completions", headers, prompt=ids(0, 9))


# --- Discovery and metrics -------------------------------------------------------------------


async def test_models_name_the_tokenizers_folder_and_the_adapters(tiny: Engine) -> None:
    (model,) = (await tiny.get("/v1/models"))[1]["data"]
    assert (model["id"], model["root"], model["max_model_len"]) == ("tiny", TINY, 2048)


async def test_an_adapter_has_blocks_of_its_own() -> None:
    async with running(loras=("lo",)) as engine, subscribed(engine) as subscriber:
        models = (await engine.get("/v1/models"))[1]["data"]
        assert [(m["id"], m["parent"]) for m in models] == [("tiny", None), ("lo", "tiny")]
        body = {"prompt": ids(0, 40), "max_tokens": 1}
        await engine.post("/v1/completions", None, **body)
        answer = await engine.post("/v1/completions", None, **body, model="lo")
        assert answer["usage"]["prompt_tokens_details"]["cached_tokens"] == 0
        await subscriber.heard(2)
        (stored,) = (await subscriber.heard(2))[1].events
        assert isinstance(stored, BlocksStored)
        assert stored.lora_name == "lo"


async def test_health_ping_and_version_answer(engine: Engine) -> None:
    for path in ("/health", "/ping"):
        async with engine.session.get(engine.server.url + path) as response:
            assert (response.status, await response.read()) == (200, b"")
    assert (await engine.get("/version"))[1]["version"].startswith("0.32")


async def test_metrics_tell_block_size_capacity_and_load() -> None:
    async with running(**slow()) as engine:
        request = asyncio.create_task(
            engine.post("/v1/completions", prompt=ids(0, 100), max_tokens=10)
        )
        await engine.until(lambda: engine.server.ranks[0].core.running)
        async with engine.session.get(engine.server.url + "/metrics") as response:
            metrics = await response.text()
        await request
    assert 'block_size="16"' in metrics
    assert 'num_gpu_blocks="513"' in metrics
    assert 'vllm:num_requests_running{engine="0",model_name="tiny"} 1.0' in metrics
    assert 'vllm:kv_cache_usage_perc{engine="0",model_name="tiny"} 0.01' in metrics


# --- Events ----------------------------------------------------------------------------------


class Subscriber:
    """What a SUB socket hears, from the first batch on that it can't miss."""

    def __init__(self, socket: zmq.asyncio.Socket) -> None:
        self._socket = socket
        self.batches: list[EventBatch] = []
        self.seqnos: list[int] = []

    async def heard(self, count: int) -> list[EventBatch]:
        """Wait until that many batches have come; return them all."""
        async with asyncio.timeout(5):
            while len(self.batches) < count:
                topic, seqno, payload = await self._socket.recv_multipart()
                assert topic == b"kv-events"
                self.seqnos.append(struct.unpack(">Q", seqno)[0])
                self.batches.append(decode_batch(payload))
        return self.batches

    async def settle(self, engine: Engine, rank: int) -> None:
        """Make a fresh engine publish until something is heard, and forget what was."""
        header = {"X-data-parallel-rank": str(rank)}
        probes = 0
        async with asyncio.timeout(5):
            while not await self._socket.poll(20):
                probe = ids(1_000_000 + 100 * probes, 17)
                await engine.post("/v1/completions", header, prompt=probe, max_tokens=1)
                probes += 1
            while (await self._seqno()) < probes - 1:
                pass

    async def _seqno(self) -> int:
        return int(struct.unpack(">Q", (await self._socket.recv_multipart())[1])[0])


@asynccontextmanager
async def subscribed(engine: Engine, rank: int = 0) -> AsyncIterator[Subscriber]:
    context = zmq.asyncio.Context()
    socket = context.socket(zmq.SUB)
    socket.setsockopt(zmq.SUBSCRIBE, b"")
    socket.connect(f"tcp://127.0.0.1:{engine.server.ranks[rank].ports[0]}")
    try:
        subscriber = Subscriber(socket)
        await subscriber.settle(engine, rank)
        yield subscriber
    finally:
        context.destroy(linger=0)


async def replayed(engine: Engine, start: int, rank: int = 0) -> list[int]:
    context = zmq.asyncio.Context()
    socket = context.socket(zmq.DEALER)
    socket.connect(f"tcp://127.0.0.1:{engine.server.ranks[rank].ports[1]}")
    seqnos = []
    try:
        await socket.send_multipart([b"", struct.pack(">Q", start)])
        async with asyncio.timeout(5):
            while (frames := await socket.recv_multipart())[-2] != END_OF_REPLAY:
                seqnos.append(struct.unpack(">Q", frames[-2])[0])
    finally:
        context.destroy(linger=0)
    return seqnos


async def test_stored_blocks_are_published_with_their_tokens(engine: Engine) -> None:
    async with subscribed(engine) as subscriber:
        await engine.post("/v1/completions", prompt=ids(0, 40), max_tokens=1, cache_salt="s")
        (batch,) = await subscriber.heard(1)
    (stored,) = batch.events
    assert isinstance(stored, BlocksStored)
    assert list(stored.token_ids) == ids(0, 32)
    assert (stored.block_size, stored.parent, stored.extra_keys) == (16, None, [["s"], None])
    assert batch.dp_rank == 0


async def test_a_dropped_batch_is_a_gap_that_a_replay_fills() -> None:
    faults = Faults()
    async with running(faults) as engine, subscribed(engine) as subscriber:
        await engine.post("/v1/completions", prompt=ids(0, 40), max_tokens=1)
        faults.drop_batches = 1
        await engine.post("/v1/completions", prompt=ids(100, 40), max_tokens=1)
        await engine.post("/v1/completions", prompt=ids(200, 40), max_tokens=1)
        await subscriber.heard(2)
        first, last = subscriber.seqnos
        assert last == first + 2
        assert await replayed(engine, first + 1) == [first + 1, last]


async def test_a_reset_is_published_with_the_next_step_and_refused_while_requests_run() -> None:
    """An idle engine keeps its clear to itself."""
    async with running(**slow()) as engine, subscribed(engine) as subscriber:
        await engine.post("/v1/completions", prompt=ids(0, 40), max_tokens=1)
        assert await engine.post("/reset_prefix_cache") == {"success": True}
        await subscriber.heard(1)
        task = asyncio.create_task(engine.post("/v1/completions", prompt=ids(0, 40), max_tokens=30))
        batch = (await subscriber.heard(2))[1]
        assert batch.events[0] == BlocksCleared()
        assert await engine.post("/reset_prefix_cache") == {"success": False}
        path = "/reset_prefix_cache?reset_running_requests=true"
        assert await engine.post(path) == {"success": True}
        assert (await task)["usage"]["completion_tokens"] == 30


async def test_a_restart_begins_again_with_seqno_0_and_an_empty_cache_on_the_same_ports(
    engine: Engine,
) -> None:
    """Nothing on the wire says that this is another engine."""
    for start in (100, 0):
        await engine.post("/v1/completions", prompt=ids(start, 40), max_tokens=1)
    assert await replayed(engine, 0) == [0, 1]
    url, ports = engine.server.url, engine.server.ranks[0].ports
    await engine.server.restart()
    assert (engine.server.url, engine.server.ranks[0].ports) == (url, ports)
    answer = await engine.post("/v1/completions", prompt=ids(0, 40), max_tokens=1)
    assert answer["usage"]["prompt_tokens_details"]["cached_tokens"] == 0
    assert await replayed(engine, 0) == [0]


async def test_ranks_have_their_own_caches_publishers_and_are_chosen_by_header() -> None:
    """Ports and sources per rank."""
    async with running(dp_size=2) as engine, subscribed(engine, rank=1) as subscriber:
        rank = {"X-data-parallel-rank": "1"}
        for _ in range(2):
            answer = await engine.post("/v1/completions", rank, prompt=ids(0, 40), max_tokens=1)
        assert answer["usage"]["prompt_tokens_details"]["cached_tokens"] == 32
        (batch,) = await subscriber.heard(1)
        assert batch.dp_rank == 1
        rank = {"X-data-parallel-rank": "0"}
        answer = await engine.post("/v1/completions", rank, prompt=ids(0, 40), max_tokens=1)
        assert answer["usage"]["prompt_tokens_details"]["cached_tokens"] == 0
        rank = {"X-data-parallel-rank": "7"}
        status, answer = await engine.ask("/v1/completions", rank, prompt=ids(0, 40))
        assert (status, answer["error"]["message"]) == (
            400,
            "data_parallel_rank 7 is out of range [0, 2).",
        )
        sources = (await engine.get("/kv_event_sources"))[1]
        assert sources["1"]["endpoint"] == f"tcp://*:{engine.server.ranks[1].ports[0]}"


async def test_without_a_rank_header_idle_ranks_take_turns() -> None:
    async with running(dp_size=2) as engine:
        for start in range(0, 400, 100):
            await engine.post("/v1/completions", prompt=ids(start, 40), max_tokens=1)
        assert [rank.core.counters.finished for rank in engine.server.ranks] == [2, 2]


async def test_an_engine_without_events_says_so() -> None:
    async with running(kv_events_port=None) as engine:
        sources = (await engine.get("/kv_event_sources"))[1]
        assert sources["0"]["enable_kv_cache_events"] is False


def test_overlapping_port_ranges_are_refused() -> None:
    with pytest.raises(SettingsError, match="overlap"):
        SimSettings(kv_events_port=5557, replay_port=5558, dp_size=2)


# --- Failures --------------------------------------------------------------------------------


@pytest.mark.parametrize("stream", [False, True])
async def test_a_client_that_leaves_aborts_its_request(stream: bool) -> None:
    async with running(**slow()) as engine:
        url = engine.server.url + "/v1/completions"
        body = {"prompt": ids(0, 100), "max_tokens": 500, "stream": stream}
        task = asyncio.create_task(_read(engine.session, url, body))
        await engine.until(lambda: engine.server.ranks[0].core.counters.output_tokens > 1)
        task.cancel()
        await engine.until(lambda: not engine.server.active)
        await engine.until(lambda: not engine.server.ranks[0].core.running)
        assert engine.server.aborted == 1


async def _read(session: aiohttp.ClientSession, url: str, body: dict[str, Any]) -> bytes:
    async with session.post(url, json=body) as response:
        return await response.read()


async def test_a_refusal_comes_as_often_as_told() -> None:
    faults = Faults(retry_after_s=7)
    faults.refuse_next(503)
    faults.refuse_next(429)
    async with running(faults) as engine:
        url = engine.server.url + "/v1/completions"
        async with engine.session.post(url, json={"prompt": "a"}) as response:
            assert (response.status, response.headers["Retry-After"]) == (503, "7")
        assert (await engine.ask("/v1/completions", prompt="a"))[0] == 429
        assert (await engine.ask("/v1/completions", prompt="a"))[0] == 200


async def test_a_stream_dies_after_some_chunks_without_an_end() -> None:
    async with running(Faults(die_after_chunks=3)) as engine:
        url = engine.server.url + "/v1/completions"
        body = {"prompt": ids(0, 40), "max_tokens": 10, "stream": True}
        with pytest.raises(aiohttp.ClientPayloadError):
            await _read(engine.session, url, body)
        await engine.until(lambda: engine.server.aborted == 1)


async def test_a_dying_vllm_ends_its_stream_with_an_error_and_the_end_mark() -> None:
    """It looks like a clean end."""
    async with running(Faults(die_after_chunks=3, error_chunk=True)) as engine:
        chunks = await engine.stream("/v1/completions", prompt=ids(0, 40), max_tokens=10)
        assert [*map(type, chunks)] == [dict, dict, dict, dict, str]
        assert chunks[3]["error"]["code"] == 500


async def test_a_hanging_engine_sends_nothing_or_stops_in_the_middle() -> None:
    """A black hole, before the first byte and behind it."""
    faults = Faults(hang_before_first_byte=True)
    async with running(faults) as engine:
        url = engine.server.url + "/v1/completions"
        body = {"prompt": ids(0, 40), "max_tokens": 10, "stream": True}
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(_read(engine.session, url, body), 0.1)
        faults.hang_before_first_byte, faults.hang_after_chunks = False, 2
        async with engine.session.post(url, json=body) as response:
            read = bytearray()
            while read.count(b"\n\n") < 2:
                read += await response.content.readany()
            with pytest.raises(TimeoutError):
                await asyncio.wait_for(response.content.readany(), 0.1)
        await engine.until(lambda: engine.server.aborted == 2)


async def test_a_killed_engine_cuts_its_streams_and_can_be_restarted() -> None:
    async with running(**slow()) as engine:
        url = engine.server.url + "/v1/completions"
        body = {"prompt": ids(0, 40), "max_tokens": 500, "stream": True}
        task = asyncio.create_task(_read(engine.session, url, body))
        await engine.until(lambda: engine.server.ranks[0].core.counters.output_tokens > 1)
        await engine.server.kill()
        with pytest.raises(aiohttp.ClientPayloadError):
            await task
        with pytest.raises(aiohttp.ClientConnectorError):
            await _read(engine.session, url, body)
        await engine.server.restart()
        await engine.post("/v1/completions", prompt=ids(0, 40), max_tokens=1)


async def test_a_stopped_engine_tells_its_streams() -> None:
    async with running(**slow()) as engine:
        task = asyncio.create_task(
            engine.stream("/v1/completions", prompt=ids(0, 40), max_tokens=500)
        )
        await engine.until(lambda: engine.server.ranks[0].core.counters.output_tokens > 1)
        await engine.server.stop()
        chunks = await task
        assert chunks[-2]["error"]["type"] == "InternalServerError"


async def test_idle_connections_are_closed_after_a_while() -> None:
    """A pooled connection goes stale on its own."""
    async with running(keep_alive_s=0.1) as engine:
        reader, writer = await asyncio.open_connection("127.0.0.1", engine.server.port)
        writer.write(b"GET /ping HTTP/1.1\r\nHost: sim\r\n\r\n")
        async with asyncio.timeout(5):
            assert (await reader.readline()).startswith(b"HTTP/1.1 200")
            await reader.read()
        writer.close()
        await writer.wait_closed()


async def test_what_arrived_is_recorded_byte_for_byte(engine: Engine) -> None:
    data = b'{"prompt": "a",   "unknown": 1e400, "max_tokens": 1}'
    headers = {"X-Test": "yes"}
    url = engine.server.url + "/v1/completions"
    async with engine.session.post(url, data=data, headers=headers) as response:
        assert response.status == 200
    received = engine.server.received[-1]
    assert (received.path, received.body) == ("/v1/completions", data)
    assert received.headers["X-Test"] == "yes"


async def test_hundreds_of_streams_run_at_once(engine: Engine) -> None:
    """The front door's own tests need it wide."""
    connector = aiohttp.TCPConnector(limit=0)
    async with aiohttp.ClientSession(connector=connector) as session:
        wide = Engine(engine.server, session)
        bodies = [{"prompt": ids(n, 33), "max_tokens": 4} for n in range(300)]
        streams = await asyncio.gather(*(wide.stream("/v1/completions", **b) for b in bodies))
    assert [len(stream) for stream in streams] == [5] * 300
    assert engine.server.active == 0
