"""What the engine makes of messages before a template sees them."""

import json
from typing import Any

import pytest
from support.tokenizers import said

from kvrouter.tokenize.content_format import ContentFormat
from kvrouter.tokenize.messages import (
    MEDIA_MARK,
    UnreadableMessagesError,
    conversation,
    developer_as_system,
    has_media,
)

IMAGE = {"type": "image_url", "image_url": {"url": "data:image/png;base64,AA"}}


def part(text: Any) -> dict[str, Any]:
    return {"type": "text", "text": text}


def as_text(*messages: Any) -> list[dict[str, Any]]:
    return conversation(list(messages), ContentFormat.STRING)


def as_parts(*messages: Any) -> list[dict[str, Any]]:
    return conversation(list(messages), ContentFormat.OPENAI)


def test_text_parts_are_joined_with_a_newline() -> None:
    """T3: two parts are not the same tokens as one string; empty parts add no newline."""
    assert as_text(said([part("a"), part(""), "b"])) == [said("a\nb")]


def test_a_string_becomes_a_part_where_the_template_wants_parts() -> None:
    """T3: also an empty one."""
    assert as_parts(said("a"), said("")) == [said([part("a")]), said([part("")])]


@pytest.mark.parametrize(
    ("given", "text"),
    [
        ({"type": "refusal", "refusal": "no"}, "no"),
        ({"type": "input_text", "text": "in"}, "in"),
        ({"type": "output_text", "text": "out"}, "out"),
        ({"type": "thinking", "thinking": "hm"}, "hm"),
        ({"type": "text", "text": "a", "cache_control": {"type": "ephemeral"}}, "a"),
        ({"type": "text", "text": None}, None),
    ],
)
def test_each_kind_of_text_part_counts_as_text(given: dict[str, Any], text: str | None) -> None:
    assert as_text(said([given])) == [said(text or "")]
    assert as_parts(said([given])) == [said([part(text)] if text else [])]


def test_no_content_is_empty_content() -> None:
    assert as_text({"role": "assistant"}, said(None)) == [said("", "assistant"), said("")]
    assert as_parts({"role": "assistant"}) == [said([], "assistant")]


def call(arguments: Any, **more: Any) -> dict[str, Any]:
    function = {"name": "f", "arguments": arguments, "extra": 1}
    return {"index": 0, "type": "function", "function": function, "id": "c", **more}


def test_tool_calls_have_the_engines_order_of_keys() -> None:
    """T3: a template that prints a call prints `arguments` before `name` (recorded)."""
    [shown] = as_text(said(None, "assistant", tool_calls=[call('{"city": "Oslo"}')]))
    function = '{"arguments": {"city": "Oslo"}, "name": "f"}'
    expected = f'[{{"id": "c", "function": {function}, "type": "function"}}]'
    assert json.dumps(shown["tool_calls"]) == expected


@pytest.mark.parametrize("arguments", ["", "not json", "[1]", "7", None, [1], "[" * 100_000])
def test_arguments_that_are_no_object_become_an_empty_one(arguments: Any) -> None:
    """The history of a conversation must stay usable after a model wrote nonsense."""
    [shown] = as_text(said("", "assistant", tool_calls=[call(arguments)]))
    assert shown["tool_calls"][0]["function"]["arguments"] == {}


@pytest.mark.parametrize("calls", [None, []])
def test_no_tool_calls_leave_no_key(calls: Any) -> None:
    assert as_text(said("x", "assistant", tool_calls=calls)) == [said("x", "assistant")]


@pytest.mark.parametrize("name", ["reasoning", "reasoning_content"])
def test_reasoning_goes_under_both_names(name: str) -> None:
    [shown] = as_text(said("x", "assistant", **{name: "hm"}))
    assert (shown["reasoning"], shown["reasoning_content"]) == ("hm", "hm")


def test_reasoning_beside_a_null_content_is_lost() -> None:
    """The engine's types have no such message; with the key absent they do."""
    assert "reasoning" not in as_text(said(None, "assistant", reasoning="hm"))[0]
    assert "reasoning" in as_text({"role": "assistant", "reasoning": "hm"})[0]


def test_only_an_assistant_reasons_and_calls() -> None:
    assert as_text(said("x", tool_calls=[call("{}")], reasoning="hm")) == [said("x")]


