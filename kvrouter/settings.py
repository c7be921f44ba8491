"""Settings in words: the reference of all of them, and what a wrong one should have been. Pure.

Both are made from the types and docstrings of the configuration, so that they cannot differ from
what is read.
"""

import ast
import difflib
import inspect
import json
import re
import textwrap
from collections.abc import Iterator

import msgspec
from msgspec import inspect as types

WIDTH = 88
NO_LIMIT = 1e12
"""A bound of this size only keeps infinities out, and is worth a word to who exceeds it only."""

_STEP = re.compile(r"\.(\w+)|\[[^\]]*\]")


def reference(config: type[msgspec.Struct]) -> str:
    """All settings as a TOML file: each with its meaning, its default and what it may be."""
    notes = _notes(config)
    sections: list[str] = []
    for field in msgspec.structs.fields(config):
        section = _bare(types.type_info(field.type))
        if isinstance(section, types.StructType):
            sections.append("\n".join(_section(section, f"[{field.name}]", field.name, notes)))
        elif isinstance(section, types.ListType):
            item = _bare(section.item_type)
            sections.append("\n".join(_section(item, f"[[{field.name}]]", field.name, notes)))
    return "\n\n".join(sections) + "\n"


def _section(
    section: types.Type, header: str, path: str, notes: dict[tuple[str, str], str]
) -> Iterator[str]:
    if not isinstance(section, types.StructType):
        return
    yield from _comment(inspect.getdoc(section.cls) or "")
    yield header
    tables: list[tuple[types.Type, str, str]] = []
    for field in section.fields:
        note = notes.get((section.cls.__name__, field.name), "")
        kind = _bare(field.type)
        if isinstance(kind, types.ListType) and isinstance(kind.item_type, types.StructType):
            tables.append((kind.item_type, f"{path}.{field.name}", note))
            continue
        if note:
            yield ""
            yield from _comment(note)
        yield _line(field)
    for kind, name, note in tables:
        yield ""
        yield from _comment(note)
        yield from _section(kind, f"[[{name}]]", name, notes)


def _line(field: types.Field) -> str:
    may_be = describe(field.type)
    if field.required:
        return f"{field.name} = {json.dumps(example(field.type))}  # {may_be}"
    default = (
        field.default_factory() if field.default_factory is not msgspec.NODEFAULT else field.default
    )
    if default is None:
        return f"# {field.name} =  # {may_be}"
    told = isinstance(_bare(field.type), (types.BoolType, types.StrType))
    return f"{field.name} = {json.dumps(default)}" + ("" if told else f"  # {may_be}")


def _comment(text: str) -> Iterator[str]:
    for paragraph in text.split("\n\n"):
        yield from (f"# {line}" for line in _wrapped(paragraph))


def _wrapped(text: str) -> list[str]:
    return textwrap.wrap(" ".join(text.split()), WIDTH, break_on_hyphens=False)


def _notes(config: type[msgspec.Struct]) -> dict[tuple[str, str], str]:
    """The text below each field in the source of the module of `config`, by class and field."""
    module = inspect.getmodule(config)
    if module is None:
        return {}
    return {
        (kind.name, field.target.id): text.value.value
        for kind in ast.parse(inspect.getsource(module)).body
        if isinstance(kind, ast.ClassDef)
        for field, text in zip(kind.body, kind.body[1:], strict=False)
        if isinstance(field, ast.AnnAssign) and isinstance(field.target, ast.Name)
        if isinstance(text, ast.Expr) and isinstance(text.value, ast.Constant)
        if isinstance(text.value.value, str)
    }


def describe(kind: types.Type) -> str:
    """What a setting of this type may be, in words."""
    bare = _bare(kind)
    match bare:
        case types.Metadata():
            said = str((bare.extra_json_schema or {})["description"])
        case types.BoolType():
            said = "true or false"
        case types.IntType():
            said = f"a whole number{_bounds(bare)}"
        case types.FloatType():
            said = f"a number{_bounds(bare)}"
        case types.LiteralType():
            said = "one of " + ", ".join(str(value) for value in bare.values)
        case types.ListType():
            said = f"a list, each {describe(bare.item_type)}"
        case types.DictType():
            said = f"a table, each value {describe(bare.value_type)}"
        case types.StructType():
            said = "a table with " + ", ".join(field.name for field in bare.fields)
        case _:
            said = "text"
    return said


def example(kind: types.Type) -> object:
    """A value that a setting of this type may have; "" where its type names none."""
    if isinstance(kind, types.Metadata):
        return ((kind.extra_json_schema or {}).get("examples") or [""])[0]
    return ""


def _bounds(kind: types.IntType | types.FloatType) -> str:
    least = kind.ge if kind.ge is not None else kind.gt
    above = "above" if kind.gt is not None else "at least"
    if kind.le is not None and kind.le < NO_LIMIT:
        return f", {least:g} to {kind.le:g}"
    return "" if least is None else f", {above} {least:g}"


def _bare(kind: types.Type) -> types.Type:
    """Without None, and without what only describes it if that says nothing."""
    if isinstance(kind, types.UnionType):
        return _bare(next(each for each in kind.types if not isinstance(each, types.NoneType)))
    if isinstance(kind, types.Metadata) and not (kind.extra_json_schema or {}).get("description"):
        return _bare(kind.type)
    return kind


def hint(section: object, path: str, message: str) -> str:
    """What is wrong with a value that msgspec refused, and what to write in its place.

    `section` is the type of the outermost table, `path` leads from there to the value (`.name`,
    `[1].url`, `.models[...]`), `message` is msgspec's.
    """
    kind = types.type_info(section)
    for step in _STEP.finditer(path):
        kind = _inside(_bare(kind), step[1])
    kind = _bare(kind)
    if not isinstance(kind, types.StructType):
        most = f", at most {NO_LIMIT:g}" if f" <= {NO_LIMIT}" in message else ""
        return f"must be {describe(kind)}{most}"
    unknown = re.search(r"unknown field `(.+?)`", message)
    if unknown is None:
        return message
    names = [field.name for field in kind.fields]
    near = difflib.get_close_matches(unknown[1], names, n=1)
    advice = f"did you mean {near[0]}?" if near else f"there are {', '.join(names)}"
    return f"there is no {unknown[1]} here; {advice}"


def _inside(kind: types.Type, name: str | None) -> types.Type:
    match kind:
        case types.StructType():
            return next((field.type for field in kind.fields if field.name == name), kind)
        case types.ListType():
            return kind.item_type
        case types.DictType():
            return kind.value_type
        case _:
            return kind
