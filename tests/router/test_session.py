"""Conformance of a session: every order of messages, losses and timeouts that two scripted leaders can cause."""

from __future__ import annotations

import dataclasses
import io
import pickle
from collections.abc import Iterator
from dataclasses import dataclass, field
from types import FunctionType
from typing import Any

import pytest

from disagg.core.errors import BusyError, InvariantError, PeerLostError, RequestTimeoutError
from disagg.core.types import (
    PROTOCOL_VERSION,
    GroupInfo,
    KVLayout,
    RankInfo,
    RequestKey,
    SamplingParams,
    Shard,
    Span,
    Ticket,
)
from disagg.router.answers import Output, SessionReport, new_answers
from disagg.router.response_dispatcher import Suspicion
from disagg.router.session import TRANSITIONS, Session
from disagg.router.session_events import (
    CountPromptComputed,
    EmitOutput,
    Loss,
    RaiseError,
    SendMessage,
    SessionAction,
    SessionPhase,
    SessionTrigger,
)
from transport.control import messages as m

PREFILL, DECODE = "prefill-address", "decode-address"
KEY, OLD_KEY = RequestKey("r", 1), RequestKey("r", 0)
RESERVED = m.Reserved(KEY, Ticket(KEY, 7, "decode", Span(0, 1)))
BUSY = m.Failed(KEY, "busy", "full", retryable=True, retry_after_s=1.0)
FAILED = m.Failed(KEY, "checksum", "damaged", retryable=True)
NOT_LINKED = m.Failed(KEY, "not_linked", "not linked: lost the leader", retryable=True)
ABORTED = m.Failed(KEY, "aborted", "by an operator", retryable=False)
TRANSFERRED = m.Transferred(KEY, 8, 1, 1, 0.5)
DEADLINE_S, WAIT_S = 100.0, 2.0
LIVE = (SessionPhase.RESERVING, SessionPhase.PREFILLING, SessionPhase.DECODING)
MOVED = ("signal", "moved")
ENDINGS = (SessionPhase.ANSWERED, SessionPhase.FAILED, SessionPhase.MOVED)


def group(role: str, address: str) -> GroupInfo:
    rank = RankInfo(0, Shard(0, Span(0, 1), Span(0, 1)), address, b"")
    return GroupInfo(role, role, PROTOCOL_VERSION, "", KVLayout(1, 1, 8, "float32"), 16, "inproc", (rank,))


def spell(tokens: list[int]) -> str:
    return "".join(chr(ord("a") + token) for token in tokens)


@dataclass
class Script:
    """What the leaders of one case send. The decode leader's tokens follow the prefill leader's ticket."""

    sampling: SamplingParams
    reservations: list[m.Message]
    """Answers to one `Reserve` after the other."""
    prefilled: list[m.Message]
    tokens: list[m.Message]
    """In the order of sending."""
    refused: tuple[m.Message, ...] = ()
    """What the prefill leader sends before it has the ticket."""
    colocated: bool = False
    local: bool = False
    """The decode group computes the prompt."""
    tail_tokens: int = 0
    """Tokens of the prompt that the decode group computes; it then sends the first token."""
    answered: tuple[int, ...] = ()
    """The answer so far, of an earlier attempt."""
    careful: bool = False


def tokens(index: int, *values: int, finish: str | None = None, answer: int = 0) -> m.Tokens:
    return m.Tokens(KEY, index, list(values), finish, answer=answer)


