"""Chat templates, rendered as the engine's `transformers` library renders them.

A template is code of the model's author: it runs in a sandbox, for a bounded time, and may raise
anything. Rendering is thread-safe.
"""

import json
from collections.abc import Mapping, Sequence, Sized
from datetime import datetime
from types import BuiltinMethodType
from typing import Any

import jinja2
from jinja2 import nodes
from jinja2.exceptions import SecurityError
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.runtime import Context, LoopContext
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.utils import Namespace

from kvrouter.tokenize.content_format import ContentFormat, detect_content_format
from kvrouter.tokenize.time_limit import OverrunError, TimeLimit

RENDERING = TimeLimit(1.0)
"""A thousand messages take 4 ms."""

MAX_REPEATED = 10_000_000
"""Items of a repeated text or list. `*` and `**` are single instructions, and no limit of time
would end them."""
MAX_BITS = 100_000
"""Of a product or a power."""

# The end of an unfinished message is found again by this mark; its trailing space tells whether
# the template stripped the message.
_CONTINUE_MARK = "CONTINUE_FINAL_MESSAGE_TAG "


class TemplateError(Exception):
    """The template can't be compiled, or does not even render a plain message in time."""


class TemplateRefusedError(Exception):
    """The template rejects these messages; the engine, rendering the same, would answer 400."""


class TemplateOverrunError(Exception):
    """The template did not come to an end; what these messages would look like is not known."""


class ChatTemplate:
    """One compiled chat template with the special tokens that it may name."""

    def __init__(
        self, source: str, special_tokens: Mapping[str, str], *, limit: TimeLimit = RENDERING
    ) -> None:
        """Compile it; raises `TemplateError`."""
        self._limit = limit
        try:
            self._template = limit.run(_ENVIRONMENT.from_string, source)
            tree = limit.run(_ENVIRONMENT.parse, source)
        except OverrunError:
            message = f"the chat template does not compile within {limit.limit_s:g} s"
            raise TemplateError(message) from None
        except Exception as error:  # Python's compiler has limits of its own, as for nested loops
            raise TemplateError(f"the chat template does not compile: {error}") from error
        self._always = {**self._template.globals, "documents": None, **special_tokens}
        """What each rendering begins with, in one layer: the library would look through several."""
        self._template.globals = {}
        self.content_format: ContentFormat = detect_content_format(tree)
        self.knows_developer = '"developer"' in source or "'developer'" in source
        """Whether the template handles the role `developer` (the engine's own rule: it says so)."""

    def render(
        self,
        messages: Sequence[dict[str, Any]],
        *,
        tools: Sequence[Any] | None = None,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        variables: Mapping[str, Any] | None = None,
    ) -> str:
        """Render the text that the engine tokenizes.

        Raises `TemplateRefusedError`, or `TemplateOverrunError` after a second or so.
        """
        if not messages:
            raise TemplateRefusedError("there are no messages")
        if continue_final_message and add_generation_prompt:
            raise TemplateRefusedError("a continued message can't have a generation prompt")
        final = _last_text(messages[-1]) if continue_final_message else ""
        shown = [*messages[:-1], _marked(messages[-1])] if continue_final_message else messages
        context = self._always.copy()
        if variables:
            context.update(variables)
        context["messages"] = shown
        context["tools"] = tools
        context["add_generation_prompt"] = add_generation_prompt
        text = self._run(context)
        return _cut_at_mark(text, final) if continue_final_message else text

    def _run(self, context: dict[str, Any]) -> str:
        try:
            return self._limit.run(self._rendered, context)
        except OverrunError:
            message = f"the chat template does not end within {self._limit.limit_s:g} s"
            raise TemplateOverrunError(message) from None
        except Exception as error:  # a template is foreign code and may raise anything
            raise TemplateRefusedError(f"{type(error).__name__}: {error}") from error

    def _rendered(self, context: dict[str, Any]) -> str:
        """What `Template.render` does, but for copies of the context and a prettier traceback."""
        shared = self._template.new_context(context, shared=True)
        return "".join(self._template.root_render_func(shared))


