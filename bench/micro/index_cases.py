"""What the cases of `index.py` are made of, and the rival that does the same work."""

import importlib
import importlib.metadata
import json
import random
from array import array
from typing import Any

import msgspec
from msgspec import msgpack

from events import BlocksStored
from indexer import block_hashes

BLOCK_SIZE = 16
VOCABULARY = 128_000


class Prompt:
    """Token ids of so many blocks."""

    def __init__(self, rng: random.Random, blocks: int, token_ids: list[int] | None = None) -> None:
        drawn = token_ids or rng.choices(range(VOCABULARY), k=blocks * BLOCK_SIZE)
        self.token_ids = drawn


class Chain:
    """The first `blocks` blocks of a prompt, under names that only one engine gives them."""

    def __init__(self, rng: random.Random, prompt: Prompt, blocks: int) -> None:
        self.prompt = prompt
        self.names = drawn_names(rng, blocks)


def ours_of(prompt: Prompt) -> bytes:
    """The prompt's hashes in our words."""
    return block_hashes(array("I", prompt.token_ids), BLOCK_SIZE)


def stored(
    chain: Chain, at: int = 0, blocks: int | None = None, parent: int | None = None
) -> BlocksStored:
    """The event that stores `blocks` blocks of a chain from block `at` on.

    A chain that begins behind another one's block has that as `parent`.
    """
    end = len(chain.names) if blocks is None else at + blocks
    return BlocksStored(
        block_hashes=list(chain.names[at:end]),
        parent=chain.names[at - 1] if at else parent,
        token_ids=chain.prompt.token_ids[at * BLOCK_SIZE : end * BLOCK_SIZE],
        block_size=BLOCK_SIZE,
    )


def hashed(names: list[int], hashes: bytes, parent: int | None = None) -> BlocksStored:
    """The event that stores blocks of these names and hashes, as a relay tells it."""
    return BlocksStored(
        block_hashes=list(names), parent=parent, block_size=BLOCK_SIZE, hashes=hashes
    )


def drawn_names(rng: random.Random, count: int) -> list[int]:
    """Names as an engine makes them."""
    return [rng.getrandbits(64) for _ in range(count)]


class Rival:
    """Dynamo's tree as Python sees it: events as JSON, local hashes made beforehand.

    Its hashes are not chained, so each chain of ours has the same ones for the same prompt.
    """

    tree: Any  # the binding's own, set where it is installed
    hash: Any

    def __init__(self, prompt: Prompt) -> None:
        self._own = self.tree()
        self._hashes: list[int] = self.hash(prompt.token_ids, BLOCK_SIZE)

    def stored(self, chain: Chain, at: int = 0, blocks: int | None = None) -> bytes:
        """The JSON of an event."""
        end = len(chain.names) if blocks is None else at + blocks
        names = chain.names
        pairs = zip(names[at:end], self._hashes[at:end], strict=True)
        data = {
            "parent_hash": names[at - 1] if at else None,
            "blocks": [{"block_hash": name, "tokens_hash": mine} for name, mine in pairs],
        }
        return json.dumps({"event_id": at, "data": {"stored": data}, "dp_rank": 0}).encode()

    def apply_payload(self, worker: int, payload: bytes) -> int:
        """Apply an engine's batch, by way of its hashes of tokens and of JSON; how many blocks."""
        blocks = 0
        for event in msgpack.decode(payload)[1]:
            names = event["block_hashes"]
            hashes = self.hash(event["token_ids"], BLOCK_SIZE)
            pairs = zip(names, hashes, strict=True)
            data = {
                "parent_hash": event["parent_block_hash"],
                "blocks": [{"block_hash": name, "tokens_hash": mine} for name, mine in pairs],
            }
            written = {"event_id": blocks, "data": {"stored": data}, "dp_rank": 0}
            self._own.apply_event(worker, msgspec.json.encode(written))
            blocks += len(names)
        return blocks

    def clear(self) -> None:
        """Start again with an empty tree."""
        self._own = self.tree()

    def apply(self, worker: int, event: bytes) -> int:
        """Apply one event; how many blocks it has."""
        self._own.apply_event(worker, event)
        return event.count(b"tokens_hash")

    def match(self) -> object:
        """The scores of the prompt that it was made for."""
        return self._own.find_matches(self._hashes).scores


def load_rival() -> tuple[type[Rival] | None, str | None]:
    """Dynamo's binding and its version, or nothing where it is not installed."""
    try:
        core = importlib.import_module("dynamo._core")
    except ImportError:
        return None, None
    Rival.tree, Rival.hash = core.RadixTree, core.compute_block_hash_for_seq
    return Rival, importlib.metadata.version("ai-dynamo-runtime")