PROMPT = [1, 2, 3]
ONE = SamplingParams(max_tokens=3)
STREAM = [tokens(1, 1), tokens(2, 2, finish="length")]
SCRIPTS = {
    "one answer": Script(ONE, [RESERVED], [m.Prefilled(KEY, [0]), TRANSFERRED], STREAM),
    "transferred first": Script(ONE, [RESERVED], [TRANSFERRED, m.Prefilled(KEY, [0])], STREAM),
    "no room": Script(ONE, [BUSY], [], []),
    "no room for the rest": Script(ONE, [BUSY], [], [], answered=(0,)),
    "prefill is busy": Script(ONE, [RESERVED], [BUSY], []),
    "prefill is busy at once": Script(ONE, [RESERVED], [], [], refused=(BUSY,)),
    "prefill fails at once": Script(ONE, [RESERVED], [], [], refused=(FAILED,)),
    "both refuse": Script(ONE, [BUSY], [], [], refused=(ABORTED,)),
    "not reserved": Script(ONE, [ABORTED], [], []),
    "prefill fails": Script(ONE, [RESERVED], [FAILED], []),
    "transfer fails": Script(ONE, [RESERVED], [m.Prefilled(KEY, [0]), FAILED], []),
    "decode fails": Script(ONE, [RESERVED], [m.Prefilled(KEY, [0]), TRANSFERRED], [tokens(1, 1), FAILED]),
    "both abort": Script(ONE, [RESERVED], [ABORTED], [ABORTED]),
    "first token ends": Script(
        ONE, [RESERVED], [m.Prefilled(KEY, [0]), TRANSFERRED], [tokens(1, finish="stop")]
    ),
    "sent twice": Script(
        ONE, [RESERVED], [m.Prefilled(KEY, [0]), m.Prefilled(KEY, [0])], [RESERVED, *STREAM]
    ),
    "unknown answer": Script(ONE, [RESERVED], [m.Prefilled(KEY, [0])], [tokens(0, 9, answer=5), *STREAM]),
    "two answers": Script(
        SamplingParams(max_tokens=2, n=2),
        [RESERVED],
        [m.Prefilled(KEY, [0, 5])],
        [tokens(1, 1, finish="stop"), tokens(1, 6, finish="length", answer=1)],
    ),
    "stop string": Script(
        SamplingParams(max_tokens=3, n=2, stop=("b",)),
        [RESERVED],
        [m.Prefilled(KEY, [0, 5])],
        [tokens(1, 1), tokens(2, 2), tokens(1, 6, finish="length", answer=1)],
    ),
    "beams": Script(
        SamplingParams(max_tokens=3, beams=2),
        [RESERVED],
        [m.Prefilled(KEY, []), TRANSFERRED],
        [tokens(0, 0, 1, 2, finish="length")],
    ),
    "continued": Script(
        ONE, [RESERVED], [m.Prefilled(KEY, [1])], [tokens(2, 2, finish="length")], answered=(0,), careful=True
    ),
    "continued, ended": Script(
        ONE, [tokens(3, finish="length")], [], [], refused=(FAILED,), answered=(0, 1, 2), careful=True
    ),
    "started again": Script(ONE, [RESERVED], [m.Prefilled(KEY, [0]), TRANSFERRED], STREAM, careful=True),
    "started again, refused": Script(ONE, [RESERVED], [], [], refused=(FAILED,), careful=True),
    "colocated": Script(ONE, [RESERVED], [m.Prefilled(KEY, [0]), *STREAM], [], colocated=True),
    "local": Script(ONE, [RESERVED], [m.Prefilled(KEY, [0]), *STREAM], [], local=True),
    "tail": Script(ONE, [RESERVED], [TRANSFERRED], [m.Prefilled(KEY, [0]), *STREAM], tail_tokens=2),
    "tail, no room": Script(ONE, [BUSY], [], [], tail_tokens=2),
    "tail, transfer fails": Script(ONE, [RESERVED], [FAILED], [], tail_tokens=2),
    "tail, decode fails": Script(ONE, [RESERVED], [TRANSFERRED], [FAILED], tail_tokens=1),
    "local, no room": Script(ONE, [BUSY], [], [], local=True),
    "local, fails": Script(ONE, [RESERVED], [FAILED], [], local=True),
    "local, continued": Script(
        ONE,
        [RESERVED],
        [m.Prefilled(KEY, [1]), tokens(2, 2, finish="length")],
        [],
        local=True,
        answered=(0,),
        careful=True,
    ),
}


