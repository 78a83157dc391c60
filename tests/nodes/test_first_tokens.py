"""How a prefill group chooses first tokens; what a decode group does with them, and with what a peer gets wrong."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from fake_model import VOCAB
from lone_leaders import lone_decode_leader, scheduler_of

from decode_node import sampled_step
from disagg.core.errors import ProtocolError
from disagg.core.sampling import sampling_of
from disagg.core.tokens import pack_tokens
from disagg.core.types import RequestKey, SamplingParams
from disagg.model.sampling.next_tokens import launch_tokens, next_tokens
from disagg.model.sampling.penalties import SamplingRow, history_of
from disagg.model.sampling.sampled import Chosen
from prefill_node.first_tokens import ROWS, SampledFirstTokens
from prefill_node.request import First, PrefillRequest
from transport.control import messages as m

KEY = RequestKey("r")


class Decode:
    """A decode group of one rank, with a prompt whose KV is on its way."""

    def __init__(self, sampling: SamplingParams) -> None:
        self.sent: list[Any] = []
        self.too_large: tuple[type[m.Message], ...] = ()
        """Messages that the control channel refuses."""
        self.leader = lone_decode_leader(self._send)
        self.scheduler = scheduler_of(self.leader)
        self.tell(m.Reserve(KEY, pack_tokens([1, 2, 3, 4, 5]), sampling, 60.0, "prefill"))

    def tell(self, message: m.Message) -> None:
        self.leader.handle("peer", message)

    def _send(self, peer: str, message: m.Message) -> None:
        if isinstance(message, self.too_large):
            raise ProtocolError("too large")
        self.sent.append(message)


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
    decode.tell(m.Landed(KEY, 7, 0))
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
    decode.tell(m.Landed(KEY, 7, 0))
    count = 4 if sampling.beams else sampling.n
    scores = [-1.0 - at for at in range(count)] if sampling.beams else []
    decode.tell(m.FirstTokens(KEY, 7, list(range(count)), scores))
    plan = decode.scheduler.next_step()
    assert plan is not None
    assert [work.tokens for work in plan.work] == [[token] for token in range(sampling.sequences)]


@pytest.mark.parametrize("ended", [0, 1])
def test_an_answer_may_end_before_anything_is_here(ended: int) -> None:
    """Its end comes from the router, first tokens from the prefill group: either may be first, and come again."""
    decode = Decode(SEVERAL)
    row = decode.scheduler.requests[KEY].ticket.row
    first = m.FirstTokens(KEY, 7, [4, 5, 6])
    for message in (m.EndAnswer(KEY, ended), m.EndAnswer(KEY, 9), first, m.EndAnswer(KEY, ended)):
        decode.tell(message)
        assert decode.scheduler.next_step() is None, "no KV is here"
    decode.tell(m.Landed(KEY, 7, 0))
    plan = decode.leader.next_plan()
    assert plan is not None
    left = [number for number in range(3) if number != ended]
    assert [work.tokens for work in plan.work] == [[4 + number] for number in left]
    assert row in [work.row for work in plan.work], "the ticket's row is some answer's until it is closed"
    decode.leader.commit(decode.leader.sample(plan, torch.zeros(2, VOCAB)))
    decode.tell(m.EndAnswer(KEY, ended))
    [sent] = [message for message in decode.sent if isinstance(message, m.StepTokens)]
    assert [one.answer for one in sent.tokens] == left
    for number in left:
        assert not decode.scheduler.requests[KEY].closing
        decode.tell(m.EndAnswer(KEY, number))
    decode.tell(m.RankClosed(KEY, 7, 0))
    decode.tell(m.EndAnswer(KEY, ended))
    assert not decode.scheduler.requests
    decode.scheduler.check()


def test_no_beam_ends_by_itself() -> None:
    decode = Decode(BEAMS)
    decode.tell(m.Landed(KEY, 7, 0))
    decode.tell(m.FirstTokens(KEY, 7, [1, 2, 3, 4], [-1.0, -2.0, -3.0, -4.0]))
    for number in range(2):
        decode.tell(m.EndAnswer(KEY, number))
    plan = decode.scheduler.next_step()
    assert plan is not None
    assert len(plan.work) == 2


def test_a_beam_search_whose_answers_are_too_large_fails() -> None:
    """The router would wait in vain for answers that no message can carry."""
    decode = Decode(SamplingParams(max_tokens=2, beams=2, n=2))
    decode.too_large = (m.Tokens, m.StepTokens)
    decode.tell(m.Landed(KEY, 7, 0))
    decode.tell(m.FirstTokens(KEY, 7, [1, 2, 3, 4], [-1.0, -2.0, -3.0, -4.0]))
    plan = decode.leader.next_plan()
    assert plan is not None
    decode.leader.commit(decode.leader.sample(plan, torch.zeros(2, VOCAB)))
    (failed,) = [message for message in decode.sent if isinstance(message, m.Failed)]
    assert failed.code == "protocol"


def test_many_answers_to_many_prompts_are_chosen_in_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever is asked for in one step, memory is taken for so many rows of logits at most."""
    sizes: list[int] = []

    def counted(logits: torch.Tensor, *rest: Any) -> Any:
        sizes.append(len(logits))
        return launch_tokens(logits, *rest)

    monkeypatch.setattr("prefill_node.first_tokens.launch_tokens", counted)
    logits = torch.randn(3, VOCAB, generator=torch.Generator().manual_seed(1))
    sampling = SamplingParams(n=25, temperature=1.5, seed=3, repetition_penalty=1.5)
    requests = {}
    for row in range(3):
        prompt = pack_tokens([row, 7, 8, 9])
        requests[row] = PrefillRequest(RequestKey(f"r{row}"), prompt, sampling, "router", 0.0)
    found = SampledFirstTokens(logits, requests, ()).result()
    assert max(sizes) <= ROWS < sum(sizes) == 75
    for row, request in requests.items():
        first = found[request.key]
        assert isinstance(first, First)
        for number, token in enumerate(first.tokens):
            alone = SamplingRow(sampling_of(sampling, number), (), history_of(request.prompt, sampling))
            (chosen,) = next_tokens(logits[row : row + 1], [alone], ())
            assert isinstance(chosen, Chosen)
            assert token == chosen.token


def test_pages_of_a_recomputed_chunk_are_in_use_until_the_device_has_computed_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Such a step samples no token that the host would wait for. A freed page may be another request's at once."""
    decode = Decode(SamplingParams(max_tokens=3))
    decode.tell(m.Landed(KEY, 7, 0))
    decode.tell(m.FirstTokens(KEY, 7, [4], []))
    request = decode.scheduler.requests[KEY]
    decode.scheduler.preemptor.preempt(request)
    plan = decode.leader.next_plan()
    assert plan is not None
    assert [work.tokens for work in plan.work] == [[1, 2, 3, 4, 5]]
    steps_at_end: list[int] = []
    event = SimpleNamespace(synchronize=lambda: steps_at_end.append(request.steps))
    monkeypatch.setattr(sampled_step, "record_event", lambda device: event)
    step = decode.leader.sample(plan, torch.zeros(1, VOCAB))
    assert steps_at_end == []
    decode.leader.commit(step)
    assert steps_at_end == [1]
    assert not request.in_step
