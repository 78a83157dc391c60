"""Chat completions, responses and messages over real groups: one conversation, one answer in three formats."""

from __future__ import annotations

from typing import Any

import torch
from anthropic_types import accumulated, events_of, message_of
from local_groups import Checkpoints, LocalGroups, small_config
from system_server import SystemServer

torch.set_num_threads(1)

SYSTEM = "a system prompt of more than one page of the cache"


def test_one_answer_in_three_formats(checkpoints: Checkpoints) -> None:
    groups = LocalGroups(small_config(1, 1), checkpoints.source())
    try:
        with SystemServer(groups) as server:

            def asked(path: str, **fields: Any) -> Any:
                reply = server.ask(path, temperature=0, **fields)
                assert reply.status_code == 200, reply.text
                return reply

            messages = [{"role": "system", "content": SYSTEM}, {"role": "user", "content": "hi"}]
            chat = asked("/v1/chat/completions", messages=messages, max_tokens=12).json()
            text, usage = chat["choices"][0]["message"]["content"], chat["usage"]
            response = asked("/v1/responses", instructions=SYSTEM, max_output_tokens=12).json()
            assert response["output"][0]["content"][0]["text"] == text
            assert response["usage"]["input_tokens"] == usage["prompt_tokens"]
            assert response["usage"]["input_tokens_details"]["cached_tokens"] > 0
            fields = {"system": SYSTEM, "max_tokens": 12}
            message = message_of(asked("/v1/messages", **fields).content)
            streamed = accumulated(events_of(asked("/v1/messages", stream=True, **fields).content))
            assert message.content == streamed.content
            assert message.content[0].text == text  # type: ignore[union-attr]
            counts = message.usage
            assert counts.input_tokens + counts.cache_read_input_tokens == usage["prompt_tokens"]
            assert counts.cache_read_input_tokens > 0
            assert len(text) > 4
            stop = text[3:5]
            message = message_of(asked("/v1/messages", stop_sequences=[stop], **fields).content)
            assert (message.stop_reason, message.stop_sequence) == ("stop_sequence", stop)
    finally:
        groups.stop()
