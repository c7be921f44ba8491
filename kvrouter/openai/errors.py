"""Errors that a client sees, by whose fault they are, in OpenAI's form.

One table maps each kind to its HTTP status and `type`; whoever finds a fault raises a
`RequestError` of its kind, and one place turns it into a response.
"""

from collections.abc import Sequence
from enum import Enum

import msgspec


class Fault(Enum):
    """What went wrong: (HTTP status, OpenAI error type, OpenAI error code)."""

    BAD_REQUEST = (400, "invalid_request_error", "bad_request")
    NO_SUCH_MODEL = (404, "invalid_request_error", "model_not_found")
    NO_SUCH_PATH = (404, "invalid_request_error", "unknown_path")
    METHOD_NOT_ALLOWED = (405, "invalid_request_error", "method_not_allowed")
    ORIGIN_NOT_ALLOWED = (403, "invalid_request_error", "origin_not_allowed")
    NO_SUCH_RESPONSE = (404, "invalid_request_error", "response_not_found")
    BAD_PROXY_HEADER = (400, "invalid_request_error", "bad_proxy_header")
    MALFORMED = (400, "invalid_request_error", "malformed_request")
    HEAD_TIMEOUT = (408, "invalid_request_error", "request_timeout")
    BODY_TIMEOUT = (408, "invalid_request_error", "body_timeout")
    BODY_TOO_LARGE = (413, "invalid_request_error", "body_too_large")
    HEAD_TOO_LARGE = (431, "invalid_request_error", "head_too_large")
    TRANSFER_CODING = (501, "invalid_request_error", "unknown_transfer_coding")
    HTTP_VERSION = (505, "invalid_request_error", "unknown_http_version")
    INTERNAL = (500, "server_error", "router_error")
    ENGINE_FAILED = (502, "server_error", "engine_failed")
    OVERLOADED = (503, "server_error", "overloaded")
    NO_WORKER = (503, "server_error", "no_worker")
    ENGINE_TIMEOUT = (504, "server_error", "engine_timeout")

    @property
    def status(self) -> int:
        """The HTTP status of the response."""
        return self.value[0]

    @property
    def label(self) -> str:
        """How it is called in metrics."""
        return self.name.lower()


class RequestError(Exception):
    """A request that ends with an error of the router's own.

    `retry_after_s` becomes a Retry-After header where trying again makes sense; `allowed` are the
    methods that would have done.
    """

    def __init__(
        self,
        fault: Fault,
        message: str,
        *,
        retry_after_s: int | None = None,
        allowed: Sequence[str] = (),
    ) -> None:
        super().__init__(message)
        self.fault = fault
        self.message = message
        self.retry_after_s = retry_after_s
        self.allowed = allowed

    def body(self) -> bytes:
        """The JSON of the error, as OpenAI's API has it."""
        return error_body(self.fault, self.message)

    def headers(self) -> dict[str, str]:
        """The headers that go with the body."""
        headers = {"Content-Type": "application/json"}
        if self.retry_after_s is not None:
            headers["Retry-After"] = str(self.retry_after_s)
        if self.allowed:
            headers["Allow"] = ", ".join(self.allowed)
        return headers


def error_body(fault: Fault, message: str) -> bytes:
    """The JSON object `{"error": {...}}` for `fault`."""
    _, kind, code = fault.value
    error = {"message": message, "type": kind, "param": None, "code": code}
    return msgspec.json.encode({"error": error})


def error_event(fault: Fault, message: str) -> bytes:
    """The error as one server-sent event.

    It starts with a blank line, which ends an event that may have been cut in the middle.
    """
    return b"\n\ndata: " + error_body(fault, message) + b"\n\n"
