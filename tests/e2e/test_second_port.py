"""Health, readiness, metrics, workers, explain and drain."""

import asyncio

import pytest
from msgspec.structs import replace
from support.stack import engine_settings, stack, until

from kvrouter.sim.timing import LinearTiming


async def test_ready_says_what_is_missing_until_a_worker_has_joined() -> None:
    async with stack(engine_settings()) as running:
        await running.engines[0].kill()
        await until(lambda: running.router.fleet.workers[running.name(0)].state == "unreachable")
        async with running.session.get(running.admin + "/ready") as response:
            assert response.status == 503
            assert running.name(0) in (await response.json())["missing"][0]
        async with running.session.get(running.admin + "/health") as response:
            assert response.status == 200


async def test_workers_shows_each_rank_with_how_far_it_can_be_believed() -> None:
    async with stack(engine_settings(dp_size=2), engine_settings(kv_events_port=None)) as running:
        await running.chat("hello " * 50)
        async with running.session.get(running.admin + "/workers") as response:
            shown = await response.json()
        async with running.session.get(running.admin + "/prefixes") as response:
            assert [each["prefixes"] for each in (await response.json())["models"]] == [[]]
        heard, deaf = shown["workers"]
        assert [rank["events"]["stream"] for rank in heard["ranks"]] == ["live", "live"]
        endpoints = {rank["events"]["endpoint"] for rank in heard["ranks"]}
        assert len(endpoints) == 2
        assert all(endpoint.startswith("tcp://127.0.0.1:") for endpoint in endpoints)
        assert heard["notes"] == []
        assert deaf["ranks"][0]["view"] == "blind"
        assert "--kv-events-config" in deaf["notes"][0]
        assert shown["models"][0]["tokenizer"] == "exact"


async def test_a_worker_that_wants_a_key_is_told_of_once_with_what_to_do(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """It answers its probes and refuses to be joined, again and again."""
    async with stack(engine_settings(api_key="secret"), wait_ready=False) as running:
        worker = running.router.fleet.workers[running.name(0)]
        asked = running.engines[0].received
        await until(lambda: sum(each.path == "/v1/models" for each in asked) > 4)
        assert "give api_key for this worker" in worker.problem
        worker.config = replace(worker.config, api_key="secret")
        await until(lambda: worker.state == "ready")
    assert caplog.text.count("is unreachable") == 1
    assert "api_key" in caplog.text


async def test_a_worker_that_is_not_there_is_told_of_in_plain_words(
    caplog: pytest.LogCaptureFixture,
) -> None:
    async with stack(engine_settings()) as running:
        await running.engines[0].kill()
        worker = running.router.fleet.workers[running.name(0)]
        await until(lambda: worker.state == "unreachable")
        assert "Connect call failed" in worker.problem
    assert "ClientConnector" not in caplog.text


async def test_explain_decides_as_the_front_door_does_and_changes_nothing() -> None:
    text = "the same words for both of them " * 20
    messages = [{"role": "user", "content": text}]
    async with stack() as running:
        await running.chat(text)
        await running.caught_up()
        before = running.router.fleet.load.totals
        decisions = [await running.explain(model="tiny", messages=messages) for _ in range(3)]
        assert decisions[0] == decisions[1] or decisions[0]["winner"] == decisions[1]["winner"]
        assert running.router.fleet.load.totals == before
        response = await running.chat(text)
        assert response.headers["x-kvrouter-worker"] == decisions[0]["winner"]["worker"]
        winner = decisions[0]["candidates"][0]
        assert winner["cost"] == sum(winner["terms"].values())
        assert len(decisions[0]["candidates"]) == 2


async def test_explain_gives_the_front_doors_errors() -> None:
    async with stack(engine_settings()) as running:
        deep = b'{"model":"tiny","messages":' + b"[" * 100_000 + b"]" * 100_000 + b"}"
        for body, status in (
            (b"{", 400),
            (b'{"model":"none"}', 404),
            (b"[]", 400),
            (deep, 400),
            (b'{"model":"tiny","prompt":"ab\\ud800cd"}', 200),
        ):
            async with running.session.post(running.admin + "/explain", data=body) as response:
                assert response.status == status
                answer = await response.json()
                assert status == 200 or "message" in answer["error"]


async def test_a_drained_worker_gets_nothing_new_and_finishes_what_it_has() -> None:
    slow = LinearTiming(base_s=0.05, prefill_token_s=0.0, decode_sequence_s=0.0)
    async with stack(engine_settings(timing=slow), engine_settings(timing=slow)) as running:
        streaming = asyncio.create_task(running.chat("long", stream=True, max_tokens=20))
        fleet = running.router.fleet
        await until(lambda: fleet.load.totals.active_requests == 1)
        drained = next(r.worker for r in fleet.ranks if fleet.load.of(r).active_requests)
        async with running.session.post(f"{running.admin}/workers/{drained}/drain") as response:
            assert (await response.json())["state"] == "draining"
        # At once: the other worker is soon the one with more to do.
        responses = await asyncio.gather(*(running.chat(f"{number}") for number in range(8)))
        assert drained not in {each.headers["x-kvrouter-worker"] for each in responses}
        assert "[DONE]" in await (await streaming).text()
        async with running.session.post(f"{running.admin}/workers/{drained}/resume") as response:
            assert response.status == 200
        await until(lambda: fleet.workers[drained].state == "ready")
        async with running.session.post(f"{running.admin}/workers/nobody/drain") as response:
            assert response.status == 404


async def test_random_names_do_not_grow_the_metrics() -> None:
    """F15: ten thousand model names and paths (fewer here, the rule is the same)."""
    async with stack(engine_settings()) as running:

        async def series() -> int:
            async with running.session.get(running.admin + "/metrics") as response:
                return (await response.text()).count("\n")

        await running.chat("hello")
        await running.chat("hello", model="unknown")
        async with running.session.post(running.url + "/v1/unknown") as response:
            assert response.status == 404
        before = await series()
        for number in range(300):
            await running.chat("hello", model=f"model-{number}", user=f"tenant-{number}")
            async with running.session.post(f"{running.url}/v1/path-{number}") as response:
                assert response.status == 404
        assert await series() == before


async def test_metrics_tell_prediction_and_report_of_each_rank() -> None:
    text = "words that are cached the second time " * 20
    async with stack(engine_settings()) as running:
        await running.chat(text)
        await running.caught_up()
        await running.chat(text)
        async with running.session.get(running.admin + "/metrics") as response:
            lines = (await response.text()).splitlines()
        values = {
            line.split("{")[0]: float(line.rsplit(" ", 1)[1])
            for line in lines
            if not line.startswith("#") and running.name(0) in line and "bucket" not in line
        }
        assert values["kvrouter_proof_compared_total"] == 2
        assert values["kvrouter_proof_equal_total"] == 2
        assert (
            values["kvrouter_proof_predicted_tokens_total"]
            == values["kvrouter_proof_reported_tokens_total"]
            > 0
        )
        assert values["kvrouter_rank_active_requests"] == 0
        assert values["kvrouter_rank_blocks"] > 0
