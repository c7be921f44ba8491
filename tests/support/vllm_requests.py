"""Requests to an engine and what its responses say of its cache; straight over aiohttp."""

import random
from dataclasses import dataclass
from typing import Any

import aiohttp

VOCABULARY = range(5, 2048)  # of the tiny model, without its five special tokens

WORDS = (
    *("router", "engine", "block", "cache", "prefix", "worker", "token", "prompt", "answer"),
    *("question", "system", "table", "value", "index", "stream", "event", "number", "replay"),
    *("first", "last", "find", "count", "where", "function", "class", "argument", "string"),
)


@dataclass(frozen=True)
class Answer:
    """What one completion says: ids of the prompt and of the output, and the reused tokens."""

    prompt_ids: list[int]
    output_ids: list[int]
    cached_tokens: int


def random_ids(rng: random.Random, count: int) -> list[int]:
    """Token ids without meaning; two draws share no block."""
    return rng.choices(VOCABULARY, k=count)


def random_text(rng: random.Random, words: int) -> str:
    """Words without sense; about two tokens each."""
    return " ".join(rng.choices(WORDS, k=words))


async def complete(
    http: aiohttp.ClientSession, url: str, prompt: list[int], **fields: Any
) -> Answer:
    """POST /v1/completions with token ids, to its end; raises for a status other than 200."""
    body = {"model": "tiny", "prompt": prompt, "max_tokens": 1, "temperature": 0, **fields}
    body |= {"return_token_ids": True, "ignore_eos": True}
    async with http.post(f"{url}/v1/completions", json=body) as response:
        response.raise_for_status()
        answer = await response.json()
    choice = answer["choices"][0]
    return Answer(choice["prompt_token_ids"], choice["token_ids"], cached_tokens(answer["usage"]))


def cached_tokens(usage: dict[str, Any]) -> int:
    """What the engine reused, from the `usage` of a response."""
    return int(usage["prompt_tokens_details"]["cached_tokens"])
