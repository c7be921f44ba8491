"""Short prompts inline, long ones in bounded threads, none without end."""

import asyncio
import threading
import time
from collections.abc import Iterator
from functools import cache
from random import Random

import pytest
from support.tokenizers import TINY, request, said, tiny

from kvrouter.openai.body import RequestBody
from kvrouter.prompt import Fidelity, Prompt
from kvrouter.tokenize import BackendSettings, EncodingThreads, ModelTokenizer, ThreadSettings

WORDS = "the quick brown fox jumps over the lazy dog 12345 \n"


def chat(size: int) -> RequestBody:
    return request(messages=[said((WORDS * (size // len(WORDS) + 1))[:size])])


class StandIn:
    """A tokenizer that is `tiny`, but for what a test says."""

    chat_problem = ""
    has_sample = False
    report = tiny().report

    def __init__(self, speed: float = 1) -> None:
        self.speed = speed

    def check_sample(self) -> None:
        raise AssertionError("there is none")

    def prompt(self, request: RequestBody, *, namespace: bytes = b"") -> Prompt:
        return tiny().prompt(request, namespace=namespace)

    def known_prompt(
        self, request: RequestBody, *, namespace: bytes, new_chars: int
    ) -> Prompt | None:
        del request, namespace, new_chars
        return None


class HeldTokenizer(StandIn):
    """A tokenizer that works only while its gate is open."""

    def __init__(self) -> None:
        super().__init__()
        self.gate = threading.Event()
        self.started = threading.Event()
        self.seen: list[int] = []

    def prompt(self, request: RequestBody, *, namespace: bytes = b"") -> Prompt:
        self.started.set()
        assert self.gate.wait(20)
        self.seen.append(request.size)
        return tiny().prompt(request, namespace=namespace)


@pytest.fixture
def held() -> Iterator[HeldTokenizer]:
    tokenizer = HeldTokenizer()
    yield tokenizer
    tokenizer.gate.set()


@pytest.fixture
def threads() -> Iterator[EncodingThreads]:
    threads = EncodingThreads(ThreadSettings(threads=1, max_requests=2, deadline_s=20))
    yield threads
    threads.close()


async def until_idle(threads: EncodingThreads) -> None:
    async with asyncio.timeout(20):
        while threads.stats.requests:  # noqa: ASYNC110  # counted in threads, nothing to await
            await asyncio.sleep(0.002)


async def test_a_short_prompt_is_done_inline(threads: EncodingThreads) -> None:
    prompt = await threads.prompt(tiny(), chat(100), block_sizes=[16])
    assert prompt.fidelity is Fidelity.EXACT
    assert (threads.stats.inline, threads.stats.pooled) == (1, 0)
    assert threads.stats.seconds > 0


async def test_what_is_encoded_faster_may_be_longer_and_is_still_done_inline(
    threads: EncodingThreads,
) -> None:
    """A library that takes a tenth of the time."""
    fast = StandIn(speed=10)
    for size in (15_000, 25_000):
        await threads.prompt(fast, chat(size))
    assert (threads.stats.inline, threads.stats.pooled) == (1, 1)
    await until_idle(threads)


@cache
def remembering() -> ModelTokenizer:
    """`tokenizers`, with its caches; each prompt is checked."""
    return ModelTokenizer.load(str(TINY), backends=BackendSettings(wish="hf", check_every=1))


async def test_what_is_known_but_for_its_end_is_done_inline(threads: EncodingThreads) -> None:
    """The next turn of a chat, with `tokenizers`: to pass it to a thread would cost more."""
    hf = remembering()
    rng = Random(5)
    text = " ".join(f"{rng.getrandbits(32):x}" for _ in range(3000))
    for end, places in (
        ("", (0, 1)),
        (" and then", (1, 1)),
        (text[3000:4000], (2, 1)),
        (text[:9000], (2, 2)),
    ):
        body = request(messages=[said(text + end)])
        prompt = await threads.prompt(hf, body, block_sizes=[16])
        assert (threads.stats.inline, threads.stats.pooled) == places
        assert prompt.token_ids == tiny().prompt(body).token_ids
        text += end
    await until_idle(threads)


async def test_of_many_known_prompts_one_is_checked_too(threads: EncodingThreads) -> None:
    hf = remembering()
    body, before = chat(10_000), hf.report.checked
    for turn in (1, 2):
        await threads.prompt(hf, body)
        async with asyncio.timeout(20):
            while hf.report.checked < before + turn:  # noqa: ASYNC110  # counted in threads
                await asyncio.sleep(0.002)
    assert (threads.stats.inline, threads.stats.pooled) == (1, 1)


async def test_a_long_prompt_is_done_in_a_thread_and_equals_the_inline_one(
    threads: EncodingThreads,
) -> None:
    body = chat(20_000)
    prompt = await threads.prompt(tiny(), body, namespace=b"n", block_sizes=[16, 32])
    assert prompt.token_ids == tiny().prompt(body).token_ids
    assert prompt.namespace == b"n"
    assert (threads.stats.inline, threads.stats.pooled) == (0, 1)
    await until_idle(threads)


async def test_without_a_tokenizer_only_the_length_is_known(threads: EncodingThreads) -> None:
    """T8: a model whose tokenizer can't be had."""
    body = chat(4000)
    prompt = await threads.prompt(None, body)
    assert prompt.fidelity is Fidelity.BLIND
    assert prompt.prompt_tokens == body.size // 4
    assert "no tokenizer" in prompt.reason


class BrokenTokenizer(StandIn):
    """One with a bug."""

    def prompt(self, request: RequestBody, *, namespace: bytes = b"") -> Prompt:
        raise TypeError(f"unhashable {request} in {namespace!r}")

    def known_prompt(
        self, request: RequestBody, *, namespace: bytes, new_chars: int
    ) -> Prompt | None:
        del new_chars
        return self.prompt(request, namespace=namespace)


@pytest.mark.parametrize("size", [100, 3000, 50_000])
async def test_a_tokenizer_that_raises_costs_no_request(
    threads: EncodingThreads, caplog: pytest.LogCaptureFixture, size: int
) -> None:
    """A body of a shape that our code does not expect; the engine shall judge it."""
    prompt = await threads.prompt(BrokenTokenizer(), chat(size))
    assert (prompt.fidelity, prompt.prompt_tokens) == (Fidelity.BLIND, chat(size).size // 4)
    assert "TypeError" in prompt.reason
    assert "unhashable" in caplog.text
    await until_idle(threads)


async def test_a_full_queue_turns_away_by_length(
    threads: EncodingThreads, held: HeldTokenizer
) -> None:
    """A burst of long prompts: the next one is routed by its length instead of waiting."""
    waiting = [asyncio.create_task(threads.prompt(held, chat(3000))) for _ in range(2)]
    await asyncio.sleep(0)
    prompt = await threads.prompt(held, chat(3000))
    assert prompt.fidelity is Fidelity.APPROXIMATE
    assert "full" in prompt.reason
    assert threads.stats.rejected == 1
    held.gate.set()
    assert [(await task).fidelity for task in waiting] == [Fidelity.EXACT] * 2
    await until_idle(threads)
    assert (threads.stats.requests, threads.stats.bytes) == (0, 0)


async def test_the_queue_is_bounded_in_bytes_too(held: HeldTokenizer) -> None:
    """A body above the bound is still taken when it is alone."""
    threads = EncodingThreads(ThreadSettings(threads=1, max_bytes=4000))
    large = asyncio.create_task(threads.prompt(held, chat(10_000)))
    await asyncio.sleep(0)
    assert (await threads.prompt(held, chat(3000))).fidelity is Fidelity.APPROXIMATE
    held.gate.set()
    assert (await large).fidelity is Fidelity.EXACT
    threads.close()


async def test_past_the_deadline_the_length_has_to_do(held: HeldTokenizer) -> None:
    """Something else keeps the threads busy for seconds."""
    threads = EncodingThreads(ThreadSettings(threads=1, deadline_s=0.05))
    prompt = await threads.prompt(held, chat(3000))
    assert prompt.fidelity is Fidelity.APPROXIMATE
    assert "within 0.05 s" in prompt.reason
    assert threads.stats.expired == 1
    held.gate.set()
    await until_idle(threads)
    threads.close()


async def test_a_cancelled_request_leaves_the_queue(
    threads: EncodingThreads, held: HeldTokenizer
) -> None:
    """The client hangs up while its prompt waits behind others."""
    first = asyncio.create_task(threads.prompt(held, chat(3000)))
    second = asyncio.create_task(threads.prompt(held, chat(5000)))
    await asyncio.to_thread(held.started.wait, 20)
    second.cancel()
    with pytest.raises(asyncio.CancelledError):
        await second
    assert threads.stats.requests == 1
    held.gate.set()
    await first
    await until_idle(threads)
    assert len(held.seen) == 1


async def test_a_cancelled_request_that_is_being_worked_on_is_counted_until_its_end(
    threads: EncodingThreads, held: HeldTokenizer
) -> None:
    first = asyncio.create_task(threads.prompt(held, chat(3000)))
    await asyncio.to_thread(held.started.wait, 20)
    first.cancel()
    with pytest.raises(asyncio.CancelledError):
        await first
    assert threads.stats.requests == 1
    held.gate.set()
    await until_idle(threads)


async def test_closing_answers_those_who_wait(
    threads: EncodingThreads, held: HeldTokenizer
) -> None:
    """Shutdown: nobody hangs, nobody sees a foreign cancellation."""
    first = asyncio.create_task(threads.prompt(held, chat(3000)))
    second = asyncio.create_task(threads.prompt(held, chat(3000)))
    await asyncio.to_thread(held.started.wait, 20)
    threads.close()
    assert "closed" in (await second).reason
    held.gate.set()
    assert (await first).fidelity is Fidelity.EXACT
    assert (await threads.prompt(held, chat(3000))).fidelity is Fidelity.APPROXIMATE


async def tokenized(
    threads: EncodingThreads, bodies: list[RequestBody], step_s: float
) -> tuple[list[Prompt], list[float]]:
    """The prompts, and how late the loop woke up from sleeps of `step_s` meanwhile, sorted."""
    lags = []
    async with asyncio.TaskGroup() as group:
        work = [
            group.create_task(threads.prompt(tiny(), body, block_sizes=[16])) for body in bodies
        ]
        while not all(task.done() for task in work):
            before = time.perf_counter()
            await asyncio.sleep(step_s)
            lags.append(time.perf_counter() - before - step_s)
    return [task.result() for task in work], sorted(lags)


async def test_the_loop_keeps_turning_while_long_prompts_are_tokenized() -> None:
    """T6: on the loop, these would stop it until they are all done."""
    threads = EncodingThreads(ThreadSettings(deadline_s=30))
    prompts, lags = await tokenized(threads, [chat(100_000) for _ in range(4)], 0.002)
    assert {prompt.fidelity for prompt in prompts} == {Fidelity.EXACT}
    assert len(lags) >= 10
    threads.close()


@pytest.mark.slow
async def test_lag_with_eight_prompts_of_128k_tokens() -> None:
    """T6: health must answer in time, so the loop may not be late by more than a fraction."""
    threads = EncodingThreads(ThreadSettings(deadline_s=60))
    prompts, lags = await tokenized(threads, [chat(240_000) for _ in range(8)], 0.005)
    assert {prompt.fidelity for prompt in prompts} == {Fidelity.EXACT}
    assert min(prompt.prompt_tokens for prompt in prompts) >= 128_000
    p99, worst = lags[int(len(lags) * 0.99)], lags[-1]
    assert p99 < 0.25, f"worst {worst:.3f} s, {threads.stats.seconds / 8:.2f} s a prompt"
    threads.close()
