"""Looking at a worker before it is put to use, for all that exact routing needs.

Each check yields findings in words; what is wrong comes with what to do about it.
"""

import asyncio
from collections.abc import AsyncIterator
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

import aiohttp
import msgspec
import zmq.asyncio

from events import EventBatch, WorkerRank
from events.stream import ResyncReason, StreamState, SubscriptionSettings
from events.zmq_source import SourceSettings, ZmqSource
from kvrouter.config import RankEvents, WorkerConfig, worker_name
from kvrouter.joining import JoinError, learn
from kvrouter.openai.body import Endpoint, parse_body
from kvrouter.supervision import cancelled
from kvrouter.tokenize import ModelTokenizer, TokenizerError
from kvrouter.worker_url import http_base
from kvrouter.workers import WorkerFacts

STREAM_S = 3.0
"""How long a rank's event stream may take to connect and answer a replay request."""

_SAMPLES: dict[Endpoint, dict[str, Any]] = {
    Endpoint.COMPLETIONS: {"prompt": "def main():\n    return 42  # naïve, 12345"},
    Endpoint.CHAT: {
        "messages": [
            {"role": "user", "content": "What is 12 x 12?  Écoute!"},
            {"role": "assistant", "content": "144."},
            {"role": "user", "content": "And\n\nnow?"},
        ]
    },
}


class Verdict(StrEnum):
    """How a check ended."""

    OK = "ok"
    WARNING = "warning"
    PROBLEM = "PROBLEM"


@dataclass(frozen=True)
class Finding:
    """One line of the report."""

    verdict: Verdict
    text: str


class Examination:
    """Examines one worker. `tokenizer` is a folder or hub id, where the engine's own won't do."""

    def __init__(
        self, worker: WorkerConfig, session: aiohttp.ClientSession, tokenizer: str | None = None
    ) -> None:
        self._worker = worker
        self._session = session
        self._tokenizer = tokenizer
        self._url = http_base(worker.url)
        self._headers = {"Authorization": f"Bearer {worker.api_key}"} if worker.api_key else {}

    async def run(self) -> AsyncIterator[Finding]:
        """All findings, as they come. Sends the engine one request of a single output token."""
        try:
            facts = (await learn(self._session, self._worker)).facts
        except JoinError as error:
            yield Finding(Verdict.PROBLEM, f"not reachable as a vLLM server: {error}")
            return
        names = ", ".join(model.id for model in facts.models)
        yield Finding(Verdict.OK, f"serves {names}")
        for note in facts.notes:
            yield Finding(Verdict.WARNING, note)
        yield _cache(facts)
        for dp_rank, endpoint in facts.events.items():
            if endpoint is not None:
                yield await self._stream(WorkerRank(worker_name(self._worker), dp_rank), endpoint)
        async for finding in self._tokens(facts):
            yield finding
        yield await self._usage(facts)

    async def _stream(self, rank: WorkerRank, endpoint: RankEvents) -> Finding:
        listener = _Listener()
        with zmq.asyncio.Context() as context:
            source = ZmqSource(
                rank,
                endpoint.endpoint,
                listener,
                replay_endpoint=endpoint.replay_endpoint,
                topic=endpoint.topic,
                settings=SourceSettings(
                    bind=endpoint.bind,
                    subscription=SubscriptionSettings(replay_timeout_s=1.0, replay_tries=2),
                ),
                context=context,
            )
            task = asyncio.create_task(source.run())
            try:
                async with asyncio.timeout(STREAM_S):
                    await listener.settled.wait()
            except TimeoutError:
                pass  # the state tells how far it came
            finally:
                await cancelled([task])
        return _stream_finding(rank, endpoint, source.state, listener)

    async def _tokens(self, facts: WorkerFacts) -> AsyncIterator[Finding]:
        model = facts.base_model or ""
        root = next((each.root for each in facts.models if each.id == model), None)
        where = self._tokenizer or root
        if where is None:
            yield Finding(Verdict.WARNING, "tokenizer: the engine names no root; give --tokenizer")
            return
        try:
            tokenizer = await asyncio.to_thread(ModelTokenizer.load, where)
        except TokenizerError as error:
            yield Finding(Verdict.WARNING, f"tokenizer: {error}")
            return
        if tokenizer.chat_problem:
            yield Finding(Verdict.WARNING, f"tokenizer: {tokenizer.chat_problem}")
        for endpoint, sample in _SAMPLES.items():
            yield await self._compare(tokenizer, endpoint, {"model": model} | sample)

    async def _compare(
        self, tokenizer: ModelTokenizer, endpoint: Endpoint, body: dict[str, Any]
    ) -> Finding:
        ours = tokenizer.prompt(parse_body(endpoint, msgspec.json.encode(body))).token_ids.tolist()
        reply = await self._post("/tokenize", body)
        theirs = reply.get("tokens") if reply else None
        if theirs is None:
            return Finding(Verdict.WARNING, f"tokens of {endpoint}: the engine has no /tokenize")
        if ours == theirs:
            return Finding(Verdict.OK, f"tokens of {endpoint} are the engine's")
        return Finding(
            Verdict.PROBLEM,
            f"tokens of {endpoint} differ from the engine's ({len(ours)} against {len(theirs)}): "
            "no prefix will match; is it the same model, and --chat-template the same?",
        )

    async def _usage(self, facts: WorkerFacts) -> Finding:
        body = {"model": facts.base_model, "prompt": "hello", "max_tokens": 1}
        reply = await self._post("/v1/completions", body)
        if reply is None:
            return Finding(Verdict.WARNING, "a completion of one token was refused")
        if (reply.get("usage") or {}).get("prompt_tokens_details"):
            return Finding(Verdict.OK, "reports its cached tokens")
        return Finding(
            Verdict.WARNING,
            "does not report cached tokens, so predictions cannot be checked: start vLLM with "
            "--enable-prompt-tokens-details",
        )

    async def _post(self, path: str, body: dict[str, Any]) -> dict[str, Any] | None:
        try:
            async with self._session.post(
                self._url + path, json=body, headers=self._headers
            ) as response:
                if response.status != 200:  # noqa: PLR2004  # the one status that carries an answer
                    return None
                reply = await response.json(content_type=None)
        except (aiohttp.ClientError, OSError, TimeoutError, ValueError):
            return None
        return reply if isinstance(reply, dict) else None


