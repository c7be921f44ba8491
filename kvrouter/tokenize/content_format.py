"""Which form of message content a chat template expects.

The engine looks at the template once: if it loops over a message's content, it wants a list of
parts (`openai`), else text (`string`). Prompts differ between the two, so this has to reach the
engine's own verdict for every template, its quirks included: a loop over something named plainly
`content` counts, a loop with several targets stops the search with `string`.
"""

from collections.abc import Iterator
from enum import StrEnum

from jinja2 import nodes


class ContentFormat(StrEnum):
    """What the engine hands to the template as `message.content`."""

    STRING = "string"
    OPENAI = "openai"


class _UnusualTemplateError(Exception):
    """The search met a loop or an assignment with several targets."""


def detect_content_format(template: nodes.Template) -> ContentFormat:
    """Say which form a parsed template expects."""
    try:
        loops = any(True for _ in _loops_over_content(template))
    except _UnusualTemplateError:
        return ContentFormat.STRING
    return ContentFormat.OPENAI if loops else ContentFormat.STRING


def _loops_over_content(root: nodes.Template) -> Iterator[str]:
    messages = list(_message_names(root))
    bound = _macro_loops(root, messages)
    for loop in root.find_all(nodes.For):
        if any(_reads(loop.iter, message, "content") for message in messages):
            yield _target(loop.target)
        elif isinstance(loop.iter, nodes.Name):
            parameters = bound.get(id(loop))
            wanted = {"content"} if parameters is None else parameters
            if loop.iter.name in wanted:
                yield _target(loop.target)


def _message_names(root: nodes.Template) -> Iterator[str]:
    """The loop variables that stand for one message."""
    lists = list(_aliases(root, "messages"))
    for loop in root.find_all(nodes.For):
        if any(_reads(loop.iter, name) for name in lists):
            yield _target(loop.target)


def _aliases(root: nodes.Template, name: str) -> Iterator[str]:
    """The name itself and every variable that was assigned from it, directly or not."""
    known, waiting = {name}, [name]
    while waiting:
        source = waiting.pop(0)
        yield source
        for assignment in root.find_all(nodes.Assign):
            if _reads(assignment.node, source):
                alias = _target(assignment.target)
                if alias not in known:
                    known.add(alias)
                    waiting.append(alias)


def _macro_loops(root: nodes.Template, messages: list[str]) -> dict[int, set[str]]:
    """For each loop inside a macro (by id): the macro's parameters that receive a content."""
    bound: dict[int, set[str]] = {}
    for macro in root.find_all(nodes.Macro):
        parameters = _content_parameters(root, macro, messages)
        for loop in macro.find_all(nodes.For):
            bound[id(loop)] = parameters or bound.get(id(loop), set())
    return bound


def _content_parameters(root: nodes.Template, macro: nodes.Macro, messages: list[str]) -> set[str]:
    names = [argument.name for argument in macro.args]
    found: set[str] = set()
    for call in root.find_all(nodes.Call):
        if not (isinstance(call.node, nodes.Name) and call.node.name == macro.name):
            continue
        given = [*zip(names, call.args, strict=False), *((k.key, k.value) for k in call.kwargs)]
        found |= {
            name
            for name, value in given
            if name in names and any(_reads(value, message, "content") for message in messages)
        }
    return found


def _reads(node: nodes.Node, name: str, key: str | None = None) -> bool:
    """Whether an expression is the variable (or its attribute `key`), filtered or sliced or not."""
    while True:
        if isinstance(node, nodes.Filter | nodes.Test):
            if node.node is None:
                return False
            node = node.node
        elif isinstance(node, nodes.Getitem) and isinstance(node.arg, nodes.Slice):
            node = node.node
        else:
            break
    if key is None:
        return _is_name(node, name)
    if isinstance(node, nodes.Getitem):
        return (
            _is_name(node.node, name)
            and isinstance(node.arg, nodes.Const)
            and node.arg.value == key
        )
    return isinstance(node, nodes.Getattr) and _is_name(node.node, name) and node.attr == key


def _is_name(node: nodes.Node, name: str) -> bool:
    return isinstance(node, nodes.Name) and node.ctx == "load" and node.name == name


def _target(node: nodes.Node) -> str:
    if not isinstance(node, nodes.Name):
        raise _UnusualTemplateError
    return node.name
