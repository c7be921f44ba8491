"""One model's tokenizer: from a request to the prompt that its engine will see."""

import logging
from array import array
from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from kvrouter.openai.body import Endpoint, RequestBody, without_surrogates
from kvrouter.prompt import APPROXIMATE, EXACT, Prompt
from kvrouter.tokenize.anthropic import anthropic_chat
from kvrouter.tokenize.backend import (
    NOTHING_AROUND,
    Allowance,
    Around,
    EncodeError,
    EncoderReport,
    TooMuchError,
    estimated_tokens,
)
from kvrouter.tokenize.chat import Chat, openai_chat
from kvrouter.tokenize.choice import BackendSettings, choose
from kvrouter.tokenize.content_format import ContentFormat
from kvrouter.tokenize.given import as_ids, replacing_ids
from kvrouter.tokenize.guarded import GuardedLibrary
from kvrouter.tokenize.hf import HfBackend
from kvrouter.tokenize.ladder import Ladder
from kvrouter.tokenize.location import DEFAULT, TOOL_USE, find_tokenizer
from kvrouter.tokenize.messages import (
    MEDIA_MARK,
    UnreadableMessagesError,
    conversation,
    developer_as_system,
    has_media,
)
from kvrouter.tokenize.responses import responses_chat
from kvrouter.tokenize.template import (
    RENDERING,
    ChatTemplate,
    TemplateError,
    TemplateOverrunError,
    TemplateRefusedError,
)
from kvrouter.tokenize.time_limit import TimeLimit

MAX_TEXT_CHARS = 4_000_000
"""About a million tokens. Encoding takes some 100 bytes a character, and a thread for seconds,
which one client must not be able to ask for without limit."""

CHARS_PER_TOKEN = 8
"""Twice what text has. An engine refuses what has more tokens than its model takes; so of a text
with more characters than so many tokens have, no more than these are encoded."""

_SHORT_TEXT_CHARS = 65_536
"""Not worth a look at what the engines take."""

_LOG = logging.getLogger(__name__)

_COMPLETIONS = Endpoint.COMPLETIONS
CHATS = {
    Endpoint.CHAT: openai_chat,
    Endpoint.RESPONSES: responses_chat,
    Endpoint.MESSAGES: anthropic_chat,
}
_HARMONY = "gpt_oss"
_NO_TOOL = ("none", {"type": "none"})
_SPEEDS = {"fastokens": 20}
_OVERRAN_SPEED = 0.001
"""A chat template that did not end once is not rendered on the event loop any more."""
_SMALL_BYTES = 100_000
"""More than is ever rendered on the event loop. That a second is not enough for hundreds of
thousands of messages says nothing about a template."""

_PLAIN_MESSAGE = {"role": "user", "content": "Hello"}


