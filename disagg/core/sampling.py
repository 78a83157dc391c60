"""Ranges of the sampling parameters, and the tokens that end an answer."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence

import msgspec

from disagg.core.errors import InvalidRequestError
from disagg.core.types import SamplingParams

MAX_LOGPROBS = 20
"""Largest number of top log-probabilities per token; OpenAI's limit."""
MAX_BIAS = 100.0
MAX_PENALTY = 2.0
MAX_SEQUENCES = 128
"""Largest number of answers or beams of one request."""
MAX_LENGTH_PENALTY = 10.0
INFINITE = float("inf")
MAX_GRAMMAR_CHARACTERS = 1 << 18
"""Largest grammar of a request. The compilation of the largest grammars takes up to a few seconds."""
SEED_LIMIT = 1 << 63
"""Upper limit (exclusive) of seeds, which are signed 64-bit integers."""


def check_sampling(
    sampling: SamplingParams, vocab_tokens: int | None = None, eos_ids: Sequence[int] = ()
) -> None:
    """Raises `InvalidRequestError` for the first field out of range; `param` names the field.

    Token ids are compared with the vocabulary if `vocab_tokens`, its size, is given. `eos_ids`: the model's end
    tokens.
    """
    s = sampling
    rules = (
        ("max_tokens", s.max_tokens >= 1, "at least 1"),
        ("temperature", 0 <= s.temperature < INFINITE, "0 (greedy) or more"),
        ("top_k", 0 <= s.top_k < SEED_LIMIT, "0 (off) or more, in 64 bits"),
        ("top_p", 0 < s.top_p <= 1, "more than 0 and at most 1 (off)"),
        ("min_p", 0 <= s.min_p <= 1, "0 (off) to 1"),
        ("seed", s.seed is None or -SEED_LIMIT <= s.seed < SEED_LIMIT, "an integer of 64 bits"),
        ("stop", all(s.stop), "texts that are not empty"),
        ("min_tokens", 0 <= s.min_tokens <= s.max_tokens, f"0 to max_tokens, {s.max_tokens}"),
        ("presence_penalty", abs(s.presence_penalty) <= MAX_PENALTY, "-2 to 2"),
        ("frequency_penalty", abs(s.frequency_penalty) <= MAX_PENALTY, "-2 to 2"),
        # The penalty is a float32 divisor: a much smaller penalty rounds to 0, a much larger one to infinity.
        ("repetition_penalty", 1e-30 <= s.repetition_penalty <= 1e30, "from 1e-30 to 1e30; 1 is off"),
        ("logprobs", s.logprobs is None or 0 <= s.logprobs <= MAX_LOGPROBS, f"0 to {MAX_LOGPROBS}, or none"),
        (
            "prompt_logprobs",
            s.prompt_logprobs is None or 0 <= s.prompt_logprobs <= MAX_LOGPROBS,
            f"0 to {MAX_LOGPROBS}, or none",
        ),
        ("n", 1 <= s.n <= MAX_SEQUENCES, f"1 to {MAX_SEQUENCES}"),
        (
            "beams",
            s.beams == 0 or s.n <= s.beams <= MAX_SEQUENCES,
            f"0 (off), or n, {s.n}, to {MAX_SEQUENCES}",
        ),
        (
            "length_penalty",
            abs(s.length_penalty) <= MAX_LENGTH_PENALTY,
            f"-{MAX_LENGTH_PENALTY:g} to {MAX_LENGTH_PENALTY:g}",
        ),
    )
    for field, holds, allowed in rules:
        if not holds:
            raise InvalidRequestError(
                f"{field} = {getattr(s, field)!r} is not allowed; it must be {allowed}", param=field
            )
    if s.beams:
        _check_beams(s)
    if s.grammar:
        _check_grammar(s)
    for token, bias in s.logit_bias:
        if not abs(bias) <= MAX_BIAS:
            raise InvalidRequestError(
                f"logit_bias of token {token} = {bias!r} is not allowed; it must be -100 to 100",
                param="logit_bias",
            )
    _check_tokens("stop_token_ids", s.stop_token_ids, vocab_tokens)
    _check_tokens("logit_bias", [token for token, _ in s.logit_bias], vocab_tokens)
    _check_ending(s, vocab_tokens, eos_ids)


