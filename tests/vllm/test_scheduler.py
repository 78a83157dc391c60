"""The connector in the scheduler: what it tells the workers, and which blocks it holds."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
from engine_network import EngineNetwork, QueuedChannel
from fake_vllm import FakeRequest, asks_prefill, facts, full_and

from disagg.core.types import KVLayout, Span
from disagg.vllm.directory import REPEAT_S, RESEND_S, EngineDirectory
from disagg.vllm.groups import CacheGroup
from disagg.vllm.received import ReceivedRequests
from disagg.vllm.scheduler import SchedulerSide
from disagg.vllm.work import PrefillWork, PromptStates, ReleaseWork, WorkerHandshake
from transport.control import messages as m

LAYOUT = KVLayout(3, 4, 8, "float16")
SOURCE: dict[str, Any] = {
    "do_remote_prefill": True,
    "remote_engine_id": "p",
    "remote_request_id": "p1",
    "remote_block_ids": [[1, 2]],
    "remote_host": "p",
    "remote_port": 5580,
}


class Scheduling:
    """A scheduler's connector on a network without other engines."""

    def __init__(self, *, early: bool = False, **changes: Any) -> None:
        self.network = EngineNetwork()
        channel = QueuedChannel(self.network, "tcp://d:5580")
        self.directory = EngineDirectory(channel, self.network.clock)
        known = replace(facts("d", 1, 16, 24), **changes)
        self.side = SchedulerSide(known, self.directory, "d", 5580, early=early)
        self.directory.start([])

    def greetings(self) -> int:
        return len(self.network.queues.get(("tcp://d:5580", "tcp://p:5580"), ()))

    def work(self, *cached: tuple[Any, ...], new: tuple[Any, ...] = ()) -> Any:
        """The work of a step; scheduled requests are (id, new blocks, computed, tokens[, resumed]).

        The blocks are a list, or a tuple of lists.
        """
        fresh = [SimpleNamespace(req_id=r, block_ids=tables(b), num_computed_tokens=c) for r, b, c, _ in new]
        output = SimpleNamespace(
            num_scheduled_tokens={one[0]: one[3] for one in (*new, *cached)},
            scheduled_new_reqs=fresh,
            scheduled_cached_reqs=SimpleNamespace(
                req_ids=[one[0] for one in cached],
                new_block_ids=[tables(one[1]) if one[1] else None for one in cached],
                num_computed_tokens=[one[2] for one in cached],
                resumed_req_ids={one[0] for one in cached if len(one) > 4},
            ),
        )
        return self.side.build_connector_meta(output)


def tables(blocks: Any) -> tuple[list[int], ...]:
    return blocks if isinstance(blocks, tuple) else (blocks,)


def blocks(*ids: int) -> Any:
    return SimpleNamespace(get_block_ids=lambda: (list(ids),))


def consumer(name: str = "d1", tokens: int = 40, **params: Any) -> FakeRequest:
    return FakeRequest(name, 1, tokens, SOURCE | params)


def test_a_ticket_has_the_blocks_of_the_missing_tokens() -> None:
    one, request = Scheduling(), consumer()
    assert one.side.get_num_new_matched_tokens(request, 16) == (24, True)
    one.side.update_state_after_alloc(request, blocks(7, 3, 9), 24)
    (receive,) = one.work().receives
    assert receive.ticket.tokens == Span(16, 40)
    assert receive.tables == ([3, 9],)
    assert (receive.ticket.group, receive.group, receive.held) == ("d/decode", "p/prefill", True)
    assert receive.ticket.key.request_id == "p1"
    assert one.work().receives == []
    assert one.greetings() == 1


def test_vllm_may_take_a_part_of_the_offer() -> None:
    one, request = Scheduling(), consumer()
    assert one.side.get_num_new_matched_tokens(request, 0) == (40, True)  # there was no space for blocks
    assert one.side.get_num_new_matched_tokens(request, 16) == (24, True)
    one.side.update_state_after_alloc(request, blocks(7, 3), 16)
    (receive,) = one.work().receives
    assert (receive.ticket.tokens, receive.tables) == (Span(16, 32), ([3],))


def test_whole_blocks_are_positions() -> None:
    """A cached part ends with a block; the last block is moved as a whole."""
    one, request = Scheduling(whole_blocks=True), consumer()
    one.side.get_num_new_matched_tokens(request, 16)
    one.side.update_state_after_alloc(request, blocks(7, 3, 9), 24)
    (receive,) = one.work().receives
    assert (receive.ticket.tokens, receive.tables) == (Span(1, 3), ([3, 9],))
    prompt = asks_prefill("p1", 1, 40)
    one.side.update_state_after_alloc(prompt, blocks(4, 5, 6), 0)
    assert one.work(new=(("p1", [4, 5], 0, 20),)).prefills == []
    (prefill,) = one.work(("p1", [6], 20, 20)).prefills
    assert prefill.positions == Span(1, 3)


