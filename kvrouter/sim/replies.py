"""Responses as vLLM 0.32 shapes them, whole or as server-sent events."""

import itertools
import time
import uuid
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any, ClassVar

import msgspec

from kvrouter.openai.body import Endpoint
from kvrouter.sim.asked import Asked, Choice

FINGERPRINT = "kvrouter-sim"
DONE = b"data: [DONE]\n\n"

JsonObject = dict[str, Any]


def encode(value: JsonObject) -> bytes:
    """Return a value as JSON."""
    return msgspec.json.encode(value)


def data_event(value: JsonObject) -> bytes:
    """Return a server-sent event without a name."""
    return b"data: " + encode(value) + b"\n\n"


def named_event(value: JsonObject) -> bytes:
    """Return a server-sent event named by the value's type."""
    return b"event: " + str(value["type"]).encode() + b"\n" + data_event(value)


@dataclass
class Progress:
    """What one choice has got so far."""

    tokens: list[int] = field(default_factory=list)
    pieces: list[str] = field(default_factory=list)
    cached_tokens: int = 0

    @property
    def text(self) -> str:
        """The text so far."""
        return "".join(self.pieces)


class Reply:
    """The response to one request, built up from the engine's outputs.

    Usage counts each prompt once and all outputs. Of several prompts or choices vLLM reports the
    cached tokens of one only: the last one's, in a stream the first one's.
    """

    prefix: ClassVar[str]

    def __init__(self, asked: Asked, request_id: str, block_size: int, *, details: bool) -> None:
        self.asked = asked
        self.id = self.prefix + (request_id or uuid.uuid4().hex[:16])
        self.created = int(time.time())
        self.progress = [Progress() for _ in asked.choices]
        self._block_size = block_size
        self._details = details
        self._numbers = itertools.count()

    def output(self, choice: Choice, token: int, piece: str, cached_tokens: int) -> None:
        """Note one output token of a choice."""
        progress = self.progress[choice.index]
        progress.tokens.append(token)
        progress.pieces.append(piece)
        progress.cached_tokens = cached_tokens

    def opening(self) -> Iterator[bytes]:
        """Yield the events before the first output."""
        yield from ()

    def chunk(self, choice: Choice) -> Iterator[bytes]:
        """Yield the events for the output of this choice that was noted last."""
        raise NotImplementedError

    def closing(self) -> Iterator[bytes]:
        """Yield the events after the last output."""
        yield from ()

    def whole(self) -> JsonObject:
        """Return the response that is no stream."""
        raise NotImplementedError

    @property
    def prompt_tokens(self) -> int:
        """Tokens of all prompts."""
        return sum(map(len, self.asked.prompts))

    @property
    def output_tokens(self) -> int:
        """Tokens of all outputs."""
        return sum(len(progress.tokens) for progress in self.progress)

    @property
    def cached_tokens(self) -> int:
        """The cached tokens that usage reports."""
        return self.progress[0 if self.asked.body.stream else -1].cached_tokens

    @property
    def created_cache_tokens(self) -> int:
        """Prompt tokens that were newly stored, of the first prompt."""
        stored = len(self.asked.prompts[0]) // self._block_size * self._block_size
        return stored - self.cached_tokens

    def usage(self, details: JsonObject) -> JsonObject:
        """Return OpenAI's usage; `details` only if the engine is told to report them."""
        return {
            "prompt_tokens": self.prompt_tokens,
            "total_tokens": self.prompt_tokens + self.output_tokens,
            "completion_tokens": self.output_tokens,
            "prompt_tokens_details": details if self._details else None,
        }

    def finish_reason(self, choice: Choice) -> str | None:
        """Return why a choice ended, None if it hasn't."""
        done = len(self.progress[choice.index].tokens) == len(choice.planned)
        return choice.finish_reason if done else None

    @property
    def finished(self) -> bool:
        """Whether all choices have ended."""
        return all(map(self.finish_reason, self.asked.choices))

    def _head(self, kind: str) -> JsonObject:
        model = self.asked.model
        return {"id": self.id, "object": kind, "created": self.created, "model": model}

    def _stream_usage(self, details: JsonObject, kind: str) -> Iterator[bytes]:
        if self.asked.body.include_usage:
            event = {**self._head(kind), "choices": [], "usage": self.usage(details)}
            if event["usage"]["prompt_tokens_details"] is None:
                del event["usage"]["prompt_tokens_details"]
            yield data_event({**event, "system_fingerprint": FINGERPRINT})
        yield DONE

    def _ids(self, choice: Choice, *, prompt: bool) -> list[int] | None:
        if not self.asked.return_token_ids:
            return None
        return choice.prompt.tolist() if prompt else self.progress[choice.index].tokens

    def _whole_head(self, kind: str) -> JsonObject:
        return {**self._head(kind), "service_tier": None, "system_fingerprint": FINGERPRINT}


