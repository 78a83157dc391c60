"""Checks that every answer parser passes: any chunking, truncated answers, text around calls, malformed calls."""

from __future__ import annotations

import json
from typing import Any, NamedTuple

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from disagg.api.parsers.build import AnswerPlan
from disagg.api.parsers.parts import AnswerParser, Call, Content, Part, Reasoning, joined, parse_all
from disagg.api.parsers.registry import ParserNames

TOOLS: list[dict[str, Any]] = [
    {
        "type": "function",
        "function": {
            "name": "weather",
            "parameters": {
                "type": "object",
                "properties": {"city": {"type": "string"}, "days": {"type": "integer"}},
            },
        },
    },
    {"type": "function", "function": {"name": "now"}},
]
ARGUMENTS = {"city": 'Köln </tool_call> {"[', "days": 3}


class Family(NamedTuple):
    """A parser, and how its models write answers."""

    names: ParserNames
    calls: str
    """Text of two calls: `weather` with `ARGUMENTS`, then `now` without arguments."""
    one: str
    """A text that every prefix of must give no call, and whose whole is one call of `now`."""
    malformed: str
    """A text with the family's markers that is no call."""
    thinks: str = ""
    """Text of reasoning, `hm`, before the calls."""
    mixes: bool = True
    """Whether calls may follow content."""
    forced: str | None = None
    constrained: bool = False


DUMPED = json.dumps(ARGUMENTS, ensure_ascii=False)
ESCAPED = json.dumps(DUMPED, ensure_ascii=False)
HARMONY_END = "<|end|><|start|>assistant"
FAMILIES = {
    "hermes": Family(
        ParserNames("hermes"),
        f'<tool_call>\n{{"name": "weather", "arguments": {DUMPED}}}\n</tool_call>\n'
        '<tool_call>\n{"name": "now", "arguments": "{}"}\n</tool_call>',
        '<tool_call>{"name": "now", "arguments": {}}',
        '<tool_call>\n{"name": "now", "arguments": [1}\n</tool_call>',
    ),
    "hermes that thinks": Family(
        ParserNames("hermes", "think"),
        f'<tool_call>\n{{"name": "weather", "arguments": {DUMPED}}}\n</tool_call>\n'
        '<tool_call>\n{"name": "now"}</tool_call>',
        '<tool_call>{"name": "now", "arguments": {}}',
        '<tool_call>\n{"name": 7}\n</tool_call>',
        "<think>\nhm\n</think>\n\n",
    ),
    "qwen3_coder": Family(
        ParserNames("qwen3_coder"),
        '<tool_call>\n<function=weather>\n<parameter=city>\nKöln </tool_call> {"[\n</parameter>\n'
        "<parameter=days>\n3\n</parameter>\n</function>\n</tool_call>\n<function=now>\n</function>",
        "<tool_call><function=now>\n</function>",
        "<tool_call>\n<function=now>\nno parameter\n</function>\n</tool_call>",
    ),
    "glm45": Family(
        ParserNames("glm45", "think"),
        '<tool_call>weather\n<arg_key>city</arg_key>\n<arg_value>Köln </tool_call> {"[</arg_value>\n'
        "<arg_key>days</arg_key>\n<arg_value>3</arg_value>\n</tool_call>\n<tool_call>now</tool_call>",
        "<tool_call>now\n</tool_call>",
        "<tool_call>now\nno key</tool_call>",
        "<think>hm</think>",
    ),
    "kimi_k2": Family(
        ParserNames("kimi_k2"),
        "<|tool_calls_section_begin|><|tool_call_begin|>functions.weather:0<|tool_call_argument_begin|>"
        f"{DUMPED}<|tool_call_end|><|tool_call_begin|>functions.now:1<|tool_call_argument_begin|>{{}}"
        "<|tool_call_end|><|tool_calls_section_end|>",
        "<|tool_call_begin|>functions.now:0<|tool_call_argument_begin|>{}<|tool_call_end|>",
        "<|tool_call_begin|>now<|tool_call_argument_begin|>{}<|tool_call_end|>",
    ),
    "llama3_json": Family(
        ParserNames("llama3_json"),
        f'{{"name": "weather", "parameters": {DUMPED}}}; {{"name": "now", "parameters": {{}}}}',
        '<|python_tag|>{"name": "now", "parameters": {}}',
        '{"name": "now", "parameters": 3}',
        mixes=False,
    ),
    "mistral": Family(
        ParserNames("mistral", "magistral"),
        f'[TOOL_CALLS] [{{"name": "weather", "arguments": {DUMPED}}}, {{"name": "now", "arguments": {{}}}}]',
        "[TOOL_CALLS]now[ARGS]{}",
        "[TOOL_CALLS] let us see {}",
        "[THINK]hm[/THINK]",
    ),
    "mistral, one marker for each call": Family(
        ParserNames("mistral"),
        f"[TOOL_CALLS]weather[CALL_ID]abcdefghi[ARGS]{DUMPED}[TOOL_CALLS]now{{}}",
        "[TOOL_CALLS]now{}",
        "[TOOL_CALLS][3]",
    ),
    "deepseek V3": Family(
        ParserNames("deepseek", "think"),
        "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function<｜tool▁sep｜>weather\n```json\n"
        f"{DUMPED}\n```<｜tool▁call▁end｜>\n<｜tool▁call▁begin｜>function<｜tool▁sep｜>now\n```json\n{{}}\n```"
        "<｜tool▁call▁end｜><｜tool▁calls▁end｜>",
        "<｜tool▁call▁begin｜>function<｜tool▁sep｜>now\n```json\n{}\n```<｜tool▁call▁end｜>",
        "<｜tool▁call▁begin｜>now {}<｜tool▁call▁end｜>",
        "<think>hm</think>",
    ),
    "deepseek V3.1": Family(
        ParserNames("deepseek"),
        f"<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>weather<｜tool▁sep｜>{DUMPED}<｜tool▁call▁end｜>"
        "<｜tool▁call▁begin｜>now<｜tool▁sep｜>{}<｜tool▁call▁end｜><｜tool▁calls▁end｜>",
        "<｜tool▁call▁begin｜>now<｜tool▁sep｜>{}<｜tool▁call▁end｜>",
        "<｜tool▁call▁begin｜>now<｜tool▁sep｜>{]<｜tool▁call▁end｜>",
    ),
    "harmony": Family(
        ParserNames("harmony", "harmony"),
        f"<|channel|>commentary to=functions.weather <|constrain|>json<|message|>{DUMPED}<|call|>"
        "<|start|>assistant to=functions.now<|channel|>commentary json<|message|>{}<|call|>",
        "<|channel|>commentary to=functions.now<|message|>{}",
        "<|channel|>commentary to=functions.now<|message|>{]<|call|>",
        f"<|channel|>analysis<|message|>hm{HARMONY_END}",
        mixes=False,
    ),
    "a list": Family(
        ParserNames("hermes"),
        f'[{{"name": "weather", "parameters": {DUMPED}}},\n{{"name": "now", "parameters": {{}}}}]',
        '[{"name": "now", "parameters": {}}]',
        '[{"name": "now", "parameters": 1}]',
        mixes=False,
        forced="",
    ),
}
CONSTRAINED = ("hermes that thinks", "kimi_k2", "mistral", "deepseek V3", "qwen3_coder", "glm45")
FAMILIES |= {
    f"{name}, constrained": FAMILIES[name]._replace(constrained=True, mixes=False) for name in CONSTRAINED
}
CALLS = [Call("weather", DUMPED), Call("now", "{}")]


