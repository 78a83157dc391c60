"""Makes and checks the grammar of each request before the request is admitted."""

from __future__ import annotations

import asyncio
import hashlib
from collections import OrderedDict
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Any, TypeVar

from disagg.api.errors import bad
from disagg.core.errors import DisaggError
from disagg.core.grammars import compile_grammar, grammar_tokenizer
from disagg.core.sampling import MAX_GRAMMAR_CHARACTERS

if TYPE_CHECKING:
    from llguidance import LLTokenizer

T = TypeVar("T")
KEPT_CHECKS = 1024
"""Number of cached check results."""


class GrammarChecks:
    """Makes grammars, and checks them by compiling them, each on a separate thread. Callers run on one event loop."""

    def __init__(self, tokenizer: Any, vocab_tokens: int, eos_ids: Sequence[int]) -> None:
        """`tokenizer`: a transformers tokenizer. The checking thread reads its vocabulary once."""
        self._tokenizer, self._vocab_tokens, self._eos_ids = tokenizer, vocab_tokens, eos_ids
        self._vocabulary: LLTokenizer | None = None
        self._maker = ThreadPoolExecutor(1, thread_name_prefix="grammar-maker")
        self._checker = ThreadPoolExecutor(1, thread_name_prefix="grammar")
        self._errors: OrderedDict[bytes, str] = OrderedDict()
        """Error message by the grammar's hash; empty for a valid grammar."""

    def close(self) -> None:
        """Ends the threads."""
        self._maker.shutdown(wait=True, cancel_futures=True)
        self._checker.shutdown(wait=True, cancel_futures=True)

    async def make(self, make: Callable[[], T]) -> T:
        """Runs `make`, which returns a grammar, on a thread of its own: a schema with `oneOf` of many branches takes
        up to half a second, and no known grammar waits for a compilation."""
        return await asyncio.get_running_loop().run_in_executor(self._maker, make)

    async def check(self, grammar: str, param: str) -> None:
        """Raises a 400 that names `param` for a grammar that is invalid, too large or too complex."""
        if len(grammar) > MAX_GRAMMAR_CHARACTERS:
            raise bad(
                param,
                f"{param} has a grammar of {len(grammar)} characters; the limit is {MAX_GRAMMAR_CHARACTERS}",
            )
        key = hashlib.blake2b(grammar.encode(errors="surrogatepass"), digest_size=16).digest()
        error = self._errors.get(key)
        if error is None:
            loop = asyncio.get_running_loop()
            error = await loop.run_in_executor(self._checker, self._error_of, grammar)
            self._errors[key] = error
            if len(self._errors) > KEPT_CHECKS:
                self._errors.popitem(last=False)
        if error:
            raise bad(param, f"{param}: {error}", "invalid_grammar")

    def _error_of(self, grammar: str) -> str:
        try:
            if self._vocabulary is None:
                self._vocabulary = grammar_tokenizer(self._tokenizer, self._vocab_tokens, self._eos_ids)
            compile_grammar(grammar, self._vocabulary)
        except (DisaggError, UnicodeEncodeError) as exc:
            return str(exc)
        return ""
