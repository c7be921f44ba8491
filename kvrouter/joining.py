"""Learning a worker: what its HTTP side tells about models, ranks, events and its cache.

Asked once when a worker joins, so that a URL is all that a user has to give. What an engine does
not tell (older ones have no /kv_event_sources) can be configured; what is missing is noted in
words, with what to do about it.
"""

import asyncio
import ipaddress
import re
from dataclasses import replace
from typing import Any
from urllib.parse import urlsplit

import aiohttp
import msgspec

from kvrouter.config import RankEvents, WorkerConfig
from kvrouter.worker_url import http_base
from kvrouter.workers import ServedModel, WorkerFacts

_JOIN_TIMEOUT = aiohttp.ClientTimeout(total=10.0, sock_connect=3.0)
_MAX_REPLY_BYTES = 16 * 1024 * 1024
MAX_DIGITS = 12

NO_EVENTS = (
    "no KV events: start vLLM with --kv-events-config "
    '\'{"enable_kv_cache_events": true, "endpoint": "tcp://*:5557", '
    '"replay_endpoint": "tcp://*:5657"}\'; until then prefixes are guessed from routing alone'
)
NO_REPLAY = (
    'no replay: add "replay_endpoint" to --kv-events-config, so that lost events and those from '
    "before the router started can be asked for"
)
ENGINE_CONNECTS = (
    "the engine connects its events to {endpoint} instead of listening: use tcp://*:PORT in "
    "--kv-events-config, or configure kv_events with bind = true here"
)
NEEDS_KEY = " (it wants an API key: give api_key for this worker, under [[workers]] in --config)"


class JoinError(Exception):
    """The worker could not be learned; the message says which step failed."""


async def learn(session: aiohttp.ClientSession, worker: WorkerConfig) -> WorkerFacts:
    """Ask a worker about itself.

    Raises JoinError when it cannot be reached or lists no model. Everything else that fails
    becomes a note.
    """
    models_json, sources_json, metrics = await asyncio.gather(
        _fetch(session, worker, "/v1/models"),
        _fetch(session, worker, "/kv_event_sources", optional=True),
        _fetch(session, worker, "/metrics", optional=True),
    )
    models = read_models(models_json)
    notes: list[str] = []
    events = configured_events(worker) or read_sources(sources_json, worker.url, notes)
    block_size, capacity = read_cache_config(metrics.decode("utf-8", "replace"))
    return WorkerFacts(
        models=models,
        events=events,
        block_size=worker.block_size or block_size,
        capacity_blocks=worker.capacity_blocks or capacity,
        notes=tuple(dict.fromkeys(notes)),
    )


def completed(facts: WorkerFacts, told: WorkerFacts) -> WorkerFacts:
    """What a worker says of itself, and of what it does not say what its relay does.

    A relay may know where the events are when the engine does not tell.
    """
    hears = any(endpoint is not None for endpoint in facts.events.values())
    by_relay = not hears and any(endpoint is not None for endpoint in told.events.values())
    return replace(
        facts,
        events=told.events if by_relay else facts.events,
        block_size=facts.block_size or told.block_size,
        capacity_blocks=facts.capacity_blocks or told.capacity_blocks,
        notes=() if by_relay else facts.notes,
    )


async def _fetch(
    session: aiohttp.ClientSession, worker: WorkerConfig, path: str, *, optional: bool = False
) -> bytes:
    headers = {"Authorization": f"Bearer {worker.api_key}"} if worker.api_key else {}
    url = http_base(worker.url) + path
    try:
        async with session.get(url, headers=headers, timeout=_JOIN_TIMEOUT) as response:
            if response.status == 200:  # noqa: PLR2004  # the one status that carries an answer
                return await response.content.read(_MAX_REPLY_BYTES)
            if optional:
                return b""
            hint = NEEDS_KEY if response.status in (401, 403) else ""
            raise JoinError(f"GET {path} was answered with {response.status}{hint}")
    except (aiohttp.ClientError, OSError, TimeoutError) as error:
        if optional:
            return b""
        raise JoinError(f"GET {path} failed: {reason(error)}") from error


def reason(error: Exception) -> str:
    """Why a request to an engine failed, in words."""
    if isinstance(error, TimeoutError):
        return "no answer in time"
    if isinstance(error, aiohttp.ClientConnectorError):
        return str(error.os_error)
    return str(error) or type(error).__name__


class _Models(msgspec.Struct):
    data: list[ServedModel]


