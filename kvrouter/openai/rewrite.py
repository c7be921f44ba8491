"""Change one thing in a JSON body and leave every other byte as it came.

Parsing and printing a body again would lose duplicate keys, big numbers, the order of keys and
the client's way to escape. So the bytes are scanned for the few places that matter, and cut there.

The scan costs one step for each string and bracket, not for each byte. It expects a body that
`parse_body` took; what is no JSON object comes back unchanged.
"""

import json
import re
from collections.abc import Iterable, Iterator
from itertools import pairwise
from typing import NamedTuple

from kvrouter.openai.body import REPORT_MODE_XARG

_STRING = re.compile(rb'"[^"\\]*+(?:\\.[^"\\]*+)*+"', re.DOTALL)
_STRING_OR_BRACKET = re.compile(rb'"[^"\\]*+(?:\\.[^"\\]*+)*+"|[\[\]{}]', re.DOTALL)
_SPACE = re.compile(rb"[ \t\n\r]*")
_SCALAR = re.compile(rb"[^,\]}\s]+")
_BYTE_ORDER_MARK = b"\xef\xbb\xbf"


class _Span(NamedTuple):
    """Bytes from `start` up to `end`."""

    start: int
    end: int


class _Member(NamedTuple):
    key: str
    start: int
    """Where the key begins."""
    value: _Span


class _NoObjectError(Exception):
    """The scan met something that is not JSON, or not an object."""


def without_report_mode(body: bytes) -> bytes:
    """The body without `vllm_xargs.kv_cache_report_mode`.

    That argument lets an engine announce its cache hits a second time, so every copy of it goes,
    also one whose key is written with escapes. An emptied `vllm_xargs` stays, empty.
    """
    text = _as_utf8(body)
    try:
        cuts = list(_report_mode_cuts(text))
    except _NoObjectError:
        return body
    return _without(text, cuts) if cuts else body


def with_model(body: bytes, model: str) -> bytes:
    """The body with another `model`; unchanged when it names none."""
    written = json.dumps(model, ensure_ascii=True).encode()
    return with_value(body, "model", written)


def with_value(body: bytes, key: str, written: bytes) -> bytes:
    """The body with another value, in JSON, for a text; unchanged where there is no text.

    Of duplicate keys the last one counts, for the engine and here.
    """
    text = _as_utf8(body)
    try:
        named = [m.value for m in _members(text, _first(text)) if m.key == key]
    except _NoObjectError:
        return body
    if not named or text[named[-1].start : named[-1].start + 1] != b'"':
        return body
    return text[: named[-1].start] + written + text[named[-1].end :]


def with_member(body: bytes, key: str, written: bytes) -> bytes:
    """The body with one more member, its value in JSON, at the front of its members.

    The body must have others, and none of this name.
    """
    text = _as_utf8(body)
    at = _first(text)
    if text[at : at + 1] != b"{":
        return body
    member = json.dumps(key).encode() + b":" + written + b","
    return text[: at + 1] + member + text[at + 1 :]


def _as_utf8(body: bytes) -> bytes:
    """A body in UTF-16 or 32, which engines take, can only be cut when it is transcoded."""
    encoding = json.detect_encoding(body)
    if encoding.startswith("utf-8"):
        return body
    try:
        return body.decode(encoding, "surrogatepass").encode("utf-8", "surrogatepass")
    except UnicodeDecodeError:
        return body


def _report_mode_cuts(body: bytes) -> Iterator[_Span]:
    for member in _members(body, _first(body)):
        if member.key == "vllm_xargs" and body[member.value.start : member.value.start + 1] == b"{":
            yield from _cuts(list(_members(body, member.value.start)), REPORT_MODE_XARG)


def _cuts(members: list[_Member], key: str) -> Iterator[_Span]:
    """What to cut so that the members with this key are gone, and one comma with each.

    Behind a member that stays, the comma before goes too; else everything up to the next member.
    """
    kept = False
    for place, member in enumerate(members):
        if member.key != key:
            kept = True
        elif kept:
            yield _Span(members[place - 1].value.end, member.value.end)
        elif place + 1 < len(members):
            yield _Span(member.start, members[place + 1].start)
        else:
            yield _Span(member.start, member.value.end)


def _without(body: bytes, cuts: Iterable[_Span]) -> bytes:
    edges = [_Span(0, 0), *cuts, _Span(len(body), len(body))]
    return b"".join(body[before.end : after.start] for before, after in pairwise(edges))


def _first(body: bytes) -> int:
    at = len(_BYTE_ORDER_MARK) if body.startswith(_BYTE_ORDER_MARK) else 0
    return _past_space(body, at)


def _members(body: bytes, at: int) -> Iterator[_Member]:
    """The members of the object that begins at `at`."""
    if body[at : at + 1] != b"{":
        raise _NoObjectError
    at = _past_space(body, at + 1)
    while body[at : at + 1] != b"}":
        key = _STRING.match(body, at)
        if key is None:
            raise _NoObjectError
        colon = _past_space(body, key.end())
        value = _past_space(body, colon + 1)
        end = _value_end(body, value)
        yield _Member(_decoded(key.group()), at, _Span(value, end))
        at = _past_space(body, end)
        if body[at : at + 1] == b",":
            at = _past_space(body, at + 1)


def _decoded(key: bytes) -> str:
    try:
        return str(json.loads(key))
    except ValueError as error:
        raise _NoObjectError from error


def _value_end(body: bytes, at: int) -> int:
    first = body[at : at + 1]
    if first in (b"{", b"["):
        return _nested_end(body, at)
    match = (_STRING if first == b'"' else _SCALAR).match(body, at)
    if match is None:
        raise _NoObjectError
    return match.end()


def _nested_end(body: bytes, at: int) -> int:
    depth = 0
    for match in _STRING_OR_BRACKET.finditer(body, at):
        bracket = body[match.start()]
        if bracket in b"[{":
            depth += 1
        elif bracket in b"]}":
            depth -= 1
            if depth == 0:
                return match.end()
    raise _NoObjectError


def _past_space(body: bytes, at: int) -> int:
    match = _SPACE.match(body, at)
    return at if match is None else match.end()
