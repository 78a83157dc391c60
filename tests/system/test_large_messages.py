"""A request that needs a message larger than its channel takes ends at once, by itself, with one clear error."""

from __future__ import annotations

import pytest
from local_groups import Checkpoints, LocalGroups, ask, local_groups, random_prompts, small_config

from disagg.core.errors import ProtocolError
from disagg.core.types import SamplingParams
from disagg.router.router import Router
from transport.control import messages as m

LONG, SHORT = random_prompts(450, 30, seed=11)
"""With pages of one token, `LONG` has 450 of them, which a message names twice."""
SAMPLING = SamplingParams(max_tokens=3)


def check(groups: LocalGroups, checkpoints: Checkpoints, kind: str) -> None:
    """The long prompt fails by a message of that kind, and not by its time; a short one beside it does not."""

    async def work(router: Router) -> None:
        with pytest.raises(ProtocolError, match=rf"^{kind} takes \d+ bytes; a message may take"):
            await ask(router, "long", LONG, SAMPLING)
        answer = await ask(router, "short", SHORT, SAMPLING)
        assert answer.tokens == checkpoints.greedy(groups.source, SHORT, SAMPLING.max_tokens)

    groups.serve(work)


@pytest.mark.parametrize(
    ("tp", "role", "kind", "limit_bytes"),
    [
        ((1, 2), "decode", "OpenReceive", 1500),
        ((1, 1), "decode", "Reserved", 800),
        ((2, 1), "prefill", "OpenSend", 1500),
    ],
)
def test_a_leader_fails_the_request(
    checkpoints: Checkpoints, tp: tuple[int, int], role: str, kind: str, limit_bytes: int
) -> None:
    config = small_config(*tp, prefill_page=1, decode_page=1, metrics_interval_s=0)
    with local_groups(config, checkpoints.source(), max_message_bytes={f"{role}-0": limit_bytes}) as groups:
        check(groups, checkpoints, kind)


def test_a_router_fails_the_request(checkpoints: Checkpoints) -> None:
    config = small_config(1, 1, metrics_interval_s=0)
    with local_groups(config, checkpoints.source(), max_message_bytes={"router": 650}) as groups:
        check(groups, checkpoints, "Reserve")


def test_a_sender_fails_the_request(checkpoints: Checkpoints, monkeypatch: pytest.MonkeyPatch) -> None:
    """A lease request, which is an active message; the first of two that the chunk needs."""

    def encode(message: m.Message) -> bytes:
        return m.encode(message, 2000 if isinstance(message, m.LeaseRequest) else m.MAX_MESSAGE_BYTES)

    monkeypatch.setattr("transport.active_messages.encode", encode)
    config = small_config(1, 2, chunk_tokens=512, ring_bytes=4096)
    with local_groups(config, checkpoints.source()) as groups:
        check(groups, checkpoints, "LeaseRequest")