def read_models(reply: bytes) -> tuple[ServedModel, ...]:
    """The models of a /v1/models reply. Raises JoinError when it names none."""
    try:
        models = tuple(msgspec.json.decode(reply, type=_Models).data)
    except (msgspec.MsgspecError, RecursionError) as error:
        raise JoinError(f"/v1/models has no list of models: {error}") from error
    if not all(model.id.isprintable() and model.id for model in models):
        raise JoinError("/v1/models names a model with characters that cannot be shown")
    if not any(model.parent is None for model in models):
        raise JoinError("/v1/models names no base model")
    return models


def configured_events(worker: WorkerConfig) -> dict[int, RankEvents | None]:
    """The event endpoints that the configuration gives, by rank; empty when it gives none."""
    return {rank.dp_rank: rank for rank in worker.kv_events or ()}


def read_sources(reply: bytes, url: str, notes: list[str]) -> dict[int, RankEvents | None]:
    """The event endpoints by rank, from a /kv_event_sources reply; problems go to `notes`."""
    try:
        sources = msgspec.json.decode(reply) if reply else {}
        by_rank = {int(rank): source for rank, source in sources.items()}
        events = {rank: _rank_events(rank, by_rank[rank], url, notes) for rank in sorted(by_rank)}
    except (msgspec.MsgspecError, RecursionError, ValueError, TypeError, AttributeError):
        notes.append(
            "/kv_event_sources answers something else than event sources; configure kv_events"
        )
        return {0: None}
    if not events:
        notes.append(NO_EVENTS)
        return {0: None}
    return events


def _rank_events(
    rank: int, source: dict[str, Any], url: str, notes: list[str]
) -> RankEvents | None:
    if not source.get("enable_kv_cache_events") or source.get("publisher") != "zmq":
        notes.append(NO_EVENTS)
        return None
    endpoint = str(source.get("endpoint"))
    if not _engine_binds(endpoint):
        notes.append(ENGINE_CONNECTS.format(endpoint=endpoint))
        return None
    replay = source.get("replay_endpoint")
    if not replay:
        notes.append(NO_REPLAY)
    return RankEvents(
        endpoint=reachable(endpoint, url),
        replay_endpoint=reachable(replay, url) if replay else None,
        topic=str(source.get("topic") or ""),
        dp_rank=rank,
    )


def _engine_binds(endpoint: str) -> bool:
    """Whether the publisher listens rather than connects.

    The rule of vLLM: it binds where the endpoint has a wildcard or is local, and connects to all
    others. An endpoint with port 0 is reported as the node's own address, so another address
    without a wildcard was bound as well.
    """
    if "*" in endpoint or "::" in endpoint or endpoint.startswith("ipc://"):
        return True
    host = endpoint.removeprefix("tcp://").rsplit(":", 1)[0]
    return not (_is_loopback(host) or host == "0.0.0.0")


def reachable(endpoint: str, url: str) -> str:
    """The endpoint as seen from here: wildcards and loopback become the host of `url`.

    An engine behind a unix socket is on this host.
    """
    if not endpoint.startswith("tcp://"):
        return endpoint
    host, _, port = endpoint.removeprefix("tcp://").rpartition(":")
    is_loopback = _is_loopback(host)
    if host in ("*", "0.0.0.0", "[::]", "::") or is_loopback:
        local = host if is_loopback else "127.0.0.1"
        worker_host = urlsplit(url).hostname or local.strip("[]")
        host = f"[{worker_host}]" if ":" in worker_host else worker_host
    return f"tcp://{host}:{port}"


def _is_loopback(host: str) -> bool:
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host.strip("[]")).is_loopback
    except ValueError:
        return False


_CACHE_CONFIG = re.compile(r"^vllm:cache_config_info\{(.*)\}", re.MULTILINE)
_LABEL = re.compile(r'(\w+)="([^"]*)"')


def read_cache_config(metrics: str) -> tuple[int | None, int | None]:
    """(block size in tokens, usable blocks) from an engine's /metrics; None where it lacks them.

    One block of the pool is vLLM's null block, so a pool of N has N - 1 usable ones.
    """
    found = _CACHE_CONFIG.search(metrics)
    labels = dict(_LABEL.findall(found[1])) if found else {}
    block_size = _positive_int(labels.get("block_size"))
    blocks = _positive_int(labels.get("num_gpu_blocks"))
    return block_size, None if blocks is None else max(1, blocks - 1)


def _positive_int(text: str | None) -> int | None:
    """The number, None where it is none or larger than any real cache."""
    if text is None or not text.isdecimal() or len(text) > MAX_DIGITS:
        return None
    return int(text) or None
