"""What a decode group does with first tokens, and with what a peer may get wrong about them."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
from fake_model import VOCAB, fake_spec

from decode_node.costs import Rates
from decode_node.leader import DecodeLeader
from decode_node.scheduler import DecodeScheduler
from disagg.core.tokens import pack_tokens
from disagg.core.types import RequestKey, SamplingParams
from disagg.node.ledger import Ledger
from transport import messages as m

KEY = RequestKey("r")


class Decode:
    """A decode group of one rank, with a prompt whose KV is on its way."""

    def __init__(self, sampling: SamplingParams) -> None:
        self.sent: list[Any] = []
        self.scheduler = DecodeScheduler(
            Ledger(pool_tokens=256, page_size=4, rows=8, eviction="lru"),
            group="decode",
            ranks=1,
            max_batch=8,
            max_context_tokens=256,
            first_ticket=7,
            chunk_tokens=64,
            rates=Rates(1e3, 1e3),
        )
        send = lambda peer, message: self.sent.append(message)  # noqa: E731
        spec = fake_spec(layers=1, kv_heads=1)
        self.leader = DecodeLeader(self.scheduler, (), spec, send, lambda message: None, lambda: 0.0)
        rank = SimpleNamespace(control_address="decode-0", swap_blocks=0)
        group: Any = SimpleNamespace(ranks=(rank,), role="decode", name="decode", leader=rank)
        self.leader.join(group)
        prefill: Any = SimpleNamespace(name="prefill", leader=SimpleNamespace(control_address="prefill-0"))
        self.leader.link(prefill)
        self.tell(m.Reserve(KEY, pack_tokens([1, 2, 3, 4, 5]), sampling, 60.0, "prefill"))
        self.tell(m.Landed(KEY, 7, 0))

    def tell(self, message: m.Message) -> None:
        self.leader.handle("peer", message)


BEAMS = SamplingParams(max_tokens=3, beams=2, n=2)
ONE_STEP = SamplingParams(max_tokens=1, beams=2, n=2)
SEVERAL = SamplingParams(max_tokens=3, n=3)


@pytest.mark.parametrize(
    ("sampling", "tokens", "scores"),
    [
        (SEVERAL, [1, 2], []),
        (SEVERAL, [1, 2, 3, 4], []),
        (SEVERAL, [1, 2, VOCAB], []),
        (SEVERAL, [1, 2, 3], [-1.0, -2.0, -3.0]),
        (BEAMS, [1, 2, 3, 4], []),
        (BEAMS, [1, 2, 3, 4], [-1.0, -2.0]),
        (BEAMS, [1], [-1.0]),
        (ONE_STEP, [1], [-1.0]),
    ],
)
def test_wrong_first_tokens_end_their_request(
    sampling: SamplingParams, tokens: list[int], scores: list[float]
) -> None:
    """The router hears of it at once: it would wait in vain, or the group's next step would fail."""
    decode = Decode(sampling)
    decode.tell(m.FirstTokens(KEY, 7, tokens, scores))
    (failed,) = [message for message in decode.sent if isinstance(message, m.Failed)]
    assert failed.code == "protocol"
    assert decode.scheduler.next_step() is None
    decode.tell(m.RankClosed(KEY, 7, 0))
    assert not decode.scheduler.requests
    decode.scheduler.check()


@pytest.mark.parametrize("sampling", [SEVERAL, BEAMS, SamplingParams(max_tokens=3)])
def test_right_ones_are_computed_on_from(sampling: SamplingParams) -> None:
    decode = Decode(sampling)
    count = 4 if sampling.beams else sampling.n
    scores = [-1.0 - at for at in range(count)] if sampling.beams else []
    decode.tell(m.FirstTokens(KEY, 7, list(range(count)), scores))
    plan = decode.scheduler.next_step()
    assert plan is not None
    assert [work.tokens for work in plan.work] == [[token] for token in range(sampling.sequences)]
