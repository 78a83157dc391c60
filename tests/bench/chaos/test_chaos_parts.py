"""Schedule, workload and comparison of a chaos run: pure functions."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace

import pytest

from disagg.bench.chaos.answers import (
    AnswerFaults,
    ReceivedAnswer,
    compare_received,
    logprob_distance,
)
from disagg.bench.chaos.schedule import CUT_WAYS, FAULT_KINDS, ROLES, Schedule, parse_seconds
from disagg.bench.chaos.workload import make_requests
from disagg.bench.common.names import parse_names
from disagg.bench.serve.lengths import parse_lengths
from disagg.core.errors import ConfigError
from disagg.core.sampling import check_sampling
from disagg.core.types import TokenLogprobs
from disagg.router.answers import Output


def test_a_schedule_is_a_function_of_its_seed() -> None:
    schedule = Schedule(("kill", "stop", "hang"), 10, gap_s=0.5, stops_s=(1.0, 15.0), seed=7)
    faults = schedule.faults()
    assert faults == schedule.faults()
    assert faults != replace(schedule, seed=8).faults()
    assert [fault.number for fault in faults] == list(range(1, 11))
    assert sorted(Counter(fault.kind for fault in faults).values()) == [3, 3, 4]
    assert {fault.stop_s for fault in faults} <= {1.0, 15.0}
    assert all(0 <= fault.delay_s <= 1.0 for fault in faults)


def test_cuts_have_durations_and_directions_of_their_own() -> None:
    faults = Schedule(("stop", "cut"), 40, stops_s=(1.0,), cuts_s=(2.0, 3.0), seed=7).faults()
    cuts = [fault for fault in faults if fault.kind == "cut"]
    assert {fault.stop_s for fault in cuts} == {2.0, 3.0}
    assert {fault.way for fault in cuts} == set(CUT_WAYS)
    assert {fault.stop_s for fault in faults if fault.kind == "stop"} == {1.0}


def test_every_rank_can_be_the_victim() -> None:
    faults = Schedule(count=100).faults()
    assert {fault.victim("abcde") for fault in faults} == set("abcde")
    assert {fault.victim("a") for fault in faults} == {"a"}


def test_flags_of_the_schedule() -> None:
    assert parse_names("--faults", "stop,kill", FAULT_KINDS) == ("kill", "stop")
    assert parse_names("--roles", "decode", ROLES) == ("decode",)
    assert parse_seconds("--stop-s", "1,0.5") == (1.0, 0.5)
    for text in ("", "kill,kill", "kill,burn"):
        with pytest.raises(ConfigError, match=r"--faults .*kill,stop,hang,cut"):
            parse_names("--faults", text, FAULT_KINDS)
    for text in ("", "1,x", "0", "1,-2", "inf"):
        with pytest.raises(ConfigError, match="--stop-s"):
            parse_seconds("--stop-s", text)


def test_requests_mix_sampling_and_are_a_function_of_the_seed() -> None:
    lengths = parse_lengths("--input-tokens", "4-8"), parse_lengths("--output-tokens", "2-9")
    requests = make_requests(16, *lengths, seed=3)
    assert requests == make_requests(16, *lengths, seed=3)
    assert requests != make_requests(16, *lengths, seed=4)
    for request in requests:
        check_sampling(request.sampling)
        assert 4 <= len(request.prompt) <= 8
        assert (request.sampling.temperature > 0) == (request.sampling.seed is not None)
    assert [request.sampling.n for request in requests].count(2) == 2
    assert any(request.sampling.temperature == 0 for request in requests)
    assert len({request.sampling.seed for request in requests if request.sampling.temperature}) == 10


def received(*outputs: Output) -> list[ReceivedAnswer]:
    answer = ReceivedAnswer()
    for output in outputs:
        answer.add(output)
    return [answer]


RIGHT = received(Output(0, (5,), "", None), Output(1, (6, 7), "", "stop"))


@pytest.mark.parametrize(
    ("found", "faults"),
    [
        ([Output(0, (5, 6), "", None), Output(2, (7,), "", "stop")], AnswerFaults()),
        ([Output(0, (5, 9, 7), "", "stop")], AnswerFaults(wrong=1)),
        ([Output(0, (5, 6, 7), "", "length")], AnswerFaults(finishes=1)),
        ([Output(0, (5, 6, 7), "", None)], AnswerFaults(finishes=1)),
        ([Output(0, (5, 6), "", "stop")], AnswerFaults(missing=1)),
        ([Output(0, (5,), "", None), Output(2, (7,), "", "stop")], AnswerFaults(missing=1)),
        ([Output(0, (5, 6), "", None), Output(1, (6, 7), "", "stop")], AnswerFaults(repeated=1)),
        ([Output(0, (5, 6), "", None), Output(1, (8, 7), "", "stop")], AnswerFaults(wrong=2, repeated=1)),
        ([Output(0, (5, 6, 7), "", "stop"), Output(3, (8,), "", None)], AnswerFaults(wrong=1, repeated=1)),
        ([], AnswerFaults(missing=3, finishes=1)),
    ],
)
def test_differences_from_the_quiet_answer(found: list[Output], faults: AnswerFaults) -> None:
    assert compare_received(RIGHT, received(*found), failed=False) == faults
    assert faults.any == (faults != AnswerFaults())


def test_a_late_output_fills_its_gap() -> None:
    found = received(Output(2, (7,), "", "stop"), Output(0, (5, 6), "", None))
    assert compare_received(RIGHT, found, failed=False) == AnswerFaults()


def test_a_failed_request_is_compared_up_to_its_tokens() -> None:
    for tokens, faults in (((), AnswerFaults()), ((5, 6), AnswerFaults()), ((5, 9), AnswerFaults(wrong=1))):
        assert compare_received(RIGHT, received(Output(0, tokens, "", None)), failed=True) == faults


def test_the_answers_of_a_request_are_summed() -> None:
    wrong = received(Output(0, (1, 6, 7), "", "stop"))
    assert compare_received(RIGHT + RIGHT, wrong + wrong, failed=False) == AnswerFaults(wrong=2)


def with_logprobs(*logprobs: tuple[int, float]) -> list[ReceivedAnswer]:
    entries = tuple(TokenLogprobs(token, value, ()) for token, value in logprobs)
    return received(Output(0, (5, 6), "", "stop", entries))


def test_log_probabilities_belong_to_their_tokens() -> None:
    right = with_logprobs((5, -1.0), (6, -2.0))
    assert compare_received(right, with_logprobs((5, -1.0), (6, -2.5)), failed=False) == AnswerFaults()
    assert logprob_distance(right, with_logprobs((5, -1.0), (6, -2.5))) == pytest.approx(0.5)
    assert compare_received(right, with_logprobs((5, -1.0)), failed=False) == AnswerFaults(logprobs=1)
    assert compare_received(right, with_logprobs((5, -1.0), (7, 0.0)), failed=False) == AnswerFaults(
        logprobs=1
    )
    assert compare_received(with_logprobs(), with_logprobs((5, 0.0)), failed=False) == AnswerFaults(
        logprobs=1
    )
    early = received(Output(0, (5,), "", None, (TokenLogprobs(5, -1.0, ()),)))
    assert compare_received(right, early, failed=True) == AnswerFaults()
    assert logprob_distance(RIGHT, RIGHT) == 0.0
