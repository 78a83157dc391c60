"""The served model: its name, limits, tokenizer and chat template."""

from __future__ import annotations

import asyncio
import copy
import functools
import re
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Annotated, Any, NamedTuple, TypeVar

import msgspec
import structlog

from disagg.api.errors import bad
from disagg.api.grammar_checks import GrammarChecks
from disagg.api.parsers.build import opens_reasoning
from disagg.api.parsers.registry import ParserNames
from disagg.core.grammars import text_literal
from disagg.core.tokens import TokenIds, pack_tokens
from disagg.router.text import REPLACEMENT, Decode, IdDecode, decode_with

log = structlog.get_logger(__name__)

T = TypeVar("T")
NO_PARSERS = ParserNames()
SHORT_CHARACTERS = 1024
"""Number of characters up to which a text is encoded on the event loop, in under 1 ms: about the time to wake a
thread."""
SHORT_MESSAGES = 16
"""Number of messages up to which a conversation is rendered on the event loop."""
_BYTE = re.compile("<0x([0-9A-F]{2})>")


class Rendered(NamedTuple):
    """A conversation rendered by the checkpoint's chat template."""

    tokens: list[int]
    thinking: bool
    """Whether the text ends within reasoning, which the answer continues."""


class ServedModel:
    """A model name with its tokenizer. A separate thread encodes long texts, which would block the event loop.

    The thread has its own copy of the tokenizer, because tokenizers are not thread-safe. Chat templates come from the
    checkpoint only, never from a client, and run in transformers' Jinja sandbox.
    """

    def __init__(
        self,
        name: str,
        tokenizer: Any,
        *,
        context_tokens: int,
        vocab_tokens: int,
        eos_ids: Sequence[int] = (),
        parsers: ParserNames = NO_PARSERS,
    ) -> None:
        """`tokenizer`: None for a model without a tokenizer, which takes and returns only token ids.

        `eos_ids`: tokens that end an answer. `parsers`: parsers of chat answers; `auto` becomes the parser that the
        chat template indicates.
        """
        self.name, self.context_tokens, self.vocab_tokens = name, context_tokens, vocab_tokens
        self.created_s = int(time.time())
        self._tokens: Any = list[Annotated[int, msgspec.Meta(ge=0, lt=vocab_tokens)]]
        self._special_tokens = {} if tokenizer is None else _special_tokens(tokenizer)
        self.decode: Decode = IdDecode() if tokenizer is None else decode_with(tokenizer)
        """Decodes an answer to text, without special tokens such as the end token. Without a tokenizer, the text is
        the token ids."""
        self.parsers = parsers.chosen(_template_text(tokenizer))
        """Parsers of chat answers."""
        visible = self.parsers.visible if tokenizer is not None else frozenset[str]()
        self.chat_decode: Decode = decode_with(tokenizer, visible) if visible else self.decode
        """Decodes a chat answer for its parser; the parser's markers stay in the text."""
        self.whole_decode: Decode = (
            self.decode if tokenizer is None else decode_with(tokenizer, frozenset(self._special_tokens))
        )
        """Decodes an answer to text that includes the special tokens."""
        self._tokenizer, self._encoder = tokenizer, copy.deepcopy(tokenizer)
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="tokenize")
        self._grammars = GrammarChecks(self._encoder, vocab_tokens, eos_ids)

    def close(self) -> None:
        """Stops the threads that encode texts, and make and check grammars."""
        self._thread.shutdown(wait=True, cancel_futures=True)
        self._grammars.close()

    async def make_grammar(self, make: Callable[[], T]) -> T:
        """Returns the result of `make`, which runs on the thread that makes grammars."""
        return await self._grammars.make(make)

    async def check_grammar(self, grammar: str, param: str) -> None:
        """Raises a 400 that names `param` unless `grammar` can constrain answers of the model."""
        self.require_tokenizer(param)
        await self._grammars.check(grammar, param)

    def marker(self, text: str) -> str:
        """Returns a marker as a term of a Lark grammar: the special token with this text, or else the text."""
        token = self._special_tokens.get(text)
        return text_literal(text) if token is None else f"<[{token}]>"

    def require_tokenizer(self, param: str) -> None:
        """Raises a 400 that names the text parameter `param`, if the model has no tokenizer."""
        if self._tokenizer is None:
            raise bad(
                param,
                f"{param} is text, and the model {self.name} has no tokenizer: send prompt as a list of token ids "
                f"to /v1/completions (stop_token_ids instead of stop), or add the tokenizer's files to the model's "
                f"folder and restart the server",
                "no_tokenizer",
            )

    async def encode(self, text: str, special: bool = True) -> list[int]:
        """Returns the tokens of `text`; with `special`, including the tokenizer's special tokens around it.

        Raises a 400 without a tokenizer.
        """
        self.require_tokenizer("prompt")
        if len(text) <= SHORT_CHARACTERS:
            return encode_text(self._tokenizer, text, special)
        return await self._in_thread(encode_text, self._encoder, text, special)

    async def render(
        self,
        messages: Sequence[dict[str, Any]],
        options: Mapping[str, Any] | None = None,
        generation_prompt: bool = True,
    ) -> Rendered:
        """Renders a conversation by the checkpoint's chat template; `options`: further variables of the template.

        Raises a 400 without a tokenizer or template, or if the template rejects the messages.
        """
        self.require_tokenizer("messages")
        if not self._encoder.chat_template:
            raise bad(
                "messages",
                f"the model {self.name} has no chat template: use /v1/completions",
                "no_chat_template",
            )
        options = {"add_generation_prompt": generation_prompt, **(options or {})}
        characters = len(msgspec.json.encode([messages, options.get("tools", ())]))
        if characters <= SHORT_CHARACTERS and len(messages) <= SHORT_MESSAGES:
            text, tokens = _render(self._tokenizer, messages, options)
        else:
            text, tokens = await self._in_thread(_render, self._encoder, messages, options)
        return Rendered(tokens, opens_reasoning(self.parsers, text))

    def spell(self, tokens: Sequence[int]) -> str:
        """Returns the text of tokens, including special tokens. Without a tokenizer, the text is the token ids."""
        if self._tokenizer is None:
            return self.decode(tokens)
        return str(self._tokenizer.decode(list(tokens)))

    def token_bytes(self, token: int) -> bytes:
        """Returns the UTF-8 bytes of a token. A token may be part of a character; clients join the bytes of
        tokens."""
        text = self.spell([token])
        if REPLACEMENT not in text:
            return text.encode()
        piece = str(self._tokenizer.convert_ids_to_tokens(token))
        if found := _BYTE.fullmatch(piece):  # SentencePiece's byte fallback
            return bytes([int(found[1], 16)])
        alphabet = _byte_of_character()
        if all(character in alphabet for character in piece):  # byte-level BPE spells bytes as characters
            return bytes(alphabet[character] for character in piece)
        return text.encode()

    def check_tokens(self, tokens: Sequence[Any], param: str) -> TokenIds:
        """Returns packed `tokens`. Raises a 400 that names `param` and the first token outside the vocabulary."""
        try:  # msgspec checks a long prompt faster than a Python loop
            return pack_tokens(msgspec.convert(tokens, self._tokens))
        except msgspec.ValidationError as exc:
            limit = self.vocab_tokens
            at, token = next(
                (at, token)
                for at, token in enumerate(tokens)
                if type(token) is not int or not 0 <= token < limit
            )
            raise bad(
                param, f"{param}[{at}] = {token!r} is not a token id of the model (0 to {limit - 1})"
            ) from exc

    async def _in_thread(self, work: Callable[..., T], *arguments: Any) -> T:
        return await asyncio.get_running_loop().run_in_executor(self._thread, work, *arguments)


