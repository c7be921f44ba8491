"""The access log: one line for each attempt that ended, with what an operator asks for first."""

import logging
import time

from kvrouter.http.attempt import Attempt
from kvrouter.prompt import Fidelity

log = logging.getLogger("kvrouter.access")


def note(client: str | None, request_id: str, path: str, model: str, attempt: Attempt) -> None:
    """Log an attempt that ended now, if the access log is on. `client` is an address."""
    if log.isEnabledFor(logging.INFO):
        log.info("%s", line(client, request_id, path, model, attempt, time.monotonic()))


def line(
    client: str | None, request_id: str, path: str, model: str, attempt: Attempt, now: float
) -> str:
    """The line for one attempt that ended at `now`, as key=value pairs.

    Why a prompt is not exact stands in it only where it is not.
    """
    decision = attempt.placement.decision
    prompt = decision.prompt
    doubt = {} if prompt.fidelity is Fidelity.EXACT else {"prompt_reason": prompt.reason}
    chosen = decision.chosen
    first_byte_at = attempt.first_byte_at
    fields: dict[str, object] = {
        "id": request_id,
        "client": client,
        "path": path,
        "model": model,
        "worker": attempt.worker.name,
        "dp_rank": chosen.rank.dp_rank,
        "outcome": attempt.outcome.value,
        "prompt_tokens": prompt.prompt_tokens,
        "fidelity": prompt.fidelity.value,
        **doubt,
        "predicted_cached": chosen.held_blocks * chosen.block_size,
        "cached": None if attempt.usage is None else attempt.usage.cached_tokens,
        "output_tokens": None if attempt.usage is None else attempt.usage.output_tokens,
        "first_byte_ms": None if first_byte_at is None else _ms(first_byte_at - attempt.started_at),
        "took_ms": _ms(now - attempt.started_at),
        "reason": decision.reason.value,
    }
    return " ".join(f"{key}={_quoted(value)}" for key, value in fields.items())


def _ms(seconds: float) -> str:
    return f"{1000 * seconds:.1f}"


def _quoted(value: object) -> str:
    """One field, on one line: a client chooses its request id and model name."""
    text = "-" if value is None else str(value)
    plain = text.isprintable() and not any(each in text for each in ' "=')
    return text if plain else ascii(text)
