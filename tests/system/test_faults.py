"""Whatever goes wrong ends one session with a clear error, gives everything back, and leaves the others exact.

Recovery is off, so that the error shows; `test_recovery.py` has it on.
"""

from __future__ import annotations

import asyncio
import importlib
import itertools
import threading
import weakref
from collections.abc import Callable
from typing import Any

import msgspec
import pytest
import torch
from conditions import PATIENCE_S, until, until_async
from local_groups import (
    Answered,
    Checkpoints,
    LocalGroups,
    ask,
    local_groups,
    random_prompts,
    small_config,
    without_recovery,
)
from slow_parameters import sampled

import prefill_node.peer_pools
from disagg.core.collection import collection_paused
from disagg.core.config.read import RouterConfig
from disagg.core.errors import BusyError, DisaggError, PeerLostError, RequestTimeoutError, TransportError
from disagg.core.types import SamplingParams
from disagg.router.router import Router
from transport.control import messages as m
from transport.control.reliable import ReliableOptions
from transport.peer_memory import MemoryHandle
from transport.tags import is_active_message

SHORT = ReliableOptions(peer_timeout_s=0.8, heartbeat_s=0.1)
VICTIM, BYSTANDER = "victim", "bystander"
TOKENS = 24
LONG = 400
"""Tokens that take several times the longest deadline here."""

KINDS = [
    m.Reserve,
    m.OpenReceive,
    m.RankOpened,
    m.Reserved,
    m.Prefill,
    m.OpenSend,
    m.Plan,
    m.RankSent,
    m.Landed,
    m.Prefilled,
    m.FirstTokens,
    m.StepTokens,
    m.Transferred,
    m.Release,
    m.CloseTransfer,
    m.RankClosed,
    m.Released,
]
"""All that pass in a run of two ranks a side and a ring smaller than a request."""


def tight_config(**changes: Any) -> Any:
    return without_recovery(small_config(2, 2, ring_bytes=4096, chunk_tokens=16, **changes))


class Run:
    """Two requests at once, one of which something happens to."""

    def __init__(self, groups: LocalGroups, checkpoints: Checkpoints) -> None:
        self.groups, self.checkpoints = groups, checkpoints
        self.prompts = dict(zip((VICTIM, BYSTANDER), random_prompts(70, 55, seed=5), strict=True))
        self.answers = {VICTIM: Answered(), BYSTANDER: Answered()}
        self.seen: set[type[m.Message]] = set()

    def go(
        self,
        during: Callable[[asyncio.Task[Any]], None] = lambda task: None,
        timeout_s: float = 30.0,
        victim_tokens: int = TOKENS,
    ) -> Any:
        """Runs both; returns the victim's exception, or None. The bystander must be exact."""

        async def work(router: Router) -> Any:
            def start(name: str, limit_s: float, tokens: int = TOKENS) -> asyncio.Task[Any]:
                sampling = SamplingParams(max_tokens=tokens, ignore_eos=tokens > TOKENS)
                one = ask(
                    router, name, self.prompts[name], sampling, timeout_s=limit_s, answered=self.answers[name]
                )
                return asyncio.create_task(one)

            victim, bystander = start(VICTIM, timeout_s, victim_tokens), start(BYSTANDER, 30.0)
            during(victim)
            results = await asyncio.gather(victim, bystander, return_exceptions=True)
            if isinstance(results[1], BaseException):
                raise results[1]
            return results[0] if isinstance(results[0], BaseException) else None

        error = self.groups.serve(work)
        self.check(BYSTANDER)
        return error

    def expected(self, name: str) -> list[int]:
        return self.checkpoints.greedy(self.groups.source, self.prompts[name], TOKENS)

    def check(self, name: str) -> None:
        assert self.answers[name].tokens == self.expected(name), name


@pytest.mark.parametrize(
    "kinds",
    [
        pytest.param(KINDS, id="all"),
        *(pytest.param([k], id=k.__name__, marks=pytest.mark.slow) for k in KINDS),
    ],
)
@pytest.mark.parametrize("fault", ["drop", "duplicate"])
def test_a_message_lost_or_repeated_changes_nothing(
    checkpoints: Checkpoints, kinds: list[type[m.Message]], fault: str
) -> None:
    """The first and the third message of every kind at once, or (slow) of one kind at a time."""
    with local_groups(tight_config(), checkpoints.source()) as groups:
        seen: set[type[m.Message]] = set()
        groups.observe(lambda source, destination, message: seen.add(type(message)))
        for kind in kinds:
            getattr(groups.hub, fault)(kind, 0)
            getattr(groups.hub, fault)(kind, 2)
        run = Run(groups, checkpoints)
        assert run.go() is None
        run.check(VICTIM)
        assert seen >= set(kinds), "the fault struck each kind"