@dataclass
class World:
    """A session with two scripted leaders. `moves` lists the events that can come next."""

    script: Script
    session: Session
    queues: dict[str, list[m.Message]] = field(default_factory=lambda: {PREFILL: [], DECODE: []})
    lost: set[str] = field(default_factory=set)
    suspected: set[str] = field(default_factory=set)
    phases: list[SessionPhase] = field(default_factory=list)
    outputs: list[Output] = field(default_factory=list)
    errors: list[Exception] = field(default_factory=list)
    released: list[str] = field(default_factory=list)
    received: set[str] = field(default_factory=set)
    """Leaders that received anything of the request."""
    ended_answers: list[int] = field(default_factory=list)
    computed: int = 0
    lost_at_release: set[str] = field(default_factory=set)
    full: bool = False
    """The decode leader has no room."""
    sooner: bool = False
    """A prefill group was sooner once."""
    now_s: float = 0.0

    @classmethod
    def start(cls, script: Script) -> World:
        decode = group("colocated", DECODE) if script.colocated else group("decode", DECODE)
        prefill = decode if script.colocated or script.local else group("prefill", PREFILL)
        lost, suspected = set[str](), set[str]()
        answers = new_answers(script.sampling, spell if script.sampling.stop else None)
        if script.answered:
            answers[0].tokens.extend(script.answered)
        report = SessionReport(answers=[answer.tokens for answer in answers])
        session = Session(
            prefill,
            decode,
            KEY,
            PROMPT,
            script.sampling,
            0.0,
            DEADLINE_S,
            answers,
            report,
            WAIT_S,
            "",
            lost,
            OLD_KEY if script.answered else None,
            script.careful,
            suspected,
            tail_tokens=script.tail_tokens,
        )
        own = dataclasses.replace(script, reservations=list(script.reservations))
        return cls(own, session, lost=lost, suspected=suspected)

    def moves(self) -> Iterator[tuple[str, str]]:
        phase = self.session.phase
        if phase is SessionPhase.ENDED:
            return
        if phase is SessionPhase.NEW:
            yield "signal", "start"
        if phase is not SessionPhase.RELEASING:
            yield "signal", "close"
        elif not any(self.queues.values()):
            yield "signal", "release timeout"
        if phase in ENDINGS:
            return  # the driver's next event is its own
        if phase in (SessionPhase.NEW, *LIVE):
            yield "signal", "deadline"
        if phase in (*LIVE, SessionPhase.RELEASING):
            if self.script.local and not self.sooner:
                yield MOVED
            yield from (("deliver", peer) for peer, queue in self.queues.items() if queue)
        if not self.lost:
            yield from (("lose", peer) for peer in self.queues)
            if not self.suspected:
                yield from (("suspect", peer) for peer in self.queues)

    def make(self, kind: str, name: str) -> None:
        self.now_s += 0.5
        if kind == "signal":
            self.sooner |= (kind, name) == MOVED
            self.perform(self.session.on_signal(SessionTrigger(name), self.now_s))
        elif kind == "deliver":
            self.perform(self.session.on_message(name, self.queues[name].pop(0), self.now_s))
        elif kind == "suspect":
            self.suspected.add(name)
            self.queues[name].clear()  # a stopped leader sends nothing
            if self.session.phase in (*LIVE, SessionPhase.RELEASING):
                self.perform(self.session.on_message(name, Suspicion(), self.now_s))
        else:
            self.lost.add(name)
            self.queues[name].clear()
            if self.session.phase in (*LIVE, SessionPhase.RELEASING):  # else the loss stays in the inbox
                self.perform(self.session.on_message(name, PeerLostError("lost"), self.now_s))

    def perform(self, actions: list[SessionAction]) -> None:
        self.phases.append(self.session.phase)
        for action in actions:
            match action:
                case SendMessage():
                    self.receive(action.peer, action.message)
                case EmitOutput():
                    self.outputs.append(action.output)
                case RaiseError():
                    self.errors.append(action.error)
                case CountPromptComputed():
                    self.computed += 1

    def receive(self, peer: str, message: m.Message) -> None:
        assert peer not in self.lost, "a message to a leader that is lost"
        if not isinstance(message, m.Release):
            assert not self.released, "a message after the release"
        self.received.add(peer)
        if peer in self.suspected:
            self.released += [peer] * isinstance(message, m.Release)
            return
        match message:
            case m.Reserve():
                assert (message.answered, message.after is None) == (
                    list(self.script.answered),
                    not self.script.answered,
                )
                assert (message.wait_s, message.tail_tokens) == (WAIT_S, self.script.tail_tokens)
                reply = self.script.reservations.pop(0)
                self.queues[peer].append(reply)
                self.full = reply == BUSY
                if self.script.local:
                    self.compute(peer)
            case m.Prefill():
                ticketed = self.script.colocated or self.script.careful
                ticket = RESERVED.ticket if ticketed else None
                assert (message.ticket, message.answered) == (ticket, list(self.script.answered))
                head = PROMPT[: len(PROMPT) - self.script.tail_tokens]
                assert (message.prompt, message.is_head) == (head, len(head) < len(PROMPT))
                self.queues[peer] += self.script.refused
                if ticketed:
                    self.compute(peer)
            case m.Reserved():
                assert (peer, message) == (PREFILL, RESERVED)
                self.compute(peer)
            case m.EndAnswer():
                self.ended_answers.append(message.answer)
            case m.Release():
                self.released.append(peer)
                self.lost_at_release = set(self.lost)
                self.queues[peer].append(m.Released(KEY))

    def compute(self, peer: str) -> None:
        self.queues[peer] += self.script.prefilled
        if DECODE not in self.lost:
            self.queues[DECODE] += self.script.tokens

    def check(self) -> None:
        """Asserts what holds at the end of every order."""
        entered = [phase for at, phase in enumerate(self.phases) if self.phases[at - 1 : at] != [phase]]
        endings = [phase for phase in entered if phase in ENDINGS]
        assert len(endings) <= 1, "one ending"
        assert len(self.errors) == (endings == [SessionPhase.FAILED])
        assert len(set(self.released)) == len(self.released), "one release for each leader"
        assert self.received - self.lost_at_release <= set(self.released) | self.lost
        assert set(self.released) <= self.received
        confirmed = not self.session.unreleased
        assert self.session.report.released == confirmed
        assert self.session.no_room <= self.full, "the decode group's room"
        if self.full and not self.script.refused:
            assert self.session.no_room == any(isinstance(error, BusyError) for error in self.errors)
        assert self.computed <= 1
        assert self.session.moved == (endings == [SessionPhase.MOVED])
        if self.session.moved:
            assert (self.computed, self.outputs) == (0, []), "a prompt that is computed stays"
        answers: dict[int, list[int]] = {0: list(self.script.answered)} if self.script.answered else {}
        over: set[int] = set()
        for output in self.outputs:
            answer = answers.setdefault(output.answer, [])
            assert output.answer not in over, "no output behind the end"
            assert output.index == len(answer), "no token twice, none left out"
            answer.extend(output.tokens)
            if output.finish is not None:
                over.add(output.answer)
        complete = len(over) == self.script.sampling.n
        assert complete == (endings == [SessionPhase.ANSWERED])
        assert all(self.session.report.answers[number] == answer for number, answer in answers.items())
        assert len(set(self.ended_answers)) == len(self.ended_answers)