class _GenerationTag(Extension):
    """`{% generation %}` marks what the model wrote, for training; for a prompt it is nothing."""

    tags = {"generation"}  # noqa: RUF012  # the type that jinja2 declares for it

    def parse(self, parser: Parser) -> list[nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


def _to_json(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | str | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """Unlike jinja2's own filter this escapes nothing for HTML."""
    return json.dumps(
        value,
        ensure_ascii=ensure_ascii,
        indent=indent,
        separators=separators,
        sort_keys=sort_keys,
    )


def _raise_exception(message: str) -> None:
    raise jinja2.TemplateError(message)


def _strftime_now(form: str) -> str:
    return datetime.now().strftime(form)  # noqa: DTZ005  # the engine takes its local time too


class _Sandbox(ImmutableSandboxedEnvironment):
    """The sandbox of `transformers`, with short cuts for what templates do most: `message.role`.

    The library asks a dictionary for an attribute first, fails, and takes the item; with an
    exception for each field of each message that is most of the time of a long chat. Where the
    name is no attribute of dictionaries the outcome is known.

    Of other objects it asks whether they are one of many things that must not be touched. A loop, a
    namespace and a text are none; what is read of them is harmless where it is a plain value, or a
    method of a text that is not `format`.

    And products are looked at before they are made.
    """

    intercepted_binops = frozenset(("*", "**"))

    def getattr(self, obj: Any, attribute: str) -> Any:
        """See `jinja2.Environment`."""
        kind = type(obj)
        if kind is dict:
            if attribute not in _DICT_ATTRIBUTES:
                # Most messages have no `tool_calls`; an exception would cost more than all else.
                value = obj.get(attribute, _ABSENT)
                return self.undefined(obj=obj, name=attribute) if value is _ABSENT else value
        elif kind in _HARMLESS and not attribute.startswith("_"):
            value = getattr(obj, attribute, None)
            if type(value) in _PLAIN:
                return value
        elif kind is str and attribute in _HARMLESS_METHODS:
            return getattr(obj, attribute)
        return super().getattr(obj, attribute)

    def call(self, context: Context, obj: Any, /, *args: Any, **kwargs: Any) -> Any:
        """See `SandboxedEnvironment`."""
        if type(obj) is BuiltinMethodType and type(obj.__self__) is str:
            # None of them is forbidden, or wants more than it is given.
            kwargs.pop("_loop_vars", None)
            kwargs.pop("_block_vars", None)
            return obj(*args, **kwargs)
        return super().call(context, obj, *args, **kwargs)

    def call_binop(self, context: Context, operator: str, left: Any, right: Any) -> Any:
        """See `SandboxedEnvironment`; raises `SecurityError` for what would be too large."""
        if _is_too_large(operator, left, right):
            raise SecurityError(f"the result of {operator} would be too large")
        return super().call_binop(context, operator, left, right)


def _is_too_large(operator: str, left: Any, right: Any) -> bool:
    if isinstance(left, int) and isinstance(right, int):
        bits = left.bit_length()
        most = bits * right if operator == "**" else bits + right.bit_length()
        return most > MAX_BITS
    if isinstance(left, Sized) and isinstance(right, int):
        return len(left) * right > MAX_REPEATED
    return isinstance(right, Sized) and isinstance(left, int) and len(right) * left > MAX_REPEATED


_DICT_ATTRIBUTES = frozenset(dir(dict))
_HARMLESS = (LoopContext, Namespace)
_HARMLESS_METHODS = frozenset(
    name for name in dir(str) if not name.startswith("_") and name not in ("format", "format_map")
)
_PLAIN = (bool, int, str, list, dict)
_ABSENT = object()


def _environment() -> ImmutableSandboxedEnvironment:
    environment = _Sandbox(
        trim_blocks=True, lstrip_blocks=True, extensions=[_GenerationTag, loopcontrols]
    )
    environment.filters["tojson"] = _to_json
    environment.globals["raise_exception"] = _raise_exception
    environment.globals["strftime_now"] = _strftime_now
    return environment


_ENVIRONMENT = _environment()


def _last_text(message: dict[str, Any]) -> str:
    content = message.get("content")
    parts = content if isinstance(content, list) else [{"text": content}]
    for part in reversed(parts):
        text = part.get("text") if isinstance(part, dict) else None
        if isinstance(text, str):
            return text
    raise TemplateRefusedError("the final message has no text to continue")


def _marked(message: dict[str, Any]) -> dict[str, Any]:
    """The message with the mark behind its last text."""
    content = message["content"]
    if isinstance(content, str):
        return {**message, "content": content + _CONTINUE_MARK}
    last = max(place for place, part in enumerate(content) if isinstance(part.get("text"), str))
    part = {**content[last], "text": content[last]["text"] + _CONTINUE_MARK}
    return {**message, "content": [*content[:last], part, *content[last + 1 :]]}


def _cut_at_mark(text: str, final: str) -> str:
    """Cut behind the unfinished message; without its trailing space where that was stripped."""
    place = text.rfind(_CONTINUE_MARK.strip())
    if place < 0 or final.strip() not in text:
        raise TemplateRefusedError("the template leaves out the message to be continued")
    head = text[:place]
    return head if text.startswith(_CONTINUE_MARK, place) else head.rstrip()