@pytest.mark.parametrize(
    ("kind", "nth"),
    [
        pytest.param(m.Reserve, 0, marks=pytest.mark.slow),
        (m.Reserved, 0),
        (m.Prefill, 0),
        (m.LeaseRequest, 0),
        pytest.param(m.LeaseRequest, 3, marks=pytest.mark.slow),
        pytest.param(m.LeaseGrant, 0, marks=pytest.mark.slow),
        (m.LeaseGrant, 3),
        pytest.param(m.Watermark, 0, marks=pytest.mark.slow),
        (m.Watermark, 3),
        pytest.param(m.Prefilled, 0, marks=pytest.mark.slow),
        (m.Landed, 0),
        pytest.param(m.Tokens, 0, marks=pytest.mark.slow),
        (m.Tokens, 3),
    ],
    ids=lambda value: value if isinstance(value, int) else value.__name__,
)
def test_the_client_goes_at_any_moment(checkpoints: Checkpoints, kind: type[m.Message], nth: int) -> None:
    """Cancels the victim when the nth message of a kind passes; the bystander shares the tiny ring.

    Each of these messages passes long before the victim's last token, so the cancellation must take effect.
    """
    with local_groups(tight_config(), checkpoints.source()) as groups:
        run = Run(groups, checkpoints)

        def during(task: asyncio.Task[Any]) -> None:
            loop, count = asyncio.get_running_loop(), [0]

            def observe(source: str, destination: str, message: m.Message) -> None:
                key = getattr(message, "key", None)
                if isinstance(message, kind) and (key is None or key.request_id == VICTIM):
                    if count[0] == nth:
                        loop.call_soon_threadsafe(task.cancel)
                    count[0] += 1

            groups.observe(observe)

        error = run.go(during)
        assert isinstance(error, asyncio.CancelledError), error
        assert len(run.answers[VICTIM].tokens) < TOKENS


@pytest.mark.parametrize("nth", [0, 1, 5])
def test_a_failed_send_ends_its_request(checkpoints: Checkpoints, nth: int) -> None:
    with local_groups(tight_config(), checkpoints.source()) as groups:
        run = Run(groups, checkpoints)
        tickets = _tickets(groups)
        groups.fabric.faults.fail_send(nth, lambda s, d, tag: tag >> 32 == tickets.get(VICTIM))
        error = run.go()
        assert isinstance(error, TransportError), error


@pytest.mark.parametrize("where", ["prefill_node.mover.gather", "decode_node.landing.scatter"])
def test_a_launch_that_fails_ends_its_request(
    checkpoints: Checkpoints, monkeypatch: pytest.MonkeyPatch, where: str
) -> None:
    """One of the two requests meets it; which one does not matter."""
    module, name = where.rsplit(".", 1)
    real, struck = getattr(importlib.import_module(module), name), [0]

    def failing(*arguments: Any) -> None:
        struck[0] += 1
        if struck[0] == 5:
            raise RuntimeError("out of memory, say")
        real(*arguments)

    monkeypatch.setattr(where, failing)
    with local_groups(tight_config(), checkpoints.source()) as groups:
        run = Run(groups, checkpoints)

        async def work(router: Router) -> list[Any]:
            sampling = SamplingParams(max_tokens=TOKENS)
            tasks = [ask(router, n, run.prompts[n], sampling, answered=run.answers[n]) for n in run.prompts]
            return await asyncio.gather(*tasks, return_exceptions=True)

        results = dict(zip(run.prompts, groups.serve(work), strict=True))
        failed = [name for name, result in results.items() if isinstance(result, BaseException)]
        assert len(failed) == 1, results
        assert "out of memory, say" in str(results[failed[0]])
        [other] = set(run.prompts) - set(failed)
        run.check(other)


