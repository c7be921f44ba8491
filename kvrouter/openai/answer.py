"""What an engine's answer tells as JSON: usage, an error, the id of a stored response. Pure."""

import msgspec


class Usage(msgspec.Struct, frozen=True, gc=False):
    """What the engine says a request cost, in tokens. None: it did not say.

    `prompt_tokens` includes the cached ones, whatever the API's own habit.
    """

    prompt_tokens: int
    output_tokens: int
    cached_tokens: int | None = None


class _Details(msgspec.Struct):
    cached_tokens: int | None = None


class _Usage(msgspec.Struct):
    """All names that the four APIs have for the same figures."""

    prompt_tokens: int | None = None
    completion_tokens: int | None = None
    prompt_tokens_details: _Details | None = None
    input_tokens: int | None = None
    output_tokens: int | None = None
    input_tokens_details: _Details | None = None
    cache_read_input_tokens: int | None = None

    def as_usage(self) -> Usage | None:
        if self.prompt_tokens is not None:
            details = self.prompt_tokens_details
            cached = None if details is None else details.cached_tokens
            return Usage(self.prompt_tokens, self.completion_tokens or 0, cached)
        if self.input_tokens is None:  # the last event of an Anthropic stream
            return None if self.output_tokens is None else Usage(0, self.output_tokens)
        if self.cache_read_input_tokens is not None:  # Anthropic's input excludes the cached part
            cached = self.cache_read_input_tokens
            return Usage(self.input_tokens + cached, self.output_tokens or 0, cached)
        details = self.input_tokens_details
        cached = None if details is None else details.cached_tokens
        return Usage(self.input_tokens, self.output_tokens or 0, cached)


class _Inner(msgspec.Struct):
    id: str | None = None
    usage: _Usage | None = None


_NOTHING = msgspec.Raw(b"null")


class Answer(msgspec.Struct):
    """A unary body or the data of one event: usage stands at the top or one level below."""

    id: str | None = None
    object: str | None = None
    type: str | None = None
    usage: _Usage | None = None
    response: _Inner | None = None
    message: _Inner | None = None
    error: msgspec.Raw = _NOTHING

    def find_usage(self) -> Usage | None:
        """What it says that the request cost."""
        if self.usage is not None:
            return self.usage.as_usage()
        for holder in (self.response, self.message):
            if holder is not None and holder.usage is not None:
                return holder.usage.as_usage()
        return None

    def find_response_id(self) -> str | None:
        """The id under which the engine has stored a response."""
        if self.response is not None:
            return self.response.id
        return self.id if self.object == "response" else None

    def is_error(self) -> bool:
        """Whether it reports an error."""
        return self.type == "error" or bytes(self.error) != b"null"


_DECODE = msgspec.json.Decoder(Answer).decode


def read_answer(data: bytes) -> Answer | None:
    """Read a body or an event's data; None for what is no JSON of that kind."""
    try:
        return _DECODE(data)
    except msgspec.MsgspecError:
        return None
