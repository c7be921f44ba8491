"""A request of any dialect, as the chat that the engine makes of it.

The engine serves `/v1/responses` and `/v1/messages` by converting them into chat messages, so one
form is enough here. Whatever a conversion can't reproduce is said in `doubts`: the prompt is then
approximate.
"""

from dataclasses import dataclass, field
from typing import Any

from kvrouter.openai.body import RequestBody


@dataclass(slots=True)
class Chat:
    """Messages, tools and options of one chat."""

    messages: Any
    tools: list[dict[str, Any]] | None = None
    variables: dict[str, Any] = field(default_factory=dict)
    """What the template sees besides messages and tools."""
    add_generation_prompt: bool = True
    continue_final_message: bool = False
    add_special_tokens: bool = False
    doubts: list[str] = field(default_factory=list)


def openai_chat(request: RequestBody) -> Chat:
    """Read a `/v1/chat/completions` request."""
    if request.has_messages_alone:
        return Chat(request.messages)
    chat = Chat(
        messages=request.messages,
        tools=_tools(request.tools),
        add_generation_prompt=request.get("add_generation_prompt") is not False,
        continue_final_message=request.get("continue_final_message") is True,
        add_special_tokens=request.get("add_special_tokens") is True,
    )
    chat.variables = template_variables(request, chat, request.get("reasoning_effort"))
    documents = request.get("documents")
    if documents is not None:
        chat.variables["documents"] = documents
    return chat


def template_variables(request: RequestBody, chat: Chat, effort: Any) -> dict[str, Any]:
    """The client's template arguments and what the engine derives from other fields.

    Fields win over the arguments of the same name; a null, or the word `auto`, never wins.
    """
    given = request.get("chat_template_kwargs")
    variables: dict[str, Any] = dict(given) if isinstance(given, dict) else {}
    brought = request.get("chat_template")
    if not variables and brought is None and effort is None:
        return variables  # most requests
    if brought is not None or variables.pop("chat_template", None) is not None:
        chat.doubts.append("the client brings a chat template")
    for name in ("add_generation_prompt", "continue_final_message", "tokenize"):
        variables.pop(name, None)
    if effort not in (None, "auto"):
        variables.setdefault("enable_thinking", effort != "none")
        variables["reasoning_effort"] = effort
    if "tools" in variables:
        given_tools = variables.pop("tools")
        chat.tools = given_tools if isinstance(given_tools, list) else None
    return {name: value for name, value in variables.items() if value not in (None, "auto")}


def function_tool(function: dict[str, Any], *, defer_loading: Any = None) -> dict[str, Any]:
    """A tool as the engine's model prints it: fixed order, absent fields as null, others gone."""
    shown = {name: function.get(name) for name in ("name", "description", "parameters")}
    shown |= {
        name: value
        for name in ("strict", "defer_loading")
        if (value := function.get(name)) is not None
    }
    if defer_loading is None:
        return {"type": "function", "function": shown}
    shown.setdefault("defer_loading", defer_loading)
    return {"type": "function", "function": shown, "defer_loading": defer_loading}


def _tools(tools: Any) -> list[dict[str, Any]] | None:
    if not isinstance(tools, list):
        return None
    return [
        function_tool(tool["function"], defer_loading=tool.get("defer_loading"))
        for tool in tools
        if isinstance(tool, dict) and isinstance(tool.get("function"), dict)
    ]
