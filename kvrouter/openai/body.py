"""What the router reads of a request body.

The bytes go to the engine as they came and the engine judges them; here they are only read, and
read tolerantly: a value of the wrong type counts as absent, unknown fields are skipped, the last
of duplicate keys wins (as in the engine's own parser).

A body is scanned once. Only small values are decoded then; the large ones (messages, prompts,
tools) stay raw bytes until they are asked for, which the tokenizer does in its own thread. The
scan costs about 0.1 ms per 100 KB. A short body may be decoded in the scan altogether.
"""

import json
from enum import StrEnum
from typing import Any

import msgspec
from msgspec import Raw

from kvrouter.openai.fields import NOTHING, NOTHING_BESIDE, READ, SCAN, Fields, beside_messages

REPORT_MODE_XARG = "kv_cache_report_mode"


class Endpoint(StrEnum):
    """The paths whose bodies hold a prompt that the router can tokenize."""

    CHAT = "/v1/chat/completions"
    COMPLETIONS = "/v1/completions"
    RESPONSES = "/v1/responses"
    MESSAGES = "/v1/messages"


class BadBody(ValueError):  # noqa: N818  # the shared name; it is the client's fault, status 400
    """The body is not a JSON object at all: the client's fault (400)."""


READ_AT_ONCE_BYTES = 65_536
"""Bodies up to this size may be decoded in one go: 0.1 ms."""
_ABSENT = object()
_EMPTY: dict[str, Any] = {}


class RequestBody:
    """One request body as far as the router reads it.

    Values are decoded when first asked for, so reading large ones belongs off the event loop. Not
    for use by two threads at once.
    """

    __slots__ = ("_body", "_decoded", "_fields", "endpoint", "size")

    def __init__(self, endpoint: Endpoint, fields: Fields, body: bytes) -> None:
        self._fields = fields
        self._decoded: dict[str, Any] = {}
        self._body = body
        self.endpoint = endpoint
        self.size = len(body)
        """Bytes of the body."""

    def get(self, name: str) -> Any:
        """The decoded value of a field; None when it is absent, null or unreadable."""
        raw = getattr(self._fields, name)
        if raw is NOTHING:
            return None  # most fields of most bodies
        if type(raw) is not Raw:
            return raw
        value = self._decoded.get(name, _ABSENT)
        if value is _ABSENT:
            value = self._decoded[name] = _value(raw)
        return value

    def raw(self, name: str) -> bytes:
        """The JSON of a field; empty when it is absent.

        As it came, if it is plain JSON: however long the body is, the beginning of a conversation
        is the same.
        """
        value = getattr(self._fields, name)
        if not isinstance(value, Raw):
            try:
                value = getattr(SCAN.decode(self._body), name)
            except (msgspec.MsgspecError, RecursionError):
                return json.dumps(value, separators=(",", ":")).encode()
        return bytes(memoryview(value))

    @property
    def model(self) -> str | None:
        """The name of the model that is wanted."""
        return _clean(self._fields.model)

    @property
    def stream(self) -> bool:
        """Whether the answer is to come as server-sent events."""
        return self.get("stream") is True

    @property
    def max_tokens(self) -> int | None:
        """The most output tokens that the client wants, by whichever name it says so."""
        return (
            self._count("max_completion_tokens")
            or self._count("max_output_tokens")
            or self._count("max_tokens")
        )

    @property
    def n(self) -> int:
        """How many choices are wanted per prompt."""
        return self._count("n") or 1

    @property
    def cache_salt(self) -> str | None:
        """What keeps its blocks apart from those of others."""
        return self._text("cache_salt")

    @property
    def session_id(self) -> str | None:
        """Which conversation it belongs to."""
        return self._text("session_id")

    @property
    def previous_response_id(self) -> str | None:
        """The stored response that it goes on from."""
        if self._fields.previous_response_id is NOTHING:
            return None
        return self._text("previous_response_id")

    @property
    def include_usage(self) -> bool:
        """Whether a stream is to tell its usage at the end."""
        return self._mapping("stream_options").get("include_usage") is True

    @property
    def has_report_mode(self) -> bool:
        """Whether the engine is asked to announce its cache hits again."""
        if self._fields.vllm_xargs is NOTHING:
            return False
        return REPORT_MODE_XARG in self._mapping("vllm_xargs")

    @property
    def messages(self) -> Any:
        """The conversation of a chat or Anthropic request."""
        return self.get("messages")

    @property
    def prompt(self) -> Any:
        """The prompt of a completion: text, texts, ids or lists of ids."""
        return self.get("prompt")

    @property
    def has_messages_alone(self) -> bool:
        """Whether an OpenAI chat's prompt is made of its messages and of nothing else."""
        return bool(beside_messages(self._fields) == NOTHING_BESIDE)  # most bodies

    @property
    def tools(self) -> Any:
        """The tools that the model may call."""
        return self.get("tools")

    @property
    def prompt_token_ids(self) -> list[Any] | None:
        """The ids that replace a chat's rendered prompt, if the client sent any."""
        ids = self._mapping("kv_transfer_params").get("prompt_token_ids")
        return ids if isinstance(ids, list) else None

    def _mapping(self, name: str) -> dict[str, Any]:
        if getattr(self._fields, name) is NOTHING:
            return _EMPTY
        value = self.get(name)
        return value if isinstance(value, dict) else _EMPTY

    def _text(self, name: str) -> str | None:
        if getattr(self._fields, name) is NOTHING:
            return None
        return _clean(self.get(name))

    def _count(self, name: str) -> int | None:
        value = self.get(name)
        usable = isinstance(value, int) and not isinstance(value, bool) and value > 0
        return value if usable else None

    def __repr__(self) -> str:
        return f"<RequestBody {self.endpoint} model={self.model!r} {self.size} bytes>"


