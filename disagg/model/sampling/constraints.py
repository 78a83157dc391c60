"""Token masks of answers that a grammar constrains, computed on side threads.

A mask depends only on the grammar and the answer so far. Any group can therefore continue an answer: a new matcher
consumes the answer's tokens. The computation of a mask starts as soon as the host has the preceding token, while the
device computes the step that uses the mask. (vLLM and SGLang overlap mask and step in the same way.)
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import numpy.typing as npt
import structlog

from disagg.core.errors import DisaggError, RequestError
from disagg.core.grammars import compile_grammar, matcher_error

if TYPE_CHECKING:
    from llguidance import LLMatcher, LLTokenizer

log = structlog.get_logger(__name__)

THREADS = 4
"""Number of an engine's side threads, which compile grammars and compute masks; llguidance releases the GIL."""
KEPT_GRAMMARS = 64
"""Number of compiled grammars that are kept for later requests; each takes up to a few megabytes."""
Mask = npt.NDArray[np.int32]
"""Mask of allowed tokens: bit `t % 32` of word `t // 32` is set if token `t` is allowed."""


class CompiledGrammar(NamedTuple):
    """A grammar that is compiled for a model's vocabulary."""

    matcher: LLMatcher
    """Matcher at the start of an answer, from which each answer's matcher is copied."""
    ends: frozenset[int]
    """Tokens that end an answer."""
    last: Mask
    """Mask that allows only `ends`."""


class AnswerConstraint:
    """The grammar of one answer, and the mask of its next token. One thread at a time may use the object.

    The masks are computed on side threads, in the order of the answer's tokens.
    """

    def __init__(
        self, template: Future[CompiledGrammar], pool: ThreadPoolExecutor, answered: Sequence[int] = ()
    ) -> None:
        """`template`: the compiled grammar. `answered`: the answer so far."""
        self._template, self._pool = template, pool
        self._matcher: LLMatcher | None = None
        self._tokens = len(answered)
        """Number of the answer's tokens before the latest mask."""
        self._mask: Future[Mask | RequestError] = pool.submit(self._begun, list(answered))

    @property
    def ready(self) -> bool:
        """Whether the latest mask is computed. The first mask waits for the compilation of the grammar."""
        return self._mask.done()

    def when_ready(self, call: Callable[[], object]) -> None:
        """Calls `call` once when the latest mask is computed, on a side thread, or at once if the mask is computed.

        A mask that `Constraints.close` cancels causes no call.
        """
        self._mask.add_done_callback(lambda mask: None if mask.cancelled() else call())

    def prepare(self, answer: Sequence[int]) -> None:
        """Starts the computation of the mask that follows `answer`. Does not wait."""
        before, new = self._mask, list(answer[self._tokens :])
        if len(answer) < self._tokens:  # another answer: begin with a new matcher
            self._mask = self._pool.submit(self._begun, list(answer))
        elif new:
            self._mask = self._pool.submit(self._advanced, before, new)
        self._tokens = len(answer)

    def mask(self, answer: Sequence[int]) -> Mask | RequestError:
        """Returns the mask of the token that follows `answer`, or an error if the grammar is invalid or too complex.

        Waits for the side threads.
        """
        self.prepare(answer)
        return self._mask.result()

    def _begun(self, answered: list[int]) -> Mask | RequestError:
        """Returns the mask after the tokens `answered`, and creates the matcher."""
        try:
            self._matcher = self._template.result().matcher.deep_copy()
            return self._computed(self._matcher, answered)
        except BaseException as exc:  # noqa: BLE001 - a panic of Rust code is no Exception
            return _failed(exc)

    def _advanced(self, before: Future[Mask | RequestError], new: list[int]) -> Mask | RequestError:
        """Returns the mask after the `new` tokens, which follow the tokens of the mask `before`."""
        try:
            known = before.result()
            if isinstance(known, RequestError) or self._matcher is None:
                return known
            return self._computed(self._matcher, new)
        except BaseException as exc:  # noqa: BLE001 - a panic of Rust code is no Exception
            return _failed(exc)

    def _computed(self, matcher: LLMatcher, new: list[int]) -> Mask | RequestError:
        """Returns the mask after `matcher` has consumed the tokens `new`; after an end token, only end tokens are
        allowed."""
        _, ends, last = self._template.result()
        ended = bool(new) and new[-1] in ends
        matcher.consume_tokens(new[:-1] if ended else new)
        mask: Mask = last
        if not ended and not matcher.is_error():
            mask = np.frombuffer(matcher.compute_bitmask(), dtype=np.int32)
        if matcher.is_error():
            return RequestError(f"the answer cannot follow its grammar: {matcher_error(matcher)}")
        return mask


class Constraints:
    """Creates the constraints of an engine's answers, and owns the side threads, which `close` ends. Thread-safe."""

    def __init__(self, load: Callable[[], LLTokenizer]) -> None:
        """`load`: function that returns the model's vocabulary; called once, on a side thread, when first needed."""
        self._load = load
        self._lock = threading.Lock()
        self._loading = threading.Lock()
        self._tokenizer: LLTokenizer | None = None
        self._pool: ThreadPoolExecutor | None = None
        self._closed = False
        self._compiled: OrderedDict[str, Future[CompiledGrammar]] = OrderedDict()

    def answer(self, grammar: str, answered: Sequence[int] = ()) -> AnswerConstraint | None:
        """Returns the constraint of an answer that continues after `answered`; None without a grammar."""
        if not grammar:
            return None
        with self._lock:
            if self._closed:
                return None  # a closed engine samples no tokens
            if self._pool is None:
                self._pool = ThreadPoolExecutor(THREADS, thread_name_prefix="grammar")
            template = self._compiled.pop(grammar, None)
            if template is None:
                # The compilation is queued before the masks that wait for it on other threads of the pool.
                template = self._pool.submit(self._compile, grammar)
            self._compiled[grammar] = template
            while len(self._compiled) > KEPT_GRAMMARS:
                self._compiled.popitem(last=False)
            return AnswerConstraint(template, self._pool, answered)

    def close(self) -> None:
        """Ends the side threads after the running computations. No answer may use its constraint afterwards."""
        with self._lock:
            pool, self._pool, self._closed = self._pool, None, True
            self._compiled.clear()
        if pool is not None:
            pool.shutdown(wait=True, cancel_futures=True)

    def _compile(self, grammar: str) -> CompiledGrammar:
        with self._loading:
            if self._tokenizer is None:
                self._tokenizer = self._load()
        matcher = compile_grammar(grammar, self._tokenizer)
        ends = self._tokenizer.eos_tokens
        bits = np.zeros((self._tokenizer.vocab_size + 31) // 32 * 32, dtype=np.uint8)
        bits[ends] = 1
        return CompiledGrammar(matcher, frozenset(ends), np.packbits(bits, bitorder="little").view(np.int32))


def _failed(exc: BaseException) -> RequestError:
    if not isinstance(exc, DisaggError):
        log.error("constraint_failed", error=repr(exc))
    return RequestError(f"the answer's grammar cannot be used: {exc}")


def no_tokenizer() -> Any:
    """Raises `RequestError`; used as the vocabulary loader of engines without a tokenizer."""
    raise RequestError("this group has no tokenizer, which constrained answers need")
