"""Tokenization beside the event loop: short prompts at once, long ones in a few threads.

The encoder releases the GIL, so a thread's work costs the loop only the conversion of the ids
(about 5 ms for 128k tokens) and the rendering of the template. The queue is bounded in requests
and in bytes, and a request waits for its result only up to a deadline: past any of these bounds
it is routed by its length, which costs an overlap, never the request.
"""

import asyncio
import logging
import threading
from collections.abc import Iterable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from time import perf_counter

from kvrouter.openai.body import RequestBody
from kvrouter.prompt import Prompt
from kvrouter.tokenize.backend import PromptTokenizer
from kvrouter.tokenize.hash_runs import HashRuns
from kvrouter.tokenize.tokenizer import blind, by_length

_LOG = logging.getLogger(__name__)


@dataclass(frozen=True)
class ThreadSettings:
    """Bounds of the threads and of what waits for them."""

    inline_bytes: int = 2048
    """Bodies up to this size are tokenized on the loop: in about 1 ms, of text in which hardly a
    word repeats in 2 to 3; larger ones where that is faster than `tokenizers`, by the same factor.
    A thread costs 0.1 ms and more."""
    known_bytes: int = 40_960
    """Bodies up to this size too where no more than `inline_bytes` characters of them are new. To
    find that out, where they are, takes 0.3 ms."""
    threads: int = 2
    waiting: int = 16
    """Threads for tokenizers that wait for somebody else's answer."""
    max_requests: int = 64
    """Requests that wait or are worked on; the next one is routed by its length."""
    max_bytes: int = 64 * 1024 * 1024
    """Bytes of their bodies."""
    deadline_s: float = 5.0
    """How long a request waits for its tokens."""
    hash_bytes: int = 16 * 1024 * 1024
    """For the block hashes of prompts that were met before: 0.6 KB for 1,024 tokens."""


@dataclass(slots=True)
class ThreadStats:
    """Counters since the start, and what is under way now."""

    inline: int = 0
    pooled: int = 0
    rejected: int = 0
    """Turned away because the queue was full."""
    expired: int = 0
    """Gave up at the deadline."""
    seconds: float = 0.0
    """Spent on tokenization, inline and in threads (wall clock)."""
    waited_seconds: float = 0.0
    """Spent in the queue before that, by those that were taken off it."""
    requests: int = 0
    """Waiting or worked on now."""
    bytes: int = 0
    """Of their bodies."""


