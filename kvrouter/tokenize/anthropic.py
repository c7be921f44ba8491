"""`/v1/messages` (Anthropic) -> the chat that the engine makes of it."""

import json
from dataclasses import dataclass, field
from typing import Any

from kvrouter.openai.body import RequestBody
from kvrouter.tokenize.chat import Chat, function_tool, template_variables

_CLIENT_HEADER = "x-anthropic-billing-header"


def anthropic_chat(request: RequestBody) -> Chat:
    """Read a `/v1/messages` request: system and messages, their blocks taken apart."""
    chat = Chat(messages=[], tools=_tools(request.tools))
    system = _system_text(request.get("system"))
    if system:
        chat.messages.append({"role": "system", "content": system})
    messages = request.messages
    for message in messages if isinstance(messages, list) else []:
        _add_message(chat, message)
    output = request.get("output_config")
    effort = output.get("effort") if isinstance(output, dict) else None
    thinking = request.get("thinking")
    if isinstance(thinking, dict) and thinking.get("type") == "disabled":
        # Which effort stands for "disabled" is a setting of the engine.
        chat.doubts.append("thinking is disabled")
        effort = "none"
    chat.variables = template_variables(request, chat, effort)
    return chat


def _system_text(system: Any) -> str:
    """The text blocks, with nothing between them, without the header that one client adds."""
    if isinstance(system, str):
        return system
    texts = [_block_text(block) for block in system] if isinstance(system, list) else []
    return "".join(text for text in texts if not text.startswith(_CLIENT_HEADER))


def _block_text(block: Any) -> str:
    text = block.get("text") if isinstance(block, dict) and block.get("type") == "text" else None
    return text if isinstance(text, str) else ""


def _add_message(chat: Chat, message: Any) -> None:
    role = message.get("role") if isinstance(message, dict) else None
    content = message.get("content") if isinstance(message, dict) else None
    if role == "system":
        # The engine moves it to the front where the template wants system messages first.
        chat.doubts.append("a system message within the conversation")
        chat.messages.append({"role": "system", "content": _system_text(content)})
    elif isinstance(content, list):
        _add_blocks(chat, role, content)
    else:
        chat.messages.append({"role": role, "content": content})


def _add_blocks(chat: Chat, role: Any, blocks: list[Any]) -> None:
    """One message; tool results in it become messages of their own, before it."""
    parts = _Parts()
    for block in blocks:
        kind = block.get("type") if isinstance(block, dict) else None
        if kind == "tool_result" and role == "user":
            _add_result(chat, block)
        elif not parts.take(kind, block):
            chat.doubts.append(f"a content block of an unknown kind ({kind})"[:80])
    if role != "user" or parts.shown:
        chat.messages.append(parts.message(role))


@dataclass(slots=True)
class _Parts:
    """What the blocks of one message become."""

    shown: list[dict[str, Any]] = field(default_factory=list)
    calls: list[dict[str, Any]] = field(default_factory=list)
    thoughts: list[str] = field(default_factory=list)

    def take(self, kind: Any, block: Any) -> bool:
        if kind == "text":
            if _block_text(block):
                self.shown.append({"type": "text", "text": block["text"]})
        elif kind == "tool_use":
            self.calls.append(_call(block))
        elif kind == "thinking":
            self.thoughts.append(str(block.get("thinking") or ""))
        elif kind == "image":
            self.shown.append({"type": "image_url"})
        else:
            return kind in ("redacted_thinking", "tool_reference")
        return True

    def message(self, role: Any) -> dict[str, Any]:
        message: dict[str, Any] = {"role": role}
        if self.thoughts:
            message["reasoning"] = "".join(self.thoughts)
        if self.calls:
            message["tool_calls"] = self.calls
        if self.shown:
            alone = len(self.shown) == 1 and self.shown[0]["type"] == "text"
            message["content"] = self.shown[0]["text"] if alone else self.shown
        return message


def _call(block: dict[str, Any]) -> dict[str, Any]:
    return {
        "id": block.get("id"),
        "function": {
            "arguments": json.dumps(block.get("input") or {}),
            "name": block.get("name") or "",
        },
        "type": "function",
    }


def _add_result(chat: Chat, block: dict[str, Any]) -> None:
    content = block.get("content")
    if isinstance(content, list):
        if any(not isinstance(item, dict) or item.get("type") != "text" for item in content):
            chat.doubts.append("a tool result that is not text")
        texts = [_block_text(item) for item in content if isinstance(item, dict)]
        content = "\n".join(texts)
    message = {"role": "tool", "tool_call_id": block.get("tool_use_id") or "", "content": content}
    chat.messages.append({**message, "content": content or ""})


def _tools(tools: Any) -> list[dict[str, Any]] | None:
    if not isinstance(tools, list):
        return None
    return [
        function_tool({**tool, "parameters": _schema(tool.get("input_schema"))})
        for tool in tools
        if isinstance(tool, dict)
    ]


def _schema(schema: Any) -> Any:
    return {**schema, "type": schema.get("type", "object")} if isinstance(schema, dict) else schema
