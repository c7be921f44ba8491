"""What the router knows of one request's prompt: the fact that every decision starts from."""

from array import array
from collections.abc import Callable, Iterable
from enum import StrEnum

from indexer import block_hashes

HASH_BYTES = 8
Hasher = Callable[["array[int]", int, bytes], bytes]


class Fidelity(StrEnum):
    """How far the router's tokens can be trusted.

    EXACT: the ids are the engine's. APPROXIMATE: a leading part is, or for this request there was
    no time and the count is an estimate from its bytes, see the reason. BLIND: nothing can be
    known; only load can decide.
    """

    EXACT = "exact"
    APPROXIMATE = "approximate"
    BLIND = "blind"


EXACT, APPROXIMATE, BLIND = Fidelity.EXACT, Fidelity.APPROXIMATE, Fidelity.BLIND
"""By names of their own: looking one up in its class costs as much as a call."""

_NO_IDS: "array[int]" = array("I")


class Prompt:
    """A tokenized prompt in its namespace, with its block hashes by block size.

    `token_ids` are the ids that the engine will look up in its cache, from the first one on; they
    may be a leading part or none (APPROXIMATE) or empty (BLIND). `prompt_tokens` is the length that
    the engine will have to prefill or find, exact or estimated.
    """

    __slots__ = (
        *("_hashes", "fidelity", "ids_sent", "namespace", "prompt_tokens", "reason", "token_ids"),
    )

    def __init__(
        self,
        token_ids: "array[int]",
        *,
        prompt_tokens: int | None = None,
        namespace: bytes = b"",
        fidelity: Fidelity = Fidelity.EXACT,
        reason: str = "",
    ) -> None:
        self.token_ids = token_ids
        self.prompt_tokens = len(token_ids) if prompt_tokens is None else prompt_tokens
        self.namespace = namespace
        self.fidelity = fidelity
        self.reason = reason
        self.ids_sent = False
        """Whether its engine gets the ids and not the text."""
        self._hashes: dict[int, bytes] = {}

    @classmethod
    def blind(cls, prompt_tokens: int, reason: str) -> "Prompt":
        """A prompt of which only an estimated length is known."""
        return cls(_NO_IDS, prompt_tokens=prompt_tokens, fidelity=BLIND, reason=reason)

    def hashes(self, block_size: int) -> bytes:
        """The hashes of all full blocks, `HASH_BYTES` each; computed once per block size."""
        known = self._hashes.get(block_size) if self.token_ids else b""
        if known is None:
            known = block_hashes(self.token_ids, block_size, self.namespace)
            self._hashes[block_size] = known
        return known

    def reusable_hashes(self, block_size: int) -> bytes:
        """The hashes of the blocks that a cache hit can cover.

        An engine always recomputes at least the last token of a prompt, so n tokens are worth at
        most `(n - 1) // block_size` blocks.
        """
        blocks = max(0, self.prompt_tokens - 1) // block_size
        return self.hashes(block_size)[: blocks * HASH_BYTES]

    def prehash(self, block_sizes: Iterable[int], hasher: Hasher = block_hashes) -> None:
        """Compute the hashes for these block sizes now, so that the event loop need not.

        `hasher` gives what `block_hashes` gives.
        """
        for block_size in block_sizes:
            if block_size not in self._hashes:
                self._hashes[block_size] = hasher(self.token_ids, block_size, self.namespace)

    def __repr__(self) -> str:
        return f"<Prompt {self.prompt_tokens} tokens {self.fidelity} {self.reason!r}>"