class CompletionReply(Reply):
    """`/v1/completions`."""

    prefix = "cmpl-"

    def chunk(self, choice: Choice) -> Iterator[bytes]:
        """Yield one event; the first of a choice carries the prompt's ids."""
        progress = self.progress[choice.index]
        prompt_ids = self._ids(choice, prompt=True) if len(progress.tokens) == 1 else None
        part = {
            "index": choice.index,
            "text": progress.pieces[-1],
            "logprobs": None,
            "finish_reason": self.finish_reason(choice),
            "stop_reason": None,
            "prompt_token_ids": prompt_ids,
            "token_ids": progress.tokens[-1:] if self.asked.return_token_ids else None,
        }
        event = {**self._head("text_completion"), "choices": [part]}
        if self.finished and not self.asked.body.include_usage:
            event["system_fingerprint"] = FINGERPRINT
        yield data_event(event)

    def closing(self) -> Iterator[bytes]:
        """Yield usage if asked for, and the end mark."""
        yield from self._stream_usage({"cached_tokens": self.cached_tokens}, "text_completion")

    def whole(self) -> JsonObject:
        """Return all choices."""
        details = {
            "cached_tokens": self.cached_tokens,
            "created_cache_tokens": None,
            "multimodal_tokens": None,
        }
        return {
            **self._whole_head("text_completion"),
            "choices": [self._part(choice) for choice in self.asked.choices],
            "usage": self.usage(details),
            "kv_transfer_params": None,
        }

    def _part(self, choice: Choice) -> JsonObject:
        return {
            "index": choice.index,
            "text": self.progress[choice.index].text,
            "logprobs": None,
            "finish_reason": choice.finish_reason,
            "stop_reason": None,
            "token_ids": self._ids(choice, prompt=False),
            "prompt_logprobs": None,
            "prompt_token_ids": self._ids(choice, prompt=True),
        }


class ChatReply(Reply):
    """`/v1/chat/completions`."""

    prefix = "chatcmpl-"

    def opening(self) -> Iterator[bytes]:
        """Yield the role of each choice; the prompt's ids stand beside the choices."""
        for choice in self.asked.choices:
            delta = {"role": "assistant", "content": ""}
            part = {"index": choice.index, "delta": delta, "logprobs": None, "finish_reason": None}
            event = {**self._head("chat.completion.chunk"), "choices": [part]}
            if self.asked.return_token_ids:
                event["prompt_token_ids"] = choice.prompt.tolist()
            yield data_event(event)

    def chunk(self, choice: Choice) -> Iterator[bytes]:
        """Yield one event."""
        progress = self.progress[choice.index]
        reason = self.finish_reason(choice)
        part: JsonObject = {
            "index": choice.index,
            "delta": {"content": progress.pieces[-1]},
            "logprobs": None,
            "finish_reason": reason,
        }
        if reason:
            part["stop_reason"] = None
        if self.asked.return_token_ids:
            part["token_ids"] = progress.tokens[-1:]
        event = {**self._head("chat.completion.chunk"), "choices": [part]}
        if self.finished and not self.asked.body.include_usage:
            event["system_fingerprint"] = FINGERPRINT
        yield data_event(event)

    def closing(self) -> Iterator[bytes]:
        """Yield usage if asked for, and the end mark."""
        details = {
            "cached_tokens": self.cached_tokens,
            "created_cache_tokens": self.created_cache_tokens,
        }
        yield from self._stream_usage(details, "chat.completion.chunk")

    def whole(self) -> JsonObject:
        """Return all choices."""
        details = {
            "cached_tokens": self.cached_tokens,
            "created_cache_tokens": self.created_cache_tokens,
            "multimodal_tokens": None,
        }
        return {
            **self._whole_head("chat.completion"),
            "choices": [self._part(choice) for choice in self.asked.choices],
            "usage": self.usage(details),
            "prompt_logprobs": None,
            "prompt_token_ids": self._ids(self.asked.choices[0], prompt=True),
            "kv_transfer_params": None,
        }

    def _part(self, choice: Choice) -> JsonObject:
        message = {
            "role": "assistant",
            "content": self.progress[choice.index].text,
            "refusal": None,
            "annotations": None,
            "audio": None,
            "function_call": None,
            "reasoning": None,
        }
        return {
            "index": choice.index,
            "message": message,
            "logprobs": None,
            "finish_reason": choice.finish_reason,
            "stop_reason": None,
            "token_ids": self._ids(choice, prompt=False),
        }