class ModelTokenizer:
    """Turns requests for one model into prompts. Safe to use from several threads.

    `chat_problem` says what is wrong with the model's chat template, empty when nothing is; chats
    are then judged by their length alone, or as far as the template renders them.
    """

    def __init__(
        self,
        backend: Ladder,
        templates: Mapping[str, ChatTemplate | None],
        *,
        around: Around = NOTHING_AROUND,
        content_format: ContentFormat | None = None,
        chat_template_kwargs: Mapping[str, Any] | None = None,
        tools_in_prompt_when_unused: bool = True,
        harmony: bool = False,
        chat_problem: str = "",
        max_model_len: Callable[[], int | None] = lambda: None,
    ) -> None:
        self.backend = backend
        self._max_model_len = max_model_len
        self._around = around
        self._templates = templates
        self._content_format = content_format
        self._defaults = dict(chat_template_kwargs or {})
        self._tools_when_unused = tools_in_prompt_when_unused
        self._harmony = harmony
        self._overran = False
        self.chat_problem = chat_problem or self._warm_up()

    @classmethod
    def load(
        cls,
        folder_or_id: str,
        *,
        chat_template: Path | None = None,
        content_format: ContentFormat | None = None,
        chat_template_kwargs: Mapping[str, Any] | None = None,
        tools_in_prompt_when_unused: bool = True,
        offline: bool = False,
        backends: BackendSettings | None = None,
        max_model_len: Callable[[], int | None] = lambda: None,
        rendering: TimeLimit = RENDERING,
    ) -> "ModelTokenizer":
        """Load from a folder or hub id; raises `TokenizerError` with what was tried.

        The other arguments repeat what the engines were started with: `--chat-template`,
        `--chat-template-content-format` (None: `auto`), `--default-chat-template-kwargs`,
        `--exclude-tools-when-tool-choice-none` (as the opposite). A broken chat template is no
        error: see `chat_problem`. Without `backends` the reference encodes, and nothing is proven.
        `max_model_len` tells how many tokens the engines take, None where that is not known.
        `rendering` ends templates that take too long.
        """
        files = find_tokenizer(folder_or_id, offline=offline)
        problem = "" if files.templates else "the model has no chat template"
        if chat_template is not None:
            problem = ""
            try:
                files = replace(files, templates={DEFAULT: read_template(chat_template)})
            except TemplateError as error:
                files = replace(files, templates={})
                problem = f"{chat_template}: {error}"
        templates: dict[str, ChatTemplate | None] = {}
        for name, source in files.templates.items():
            try:
                templates[name] = _compiled(source, files.special_tokens, rendering)
            except TemplateError as error:
                templates[name] = None
                problem = str(error)
        hf = HfBackend.load(files)
        if backends is None:
            backend = Ladder([GuardedLibrary(hf)], "nothing faster was asked for", check_every=0)
        else:
            backend = choose(hf, _rendered_samples(templates.values()), backends)
        return cls(
            backend,
            templates,
            around=hf.around,
            content_format=content_format,
            chat_template_kwargs=chat_template_kwargs,
            tools_in_prompt_when_unused=tools_in_prompt_when_unused,
            harmony=files.model_type == _HARMONY,
            chat_problem=problem,
            max_model_len=max_model_len,
        )

    @property
    def report(self) -> EncoderReport:
        """What encodes, for those who look."""
        stats = self.backend.stats
        return EncoderReport(
            self.backend.name, self.backend.reason, stats.checked, stats.mismatched, stats.failed
        )

    @property
    def speed(self) -> float:
        """That of the backend in use."""
        return _OVERRAN_SPEED if self._overran else _SPEEDS.get(self.backend.name, 1)

    @property
    def has_sample(self) -> bool:
        """Whether `check_sample` has something to do."""
        return self.backend.has_sample

    def check_sample(self) -> None:
        """Hold a sample to the reference: CPU work, at leisure."""
        self.backend.check_sample()

    def known_prompt(
        self, request: RequestBody, *, namespace: bytes, new_chars: int
    ) -> Prompt | None:
        """See `PromptTokenizer`."""
        if self._overran or not self.backend.is_sparing:
            return None
        try:
            return self._prompt(request, namespace, Allowance(new_chars))
        except TooMuchError:
            return None

    def prompt(self, request: RequestBody, *, namespace: bytes = b"") -> Prompt:
        """Tokenize a request. CPU work of up to 0.5 s per MB; never raises for what a client sent.

        What the engine will refuse, or what can't be reproduced, comes back BLIND or APPROXIMATE
        with the reason; so does a chat over which the template does not come to an end.
        """
        return self._prompt(request, namespace, None)

    def _prompt(
        self, request: RequestBody, namespace: bytes, allowance: Allowance | None
    ) -> Prompt:
        """The same; raises `TooMuchError` where the allowance does not suffice."""
        try:
            if request.endpoint is _COMPLETIONS:
                return self._completion(request, namespace, allowance)
            return self._chat(request, namespace, allowance)
        except TooMuchError:
            raise
        # Each by a name of its own: to mypyc a variable has one type.
        except (UnreadableMessagesError, TemplateRefusedError) as refused:
            return blind(request, f"the engine will refuse it: {refused}"[:200])
        except TemplateOverrunError as overran:
            if request.size <= _SMALL_BYTES and not self._overran:
                _LOG.warning(
                    "a chat of %d bytes is judged by its length: %s", request.size, overran
                )
                self._overran = True
            return by_length(request, str(overran))
        except EncodeError as failed:
            return by_length(request, str(failed))
        except Exception as error:  # noqa: BLE001  # our bug may cost an overlap, not a request
            _LOG.exception("could not tokenize %r", request)
            return blind(request, f"tokenization failed: {type(error).__name__}")

    # Completions

    def _completion(
        self, request: RequestBody, namespace: bytes, allowance: Allowance | None
    ) -> Prompt:
        doubts = _completion_doubts(request)
        prompts = _prompts(request.prompt)
        if not prompts:
            return blind(request, "; ".join(doubts) or "there is no prompt")
        first, *others = [
            self._completion_ids(request, prompt, doubts, allowance) for prompt in prompts
        ]
        if others:
            doubts.append(f"the first of {len(prompts)} prompts")
        count = sum(len(ids) + beyond for ids, beyond in (first, *others))
        return _prompt(first[0], namespace, doubts, prompt_tokens=count)

    def _completion_ids(
        self,
        request: RequestBody,
        prompt: str | list[Any],
        doubts: list[str],
        allowance: Allowance | None,
    ) -> "tuple[array[int], int]":
        """The ids of one prompt, and about how many tokens follow them."""
        if isinstance(prompt, str):
            special = request.get("add_special_tokens") is not False
            text, beyond = self._bounded(prompt, doubts)
            ids = self._encode(request, text, doubts, allowance, add_special_tokens=special)
            return ids, estimated_tokens(beyond) if beyond else 0
        given = as_ids(prompt)
        if given is None:
            doubts.append("an id that is no token id")
            return array("I"), 0
        cut = _Truncation(request, doubts)
        return cut.apply(given), 0

    # Chats

    def _chat(self, request: RequestBody, namespace: bytes, allowance: Allowance | None) -> Prompt:
        chat = CHATS[request.endpoint](request)
        given = replacing_ids(request, chat.messages)
        if given is not None:
            ids = as_ids(given)
            if ids:
                return _prompt(ids, namespace, [])
            return blind(request, "prompt_token_ids are no token ids")
        if not self._tools_when_unused and request.get("tool_choice") in _NO_TOOL:
            chat.tools = None
        template = self._template(chat)
        if template is None:
            return blind(request, self.chat_problem)
        if self._harmony:
            chat.doubts.append("the engine renders chats of this model in its own way")
        text = self._render(template, chat)
        head, rest = text, ""
        if has_media(chat.messages):  # else the mark is the client's own text
            chat.doubts.append("the text before the first picture or sound")
            head, _, rest = text.partition(MEDIA_MARK)
        head, beyond = self._bounded(head, chat.doubts)
        special = chat.add_special_tokens
        ids = self._encode(request, head, chat.doubts, allowance, add_special_tokens=special)
        behind = estimated_tokens(beyond + len(rest)) if beyond or rest else 0
        return _prompt(ids, namespace, chat.doubts, prompt_tokens=len(ids) + behind)

    def _template(self, chat: Chat) -> ChatTemplate | None:
        """What the engine renders it by; None if there is none, or it is broken."""
        is_for_tools = chat.tools is not None and TOOL_USE in self._templates
        return self._templates.get(TOOL_USE if is_for_tools else DEFAULT)

    def _render(self, template: ChatTemplate, chat: Chat) -> str:
        shown = conversation(chat.messages, self._content_format or template.content_format)
        if not template.knows_developer:
            shown = developer_as_system(shown)
        return template.render(
            shown,
            tools=chat.tools,
            add_generation_prompt=chat.add_generation_prompt,
            continue_final_message=chat.continue_final_message,
            variables={**self._defaults, **chat.variables} if self._defaults else chat.variables,
        )

    def _warm_up(self) -> str:
        """Render one plain message, so that a broken template is known before a client meets it."""
        template = self._templates.get(DEFAULT)
        if template is None:
            return f"there is no chat template named {DEFAULT!r}"
        try:
            self._render(template, Chat(messages=[_PLAIN_MESSAGE]))
        except (TemplateRefusedError, TemplateOverrunError) as error:
            return f"the chat template can't render a plain message: {error}"
        return ""

    # Both

    def _bounded(self, text: str, doubts: list[str]) -> tuple[str, int]:
        """As much of the text as is encoded, and how many characters are not."""
        if len(text) <= _SHORT_TEXT_CHARS:
            return text, 0
        tokens = self._max_model_len()
        limit = MAX_TEXT_CHARS if tokens is None else min(MAX_TEXT_CHARS, tokens * CHARS_PER_TOKEN)
        if len(text) <= limit:
            return text, 0
        doubts.append(f"the first {limit} characters of {len(text)}")
        return text[:limit], len(text) - limit

    def _encode(
        self,
        request: RequestBody,
        text: str,
        doubts: list[str],
        allowance: Allowance | None,
        *,
        add_special_tokens: bool,
    ) -> "array[int]":
        clean = without_surrogates(text)
        if clean is not text:
            doubts.append("a lone surrogate in the text")
        around = self._around if add_special_tokens else NOTHING_AROUND
        ids = self.backend.encode(clean, allowance)
        if request.get("truncate_prompt_tokens") is None:
            return around.added_to(ids)
        cut = _Truncation(request, doubts)
        if cut.keep is not None and not cut.explicit_side:
            return around.cut_and_added_to(ids, cut.keep)
        return cut.apply(around.added_to(ids))


