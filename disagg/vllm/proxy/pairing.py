"""Bodies of the two requests, to the prefill server and the decode server, that answer a client's request.

The proxy keeps each field as the client wrote it: parsing a prompt of 4,096 token ids, and writing it again twice,
takes longer than all other work for a request.
The names in `kv_transfer_params` are those of vLLM's NixlConnector, plus `transfer_id`.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import msgspec

from disagg.vllm.proxy.servers import AnswerError

Body = dict[str, msgspec.Raw]
"""Fields of a request's body, in JSON."""

_NOT_FOR_PREFILL = (
    "stream_options",
    "min_tokens",
    "logprobs",
    "top_logprobs",
    "response_format",
    "structured_outputs",
)
"""Fields without use, or without a valid value, in a request for one token, which the proxy discards."""
_SOURCE = ("remote_engine_id", "remote_host", "remote_port", "tp_size")
"""Parameters that are the same for all requests of a prefill server."""


def is_pairable(body: Body) -> bool:
    """Returns whether a request has one prompt and one answer, so that one transfer serves it.

    Log-probabilities of the prompt exist only on the server that computes the whole prompt. Raises `AnswerError` 400.
    """
    if (
        (value_of(body, "n") or 1) != 1
        or value_of(body, "echo")
        or value_of(body, "prompt_logprobs") is not None
    ):
        return False
    return not value_of(body, "use_beam_search") and not _has_prompts(bytes(body.get("prompt", b"")))


def fields_of(content: bytes) -> Body:
    """Returns the fields of a JSON object. Raises `AnswerError` 400 for other content."""
    found: Body = _decoded(content, Body, "the body is not a JSON object")
    return found


def value_of(body: Body, name: str) -> Any:
    """Returns the value of a field, None if it is absent. Raises `AnswerError` 400 for a value that is no JSON."""
    return _decoded(body[name], Any, f"the field {name} is not valid JSON") if name in body else None


def _decoded(content: msgspec.Raw | bytes, kind: Any, otherwise: str) -> Any:
    try:
        return msgspec.json.decode(content, type=kind)
    except (msgspec.DecodeError, UnicodeDecodeError) as exc:
        raise AnswerError.of(400, f"{otherwise}: {exc}") from exc


def _has_prompts(prompt: bytes) -> bool:
    """Returns whether the field `prompt` is a list of several prompts, texts or lists of token ids."""
    is_list = prompt.startswith(b"[") and (b'"' in prompt or prompt.find(b"[", 1) > 0)
    return is_list and len(_decoded(prompt, list[msgspec.Raw], "the prompt is not valid JSON")) != 1


def prefill_body(body: Body, transfer_id: str) -> dict[str, Any]:
    """Returns the request that computes the prompt, and one token."""
    found: dict[str, Any] = {name: value for name, value in body.items() if name not in _NOT_FOR_PREFILL}
    if value_of(body, "tools"):
        found["tool_choice"] = "none"  # tools remain in the prompt; one token is no complete tool call
    if "max_completion_tokens" in found:
        found["max_completion_tokens"] = 1
    params = {"do_remote_decode": True, "do_remote_prefill": False, "transfer_id": transfer_id}
    return found | {"max_tokens": 1, "stream": False, "kv_transfer_params": params}


def decode_body(body: Body, params: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the request that generates the answer. `params`: the prefill server's, or `params_at_once`."""
    return dict(body) | {"kv_transfer_params": dict(params)}


def source_of(params: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the parameters of a prefill server's answer that name its engine."""
    return {name: params.get(name) for name in _SOURCE}


def params_at_once(source: Mapping[str, Any], transfer_id: str) -> dict[str, Any]:
    """Returns parameters for a decode request that is sent before the prefill server has answered.

    Without `remote_block_ids`: the connector waits until the prefill server knows `transfer_id`.
    """
    return dict(source) | {
        "do_remote_prefill": True,
        "do_remote_decode": False,
        "remote_request_id": transfer_id,
        "transfer_id": transfer_id,
    }
