"""Structured outputs: the grammar that each field becomes, and answers that must be calls."""

from __future__ import annotations

import json
import random
import threading
from collections.abc import Iterator, Sequence
from typing import Any

import pytest
from api_server import ApiServer, body
from transformers import PreTrainedTokenizerFast

from disagg.api.answer_grammar import answer_grammar, calls_grammar
from disagg.api.model import ServedModel
from disagg.api.parsers.build import AnswerPlan
from disagg.api.parsers.harmony import HarmonyParser
from disagg.api.parsers.parts import Call, Content, Part, Reasoning, joined, parse_all
from disagg.api.parsers.registry import ParserNames
from disagg.core import grammars
from disagg.core.config.api import ToolParserName
from disagg.core.grammars import FORMATS, compile_grammar, grammar_tokenizer, schema_grammar
from disagg.core.json_schema.document import NoText
from disagg.model.load.tiny import EOS_ID, VOCAB_SIZE, byte_tokenizer

COMPLETIONS, CHAT = "/v1/completions", "/v1/chat/completions"
SCHEMA = {
    "type": "object",
    "properties": {"a": {"$ref": "#/$defs/n"}},
    "required": ["a"],
    "additionalProperties": False,
    "$defs": {"n": {"type": "integer", "minimum": 0, "maximum": 9}},
}
EITHER = {
    "type": "object",
    "properties": {"a": {"type": "integer"}, "b": {"type": "integer"}},
    "oneOf": [{"required": ["a"]}, {"required": ["b"]}],
}
TOOLS = [
    {"type": "function", "function": {"name": "f", "parameters": SCHEMA}},
    {"type": "function", "function": {"name": "g", "parameters": {**SCHEMA, "$defs": {"n": {"const": "x"}}}}},
]


@pytest.fixture(scope="module")
def server() -> Iterator[ApiServer]:
    with ApiServer() as running:
        yield running


def accepts(grammar: str, text: bytes, tokenizer: Any = None, vocab: int = VOCAB_SIZE) -> bool:
    """Whether `text` is a whole answer."""
    matcher = compile_grammar(grammar, grammar_tokenizer(tokenizer or byte_tokenizer(), vocab, (EOS_ID,)))
    return matcher.try_consume_tokens(list(text)) == len(text) and matcher.is_accepting()


def grammar_of(server: ApiServer, path: str = COMPLETIONS, **fields: Any) -> str:
    reply = server.ask(path, max_tokens=4, **fields)
    assert reply.status_code == 200, reply.text
    grammar = server.generator.calls[-1][2].grammar
    assert grammar
    return grammar


def schema_format(schema: Any) -> dict[str, Any]:
    return {"type": "json_schema", "json_schema": {"name": "x", "schema": schema, "strict": True}}


@pytest.mark.parametrize("path", [COMPLETIONS, CHAT])
@pytest.mark.parametrize(
    ("fields", "good", "bad"),
    [
        ({"response_format": {"type": "json_object"}}, b'{"x": [1, null]}', b"[1]"),
        ({"response_format": schema_format(SCHEMA)}, b'{"a": 3}', b'{"a": 30}'),
        ({"response_format": schema_format(EITHER)}, b'{"b": 3}', b'{"a": 3, "b": 3}'),
        ({"structured_outputs": {"json": SCHEMA}}, b'{\n  "a": 3\n}', b'{"b": 3}'),
        ({"structured_outputs": {"json": json.dumps(SCHEMA)}}, b'{"a":3}', b"{}"),
        ({"structured_outputs": {"json_object": True}}, b"{}", b"3"),
        ({"structured_outputs": {"regex": r"\d{3}/x"}}, b"123/x", b"12/x"),
        ({"structured_outputs": {"choice": ['a "b"', "c"]}}, b'a "b"', b"a"),
        ({"structured_outputs": {"grammar": 'start: "a"+ "b"'}}, b"aab", b"b"),
        ({"structured_outputs": {"grammar": 'root ::= "a"+ "b"'}}, b"aab", b"b"),
        ({"guided_json": SCHEMA}, b'{"a": 3}', b"{}"),
        ({"guided_regex": "x+"}, b"xx", b""),
        ({"guided_choice": ["yes", "no"]}, b"no", b"noo"),
        ({"guided_grammar": 'start: "a"'}, b"a", b"b"),
    ],
)
def test_each_field_has_its_grammar(
    server: ApiServer, path: str, fields: dict[str, Any], good: bytes, bad: bytes
) -> None:
    grammar = grammar_of(server, path, **fields)
    assert accepts(grammar, good)
    assert not accepts(grammar, bad)


