"""The facts that the router rests on still hold on this vLLM; no code of ours takes part."""

import random
from typing import Any

import aiohttp
import msgspec
import pytest
from prometheus_client.parser import text_string_to_metric_families
from support.vllm_probe import EngineProbe
from support.vllm_requests import complete, random_ids
from support.vllm_server import BLOCK_SIZE, BLOCKS, TOPIC, VllmServer

pytestmark = pytest.mark.vllm


def events_since(probe: EngineProbe, first: int) -> list[dict[str, Any]]:
    """Those of all batches from seqno `first` on, in order."""
    batches = [msgspec.msgpack.decode(payload) for payload in probe.payloads[first:]]
    return [event for _, events, _ in batches for event in events]


async def test_an_engine_names_its_event_endpoints(engines: list[VllmServer]) -> None:
    """All that a user gives is the engine's URL: the rest is asked for when a worker joins."""
    engine = engines[0]
    async with aiohttp.ClientSession() as http, http.get(f"{engine.url}/kv_event_sources") as got:
        sources = await got.json()
    assert list(sources) == ["0"]
    assert sources["0"]["publisher"] == "zmq"
    assert sources["0"]["endpoint"] == f"tcp://*:{engine.ports.events}"
    assert sources["0"]["replay_endpoint"] == engine.replay_endpoint
    assert sources["0"]["topic"] == TOPIC


async def test_an_engine_tells_block_size_and_capacity(engines: list[VllmServer]) -> None:
    async with aiohttp.ClientSession() as http, http.get(f"{engines[0].url}/metrics") as got:
        families = {f.name: f for f in text_string_to_metric_families(await got.text())}
    (sample,) = families["vllm:cache_config_info"].samples
    assert sample.labels["block_size"] == str(BLOCK_SIZE)
    assert sample.labels["num_gpu_blocks"] == str(BLOCKS)
    assert sample.labels["enable_prefix_caching"] == "True"


async def test_a_prompt_is_announced_in_maps_and_numbered_from_zero(
    engines: list[VllmServer], probes: list[EngineProbe]
) -> None:
    """The history is replayed from its first batch, in four frames, however late one joins."""
    probe = probes[0]
    before = probe.settle() + 1
    prompt = random_ids(random.Random(1), 70)
    async with aiohttp.ClientSession() as http:
        answer = await complete(http, engines[0].url, prompt)
    assert answer.prompt_ids == prompt
    assert answer.cached_tokens == 0
    probe.settle()
    stored = [e for e in events_since(probe, before) if e["type"] == "BlockStored"]
    assert [event["token_ids"] for event in stored] == [prompt[:64]]
    assert stored[0]["parent_block_hash"] is None
    assert stored[0]["block_size"] == BLOCK_SIZE
    assert stored[0]["kv_cache_spec_kind"] == "full_attention"
    replies = list(probe.replay(0))
    assert {len(frames) for frames in replies} == {4}
    assert [int.from_bytes(f[-2], "big") for f in replies] == list(range(len(replies)))


async def test_a_fully_cached_prompt_recomputes_and_announces_its_last_block_again(
    engines: list[VllmServer], probes: list[EngineProbe]
) -> None:
    """Why the index counts references: the same hash has two physical copies now."""
    probe = probes[0]
    prompt = random_ids(random.Random(2), 2 * BLOCK_SIZE)
    async with aiohttp.ClientSession() as http:
        first = await complete(http, engines[0].url, prompt)
        before = probe.settle() + 1
        second = await complete(http, engines[0].url, prompt)
    assert (first.cached_tokens, second.cached_tokens) == (0, BLOCK_SIZE)
    probe.settle()
    again = [e for e in events_since(probe, before) if e["type"] == "BlockStored"]
    assert [event["token_ids"] for event in again] == [prompt[BLOCK_SIZE:]]
    whole = events_since(probe, 0)
    (hash_again,) = again[0]["block_hashes"]
    stored = [e["block_hashes"] for e in whole if e["type"] == "BlockStored"]
    assert sum(hashes.count(hash_again) for hashes in stored) == 2


async def test_adapter_and_salt_are_named_on_the_wire(
    engines: list[VllmServer], probes: list[EngineProbe]
) -> None:
    """The adapter on every block, the salt on the first: equal tokens, different namespaces."""
    probe = probes[0]
    before = probe.settle() + 1
    prompt = random_ids(random.Random(3), 2 * BLOCK_SIZE + 1)
    async with aiohttp.ClientSession() as http:
        plain = await complete(http, engines[0].url, prompt)
        other = await complete(http, engines[0].url, prompt, model="lora-a", cache_salt="S")
    assert (plain.cached_tokens, other.cached_tokens) == (0, 0)
    probe.settle()
    stored = [e for e in events_since(probe, before) if e["type"] == "BlockStored"]
    assert [event.get("lora_name") for event in stored] == [None, "lora-a"]
    assert stored[1]["extra_keys"] == [["lora-a", "S"], ["lora-a"]]