@pytest.fixture(params=FAMILIES)
def family(request: pytest.FixtureRequest) -> Family:
    return FAMILIES[request.param]


def parser_of(family: Family) -> AnswerParser:
    return AnswerPlan(family.names, TOOLS, family.forced, constrained=family.constrained).parser()


def parsed(family: Family, text: str) -> list[Part]:
    return parse_all(parser_of(family), text)


def pushed(family: Family, chunks: list[str]) -> list[Part]:
    parser, parts = parser_of(family), list[Part]()
    for chunk in chunks:
        parts += parser.push(chunk)
    return joined([*parts, *parser.end()])


def test_two_calls(family: Family) -> None:
    assert parsed(family, family.calls) == CALLS


def test_reasoning_before_calls(family: Family) -> None:
    reasoning = [Reasoning("hm")] if family.thinks else []
    assert parsed(family, family.thinks + family.calls) == [*reasoning, *CALLS]


def test_text_around_calls(family: Family) -> None:
    if not family.mixes:
        pytest.skip("calls of this family stand alone")
    parts = parsed(family, f" Let me see.\n\n{family.calls}\n\nDone. ")
    assert parts == [Content(" Let me see."), *CALLS, Content("Done. ")]


def test_an_answer_without_calls(family: Family) -> None:
    for text in ("plain <text> with {braces} and [lists] \n", " ", "", "1 < 2"):
        assert parsed(family, text) == ([Content(text)] if text else [])


@pytest.mark.parametrize("name", [name for name in FAMILIES if FAMILIES[name].constrained])
def test_constrained_content_keeps_markers(name: str) -> None:
    """The first characters decide: calls in a JSON string are part of the string."""
    family = FAMILIES[name]
    for text in (f'{{"a": "write {family.calls} or {family.one}"}}', f'\n["{family.one}"]\n'):
        assert parsed(family, text) == [Content(text)]
        assert pushed(family, list(text)) == [Content(text)]


def test_a_malformed_call_is_text(family: Family) -> None:
    parts = parsed(family, family.malformed)
    assert not any(isinstance(part, Call) for part in parts)
    text = "".join(part.text for part in parts if isinstance(part, Content))
    assert text.strip() in family.malformed
    assert len(text) > 1


