"""Chat templates: what they see, what they may do, which content they want."""

import re
from collections.abc import Callable
from datetime import datetime
from typing import Any

import jinja2
import pytest
from jinja2.sandbox import ImmutableSandboxedEnvironment

from kvrouter.tokenize.content_format import ContentFormat
from kvrouter.tokenize.template import (
    ChatTemplate,
    TemplateError,
    TemplateOverrunError,
    TemplateRefusedError,
)
from kvrouter.tokenize.time_limit import TimeLimit

USER = [{"role": "user", "content": "hi"}]
EACH = "{% for m in messages %}{{ m.role }}:{{ m.content }};{% endfor %}"


def render(source: str, messages: list[dict[str, Any]] = USER, **more: Any) -> str:
    return ChatTemplate(source, {"bos_token": "<s>"}).render(messages, **more)


def test_blocks_leave_no_white_space() -> None:
    assert render("a\n  {% if true %}\nb\n  {% endif %}\nc") == "a\nb\nc"


def test_special_tokens_are_variables_and_absent_ones_are_undefined() -> None:
    assert render("{{ bos_token }}{{ eos_token is defined }}") == "<s>False"


def test_variables_win_over_special_tokens() -> None:
    assert render("{{ bos_token }}", variables={"bos_token": "X"}) == "X"


def test_json_is_printed_as_it_reads() -> None:
    """Tools go into prompts as JSON; escapes for HTML or ASCII would be other tokens."""
    tools = [{"b": "<é&'>", "a": [1.0, None, True]}]
    assert (
        render("{{ tools | tojson }}", tools=tools) == '[{"b": "<é&\'>", "a": [1.0, null, true]}]'
    )
    assert render("{{ tools[0].a | tojson(indent=2) }}", tools=tools).startswith("[\n  1.0,")


def test_loops_can_be_left() -> None:
    assert (
        render("{% for i in range(9) %}{% if i == 2 %}{% break %}{% endif %}{{ i }}{% endfor %}")
        == "01"
    )


def test_the_generation_tag_is_nothing() -> None:
    assert render("a{% generation %}b{% set x = 1 %}{{ x }}{% endgeneration %}c") == "ab1c"


def test_the_date_is_todays() -> None:
    """Llama 3 puts it into each prompt."""
    before = datetime.now()  # noqa: DTZ005  # local time, as the template's
    shown = render("{{ strftime_now('%Y-%m-%d') }}")
    assert before.strftime("%Y-%m-%d") <= shown <= datetime.now().strftime("%Y-%m-%d")  # noqa: DTZ005  # likewise


def test_documents_are_none_unless_given() -> None:
    assert render("{{ documents is none }}{{ tools is none }}") == "TrueTrue"
    assert render("{{ documents[0].t }}", variables={"documents": [{"t": "x"}]}) == "x"


@pytest.mark.parametrize(
    "source",
    [
        "{{ raise_exception('roles must alternate') }}",
        "{{ messages[0].content + 1 }}",
        "{{ messages[7].role }}",
        "{{ 1 // 0 }}",
        "{% set _ = messages.append(1) %}",
        "{{ messages.__class__.__mro__ }}",
        "{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}",
    ],
)
def test_whatever_a_template_raises_is_a_refusal(source: str) -> None:
    """The engine renders the same template and answers 400."""
    template = ChatTemplate(source, {})
    with pytest.raises(TemplateRefusedError):
        template.render(USER)


def test_no_messages_are_refused() -> None:
    with pytest.raises(TemplateRefusedError):
        render(EACH, [])


@pytest.mark.parametrize("source", ["{% for m in %}", "{{ x | nofilter }}", "{% endif %}"])
def test_what_does_not_compile_is_an_error_at_once(source: str) -> None:
    """T8: said at start, not with the first request."""
    with pytest.raises(TemplateError, match="does not compile"):
        ChatTemplate(source, {})


CHATML = "{% for m in messages %}[{{ m.role }}]{{ m.content }}[end]\n{% endfor %}"
STRIPPING = "{% for m in messages %}[{{ m.role }}]{{ m.content | trim }}[end]\n{% endfor %}"


@pytest.mark.parametrize(
    ("source", "content", "expected"),
    [
        (CHATML, "so far ", "[user]hi[end]\n[assistant]so far "),
        (STRIPPING, "so far", "[user]hi[end]\n[assistant]so far"),
        (CHATML, "", "[user]hi[end]\n[assistant]"),
    ],
)
def test_a_continued_message_stays_open(source: str, content: str, expected: str) -> None:
    """T3: the client wrote the beginning of the answer."""
    messages = [*USER, {"role": "assistant", "content": content}]
    shown = render(source, messages, add_generation_prompt=False, continue_final_message=True)
    assert shown == expected
    assert messages[-1]["content"] == content


