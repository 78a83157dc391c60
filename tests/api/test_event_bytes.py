"""Events of streams, byte by byte: those spliced from a template are those that msgspec encodes as a whole."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from disagg.api import replies as r
from disagg.api.chat_writer import ChatWriter
from disagg.api.generation_request import GenerationRequest
from disagg.api.model import ServedModel
from disagg.api.writers import CompletionWriter, Writer
from disagg.core.types import SamplingParams, TokenLogprobs
from disagg.model.load.tiny import VOCAB_SIZE, byte_tokenizer
from disagg.router.answers import Output

HARD = '"\\/\b\f\n\r\t\0\x1f\x7f\u0080\u2028\u2029\ufeff\ufffd\U0001f600 {choices} \\u0000'
NAMES = ["tiny", 'a "quoted" \\ name', '{"index":0,"text":"\\u0000"', HARD]


def writer_of(kind: type[Writer], name: str = "tiny", n: int = 1, usage: bool = False) -> Writer:
    model = ServedModel(name, byte_tokenizer(), context_tokens=64, vocab_tokens=VOCAB_SIZE)
    request = GenerationRequest(([1, 2],), n, SamplingParams(max_tokens=9, n=n), True, usage)
    return kind(request, model, "an id")


def whole_event(writer: Writer, first: bytes, choice: object, name: str, usage: bool) -> bytes:
    """What an event with `choice` is when all of it is encoded; id and time are those of the event `first`."""
    known = msgspec.json.decode(first.split(b"\n\n")[0].removeprefix(b"data: "))
    null = None if usage else msgspec.UNSET
    envelope = r.ReplyEnvelope(known["id"], writer.chunk_kind, known["created"], name, [choice], null)
    return b"data: " + msgspec.json.encode(envelope) + b"\n\n"


def choice_of(kind: type[Writer], index: int, text: str) -> object:
    if kind is ChatWriter:
        return r.ChatChunkChoice(index, r.Delta(content=text))
    return r.CompletionChoice(index, text)


@pytest.mark.parametrize("kind", [ChatWriter, CompletionWriter])
@pytest.mark.parametrize("usage", [False, True])
@pytest.mark.parametrize("name", NAMES)
def test_a_spliced_event_is_the_encoded_one(kind: type[Writer], usage: bool, name: str) -> None:
    writer = writer_of(kind, name, 2, usage)
    for index in (1, 0):
        first = writer.chunk(index, Output(0, (5,), "x", None))
        for text in ("y", HARD, name, *HARD):
            event = writer.chunk(index, Output(1, (6,), text, None))
            assert event == whole_event(writer, first, choice_of(kind, index, text), name, usage)
    assert writer.completion_tokens == 2 * (3 + len(HARD)) + 2


@pytest.mark.parametrize("kind", [ChatWriter, CompletionWriter])
@given(text=st.text(min_size=1))
def test_any_text_is_spliced_as_it_is_encoded(kind: type[Writer], text: str) -> None:
    writer = writer_of(kind)
    first = writer.chunk(0, Output(0, (5,), "x", None))
    event = writer.chunk(0, Output(1, (6,), text, None))
    assert event == whole_event(writer, first, choice_of(kind, 0, text), "tiny", False)


def test_an_output_without_text_has_no_event() -> None:
    for kind in (ChatWriter, CompletionWriter):
        writer = writer_of(kind)
        writer.chunk(0, Output(0, (5,), "x", None))
        assert writer.chunk(0, Output(1, (6,), "", None)) == b""
        assert writer.completion_tokens == 2


def test_events_with_more_than_text_are_no_splices() -> None:
    logprobs = (TokenLogprobs(97, -0.5, ()),)
    fields: dict[type[Writer], Any] = {
        CompletionWriter: lambda choice: (choice["text"], choice["finish_reason"]),
        ChatWriter: lambda choice: (choice["delta"].get("content"), choice["finish_reason"]),
    }
    for kind, read in fields.items():
        writer = writer_of(kind)
        writer.chunk(0, Output(0, (5,), "x", None))
        with_logprobs = writer.chunk(0, Output(1, (97,), "a", None, logprobs))
        choice = msgspec.json.decode(with_logprobs.removeprefix(b"data: "))["choices"][0]
        assert read(choice) == ("a", None)
        assert choice["logprobs"] is not None
        last = writer.chunk(0, Output(2, (98,), "b", "length")).strip().split(b"\n\n")
        found = [read(msgspec.json.decode(event.removeprefix(b"data: "))["choices"][0]) for event in last]
        assert found == ([("b", "length")] if kind is CompletionWriter else [("b", None), (None, "length")])
