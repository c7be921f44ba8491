"""What the router predicted against what the engine reported: is its view of a rank true? Pure.

Every answer with `cached_tokens` is a measurement of the index, and every `prompt_tokens` one of
the tokenizer. A rank's proof keeps the latest of them and says what follows:

    blind      nothing to compare: the engine reports no cached tokens, or has not yet
    exact      the latest measurements agree
    stale      the last one fell short: the rank has lost blocks that its events did not tell (yet)
    degraded   too many disagree; `reason` says what that points to

Requests that run beside each other may find blocks that no event has told of, or lose some to an
eviction that is under way. So a surplus or a shortfall of one request means little and a
`degraded` verdict needs a share of the window, weighed by tokens.
"""

from collections import deque
from dataclasses import dataclass
from enum import StrEnum

WINDOW = 32
MIN_SAMPLES = 4
TOLERATED_SHARE = 0.1
"""Of the prompt tokens in the window: differences above it make a rank `degraded`."""

NOTHING_COMPARED = (
    "nothing to compare yet: no response has reported its cached tokens (vLLM does so with "
    "--enable-prompt-tokens-details, in streams when the client asks for usage)"
)
FORGOTTEN = (
    "not measured yet since the engine restarted, or its events were begun anew: no response to a "
    "later request has reported its cached tokens"
)
FELL_SHORT = "the last response found fewer cached tokens than predicted"


class Verdict(StrEnum):
    """How far the router's view of a rank can be believed."""

    BLIND = "blind"
    EXACT = "exact"
    STALE = "stale"
    DEGRADED = "degraded"


@dataclass(slots=True, frozen=True)
class Measurement:
    """One answered request, all in tokens.

    `predicted_cached` is the leading part that the decision counted as held by the rank;
    `prompt_tokens` is the router's own count, `reported_*` the engine's.
    """

    predicted_cached: int
    reported_cached: int
    prompt_tokens: int
    reported_prompt_tokens: int


class Proof:
    """The latest measurements of one rank, and totals for metrics."""

    def __init__(self) -> None:
        self._window: deque[Measurement] = deque(maxlen=WINDOW)
        self.compared_total = 0
        self.equal_total = 0
        self.predicted_tokens_total = 0
        self.reported_tokens_total = 0
        self.over_tokens_total = 0
        """Tokens that were predicted to be cached and were not."""
        self.under_tokens_total = 0
        """Tokens that were cached though not predicted."""
        self.miscounted_prompts_total = 0

    def observe(self, measured: Measurement) -> None:
        """Take in one measurement."""
        self._window.append(measured)
        difference = measured.predicted_cached - measured.reported_cached
        self.compared_total += 1
        self.equal_total += difference == 0
        self.predicted_tokens_total += measured.predicted_cached
        self.reported_tokens_total += measured.reported_cached
        self.over_tokens_total += max(0, difference)
        self.under_tokens_total += max(0, -difference)
        self.miscounted_prompts_total += measured.prompt_tokens != measured.reported_prompt_tokens

    def forget(self) -> None:
        """The rank starts again (restart, resync): what was measured before says nothing now."""
        self._window.clear()

    @property
    def verdict(self) -> Verdict:
        """What the latest measurements say."""
        if not self._window:
            return Verdict.BLIND
        if self._degradation:
            return Verdict.DEGRADED
        last = self._window[-1]
        return Verdict.STALE if last.predicted_cached > last.reported_cached else Verdict.EXACT

    @property
    def reason(self) -> str:
        """What keeps the verdict from being `exact`; empty when nothing does."""
        if not self._window:
            return FORGOTTEN if self.compared_total else NOTHING_COMPARED
        return self._degradation or ("" if self.verdict is Verdict.EXACT else FELL_SHORT)

    @property
    def _degradation(self) -> str:
        if len(self._window) < MIN_SAMPLES:
            return ""
        miscounted = sum(m.prompt_tokens != m.reported_prompt_tokens for m in self._window)
        if miscounted > len(self._window) * TOLERATED_SHARE:
            return "tokenizer: the engine counts other prompt tokens than the router"
        tolerated = TOLERATED_SHARE * sum(m.reported_prompt_tokens for m in self._window)
        gaps = [m.predicted_cached - m.reported_cached for m in self._window]
        if sum(gap for gap in gaps if gap > 0) > tolerated:
            return "over-counted: the engine has fewer of the predicted blocks than its events say"
        if sum(-gap for gap in gaps if gap < 0) > tolerated:
            return "under-counted: the engine has blocks that no event told of"
        return ""

    def __repr__(self) -> str:
        return f"<Proof {self.verdict} {self.equal_total}/{self.compared_total} equal>"
