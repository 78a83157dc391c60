"""Token masks of answers that a grammar constrains, computed on side threads.

A mask depends only on the grammar and the answer so far. Any group can therefore continue an answer: a new matcher
consumes the answer's tokens. The computation of a mask starts as soon as the host has the preceding token, while the
device computes the step that uses the mask. (vLLM and SGLang overlap mask and step in the same way.) The masks of all
answers of a step are two calls into llguidance, which computes them in parallel without Python: a task of Python for
each answer would compete with the engine's thread for the interpreter.
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
from disagg.core.grammars import compile_grammar, mask_executor, matcher_error
from kernels.sampling.token_mask import WORD_BITS, mask_words

if TYPE_CHECKING:
    from llguidance import LLExecutor, LLMatcher, LLTokenizer

log = structlog.get_logger(__name__)

THREADS = 4
"""Size of each of an engine's three thread pools: the threads that compile grammars and begin answers, the threads
that compute masks, and llguidance's own threads. llguidance releases the GIL."""
KEPT_GRAMMARS = 64
"""Number of compiled grammars that are kept for later requests; each takes up to a few megabytes."""
Mask = npt.NDArray[np.int32]
"""Mask of allowed tokens: bit `t % 32` of word `t // 32` is set if token `t` is allowed."""


class SideThreads(NamedTuple):
    """The side threads of an engine."""

    grammars: ThreadPoolExecutor
    """Threads that compile grammars, and that wait for the compilation to begin an answer."""
    masks: ThreadPoolExecutor
    """Threads that compute masks."""

    @classmethod
    def start(cls) -> SideThreads:
        """Starts the threads."""
        return cls(*(ThreadPoolExecutor(THREADS, f"grammar-{name}") for name in cls._fields))


class ComputedMask(NamedTuple):
    """A mask that is computed on a side thread, alone or together with masks of other answers."""

    found: Future[list[Mask | RequestError]]
    place: int
    """Index of the mask in the result of `found`."""

    def result(self) -> Mask | RequestError:
        """Returns the mask, or the reason why there is none. Waits for the side thread."""
        return self.found.result()[self.place]


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
        self, template: Future[CompiledGrammar], threads: SideThreads, answered: Sequence[int] = ()
    ) -> None:
        """`template`: the compiled grammar. `answered`: the answer so far."""
        self._template, self._threads = template, threads
        self._matcher: LLMatcher | None = None
        self._tokens = len(answered)
        """Number of the answer's tokens before the latest mask."""
        # Threads that compute masks must not wait for the compilation of a grammar.
        pool = threads.masks if template.done() else threads.grammars
        self._mask = ComputedMask(pool.submit(self._begun, None, list(answered)), 0)

    @property
    def ready(self) -> bool:
        """Whether the latest mask is computed. The first mask waits for the compilation of the grammar."""
        return self._mask.found.done()

    def when_ready(self, call: Callable[[], object]) -> None:
        """Calls `call` once when the latest mask is computed, on a side thread, or at once if the mask is computed.

        A mask that `Constraints.close` cancels causes no call.
        """
        self._mask.found.add_done_callback(lambda found: None if found.cancelled() else call())

    def prepare(self, answer: Sequence[int]) -> None:
        """Starts the computation of the mask after `answer`, unless `Constraints.advance` has. Does not wait."""
        before, new = self._mask, list(answer[self._tokens :])
        if len(answer) < self._tokens:  # another answer: begin with a new matcher
            self._mask = ComputedMask(self._threads.masks.submit(self._begun, before, list(answer)), 0)
        elif new:
            self._mask = ComputedMask(self._threads.masks.submit(self._advanced, before, new), 0)
        self._tokens = len(answer)

    def next_token(self, token: int) -> NextToken:
        """Returns the task of the mask after one more token; see `follow`."""
        return NextToken(self, self._mask, token)

    def follow(self, mask: ComputedMask) -> None:
        """Makes `mask`, which follows one more token, the latest mask."""
        self._mask = mask
        self._tokens += 1

    def parts(self) -> tuple[LLMatcher, CompiledGrammar]:
        """Returns the matcher and its grammar. Only for the side threads, after a mask was computed."""
        assert self._matcher is not None, "the first mask creates the matcher"
        return self._matcher, self._template.result()

    def mask(self, answer: Sequence[int]) -> Mask | RequestError:
        """Returns the mask of the token that follows `answer`, or an error if the grammar is invalid or too complex.

        Waits for the side threads.
        """
        self.prepare(answer)
        return self._mask.result()

    def _begun(self, before: ComputedMask | None, answered: list[int]) -> list[Mask | RequestError]:
        """Returns the mask after the tokens `answered`, and creates the matcher.

        `before`: the latest mask of another answer, whose task still uses that answer's matcher.
        """
        try:
            if before is not None:
                before.result()
            self._matcher = self._template.result().matcher.deep_copy()
            return [self._computed(self._matcher, answered)]
        except BaseException as exc:  # noqa: BLE001 - a panic of Rust code is no Exception
            return [_failed(exc)]

    def _advanced(self, before: ComputedMask, new: list[int]) -> list[Mask | RequestError]:
        """Returns the mask after the `new` tokens, which follow the tokens of the mask `before`."""
        try:
            known = before.result()
            if isinstance(known, RequestError) or self._matcher is None:
                return [known]
            return [self._computed(self._matcher, new)]
        except BaseException as exc:  # noqa: BLE001 - a panic of Rust code is no Exception
            return [_failed(exc)]

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
            return _stuck(matcher)
        return mask