UNCHANGING = {FunctionType, GroupInfo, SamplingParams, RequestKey, *m.Message.__subclasses__()}
SHARED: dict[int, object] = {}
"""What copies of worlds share, by id."""


def shared_one(number: int) -> object:
    return SHARED[number]


class Copier(pickle.Pickler):
    """Writes a world, except for what never changes. `copy.deepcopy` takes twice as long."""

    def reducer_override(self, one: object) -> Any:
        if one is not shared_one and type(one) in UNCHANGING:
            SHARED[id(one)] = one
            return shared_one, (id(one),)
        return NotImplemented


def written(world: World) -> bytes:
    found = io.BytesIO()
    Copier(found, pickle.HIGHEST_PROTOCOL).dump(world)
    return found.getvalue()


def orders(world: World, seen: set[bytes]) -> Iterator[World]:
    """Every world that `world` can end as. `seen` has the worlds whose ends have come, in bytes.

    Orders that differ in independent events lead to equal worlds.
    """
    moves = list(world.moves())
    if not moves:
        yield world
        return
    content = written(world)
    if content in seen:
        return
    seen.add(content)
    for number, move in enumerate(moves):
        branch = world if number == len(moves) - 1 else pickle.loads(content)
        branch.make(*move)
        yield from orders(branch, seen)


@pytest.mark.parametrize("name", SCRIPTS)
def test_every_order_of_messages_ends_once_and_releases_every_living_leader(name: str) -> None:
    seen: set[SessionPhase] = set()
    errors: set[type[Exception]] = set()
    count = 0
    for world in orders(World.start(SCRIPTS[name]), set()):
        world.check()
        seen.update(world.phases)
        errors.update(map(type, world.errors))
        count += 1
    assert count > 10
    assert {SessionPhase.FAILED, SessionPhase.RELEASING, SessionPhase.ENDED} <= seen
    assert {PeerLostError, RequestTimeoutError} <= errors
    script = SCRIPTS[name]
    assert (BusyError in errors) == (BUSY in [*script.reservations, *script.prefilled, *script.refused])
    assert (SessionPhase.MOVED in seen) == (script.local and not script.answered)


