"""Blocks of answers, and their formats: a stream has the content of the whole reply, however the text is divided."""

from __future__ import annotations

import functools
import json
from typing import Any

import msgspec
from anthropic_types import ToolUse, accumulated, events_of, message_of
from hypothesis import given
from hypothesis import strategies as st

from disagg.api.answer_blocks import AnswerBlocks
from disagg.api.anthropic.request import ParsedMessages
from disagg.api.anthropic.writer import MessagesWriter
from disagg.api.chat_writer import ChatWriter
from disagg.api.generation_request import GenerationRequest
from disagg.api.model import ServedModel
from disagg.api.openai_responses.request import ParsedResponses
from disagg.api.openai_responses.writer import ResponsesWriter
from disagg.api.parsers.build import AnswerPlan
from disagg.api.parsers.registry import ParserNames
from disagg.api.writers import AnswerWriter
from disagg.core.types import SamplingParams
from disagg.model.load.tiny import VOCAB_SIZE, byte_tokenizer
from disagg.router.answers import Output

CALL = '<tool_call>{"name":"f","arguments":{"a":1}}</tool_call>'
PIECES = ["<think>", "</think>", CALL, CALL[:30], "text", "\n", '"', "<", "é\U0001f600"]
TOOLS = ({"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}},)
Outputs = list[Output]


@functools.cache
def served_model() -> ServedModel:
    return ServedModel("tiny", byte_tokenizer(), context_tokens=64, vocab_tokens=VOCAB_SIZE)


@st.composite
def answers(draw: st.DrawFn) -> tuple[AnswerPlan | None, Outputs]:
    """A plan, and an answer divided into outputs of any size."""
    forced = draw(st.booleans())
    text = '{"a": [1, 2]}' if forced else "".join(draw(st.lists(st.sampled_from(PIECES), max_size=6)))
    cuts = sorted(draw(st.lists(st.integers(0, len(text)), max_size=8)))
    parts = [text[start:end] for start, end in zip([0, *cuts], [*cuts, len(text)], strict=True)]
    finish = draw(st.sampled_from(["stop", "length"]))
    outputs = [Output(number, (7,), part, None) for number, part in enumerate(parts)]
    outputs[-1] = msgspec.structs.replace(outputs[-1], finish=finish)
    if not forced and draw(st.booleans()):
        return None, outputs
    names = ParserNames("hermes", "none" if forced else "think")
    plan = AnswerPlan(names, TOOLS, "f" if forced else None, parallel=draw(st.booleans()))
    return plan, outputs


def request_of(plan: AnswerPlan | None) -> GenerationRequest:
    return GenerationRequest(([1, 2],), 1, SamplingParams(max_tokens=9), True, False, plan=plan)


def whole_of(writer: AnswerWriter, outputs: Outputs) -> bytes:
    for output in outputs:
        writer.add(0, output)
    return writer.whole()


def stream_of(writer: AnswerWriter, outputs: Outputs) -> bytes:
    return b"".join([*(writer.chunk(0, output) for output in outputs), *writer.tail()])


@given(answers())
def test_the_blocks(answer: tuple[AnswerPlan | None, Outputs]) -> None:
    plan, outputs = answer
    blocks = AnswerBlocks(plan)
    grown: list[str] = []
    for output in outputs:
        for growth in blocks.push(output):
            if growth.begins:
                grown.append("")
            assert growth.block == len(grown) - 1, "only the last block grows"
            grown[-1] += growth.text
        blocks.check()
        assert grown == [block.text for block in blocks.blocks]
    divided = [(block.kind, block.text) for block in blocks.blocks]
    at_once = AnswerBlocks(plan)
    at_once.push(msgspec.structs.replace(outputs[-1], text="".join(output.text for output in outputs)))
    assert divided == [(block.kind, block.text) for block in at_once.blocks]


@given(answers())
def test_messages(answer: tuple[AnswerPlan | None, Outputs]) -> None:
    plan, outputs = answer
    parsed = ParsedMessages(request_of(plan), True)
    message = message_of(whole_of(MessagesWriter(parsed, served_model(), "msg_1"), outputs))
    streamed = accumulated(events_of(stream_of(MessagesWriter(parsed, served_model(), "msg_1"), outputs)))

    def shown(content: Any) -> list[Any]:
        return [(one.name, one.input) if isinstance(one, ToolUse) else one for one in content]

    assert shown(streamed.content) == shown(message.content)
    assert msgspec.structs.replace(streamed, content=[]) == msgspec.structs.replace(message, content=[])


@given(answers())
def test_responses(answer: tuple[AnswerPlan | None, Outputs]) -> None:
    plan, outputs = answer
    parsed = ParsedResponses({}, request_of(plan))
    whole = json.loads(whole_of(ResponsesWriter(parsed, served_model(), "resp_1"), outputs))
    parts = stream_of(ResponsesWriter(parsed, served_model(), "resp_1"), outputs).decode().split("\n\n")[:-1]
    events = [json.loads(part.partition("\ndata: ")[2]) for part in parts]
    assert [part.partition("\n")[0] for part in parts] == [f"event: {event['type']}" for event in events]
    assert [event["sequence_number"] for event in events] == list(range(len(events)))
    texts: dict[int, str] = {}
    for event in events:
        if event["type"] == "response.output_item.added":
            assert event["output_index"] == len(texts)
            texts[event["output_index"]] = ""
        elif event["type"].endswith(".delta"):
            texts[event["output_index"]] += event["delta"]
    final = events[-1]["response"]
    done = [event["item"] for event in events if event["type"] == "response.output_item.done"]
    assert done == final["output"]
    assert (
        list(texts.values())
        == [text_of(item) for item in done]
        == [text_of(item) for item in whole["output"]]
    )
    statuses = [[(item["type"], item["status"]) for item in one["output"]] for one in (final, whole)]
    assert statuses[0] == statuses[1]
    assert (final["status"], final["usage"]) == (whole["status"], whole["usage"])


def text_of(item: dict[str, Any]) -> str:
    """The text of an item of a response."""
    return str(item["arguments"] if item["type"] == "function_call" else item["content"][0]["text"])


@given(answers())
def test_chat_completions(answer: tuple[AnswerPlan | None, Outputs]) -> None:
    plan, outputs = answer
    whole = json.loads(whole_of(ChatWriter(request_of(plan), served_model(), "id"), outputs))["choices"][0]
    stream = stream_of(ChatWriter(request_of(plan), served_model(), "id"), outputs).decode()
    content, reasoning, calls, finish = "", "", list[list[str]](), None
    for part in stream.split("\n\n")[:-2]:
        [choice] = json.loads(part.removeprefix("data: "))["choices"]
        delta, finish = choice["delta"], choice["finish_reason"]
        content += delta.get("content") or ""
        reasoning += delta.get("reasoning_content") or ""
        for call in delta.get("tool_calls", ()):
            if "id" in call:
                assert call["index"] == len(calls)
                calls.append([call["function"]["name"], ""])
            calls[call["index"]][1] += call["function"].get("arguments") or ""
    message = whole["message"]
    assert (content, reasoning) == (message["content"] or "", message.get("reasoning_content", ""))
    found = [[one["function"]["name"], one["function"]["arguments"]] for one in message.get("tool_calls", ())]
    assert (calls, finish) == (found, whole["finish_reason"])