class NextToken(NamedTuple):
    """One more token of an answer, whose next mask is computed together with the masks of other answers."""

    constraint: AnswerConstraint
    before: ComputedMask
    token: int


def masks_after(tokens: Sequence[NextToken], executor: LLExecutor, words: int) -> list[Mask | RequestError]:
    """Returns the masks after `tokens`, each of `words` words. For a side thread.

    llguidance computes the masks on the threads of `executor`, and keeps a matcher's failure from the others.
    """
    found: list[Mask | RequestError] = [one.before.result() for one in tokens]
    masks = np.empty((len(tokens), words), dtype=np.int32)
    going: list[tuple[int, LLMatcher, int]] = []
    for index, (one, before) in enumerate(zip(tokens, found, strict=True)):
        if isinstance(before, RequestError):
            continue
        matcher, grammar = one.constraint.parts()
        if one.token in grammar.ends:
            found[index] = grammar.last
        else:
            going.append((index, matcher, one.token))
    if not going:
        return found  # llguidance refuses an empty list
    executor.consume_token_par([(matcher, token) for _, matcher, token in going])
    executor.unsafe_compute_mask_ptr(
        [(matcher, index) for index, matcher, _ in going], masks.ctypes.data, masks.strides[0], len(masks)
    )
    for index, matcher, _ in going:
        # A view would keep the masks of the whole batch, perhaps for as long as the answer is preempted.
        found[index] = _stuck(matcher) if matcher.is_error() else masks[index].copy()
    return found


class Constraints:
    """Creates the constraints of an engine's answers, and owns the side threads, which `close` ends. Thread-safe."""

    def __init__(self, load: Callable[[], LLTokenizer]) -> None:
        """`load`: function that returns the model's vocabulary; called once, on a side thread, when first needed."""
        self._load = load
        self._lock = threading.Lock()
        self._loading = threading.Lock()
        self._tokenizer: LLTokenizer | None = None
        self._executor: LLExecutor | None = None
        self._threads: SideThreads | None = None
        self._closed = False
        self._compiled: OrderedDict[str, Future[CompiledGrammar]] = OrderedDict()

    def answer(self, grammar: str, answered: Sequence[int] = ()) -> AnswerConstraint | None:
        """Returns the constraint of an answer that continues after `answered`; None without a grammar."""
        if not grammar:
            return None
        with self._lock:
            if self._closed:
                return None  # a closed engine samples no tokens
            if self._threads is None:
                self._threads = SideThreads.start()
            template = self._compiled.pop(grammar, None)
            if template is None:
                # The compilation is queued before the answers that wait for it on other threads of the pool.
                template = self._threads.grammars.submit(self._compile, grammar)
            self._compiled[grammar] = template
            while len(self._compiled) > KEPT_GRAMMARS:
                self._compiled.popitem(last=False)
            return AnswerConstraint(template, self._threads, answered)

    def advance(self, answers: Sequence[tuple[AnswerConstraint | None, int]]) -> None:
        """Starts the computation of the masks of several answers, each of which gets one more token. Does not wait.

        `answers`: each answer's constraint, whose latest mask the new token was drawn with, or None; and the token.
        """
        tokens = [constraint.next_token(token) for constraint, token in answers if constraint is not None]
        with self._lock:
            threads = self._threads
        if not tokens or threads is None:
            return
        found = threads.masks.submit(self._advanced, tokens)
        for index, one in enumerate(tokens):
            one.constraint.follow(ComputedMask(found, index))

    def close(self) -> None:
        """Ends the side threads after the running computations. No answer may use its constraint afterwards."""
        with self._lock:
            threads, self._threads, self._closed = self._threads, None, True
            self._compiled.clear()
        for pool in threads or ():
            pool.shutdown(wait=True, cancel_futures=True)
        self._executor = None  # ends llguidance's threads

    def _advanced(self, tokens: list[NextToken]) -> list[Mask | RequestError]:
        try:
            with self._loading:
                assert self._tokenizer is not None, "a compiled grammar needs the vocabulary"
                if self._executor is None:
                    self._executor = mask_executor(THREADS)
            return masks_after(tokens, self._executor, mask_words(self._tokenizer.vocab_size))
        except BaseException as exc:  # noqa: BLE001 - a panic of Rust code is no Exception
            return [_failed(exc)] * len(tokens)

    def _compile(self, grammar: str) -> CompiledGrammar:
        with self._loading:
            if self._tokenizer is None:
                self._tokenizer = self._load()
        matcher = compile_grammar(grammar, self._tokenizer)
        ends = self._tokenizer.eos_tokens
        bits = np.zeros(WORD_BITS * mask_words(self._tokenizer.vocab_size), dtype=np.uint8)
        bits[ends] = 1
        return CompiledGrammar(matcher, frozenset(ends), np.packbits(bits, bitorder="little").view(np.int32))


def _stuck(matcher: LLMatcher) -> RequestError:
    return RequestError(f"the answer cannot follow its grammar: {matcher_error(matcher)}")


def _failed(exc: BaseException) -> RequestError:
    if not isinstance(exc, DisaggError):
        log.error("constraint_failed", error=repr(exc))
    return RequestError(f"the answer's grammar cannot be used: {exc}")


def no_tokenizer() -> Any:
    """Raises `RequestError`; used as the vocabulary loader of engines without a tokenizer."""
    raise RequestError("this group has no tokenizer, which constrained answers need")
