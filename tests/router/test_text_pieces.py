"""Text comes out piece by piece as the tokenizer decodes the whole, for byte-level BPE and for byte fallback."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers

from disagg.model.load.tiny import EOS_ID, byte_tokenizer
from disagg.router.text import FastDecode, TextStream, decode_with

CORPUS = ["The sea is blue, naïve café. 日本語のテキスト 你好世界 😀😃🤖👨‍👩‍👧 one two STOP three"] * 3
FALLBACK_WORDS = ("▁", "▁Hello", "▁world", "a", "日", "▁caf", ",")


@cache
def byte_level() -> Tokenizer:
    """BPE over bytes, with merges that cut characters in two and merges over several."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=340, initial_alphabet=alphabet, special_tokens=["<s>", "</s>"], show_progress=False
    )
    tokenizer.train_from_iterator(CORPUS, trainer)
    return tokenizer


@cache
def byte_fallback() -> Tokenizer:
    """Words with their leading space, as Llama 2's; what is not a word is a token for each byte."""
    names = ["<unk>", "<s>", *(f"<0x{byte:02X}>" for byte in range(256)), *FALLBACK_WORDS]
    vocab = {name: number for number, name in enumerate(names)}
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=[], byte_fallback=True, unk_token="<unk>"))
    space = decoders.Replace("▁", " ")
    tokenizer.decoder = decoders.Sequence(
        [space, decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    tokenizer.add_special_tokens(["<s>"])
    return tokenizer


def fallback_ids(part: str) -> list[int]:
    known = byte_fallback().token_to_id(part)
    return [known] if known is not None else [2 + byte for byte in part.encode()]


def streamed(decode: FastDecode, ids: Sequence[int], step: int = 1) -> list[str]:
    pieces = decode.pieces()
    out = [pieces.push(ids[start : start + step]) for start in range(0, len(ids), step)]
    return [*out, pieces.rest()]


@given(st.lists(st.integers(0, 339), max_size=60), st.integers(1, 7))
def test_any_tokens_of_a_byte_level_tokenizer(ids: list[int], step: int) -> None:
    """Most are no text: the replacement characters, too, are those of the whole."""
    decode = FastDecode(byte_level())
    assert "".join(streamed(decode, ids, step)) == decode(ids)


@given(st.text(alphabet="aé日本語😀👨‍👩‍👧🤖 ,\n", max_size=30))
def test_characters_come_out_whole_and_at_once(text: str) -> None:
    decode, ids = FastDecode(byte_level()), byte_level().encode(text).ids
    pieces = streamed(decode, ids)
    assert "".join(pieces) == text
    assert pieces[-1] == "", "nothing is left to the end"
    for count in range(len(ids) + 1):
        whole = decode(ids[:count])
        if not whole.endswith("\ufffd"):
            assert "".join(pieces[:count]) == whole, "what is whole is out"


def test_the_tokenizer_cuts_characters_in_the_test() -> None:
    ids = byte_level().encode("🤯").ids
    assert len(ids) > 1
    assert streamed(FastDecode(byte_level()), ids) == [""] * (len(ids) - 1) + ["🤯", ""]


@given(st.lists(st.sampled_from([*FALLBACK_WORDS, "<s>", "😀", "é", "語"]), max_size=14))
def test_byte_fallback(parts: list[str]) -> None:
    decode, ids = FastDecode(byte_fallback()), [i for part in parts for i in fallback_ids(part)]
    pieces = streamed(decode, ids)
    assert "".join(pieces) == decode(ids)
    assert not any("\ufffd" in piece for piece in pieces)


@given(st.lists(st.integers(0, 264), max_size=40))
def test_bytes_that_are_no_text_lose_no_other_text(ids: list[int]) -> None:
    """The whole turns a run of bytes into replacements if one is bad; what came out before stays."""
    decode = FastDecode(byte_fallback())
    text, whole = "".join(streamed(decode, ids)), decode(ids)
    plain = whole.replace("\ufffd", "")
    left = iter(text)
    assert all(character in left for character in plain), (text, whole)


def test_a_bad_byte_behind_a_good_character() -> None:
    """Decoded together they are four replacements, but the euro sign is out already."""
    ids = [*fallback_ids("€"), 2 + 0x80, *fallback_ids("a")]
    assert FastDecode(byte_fallback())(ids) == "\ufffd" * 4 + "a"
    assert "".join(streamed(FastDecode(byte_fallback()), ids)) == "€\ufffda"


def test_special_tokens_are_left_out_and_half_a_character_comes_at_the_end() -> None:
    decode = decode_with(byte_tokenizer())
    assert isinstance(decode, FastDecode)
    half = "日".encode()[:2]
    ids = [*b"ab", EOS_ID, *half[:1], EOS_ID, *half[1:]]
    assert decode(ids) == "ab\ufffd"
    assert streamed(decode, ids) == ["a", "b", "", "", "", "", "\ufffd"]


class Counting(FastDecode):
    longest = 0

    def __call__(self, tokens: Sequence[int]) -> str:
        self.longest = max(self.longest, len(tokens))
        return super().__call__(tokens)


def test_no_token_costs_the_whole_answer() -> None:
    decode = Counting(byte_level())
    stream = TextStream(decode, ("never",))
    ids = byte_level().encode(CORPUS[0] * 20).ids
    pieces = [stream.push([token]) for token in ids]
    assert "".join(pieces) + stream.push([], last=True) == CORPUS[0] * 20
    assert decode.longest < 10


def test_an_answer_of_special_tokens_is_not_kept() -> None:
    """As when EOS is ignored: they are no text, and nothing waits with them."""
    decode = Counting(byte_tokenizer().backend_tokenizer)
    pieces = decode.pieces()
    assert pieces.push([*b"a", *[EOS_ID] * 500, 0xE6]) + pieces.rest() == "a\ufffd"
    assert decode.longest == 1


def test_a_slow_tokenizer_decodes_the_whole() -> None:
    class Slow:
        is_fast = False

        def decode(self, tokens: Sequence[int], **flags: Any) -> str:
            assert flags == {"skip_special_tokens": True, "clean_up_tokenization_spaces": False}
            return bytes(tokens).decode(errors="replace")

    stream = TextStream(decode_with(Slow()))
    assert [stream.push([byte]) for byte in "a日".encode()] == ["a", "", "", "日"]


def test_visible_tokens_of_a_tokenizer_without_a_stream() -> None:
    class Slow:
        is_fast = False
        added_tokens_decoder = {  # noqa: RUF012 - as transformers has it
            1: AddedToken("<call>", special=True),
            2: AddedToken("<eos>", special=True),
            3: AddedToken("<text>", special=False),
        }

        def decode(self, tokens: Sequence[int], **flags: Any) -> str:
            assert flags == {"skip_special_tokens": False, "clean_up_tokenization_spaces": False}
            texts = {token: added.content for token, added in self.added_tokens_decoder.items()}
            return "".join(texts.get(token, chr(token)) for token in tokens)

    assert decode_with(Slow(), {"<call>"})([97, 1, 2, 3, 98]) == "a<call><text>b"


@pytest.mark.parametrize("step", [1, 2, 5])
@pytest.mark.parametrize("stop", [("STOP",), ("OP th", "never"), ("三", "P three")])
def test_stop_strings_over_token_boundaries(stop: tuple[str, ...], step: int) -> None:
    text = "one 日本 two STOP three 🤖 four"
    ids = byte_level().encode(text).ids
    stream = TextStream(FastDecode(byte_level()), stop)
    out = "".join(stream.push(ids[start : start + step]) for start in range(0, len(ids), step))
    assert stream.stopped
    at, found = min((at, s) for s in stop if (at := text.find(s)) >= 0)
    assert out == text[:at]
    assert stream.stop_text == found


def bytes_text(tokens: Sequence[int]) -> str:
    return bytes(tokens).decode(errors="replace")


@pytest.mark.parametrize("step", [1, 3, 20])
@pytest.mark.parametrize(
    ("min_tokens", "out"),
    [(0, ""), (1, ""), (2, "abx"), (4, "abx"), (5, "abxaby"), (7, "abxaby"), (8, "abxabyabz")],
)
def test_a_stop_string_counts_when_it_ends_behind_the_first_tokens(
    min_tokens: int, out: str, step: int
) -> None:
    """`ab` ends with token 2, 5 and 8; `min_tokens` is the number of tokens in which nothing ends the answer."""
    text = b"abxabyabz"
    stream = TextStream(bytes_text, ("ab",), min_tokens)
    found = "".join(stream.push(text[start : start + step]) for start in range(0, len(text), step))
    assert found + stream.push(b"", last=True) == out


@given(tokens=st.lists(st.integers(0, EOS_ID + 1), max_size=30))
def test_visible_special_tokens_are_text(tokens: list[int]) -> None:
    """At once and token by token, also within a character."""
    tokenizer = byte_tokenizer()
    decode = decode_with(tokenizer, {"<|eos|>"})
    runs, text = [bytearray()], ""
    for token in tokens:
        if token == EOS_ID:
            runs.append(bytearray())
        elif token < EOS_ID - 1:
            runs[-1].append(token)
    text = "<|eos|>".join(run.decode(errors="replace") for run in runs)
    assert decode(tokens) == text
    stream = TextStream(decode)
    assert "".join([stream.push([token]) for token in tokens]) + stream.push([], last=True) == text
