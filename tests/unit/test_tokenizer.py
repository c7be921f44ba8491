"""From requests of each kind to prompts, and where tokenizers come from."""

import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.tokenizers import TINY, request, said, tiny, with_config, with_template
from tokenizers import Tokenizer, models, normalizers, processors

from kvrouter.openai.body import Endpoint, parse_body
from kvrouter.prompt import Fidelity, Prompt
from kvrouter.tokenize import ContentFormat, ModelTokenizer, ThreadSettings, TokenizerError
from kvrouter.tokenize.hf import HfBackend
from kvrouter.tokenize.location import TokenizerFiles, find_tokenizer
from kvrouter.tokenize.messages import MEDIA_MARK
from kvrouter.tokenize.time_limit import TimeLimit

IMAGE = {"type": "image_url", "image_url": {"url": "data:,"}}


def text_of(prompt: Prompt) -> str:
    plain = Tokenizer.from_file(str(TINY / "tokenizer.json"))
    return str(plain.decode(list(prompt.token_ids), skip_special_tokens=False))


def ids(text: str) -> list[int]:
    plain = Tokenizer.from_file(str(TINY / "tokenizer.json"))
    return list(plain.encode(text, add_special_tokens=False).ids)


def chat(*messages: Any, **more: Any) -> Prompt:
    return tiny().prompt(request(messages=list(messages), **more))


def completion(prompt: Any, **more: Any) -> Prompt:
    return tiny().prompt(request(Endpoint.COMPLETIONS, prompt=prompt, **more))


def responses(**fields: Any) -> Prompt:
    return tiny().prompt(request(Endpoint.RESPONSES, **fields))


def anthropic(**fields: Any) -> Prompt:
    return tiny().prompt(request(Endpoint.MESSAGES, **fields))


# Completions


def test_a_text_prompt_is_encoded() -> None:
    prompt = completion("def f(x): return x")
    assert list(prompt.token_ids) == ids("def f(x): return x")
    assert prompt.fidelity is Fidelity.EXACT


def test_ids_are_taken_as_they_are() -> None:
    """T2"""
    assert list(completion([5, 6, 7]).token_ids) == [5, 6, 7]


@pytest.mark.parametrize("prompts", [["a b", "c d e"], [[5, 6], [7, 8, 9]]])
def test_of_several_prompts_the_first_one_routes_and_all_count(prompts: list[Any]) -> None:
    """T2: a batch goes to one engine."""
    prompt = completion(prompts)
    lengths = [len(p if isinstance(p, list) else ids(p)) for p in prompts]
    assert len(prompt.token_ids) == lengths[0]
    assert prompt.prompt_tokens == sum(lengths)
    assert prompt.fidelity is Fidelity.APPROXIMATE
    assert "first of 2" in prompt.reason


def test_one_prompt_in_a_list_is_exact() -> None:
    assert completion(["a b"]).fidelity is Fidelity.EXACT


def test_an_empty_prompt_has_no_tokens() -> None:
    assert completion("").prompt_tokens == 0


def test_a_lone_surrogate_is_replaced_and_said() -> None:
    """T2: the engine will refuse it; the router routes it."""
    body = parse_body(Endpoint.COMPLETIONS, b'{"prompt":"a\\ud800b \\ud83d\\ude00"}')
    prompt = tiny().prompt(body)
    assert list(prompt.token_ids) == ids("a\ufffdb \U0001f600")
    assert "surrogate" in prompt.reason


@pytest.mark.parametrize(
    "prompt",
    [None, [], {}, 7, [{"a": 1}], [-1, 2], [2**40], [1.5], [1, "a"], [[1], [-1]], [["a"]], [None]],
)
def test_a_prompt_that_is_none_never_raises(prompt: Any) -> None:
    """T2: the engine judges validity."""
    result = completion(prompt)
    assert result.fidelity is not Fidelity.EXACT
    assert result.reason


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=6,
)
FIELDS = [
    *("messages", "prompt", "tools", "input", "instructions", "system", "chat_template_kwargs"),
    *("truncate_prompt_tokens", "kv_transfer_params", "documents", "reasoning", "thinking"),
]
ODD_MESSAGES = st.lists(
    st.fixed_dictionaries(
        {"role": st.sampled_from(["user", "assistant", "tool", "developer"]) | JSON},
        optional=dict.fromkeys(("content", "tool_calls", "type", "summary", "output"), JSON),
    ),
    max_size=3,
)


