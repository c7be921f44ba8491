"""What an HTTP request asks of the simulated engine, checked as vLLM checks it."""

import json
from array import array
from collections.abc import Collection
from dataclasses import dataclass
from typing import Any

from kvrouter.openai.body import BadBody, Endpoint, RequestBody, parse_body
from kvrouter.sim.engine import EngineRequest
from kvrouter.sim.text import Text, UnusablePromptError, natural_length, outputs_for

_DEFAULT_COMPLETION_TOKENS = 16


class ApiError(Exception):
    """An error response in vLLM's form."""

    def __init__(self, status: int, message: str, kind: str, param: str | None = None) -> None:
        super().__init__(message)
        self.status = status
        self.error = {"message": message, "type": kind, "param": param, "code": status}


def bad_request(message: str, param: str | None = None) -> ApiError:
    """Return the error for a request that is wrong: 400."""
    return ApiError(400, message, "BadRequestError", param)


@dataclass
class Choice:
    """One sequence of a request: a prompt, and the outputs that it will get."""

    index: int
    prompt: "array[int]"
    planned: list[int]
    finish_reason: str


@dataclass
class Asked:
    """A request that can run."""

    body: RequestBody
    fields: dict[str, Any]
    model: str
    lora_name: str | None
    prompts: list["array[int]"]
    choices: list[Choice]

    @property
    def return_token_ids(self) -> bool:
        """Whether the response carries the prompt's and the outputs' ids."""
        return self.fields.get("return_token_ids") is True

    def engine_requests(self, name: str) -> list[EngineRequest]:
        """Return what the core has to run, in the order of the choices."""
        xargs = self.fields.get("vllm_xargs")
        report = xargs.get("kv_cache_report_mode") if isinstance(xargs, dict) else None
        salt = self.fields.get("cache_salt")
        return [
            EngineRequest(
                request_id=f"{name}-{choice.index}",
                prompt=choice.prompt,
                outputs=choice.planned,
                lora_name=self.lora_name,
                cache_salt=salt if isinstance(salt, str) else None,
                report_hits=report == "full",
                skip_cache_read=self.fields.get("prompt_logprobs") is not None,
            )
            for choice in self.choices
        ]


@dataclass(frozen=True)
class Reader:
    """Reads requests for one engine: its models, its length limit, its tokenizer."""

    text: Text
    model: str
    loras: Collection[str]
    max_model_len: int

    def read(self, endpoint: Endpoint, data: bytes) -> Asked:
        """Check and tokenize a body; raises ApiError."""
        fields = json_object(data)
        model = fields.get("model") or self.model
        lora_name = self.adapter(model)
        bodies = _one_prompt_each(endpoint, data, fields)
        prompts = [self.tokens(body) for body in bodies]
        n = self._choices_per_prompt(fields)
        choices = [
            self._choice(index, prompts[index // n], index % n, bodies[0])
            for index in range(len(prompts) * n)
        ]
        return Asked(bodies[0], fields, model, lora_name, prompts, choices)

    def adapter(self, model: object) -> str | None:
        """Return the adapter that a model's name stands for, None for the base model."""
        if model in self.loras:
            return str(model)
        if model != self.model:
            raise ApiError(
                404, f"The model `{model}` does not exist.", "NotFoundError", param="model"
            )
        return None

    def tokens(self, body: RequestBody) -> "array[int]":
        """Tokenize the one prompt of this body, and check its length."""
        try:
            prompt = self.text.prompt(body)
        except UnusablePromptError as error:
            raise bad_request(str(error)) from error
        if not prompt:
            raise bad_request("The prompt is empty.", param="prompt")
        if len(prompt) >= self.max_model_len:
            raise self._too_long(len(prompt), 1)
        return prompt

    def _choice(self, index: int, prompt: "array[int]", variant: int, body: RequestBody) -> Choice:
        wanted = body.max_tokens
        if wanted is None and body.endpoint is Endpoint.COMPLETIONS:
            wanted = _DEFAULT_COMPLETION_TOKENS
        room = self.max_model_len - len(prompt)
        if wanted is not None and wanted > room:
            raise self._too_long(len(prompt), wanted)
        count = min(wanted or natural_length(prompt, variant), room)
        reason = "stop" if wanted is None and count < room else "length"
        return Choice(index, prompt, outputs_for(self.text, prompt, variant, count), reason)

    def _choices_per_prompt(self, fields: dict[str, Any]) -> int:
        n = fields.get("n")
        if n is None or n == 1:
            return 1
        if type(n) is not int or n < 1:
            raise bad_request(f"n must be at least 1, got {n}.", param="n")
        if fields.get("temperature") == 0:
            raise bad_request(f"n must be 1 when using greedy sampling, got {n}.")
        return n

    def _too_long(self, prompt_tokens: int, output_tokens: int) -> ApiError:
        return bad_request(
            f"This model's maximum context length is {self.max_model_len} tokens. However, you "
            f"requested {output_tokens} output tokens and your prompt contains {prompt_tokens} "
            f"input tokens, for a total of {prompt_tokens + output_tokens} tokens. Please reduce "
            "the length of the input prompt or the number of requested output tokens."
        )


def json_object(data: bytes) -> dict[str, Any]:
    """Parse a body that has to be a JSON object; raises ApiError."""
    try:
        value = json.loads(data)
    except (ValueError, RecursionError) as error:
        raise bad_request(f"The body is not JSON: {error}") from error
    if not isinstance(value, dict):
        raise bad_request("The body is not a JSON object.")
    for name in ("max_tokens", "max_completion_tokens", "max_output_tokens"):
        count = value.get(name)
        if count is not None and (type(count) is not int or count < 1):
            raise bad_request(f"{name} must be at least 1, got {count}.", param=name)
    return value


def _one_prompt_each(endpoint: Endpoint, data: bytes, fields: dict[str, Any]) -> list[RequestBody]:
    """Split a completion of several prompts into bodies of one prompt."""
    prompt = fields.get("prompt")
    several = (
        endpoint is Endpoint.COMPLETIONS
        and isinstance(prompt, list)
        and prompt
        and not isinstance(prompt[0], int)
    )
    try:
        if not several:
            return [parse_body(endpoint, data)]
        parts = [json.dumps({**fields, "prompt": part}).encode() for part in fields["prompt"]]
        return [parse_body(endpoint, part) for part in parts]
    except BadBody as error:
        raise bad_request(str(error)) from error