def parse_body(kind: Endpoint, body: bytes, *, for_prompt: bool = False) -> RequestBody:
    """Read a body; raises `BadBody` only when it is not a JSON object.

    `for_prompt` says that its prompt will be asked for, and spares a short body the second look.
    """
    at_once = for_prompt and len(body) <= READ_AT_ONCE_BYTES
    for decoder in (READ, SCAN) if at_once else (SCAN,):
        try:
            return RequestBody(kind, decoder.decode(body), body)
        except (msgspec.MsgspecError, RecursionError):
            continue
    return RequestBody(kind, _read_leniently(body), body)


def _clean(value: Any) -> str | None:
    """A text that is not empty, else None."""
    if not isinstance(value, str) or not value:
        return None
    return without_surrogates(value)


def without_surrogates(text: str) -> str:
    """The text with lone surrogates replaced: they have no UTF-8 form, so no token and no hash."""
    if text.isascii():
        return text
    try:
        text.encode()
    except UnicodeEncodeError:
        return text.encode("utf-16-le", "surrogatepass").decode("utf-16-le", "replace")
    return text


def _value(raw: Raw) -> Any:
    try:
        return msgspec.json.decode(raw)
    except (msgspec.MsgspecError, RecursionError):
        pass
    try:
        return json.loads(bytes(memoryview(raw)))
    except (ValueError, RecursionError):
        return None


def _read_leniently(body: bytes) -> Fields:
    """Read what only Python's own parser takes, as the engine's front end uses that one.

    Lone surrogates, NaN, numbers out of range, a byte order mark.
    """
    try:
        value = json.loads(body)
    except (ValueError, RecursionError) as error:
        raise BadBody(f"the body is not JSON: {error}") from error
    if not isinstance(value, dict):
        raise BadBody(f"the body is not a JSON object but {type(value).__name__}")
    known = {name: value[name] for name in Fields.__struct_fields__ if name in value}
    return Fields(**known)
