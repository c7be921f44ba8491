"""The front door before simulated engines: what reaches an engine, what comes back."""

import asyncio
import io
import json
import re
import shlex
from random import Random

import pytest
from support.stack import Stack, engine_settings, stack, until

from kvrouter.sim.settings import CoreSettings

LONG = "The harbour lay quiet in the morning, and the ships were still at anchor. " * 12


async def post(running: Stack, path: str, body: bytes | dict[str, object], **headers: str) -> bytes:
    """The body of a response that must be a 200."""
    data = io.BytesIO(body if isinstance(body, bytes) else json.dumps(body).encode())
    async with running.session.post(running.url + path, data=data, headers=headers) as response:
        read = await response.read()
        assert response.status == 200, read
        return read


async def test_a_body_reaches_the_engine_byte_for_byte() -> None:
    """F1: clients send fields that the router has never heard of."""
    body = (
        b'{ "model":"tiny","z":1e400,"a":{"b":[18446744073709551615,-0.0,1.10]},\n'
        b' "messages":[{"content":"h\\u00e9llo \\ud83d\\ude00","role":"user"}],'
        b'"max_tokens":1,"max_tokens":2, "unknown_field":null }'
    )
    async with stack(engine_settings()) as running:
        await post(running, "/v1/chat/completions", body)
        received = running.posts(0)[-1]
        assert received.body == body
        assert received.headers["Content-Length"] == str(len(body))


async def test_only_the_report_mode_is_taken_out_of_a_body() -> None:
    """An engine option that announces blocks twice, and crashes some versions."""
    body = (
        b'{"model":"tiny","prompt":"a","vllm_xargs":{"kv_cache_report_mode":"full","x":1.0},'
        b'"max_tokens":1}'
    )
    async with stack(engine_settings()) as running:
        await post(running, "/v1/completions", body)
        sent = json.loads(running.posts(0)[-1].body)
        assert sent["vllm_xargs"] == {"x": 1.0}
        assert sent["prompt"] == "a"