class _Listener:
    """A sink that only counts, and waits for the stream to be heard."""

    def __init__(self) -> None:
        self.settled = asyncio.Event()
        self.batches = 0
        self.resyncs: list[ResyncReason] = []

    def on_batch(self, rank: WorkerRank, batch: EventBatch) -> None:
        del rank, batch
        self.batches += 1

    def on_resync(self, rank: WorkerRank, reason: ResyncReason) -> None:
        del rank
        self.resyncs.append(reason)

    def on_state(self, rank: WorkerRank, state: StreamState) -> None:
        del rank
        if state in _SETTLED:
            self.settled.set()


_SETTLED = (StreamState.LIVE, StreamState.DEGRADED)


def _stream_finding(
    rank: WorkerRank, endpoint: RankEvents, state: StreamState, heard: _Listener
) -> Finding:
    where = f"KV events of dp rank {rank.dp_rank} at {endpoint.endpoint}"
    if state is StreamState.LIVE:
        lost = f"; older ones are lost ({heard.resyncs[0]})" if heard.resyncs else ""
        verdict = Verdict.WARNING if lost else Verdict.OK
        return Finding(verdict, f"{where}: connected, {heard.batches} batches replayed{lost}")
    if state is StreamState.DEGRADED:
        return Finding(
            Verdict.WARNING,
            f"{where}: connected, but nobody answers replay requests at "
            f"{endpoint.replay_endpoint or '(not configured)'}",
        )
    return Finding(
        Verdict.PROBLEM, f"{where}: no connection; is the port open between here and there?"
    )


def _cache(facts: WorkerFacts) -> Finding:
    if facts.block_size is None or facts.capacity_blocks is None:
        return Finding(Verdict.WARNING, "/metrics tells no block size or capacity; configure them")
    text = f"{facts.capacity_blocks} blocks of {facts.block_size} tokens"
    return Finding(Verdict.OK, text + (f" on each of {len(facts.events)} ranks"))
