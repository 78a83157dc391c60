"""Messages with the log-probabilities of a prompt's tokens, from the leader of its group to the router."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence

from disagg.core.errors import RequestError
from disagg.core.types import TokenLogprobs
from disagg.node.plan import Work
from transport.control import messages as m

MESSAGE_PAIRS = 16384
"""Largest number of (token, log-probability) pairs in a message: at most 15 bytes each, so less than the smallest
`control.max_message_bytes`."""


def prompt_messages(work: Work, found: Sequence[TokenLogprobs]) -> Iterator[m.PromptLogprobs]:
    """Yields the messages for the log-probabilities `found` of the work's `targets`.

    Raises `RequestError` if one is not a number: the model's logits were not finite.
    """
    for at, one in enumerate(found):
        if math.isnan(one.logprob):
            raise RequestError(
                f"the model gave no finite logits at position {work.start + at} of the prompt; the request cannot "
                f"continue"
            )
    size = max(1, MESSAGE_PAIRS // (2 + (work.likeliest or 0)))
    for at in range(0, len(found), size):
        yield m.PromptLogprobs(work.key, work.start + 1 + at, list(found[at : at + size]))