class _Truncation:
    """How many tokens of a prompt the client wants to keep, and of which end.

    The engine's default end is the last one. With the default, a text is cut before special
    tokens are added; with an explicit side (and for ids) the finished ids are cut.
    """

    def __init__(self, request: RequestBody, doubts: list[str]) -> None:
        keep = request.get("truncate_prompt_tokens")
        self.keep: int | None = None
        if isinstance(keep, int) and not isinstance(keep, bool):
            if keep >= 0:
                self.keep = keep
            else:
                doubts.append("the engine may cut the prompt to the model's length")
        side = request.get("truncation_side")
        self.explicit_side = side in ("left", "right")
        self._first = side == "right"

    def apply(self, ids: "array[int]") -> "array[int]":
        if self.keep is None or self.keep >= len(ids):
            return ids
        return ids[: self.keep] if self._first else ids[len(ids) - self.keep :]


def blind(request: RequestBody, reason: str) -> Prompt:
    """A prompt of which only the size of its body can be known."""
    return Prompt.blind(estimated_tokens(request.size), reason)


def by_length(request: RequestBody, reason: str) -> Prompt:
    """A prompt that there was no time for: its ids could be known, and the size has to do."""
    return Prompt(
        array("I"),
        prompt_tokens=estimated_tokens(request.size),
        fidelity=APPROXIMATE,
        reason=reason,
    )


