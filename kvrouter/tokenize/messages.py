"""OpenAI chat messages -> what the engine hands to the chat template.

The engine validates messages into typed dictionaries and takes them apart and together again
before a template sees them. What of that shows in a rendered prompt is done here in the same way:
the order of keys that a template may print, text parts joined with a newline for templates that
want text, strings wrapped into parts for templates that loop over them, tool arguments parsed.

Pictures and sound have no text: `MEDIA_MARK` stands where the first of them would begin, so that
the text before it can be found in the rendered prompt.
"""

import json
from collections.abc import Sequence
from typing import Any

from kvrouter.tokenize.content_format import ContentFormat

MEDIA_MARK = "\ue000media\ue001"

_TEXT_PARTS = frozenset({"text", "input_text", "output_text", "refusal"})
_MEDIA_KEYS = (
    "image_url",
    "input_image",
    "image_embeds",
    "image_pil",
    "audio_embeds",
    "audio_url",
    "input_audio",
    "video_embeds",
    "video_url",
    "prompt_embeds",
)
_TEXT_KEYS = {"thinking": "thinking", "tool_reference": "name", "refusal": "refusal"}
_PLAIN_PARTS = _TEXT_PARTS | {"thinking", "tool_reference"}
_PLAIN_ROLES = ("user", "assistant", "system")
"""With a role and a content alone their messages are what they seem to be: most of most chats."""
_PLAIN_FIELDS = 2
_CLIENT_HEADER = "x-anthropic-billing-header"


class UnreadableMessagesError(Exception):
    """These are no messages; the engine will answer 400."""


def conversation(messages: Any, content_format: ContentFormat) -> list[dict[str, Any]]:
    """Convert messages into what the template sees; raises `UnreadableMessagesError`."""
    if not isinstance(messages, list):
        raise UnreadableMessagesError("messages is not a list")
    return [_message(message, content_format) for message in messages]


def has_media(messages: Any) -> bool:
    """Whether any message has a part that is not text."""
    for message in messages if isinstance(messages, list) else []:
        parts = message.get("content") if isinstance(message, dict) else None
        if isinstance(parts, list) and any(isinstance(p, dict) and _is_media(p) for p in parts):
            return True
    return False