@pytest.mark.parametrize(("wait_s", "sent_s"), [(2.0, 2.0), (1000.0, 90.0), (float("inf"), 90.0)])
def test_a_reserve_waits_until_the_deadline_at_most(wait_s: float, sent_s: float) -> None:
    session = World.start(SCRIPTS["one answer"]).session
    session.reserve_wait_s = wait_s
    action, _ = session.on_signal(SessionTrigger.START, 10.0)
    assert isinstance(action, SendMessage)
    assert isinstance(action.message, m.Reserve)
    assert (action.message.wait_s, action.message.deadline_s) == (sent_s, 90.0)


def test_a_deadline_while_the_request_waits_names_the_full_group() -> None:
    world = run(SCRIPTS["one answer"], START, ("signal", "deadline"))
    assert str(world.errors[0]) == f"request {KEY} reached its deadline in the queue for room in decode"
    world.make(*CLOSE)
    assert sorted(world.released) == [DECODE, PREFILL], "the decode leader removes the request from its queue"


def run(script: Script, *moves: tuple[str, str]) -> World:
    world = World.start(script)
    for move in moves:
        assert move in world.moves()
        world.make(*move)
    return world


START, CLOSE = ("signal", "start"), ("signal", "close")
FROM_PREFILL, FROM_DECODE = ("deliver", PREFILL), ("deliver", DECODE)


def test_tokens_ahead_of_the_first_one_come_out_in_order() -> None:
    world = run(SCRIPTS["one answer"], START, FROM_DECODE, FROM_DECODE, FROM_DECODE)
    assert world.outputs == []
    world.make(*FROM_PREFILL)
    assert [output.tokens for output in world.outputs] == [(0,), (1,), (2,)]
    assert world.session.phase is SessionPhase.ANSWERED
    world.make(*CLOSE)
    assert sorted(world.released) == [DECODE, PREFILL]


def test_a_stop_string_ends_one_answer_and_the_other_goes_on() -> None:
    world = run(SCRIPTS["stop string"], START, FROM_DECODE, FROM_PREFILL, FROM_DECODE)
    assert world.ended_answers == [0]
    assert world.session.phase is SessionPhase.DECODING
    world.make(*FROM_DECODE)
    world.make(*FROM_DECODE)
    assert [output.finish for output in world.outputs] == [None, None, "stop", "length"]


def test_a_transfer_that_ends_during_the_release_is_measured() -> None:
    world = run(SCRIPTS["one answer"], START, FROM_DECODE, FROM_PREFILL, CLOSE, FROM_PREFILL)
    assert world.session.report.nbytes == 8
    assert world.session.phase is SessionPhase.RELEASING


def test_a_leader_that_never_received_the_request_is_not_released() -> None:
    world = run(SCRIPTS["one answer"], ("lose", PREFILL), START)
    assert isinstance(world.errors[0], PeerLostError)
    assert str(world.errors[0]) == f"lost the prefill group's leader at {PREFILL}"
    world.make(*CLOSE)
    assert world.released == []
    assert world.session.phase is SessionPhase.ENDED


def test_a_stream_goes_on_when_its_prefill_group_is_lost() -> None:
    world = run(SCRIPTS["one answer"], START, FROM_DECODE, FROM_PREFILL, ("lose", PREFILL))
    assert world.session.phase is SessionPhase.DECODING
    for _ in range(2):
        world.make(*FROM_DECODE)
    assert [output.finish for output in world.outputs] == [None, None, "length"]
    world.make(*CLOSE)
    assert world.released == [DECODE]


@pytest.mark.parametrize(
    ("peer", "moves", "loss", "resumable"),
    [
        (PREFILL, [], Loss.PREFILL, True),
        (DECODE, [], Loss.DECODE, False),
        (DECODE, [FROM_PREFILL], Loss.DECODE, False),
    ],
)
def test_a_lost_group_leaves_the_request_to_another_session(
    peer: str, moves: list[tuple[str, str]], loss: Loss, resumable: bool
) -> None:
    world = run(SCRIPTS["one answer"], START, FROM_DECODE, *moves, ("lose", peer))
    assert (world.session.phase, world.session.loss) == (SessionPhase.FAILED, loss)
    assert world.session.resumable == resumable