def test_a_transfer_id_names_the_transfer_on_both_sides() -> None:
    one = Scheduling()
    one.side.update_state_after_alloc(consumer(transfer_id="x", remote_block_ids=None), blocks(1, 2, 3), 40)
    one.side.update_state_after_alloc(asks_prefill("p1", 1, 20, "x"), blocks(4, 5), 0)
    work = one.work(new=(("p1", [4, 5], 0, 20),))
    assert work.receives[0].ticket.key.request_id == work.prefills[0].key == "x"
    assert not work.receives[0].held


@pytest.mark.parametrize("name", ["remote_engine_id", "remote_request_id", "remote_host", "remote_port"])
def test_without_an_address_the_prompt_is_computed_here(name: str) -> None:
    one, request = Scheduling(), consumer(**{name: None})
    assert one.side.get_num_new_matched_tokens(request, 0) == (0, False)
    one.side.update_state_after_alloc(request, blocks(1, 2, 3), 0)
    assert one.side.request_finished(request, ([1, 2, 3],)) == (False, None)
    assert one.work().releases == []


def test_roles() -> None:
    producer, only_consumer = Scheduling(consumes=False), Scheduling(produces=False)
    assert producer.side.get_num_new_matched_tokens(consumer(), 0) == (0, False)
    request = asks_prefill("p1", 1, 20)
    only_consumer.side.update_state_after_alloc(request, blocks(1, 2), 0)
    request.become("FINISHED_LENGTH_CAPPED")
    assert only_consumer.side.request_finished(request, ([1, 2],)) == (False, None)


def test_the_producer_may_free_what_is_not_needed() -> None:
    """A whole prefix hit, and a request that is aborted before its blocks are reserved."""
    one, hit, aborted = Scheduling(), consumer(), consumer("d2", remote_request_id="p2")
    one.side.update_state_after_alloc(hit, blocks(1, 2, 3), 0)
    aborted.become("FINISHED_ABORTED")
    assert one.side.request_finished(aborted, ([],)) == (False, None)
    assert one.work().releases == [ReleaseWork("p1", "p/prefill"), ReleaseWork("p2", "p/prefill")]


def test_an_aborted_receive_holds_its_blocks() -> None:
    one, request = Scheduling(), consumer()
    one.side.update_state_after_alloc(request, blocks(1, 2, 3), 40)
    request.become("FINISHED_ABORTED")
    assert one.side.request_finished(request, ([1, 2, 3],)) == (True, None)
    assert one.work().cancels == ["d1"]
    one.side.update_connector_output(SimpleNamespace(finished_sending=None, finished_recving={"d1"}))
    assert one.side.statistics().receiving == 0


def reported(one: Scheduling, *received: str, requests: ReceivedRequests | None = None) -> set[str]:
    """The received requests that vLLM knows of after a worker's report."""
    newest = requests.newest() if requests is not None else None
    report = SimpleNamespace(
        finished_sending=None, finished_recving=set(received), kv_connector_worker_meta=newest
    )
    one.side.update_connector_output(report)
    found: set[str] = report.finished_recving
    return found


def receiving(*names: str) -> Scheduling:
    one = Scheduling()
    for name in names:
        one.side.update_state_after_alloc(consumer(name), blocks(1, 2, 3), 40)
    return one


def test_requests_whose_kv_came_after_a_report_are_reported_once() -> None:
    one, requests = receiving("d1", "d2", "d3"), ReceivedRequests()
    for name in ("d1", "d2", "unknown"):
        requests.add(name, loaded=True)
    assert reported(one, "d1", requests=requests) == {"d1", "d2"}
    assert one.side.statistics().receiving == 1
    assert reported(one, "d2", "d3", requests=requests) == {"d3"}
    assert one.side.statistics().receiving == 0


def test_a_request_that_failed_is_only_in_the_report() -> None:
    one, requests = receiving("d1"), ReceivedRequests()
    requests.add("d1", loaded=False)
    assert reported(one, requests=requests) == set()
    assert reported(one, "d1", requests=requests) == {"d1"}


def test_a_late_report_is_not_that_of_a_new_request_of_the_same_name() -> None:
    one, requests = receiving("d1"), ReceivedRequests()
    requests.add("d1", loaded=True)
    assert reported(one, requests=requests) == {"d1"}
    one.side.update_state_after_alloc(consumer("d1"), blocks(1, 2, 3), 40)
    assert reported(one, "d1", requests=requests) == set()
    assert one.side.statistics().receiving == 1
    assert reported(one, "d1", requests=requests) == {"d1"}