@given(
    st.sampled_from(Endpoint),
    st.dictionaries(st.sampled_from(FIELDS), JSON | ODD_MESSAGES, max_size=5),
)
def test_no_body_makes_it_raise_or_blames_us(kind: Endpoint, fields: dict[str, Any]) -> None:
    """T2: whatever a client sends, it is judged, and our own code does not stumble over it."""
    prompt = tiny().prompt(parse_body(kind, json.dumps(fields).encode()))
    assert prompt.prompt_tokens >= 0
    assert "tokenization failed" not in prompt.reason


@pytest.mark.parametrize("given_prompt", ["the quick brown fox jumps", ids("the quick brown fox")])
def test_truncation_keeps_the_last_tokens(given_prompt: Any) -> None:
    """As recorded; the engine's default side is the left one."""
    whole = list(completion(given_prompt).token_ids)
    assert list(completion(given_prompt, truncate_prompt_tokens=3).token_ids) == whole[-3:]
    assert list(completion(given_prompt, truncate_prompt_tokens=0).token_ids) == []
    assert list(completion(given_prompt, truncate_prompt_tokens=99).token_ids) == whole
    right = completion(given_prompt, truncate_prompt_tokens=3, truncation_side="right")
    assert list(right.token_ids) == whole[:3]


def test_truncation_to_the_models_length_is_not_known_here() -> None:
    prompt = completion("a b", truncate_prompt_tokens=-1)
    assert prompt.fidelity is Fidelity.APPROXIMATE
    assert list(prompt.token_ids) == ids("a b")


@pytest.mark.parametrize("more", [{"suffix": "z"}, {"prompt_embeds": "AA=="}])
def test_what_the_engine_adds_makes_it_approximate(more: dict[str, Any]) -> None:
    assert completion("a b", **more).fidelity is Fidelity.APPROXIMATE


def with_bos(folder: Path) -> ModelTokenizer:
    """The tiny vocabulary with a post-processor that adds `<|endoftext|>` in front."""
    special = {"bos_token": "<|endoftext|>"}
    folder = with_config(folder, chat_template="{{ bos_token }}x", **special)
    plain = Tokenizer.from_file(str(TINY / "tokenizer.json"))
    plain.post_processor = processors.TemplateProcessing(
        single="<|endoftext|> $A", special_tokens=[("<|endoftext|>", 0)]
    )
    plain.save(str(folder / "tokenizer.json"))
    return ModelTokenizer.load(str(folder))


def test_completions_get_the_special_tokens_and_chats_do_not(tmp_path: Path) -> None:
    """T5: in a chat the template writes them."""
    tokenizer = with_bos(tmp_path)
    plain = request(Endpoint.COMPLETIONS, prompt="a b")
    bare = request(Endpoint.COMPLETIONS, prompt="a b", add_special_tokens=False)
    talk = request(messages=[said("a")])
    again = request(messages=[said("a")], add_special_tokens=True)
    assert list(tokenizer.prompt(plain).token_ids) == [0, *ids("a b")]
    assert list(tokenizer.prompt(bare).token_ids) == ids("a b")
    assert list(tokenizer.prompt(talk).token_ids) == [0, *ids("x")]
    assert list(tokenizer.prompt(again).token_ids) == [0, 0, *ids("x")]


def test_truncated_text_keeps_its_special_tokens(tmp_path: Path) -> None:
    prompt = with_bos(tmp_path).prompt(
        request(Endpoint.COMPLETIONS, prompt="the quick brown fox", truncate_prompt_tokens=3)
    )
    assert list(prompt.token_ids) == [0, *ids("the quick brown fox")[-2:]]


# Chats


def test_two_chats_that_differ_late_share_their_beginning() -> None:
    """T1, T4: the prefix is what routing is about."""
    first = chat(said("s" * 200, "system"), said("one")).hashes(16)
    second = chat(said("s" * 200, "system"), said("two")).hashes(16)
    assert first[:8] == second[:8]
    assert first != second