@pytest.mark.parametrize(
    ("peer", "moves", "loss", "resumable"),
    [
        (PREFILL, [], Loss.PREFILL_SUSPECTED, True),
        (PREFILL, [FROM_PREFILL], Loss.PREFILL_SUSPECTED, True),
        (DECODE, [], Loss.DECODE_SUSPECTED, False),
        (DECODE, [FROM_PREFILL, FROM_PREFILL, FROM_DECODE], Loss.DECODE_SUSPECTED, False),
    ],
)
def test_a_suspected_group_leaves_the_request_to_another_session(
    peer: str, moves: list[tuple[str, str]], loss: Loss, resumable: bool
) -> None:
    """Both groups get the release, and nothing waits for it: pages may be written until the other group speaks."""
    world = run(SCRIPTS["one answer"], START, FROM_DECODE, *moves, ("suspect", peer))
    session = world.session
    assert (session.phase, session.loss, session.suspicion) == (SessionPhase.FAILED, loss, True)
    assert session.resumable == resumable
    assert "does not respond" in str(world.errors[0])
    world.make(*CLOSE)
    assert sorted(world.released) == [DECODE, PREFILL]
    assert session.phase is SessionPhase.ENDED


@pytest.mark.parametrize("moves", [[FROM_PREFILL, FROM_PREFILL], [FROM_PREFILL, FROM_DECODE]])
def test_a_session_whose_kv_has_landed_needs_no_prefill_group(moves: list[tuple[str, str]]) -> None:
    world = run(SCRIPTS["one answer"], START, FROM_DECODE, *moves, ("suspect", PREFILL))
    assert world.session.phase is SessionPhase.DECODING
    while world.queues[DECODE]:
        world.make(*FROM_DECODE)
    world.make(*CLOSE)
    assert world.session.unreleased == {DECODE}, "the suspected group is not waited for"


def test_a_session_that_may_not_be_recovered_waits_for_a_suspected_group() -> None:
    world = World.start(SCRIPTS["one answer"])
    world.session.may_leave = lambda session: False
    world.make(*START)
    world.make("suspect", DECODE)
    assert (world.session.phase, world.errors) == (SessionPhase.RESERVING, [])
    world.make("lose", DECODE)
    assert world.session.loss is Loss.DECODE


def test_the_release_does_not_wait_for_a_group_that_is_suspected_meanwhile() -> None:
    world = run(SCRIPTS["one answer"], START, FROM_DECODE, FROM_PREFILL, CLOSE, ("suspect", PREFILL))
    assert world.session.unreleased == {DECODE}


@pytest.mark.parametrize("careful", [False, True])
def test_a_prefill_group_suspected_before_it_has_the_ticket_costs_no_recovery(careful: bool) -> None:
    world = run(Script(ONE, [RESERVED], [], [], careful=careful), START, ("suspect", PREFILL))
    session = world.session
    assert (session.phase, session.loss, session.unlinked) == (SessionPhase.FAILED, None, True)
    assert session.prompt_lost == (not careful)


@pytest.mark.parametrize(
    ("moves", "prompt_lost"),
    [([START, FROM_DECODE], True), ([START, ("lose", PREFILL)], True), ([("lose", PREFILL), START], False)],
    ids=["reported", "noticed", "known"],
)
def test_a_prefill_group_lost_before_it_has_the_ticket_costs_no_recovery(
    moves: list[tuple[str, str]], prompt_lost: bool
) -> None:
    """No KV was sent: for this session the groups are not linked. The prompt may still be what ended the group."""
    lost = m.Failed(KEY, "peer_lost", "lost", retryable=True, resumable=True)
    script = Script(ONE, [lost] if FROM_DECODE in moves else [RESERVED], [], [])
    world = run(script, *moves)
    session = world.session
    assert (session.phase, session.loss, session.unlinked) == (SessionPhase.FAILED, None, True)
    assert session.prompt_lost == prompt_lost
    assert session.resumable
    assert len(world.errors) == 1


@pytest.mark.parametrize("careful", [False, True])
def test_a_lost_prefill_group_is_suspected_only_if_it_had_the_prompt(careful: bool) -> None:
    """The decode group may report the loss to a waiting request before the router notices it."""
    world = run(Script(ONE, [NOT_LINKED], [], [], careful=careful), START, FROM_DECODE)
    assert world.session.unlinked
    assert world.session.prompt_lost == (not careful)