class EncodingThreads:
    """Tokenizes requests of any model. Owned by whoever made it, who calls `close()`.

    Use it from one event loop. `stats` may be read at any time.
    """

    def __init__(self, settings: ThreadSettings = ThreadSettings()) -> None:
        self._settings = settings
        self._threads = ThreadPoolExecutor(settings.threads, thread_name_prefix="tokenize")
        # For tokenizers that wait for an engine; threads are only made when there is work.
        self._waiting = ThreadPoolExecutor(settings.waiting, thread_name_prefix="ask")
        self._lock = threading.Lock()  # worker threads count too
        self._closed = False
        self._hash_runs = HashRuns(settings.hash_bytes)
        self.stats = ThreadStats()

    async def prompt(
        self,
        tokenizer: PromptTokenizer | None,
        request: RequestBody,
        *,
        namespace: bytes = b"",
        block_sizes: Iterable[int] = (),
    ) -> Prompt:
        """Tokenize and hash one request, inline when it is short. Never raises, never waits long.

        Without a tokenizer the prompt is BLIND; on a full queue and past the deadline it is
        APPROXIMATE: no ids, and its length estimated from the bytes. A cancelled caller takes its
        work off the queue.
        """
        if tokenizer is None:
            return blind(request, "no tokenizer for the model")
        sizes = tuple(block_sizes)
        if request.size <= self._settings.inline_bytes * tokenizer.speed:
            self.stats.inline += 1
            return self._work(tokenizer, request, namespace, sizes)
        if request.size <= self._settings.known_bytes:
            known = self._known(tokenizer, request, namespace, sizes)
            if known is not None:
                self.stats.inline += 1
                return known
        if not self._has_room(request.size):
            self.stats.rejected += 1
            return by_length(request, "the tokenization queue is full")
        self.stats.pooled += 1
        self._count(1, request.size)
        threads = self._threads if tokenizer.speed else self._waiting
        waiting_since = perf_counter()
        work = threads.submit(
            self._work, tokenizer, request, namespace, sizes, waiting_since=waiting_since
        )
        work.add_done_callback(lambda _: self._count(-1, -request.size))
        return await self._result(work, request)

    async def _result(self, work: Future[Prompt], request: RequestBody) -> Prompt:
        result = asyncio.wrap_future(work)
        try:
            await asyncio.wait({result}, timeout=self._settings.deadline_s)
        finally:
            work.cancel()  # whoever is cancelled or gives up takes its work off the queue
        if result.done() and not result.cancelled():
            return result.result()
        if self._closed:
            return by_length(request, "the tokenizer's threads are closed")
        self.stats.expired += 1
        return by_length(request, f"not tokenized within {self._settings.deadline_s:g} s")

    def close(self) -> None:
        """Stop taking long prompts and drop those that wait; running ones end by themselves."""
        self._closed = True
        self._threads.shutdown(wait=False, cancel_futures=True)
        self._waiting.shutdown(wait=False, cancel_futures=True)

    def _known(
        self,
        tokenizer: PromptTokenizer,
        request: RequestBody,
        namespace: bytes,
        block_sizes: tuple[int, ...],
    ) -> Prompt | None:
        """The prompt, if hardly anything of it is new."""
        started = perf_counter()
        new_chars = self._settings.inline_bytes
        prompt: Prompt | None
        try:
            prompt = tokenizer.known_prompt(request, namespace=namespace, new_chars=new_chars)
        except Exception as error:  # noqa: BLE001  # see `_failed`
            prompt = _failed(request, error)
        if prompt is not None:
            self._finish(tokenizer, prompt, block_sizes)
        with self._lock:
            self.stats.seconds += perf_counter() - started
        return prompt

    def _work(
        self,
        tokenizer: PromptTokenizer,
        request: RequestBody,
        namespace: bytes,
        block_sizes: tuple[int, ...],
        *,
        waiting_since: float | None = None,
    ) -> Prompt:
        started = perf_counter()
        waited_s = 0.0 if waiting_since is None else started - waiting_since
        try:
            prompt = tokenizer.prompt(request, namespace=namespace)
        except Exception as error:  # noqa: BLE001  # see `_failed`
            prompt = _failed(request, error)
        self._finish(tokenizer, prompt, block_sizes)
        with self._lock:
            self.stats.seconds += perf_counter() - started
            self.stats.waited_seconds += waited_s
        return prompt

    def _finish(
        self, tokenizer: PromptTokenizer, prompt: Prompt, block_sizes: tuple[int, ...]
    ) -> None:
        prompt.prehash(block_sizes, self._hash_runs.block_hashes)
        if tokenizer.has_sample and not self._closed:
            self._threads.submit(tokenizer.check_sample)

    def _has_room(self, size: int) -> bool:
        """A body above the limit of bytes is still taken when nothing else is under way."""
        settings, stats = self._settings, self.stats
        if self._closed or stats.requests >= settings.max_requests:
            return False
        return stats.requests == 0 or stats.bytes + size <= settings.max_bytes

    def _count(self, requests: int, size: int) -> None:
        with self._lock:
            self.stats.requests += requests
            self.stats.bytes += size


def _failed(request: RequestBody, error: Exception) -> Prompt:
    """Our bug may cost an overlap, not a request."""
    _LOG.error("could not tokenize %r", request, exc_info=error)
    return blind(request, f"tokenization failed: {type(error).__name__}")