def test_a_continued_message_in_parts_is_cut_behind_its_last_text() -> None:
    source = "{% for m in messages %}{% for p in m.content %}{{ p.text }}|{% endfor %}{% endfor %}"
    messages = [{"role": "assistant", "content": [{"type": "text", "text": t} for t in "ab"]}]
    shown = render(source, messages, add_generation_prompt=False, continue_final_message=True)
    assert shown == "a|b"


@pytest.mark.parametrize(
    ("source", "content", "generation"),
    [(CHATML, "x", True), ("{{ messages[0].role }}", "x", False), (CHATML, [], False)],
)
def test_what_can_not_be_continued_is_refused(source: str, content: Any, generation: bool) -> None:
    with pytest.raises(TemplateRefusedError):
        render(
            source,
            [{"role": "assistant", "content": content}],
            add_generation_prompt=generation,
            continue_final_message=True,
        )


PARTS = ContentFormat.OPENAI
TEXT = ContentFormat.STRING


def loop(over: str, inner: str = "", target: str = "x") -> str:
    return f"{{% for {target} in {over} %}}{inner}{{% endfor %}}"


def each_message(inner: str, over: str = "messages") -> str:
    return loop(over, inner, target="m")


def macro(parameters: str, over: str) -> str:
    return f"{{% macro show({parameters}) %}}{loop(over)}{{% endmacro %}}"


ALIASES = "{% set rest = messages[1:] %}{% set all = rest %}"


@pytest.mark.parametrize(
    ("source", "expected"),
    [
        (EACH, TEXT),
        (each_message(loop("m.content")), PARTS),
        (each_message(loop("m['content']")), PARTS),
        (each_message(loop("m.content | reverse"), over="messages[1:] | list"), PARTS),
        (ALIASES + each_message(loop("m.content"), over="all"), PARTS),
        ("{% set messages = messages %}" + each_message("{{ m }}"), TEXT),
        (each_message(loop("m.tool_calls")), TEXT),
        (each_message(loop("other.content")), TEXT),
        (each_message("{% set content = m.content %}" + loop("content")), PARTS),
        (macro("a, b", over="a") + each_message("{{ show(m.content, 1) }}"), PARTS),
        (macro("a, b", over="a") + each_message("{{ show(b=1, a=m.content) }}"), PARTS),
        (macro("a, b", over="a") + each_message("{{ show(b=m.content, a=1) }}"), TEXT),
        (macro("content", over="content") + each_message("{{ show(m.role) }}"), TEXT),
        (loop("messages", target="a, b") + each_message(loop("m.content")), TEXT),
    ],
)
def test_a_template_that_loops_over_contents_wants_parts(
    source: str, expected: ContentFormat
) -> None:
    """T3: verdicts equal to those of the engine's own search, which was run on these templates."""
    assert ChatTemplate(source, {}).content_format is expected


def test_variables_assigned_from_each_other_end_the_search() -> None:
    source = "{% set a = messages %}{% set messages = a %}" + each_message(loop("m.content"))
    assert ChatTemplate(source, {}).content_format is PARTS


@pytest.mark.parametrize(
    ("source", "knows"),
    [("{% if m.role == 'developer' %}", True), ('"developer"', True), ("developer", False)],
)
def test_a_template_knows_the_developer_when_it_names_it(source: str, knows: bool) -> None:
    text = source if "%" not in source else "{% set m = messages[0] %}" + source + "{% endif %}"
    assert ChatTemplate(text, {}).knows_developer is knows


@pytest.mark.parametrize(
    "source",
    [
        "{% for i in x %}" * 25 + "{% endfor %}" * 25,  # Python nests blocks twenty deep
        "{{ " + "9" * 5000 + " }}",
        "{% if x %}" * 120 + "{% endif %}" * 120,
    ],
    ids=["loops", "digits", "ifs"],
)
def test_what_python_cannot_compile_is_a_broken_template(source: str) -> None:
    """Its compiler has limits of its own, and errors that jinja2 does not know."""
    with pytest.raises(TemplateError, match="does not compile"):
        ChatTemplate(source, {})


