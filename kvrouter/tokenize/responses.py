"""`/v1/responses` -> the chat that the engine makes of it."""

from typing import Any

from kvrouter.openai.body import RequestBody
from kvrouter.tokenize.chat import Chat, function_tool, template_variables

_UNFINISHED = ("in_progress", "incomplete")


def responses_chat(request: RequestBody) -> Chat:
    """Read a `/v1/responses` request: instructions and input become messages."""
    chat = Chat(messages=[])
    _add_tools(chat, request.tools)
    instructions = request.get("instructions")
    if isinstance(instructions, str) and instructions:
        chat.messages.append({"role": "system", "content": instructions})
    if request.previous_response_id is not None:
        chat.doubts.append("the previous response is known to its engine alone")
    if request.get("prompt") is not None:
        chat.doubts.append("a stored prompt template")
    if request.get("truncation") not in (None, "disabled"):
        chat.doubts.append("the engine may cut the prompt to the model's length")
    _add_input(chat, request.get("input"))
    reasoning = request.get("reasoning")
    effort = reasoning.get("effort") if isinstance(reasoning, dict) else None
    chat.variables = template_variables(request, chat, effort)
    return chat


def _add_input(chat: Chat, given: Any) -> None:
    if isinstance(given, str):
        chat.messages.append({"role": "user", "content": given})
        return
    items = given if isinstance(given, list) else []
    for item in items:
        _add_item(chat, item)
    last = items[-1] if items and isinstance(items[-1], dict) else {}
    if last.get("type", "message") in ("message", "reasoning"):
        chat.continue_final_message = last.get("status") in _UNFINISHED
        chat.add_generation_prompt = not chat.continue_final_message


def _add_item(chat: Chat, item: Any) -> None:
    """One item; what an assistant said, thought and called in a row is one message."""
    kind = item.get("type", "message") if isinstance(item, dict) else None
    if kind == "function_call":
        _add_call(chat.messages, item)
    elif kind == "function_call_output":
        shown = {"role": "tool", "content": item.get("output"), "tool_call_id": item.get("call_id")}
        chat.messages.append(shown)
    elif kind == "reasoning":
        _merge(chat.messages, "reasoning", _reasoning(item))
    elif kind == "message" and item.get("role") == "assistant":
        _merge(chat.messages, "content", _first_text(item.get("content")))
    elif kind == "message":
        chat.messages.append(item)
    else:
        chat.doubts.append(f"an input item of an unknown kind ({kind})"[:80])


def _merge(messages: list[dict[str, Any]], name: str, text: str) -> None:
    last = messages[-1] if messages else {}
    if last.get("role") == "assistant" and last.get(name) is None:
        last[name] = text
    else:
        messages.append({"role": "assistant", name: text})


def _add_call(messages: list[dict[str, Any]], item: dict[str, Any]) -> None:
    name = item.get("name")
    if item.get("namespace"):
        name = f"{item['namespace']}__{name}"
    call = {
        "id": item.get("call_id"),
        "function": {"arguments": item.get("arguments"), "name": name},
        "type": "function",
    }
    last = messages[-1] if messages else {}
    if last.get("role") == "assistant":
        last.setdefault("tool_calls", []).append(call)
    else:
        messages.append({"role": "assistant", "tool_calls": [call]})


def _first_text(content: Any) -> str:
    first = content[0] if isinstance(content, list) and content else content
    text = first.get("text") if isinstance(first, dict) else first
    return text if isinstance(text, str) else ""


def _reasoning(item: dict[str, Any]) -> str:
    return _first_text(item.get("content")) or _first_text(item.get("summary"))


def _add_tools(chat: Chat, tools: Any) -> None:
    """Function tools have their fields beside `type` here; those that run elsewhere are hidden."""
    given = [tool for tool in tools if isinstance(tool, dict)] if isinstance(tools, list) else []
    if given:
        chat.tools = [function_tool(tool) for tool in given if tool.get("type") == "function"]
    if any(tool.get("type") in ("custom", "namespace") for tool in given):
        chat.doubts.append("tools that the engine turns into functions")