@pytest.mark.parametrize("size", [32 * 1024, 1024 * 1024, 64 * 1024 * 1024])
async def test_large_bodies_pass(size: int) -> None:
    """F2: 64 MiB is what some clients send with images in them."""
    start = b'{"model": "tiny", "prompt": [1, 2, 3], "max_tokens": 1, "pad": "'
    padding = Random(1).randbytes(size // 2).hex().encode()  # no two parts alike
    body = start + padding + b'"}'
    async with stack(engine_settings()) as running:
        await post(running, "/v1/completions", body)
        received = running.posts(0)[-1]
        assert received.headers["Content-Length"] == str(len(body))
        equal = received.body == body  # apart: a difference of 64 MiB is not to be shown
        assert equal


async def test_a_body_above_the_limit_is_refused_in_openai_form() -> None:
    """F2."""
    async with (
        stack(engine_settings(), limits={"max_body_bytes": 1000}) as running,
        running.session.post(running.url + "/v1/completions", data=b"x" * 1001) as response,
    ):
        assert response.status == 413
        assert (await response.json())["error"]["code"] == "body_too_large"
        assert running.posts(0) == []


async def test_headers_of_the_client_reach_the_engine_and_those_of_its_connection_dont() -> None:
    """F13."""
    async with stack(engine_settings()) as running:
        await post(
            running,
            "/v1/completions",
            {"model": "tiny", "prompt": "a", "max_tokens": 1},
            **{
                "Authorization": "Bearer secret",
                "traceparent": "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01",
                "X-Request-Id": "mine",
                "Connection": "x-hop",
                "X-Hop": "1",
            },
        )
        headers = {k.lower(): v for k, v in running.posts(0)[-1].headers.items()}
        assert headers["authorization"] == "Bearer secret"
        assert headers["traceparent"].startswith("00-0af7")
        assert headers["x-request-id"] == "mine"
        assert "x-hop" not in headers
        assert "x-data-parallel-rank" not in headers  # it has one rank
        assert headers["host"] == running.name(0)


async def test_a_request_without_an_id_gets_one_that_the_client_sees() -> None:
    async with stack(engine_settings()) as running:
        response = await running.chat("hello")
        sent = {k.lower(): v for k, v in running.posts(0)[-1].headers.items()}
        assert response.headers["x-request-id"] == sent["x-request-id"]


async def test_an_error_carries_the_id_that_the_client_gave() -> None:
    """F13."""
    async with (
        stack(engine_settings()) as running,
        running.session.post(
            f"{running.url}/v1/chat/completions",
            json={"model": "none", "messages": []},
            headers={"X-Request-Id": "mine"},
        ) as response,
    ):
        assert (response.status, response.headers["x-request-id"]) == (404, "mine")


async def test_an_unknown_model_is_404_and_a_known_one_without_workers_503() -> None:
    """F9."""
    async with stack(engine_settings()) as running:
        response = await running.chat("hello", model="gpt-17")
        assert response.status == 404
        error = (await response.json())["error"]
        assert error["code"] == "model_not_found"
        assert error["message"] == "the model 'gpt-17' does not exist; there are: tiny"
        await running.engines[0].kill()
        await until(lambda: running.router.fleet.workers[running.name(0)].state == "unreachable")
        response = await running.chat("hello")
        assert response.status == 503
        assert response.headers["Retry-After"] == "1"
        assert (await response.json())["error"]["code"] == "no_worker"
        response = await running.chat("hello", model="gpt-17")
        assert response.status == 404


async def test_a_request_before_any_worker_has_joined_is_503() -> None:
    """The router is started before its engines."""
    async with stack(engine_settings(), wait_ready=False) as running:
        running.router.fleet.pools.clear()
        response = await running.chat("hello")
        assert response.status in (200, 503)


async def test_a_streaming_request_that_is_wrong_gets_the_engines_400_as_it_is() -> None:
    """F14: not retried, not wrapped into an event."""
    async with stack() as running:
        response = await running.chat(LONG * 100, stream=True)
        assert response.status == 400
        assert response.content_type == "application/json"
        assert "error" in await response.json()
        assert len(running.posts(0)) + len(running.posts(1)) == 1


@pytest.mark.parametrize(
    "path", ["/reset_prefix_cache", "/sleep", "/metrics", "/kv_event_sources", "/server_info"]
)
async def test_dev_and_admin_routes_of_engines_are_refused(path: str) -> None:
    """F16."""
    async with stack(engine_settings()) as running:
        for method in ("GET", "POST"):
            async with running.session.request(method, running.url + path) as response:
                assert response.status == 404
        assert all(e.path != path for e in running.posts(0))


async def test_what_is_on_the_second_port_is_said_to_be_there() -> None:
    async with (
        stack(engine_settings(), wait_ready=False) as running,
        running.session.get(running.url + "/metrics") as response,
    ):
        assert response.status == 404
        assert "second port" in (await response.json())["error"]["message"]


async def test_a_wrong_method_is_told_the_right_ones() -> None:
    async with stack(engine_settings(), wait_ready=False) as running:
        chat = running.url + "/v1/chat/completions"
        async with running.session.get(chat) as response:
            assert response.status == 405
            assert response.headers["Allow"] == "POST, OPTIONS"
        async with running.session.options(chat) as response:
            assert response.status == 204
            assert response.headers["Allow"] == "POST, OPTIONS"
        async with running.session.options(running.url + "/sleep") as response:
            assert response.status == 404


PREFLIGHT = {
    "Origin": "https://chat.example",
    "Access-Control-Request-Method": "POST",
    "Access-Control-Request-Headers": "authorization,content-type",
}


async def test_pages_of_configured_origins_may_call() -> None:
    """A chat page in a browser that talks to the router itself."""
    async with stack(
        engine_settings(), server={"cors_origins": ["https://chat.example"]}
    ) as running:
        chat = running.url + "/v1/chat/completions"
        async with running.session.options(chat, headers=PREFLIGHT) as response:
            assert response.status == 204
            assert response.headers["Access-Control-Allow-Origin"] == "https://chat.example"
            assert "POST" in response.headers["Access-Control-Allow-Methods"]
            allowed = response.headers["Access-Control-Allow-Headers"]
            assert allowed == "authorization,content-type"
        for body, status in ((b"{}", 404), (b'{"model": "tiny", "prompt": "hello"}', 200)):
            path = "/v1/completions" if status == 200 else "/v1/nothing"
            async with running.session.post(
                running.url + path, data=body, headers={"Origin": "https://chat.example"}
            ) as response:
                assert response.status == status
                origins = response.headers.getall("Access-Control-Allow-Origin")
                assert origins == ["https://chat.example"]
        async with running.session.options(
            chat, headers=PREFLIGHT | {"Origin": "https://else.example"}
        ) as response:
            assert response.status == 403
            assert "Access-Control-Allow-Origin" not in response.headers


async def test_pages_may_not_call_by_default() -> None:
    async with (
        stack(engine_settings(), wait_ready=False) as running,
        running.session.options(
            running.url + "/v1/chat/completions", headers=PREFLIGHT
        ) as response,
    ):
        assert response.status == 403
        assert "server.cors_origins" in (await response.json())["error"]["message"]


async def test_extra_paths_can_be_allowed() -> None:
    """F16: unless allowed."""
    limits = {"extra_paths": ["/reset_prefix_cache"]}
    async with (
        stack(engine_settings(), limits=limits) as running,
        running.session.post(running.url + "/reset_prefix_cache") as response,
    ):
        assert response.status == 200


async def test_other_inference_paths_pass_by_load() -> None:
    async with stack(engine_settings()) as running:
        body = await post(running, "/tokenize", {"model": "tiny", "prompt": "hello"})
        assert json.loads(body)["count"] > 0


@pytest.mark.parametrize("body", [b"", b"[]", b"{", b'"a"', b"\xff\xfe", b"null"])
async def test_a_body_that_is_no_json_object_is_the_clients_error(body: bytes) -> None:
    async with (
        stack(engine_settings()) as running,
        running.session.post(running.url + "/v1/chat/completions", data=body) as response,
    ):
        assert response.status == 400
        assert (await response.json())["error"]["type"] == "invalid_request_error"


@pytest.mark.parametrize(
    "fields",
    [
        {"prompt": ""},
        {"prompt": []},
        {"prompt": [[]]},
        {"prompt": None},
        {"prompt": {"a": 1}},
        {"prompt": [1, "a", None]},
        {"prompt": [2**31, -5]},
        {"prompt": "\ud800 lone"},
        {"prompt": ["a", "b"]},
        {"prompt": "👩‍👩‍👧 emoji"},
        {"prompt": "a", "max_tokens": "many"},
        {"prompt": "a", "model": 7},
        {"prompt": "a", "cache_salt": 7},
        {},
    ],
    ids=str,
)
async def test_odd_prompts_are_routed_and_judged_by_the_engine(fields: dict[str, object]) -> None:
    """T2: never a 500 from the router."""
    async with stack(engine_settings()) as running:
        body = json.dumps({"model": "tiny", "max_tokens": 1} | fields)
        async with running.session.post(running.url + "/v1/completions", data=body) as response:
            assert response.status < 500
        assert [each.body for each in running.posts(0)] == [body.encode()]
        await running.settled()


async def test_models_of_all_workers_are_listed_once() -> None:
    """Several models behind one door, one of them with an adapter."""
    async with stack(
        engine_settings(loras=("lora-a",)),
        engine_settings(),
        engine_settings(model="other"),
    ) as running:
        async with running.session.get(running.url + "/v1/models") as response:
            listed = await response.json()
        assert [model["id"] for model in listed["data"]] == ["tiny", "lora-a", "other"]
        response_tiny = await running.chat("hello", model="tiny")
        response_other = await running.chat("hello", model="other")
        assert response_tiny.headers["x-kvrouter-worker"] in (running.name(0), running.name(1))
        assert response_other.headers["x-kvrouter-worker"] == running.name(2)


async def test_an_adapter_goes_to_a_worker_that_has_it_and_shares_no_blocks_with_its_base() -> None:
    """I7, at the front door: equal tokens under another adapter are no overlap."""
    async with stack(engine_settings(loras=("lora-a",)), engine_settings()) as running:
        first = await running.chat(LONG, model="lora-a")
        assert first.headers["x-kvrouter-worker"] == running.name(0)
        await running.caught_up()
        again = await running.chat(LONG, model="lora-a")
        assert int(again.headers["x-kvrouter-predicted-cached-tokens"]) > 100
        base = await running.chat(LONG, model="tiny")
        assert base.headers["x-kvrouter-predicted-cached-tokens"] == "0"


async def test_a_cache_salt_keeps_prompts_apart() -> None:
    """I7, at the front door."""
    async with stack() as running:
        await running.chat(LONG, cache_salt="a")
        await running.caught_up()
        same = await running.chat(LONG, cache_salt="a")
        other = await running.chat(LONG, cache_salt="b")
        assert int(same.headers["x-kvrouter-predicted-cached-tokens"]) > 100
        assert other.headers["x-kvrouter-predicted-cached-tokens"] == "0"


async def test_the_second_identical_chat_finds_its_prefix() -> None:
    """T1."""
    async with stack() as running:
        first = await running.chat(LONG)
        await running.caught_up()
        second = await running.chat(LONG)
        assert second.headers["x-kvrouter-worker"] == first.headers["x-kvrouter-worker"]
        predicted = int(second.headers["x-kvrouter-predicted-cached-tokens"])
        usage = (await second.json())["usage"]
        assert predicted == usage["prompt_tokens_details"]["cached_tokens"] > 0


async def test_chats_that_differ_in_the_second_message_overlap_less() -> None:
    """T4."""
    async with stack(engine_settings()) as running:
        messages = [
            {"role": "system", "content": LONG},
            {"role": "user", "content": LONG + "first"},
        ]
        await running.chat("", messages=messages)
        await running.caught_up()
        same = await running.explain(model="tiny", messages=messages)
        messages[1]["content"] = "second " + LONG
        other = await running.explain(model="tiny", messages=messages)
        overlap = [each["candidates"][0]["overlap_blocks"]["gpu"] for each in (same, other)]
        assert overlap[0] > overlap[1] > 0


async def test_the_chosen_dp_rank_is_told_to_the_engine() -> None:
    """E17: two ranks behind one address, each with a cache of its own."""
    async with stack(engine_settings(dp_size=2)) as running:
        for number in range(4):
            response = await running.chat(f"{number} {LONG}")
            sent = {k.lower(): v for k, v in running.posts(0)[-1].headers.items()}
            assert sent["x-data-parallel-rank"] == response.headers["x-data-parallel-rank"]
        await running.caught_up()
        fleet = running.router.fleet
        assert all(fleet.pools["tiny"].index.blocks(rank) > 0 for rank in fleet.ranks)
        again = await running.chat(f"2 {LONG}")
        reported = (await again.json())["usage"]["prompt_tokens_details"]["cached_tokens"]
        assert int(again.headers["x-kvrouter-predicted-cached-tokens"]) == reported > 0


@pytest.mark.parametrize("stream", [False, True])
async def test_a_stored_response_is_asked_of_the_engine_that_made_it(stream: bool) -> None:
    """Responses live in one engine's memory: read and continued there, and nowhere else."""
    explain = {"x-kvrouter-explain": "1"}
    async with stack() as running:
        owners: dict[str, str] = {}
        for number in range(4):
            body = {"model": "tiny", "input": f"{number} hello", "max_output_tokens": 1}
            async with running.session.post(
                running.url + "/v1/responses", json=body | {"stream": stream}, headers=explain
            ) as response:
                made = re.search(r'"id":\s*"(resp_[^"]+)"', await response.text())
                assert made is not None
                owners[made[1]] = response.headers["x-kvrouter-worker"]
        assert set(owners.values()) == {running.name(0), running.name(1)}
        for each in [*owners, *list(owners)[::2], *reversed(owners)]:
            async with running.session.get(
                f"{running.url}/v1/responses/{each}", headers=explain
            ) as response:
                assert response.status == 200
                assert (await response.json())["id"] == each
                assert response.headers["x-kvrouter-worker"] == owners[each]
        for each in [*owners, *list(owners)[::2], *reversed(owners)]:
            body = {"model": "tiny", "input": "on", "previous_response_id": each}
            async with running.session.post(
                running.url + "/v1/responses", json=body | {"max_output_tokens": 1}, headers=explain
            ) as response:
                assert response.status == 200
                assert response.headers["x-kvrouter-worker"] == owners[each]


async def test_a_response_that_no_worker_is_known_to_have_made_is_not_found() -> None:
    async with (
        stack() as running,
        running.session.get(f"{running.url}/v1/responses/resp_unknown") as response,
    ):
        assert response.status == 404
        assert (await response.json())["error"]["code"] == "response_not_found"
        assert not any("resp_unknown" in each.path for each in running.engines[0].received)


@pytest.mark.parametrize("path", ["/v1/responses", "/v1/messages"])
async def test_the_other_apis_are_routed_by_prefix_too(path: str) -> None:
    async with stack() as running:
        body: dict[str, object] = {"model": "tiny", "max_tokens": 2, "max_output_tokens": 2}
        if path == "/v1/messages":
            body["messages"] = [{"role": "user", "content": LONG}]
        else:
            body["input"] = LONG
        await post(running, path, body)
        await running.caught_up()
        async with running.session.post(
            running.url + path, json=body, headers={"x-kvrouter-explain": "1"}
        ) as response:
            assert int(response.headers["x-kvrouter-predicted-cached-tokens"]) > 100


async def test_more_active_requests_than_allowed_are_refused_and_counted_down_again() -> None:
    """A limit that an operator sets, so that a stampede costs clients a pause and not the router.

    Health and the list of models are not requests for an engine.
    """
    limits = {"max_active_requests": 2}
    async with stack(engine_settings(), limits=limits) as running:
        faults = running.engines[0].faults
        faults.hang_before_first_byte = True
        held = [asyncio.create_task(running.chat(f"{number}")) for number in range(2)]
        await until(lambda: running.engines[0].active == 2)
        response = await running.chat("one too many")
        assert response.status == 503
        assert response.headers["Retry-After"] == "1"
        assert (await response.json())["error"]["code"] == "overloaded"
        for path in ("/health", "/v1/models"):
            async with running.session.get(running.url + path) as response:
                assert response.status == 200
        for task in held:
            task.cancel()
        await until(lambda: running.router.door.active_requests == 0)
        faults.hang_before_first_byte = False
        assert (await running.chat("there is room again")).status == 200


async def test_bodies_beyond_what_may_be_held_are_refused_until_others_are_done() -> None:
    """Hundreds of megabytes of images must cost clients a pause and not the router its memory."""
    async with stack(engine_settings(), limits={"max_held_bytes": 2000}) as running:
        faults = running.engines[0].faults
        faults.hang_before_first_byte = True
        held = asyncio.create_task(running.chat("a" * 3000))  # one always passes
        await until(lambda: running.engines[0].active == 1)
        response = await running.chat("hello")
        assert response.status == 503
        assert response.headers["Retry-After"] == "1"
        assert "held" in (await response.json())["error"]["message"]
        held.cancel()
        await until(lambda: running.router.door.active_requests == 0)
        faults.hang_before_first_byte = False
        assert (await running.chat("there is room again")).status == 200


async def test_512_streams_to_one_worker_all_run() -> None:
    """F3."""
    settings = engine_settings(core=CoreSettings(num_blocks=8193, max_num_seqs=600))
    async with stack(settings) as running:

        async def one(number: int) -> int:
            response = await running.chat(f"{number}", stream=True, max_tokens=4)
            return (await response.text()).count("[DONE]")

        done = await asyncio.gather(*(one(number) for number in range(512)))
        assert sum(done) == 512
        await running.settled()


async def test_the_access_log_has_one_line_per_attempt_whatever_clients_send(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """A client must not be able to forge lines with its request id or model."""
    async with stack(engine_settings()) as running:
        caplog.set_level("INFO", "kvrouter.access")
        await post(
            running,
            "/v1/completions",
            {"model": "tiny", "prompt": "a", "max_tokens": 1},
            **{"X-Request-Id": 'x outcome=ok "forged'},
        )
    lines = [record.getMessage() for record in caplog.records if record.name == "kvrouter.access"]
    assert len(lines) == 1
    fields = dict(pair.split("=", 1) for pair in shlex.split(lines[0]))
    assert fields["worker"] == running.name(0)
    assert fields["outcome"] == "ok"
    assert fields["path"] == "/v1/completions"
    assert fields["client"] == "127.0.0.1"
    assert "forged" in fields["id"]
    assert (fields["fidelity"], fields.get("prompt_reason")) == ("exact", None)


async def test_the_access_log_says_why_a_prompt_is_not_exact(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """Somebody asks why a request went where nothing of its prompt was cached."""
    async with stack(engine_settings()) as running:
        caplog.set_level("INFO", "kvrouter.access")
        for prompt in (["a", "b"], None):
            body = {"model": "tiny", "max_tokens": 1, "prompt": prompt}
            async with running.session.post(f"{running.url}/v1/completions", json=body) as response:
                await response.read()
    lines = [record.getMessage() for record in caplog.records if record.name == "kvrouter.access"]
    shown = [dict(pair.split("=", 1) for pair in shlex.split(line)) for line in lines]
    assert [(each["fidelity"], each["prompt_reason"]) for each in shown] == [
        ("approximate", "the first of 2 prompts"),
        ("blind", "there is no prompt"),
    ]