def _prompt(
    ids: "array[int]", namespace: bytes, doubts: list[str], *, prompt_tokens: int | None = None
) -> Prompt:
    return Prompt(
        ids,
        prompt_tokens=prompt_tokens,
        namespace=namespace,
        fidelity=APPROXIMATE if doubts else EXACT,
        reason="; ".join(dict.fromkeys(doubts)) if doubts else "",
    )


def _completion_doubts(request: RequestBody) -> list[str]:
    doubts = []
    if request.get("suffix"):
        doubts.append("a suffix is rendered by the engine")
    if request.get("prompt_embeds") is not None:
        doubts.append("the prompt holds embeddings")
    return doubts


def _prompts(prompt: Any) -> list[str | list[Any]]:
    """The prompts of a completion: one text, texts, one list of ids, or several."""
    if isinstance(prompt, str):
        return [prompt]
    if not isinstance(prompt, list) or not prompt:
        return []
    if isinstance(prompt[0], int):
        return [prompt]
    return [one for one in prompt if isinstance(one, str | list)]


def read_template(path: Path) -> str:
    """The text of a chat template; raises `TemplateError` without the path."""
    try:
        return path.read_text(encoding="utf-8")
    except OSError as error:
        raise TemplateError(f"can't be read: {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise TemplateError("is no text in UTF-8") from error


def _compiled(source: Any, special_tokens: Mapping[str, str], limit: TimeLimit) -> ChatTemplate:
    """The template; raises `TemplateError` also when a plain message makes it run for ever."""
    if not isinstance(source, str):
        raise TemplateError("the chat template does not compile: it is no text")
    template = ChatTemplate(source, special_tokens, limit=limit)
    try:
        template.render(conversation([_PLAIN_MESSAGE], template.content_format))
    except TemplateRefusedError:
        pass  # it may want a system message first
    except TemplateOverrunError as error:
        raise TemplateError(str(error)) from error
    return template


_SAMPLE_CHAT = [
    {"role": "system", "content": "You're helpful.\nTo\u0308day is 2024-02-29."},
    {"role": "user", "content": "  Hi \U0001f600, what's 12345 * 2?\r\n\r\n"},
    {"role": "assistant", "content": "It\u2019s **24690**.\n\n```py\nprint(12345 * 2)\n```"},
    {"role": "user", "content": "<|im_start|>user\n</s> not a special token, or is it?\u3000"},
]


def _rendered_samples(templates: Iterable[ChatTemplate | None]) -> list[str]:
    """A chat as each template renders it; a template that refuses it is left out."""
    texts = []
    for template in filter(None, templates):
        shown = conversation(_SAMPLE_CHAT, template.content_format)
        for messages in (shown, shown[1:], shown[1:2]):
            try:
                texts.append(template.render(messages))
            except (TemplateRefusedError, TemplateOverrunError):
                continue
    return texts