def test_a_prefill_group_that_refuses_for_a_missing_link_is_not_suspected() -> None:
    world = run(Script(ONE, [RESERVED], [NOT_LINKED], []), START, FROM_DECODE, FROM_PREFILL)
    assert world.session.unlinked
    assert not world.session.prompt_lost


def test_an_answer_that_has_ended_needs_no_prefill_group() -> None:
    world = run(SCRIPTS["continued, ended"], START, FROM_DECODE)
    assert world.session.phase is SessionPhase.ANSWERED
    assert world.received == {DECODE}


@pytest.mark.parametrize("resumable", [False, True])
def test_the_decode_group_says_whether_it_keeps_the_pages(resumable: bool) -> None:
    lost = m.Failed(KEY, "peer_lost", "lost", retryable=True, resumable=resumable)
    script = Script(ONE, [RESERVED], [m.Prefilled(KEY, [0])], [lost])
    world = run(script, START, FROM_DECODE, FROM_PREFILL, FROM_DECODE)
    assert world.session.loss is (Loss.PREFILL if resumable else Loss.DECODE)
    assert world.session.resumable == resumable


def test_a_failure_of_the_prefill_group_behind_its_part_changes_nothing() -> None:
    script = Script(ONE, [RESERVED], [m.Prefilled(KEY, [0]), FAILED], STREAM)
    world = run(script, START, FROM_DECODE, FROM_PREFILL, FROM_DECODE, FROM_PREFILL, FROM_DECODE)
    assert world.session.phase is SessionPhase.ANSWERED
    assert world.errors == []


def test_a_colocated_leader_is_released_once() -> None:
    world = run(SCRIPTS["colocated"], START, FROM_DECODE, *[FROM_DECODE] * 3, CLOSE, FROM_DECODE)
    assert world.released == [DECODE]
    assert world.session.phase is SessionPhase.ENDED


@pytest.mark.parametrize("moves", [[], [FROM_DECODE]], ids=["reserving", "prefilling"])
def test_a_waiting_local_prompt_moves_without_a_loss(moves: list[tuple[str, str]]) -> None:
    world = run(SCRIPTS["local"], START, *moves, MOVED)
    session = world.session
    assert (session.phase, session.loss, session.resumable) == (SessionPhase.MOVED, None, False)
    assert (world.errors, world.released) == ([], [])
    world.make(*CLOSE)
    assert world.released == [DECODE]
    while session.phase is not SessionPhase.ENDED:  # what the group sent before it had the release comes late
        world.make(*FROM_DECODE)
    assert (world.outputs, world.computed) == ([], 0)
    assert session.report.released


@pytest.mark.parametrize("count", [2, 3])
def test_a_computed_prompt_does_not_move(count: int) -> None:
    world = run(SCRIPTS["local"], START, *[FROM_DECODE] * count, MOVED)
    assert world.session.phase is SessionPhase.DECODING
    while world.queues[DECODE]:
        world.make(*FROM_DECODE)
    assert world.session.phase is SessionPhase.ANSWERED


def test_a_prompt_whose_first_tokens_are_late_does_not_move() -> None:
    """Tokens of the answer show that the prompt is computed."""
    world = run(Script(ONE, [RESERVED], [*STREAM, m.Prefilled(KEY, [0])], [], local=True), START)
    world.make(*FROM_DECODE)
    world.make(*FROM_DECODE)
    world.make(*MOVED)
    assert world.session.phase is SessionPhase.PREFILLING


@pytest.mark.parametrize("name", ["one answer", "colocated", "local, continued"])
def test_only_a_whole_prompt_of_a_decode_group_moves(name: str) -> None:
    world = run(SCRIPTS[name], START)
    for phase in LIVE:
        assert world.session.phase is phase
        world.perform(world.session.on_signal(SessionTrigger.MOVED, 1.0))
        assert world.session.phase is phase
        world.make(*(FROM_PREFILL if world.queues[PREFILL] else FROM_DECODE))
    assert not world.session.moved


@pytest.mark.parametrize("phase", SessionPhase)
@pytest.mark.parametrize("trigger", SessionTrigger)
def test_a_transition_outside_the_table_raises(phase: SessionPhase, trigger: SessionTrigger) -> None:
    if trigger in TRANSITIONS[phase]:
        return
    world = World.start(SCRIPTS["one answer"])
    world.session.phase = phase
    with pytest.raises(InvariantError, match="no transition from"):
        world.session.on_signal(trigger, 0.0)
    assert world.session.phase is phase