def test_names_are_kept_and_unknown_fields_are_not() -> None:
    assert as_text(said("x", name="bob", mood="good")) == [said("x", name="bob")]
    assert as_text(said("x", name=7)) == [said("x")]


def test_a_tools_text_parts_are_joined_even_where_templates_want_parts() -> None:
    result = said([part("a"), part("b")], "tool", tool_call_id="c")
    assert as_parts(result) == [said("a\nb", "tool", tool_call_id="c")]


def test_a_tools_reference_stays_a_part() -> None:
    reference = {"type": "tool_reference", "name": "weather"}
    assert as_parts(said([part("a"), reference], "tool"))[0]["content"] == [part("a"), reference]


def test_the_line_that_one_client_adds_to_its_system_prompt_is_dropped() -> None:
    """It changes with each request, and would hide the prefix from every cache."""
    header = "x-anthropic-billing-header: cch=12;"
    assert as_text(said(f"{header}\nBe brief.", "system")) == [said("Be brief.", "system")]
    assert as_text(said([part(header), part("Hi")], "system")) == [said("Hi", "system")]
    assert as_text(said(header)) == [said(header)]


def test_media_stand_before_the_text_of_their_message() -> None:
    """T7: as the engine's placeholders do, for templates that want text."""
    assert as_text(said([part("a"), IMAGE]))[0]["content"] == f"{MEDIA_MARK}\na"


def test_media_stand_in_their_place_where_templates_want_parts() -> None:
    """T7"""
    shown = as_parts(said([part("a"), IMAGE, part("b")]))
    assert [p["text"] for p in shown[0]["content"]] == ["a", MEDIA_MARK, "b"]


@pytest.mark.parametrize(
    "odd",
    [
        IMAGE,
        {"type": "input_audio", "input_audio": {"data": ""}},
        {"type": "video_url", "video_url": {"url": "x"}},
        {"type": "hologram"},
        {"type": ["text"]},
        {"image_url": "http://x"},
    ],
)
def test_whatever_is_not_text_is_media(odd: dict[str, Any]) -> None:
    assert has_media([said([part("a"), odd])])
    assert not has_media([said([part("a"), "b"]), said("c"), said(None)])


@pytest.mark.parametrize(
    "messages",
    [
        None,
        "hi",
        [7],
        [{"content": "x"}],
        [{"role": 1, "content": "x"}],
        [said(7)],
        [said([7])],
        [said([part(7)])],
        [said("", "assistant", tool_calls=[7])],
        [said("", "assistant", tool_calls={"a": 1})],
        [said("", "assistant", tool_calls=[{"type": "custom", "custom": {}}])],
    ],
)
def test_what_is_no_conversation_is_refused(messages: Any) -> None:
    """The engine answers 400; the router only must not fall over it."""
    with pytest.raises(UnreadableMessagesError):
        conversation(messages, ContentFormat.STRING)


def test_the_clients_messages_stay_as_they_are() -> None:
    given = [said([part("a")]), said("", "assistant", tool_calls=[call("{}")])]
    before = json.dumps(given)
    conversation(given, ContentFormat.OPENAI)
    assert json.dumps(given) == before


def test_a_developer_and_a_tool_with_a_content_alone_are_more_than_that() -> None:
    """The engine's type of the one has tools; the other's parts are joined."""
    assert as_text(said("d", "developer")) == [said("d", "developer", tools=None)]
    assert as_parts(said([part("a"), part("b")], "tool")) == [said("a\nb", "tool")]


def test_without_a_developer_system_messages_stay_where_they_are() -> None:
    messages = as_text(said("a"), said("s", "system"))
    assert developer_as_system(messages) == messages


def test_a_leading_developer_becomes_the_system() -> None:
    """T3: recorded."""
    messages = as_parts(said("d", "developer", name="bob", tools=[]), said("a"))
    expected = [said([part("d")], "system", name="bob"), said([part("a")])]
    assert developer_as_system(messages) == expected


def test_several_system_messages_are_merged_at_the_front() -> None:
    """Many templates allow a system message in the first place only."""
    messages = as_parts(said("s", "system"), said("a"), said([part("d"), part("e")], "developer"))
    assert developer_as_system(messages) == [said("s\n\nd\ne", "system"), said([part("a")])]