@pytest.mark.parametrize("told", [False, True])
def test_with_early_reports_an_ended_request_holds_its_blocks_until_they_are_settled(told: bool) -> None:
    """Its transfer is cancelled only before vLLM may have given its blocks to others."""
    one, request = Scheduling(early=True), consumer()
    report = partial(SimpleNamespace, finished_sending=None, invalid_block_ids=set())
    one.side.update_state_after_alloc(request, blocks(1, 2, 3), 40)
    if told:
        one.side.update_connector_output(report(finished_recving={"d1"}))
    assert one.work(new=(("x", [9], 0, 5),)).due == set()
    assert one.work(new=(("y", [2, 8], 16, 5),)).due == ({"d1"} if told else set())
    request.become("FINISHED_ABORTED")
    assert one.side.request_finished(request, ([1, 2, 3],)) == (True, None)
    assert one.work().cancels == ([] if told else ["d1"])
    if not told:
        late = report(finished_recving={"d1"})
        one.side.update_connector_output(late)
        assert late.finished_recving == set()  # one of two workers may have been early
    assert one.side.statistics().receiving == 1
    settled = report(finished_sending={"d1"}, finished_recving=None)
    one.side.update_connector_output(settled)
    assert settled.finished_sending == {"d1"}
    assert one.side.statistics().receiving == 0


def test_without_early_reports_nobody_asks_for_the_blocks_of_requests_without_a_transfer() -> None:
    """They may be thousands."""
    asked: list[str] = []

    def get_block_ids() -> tuple[list[int], ...]:
        asked.append("blocks")
        return ([1],)

    for early in (False, True):
        one = Scheduling(early=early)
        one.side.update_state_after_alloc(
            FakeRequest("x", 1, 20), SimpleNamespace(get_block_ids=get_block_ids), 0
        )
        assert bool(asked) is early


def test_a_settled_request_that_runs_keeps_its_blocks() -> None:
    one = Scheduling(early=True)
    one.side.update_state_after_alloc(consumer(), blocks(1, 2, 3), 40)
    report = SimpleNamespace(finished_sending={"d1"}, finished_recving={"d1"}, invalid_block_ids=set())
    one.side.update_connector_output(report)
    assert (report.finished_sending, report.finished_recving) == (set(), {"d1"})
    assert one.work(new=(("d1", [4], 39, 1),)).due == set()


def test_a_step_without_tokens_waits_only_if_it_receives() -> None:
    one = Scheduling(early=True)
    one.side.update_state_after_alloc(consumer(), blocks(1, 2, 3), 40)
    report = SimpleNamespace(finished_sending=None, finished_recving={"d1"}, invalid_block_ids=set())
    one.work()
    one.side.update_connector_output(report)
    assert one.work(new=(("d1", [4], 39, 1),)).due == {"d1"}
    assert one.work().due == set()
    one.side.update_state_after_alloc(consumer("d2"), blocks(4, 5, 6), 40)
    assert one.work().due == {"d1"}


@pytest.mark.parametrize("alone", [False, True])
def test_only_later_steps_without_tokens_may_wait(alone: bool) -> None:
    one, tokens = Scheduling(steps_alone=alone), (("x", [1], 0, 5),)
    found = [one.work(new=new).may_wait for new in ((), (), (), tokens, (), ())]
    assert found == [False, alone, alone, False, False, alone]


def test_the_last_chunk_is_announced_with_all_blocks() -> None:
    one = Scheduling()
    one.side.update_state_after_alloc(asks_prefill("p1", 1, 70), blocks(4, 5), 0)
    assert one.work(new=(("p1", [4, 5], 0, 32),)).prefills == []
    assert one.work(("p1", [8], 32, 16)).prefills == []
    assert one.work(("p1", [1, 2, 3, 6], 0, 60, "resumed")).prefills == []
    assert one.work(("p1", [9], 60, 10)).prefills == [
        PrefillWork("p1", "p1", ([1, 2, 3, 6, 9],), Span(60, 70), PromptStates(70))
    ]
    assert one.work(("p1", None, 69, 1)).prefills == []


@pytest.mark.parametrize(("changes", "answers"), [({"async_scheduling": True}, 1), ({}, 2)])
def test_blocks_that_may_be_preempted_are_not_announced(changes: dict[str, Any], answers: int) -> None:
    one, request = Scheduling(**changes), asks_prefill("p1", 1, 20)
    request.max_tokens = answers
    one.side.update_state_after_alloc(request, blocks(4, 5), 0)
    assert one.work(new=(("p1", [4, 5], 0, 20),)).prefills == []
    request.become("FINISHED_STOPPED")  # its one token was the end token
    held, params = one.side.request_finished(request, ([4, 5],))
    assert held
    assert params is not None
    assert params["remote_block_ids"] == [[4, 5]]
    assert one.work().holds[0].positions == 20


