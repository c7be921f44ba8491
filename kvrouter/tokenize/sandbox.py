"""What a chat template runs in: the sandbox of the engine's `transformers` library, made faster."""

import json
from collections.abc import Sized
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

MAX_REPEATED = 10_000_000
"""Items of a repeated text or list. `*` and `**` are single instructions, and no limit of time
would end them."""
MAX_BITS = 100_000
"""Of a product or a power."""


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


ENVIRONMENT = _environment()
