"""Failures that a simulated engine can be told to have, for tests of what stands before it."""

from collections import deque
from dataclasses import dataclass, field


@dataclass
class Faults:
    """What goes wrong, from now on, until it is set back. The default is nothing.

    `refuse`: statuses for the next inference requests, one each, answered once the body is read;
    with `retry_after_s` as their Retry-After header.
    `hang_before_first_byte`: requests are accepted and never answered.
    `die_after_chunks`: a stream's connection is cut after that many chunks; with
    `error_chunk` it ends as a dying vLLM ends it, with an error chunk and `[DONE]`.
    `hang_after_chunks`: a stream stops there and stays open.
    `slow_factor`: steps take that many times longer.
    `drop_batches`: that many event batches are numbered and kept for replay, but not sent.
    """

    refuse: deque[int] = field(default_factory=deque)
    retry_after_s: int | None = None
    hang_before_first_byte: bool = False
    die_after_chunks: int | None = None
    error_chunk: bool = False
    hang_after_chunks: int | None = None
    slow_factor: float = 1.0
    drop_batches: int = 0

    def refuse_next(self, status: int, times: int = 1) -> None:
        """Answer the next inference requests with this status."""
        self.refuse.extend([status] * times)
