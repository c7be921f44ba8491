"""Chat templates, rendered as the engine's `transformers` library renders them.

A template is code of the model's author: it runs in a sandbox, for a bounded time, and may raise
anything. Rendering is thread-safe.
"""

from collections.abc import Mapping, Sequence
from typing import Any

from kvrouter.tokenize.content_format import ContentFormat, detect_content_format
from kvrouter.tokenize.sandbox import ENVIRONMENT
from kvrouter.tokenize.time_limit import OverrunError, TimeLimit

RENDERING = TimeLimit(1.0)
"""A thousand messages take 4 ms."""

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
            self._template = limit.run(ENVIRONMENT.from_string, source)
            tree = limit.run(ENVIRONMENT.parse, source)
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


def _last_text(message: dict[str, Any]) -> str:
    content = message.get("content")
    parts = content if isinstance(content, list) else [{"text": content}]
    for part in parts[::-1]:
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