def encode_text(tokenizer: Any, text: str, special: bool) -> list[int]:
    """Returns the tokens of `text`. Raises a 400 for a lone surrogate."""
    try:
        return list(tokenizer(text, add_special_tokens=special)["input_ids"])
    except UnicodeEncodeError as exc:
        raise bad("prompt", "the text contains a lone surrogate, which is not a valid character") from exc


def _render(
    tokenizer: Any, messages: Sequence[dict[str, Any]], options: Mapping[str, Any]
) -> tuple[str, list[int]]:
    """Returns the text of a conversation and its tokens. Raises a 400 if the template rejects the messages.

    A template is code of the checkpoint, which may raise any error for unexpected messages or options.
    """
    try:
        text = str(tokenizer.apply_chat_template(list(messages), tokenize=False, **options))
    except Exception as exc:
        log.info("chat_template_failed", error=repr(exc))
        raise bad("messages", f"the model's chat template rejects the messages: {exc}") from exc
    return text, encode_text(tokenizer, text, False)  # the template already contains the special tokens


def _special_tokens(tokenizer: Any) -> dict[str, int]:
    """Returns the special tokens by their texts: of several tokens with one text, the first."""
    added = list(tokenizer.added_tokens_decoder.items())
    return {one.content: token for token, one in reversed(added) if one.special}


def _template_text(tokenizer: Any) -> str:
    """Returns the checkpoint's chat templates as one text; empty without any."""
    template = getattr(tokenizer, "chat_template", None) or ""
    return template if isinstance(template, str) else "\n".join(map(str, template.values()))


@functools.cache
def _byte_of_character() -> dict[str, int]:
    from transformers.convert_slow_tokenizer import bytes_to_unicode

    return {character: byte for byte, character in bytes_to_unicode().items()}