def _check_ending(s: SamplingParams, vocab_tokens: int | None, eos_ids: Sequence[int]) -> None:
    """Raises `InvalidRequestError` if `min_tokens` leaves no token that could begin the answer."""
    ending = {token for token in ending_tokens(s, eos_ids) if vocab_tokens and token < vocab_tokens}
    if s.min_tokens and len(ending) == vocab_tokens:
        raise InvalidRequestError(
            f"min_tokens = {s.min_tokens} is not allowed: each of the model's {vocab_tokens} tokens ends the answer "
            f"(stop_token_ids), so none can begin it; leave tokens out of stop_token_ids, or set min_tokens to 0",
            param="min_tokens",
        )


def sampling_of(sampling: SamplingParams, index: int) -> SamplingParams:
    """Returns the sampling parameters of a request's answer number `index`. Answers differ in the seed only."""
    if index == 0 or sampling.seed is None:
        return sampling
    return msgspec.structs.replace(sampling, seed=derived_seed(sampling.seed, index))


def derived_seed(seed: int, index: int) -> int:
    """Returns the seed of answer number `index`: `seed` for 0, else 63 bits of a hash of `seed` and `index`."""
    if index == 0:
        return seed
    return int.from_bytes(hashlib.blake2b(f"{seed} {index}".encode(), digest_size=8).digest()) >> 1


def sequences_that_fit(prompt_tokens: int, max_tokens: int, pool_tokens: int, page_size: int) -> int:
    """Returns how many answers of `max_tokens` tokens fit a pool of `pool_tokens` at the same time.

    The answers share the full pages of the prompt; every further page belongs to one answer.
    """
    common = prompt_tokens // page_size
    own = -(-(prompt_tokens + max_tokens) // page_size) - common
    return max(0, pool_tokens // page_size - common) // own


def ending_tokens(sampling: SamplingParams, eos_ids: Sequence[int]) -> tuple[int, ...]:
    """Returns the tokens that end an answer: stop tokens and, unless `ignore_eos` is set, the model's end tokens."""
    return sampling.stop_token_ids if sampling.ignore_eos else (*sampling.stop_token_ids, *eos_ids)


def ends_answer(token: int, sampling: SamplingParams, eos_ids: Sequence[int]) -> bool:
    """Returns whether `token` is one of `ending_tokens`."""
    return token in sampling.stop_token_ids or (token in eos_ids and not sampling.ignore_eos)


def _check_beams(sampling: SamplingParams) -> None:
    """Raises `InvalidRequestError` for a parameter that beam search does not support."""
    plain = SamplingParams()
    penalties = ("presence_penalty", "frequency_penalty", "repetition_penalty")
    for field in (
        "temperature",
        "top_k",
        "top_p",
        "min_p",
        "stop",
        "logprobs",
        "prompt_logprobs",
        *penalties,
    ):
        value = getattr(sampling, field)
        if value != getattr(plain, field):
            raise InvalidRequestError(
                f"{field} = {value!r} is not supported with beam search: leave it at {getattr(plain, field)!r}",
                param=field,
            )


def _check_grammar(sampling: SamplingParams) -> None:
    """Raises `InvalidRequestError` for too large a grammar, or a parameter that cannot be combined with a grammar."""
    if len(sampling.grammar) > MAX_GRAMMAR_CHARACTERS:
        raise InvalidRequestError(
            f"the grammar has {len(sampling.grammar)} characters; the limit is {MAX_GRAMMAR_CHARACTERS}",
            param="grammar",
        )
    for field, off, reason in (
        ("beams", 0, "beam search does not support constrained answers"),
        ("ignore_eos", False, "the end of the grammar ends the answer"),
        ("min_tokens", 0, "the grammar alone decides where the answer may end"),
    ):
        if getattr(sampling, field) != off:
            raise InvalidRequestError(f"{field} is not allowed with a grammar: {reason}", param=field)


def _check_tokens(field: str, tokens: Sequence[int], vocab_tokens: int | None) -> None:
    limit = INFINITE if vocab_tokens is None else vocab_tokens
    wrong = next((token for token in tokens if not 0 <= token < limit), None)
    if wrong is not None:
        allowed = "0 or more" if vocab_tokens is None else f"0 to {vocab_tokens - 1}, the model's vocabulary"
        raise InvalidRequestError(
            f"{field} has token {wrong}, which is not allowed; it must be {allowed}", param=field
        )