def test_a_call_after_a_malformed_one(family: Family) -> None:
    if not family.mixes:
        pytest.skip("calls of this family stand alone")
    parts = parsed(family, f"{family.malformed} {family.calls}")
    assert [part for part in parts if isinstance(part, Call)] == CALLS


def test_a_truncated_call_is_text(family: Family) -> None:
    for length in range(len(family.one)):
        parts = parsed(family, family.one[:length])
        assert all(isinstance(part, Content | Reasoning) for part in parts), family.one[:length]
    assert parsed(family, family.one) == [Call("now", "{}")]


def test_each_character_alone(family: Family) -> None:
    text = family.thinks + family.calls
    assert pushed(family, list(text)) == parsed(family, text)


@pytest.mark.parametrize("name", FAMILIES)
@given(data=st.data())
@settings(max_examples=60, deadline=None)
def test_any_chunks_of_any_text(name: str, data: st.DataObject) -> None:
    """Pieces of valid answers in any order, cut anywhere: the parts are those of the whole text."""
    family = FAMILIES[name]
    whole = family.thinks + family.calls
    cut = st.tuples(st.integers(0, len(whole)), st.integers(0, len(whole))).map(
        lambda ends: whole[min(ends) : max(ends)]
    )
    pieces = st.one_of(
        cut, st.sampled_from([family.one, family.malformed, " \n", "text"]), st.text(max_size=5)
    )
    text = "".join(data.draw(st.lists(pieces, max_size=4)))
    places = sorted(data.draw(st.lists(st.integers(0, len(text)), max_size=6)))
    chunks = [text[a:b] for a, b in zip([0, *places], [*places, len(text)], strict=True)]
    assert pushed(family, chunks) == parsed(family, text)


@pytest.mark.parametrize("value", ["NaN", "1e999", "[" * 3000 + "]" * 3000, r'"\ud800"'])
def test_arguments_that_json_cannot_have_are_text(value: str) -> None:
    text = f'<tool_call>{{"name": "now", "arguments": {{"x": {value}}}}}</tool_call>'
    assert parsed(FAMILIES["hermes"], text) == [Content(text)]


def test_a_name_with_a_lone_surrogate_is_text() -> None:
    text = r'<tool_call>{"name": "\udfff", "arguments": {}}</tool_call>'
    assert parsed(FAMILIES["hermes"], text) == [Content(text)]


def test_reasoning_that_the_prompt_begins() -> None:
    plan = AnswerPlan(ParserNames("hermes", "think"), TOOLS, thinking=True)
    for text in ("hm\n</think>\n\nyes", "<think>hm</think>yes"):
        assert parse_all(plan.parser(), text) == [Reasoning("hm"), Content("yes")]
    assert parse_all(plan.parser(), "hm, hm") == [Reasoning("hm, hm")], "a truncated answer is reasoning"


def test_values_have_the_types_of_the_schema() -> None:
    tool = {
        "type": "function",
        "function": {
            "name": "f",
            "parameters": {
                "properties": {
                    "text": {"type": "string"},
                    "on": {"type": "boolean"},
                    "some": {"anyOf": [{"type": "array"}, {"type": "null"}]},
                }
            },
        },
    }
    values = {"text": "3", "on": "True", "some": "[1]", "unknown": "4"}
    body = "".join(f"<parameter={name}>\n{value}\n</parameter>\n" for name, value in values.items())
    parser = AnswerPlan(ParserNames("qwen3_coder"), [tool]).parser()
    [call] = parse_all(parser, f"<function=f>\n{body}</function>")
    assert isinstance(call, Call)
    assert json.loads(call.arguments) == {"text": "3", "on": True, "some": [1], "unknown": "4"}


@pytest.mark.parametrize(
    ("sign", "names"),
    [
        ("{{ '<tool_call>' }} <think> </think>", ParserNames("hermes", "think")),
        ("<tool_call><function=", ParserNames("qwen3_coder")),
        ("<tool_call>{name}<arg_key> </think>", ParserNames("glm45", "think")),
        ("[TOOL_CALLS] [THINK] [/THINK]", ParserNames("mistral", "magistral")),
        ("<｜tool▁call▁begin｜> </think>", ParserNames("deepseek", "think")),
        ("<|tool_calls_section_begin|><|tool_call_begin|>", ParserNames("kimi_k2")),
        ("Environment: ipython", ParserNames("llama3_json")),
        ("<|start|>assistant<|channel|>final", ParserNames("harmony", "harmony")),
        ("{{ messages }}", ParserNames("none", "none")),
    ],
)
def test_the_template_shows_the_parsers(sign: str, names: ParserNames) -> None:
    assert ParserNames("auto", "auto").chosen(sign) == names
    assert ParserNames("none", "none").chosen(sign) == ParserNames("none", "none")
