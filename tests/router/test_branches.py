"""What is left of a request that lost a group, when it is given up, and how fast recoveries start."""

from __future__ import annotations

from dataclasses import replace

import pytest

from disagg.core.errors import PeerLostError
from disagg.core.sampling import derived_seed
from disagg.core.types import RequestKey, SamplingParams
from disagg.router.answers import Answer, new_answers
from disagg.router.recovery import (
    LONGEST_LINK_PAUSE_S,
    SAME_FAULT_S,
    Branch,
    RecoveryBudget,
    require_recoverable,
)
from transport.control import messages as m

KEY = RequestKey("r")


def branch_of(sampling: SamplingParams, *tokens: list[int]) -> Branch:
    answers = new_answers(sampling, None)
    for answer, values in zip(answers, tokens, strict=False):
        answer.tokens.extend(values)
    return Branch(tuple(answers), sampling)


def test_a_request_without_tokens_starts_again_as_a_whole() -> None:
    branch = branch_of(SamplingParams(n=3))
    branch.answers[1].early[1] = m.Tokens(KEY, 1, [5])
    assert branch.unfinished() == [branch]
    assert branch.answers[1].early == {}, "a message of the lost session is void"


def test_each_answer_with_tokens_goes_on_by_itself() -> None:
    branch = branch_of(SamplingParams(n=3, seed=9, max_tokens=8), [1, 2], [3], [4, 5, 6])
    branch.answers[1].over = True
    first, third = branch.unfinished()
    assert [one.answers[0].number for one in (first, third)] == [0, 2]
    assert first.sampling == SamplingParams(seed=9, max_tokens=8)
    assert third.sampling == SamplingParams(seed=derived_seed(9, 2), max_tokens=8)


def test_the_pause_for_a_link_doubles_up_to_its_limit() -> None:
    branch = branch_of(SamplingParams())
    pauses_s = [replace(branch, unlinked=count).link_pause_s for count in (1, 2, 3, 7, 5000)]
    assert pauses_s == [0.05, 0.1, 0.2, LONGEST_LINK_PAUSE_S, LONGEST_LINK_PAUSE_S]


def test_a_beam_search_starts_again() -> None:
    branch = branch_of(SamplingParams(n=2, beams=3), [1, 2], [])
    branch.answers[0].over = True
    assert branch.unfinished() == [branch], "the answers that have come are not returned again: they are over"


def test_a_request_is_recovered_a_limited_number_of_times() -> None:
    branch = branch_of(SamplingParams(), [1])
    for number in range(3):
        branch = branch.after_loss({f"decode-{number}"}, 0.0)
        require_recoverable("r", branch, (), 3, PeerLostError("lost"))
        branch.answers[0].tokens.append(number)
    branch = branch.after_loss({"decode-3"}, 0.0)
    with pytest.raises(
        PeerLostError, match=r"failed 4 times on its groups, more than router\.max_recoveries = 3"
    ):
        require_recoverable("r", branch, (), 3, PeerLostError("lost"))


def test_two_sessions_that_lose_a_group_at_the_same_token_are_enough() -> None:
    branch = branch_of(SamplingParams(), [1]).after_loss({"prefill", "decode"}, 0.0)
    branch.answers[0].tokens.append(2)
    branch = branch.after_loss({"prefill", "decode-2"}, 0.0)
    assert branch.suspects == ({"prefill", "decode-2"},), "a new token clears older suspicions"
    require_recoverable("r", branch, {"prefill", "decode-2"}, 9, PeerLostError("one host was lost"))
    branch = branch.after_loss({"prefill-2", "decode-3"}, 0.0)
    require_recoverable("r", branch, {"decode-2"}, 9, PeerLostError("lost"))
    with pytest.raises(PeerLostError, match="decode-2 and decode-3 were lost while they computed token 2"):
        require_recoverable("r", branch, {"decode-2", "decode-3"}, 9, PeerLostError("lost"))


