"""Which waiting prompt leaves which decode group, and when the router looks for one; no event loop."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

import pytest

from disagg.core.types import PROTOCOL_VERSION, GroupInfo, KVLayout, RankInfo, Shard, Span
from disagg.router.policy import LocalPrefill, RoutedGroup, SessionLoad
from disagg.router.prompt_moves import PromptMoves, WaitingPrompt

RULE = LocalPrefill(queue_tokens=100, cost=2.0)
PROMPT_TOKENS = 50


def group(name: str) -> RoutedGroup:
    rank = RankInfo(0, Shard(0, Span(0, 1), Span(0, 1)), name, b"", local_prefill_tokens=128)
    layout = KVLayout(1, 1, 8, "float32")
    role = name.rstrip("0123456789")
    return RoutedGroup(GroupInfo(name, role, PROTOCOL_VERSION, "", layout, 16, "inproc", (rank,)))


@dataclass
class Queues:
    """Prompts of 50 tokens in the queues of decode groups. One that moves counts in its prefill group at once."""

    prefills: list[RoutedGroup] = field(default_factory=lambda: [group("prefill1")])
    due: list[Callable[[], None]] = field(default_factory=list)
    moved: list[SessionLoad] = field(default_factory=list)
    stays: bool = False
    """Whether the prompts turn out to be computed."""
    missing: dict[str, int] = field(default_factory=dict)
    """Tokens that prefill groups have to compute for a prompt, if not all."""

    def __post_init__(self) -> None:
        self.moves = PromptMoves(RULE, lambda: self.prefills, self.due.append)

    def add(self, decode: RoutedGroup) -> SessionLoad:
        load = SessionLoad(decode, decode, 1, {decode: PROMPT_TOKENS})

        def move() -> bool:
            if not self.stays:
                load.end()
                self.moved.append(load)
                self.prefills[0].tokens += PROMPT_TOKENS
            return not self.stays

        load.begin()
        self.moves.add(
            load, WaitingPrompt(lambda engine: self.missing.get(engine.group.name, PROMPT_TOKENS), move)
        )
        self.moves.check()
        return load

    def review(self) -> list[SessionLoad]:
        """Loads or groups have changed. Returns the prompts that have moved."""
        self.moved.clear()
        self.moves.review_soon()
        while self.due:
            [review] = self.due
            self.due.clear()
            review()
            self.moves.check()
        return list(self.moved)


@pytest.mark.parametrize(
    ("waiting", "answering", "moves"),
    [
        (83, 0, True),  # 1.5 x (83 + 50) there, 2 x 100 tokens here
        (84, 0, False),
        (883, 96, True),  # 1.5 x (883 + 50) there, 2 x 100 tokens that take 7 times as long here
        (884, 96, False),
    ],
)
def test_a_prompt_moves_if_the_prefill_group_is_clearly_sooner(
    waiting: int, answering: int, moves: bool
) -> None:
    queues, decode = Queues(), group("decode1")
    for _ in range(2):
        newest = queues.add(decode)
    queues.prefills[0].tokens, decode.answering = waiting, answering
    assert queues.review() == ([newest] if moves else [])
    assert queues.moves.counts == ({"sooner": 1} if moves else {})


def test_the_newest_prompts_move_until_the_queues_are_alike_and_the_oldest_stays() -> None:
    queues, decode = Queues(), group("decode1")
    loads = [queues.add(decode) for _ in range(10)]
    assert queues.review() == loads[:3:-1], "1.5 x 300 tokens there, 2 x 250 here before the last one"
    assert (queues.prefills[0].tokens, decode.local_tokens, decode.local_prompts) == (300, 200, 4)
    queues.prefills[0].tokens = 0
    decode.answering = 96
    assert queues.review() == loads[3:0:-1]
    queues.prefills[0].tokens = 0
    assert queues.review() == [], "the group may have begun to compute the oldest one"


def test_prompts_leave_the_group_with_the_longest_queue_first() -> None:
    queues, decodes = Queues(), [group(f"decode{number}") for number in range(3)]
    loads = [queues.add(decode) for decode in [*decodes, *decodes]]
    queues.add(decodes[1])
    decodes[2].answering = 96
    moved = queues.review()
    assert [load.decode.group.name for load in moved] == ["decode2", "decode1"]
    assert moved[0] is loads[5]
    assert queues.moves.counts == {"sooner": 2}


def test_the_prefill_group_with_the_shortest_queue_is_compared() -> None:
    """Each router counts its own requests only."""
    queues, decode = Queues([group("prefill1"), group("prefill2")]), group("decode1")
    for _ in range(2):
        newest = queues.add(decode)
    first, second = queues.prefills
    first.tokens, second.tokens, second.routers = 84, 42, 2
    assert queues.review() == []
    first.tokens = 83
    assert queues.review() == [newest]


def test_cached_prefixes_count() -> None:
    queues, decode = Queues(missing={"prefill1": 1}), group("decode1")
    for _ in range(2):
        newest = queues.add(decode)
    queues.prefills[0].tokens = 132
    assert queues.review() == [newest]


def test_prompts_of_other_routers_are_ahead() -> None:
    queues, decode = Queues(), group("decode1")
    queues.add(decode)
    newest = queues.add(decode)
    queues.prefills[0].tokens = 40 * PROMPT_TOKENS
    assert queues.review() == []
    decode.routers = 40
    assert queues.review() == [newest]


def test_nothing_moves_without_a_prefill_group() -> None:
    queues, decode = Queues([]), group("decode1")
    for _ in range(2):
        newest = queues.add(decode)
    assert queues.review() == []
    queues.prefills = [group("prefill1")]
    assert queues.review() == [newest]


def test_only_waiting_prompts_are_reviewed_and_many_changes_at_once() -> None:
    queues, decode = Queues(), group("decode1")
    queues.moves.review_soon()
    assert queues.due == [], "no prompt waits"
    loads = [queues.add(decode) for _ in range(3)]
    for load in loads[1:]:
        load.prompt_computed()
        queues.moves.discard(load)
        queues.moves.review_soon()
    assert len(queues.due) == 1
    queues.moves.discard(loads[2])  # no effect: the session is over
    queues.due.clear()
    queues.moves.discard(loads[0])
    queues.moves.review_soon()
    assert queues.due == []


def test_a_prompt_that_is_computed_meanwhile_is_not_counted_nor_asked_again() -> None:
    queues, decode = Queues(stays=True), group("decode1")
    for _ in range(3):
        queues.add(decode)
    assert queues.review() == []
    assert queues.moves.counts.total() == 0
    queues.stays = False
    assert queues.review() == [], "each prompt was asked once"