def test_windows_need_the_end_of_a_prompt() -> None:
    """The consumer computes the last token; the class of the window needs the tokens that this one attends to."""
    one, request = Scheduling(groups=full_and(20)), consumer(tokens=90)
    one.side.set_xfer_handshake_metadata({0: WorkerHandshake(LAYOUT, "tls", False, None, None, (1, 0))})
    assert one.side.get_num_new_matched_tokens(request, 32) == (57, True)
    reserved = ([1, 2, 3, 4, 5, 6], [0, 0, 0, 0, 7, 8])
    one.side.update_state_after_alloc(request, SimpleNamespace(get_block_ids=lambda: reserved), 57)
    (receive,) = one.work().receives
    assert (receive.ticket.tokens, receive.ticket.starts) == (Span(32, 89), (64, 32))
    assert receive.tables == ([3, 4, 5, 6], [0, 0, 7, 8])


def test_whole_blocks_before_a_window_are_not_needed() -> None:
    one, request = Scheduling(groups=full_and(20), whole_blocks=True), consumer(tokens=90)
    one.side.set_xfer_handshake_metadata({0: WorkerHandshake(LAYOUT, "tls", False, None, None, (0, 1))})
    one.side.get_num_new_matched_tokens(request, 32)
    reserved = ([1, 2, 3, 4, 5, 6], [0, 0, 0, 0, 7, 8])
    one.side.update_state_after_alloc(request, SimpleNamespace(get_block_ids=lambda: reserved), 57)
    (receive,) = one.work().receives
    assert (receive.ticket.tokens, receive.ticket.starts) == (Span(2, 6), (2, 4))


def test_blocks_before_a_window_are_not_announced() -> None:
    """vLLM frees them when the step ends, while the workers read the others."""
    one, request = Scheduling(groups=full_and(20)), asks_prefill("p1", 1, 71)
    one.side.on_new_request(request)
    assert (request.num_prompt_tokens, len(request.prompt_token_ids)) == (70, 70)
    one.side.update_state_after_alloc(request, blocks(), 0)
    assert one.work(new=(("p1", ([1, 2], [3, 4]), 0, 32),)).prefills == []
    (prefill,) = one.work(("p1", ([5, 6, 7], [8, 9, 10]), 32, 38)).prefills
    assert prefill.tables == ([1, 2, 5, 6, 7], [0, 0, 0, 9, 10])
    assert prefill.positions == Span(32, 70)


@pytest.mark.parametrize(
    ("groups", "tokens", "changes", "left"),
    [
        (full_and(20), 50, {}, 49),
        (full_and(20), 1, {}, 1),
        (full_and(20), 50, {"skip_reading_prefix_cache": True}, 50),  # log-probabilities of the prompt
        (full_and(20), 50, {"prompt_token_ids": None}, 50),  # embeddings
        (full_and(20), 50, {"prompt_embeds": object()}, 50),  # token ids and embeddings
        (full_and(20), 50, {"kv_transfer_params": None}, 50),
        (full_and(), 50, {}, 50),
    ],
)
def test_prompts_are_shortened_for_windows_only(
    groups: tuple[CacheGroup, ...], tokens: int, changes: dict[str, Any], left: int
) -> None:
    one, request = Scheduling(groups=groups), asks_prefill("p1", 1, tokens)
    for name, value in {"max_tokens": 9, **changes}.items():
        setattr(request, name, value)
    one.side.on_new_request(request)
    assert request.num_prompt_tokens == left
    assert request.max_tokens == (9 if left == tokens else 1), "vLLM has the hashes of the whole prompt"
    assert request.prompt_token_ids is None or len(request.prompt_token_ids) == left


@pytest.mark.parametrize("announced", [False, True])
def test_an_aborted_prompt_is_held_only_if_workers_may_read_it(announced: bool) -> None:
    one, request = Scheduling(), asks_prefill("p1", 1, 20)
    one.side.update_state_after_alloc(request, blocks(4, 5), 0)
    one.work(new=(("p1", [4, 5], 0, 20 if announced else 10),))
    request.become("FINISHED_ABORTED")
    assert one.side.request_finished(request, ([4, 5],)) == (announced, None)
    assert one.work().drops == ["p1"] * announced
    assert one.side.has_pending_push_work() is announced


def test_greetings_are_repeated_slowly() -> None:
    one = Scheduling()
    for wait_s, count in ((0.0, 1), (RESEND_S / 2, 1), (RESEND_S, 2)):
        one.network.now_s += wait_s
        one.directory.meet("tcp://p:5580")
        assert one.greetings() == count
    one.network.channels["tcp://d:5580"].handler("tcp://p:5580", m.EngineGroups([], answer=True))
    for wait_s, count in ((RESEND_S, 2), (REPEAT_S, 3)):
        one.network.now_s += wait_s
        one.directory.meet("tcp://p:5580")
        assert one.greetings() == count