def test_a_generation_prompt_can_be_left_out() -> None:
    """T3"""
    assert (
        text_of(chat(said("a"), add_generation_prompt=False)) == "<|im_start|>user\na<|im_end|>\n"
    )


def test_a_final_message_can_be_continued() -> None:
    """T3"""
    prompt = chat(
        said("a"),
        said("so far", "assistant"),
        add_generation_prompt=False,
        continue_final_message=True,
    )
    assert text_of(prompt).endswith("<|im_start|>assistant\nso far")
    refused = chat(said("a"), said("so far", "assistant"), continue_final_message=True)
    assert refused.fidelity is Fidelity.BLIND


TOOL = {"type": "function", "function": {"parameters": {"type": "object"}, "name": "f", "x": 1}}


def test_tools_are_shown_in_the_engines_order() -> None:
    """T3: fields in fixed order, absent ones as null, unknown ones gone."""
    shown = '{"type": "function", "function": {"name": "f", "description": null, "parameters": '
    assert shown + '{"type": "object"}}}\n' in text_of(chat(said("a"), tools=[TOOL]))


@pytest.mark.parametrize("value", [True, "yes", 3, [1], {"a": None}])
def test_whether_a_tool_loads_late_is_shown_as_it_was_said(value: Any) -> None:
    prompt = chat(said("a"), tools=[TOOL | {"defer_loading": value}])
    assert prompt.fidelity is Fidelity.EXACT
    assert text_of(prompt).count(f'"defer_loading": {json.dumps(value)}') == 2


def test_unused_tools_are_shown_unless_the_engine_was_told_otherwise(tmp_path: Path) -> None:
    template = "{{ tools | tojson }}"
    folder = str(with_config(tmp_path, chat_template=template))
    body = request(messages=[said("a")], tools=[TOOL], tool_choice="none")
    assert text_of(ModelTokenizer.load(folder).prompt(body)) != "null"
    strict = ModelTokenizer.load(folder, tools_in_prompt_when_unused=False)
    assert text_of(strict.prompt(body)) == "null"


def test_template_arguments_come_from_several_places(tmp_path: Path) -> None:
    names = "{{ a }} {{ b }} {{ c }} {{ reasoning_effort }} {{ enable_thinking }}"
    folder = str(with_config(tmp_path, chat_template=names))
    tokenizer = ModelTokenizer.load(folder, chat_template_kwargs={"a": 1, "b": 1, "c": 1})
    kwargs = {"b": 2, "c": None, "reasoning_effort": "high", "messages": None}
    prompt = tokenizer.prompt(
        request(messages=[said("a")], chat_template_kwargs=kwargs, reasoning_effort="low")
    )
    assert text_of(prompt) == "1 2 1 low True"
    alone = tokenizer.prompt(request(messages=[said("a")], reasoning_effort="low"))
    assert text_of(alone) == "1 1 1 low True"


def test_a_request_that_brings_a_template_is_approximate() -> None:
    """The engine refuses it unless it was started to trust its clients."""
    assert chat(said("a"), chat_template="{{ 1 }}").fidelity is Fidelity.APPROXIMATE
    assert (
        chat(said("a"), chat_template_kwargs={"chat_template": "x"}).fidelity
        is Fidelity.APPROXIMATE
    )


def test_ids_in_transfer_params_replace_the_messages() -> None:
    """The client tokenized already; the messages may say anything."""
    prompt = chat(said("a"), kv_transfer_params={"prompt_token_ids": [4, 5]})
    assert list(prompt.token_ids) == [4, 5]
    assert prompt.fidelity is Fidelity.EXACT


def test_ids_in_transfer_params_are_ignored_where_the_engine_ignores_them() -> None:
    params = {"prompt_token_ids": [4, 5]}
    assert len(chat(said("a"), kv_transfer_params=params, echo=True).token_ids) > 2
    assert len(chat(said([said("x"), IMAGE]), kv_transfer_params=params).token_ids) > 2
    assert chat(said("a"), kv_transfer_params={"prompt_token_ids": [-1]}).reason


