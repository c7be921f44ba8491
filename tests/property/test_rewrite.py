"""Bodies that are changed in one place only."""

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvrouter.openai.rewrite import with_model, without_report_mode

MODE = "kv_cache_report_mode"

TEXT = st.text(st.characters(codec="utf-8")) | st.sampled_from(
    [MODE, "model", "vllm_xargs", '\\"{']
)
VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | TEXT,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(TEXT, inner, max_size=3),
    max_leaves=8,
)
KEYS = TEXT | st.sampled_from(["model", "vllm_xargs", "messages", MODE])
XARGS = st.dictionaries(st.sampled_from([MODE, "other", "model"]) | TEXT, VALUES, max_size=4)


@st.composite
def written(draw: st.DrawFn, value: Any) -> str:
    """A value as some client may write it: any white space, any escaping."""
    space = draw(st.sampled_from(["", " ", "\n\t", "\r\n  "]))
    if isinstance(value, dict):
        members = [
            f"{space}{draw(spelled(key))}{space}:{space}{draw(written(item))}{space}"
            for key, item in value.items()
        ]
        return "{" + (",".join(members) or space) + "}"
    if isinstance(value, list):
        return "[" + ",".join(space + draw(written(item)) for item in value) + "]"
    return draw(spelled(value)) if isinstance(value, str) else json.dumps(value)


@st.composite
def spelled(draw: st.DrawFn, text: str) -> str:
    """A string with some of its characters written as escapes that need not be."""
    if draw(st.booleans()):
        return json.dumps(text, ensure_ascii=draw(st.booleans()))
    place = draw(st.integers(0, max(0, len(text) - 1)))
    head, odd, tail = text[:place], text[place : place + 1], text[place + 1 :]
    units = odd.encode("utf-16-be").hex()
    escaped = "".join(f"\\u{units[i : i + 4]}" for i in range(0, len(units), 4))
    return json.dumps(head)[:-1] + escaped + json.dumps(tail)[1:]


BODIES: st.SearchStrategy[dict[str, Any]] = st.dictionaries(KEYS, VALUES, max_size=4).flatmap(
    lambda body: XARGS.map(lambda xargs: {**body, "vllm_xargs": xargs})
)


def is_subsequence(part: bytes, whole: bytes) -> bool:
    rest = iter(whole)
    return all(byte in rest for byte in part)


@given(st.data())
def test_only_the_report_mode_goes(data: st.DataObject) -> None:
    """F1: an engine must not be asked for a second announcement; all else stays as it came."""
    body = data.draw(BODIES)
    sent = data.draw(written(body)).encode()
    received = without_report_mode(sent)
    xargs: dict[str, Any] = body["vllm_xargs"]
    left = {name: value for name, value in xargs.items() if name != MODE}
    assert json.loads(received) == {**body, "vllm_xargs": left}
    assert is_subsequence(received, sent)
    if MODE not in xargs:
        assert received == sent


@given(st.data(), TEXT)
def test_only_the_model_changes(data: st.DataObject, model: str) -> None:
    body = data.draw(st.dictionaries(KEYS, VALUES, max_size=4))
    sent = data.draw(written(body)).encode()
    received = with_model(sent, model)
    named = isinstance(body.get("model"), str)
    assert json.loads(received) == ({**body, "model": model} if named else body)
    if not named:
        assert received == sent


@given(st.data())
def test_putting_the_model_back_gives_the_same_bytes(data: st.DataObject) -> None:
    body = data.draw(st.dictionaries(KEYS, VALUES, max_size=4)) | {"model": "plain-name"}
    sent = json.dumps(body).encode()
    assert with_model(with_model(sent, "x\n\u00e9"), "plain-name") == sent


@given(st.binary())
def test_what_is_no_object_stays_as_it_is(noise: bytes) -> None:
    """Such a body is refused before; a rewrite must still not fail on it."""
    assert isinstance(without_report_mode(b'{"vllm_xargs":{' + noise), bytes)
    assert isinstance(with_model(noise, "m"), bytes)


@pytest.mark.parametrize(
    ("sent", "received"),
    [
        ('{"vllm_xargs":{"kv_cache_report_mode":"full"}}', '{"vllm_xargs":{}}'),
        ('{"vllm_xargs":{"kv_cache_report_mode":"full" , "a":1}}', '{"vllm_xargs":{"a":1}}'),
        ('{"vllm_xargs":{"a":1 , "kv_cache_report_mode":[{"}":1}]}}', '{"vllm_xargs":{"a":1}}'),
        (
            '{"vllm_xargs":{"a":1,"kv_cache_report_mode":1,"b":2,"kv_cache_report_mod\\u0065":2}}',
            '{"vllm_xargs":{"a":1,"b":2}}',
        ),
        (
            '{"vllm_xargs":{"kv_cache_report_mode":1},"vllm_x\\u0061rgs":{"kv_cache_report_mode":2}}',
            '{"vllm_xargs":{},"vllm_x\\u0061rgs":{}}',
        ),
    ],
)
def test_report_mode_in_odd_places(sent: str, received: str) -> None:
    """F1: alone, first, last, twice, escaped."""
    assert without_report_mode(sent.encode()) == received.encode()


@pytest.mark.parametrize(
    "sent",
    [
        '{"kv_cache_report_mode":1}',
        '{"m":{"vllm_xargs":{"kv_cache_report_mode":1}},"x":1e400}',
        '\ufeff{"vllm_xargs":null}',
        '{"vllm_xargs":{"a":{"kv_cache_report_mode":1}}}',
    ],
)
def test_the_same_name_elsewhere_is_left_alone(sent: str) -> None:
    """F1: only `vllm_xargs` at the top has this meaning."""
    assert without_report_mode(sent.encode()) == sent.encode()


def test_of_duplicate_models_the_last_is_changed() -> None:
    sent = b'{"model":"a", "x":{"model":"n"}, "mod\\u0065l" : "b"}'
    assert with_model(sent, "c") == b'{"model":"a", "x":{"model":"n"}, "mod\\u0065l" : "c"}'


def test_a_body_in_utf_16_can_be_changed_too() -> None:
    """The engine's front end reads it, so it must not carry the argument past us."""
    sent = '{"model":"a","vllm_xargs":{"kv_cache_report_mode":"full"}}'.encode("utf-16")
    assert json.loads(without_report_mode(sent)) == {"model": "a", "vllm_xargs": {}}
    assert json.loads(with_model(sent, "b"))["model"] == "b"
