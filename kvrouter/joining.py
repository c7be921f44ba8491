"""Learning a worker: what its HTTP side tells about models, ranks, events and its cache.

Asked when a worker joins, and when it may be another engine by now, so that a URL is all that a
user has to give. What an engine does not tell (older ones have no /kv_event_sources) can be
configured; what is missing is noted in words, with what to do about it. A refusal is an answer; a
question that fails leaves what was known.
"""

import asyncio
import ipaddress
import re
from dataclasses import replace
from http import HTTPStatus
from typing import Any, NamedTuple
from urllib.parse import urlsplit

import aiohttp
import msgspec

from kvrouter.config import RankEvents, WorkerConfig
from kvrouter.worker_url import http_base
from kvrouter.workers import ServedModel, WorkerFacts

ANSWERS_S = 10.0
_CONNECT_S = 3.0
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
    """The worker could not be learned; the message says which step failed.

    `is_answer`: it answered, but not as a worker does. Else a later attempt may go better.
    """

    def __init__(self, message: str, *, is_answer: bool = True) -> None:
        super().__init__(message)
        self.is_answer = is_answer


class Learned(NamedTuple):
    """What a worker says of itself, and why it did not answer the rest."""

    facts: WorkerFacts
    unanswered: tuple[str, ...] = ()


async def learn(
    session: aiohttp.ClientSession,
    worker: WorkerConfig,
    known: WorkerFacts | None = None,
    *,
    within_s: float = ANSWERS_S,
) -> Learned:
    """Ask a worker about itself. `known` is what it said before, which stands where it fails now.

    Raises JoinError when it cannot be reached or lists no model.
    """
    listed, sources, metrics = await asyncio.gather(
        *(_ask(session, worker, path, within_s) for path in _QUESTIONS)
    )
    facts = WorkerFacts(models=_models(listed))
    is_known = known is not None and known.base_model == facts.base_model
    if known is not None and is_known:
        facts = replace(known, models=facts.models)
    configured = configured_events(worker)
    unanswered: list[str] = []
    if configured:
        facts = replace(facts, events=configured, notes=())
    elif sources.failure:
        unanswered.append(sources.failure)
    else:
        notes: list[str] = []
        events = read_sources(sources.body, worker.url, notes)
        facts = replace(facts, events=events, notes=tuple(dict.fromkeys(notes)))
    if metrics.failure:
        unanswered.append(metrics.failure)
    else:
        block_size, capacity = read_cache_config(metrics.body.decode("utf-8", "replace"))
        facts = replace(facts, block_size=block_size, capacity_blocks=capacity)
    facts = replace(
        facts,
        block_size=worker.block_size or facts.block_size,
        capacity_blocks=worker.capacity_blocks or facts.capacity_blocks,
        notes=facts.notes if is_known else (*facts.notes, *unanswered),
    )
    return Learned(facts, tuple(unanswered))


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


class _Reply(NamedTuple):
    """`refusal` and `failure` say in words why there is no body."""

    body: bytes = b""
    refusal: str = ""
    failure: str = ""


_QUESTIONS = ("/v1/models", "/kv_event_sources", "/metrics")


async def _ask(
    session: aiohttp.ClientSession, worker: WorkerConfig, path: str, within_s: float
) -> _Reply:
    timeout = aiohttp.ClientTimeout(total=within_s, sock_connect=_CONNECT_S)
    headers = {"Authorization": f"Bearer {worker.api_key}"} if worker.api_key else {}
    url = http_base(worker.url) + path
    try:
        async with session.get(url, headers=headers, timeout=timeout) as response:
            if response.status == HTTPStatus.OK:
                return _Reply(await _body(response))
            hint = NEEDS_KEY if response.status in (401, 403) else ""
            text = f"GET {path} was answered with {response.status}{hint}"
            may_pass = response.status >= 500 or response.status in _LATER  # noqa: PLR2004
            return _Reply(failure=text) if may_pass else _Reply(refusal=text)
    except (aiohttp.ClientError, OSError, TimeoutError) as error:
        return _Reply(failure=f"GET {path} failed: {reason(error)}")


_LATER = (HTTPStatus.REQUEST_TIMEOUT, HTTPStatus.TOO_MANY_REQUESTS)


async def _body(response: aiohttp.ClientResponse) -> bytes:
    """The whole body, up to the limit: one read gives only what is there already."""
    body = bytearray()
    async for piece in response.content.iter_any():
        body += piece
        if len(body) > _MAX_REPLY_BYTES:
            break
    return bytes(body[:_MAX_REPLY_BYTES])


def _models(reply: _Reply) -> tuple[ServedModel, ...]:
    if reply.failure or reply.refusal:
        raise JoinError(reply.failure or reply.refusal, is_answer=not reply.failure)
    return read_models(reply.body)


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
