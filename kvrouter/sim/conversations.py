"""The responses that `/v1/responses` keeps, so that a later request can refer to them."""

import json
from collections import OrderedDict
from typing import Any

from kvrouter.sim.asked import ApiError, json_object
from kvrouter.sim.replies import JsonObject, Reply

_KEPT = 1000


class Conversations:
    """The last 1000 responses by id, each with the conversation that led to it."""

    def __init__(self) -> None:
        self._kept: OrderedDict[str, tuple[JsonObject, list[Any]]] = OrderedDict()

    def keep(self, reply: Reply) -> None:
        """Keep a finished response."""
        answer = {"role": "assistant", "content": reply.progress[0].text}
        items = _items(reply.asked.fields.get("input"))
        self._kept[reply.id] = (reply.whole(), [*items, answer])
        while len(self._kept) > _KEPT:
            self._kept.popitem(last=False)

    def response(self, response_id: str) -> JsonObject:
        """Return a response; raises ApiError (404) if it is unknown."""
        return self._find(response_id)[0]

    def continued(self, data: bytes) -> bytes:
        """Return a request with the conversation behind `previous_response_id` put in front."""
        fields = json_object(data)
        previous = fields.get("previous_response_id")
        if previous is None:
            return data
        _, conversation = self._find(str(previous))
        fields["input"] = [*conversation, *_items(fields.get("input"))]
        return json.dumps(fields).encode()

    def _find(self, response_id: str) -> tuple[JsonObject, list[Any]]:
        found = self._kept.get(response_id)
        if found is None:
            message = f"Response with id '{response_id}' not found."
            raise ApiError(404, message, "invalid_request_error", param="response_id")
        return found


def _items(value: object) -> list[Any]:
    """Return the input of a response as a list of items."""
    return value if isinstance(value, list) else [{"role": "user", "content": value}]