@pytest.mark.parametrize(
    ("role", "nth"),
    sampled(
        itertools.product(["prefill", "decode"], [0, 4]), lambda role, nth: (role == "decode") == (nth == 0)
    ),
)
def test_an_active_message_that_fails_ends_its_request(checkpoints: Checkpoints, role: str, nth: int) -> None:
    """A lease request or a grant: one of the two requests meets it. A watermark that fails is sent again."""
    with local_groups(tight_config(), checkpoints.source()) as groups:
        run = Run(groups, checkpoints)
        groups.fabric.faults.fail_send(nth, lambda s, d, tag: is_active_message(tag) and s.startswith(role))

        async def work(router: Router) -> list[Any]:
            sampling = SamplingParams(max_tokens=TOKENS)
            tasks = [ask(router, n, run.prompts[n], sampling, answered=run.answers[n]) for n in run.prompts]
            return await asyncio.gather(*tasks, return_exceptions=True)

        results = dict(zip(run.prompts, groups.serve(work), strict=True))
        assert groups.fabric.faults.all_struck
        failed = [name for name, result in results.items() if isinstance(result, BaseException)]
        assert len(failed) == 1 or (not failed and role == "decode" and nth), results
        assert all("injected failure" in str(results[name]) for name in failed)
        for name in set(run.prompts) - set(failed):
            run.check(name)


@pytest.mark.parametrize(
    ("what", "nth"),
    sampled(
        itertools.product(["data", "prefill messages", "decode messages"], [0, 4]),
        lambda what, nth: what == "data" or (what == "prefill messages") == (nth == 0),
    ),
)
def test_what_comes_twice_counts_once(checkpoints: Checkpoints, what: str, nth: int) -> None:
    def when(source: str, destination: str, tag: int) -> bool:
        return is_active_message(tag) == (what != "data") and (what == "data" or what.startswith(source[:6]))

    with local_groups(tight_config(), checkpoints.source()) as groups:
        run = Run(groups, checkpoints)
        groups.fabric.faults.duplicate(nth, when)
        assert run.go() is None
        assert groups.fabric.faults.all_struck
        run.check(VICTIM)


def test_data_that_comes_short_ends_its_request(checkpoints: Checkpoints) -> None:
    with local_groups(tight_config(), checkpoints.source()) as groups:
        run = Run(groups, checkpoints)
        tickets = _tickets(groups)
        groups.fabric.faults.truncate(8, 1, lambda s, d, tag: tag >> 32 == tickets.get(VICTIM))
        error = run.go()
        assert error is not None
        assert "bytes" in str(error)


def test_a_sender_that_stalls_is_ended_by_its_lease(checkpoints: Checkpoints) -> None:
    """A segment never leaves the wire: its lease runs out, the request ends, and the ring goes on once it is safe."""
    with local_groups(tight_config(lease_timeout_s=0.5), checkpoints.source()) as groups:
        run = Run(groups, checkpoints)
        tickets = _tickets(groups)
        groups.fabric.faults.hold(1, lambda s, d, tag: tag >> 32 == tickets.get(VICTIM))

        def observe(source: str, destination: str, message: m.Message) -> None:
            if isinstance(message, m.SenderEnded):
                groups.fabric.release()

        groups.observe(observe)
        error = run.go()
        assert isinstance(error, TransportError)
        assert "lease_timeout_s" in str(error)


def test_an_active_message_that_is_lost_silently_ends_its_request(checkpoints: Checkpoints) -> None:
    """A connection can break behind a send that is done: no lease, no error, no chunk behind it; then time is up."""
    config = without_recovery(small_config(2, 2, ring_bytes=4096, chunk_tokens=128, lease_timeout_s=0.5))
    with local_groups(config, checkpoints.source()) as groups:
        run = Run(groups, checkpoints)
        groups.fabric.faults.truncate(
            1, 0, lambda s, d, tag: is_active_message(tag) and s.startswith("prefill")
        )

        async def work(router: Router) -> list[Any]:
            sampling = SamplingParams(max_tokens=TOKENS)
            tasks = [ask(router, n, run.prompts[n], sampling, answered=run.answers[n]) for n in run.prompts]
            return await asyncio.gather(*tasks, return_exceptions=True)

        results = dict(zip(run.prompts, groups.serve(work), strict=True))
        [failed] = [name for name, result in results.items() if isinstance(result, BaseException)]
        assert isinstance(results[failed], TransportError)
        assert "granted no lease" in str(results[failed])
        [other] = set(run.prompts) - {failed}
        run.check(other)


