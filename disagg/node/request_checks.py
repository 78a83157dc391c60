"""Checks whether a request may be admitted, and whether an answer has ended."""

from __future__ import annotations

from collections.abc import Sequence

from disagg.core.errors import InvalidRequestError
from disagg.core.sampling import check_sampling, ending_tokens, ends_answer
from disagg.core.tokens import TokenIds, all_below
from disagg.core.types import SamplingParams
from disagg.model.sampling.beam_search import candidates_wanted
from disagg.model.spec.model_spec import ModelSpec, require_one_rope


def check_request(
    prompt: TokenIds, sampling: SamplingParams, spec: ModelSpec, answered: Sequence[int] = ()
) -> None:
    """Raises `InvalidRequestError` or `PromptTooLongError` for a request that a step could not compute.

    Requests are checked before admission because a failed step breaks the whole group. `answered`: the answer so far
    of a recovered request.
    """
    if not prompt:
        raise InvalidRequestError("the prompt has no tokens; it must have 1 or more")
    if not all_below(prompt, spec.vocab_size):
        raise InvalidRequestError(
            f"the prompt has a token outside the model's vocabulary of {spec.vocab_size} tokens"
        )
    check_sampling(sampling, spec.vocab_size, spec.eos_ids)
    if sampling.grammar and not spec.eos_ids:
        raise InvalidRequestError(
            "a constrained answer needs a model with an end token (eos_token_id)", param="grammar"
        )
    if sampling.prompt_logprobs is not None and not spec.scores_prompts:
        raise InvalidRequestError(
            f"prompt_logprobs is not supported for {spec.architecture}: its head cannot be computed apart from its "
            f"layers",
            param="prompt_logprobs",
        )
    wanted = candidates_wanted(sampling, ending_tokens(sampling, spec.eos_ids))
    if wanted > spec.vocab_size:
        raise InvalidRequestError(
            f"beams = {sampling.beams} is not allowed: the search ranks {wanted} tokens, and the model's vocabulary "
            f"has {spec.vocab_size}",
            param="beams",
        )
    require_one_rope(spec, len(prompt), sampling.max_tokens)
    if answered and (sampling.sequences > 1 or sampling.beams):
        raise InvalidRequestError(
            f"a request that continues an answer cannot have {sampling.sequences} sequences or beams: continue each "
            f"answer in a separate request"
        )
    if answered and max(answered) >= spec.vocab_size:
        raise InvalidRequestError(
            f"the answer so far has a token outside the model's vocabulary of {spec.vocab_size} tokens"
        )


def finish_reason(tokens: Sequence[int], sampling: SamplingParams, eos_ids: Sequence[int]) -> str | None:
    """Returns why the answer ends with its last token: `stop`, `length`, or None if the answer continues."""
    if ends_answer(tokens[-1], sampling, eos_ids):
        return "stop"
    return "length" if len(tokens) >= sampling.max_tokens else None