@pytest.mark.parametrize(
    "fields",
    [
        {"response_format": schema_format({**EITHER, "title": "new"})},
        {
            "tools": [
                {"type": "function", "function": {"name": "f", "parameters": {**EITHER, "title": "newer"}}}
            ],
            "tool_choice": "required",
        },
    ],
)
def test_grammars_are_not_made_on_the_event_loop(
    server: ApiServer, fields: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A schema may take half a second."""
    makers = set()

    def noted(schema: dict[str, Any], no_text: NoText) -> dict[str, Any]:
        makers.add(threading.current_thread().name.rpartition("_")[0])
        return schema

    monkeypatch.setattr(grammars, "without_negations", noted)
    server.ask(CHAT, max_tokens=4, **fields)
    assert makers == {"grammar-maker"}


def test_text_is_no_constraint(server: ApiServer) -> None:
    for fields in ({"response_format": {"type": "text"}}, {"structured_outputs": {}}, {}):
        assert server.ask(CHAT, max_tokens=1, **fields).status_code == 200
        assert server.generator.calls[-1][2].grammar == ""


def test_a_schema_nested_too_deeply_is_refused(server: ApiServer) -> None:
    """At every depth: a schema that passes the parser of the request may be too deep for its grammar."""
    for levels in range(400, 520, 8):
        schema = '{"type":"object","properties":{"a":' * levels + "{}" + "}}" * levels
        for fields in (
            {"structured_outputs": {"json": "SCHEMA"}},
            {"response_format": {"type": "json_schema", "json_schema": {"name": "a", "schema": "SCHEMA"}}},
        ):
            text = json.dumps(body(CHAT, max_tokens=1, **fields)).replace('"SCHEMA"', schema)
            assert server.client.post(CHAT, content=text).status_code in (200, 400), levels


def test_formats(server: ApiServer) -> None:
    """Those that no grammar knows are annotations; names and values of properties are no formats."""
    for format_ in FORMATS:
        assert not accepts(schema_grammar({"type": "string", "format": format_}), b'"?"'), format_
    for format_ in ("password", "binary", "regex", "uri-reference"):
        assert accepts(schema_grammar({"anyOf": [{"type": "string", "format": format_}]}), b'"?"'), format_
    value = {"format": "path", "const": "binary"}
    schema = {
        "type": "object",
        "properties": {"format": {"const": value}, "enum": {"type": "string", "format": "path"}},
        "required": ["format", "enum"],
    }
    grammar = grammar_of(server, response_format=schema_format(schema))
    assert accepts(grammar, json.dumps({"format": value, "enum": "x"}).encode())
    assert not accepts(grammar, b'{"format": {"const": "binary"}, "enum": "x"}')


def test_a_named_tool(server: ApiServer) -> None:
    named = {"type": "function", "function": {"name": "f"}}
    grammar = grammar_of(server, CHAT, tools=TOOLS, tool_choice=named)
    assert accepts(grammar, b'{"a": 3}')
    assert not accepts(grammar, b'{"a": "x"}')
    server.set(answer=b'{"a": 3}')
    whole = server.ask(CHAT, tools=TOOLS, tool_choice=named, max_tokens=20).json()["choices"][0]
    stream = server.ask(CHAT, tools=TOOLS, tool_choice=named, max_tokens=20, stream=True).text
    server.set(answer=None)
    [call] = whole["message"]["tool_calls"]
    assert call["function"] == {"name": "f", "arguments": '{"a": 3}'}
    assert (whole["finish_reason"], whole["message"]["content"]) == ("tool_calls", None)
    events = [json.loads(one.removeprefix("data: ")) for one in stream.split("\n\n")[:-2]]
    deltas = [one["choices"][0]["delta"].get("tool_calls") or [] for one in events]
    parts = [call["function"] for delta in deltas for call in delta]
    assert parts[0] == {"name": "f", "arguments": ""}
    assert len(parts) == 9, "the arguments arrive as they are generated"
    assert "".join(part["arguments"] for part in parts) == '{"a": 3}'


def test_required_calls(server: ApiServer) -> None:
    grammar = grammar_of(server, CHAT, tools=TOOLS, tool_choice="required")
    one, two = b'{"name": "f", "parameters": {"a": 3}}', b'{"name": "g", "parameters": {"a": "x"}}'
    assert accepts(grammar, b"[" + one + b", " + two + b"]")
    for wrong in (b"[]", b'[{"name": "h", "parameters": {}}]', b'[{"name": "f", "parameters": {"a": "x"}}]'):
        assert not accepts(grammar, wrong)
    alone = grammar_of(server, CHAT, tools=TOOLS, tool_choice="required", parallel_tool_calls=False)
    assert accepts(alone, b"[" + one + b"]")
    assert not accepts(alone, b"[" + one + b", " + two + b"]")


FORMAT = {
    "type": "json_schema",
    "json_schema": {"name": "x", "schema": {**SCHEMA, "$defs": {"n": {"const": 7}}}},
}


FULL_FORM = "<｜tool▁call▁begin｜>function<｜tool▁sep｜>%s\n```json\n%s\n```<｜tool▁call▁end｜>"
SYNTAXES = [
    ("hermes", '<tool_call>\n{"name": "%s", "arguments": %s}\n</tool_call>', ("", ""), "\n"),
    ("mistral", "[TOOL_CALLS]%s%s", ("", ""), ""),
    ("mistral", "[TOOL_CALLS]%s[CALL_ID]abcdefghi[ARGS]%s", ("", ""), ""),
    ("mistral", '{"name": "%s", "arguments": %s}', ("[TOOL_CALLS] [", "]"), ", "),
    (
        "kimi_k2",
        "<|tool_call_begin|>functions.%s:0<|tool_call_argument_begin|>%s<|tool_call_end|>",
        ("<|tool_calls_section_begin|>", "<|tool_calls_section_end|>"),
        "",
    ),
    ("deepseek", FULL_FORM, ("<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>"), "\n"),
    (
        "deepseek",
        "<｜tool▁call▁begin｜>%s<｜tool▁sep｜>%s<｜tool▁call▁end｜>",
        ("<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>"),
        "",
    ),
]
"""Parser, text of a call, texts around the calls, text between two calls."""


@pytest.mark.parametrize(("parser", "call", "around", "between"), SYNTAXES)
def test_structured_content_or_calls(parser: str, call: str, around: tuple[str, str], between: str) -> None:
    """As agents ask: tools, and a format for the last answer of a run."""

    def written(*calls: tuple[str, str]) -> bytes:
        return between.join(call % one for one in calls).join(around).encode()

    plan = AnswerPlan(ParserNames(parser), TOOLS, constrained=True)
    calls, marker = written(("f", '{"a": 3}')), (around[0] or call).partition("%")[0].encode()
    two = written(("f", '{"a": 3}'), ("g", '{"a": "x"}'))
    with ApiServer(tool_parser=parser) as server:
        grammar = grammar_of(server, CHAT, tools=TOOLS, response_format=FORMAT)
        assert accepts(grammar, b'{"a": 7}')
        assert accepts(grammar, calls)
        assert accepts(grammar, two)
        wrong = (written(("f", '{"a": "x"}')), written(("h", "{}")), marker + b" sorry, no idea")
        for text in (b"free text", b'{"a": 3}', *wrong, b'{"a": 7}' + calls, calls + b" and text"):
            assert not accepts(grammar, text), text
        alone = grammar_of(server, CHAT, tools=TOOLS, response_format=FORMAT, parallel_tool_calls=False)
        assert accepts(alone, calls)
        assert not accepts(alone, two)
        required = grammar_of(server, CHAT, tools=TOOLS, response_format=FORMAT, tool_choice="required")
        assert required == grammar_of(server, CHAT, tools=TOOLS, tool_choice="required")
    assert parse_all(plan.parser(), '{"a": 7}') == [Content('{"a": 7}')]
    assert parse_all(plan.parser(), two.decode()) == [Call("f", '{"a": 3}'), Call("g", '{"a": "x"}')]


def test_markers_in_structured_content() -> None:
    """A string of the content may have the text of a call."""
    text = '{"a": "write [TOOL_CALLS]f{} to call"}'
    wanted = schema_format({"type": "object", "properties": {"a": {"type": "string"}}})
    with ApiServer(tool_parser="mistral") as server:
        assert accepts(grammar_of(server, CHAT, tools=TOOLS, response_format=wanted), text.encode())
        for answer, finish in ((text, "stop"), ('[TOOL_CALLS]f{"a": 3}', "tool_calls")):
            server.set(answer=answer.encode())
            reply = server.ask(CHAT, tools=TOOLS, response_format=wanted, max_tokens=100).json()
            server.set(answer=None)
            [choice] = reply["choices"]
            called = finish == "tool_calls"
            assert choice["finish_reason"] == finish
            assert choice["message"]["content"] == (None if called else text)
            assert bool(choice["message"].get("tool_calls")) == called


@pytest.mark.parametrize("parser", ["hermes", "harmony"])
def test_the_field_of_an_invalid_schema_beside_others(parser: str) -> None:
    """The error names the tools or the format, whichever has the schema that no grammar describes."""
    invalid = {"type": "object", "properties": {"a": {"not": {}}}, "required": ["a"]}
    tools = [{"type": "function", "function": {"name": "f", "parameters": invalid}}]
    with ApiServer(tool_parser=parser) as server:
        for name, fields in (
            ("tools", {"tools": tools, "response_format": FORMAT}),
            ("response_format", {"tools": TOOLS, "response_format": schema_format(invalid)}),
            ("response_format", {"tools": tools, "response_format": schema_format(invalid)}),
        ):
            refused = server.ask(CHAT, max_tokens=4, **fields)
            assert refused.status_code == 400
            assert refused.json()["error"]["param"] == name
            assert refused.json()["error"]["message"].startswith(f"{name}: ")


@pytest.mark.parametrize("parser", ["llama3_json"])
def test_structured_content_beside_calls_without_a_grammar(parser: str) -> None:
    with ApiServer(tool_parser=parser) as server:
        refused = server.ask(CHAT, tools=TOOLS, response_format=FORMAT, max_tokens=4)
        assert refused.status_code == 400
        assert refused.json()["error"]["param"] == "response_format"
        assert parser in refused.json()["error"]["message"]
        assert grammar_of(server, CHAT, tools=TOOLS, response_format=FORMAT, tool_choice="required")
        assert grammar_of(server, CHAT, tools=TOOLS, response_format=FORMAT, tool_choice="none")


def walk(grammar: str, tokenizer: Any, vocab: int, seed: int) -> list[int]:
    """Random tokens that the grammar allows, up to its end."""
    vocabulary = grammar_tokenizer(tokenizer, vocab, (EOS_ID,))
    matcher, draw, tokens = compile_grammar(grammar, vocabulary), random.Random(seed), list[int]()
    while len(tokens) < 3000:
        bits = matcher.compute_bitmask()
        allowed = [token for token in range(vocab) if bits[token // 8] >> token % 8 & 1]
        if EOS_ID in allowed:
            return tokens
        markers = [[token] for token in allowed if token >= VOCAB_SIZE]
        if vocab == VOCAB_SIZE:  # the markers are texts
            markers += [list(text) for text in (b"<think>", b"</think>") if text[0] in allowed]
        new = draw.choice(markers) if markers and draw.random() < 0.3 else [draw.choice(allowed)]
        tokens += new[: matcher.try_consume_tokens(new)]
    raise AssertionError("the grammar does not end")


def marked_tokenizer(*markers: str) -> PreTrainedTokenizerFast:
    tokenizer = byte_tokenizer()
    tokenizer.add_special_tokens({"additional_special_tokens": list(markers)})
    return tokenizer


def walked(
    names: ParserNames, markers: Sequence[str], plan: AnswerPlan, grammar: str, seed: int
) -> list[Part]:
    """The parts of a random answer that follows the grammar of `plan`; `markers` are special tokens."""
    tokenizer = marked_tokenizer(*markers)
    model = ServedModel("m", tokenizer, context_tokens=9, vocab_tokens=len(tokenizer), parsers=names)
    try:
        tokens = walk(answer_grammar(plan, grammar, model.marker), tokenizer, len(tokenizer), seed)
        return parse_all(plan.parser(), model.chat_decode(tokens))
    finally:
        model.close()


@pytest.mark.parametrize("special", [False, True], ids=["texts", "special tokens"])
@pytest.mark.parametrize("thinking", [False, True], ids=["", "thinking"])
def test_reasoning_is_free_before_a_constrained_answer(special: bool, thinking: bool) -> None:
    names = ParserNames(reasoning="think")
    markers = ["<think>", "</think>"] if special else []
    plan = AnswerPlan(names, TOOLS, "f", thinking)
    reasoned = 0
    for seed in range(6):
        *reasoning, call, arguments = joined(walked(names, markers, plan, calls_grammar(plan), seed))
        assert call == Call("f", "")
        assert 0 <= json.loads(arguments[0])["a"] <= 9
        reasoned += bool(reasoning)
    assert reasoned


@pytest.mark.parametrize("parser", ["hermes", "mistral", "kimi_k2", "deepseek", "qwen3_coder", "glm45"])
def test_reasoning_before_structured_content_or_calls(parser: ToolParserName) -> None:
    """What the grammar accepts, the parser reads: content of the schema alone, or calls alone."""
    names = ParserNames(parser, "think")
    plan = AnswerPlan(names, TOOLS, constrained=True)
    content = calls_grammar(AnswerPlan(names, TOOLS, "f"))
    reasoned, called = 0, 0
    for seed in range(12):
        parts = joined(walked(names, sorted(names.visible), plan, content, seed))
        reasoned += isinstance(parts[0], Reasoning)
        rest = [part for part in parts if not isinstance(part, Reasoning)]
        called += isinstance(rest[-1], Call)
        if isinstance(rest[0], Content):
            assert 0 <= json.loads(rest[0].text)["a"] <= 9
            assert len(rest) == 1
        for part in rest if isinstance(rest[-1], Call) else []:
            assert isinstance(part, Call)
            value = json.loads(part.arguments)["a"]
            assert value == "x" if part.name == "g" else 0 <= value <= 9
    assert 0 < reasoned < 12
    assert 0 < called < 12


TAGGED: dict[ToolParserName, tuple[str, str]] = {
    "qwen3_coder": (
        "<tool_call>\n<function=f>\n%s</function>\n</tool_call>",
        "<parameter=%s>\n%s\n</parameter>\n",
    ),
    "glm45": ("<tool_call>f\n%s</tool_call>", "<arg_key>%s</arg_key>\n<arg_value>%s</arg_value>\n"),
}


@pytest.mark.parametrize("parser", TAGGED)
def test_arguments_between_tags(parser: ToolParserName) -> None:
    """Strings are any text, or one of `enum`; other values are JSON of the schema."""
    schema = {
        "type": "object",
        "properties": {
            "city": {"type": "string", "description": "a city"},
            "unit": {"$ref": "#/$defs/unit"},
            "note": {"anyOf": [{"type": "string"}, {"type": "null"}, {"type": "array", "items": {}}]},
            "days": {"type": "array", "items": {"$ref": "#/$defs/day"}},
        },
        "required": ["city", "days"],
        "$defs": {"unit": {"enum": ["C", "F"], "type": "string"}, "day": {"type": "integer", "maximum": 9}},
    }
    tools = [{"type": "function", "function": {"name": "f", "parameters": schema}}]
    call, argument = TAGGED[parser]

    def written(**arguments: str) -> str:
        return call % "".join(argument % one for one in arguments.items())

    with ApiServer(tool_parser=parser) as server:
        grammar = grammar_of(server, CHAT, tools=tools, response_format=FORMAT)
    plan = AnswerPlan(ParserNames(parser), tools, constrained=True)
    assert accepts(grammar, b'{"a": 7}')
    for arguments in (
        {"city": 'Köln "</x>"', "unit": "F", "note": "a\nb", "days": "[1, 2]"},
        {"city": "", "note": "null", "days": "[]"},
    ):
        text = written(**arguments)
        assert accepts(grammar, text.encode()), text
        [found] = parse_all(plan.parser(), text)
        assert isinstance(found, Call)
        wanted = arguments | {"days": json.loads(arguments["days"])}
        assert json.loads(found.arguments) == {k: None if v == "null" else v for k, v in wanted.items()}
    for wrong in ({"city": "x"}, {"city": "x", "days": "[10]"}, {"city": "x", "unit": "K", "days": "[]"}):
        assert not accepts(grammar, written(**wrong).encode()), wrong
    assert not accepts(grammar, written(city="x", days="[]").encode() + b" and text")


@pytest.mark.parametrize("parser", TAGGED)
@pytest.mark.parametrize(
    "schema",
    [
        {"properties": {"a": {"type": "string", "pattern": "x+"}}},
        {"properties": {"a": {"anyOf": [{"type": "string", "minLength": 2}, {"type": "null"}]}}},
        {"properties": {"a": {"enum": ["x", 3]}}},
        {"properties": {"a": {"const": 3}}},
        {"properties": {"a<\n": {"type": "string"}}},
        {"properties": {"a": {"type": "string", "not": {"pattern": "x"}}}},
        {"properties": {}, "required": ["b"]},
        {"properties": [], "anyOf": []},
        {"properties": {"a": 3}},
        {"properties": {"a": {"type": "string", "anyOf": [{"pattern": "x"}]}}},
        {"properties": {"a": {"anyOf": [{"type": "string"}, {"enum": [3]}]}}},
        {"properties": {"a": {"$ref": "#/$defs/none"}}},
        {"properties": {"a": {"anyOf": [{"type": ["string", "null"], "pattern": "x"}, {"type": "integer"}]}}},
        {"properties": {}, "required": [{}]},
    ],
)
def test_arguments_that_tags_cannot_ensure(parser: str, schema: dict[str, Any]) -> None:
    tools = [{"type": "function", "function": {"name": "f", "parameters": {"type": "object", **schema}}}]
    with ApiServer(tool_parser=parser) as server:
        refused = server.ask(CHAT, tools=tools, response_format=FORMAT, max_tokens=4)
        assert (refused.status_code, refused.json()["error"]["param"]) == (400, "tools")


def test_a_marker_is_its_special_token_or_a_text() -> None:
    """Also where an unknown token stands for all others."""
    tokenizer = marked_tokenizer("<think>")
    tokenizer.unk_token = "<|pad|>"
    model = ServedModel("m", tokenizer, context_tokens=9, vocab_tokens=len(tokenizer))
    assert model.marker("<think>") == f"<[{VOCAB_SIZE}]>"
    assert model.marker("</think>") == '"</think>"'
    model.close()


def test_the_channels_of_gpt_oss() -> None:
    names = ParserNames("harmony", "harmony")
    markers = HarmonyParser.visible
    for forced, wanted in (("f", {"f"}), ("", {"f", "g"})):
        plan = AnswerPlan(names, TOOLS, forced)
        found = [walked(names, markers, plan, calls_grammar(plan), seed) for seed in range(8)]
        calls = [part for parts in found for part in parts if isinstance(part, Call)]
        assert len(calls) == 8
        assert {call.name for call in calls} == wanted
    plan = AnswerPlan(names, TOOLS)
    either = [
        walked(names, markers, plan, calls_grammar(AnswerPlan(names, TOOLS, "f")), seed) for seed in range(12)
    ]
    last = [parts[-1] for parts in either]
    assert {part.name for part in last if isinstance(part, Call)} == {"f", "g"}
    assert any(0 <= json.loads(part.text)["a"] <= 9 for part in last if isinstance(part, Content))
    plan = AnswerPlan(names)
    for seed in range(4):
        parts = walked(names, markers, plan, calls_grammar(AnswerPlan(names, TOOLS, "f")), seed)
        [content] = [part for part in parts if not isinstance(part, Reasoning)]
        assert isinstance(content, Content)
        assert 0 <= json.loads(content.text)["a"] <= 9