def test_prompts_that_cannot_be_computed_are_refused(checkpoints: Checkpoints) -> None:
    """They must not reach a step: an index error there would end the group."""
    refused: list[tuple[list[int], int, str]] = [
        ([], 4, "the prompt has no tokens"),
        ([65, 66], 0, "max_tokens = 0 is not allowed"),
        ([65, 100000], 4, "outside the model's vocabulary of 259"),
        ([65, -1], 4, "outside the model's vocabulary of 259"),
        ([65, 1 << 31], 4, "token ids must be integers below 2"),
        ([65] * 600, 4, "do(es)? not fit the (decode|prefill) group"),
    ]
    with local_groups(tight_config(), checkpoints.source()) as groups:
        run = Run(groups, checkpoints)

        async def work(router: Router) -> Any:
            other = asyncio.create_task(
                ask(router, BYSTANDER, run.prompts[BYSTANDER], SamplingParams(max_tokens=TOKENS))
            )
            for prompt, max_tokens, said in refused:
                with pytest.raises(DisaggError, match=said):
                    await ask(router, VICTIM, prompt, SamplingParams(max_tokens=max_tokens))
            return await other

        assert groups.serve(work).tokens == run.expected(BYSTANDER)


def test_an_answer_of_one_token(checkpoints: Checkpoints) -> None:
    """The first token comes from the prefill group, and the decode group has nothing to compute."""
    with local_groups(tight_config(), checkpoints.source()) as groups:
        prompts = random_prompts(70, 30, seed=6)
        answers = groups.answers(prompts, SamplingParams(max_tokens=1))
        expected = [checkpoints.greedy(groups.source, prompt, 1) for prompt in prompts]
    assert [answer.tokens for answer in answers] == expected
    assert [answer.finish for answer in answers] == ["length", "length"]


def test_a_full_decode_group_is_waited_for(checkpoints: Checkpoints) -> None:
    config = small_config(1, 1, pool_tokens=128, max_requests=1)
    with local_groups(config, checkpoints.source()) as groups:
        run = Run(groups, checkpoints)
        assert run.go() is None
        run.check(VICTIM)


def test_waiting_for_room_ends_with_the_request_s_time(checkpoints: Checkpoints) -> None:
    config = small_config(1, 1, pool_tokens=128, max_requests=1)
    with local_groups(config, checkpoints.source()) as groups:
        run = Run(groups, checkpoints)

        async def work(router: Router) -> Any:
            slow = asyncio.create_task(
                ask(router, BYSTANDER, run.prompts[BYSTANDER], SamplingParams(max_tokens=TOKENS))
            )
            await _seen(groups, m.Reserved)
            with pytest.raises(RequestTimeoutError):
                await ask(
                    router, VICTIM, run.prompts[VICTIM], SamplingParams(max_tokens=TOKENS), timeout_s=0.02
                )
            return await slow

        assert groups.serve(work).tokens == run.expected(BYSTANDER)


@pytest.mark.parametrize(
    "timeout_s", sampled([0.0, 0.02, 0.05, 0.1], lambda timeout_s: timeout_s in (0.0, 0.05))
)
def test_a_deadline_at_any_moment(checkpoints: Checkpoints, timeout_s: float) -> None:
    """The victim's answer is too long for any of these limits; its tokens until then are exact."""
    with local_groups(tight_config(), checkpoints.source()) as groups:
        run = Run(groups, checkpoints)
        error = run.go(timeout_s=timeout_s, victim_tokens=LONG)
        assert isinstance(error, RequestTimeoutError | BusyError), error
        tokens = run.answers[VICTIM].tokens
        assert len(tokens) < LONG
        assert tokens[:TOKENS] == run.expected(VICTIM)[: len(tokens)]