@pytest.mark.parametrize("parts", [False, True])
def test_the_text_before_a_picture_routes(parts: bool) -> None:
    """T7: what follows depends on the picture's own tokens."""
    more = [{"type": "text", "text": "Look:"}, IMAGE, {"type": "text", "text": "b" * 400}]
    body = request(messages=[said("s" * 40, "system"), said(more)])
    prompt = tiny(parts=parts).prompt(body)
    assert prompt.fidelity is Fidelity.APPROXIMATE
    assert "picture" in prompt.reason
    assert text_of(prompt).endswith("user\n" + ("Look:" if parts else ""))
    assert prompt.prompt_tokens > len(prompt.token_ids) + 90


def test_a_client_that_writes_the_mark_of_a_picture_has_its_whole_text_routed() -> None:
    """T7: only what the router put there is a mark; ids cut short would go to an engine."""
    text = f"before {MEDIA_MARK} behind"
    prompt = chat(said(text))
    assert prompt.fidelity is Fidelity.EXACT
    assert text in text_of(prompt)


def test_a_template_that_refuses_leaves_the_length(tmp_path: Path) -> None:
    template = "{% if messages | length > 1 %}{{ raise_exception('one only') }}{% endif %}x"
    tokenizer = with_template(tmp_path, template)
    assert tokenizer.chat_problem == ""
    body = request(messages=[said("a"), said("b" * 400)])
    prompt = tokenizer.prompt(body)
    assert prompt.fidelity is Fidelity.BLIND
    assert prompt.prompt_tokens == body.size // 4
    assert "one only" in prompt.reason


@pytest.mark.parametrize(
    ("template", "problem"),
    [
        ("{% for %}", "does not compile"),
        ("{{ raise_exception('never') }}", "plain message"),
        ([{"name": "rag", "template": "x"}], "named 'default'"),
        (None, "no chat template"),
    ],
)
def test_a_broken_template_is_known_at_load(tmp_path: Path, template: Any, problem: str) -> None:
    """T8: completions work all the same; chats are judged by their length."""
    tokenizer = with_template(tmp_path, template)
    assert problem in tokenizer.chat_problem
    assert tokenizer.prompt(request(messages=[said("a")])).fidelity is Fidelity.BLIND
    body = request(Endpoint.COMPLETIONS, prompt="a b")
    assert tokenizer.prompt(body).fidelity is Fidelity.EXACT


ENDLESS = "{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}"


def test_a_template_that_never_ends_is_known_at_load(tmp_path: Path) -> None:
    """Its chats are judged by their length at once; completions are not concerned."""
    tokenizer = with_template(tmp_path, ENDLESS, rendering=TimeLimit(0.05))
    assert "does not end within 0.05 s" in tokenizer.chat_problem
    prompt = tokenizer.prompt(request(messages=[said("hi")]))
    assert (prompt.fidelity, prompt.reason) == (Fidelity.BLIND, tokenizer.chat_problem)
    assert tokenizer.prompt(request(Endpoint.COMPLETIONS, prompt="Hi")).fidelity is Fidelity.EXACT