def developer_as_system(messages: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """What the engine does for a template that does not know the role `developer`.

    The role becomes `system`; when that leaves system messages behind the first place, all of them
    are merged into one at the front (and then as text, even for a template that wants parts).
    """
    if "developer" not in [message["role"] for message in messages]:
        return messages
    renamed = [
        {name: value for name, value in message.items() if name != "tools"} | {"role": "system"}
        if message["role"] == "developer"
        else message
        for message in messages
    ]
    system = [message for message in renamed if message["role"] == "system"]
    if len(system) == 1 and renamed[0] is system[0]:
        return renamed
    texts = [text for text in (_plain_text(message["content"]) for message in system) if text]
    others = [message for message in renamed if message["role"] != "system"]
    return [{"role": "system", "content": "\n\n".join(texts)}, *others]


def _message(message: Any, content_format: ContentFormat) -> dict[str, Any]:
    role = message.get("role") if isinstance(message, dict) else None
    if not isinstance(role, str):
        raise UnreadableMessagesError("a message has no role")
    content = _content(message.get("content"), role, content_format)
    if len(message) == _PLAIN_FIELDS and role in _PLAIN_ROLES and "content" in message:
        return {"role": role, "content": content}
    shown: dict[str, Any] = {"role": role, "content": content}
    if role == "assistant":
        shown |= _assistant_fields(message)
    elif role == "tool":
        shown |= _tool_fields(message, content)
    for name in ("name", "task"):
        if isinstance(message.get(name), str):
            shown[name] = message[name]
    if role == "developer":
        shown["tools"] = message.get("tools")
    return shown


def _content(content: Any, role: str, content_format: ContentFormat) -> str | list[dict[str, Any]]:
    if isinstance(content, str) and content_format is ContentFormat.STRING and role != "system":
        return content  # most messages of most chats
    parts = _parts(content)
    if role == "system":
        parts = _without_client_header(parts)
    return _as_text(parts) if content_format is ContentFormat.STRING else _as_parts(parts)


def _parts(content: Any) -> list[Any]:
    if content is None:
        return []
    if isinstance(content, str):
        return [content]
    if not isinstance(content, list):
        raise UnreadableMessagesError("a message's content is neither text nor a list of parts")
    return content


def _as_text(parts: Sequence[Any]) -> str:
    """Empty parts are left out; placeholders of media come before the text of their message."""
    texts = [text for part in parts if (text := _text(part))]
    media = (
        [MEDIA_MARK] if any(isinstance(part, dict) and _is_media(part) for part in parts) else []
    )
    return "\n".join(media + texts)


def _as_parts(parts: Sequence[Any]) -> list[dict[str, Any]]:
    shown: list[dict[str, Any]] = []
    for part in parts:
        if isinstance(part, dict) and _is_media(part):
            shown.append({"type": "text", "text": MEDIA_MARK})
        elif isinstance(part, dict) and part.get("type") == "tool_reference":
            shown.append({"type": "tool_reference", "name": part.get("name")})
        elif (text := _text(part)) is not None:
            shown.append({"type": "text", "text": text})
    return shown


def _text(part: Any) -> str | None:
    if isinstance(part, str):
        return part
    if not isinstance(part, dict):
        raise UnreadableMessagesError("a part of a content is neither text nor an object")
    if _is_media(part):
        return None
    key = _TEXT_KEYS.get(str(part.get("type")), "text")
    text = part.get(key)
    if text is not None and not isinstance(text, str):
        raise UnreadableMessagesError("the text of a part is no text")
    return text


def _is_media(part: dict[str, Any]) -> bool:
    kind = part.get("type", "text")
    plain = isinstance(kind, str) and kind in _PLAIN_PARTS
    return not plain or any(part.get(key) is not None for key in _MEDIA_KEYS)


def _without_client_header(parts: list[Any]) -> list[Any]:
    """Drop the line by which one client marks each request: the engine drops it too."""
    kept: list[Any] = []
    for part in parts:
        is_text = isinstance(part, dict) and part.get("type") == "text"
        text = part.get("text") if is_text else part
        if not (isinstance(text, str) and text.startswith(_CLIENT_HEADER)):
            kept.append(part)
        elif rest := text.partition("\n")[2]:
            kept.append(rest)
    return kept


def _assistant_fields(message: dict[str, Any]) -> dict[str, Any]:
    fields: dict[str, Any] = {}
    calls = message.get("tool_calls")
    if calls:
        if not isinstance(calls, list):
            raise UnreadableMessagesError("tool_calls is not a list")
        fields["tool_calls"] = [_tool_call(call) for call in calls]
    reasoning = message.get("reasoning")
    if reasoning is None:
        reasoning = message.get("reasoning_content")
    # Beside an explicit null content the engine's types have no place for it: it is dropped there.
    if reasoning is not None and message.get("content", "") is not None:
        fields["reasoning"] = fields["reasoning_content"] = reasoning
    return fields


def _tool_call(call: Any) -> dict[str, Any]:
    """One call with its keys in the order of the engine's types: a template may print it whole."""
    function = call.get("function") if isinstance(call, dict) else None
    if not isinstance(function, dict) or call.get("type", "function") != "function":
        raise UnreadableMessagesError("a tool call is not a call of a function")
    shown = {key: call[key] for key in ("id", "function", "type") if key in call}
    shown["function"] = {"arguments": _arguments(function.get("arguments"))}
    if "name" in function:
        shown["function"]["name"] = function["name"]
    return shown


def _arguments(arguments: Any) -> dict[str, Any]:
    """The arguments as an object; what is none becomes an empty one, so a template can loop."""
    if isinstance(arguments, str) and arguments:
        try:
            arguments = json.loads(arguments)
        except (ValueError, RecursionError):
            return {}
    return arguments if isinstance(arguments, dict) else {}


def _tool_fields(message: dict[str, Any], content: str | list[dict[str, Any]]) -> dict[str, Any]:
    """A tool's result that is all text becomes one text even where templates want parts."""
    fields: dict[str, Any] = {}
    if "tool_call_id" in message:
        fields["tool_call_id"] = message["tool_call_id"]
    if isinstance(content, list) and all(part["type"] == "text" for part in content):
        fields["content"] = "\n".join(part["text"] for part in content)
    return fields


def _plain_text(content: str | list[dict[str, Any]]) -> str:
    if isinstance(content, str):
        return content
    return "\n".join(part["text"] for part in content if "text" in part)
