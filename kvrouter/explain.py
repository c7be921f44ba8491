"""Where a request would go and why, without sending it."""

import time
from collections.abc import Awaitable, Callable
from typing import Any

from kvrouter.fleet import Fleet, Route, describe
from kvrouter.openai.body import BadBody, Endpoint, RequestBody, parse_body
from kvrouter.openai.errors import Fault, RequestError
from kvrouter.prompt import Prompt

ReadPrompt = Callable[[Route, RequestBody], Awaitable[Prompt]]


class Explainer:
    """Answers what the front door would do with a body. `read_prompt` is the door's own."""

    def __init__(self, fleet: Fleet, read_prompt: ReadPrompt) -> None:
        self._fleet = fleet
        self._read_prompt = read_prompt

    async def explain(self, body: bytes, path: str | None = None) -> dict[str, Any]:
        """The decision for this body; `path` is guessed from its fields where it is None.

        Raises RequestError as the front door would.
        """
        try:
            fields = parse_body(_endpoint(body, path), body)
        except BadBody as error:
            raise RequestError(Fault.BAD_REQUEST, str(error)) from error
        route = self._fleet.route(fields.model)
        prompt = await self._read_prompt(route, fields)
        now = time.monotonic()
        candidates = route.pool.candidates(route.model, (), now)
        if not candidates:
            reasons = describe(route.pool.workers.values())
            raise RequestError(Fault.NO_WORKER, f"no worker is ready: {reasons}", retry_after_s=1)
        decision = route.pool.scheduler.decide(prompt, candidates, now)
        about = {
            "model": route.model,
            "pool": route.pool.model,
            "degraded": route.pool.token_counts.problem,
        }
        return about | decision.as_dict()


def _endpoint(body: bytes, path: str | None) -> Endpoint:
    if path is not None:
        try:
            return Endpoint(path)
        except ValueError as error:
            known = ", ".join(endpoint.value for endpoint in Endpoint)
            message = f"only these paths are routed by prompt: {known}"
            raise RequestError(Fault.NO_SUCH_PATH, message) from error
    fields = parse_body(Endpoint.COMPLETIONS, body)
    if fields.get("messages") is not None:
        return Endpoint.CHAT
    return Endpoint.COMPLETIONS if fields.get("input") is None else Endpoint.RESPONSES
