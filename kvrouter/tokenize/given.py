"""Token ids that the client brings along."""

from array import array
from typing import Any

from kvrouter.openai.body import Endpoint, RequestBody
from kvrouter.tokenize.messages import has_media


def given_ids(request: RequestBody) -> "array[int] | None":
    """The ids of the one prompt that came as ids; None for a prompt of any other form."""
    if request.endpoint is Endpoint.COMPLETIONS:
        prompt = request.prompt
        is_ids = isinstance(prompt, list) and prompt and isinstance(prompt[0], int)
        return as_ids(prompt) if is_ids else None
    given = replacing_ids(request, request.messages)
    return as_ids(given) if given else None


def replacing_ids(request: RequestBody, messages: Any) -> list[Any] | None:
    """The ids that the engine takes in place of a chat's messages, if it does."""
    given = request.prompt_token_ids
    if given is None or request.get("echo") or has_media(messages):
        return None
    return given


def as_ids(values: list[Any]) -> "array[int] | None":
    """The ids as an array; None when they are no token ids."""
    try:
        return array("I", values)
    except (TypeError, OverflowError):
        return None
