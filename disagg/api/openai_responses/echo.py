"""The fields of a response that repeat its request."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import msgspec

from disagg.api.errors import bad
from disagg.api.openai_responses.fields import FunctionSpec, ResponsesBody, TextOnly
from disagg.core.types import SamplingParams


def echo_of(
    body: ResponsesBody, functions: Sequence[FunctionSpec], sampling: SamplingParams
) -> dict[str, msgspec.Raw]:
    """Returns the JSON of each field. Several events of a stream contain them, so they are encoded only once.

    Raises a 400 for schemas that are nested too deeply.
    """
    fields: dict[str, Any] = {
        "background": False,
        "instructions": body.instructions,
        "max_output_tokens": body.max_output_tokens,
        "metadata": body.metadata,
        "parallel_tool_calls": body.parallel_tool_calls,
        "previous_response_id": None,
        "prompt_cache_key": body.prompt_cache_key,
        "reasoning": {"effort": body.reasoning.effort if body.reasoning else None, "summary": None},
        "safety_identifier": body.safety_identifier,
        "service_tier": "default",
        "store": False,
        "temperature": sampling.temperature,
        "text": {"format": (body.text.format if body.text else None) or TextOnly()},
        "tool_choice": body.tool_choice or "auto",
        "tools": functions,
        "top_p": body.top_p,
        "truncation": "disabled",
        "user": body.user,
    }
    try:
        return {name: msgspec.Raw(msgspec.json.encode(value)) for name, value in fields.items()}
    except RecursionError as exc:
        raise bad("tools", "tools or text.format is nested too deeply") from exc