@pytest.mark.parametrize(
    "expression",
    [
        *(
            "m.role",
            "m.items",
            "m.nothing is defined",
            "m.nothing.more is defined",
            "m.get('role')",
        ),
        *("m.keys() | list", "m['role']", "m['items'] is defined", "m.__class__ is defined"),
        *("m.copy() == m", "m.pop is defined", "m.content.upper()", "m.update is defined"),
    ],
)
def test_fields_of_messages_are_found_as_the_library_finds_them(expression: str) -> None:
    """The short cut for `message.role` must not be seen."""
    plain = ImmutableSandboxedEnvironment()
    message = {"role": "user", "content": "hi", "items": 3}
    expected = outcome(lambda: plain.from_string(f"{{{{ {expression} }}}}").render(m=message))
    source = f"{{% set m = messages[0] %}}{{{{ {expression} }}}}"
    assert outcome(lambda: render(source, [message])) == expected


@pytest.mark.parametrize(
    "expression",
    [
        *("loop.first", "loop.last", "loop.index0", "loop.previtem", "loop.nextitem.role"),
        *("loop.length", "loop.nothing is defined", "loop._length", "loop.__class__", "loop.cycle"),
        *("ns.flag", "ns.count", "ns.text", "ns.none", "ns.nothing is defined", "ns._x", "ns.show"),
        *("ns.__class__ is defined", "ns.method.__self__", "ns.items", "ns.list.append"),
        *("m.content.split('i')", "m.content.strip", "m.content.nothing is defined"),
        *(
            "m.content.__class__",
            "m.content.format",
            "'{0.role}'.format(m)",
            "'{role}'.format_map(m)",
        ),
        *("m.content.split(sep='i', maxsplit=1)", "m.content.replace('h', obj=1)"),
        *("'{0.__class__}'.format(m)", "', '.join(m)", "m.content.encode()", "(m|string).upper()"),
        *("ns.method()", "ns.format('a')", "m.content.upper()|e", "('<'|e).upper()"),
    ],
)
def test_what_else_has_a_short_cut_is_found_as_the_library_finds_it(expression: str) -> None:
    """Loops, namespaces and texts, in the loop where templates use them."""
    source = (
        "{% set ns = namespace(flag=true, count=3, text='t', none=none, items=1, list=[1]) %}"
        "{% for m in messages %}{% set ns.method = m.content.upper %}{% set ns.show = m.keys %}"
        f"{{% set ns.format = '{{}}'.format %}}{{{{ {expression} }}}};{{% endfor %}}"
    )
    messages = [{"role": role, "content": "hi"} for role in ("user", "assistant", "user")]
    plain = ImmutableSandboxedEnvironment()
    expected = outcome(lambda: plain.from_string(source).render(messages=messages))
    assert outcome(lambda: render(source, messages)) == expected


def test_variables_hide_what_templates_may_call() -> None:
    assert render("{{ range }}{{ namespace }}", variables={"range": 1, "namespace": 2}) == "12"


def outcome(rendered: Callable[[], str]) -> str:
    """The text, or that it is refused; an address in a text is left out."""
    try:
        return re.sub("0x[0-9a-f]+", "", rendered())
    except (TemplateRefusedError, jinja2.TemplateError, TypeError):
        return "refused"


@pytest.mark.parametrize(
    "source",
    [
        "{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}",
        "{% macro f(n) %}{% if n %}{{ f(n-1) }}{{ f(n-1) }}{% endif %}{% endmacro %}{{ f(99) }}",
        "{{ messages|slice(10000000000)|list }}",
        "{{ lipsum(n=1000000000) }}",
    ],
)
def test_a_template_that_does_not_end_is_ended(source: str) -> None:
    """A loop within a loop over something long, or a macro that calls itself twice."""
    template = ChatTemplate(source, {}, limit=TimeLimit(0.05))
    with pytest.raises(TemplateOverrunError, match="does not end within"):
        template.render(USER)


@pytest.mark.parametrize(
    "expression",
    ["'ab' * 10**9", "10**9 * [1]", "2 ** (10**9)", "9 ** (9**9)", "7**30000 * 7**30000"],
)
def test_products_that_would_fill_the_memory_are_refused(expression: str) -> None:
    """They are single instructions, also when the template is compiled."""
    with pytest.raises(TemplateRefusedError, match="too large"):
        render(f"{{{{ ({expression})|length }}}}")


def test_a_template_that_does_not_end_as_it_is_compiled_is_ended() -> None:
    """What is constant is computed then."""
    with pytest.raises(TemplateError, match="does not compile within"):
        ChatTemplate("{{ 'x'|slice(10000000000)|list }}", {}, limit=TimeLimit(0.05))


def test_products_of_the_usual_size_are_made() -> None:
    assert render(
        "{{ '=' * 3 }}{{ 2 * '-' }}{{ 6 * 7 }}{{ 2 ** 10 }}{{ 2 ** -1 }}{{ 1.5 * 2 }}"
    ) == ("===--4210240.53.0")