@pytest.mark.parametrize(
    ("kind", "name"),
    sampled(
        itertools.product([m.LeaseRequest, m.Tokens], ["prefill-0", "prefill-1", "decode-0", "decode-1"]),
        lambda kind, name: (kind is m.Tokens) == (name in ("prefill-1", "decode-0")),
    ),
)
def test_a_rank_that_dies_ends_the_requests_that_need_its_group(
    checkpoints: Checkpoints, name: str, kind: type[m.Message]
) -> None:
    """No other group comes within `router.group_wait_s`. The death shows as silence only; the survivors free all.

    Streams whose KV has landed go on after the router has noticed the loss of the prefill group.
    """
    config = msgspec.structs.replace(tight_config(), router=RouterConfig(group_wait_s=0.2))
    groups = LocalGroups(config, checkpoints.source(), options=SHORT)
    prompts = random_prompts(60, 40)
    try:
        struck, noticed = threading.Event(), threading.Event()
        role, forward = name.split("-")[0], groups.decode[0].runner.forward

        def observe(source: str, destination: str, message: m.Message) -> None:
            if isinstance(message, kind) and not struck.is_set():
                struck.set()
                groups.kill(name)

        def held(*arguments: Any) -> Any:
            if struck.is_set():
                assert noticed.wait(PATIENCE_S)
            return forward(*arguments)

        groups.observe(observe)
        if role == "prefill":
            groups.decode[0].runner.forward = held

        async def work(router: Router) -> Any:
            sampling = SamplingParams(max_tokens=60)
            asked = [asyncio.create_task(ask(router, f"r{i}", p, sampling)) for i, p in enumerate(prompts)]
            await until_async(lambda: role in router.missing())
            noticed.set()
            return await asyncio.gather(*asked, return_exceptions=True)

        results = groups.serve(work)
        lost = [result for result in results if isinstance(result, BaseException)]
        assert all(isinstance(error, PeerLostError) and "group is up" in str(error) for error in lost), lost
        if name.startswith("decode"):
            assert len(lost) == len(results)
        elif kind is m.Tokens:
            assert len(lost) < len(results), "a stream whose KV has landed does not need the prefill group"
        else:
            assert lost
        for prompt, result in zip(prompts, results, strict=True):
            if not isinstance(result, BaseException):
                assert result.tokens == checkpoints.greedy(groups.source, prompt, 60)
        groups.settle(dead=[f"{name[:-2]}-0", f"{name[:-2]}-1"])  # a group without a rank is lost as a whole
    finally:
        groups.stop()


def test_the_memory_of_a_lost_decode_rank_is_unmapped(
    checkpoints: Checkpoints, monkeypatch: pytest.MonkeyPatch
) -> None:
    """CUDA frees a dead process's pool with the last mapping: its successor on that GPU needs the memory at once."""
    mapped: list[weakref.ref[torch.Tensor]] = []
    open_memory = prefill_node.peer_pools.open_memory

    def opened(handle: MemoryHandle, device: torch.device) -> torch.Tensor:
        tensor = open_memory(handle, device).detach()  # a mapping of its own, as between processes
        mapped.append(weakref.ref(tensor))
        return tensor

    monkeypatch.setattr("prefill_node.peer_pools.open_memory", opened)
    config = without_recovery(small_config(2, 1, chunk_tokens=16, peer_memory=True))
    groups = LocalGroups(config, checkpoints.source(), options=SHORT)
    try:
        groups.wait_for_pools()
        groups.answers(random_prompts(70, 55, seed=8), SamplingParams(max_tokens=4))
        groups.settle()
        assert mapped
        assert all(reference() is not None for reference in mapped)
        with collection_paused():  # an idle rank collects nothing
            groups.kill("decode-0")
            until(
                lambda: not any(reference() is not None for reference in mapped),
                "a lost rank's pool is unmapped",
            )
    finally:
        groups.stop()


def test_a_router_that_dies_leaves_nothing_behind(checkpoints: Checkpoints) -> None:
    with local_groups(tight_config(), checkpoints.source(), options=SHORT) as groups:

        async def work(router: Router) -> None:
            task = asyncio.create_task(
                ask(router, "r", random_prompts(60)[0], SamplingParams(max_tokens=400))
            )
            await _seen(groups, m.Tokens)
            groups.hub.cut("router")
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)
            assert task.cancelled(), task

        groups.serve(work)


def _tickets(groups: LocalGroups) -> dict[str, int]:
    """Ticket number of each request, as soon as it is made."""
    found: dict[str, int] = {}

    def observe(source: str, destination: str, message: m.Message) -> None:
        if isinstance(message, m.Reserved):
            found[message.key.request_id] = message.ticket.number

    groups.observe(observe)
    return found


async def _seen(groups: LocalGroups, kind: type[m.Message]) -> None:
    """Returns when a message of `kind` passes."""
    loop, event = asyncio.get_running_loop(), asyncio.Event()

    def observe(source: str, destination: str, message: m.Message) -> None:
        if isinstance(message, kind):
            loop.call_soon_threadsafe(event.set)

    groups.observe(observe)
    await event.wait()
