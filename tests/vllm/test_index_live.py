"""The index, fed from a live engine over its sockets, predicts what the engine reports."""

import asyncio
import random
from array import array
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field

import aiohttp
import pytest
import zmq.asyncio
from support.vllm_probe import EngineProbe
from support.vllm_requests import Answer, complete, random_ids
from support.vllm_server import BLOCK_SIZE, MAX_MODEL_LEN, TOPIC, USABLE_BLOCKS, VllmServer
from support.vllm_tally import Tally

from events import EventBatch, WorkerRank
from events.stream import ResyncReason, StreamState
from events.zmq_source import ZmqSource
from indexer import Applied, RadixIndex, namespace
from kvrouter.prompt import Prompt

pytestmark = pytest.mark.vllm

RANK = WorkerRank("engine")
VIEW_TIMEOUT_S = 10.0
MAX_OUTPUT_TOKENS = 40


class Recorder:
    """An event sink that keeps the index, and remembers what should not have happened."""

    def __init__(self) -> None:
        self.index = RadixIndex()
        self.index.set_capacity(RANK, USABLE_BLOCKS)
        self.resyncs: list[ResyncReason] = []
        self.unclear: list[tuple[EventBatch, Applied]] = []
        self.removed_blocks = 0

    def on_batch(self, rank: WorkerRank, batch: EventBatch) -> None:
        applied = self.index.apply(rank, batch)
        self.removed_blocks += applied.removed_blocks
        unusable = applied.unknown_removed or applied.orphans or applied.ignored or applied.resync
        if batch.skipped or unusable:
            self.unclear.append((batch, applied))

    def on_resync(self, rank: WorkerRank, reason: ResyncReason) -> None:
        self.index.clear(rank)
        self.resyncs.append(reason)

    def on_state(self, rank: WorkerRank, state: StreamState) -> None:
        """States are no matter here: what counts is which batches came."""


@dataclass(frozen=True)
class Conversation:
    """Tokens that were seen by the engine, under a model name and a salt."""

    model: str
    salt: str | None
    token_ids: list[int] = field(default_factory=list)

    @property
    def namespace(self) -> bytes:
        return namespace(lora=None if self.model == "tiny" else self.model, salt=self.salt)

    def fields(self, rng: random.Random) -> dict[str, object]:
        """What the request body says besides the prompt."""
        salt = {} if self.salt is None else {"cache_salt": self.salt}
        return {"model": self.model, "max_tokens": rng.randint(1, MAX_OUTPUT_TOKENS), **salt}