class MessagesReply(Reply):
    """`/v1/messages`: Anthropic's form, in which the input excludes what was cached."""

    prefix = "chatcmpl-"

    def opening(self) -> Iterator[bytes]:
        """Yield the message and the start of its one text block."""
        message = {**self.whole(), "content": [], "stop_reason": None}
        yield named_event({"type": "message_start", "message": message})
        block = {"type": "text", "text": ""}
        yield named_event({"type": "content_block_start", "index": 0, "content_block": block})

    def chunk(self, choice: Choice) -> Iterator[bytes]:
        """Yield one text delta."""
        delta = {"type": "text_delta", "text": self.progress[choice.index].pieces[-1]}
        yield named_event({"type": "content_block_delta", "index": 0, "delta": delta})

    def closing(self) -> Iterator[bytes]:
        """Yield the end of the block and of the message, with usage."""
        yield named_event({"type": "content_block_stop", "index": 0})
        delta = {"stop_reason": self._stop_reason}
        yield named_event({"type": "message_delta", "delta": delta, "usage": self._usage})
        yield named_event({"type": "message_stop"})

    def whole(self) -> JsonObject:
        """Return the message."""
        return {
            "id": self.id,
            "type": "message",
            "role": "assistant",
            "content": [{"type": "text", "text": self.progress[0].text}],
            "model": self.asked.model,
            "stop_reason": self._stop_reason,
            "usage": self._usage,
        }

    @property
    def _stop_reason(self) -> str:
        return "end_turn" if self.asked.choices[0].finish_reason == "stop" else "max_tokens"

    @property
    def _usage(self) -> JsonObject:
        usage = {
            "input_tokens": self.prompt_tokens - self.cached_tokens,
            "output_tokens": self.output_tokens,
        }
        if self._details:
            usage["cache_creation_input_tokens"] = 0
            usage["cache_read_input_tokens"] = self.cached_tokens
        else:
            usage["input_tokens"] = self.prompt_tokens
        return usage


class ResponsesReply(Reply):
    """`/v1/responses`; the response is kept by the server for `GET /v1/responses/{id}`."""

    prefix = "resp_"

    def opening(self) -> Iterator[bytes]:
        """Yield the response's creation and the start of its one message."""
        started = {**self.whole(), "status": "in_progress", "output": [], "usage": None}
        yield from self._events(
            {"type": "response.created", "response": started},
            {"type": "response.in_progress", "response": started},
            {
                "type": "response.output_item.added",
                "output_index": 0,
                "item": {**self._message, "status": "in_progress", "content": []},
            },
            {**self._place("response.content_part.added"), "part": {**self._part, "text": ""}},
        )

    def chunk(self, choice: Choice) -> Iterator[bytes]:
        """Yield one text delta."""
        piece = self.progress[choice.index].pieces[-1]
        yield from self._events({**self._place("response.output_text.delta"), "delta": piece})

    def closing(self) -> Iterator[bytes]:
        """Yield the ends of the text, of the message and of the response."""
        whole = self.whole()
        ended = "response.completed" if whole["status"] == "completed" else "response.incomplete"
        text = {**self._place("response.output_text.done"), "text": self.progress[0].text}
        item = {"type": "response.output_item.done", "output_index": 0, "item": self._message}
        yield from self._events(
            text,
            {**self._place("response.content_part.done"), "part": self._part},
            item,
            {"type": ended, "response": whole},
        )

    def whole(self) -> JsonObject:
        """Return the response."""
        complete = self.asked.choices[0].finish_reason == "stop"
        return {
            "id": self.id,
            "created_at": self.created,
            "incomplete_details": None if complete else {"reason": "max_output_tokens"},
            "instructions": self.asked.fields.get("instructions"),
            "model": self.asked.model,
            "object": "response",
            "output": [self._message],
            "parallel_tool_calls": True,
            "tool_choice": "auto",
            "tools": [],
            "max_output_tokens": self.asked.fields.get("max_output_tokens"),
            "previous_response_id": self.asked.fields.get("previous_response_id"),
            "status": "completed" if complete else "incomplete",
            "usage": self._usage,
        }

    @property
    def _message(self) -> JsonObject:
        return {
            "id": self.id.replace("resp_", "msg_", 1),
            "content": [self._part],
            "role": "assistant",
            "status": "completed",
            "type": "message",
        }

    @property
    def _part(self) -> JsonObject:
        return {"annotations": [], "text": self.progress[0].text, "type": "output_text"}

    @property
    def _usage(self) -> JsonObject:
        return {
            "input_tokens": self.prompt_tokens,
            "input_tokens_details": {"cached_tokens": self.cached_tokens if self._details else 0},
            "output_tokens": self.output_tokens,
            "output_tokens_details": {"reasoning_tokens": 0},
            "total_tokens": self.prompt_tokens + self.output_tokens,
        }

    def _place(self, kind: str) -> JsonObject:
        item = self.id.replace("resp_", "msg_", 1)
        return {"type": kind, "item_id": item, "output_index": 0, "content_index": 0}

    def _events(self, *values: JsonObject) -> Iterator[bytes]:
        for value in values:
            yield named_event({**value, "sequence_number": next(self._numbers)})


REPLIES: dict[Endpoint, type[Reply]] = {
    Endpoint.COMPLETIONS: CompletionReply,
    Endpoint.CHAT: ChatReply,
    Endpoint.MESSAGES: MessagesReply,
    Endpoint.RESPONSES: ResponsesReply,
}