def test_a_chat_over_which_the_template_does_not_end_is_judged_by_its_length(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """From then on the model's templates are kept off the event loop, whatever they render."""
    template = "{% if messages|length > 1 %}" + ENDLESS + "{% endif %}{{ messages[0].content }}"
    tokenizer = with_template(tmp_path, template, rendering=TimeLimit(0.05))
    assert (tokenizer.chat_problem, tokenizer.speed) == ("", 1)
    large = request(messages=[said("hi"), said("x" * 200_000)])
    assert tokenizer.prompt(large).fidelity is Fidelity.APPROXIMATE
    assert tokenizer.speed == 1  # a second may be too little for what is so large
    body = request(messages=[said("hi"), said("again")])
    for _ in range(2):
        prompt = tokenizer.prompt(body)
        assert (prompt.fidelity, prompt.prompt_tokens) == (Fidelity.APPROXIMATE, body.size // 4)
        assert "does not end within 0.05 s" in prompt.reason
    assert len(caplog.records) == 1
    assert ThreadSettings().inline_bytes * tokenizer.speed < body.size
    assert tokenizer.prompt(request(messages=[said("hi")])).fidelity is Fidelity.EXACT


def test_tools_take_the_template_of_that_name(tmp_path: Path) -> None:
    names = [{"name": "default", "template": "plain"}, {"name": "tool_use", "template": "tools"}]
    tokenizer = with_template(tmp_path, names)  # type: ignore[arg-type]  # the list is the point
    assert text_of(tokenizer.prompt(request(messages=[said("a")]))) == "plain"
    assert text_of(tokenizer.prompt(request(messages=[said("a")], tools=[TOOL]))) == "tools"


def test_a_broken_template_for_tools_costs_chats_with_tools_only(tmp_path: Path) -> None:
    names = [{"name": "default", "template": "plain"}, {"name": "tool_use", "template": "{%"}]
    tokenizer = with_template(tmp_path, names)  # type: ignore[arg-type]  # the list is the point
    assert text_of(tokenizer.prompt(request(messages=[said("a")]))) == "plain"
    prompt = tokenizer.prompt(request(messages=[said("a")], tools=[TOOL]))
    assert (prompt.fidelity, prompt.reason) == (Fidelity.BLIND, tokenizer.chat_problem)


def test_the_content_format_can_be_told() -> None:
    """As with the engine's own option."""
    tokenizer = ModelTokenizer.load(str(TINY), content_format=ContentFormat.OPENAI)
    prompt = tokenizer.prompt(request(messages=[said("a")]))
    assert text_of(prompt) == "<|im_start|>user\n<|im_end|>\n<|im_start|>assistant\n"


def test_chats_of_a_harmony_model_are_approximate(tmp_path: Path) -> None:
    """gpt-oss: the engine does not use the template."""
    folder = with_config(tmp_path, chat_template="x")
    (folder / "config.json").write_text('{"model_type": "gpt_oss"}')
    tokenizer = ModelTokenizer.load(str(folder))
    assert tokenizer.prompt(request(messages=[said("a")])).fidelity is Fidelity.APPROXIMATE


def test_the_namespace_goes_into_the_hashes() -> None:
    body = request(messages=[said("a" * 200)])
    salted = tiny().prompt(body, namespace=b"salt")
    assert salted.namespace == b"salt"
    assert salted.hashes(16) != tiny().prompt(body).hashes(16)


# Other dialects


def test_instructions_and_input_text_become_messages() -> None:
    prompt = responses(instructions="Be brief.", input="hi")
    assert prompt.token_ids == chat(said("Be brief.", "system"), said("hi")).token_ids
    assert prompt.fidelity is Fidelity.EXACT


def test_input_items_become_messages() -> None:
    """What an assistant thought, said and called in a row is one message."""
    items = [
        said([{"type": "input_text", "text": "hi"}]),
        {"type": "reasoning", "content": [{"type": "reasoning_text", "text": "hm"}], "summary": []},
        {
            "type": "message",
            "role": "assistant",
            "content": [{"type": "output_text", "text": "ok"}],
        },
        {"type": "function_call", "call_id": "c", "name": "f", "arguments": '{"a": 1}'},
        {"type": "function_call_output", "call_id": "c", "output": "42"},
    ]
    function = {"name": "f", "arguments": '{"a": 1}'}
    calls = [{"id": "c", "type": "function", "function": function}]
    assert (
        responses(input=items).token_ids
        == chat(
            said("hi"),
            said("ok", "assistant", reasoning="hm", tool_calls=calls),
            said("42", "tool", tool_call_id="c"),
        ).token_ids
    )


def test_flat_tools_are_shown_like_nested_ones() -> None:
    flat = {"type": "function", "name": "f", "parameters": {"type": "object"}}
    assert responses(input="a", tools=[flat]).token_ids == chat(said("a"), tools=[TOOL]).token_ids


def test_an_unfinished_item_is_continued() -> None:
    partial = {"role": "assistant", "status": "incomplete", "content": "so far"}
    prompt = responses(input=[said("a"), {"type": "message", **partial}])
    assert text_of(prompt).endswith("<|im_start|>assistant\nso far")


@pytest.mark.parametrize(
    "more",
    [
        {"previous_response_id": "resp_1"},
        {"prompt": {"id": "p"}},
        {"truncation": "auto"},
        {"tools": [{"type": "custom", "name": "f"}]},
        {"input": [said("a"), {"type": "computer_call"}]},
    ],
)
def test_responses_that_can_not_be_reproduced_are_approximate(more: dict[str, Any]) -> None:
    prompt = responses(**{"input": "a", **more})
    assert prompt.fidelity is Fidelity.APPROXIMATE
    assert prompt.reason


def test_anthropic_blocks_become_messages() -> None:
    """Results of tools become messages of their own, before the text that came with them."""
    prompt = anthropic(
        system=[{"type": "text", "text": "Be "}, {"type": "text", "text": "brief."}],
        messages=[
            said("hi"),
            said(
                [
                    {"type": "thinking", "thinking": "hm"},
                    {"type": "text", "text": "ok"},
                    {"type": "tool_use", "id": "c", "name": "f", "input": {"a": 1}},
                ],
                "assistant",
            ),
            said(
                [
                    {
                        "type": "tool_result",
                        "tool_use_id": "c",
                        "content": [
                            {"type": "text", "text": "4"},
                            {"type": "text", "text": "2"},
                        ],
                    },
                    {"type": "text", "text": "and?"},
                ]
            ),
        ],
        tools=[{"name": "f", "input_schema": {}}],
    )
    calls = [{"id": "c", "type": "function", "function": {"name": "f", "arguments": '{"a": 1}'}}]
    expected = chat(
        said("Be brief.", "system"),
        said("hi"),
        said("ok", "assistant", reasoning="hm", tool_calls=calls),
        said("4\n2", "tool", tool_call_id="c"),
        said("and?"),
        tools=[TOOL],
    )
    assert text_of(prompt) == text_of(expected)
    assert prompt.fidelity is Fidelity.EXACT


@pytest.mark.parametrize(
    "more",
    [
        {"thinking": {"type": "disabled"}},
        {"messages": [said("a"), said("s", "system")]},
        {"messages": [said([{"type": "hologram"}, {"type": "text", "text": "a"}])]},
        {"messages": [said([{"type": "image", "source": {}}])]},
        {"messages": [said([{"type": "tool_result", "content": [{"type": "image"}]}])]},
        {"messages": [said([{"type": "tool_result", "content": [{"type": ["text"]}]}])]},
    ],
)
def test_anthropic_requests_that_can_not_be_reproduced_are_approximate(
    more: dict[str, Any],
) -> None:
    assert anthropic(**{"messages": [said("a")], **more}).fidelity is Fidelity.APPROXIMATE


# Where tokenizers come from


def test_a_template_file_wins_over_the_config(tmp_path: Path) -> None:
    folder = with_config(tmp_path, chat_template="config")
    (folder / "chat_template.json").write_text('{"chat_template": "legacy"}')
    assert find_tokenizer(str(folder)).templates == {"default": "legacy"}
    (folder / "chat_template.jinja").write_text("file")
    (folder / "additional_chat_templates").mkdir()
    (folder / "additional_chat_templates" / "rag.jinja").write_text("more")
    assert find_tokenizer(str(folder)).templates == {"default": "file", "rag": "more"}


def test_special_tokens_are_read_from_two_files(tmp_path: Path) -> None:
    """A null in the config is a decision, an absent one is not."""
    folder = with_config(tmp_path, bos_token=None, eos_token={"content": "</s>"})
    (folder / "special_tokens_map.json").write_text('{"bos_token": "<s>", "pad_token": "<p>"}')
    assert find_tokenizer(str(folder)).special_tokens == {"eos_token": "</s>", "pad_token": "<p>"}


def test_a_file_in_the_folder_names_it_too() -> None:
    assert find_tokenizer(str(TINY / "tokenizer.json")).folder == TINY


@pytest.mark.parametrize(
    ("name", "said_so"),
    [
        ("/no/such/folder", "no folder"),
        ("./missing", "no folder"),
        ("kvrouter-tests/no-such-model", "local hub cache"),
        ("..", "no tokenizer.json"),
    ],
)
def test_what_was_tried_is_said(name: str, said_so: str) -> None:
    """T8: at start."""
    with pytest.raises(TokenizerError, match=said_so):
        ModelTokenizer.load(name, offline=True)


@pytest.mark.parametrize(
    ("file", "content"),
    [
        ("tokenizer.json", "{}"),
        ("tokenizer.json", "not json"),
        ("tokenizer_config.json", "[1]"),
        ("tokenizer_config.json", "{"),
    ],
)
def test_broken_files_are_configuration_errors(tmp_path: Path, file: str, content: str) -> None:
    folder = with_config(tmp_path)
    (folder / file).write_text(content)
    with pytest.raises(TokenizerError, match=str(folder)):
        ModelTokenizer.load(str(folder))


def test_a_template_file_that_is_gone_costs_chats_alone(tmp_path: Path) -> None:
    """Somebody has moved it since the router began."""
    path = tmp_path / "none.jinja"
    tokenizer = ModelTokenizer.load(str(TINY), chat_template=path)
    assert str(path) in tokenizer.chat_problem
    prompt = tokenizer.prompt(request(messages=[said("hi")]))
    assert (prompt.fidelity, prompt.reason) == (Fidelity.BLIND, tokenizer.chat_problem)
    assert tokenizer.prompt(request(Endpoint.COMPLETIONS, prompt="Hi")).fidelity is Fidelity.EXACT


def test_tokens_that_only_the_config_names_are_added(tmp_path: Path) -> None:
    """Fine-tuned models often come so."""
    token = {"content": "<|new|>", "special": True, "normalized": False}
    folder = with_config(tmp_path, added_tokens_decoder={"2048": token})
    body = request(Endpoint.COMPLETIONS, prompt="a<|new|>")
    assert list(ModelTokenizer.load(str(folder)).prompt(body).token_ids) == [*ids("a"), 2048]


@pytest.mark.parametrize(
    ("config", "pieces"),
    [
        ({}, ["▁", "▁", "a", "<s>", "▁", "a"]),
        ({"tokenizer_class": "LlamaTokenizer"}, ["▁", "a", "<s>", "a"]),
        ({"tokenizer_class": "LlamaTokenizerFast", "legacy": True}, ["▁", "a", "<s>", "▁", "a"]),
        ({"tokenizer_class": "LlamaTokenizer", "add_prefix_space": False}, ["▁", "a", "<s>", "a"]),
    ],
)
def test_the_llama_class_has_a_rule_of_its_own_for_prefix_spaces(
    tmp_path: Path, config: dict[str, Any], pieces: list[str]
) -> None:
    """`transformers` 5 does so whatever tokenizer.json says; compared with it when written."""
    vocabulary = {"<s>": 0, "▁": 1, "a": 2}
    plain = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    plain.normalizer = normalizers.Sequence(
        [normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")]
    )
    plain.add_special_tokens(["<s>"])
    plain.save(str(tmp_path / "tokenizer.json"))
    files = TokenizerFiles(tmp_path, config, {}, {}, None)
    shown = HfBackend.load(files).encode(" a<s>a")
    assert [list(vocabulary)[i] for i in shown] == pieces


@pytest.mark.parametrize("kind", [Endpoint.COMPLETIONS, Endpoint.CHAT])
def test_of_a_text_that_no_engine_takes_only_the_beginning_is_encoded(kind: Endpoint) -> None:
    """One client sends megabytes to a model of 10,000 tokens, and others wait for the threads."""
    limited = ModelTokenizer.load(str(TINY), max_model_len=lambda: 10_000)
    text = "far too long, is it not? " * 5000
    fields = {"prompt": text} if kind is Endpoint.COMPLETIONS else {"messages": [said(text)]}
    whole, cut = (each.prompt(request(kind, **fields)) for each in (tiny(), limited))
    assert whole.fidelity is Fidelity.EXACT
    assert cut.fidelity is Fidelity.APPROXIMATE
    assert "80000 characters of 125" in cut.reason
    assert cut.token_ids[:-3] == whole.token_ids[: len(cut.token_ids) - 3]
    assert cut.prompt_tokens > len(cut.token_ids) + 10_000


def test_what_an_engine_may_take_is_encoded_whole() -> None:
    limited = ModelTokenizer.load(str(TINY), max_model_len=lambda: 20_000)
    fields = {"prompt": "as long as that? " * 5000}
    assert limited.prompt(request(Endpoint.COMPLETIONS, **fields)).fidelity is Fidelity.EXACT