class Conversations:
    """Random conversations that share prefixes and overflow the cache of 63 blocks."""

    def __init__(self, rng: random.Random) -> None:
        self.rng = rng
        self._known: list[Conversation] = []

    def next(self) -> Conversation:
        """A new one, a repeat, a branch or a continuation of a known one."""
        known = self.rng.choice(self._known) if self._known else None
        if known is None or self.rng.random() < 0.2:
            return self._extended(self._new(), self.rng.randint(1, 400))
        keep = self.rng.choice((len(known.token_ids), self.rng.randint(1, len(known.token_ids))))
        kept = Conversation(known.model, known.salt, known.token_ids[:keep])
        return self._extended(kept, self.rng.choice((0, 1, self.rng.randint(2, 200))))

    def happened(self, conversation: Conversation, answer: Answer) -> None:
        """Remember prompt and output for later ones."""
        ids = [*answer.prompt_ids, *answer.output_ids]
        self._known.append(Conversation(conversation.model, conversation.salt, ids))
        del self._known[:-12]

    def _new(self) -> Conversation:
        salt = self.rng.choice((None, None, "S1", "S2"))
        return Conversation(self.rng.choice(("tiny", "tiny", "lora-a")), salt)

    def _extended(self, known: Conversation, tokens: int) -> Conversation:
        ids = [*known.token_ids, *random_ids(self.rng, tokens)][: MAX_MODEL_LEN - 100]
        if self.rng.random() < 0.3:  # whole blocks: the engine recomputes the last one
            ids = ids[: max(1, len(ids) // BLOCK_SIZE) * BLOCK_SIZE]
        return Conversation(known.model, known.salt, ids)


@dataclass
class Follower:
    """An index that follows one engine, and the means to know that it is up to date."""

    engine: VllmServer
    http: aiohttp.ClientSession
    probe: EngineProbe
    source: ZmqSource
    recorder: Recorder

    async def send(self, conversation: Conversation, rng: random.Random) -> Answer:
        fields = conversation.fields(rng)
        return await complete(self.http, self.engine.url, conversation.token_ids, **fields)

    async def catch_up(self) -> None:
        """Wait until every batch that the engine has to tell of has arrived here."""
        newest = await asyncio.to_thread(self.probe.settle)
        async with asyncio.timeout(VIEW_TIMEOUT_S):
            while self.seqno < newest:  # noqa: ASYNC110 - polls with a deadline
                await asyncio.sleep(0.005)
        assert self.seqno == newest

    @property
    def seqno(self) -> int:
        last = self.source.stats.last_seqno
        return -1 if last is None else last

    def predict(self, conversation: Conversation) -> int:
        """The cached tokens that the index promises for this prompt."""
        prompt = Prompt(array("I", conversation.token_ids), namespace=conversation.namespace)
        overlaps = self.recorder.index.match(prompt.reusable_hashes(BLOCK_SIZE))
        return overlaps[RANK].gpu * BLOCK_SIZE if RANK in overlaps else 0


@asynccontextmanager
async def follow(engine: VllmServer, probe: EngineProbe) -> AsyncIterator[Follower]:
    """Join a running engine, as the router does."""
    recorder = Recorder()
    with zmq.asyncio.Context() as context:
        source = ZmqSource(
            RANK,
            engine.events_endpoint,
            recorder,
            replay_endpoint=engine.replay_endpoint,
            topic=TOPIC,
            context=context,
        )
        task = asyncio.create_task(source.run())
        try:
            async with aiohttp.ClientSession() as http:
                follower = Follower(engine, http, probe, source, recorder)
                await follower.catch_up()
                yield follower
        finally:
            task.cancel()
            await asyncio.wait([task])


async def test_every_hit_is_predicted_while_blocks_are_evicted(
    engines: list[VllmServer], probes: list[EngineProbe], tally: Tally
) -> None:
    """One request at a time: repeats, branches, adapters, salts, in a cache that is too small."""
    conversations = Conversations(random.Random(11))
    wrong = []
    async with follow(engines[0], probes[0]) as follower:
        for number in range(200):
            conversation = conversations.next()
            predicted, seen = follower.predict(conversation), follower.seqno
            answer = await follower.send(conversation, conversations.rng)
            conversations.happened(conversation, answer)
            await follower.catch_up()
            tally.add("index alone", "1", predicted=predicted, reported=answer.cached_tokens)
            if predicted != answer.cached_tokens:
                wrong.append((number, predicted, answer, seen, probes[0].payloads[seen + 1 :]))
        assert not wrong
        check_follower(follower)


async def test_hits_are_predicted_after_bursts_of_concurrent_requests(
    engines: list[VllmServer], probes: list[EngineProbe], tally: Tally
) -> None:
    """Requests of one step share a batch, and their blocks come, go and come again inside it."""
    conversations = Conversations(random.Random(12))
    wrong = []
    async with follow(engines[1], probes[1]) as follower:
        for number in range(20):
            burst = [conversations.next() for _ in range(8)]
            sent = (follower.send(conversation, conversations.rng) for conversation in burst)
            for conversation, answer in zip(burst, await asyncio.gather(*sent), strict=True):
                conversations.happened(conversation, answer)
            await follower.catch_up()
            conversation = conversations.next()
            predicted, seen = follower.predict(conversation), follower.seqno
            answer = await follower.send(conversation, conversations.rng)
            await follower.catch_up()
            tally.add("index after bursts", "2", predicted=predicted, reported=answer.cached_tokens)
            if predicted != answer.cached_tokens:
                wrong.append((number, predicted, answer, seen, probes[1].payloads[seen + 1 :]))
        assert not wrong
        check_follower(follower)


def check_follower(follower: Follower) -> None:
    """Nothing was lost or unclear, much was evicted, and the index is sound and in its bounds."""
    recorder = follower.recorder
    assert (recorder.resyncs, recorder.unclear) == ([], [])
    assert recorder.removed_blocks > 100
    index = recorder.index
    index.check()
    assert 0 < index.blocks(RANK) <= USABLE_BLOCKS