def test_a_fault_that_is_noticed_again_counts_once() -> None:
    """Within `SAME_FAULT_S`, by another session with one of the groups, which decoded nothing."""
    branch = branch_of(SamplingParams(), [1])
    assert not branch.is_same_fault({"prefill", "decode"}, 0.0), "nothing was lost"
    branch = branch.after_loss({"prefill", "decode"}, 100.0)
    for groups, started_s, same in (
        ({"prefill", "decode"}, 100.0, True),
        ({"prefill", "decode-2"}, 100.0 + SAME_FAULT_S, True),
        ({"prefill", "decode"}, 100.1 + SAME_FAULT_S, False),
        ({"prefill-2", "decode-2"}, 100.0, False),
    ):
        assert branch.is_same_fault(groups, started_s) == same, (groups, started_s)
    again = branch.after_wait({"prefill", "decode-2"})
    assert (again.recoveries, again.unlinked, again.recovered_s) == (1, 1, 100.0)
    assert again.is_same_fault({"prefill-3", "decode-2"}, 100.0), "one group after the other notices it"
    died = again.after_wait({"prefill-3", "decode-4"})
    with pytest.raises(PeerLostError, match="decode-4 and prefill were lost"):
        require_recoverable("r", died, {"prefill", "decode-4"}, 9, PeerLostError("lost"))
    branch.answers[0].tokens.append(2)
    assert branch.is_same_fault({"prefill", "decode"}, 100.0), "the prefill group alone chose the first token"
    assert not branch.is_same_fault({"prefill", "decode"}, 100.0, decoded=True), "the groups worked behind it"


def test_a_router_that_is_cut_off_loses_its_groups_one_by_one_which_counts_once() -> None:
    """Both sessions have a group that is silent; a dead one is a fault of its own."""
    branch = branch_of(SamplingParams(), [1]).after_loss({"prefill", "decode"}, 100.0)
    others = {"prefill-2", "decode-2"}
    for silent, started_s, same in (
        ({"decode", "decode-2"}, 100.0 + SAME_FAULT_S, True),
        ({"prefill", "prefill-2", "decode-2"}, 100.0, True),
        ({"decode", "decode-2"}, 100.1 + SAME_FAULT_S, False),
        ({"decode-2"}, 100.0, False),
        ({"decode"}, 100.0, False),
        ({"prefill-2", "decode-2"}, 100.0, False),
        (frozenset(), 100.0, False),
    ):
        assert branch.is_same_fault(others, started_s, silent) == same, (silent, started_s)
    silent = {"decode", "decode-2"}
    assert not branch.is_same_fault(others, 100.0, silent, decoded=True), "the groups worked behind it"


def test_a_branch_knows_which_groups_of_its_latest_loss_were_silent() -> None:
    """They may be back when the next session fails of the same fault."""
    branch = branch_of(SamplingParams(), [1]).after_loss({"prefill", "decode"}, 100.0, {"decode", "other"})
    assert branch.silent == {"decode"}
    assert branch.after_wait().silent == {"decode"}
    assert branch.after_wait({"decode-2"}, {"decode-2"}).silent == {"decode-2"}
    assert branch.after_loss({"prefill"}, 101.0).silent == frozenset()


def test_the_first_recovery_starts_at_once_and_later_ones_wait() -> None:
    branch = branch_of(SamplingParams())
    pauses_s = []
    for _ in range(3):
        branch = branch.after_loss({"decode"}, 0.0)
        pauses_s.append(branch.pause_s)
    assert pauses_s == [0.0, 1.0, 4.0]


def test_the_budget_spreads_recoveries() -> None:
    now_s = [100.0]
    budget = RecoveryBudget(10.0, lambda: now_s[0])
    waits_s = [budget.wait_s() for _ in range(12)]
    assert waits_s == pytest.approx([0.0] * 10 + [0.1, 0.2])
    now_s[0] += 10.0
    waits_s = [budget.wait_s() for _ in range(12)]
    assert waits_s == pytest.approx([0.0] * 10 + [0.1, 0.2])


def test_an_answer_yields_tokens_in_order_and_none_behind_its_end() -> None:
    answer = Answer(0, None)
    assert list(answer.add(m.Tokens(KEY, 1, [5], "length"))) == []
    outputs = [output for output, _ in answer.add(m.Tokens(KEY, 0, [4]))]
    assert [(output.index, output.tokens, output.finish) for output in outputs] == [
        (0, (4,), None),
        (1, (5,), "length"),
    ]
    assert list(answer.add(m.Tokens(KEY, 2, [6]))) == []
