"""What ranks and groups tell of themselves, beside what happened: bytes, tokens, steps; who comes and goes."""

from __future__ import annotations

import asyncio
import itertools
from pathlib import Path

import msgspec
import pytest
import torch
from architectures import HYBRIDS, save
from conditions import until_async
from local_groups import Checkpoints, LocalGroups, ask, local_groups, random_prompts, small_config
from slow_parameters import sampled
from transformers import AutoModelForCausalLM

from disagg.core.status import GroupStatus
from disagg.core.types import SamplingParams
from disagg.model.load.source import ModelSource
from disagg.router.router import Router
from transport.control import messages as m
from transport.control.inproc import InprocControl
from transport.control.reliable import ReliableOptions

torch.set_num_threads(1)
INTERVAL_S = 0.02
TOKENS = 6


def idle(statuses: tuple[GroupStatus, ...]) -> bool:
    """Nothing is with any group, and what its ranks did last has been reported."""
    return all(g.ranks and not (g.requests_running or g.requests_closing or g.pages_used) for g in statuses)


def shown(router: Router) -> set[str]:
    """Where KV goes, as the prefill ranks report it."""
    return {route.target for group in router.groups() for rank in group.ranks for route in rank.routes}


async def served(groups: LocalGroups, router: Router, prompts: list[list[int]]) -> tuple[GroupStatus, ...]:
    """The statuses after all prompts were answered, when every rank has reported its part."""
    sampling = SamplingParams(max_tokens=TOKENS, ignore_eos=True)
    await asyncio.gather(*(ask(router, f"r{i}", prompt, sampling) for i, prompt in enumerate(prompts)))
    nbytes = sum(len(prompt) for prompt in prompts) * groups.prefill_info.layout.token_bytes

    def complete() -> bool:
        ranks = [rank for group in router.groups() for rank in group.ranks]
        sent = sum(route.bytes_total for rank in ranks for route in rank.routes)
        return idle(router.groups()) and sent == sum(rank.landed_bytes_total for rank in ranks) == nbytes

    await until_async(complete)
    return router.groups()


@pytest.mark.parametrize(
    ("tp", "path"),
    sampled(
        itertools.product([(2, 1), (1, 2), (2, 2)], ["staged", "peer"]),
        lambda tp, path: (path == "staged") == (tp == (1, 2)),
    ),
    ids=str,
)
def test_what_is_reported_is_what_happened(checkpoints: Checkpoints, tp: tuple[int, int], path: str) -> None:
    prompts = random_prompts(30, 50, 20, 70)
    config = small_config(*tp, peer_memory=path == "peer", metrics_interval_s=INTERVAL_S)
    with local_groups(config, checkpoints.source()) as groups:
        prefill, decode = groups.serve(lambda router: served(groups, router, prompts))
        transfers = [rank.statistics()["transfer"] for rank in groups.prefill]
        receivers = [rank.statistics()["transfer"] for rank in groups.decode]
    tokens, layout = sum(len(prompt) for prompt in prompts), groups.prefill_info.layout
    routes = [route for rank in prefill.ranks for route in rank.routes]
    assert sum(route.bytes_total for route in routes) == tokens * layout.token_bytes
    assert sum(rank.landed_bytes_total for rank in decode.ranks) == tokens * layout.token_bytes
    assert [r.landed_bytes_total for r in decode.ranks] == [one.bytes_landed for one in receivers]
    assert [sum(route.segments_total for route in r.routes) for r in prefill.ranks] == [
        one.segments_sent for one in transfers
    ]
    assert {route.path for route in routes} == {path}
    assert {route.target for route in routes} == {f"decode r{rank}" for rank in range(tp[1])}
    assert all(0 < route.busy_s_total < 10 for route in routes)
    assert all(rank.exposed_s_total > 0 for rank in prefill.ranks)
    assert [(g.name, g.role, len(g.ranks)) for g in (prefill, decode)] == [
        ("prefill", "prefill", tp[0]),
        ("decode", "decode", tp[1]),
    ]
    assert [rank.name for rank in prefill.ranks] == [f"prefill r{rank}" for rank in range(tp[0])]
    assert prefill.tokens_total == tokens
    assert decode.tokens_total == len(prompts) * (TOKENS - 1), "the first token is the prefill group's"
    assert prefill.steps_total >= tokens / config.prefill.chunk_tokens
    assert decode.steps_total >= TOKENS - 1
    assert 0 < prefill.step_s_total < 30
    assert prefill.pages == config.prefill.pool_tokens // config.prefill.page_size
    assert decode.page_size == config.decode.page_size
    assert all(rank.ring_bytes == config.transfer.ring_bytes for rank in decode.ranks)
    assert all(rank.staging_bytes == config.transfer.staging_bytes for rank in prefill.ranks)
    for group in (prefill, decode):
        slots = group.pages * group.page_size
        assert sum(rank.kv_bytes for rank in group.ranks) == slots * layout.token_bytes
        assert not any(rank.device_bytes for rank in group.ranks), "nothing is set on a CPU"
        assert not any((group.state_slots, group.cached_state_slots, group.ranks[0].state_bytes)), (
            "no such layers"
        )
    used = [r.staging_used_bytes for r in prefill.ranks] + [r.ring_used_bytes for r in decode.ranks]
    assert not any(used)
    assert not any(rank.faults_total for group in (prefill, decode) for rank in group.ranks)


def test_ranks_tell_what_weights_they_hold(checkpoints: Checkpoints) -> None:
    source, config = checkpoints.source(), small_config(2, 1, metrics_interval_s=INTERVAL_S)
    with local_groups(config, source) as groups:
        prefill, decode = groups.serve(lambda router: served(groups, router, random_prompts(20)))
    reference = AutoModelForCausalLM.from_config(source.config)
    tensors = [*reference.parameters(), *reference.buffers()]
    whole_bytes = sum(tensor.nbytes for tensor in {one.data_ptr(): one for one in tensors}.values())
    assert [rank.weights_bytes for rank in decode.ranks] == [whole_bytes]
    assert all(whole_bytes / 2 < rank.weights_bytes < whole_bytes for rank in prefill.ranks)


def test_states_of_recurrent_layers_are_told_while_they_are_held(tmp_path: Path) -> None:
    source = ModelSource.from_directory(save(HYBRIDS["lfm2"](), tmp_path))
    config = small_config(2, 1, metrics_interval_s=INTERVAL_S)
    prefill = msgspec.structs.replace(config.prefill, state_interval_tokens=16, cached_states=5)
    config = msgspec.structs.replace(config, prefill=prefill)
    with local_groups(config, source) as groups:
        state_bytes = groups.prefill_info.layout.state_bytes

        async def work(router: Router) -> None:
            sampling = SamplingParams(max_tokens=60, ignore_eos=True)
            running = asyncio.create_task(ask(router, "r", random_prompts(90)[0], sampling))
            await until_async(lambda: any(g.role == "decode" and g.tokens_total for g in router.groups()))
            decode = router.groups()[1]
            assert (decode.state_slots, decode.state_slots_used) == (config.decode.max_requests, 1)
            assert (decode.cached_state_slots, decode.cached_states) == (1, 0), "for preempted requests"
            assert [r.state_bytes for r in decode.ranks] == [(config.decode.max_requests + 1) * state_bytes]
            await running
            await asyncio.gather(
                *(ask(router, f"r{i}", random_prompts(90, seed=i)[0], sampling) for i in (5, 6))
            )
            await until_async(
                lambda: idle(router.groups()) and not any(g.state_slots_used for g in router.groups())
            )
            first = router.groups()[0]
            assert (first.state_slots, first.cached_state_slots) == (config.prefill.max_requests, 5)
            assert 0 < first.cached_states <= 5
            assert first.evicted_states_total > 0
            assert [r.state_bytes for r in first.ranks] == [
                (config.prefill.max_requests + 5) * state_bytes
            ] * 2

        groups.serve(work)


def test_a_small_ring_is_waited_for(checkpoints: Checkpoints) -> None:
    config = small_config(1, 1, ring_bytes=8192, metrics_interval_s=INTERVAL_S)
    with local_groups(config, checkpoints.source()) as groups:
        _, decode = groups.serve(lambda router: served(groups, router, random_prompts(*[60] * 6)))
    [rank] = decode.ranks
    assert rank.ring_waits_total > 0
    assert rank.ring_wait_s_total > 0


def test_memory_and_requests_are_told_while_they_are_held(checkpoints: Checkpoints) -> None:
    config = small_config(1, 1, metrics_interval_s=INTERVAL_S)
    with local_groups(config, checkpoints.source()) as groups:

        async def work(router: Router) -> None:
            sampling = SamplingParams(max_tokens=400, ignore_eos=True)
            running = asyncio.create_task(ask(router, "r", random_prompts(33)[0], sampling))
            await until_async(lambda: any(g.role == "decode" and g.tokens_total for g in router.groups()))
            decode = router.groups()[1]
            assert decode.requests_running == decode.routers == 1
            held = decode.tokens_held
            assert held - 33 - decode.tokens_total in (0, 1, 2), (
                "the prompt and the answer so far, with one in a step and one in the step behind it"
            )
            assert decode.pages_used == -(-held // decode.page_size)
            running.cancel()
            await until_async(lambda: idle(router.groups()))
            await until_async(lambda: not any(group.routers for group in router.groups()))

        groups.serve(work)


def test_several_groups_and_one_that_dies(checkpoints: Checkpoints) -> None:
    config = small_config(1, 2, groups=(2, 2), metrics_interval_s=INTERVAL_S)
    options = ReliableOptions(heartbeat_s=0.05, peer_timeout_s=0.6)
    groups = LocalGroups(config, checkpoints.source(), options=options)
    names = ["prefill", "prefill-2", "decode", "decode-2"]
    targets = {f"{group} r{rank}" for group in ("decode", "decode-2") for rank in range(2)}

    async def work(router: Router) -> None:
        assert [group.name for group in router.groups()] == names, "before they have reported anything"
        statuses = await served(groups, router, random_prompts(30, 50, 20, 70, 40, 60, 25, 45))
        assert [group.name for group in statuses] == names
        for group in statuses[:2]:
            assert {route.target for rank in group.ranks for route in rank.routes} == targets
            assert group.tokens_total > 0
        groups.kill("decode-2-1")  # not the leader: its group breaks, which the leader itself reports
        gone = "decode-2 r1"

        def noticed() -> bool:
            broken = [g.name for g in router.groups() if g.broken]
            return broken == ["decode-2"] and gone not in shown(router)

        await until_async(noticed)
        groups.kill("decode-2-0")
        await until_async(lambda: [group.name for group in router.groups()] == names[:3])
        await until_async(lambda: not {name for name in shown(router) if name.startswith("decode-2")})

    try:
        groups.serve(work)
        groups.settle(dead=["decode-2-0", "decode-2-1"])
    finally:
        groups.stop()


def test_a_router_that_stops_asking_is_forgotten(
    checkpoints: Checkpoints, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = small_config(2, 1, metrics_interval_s=INTERVAL_S)
    with local_groups(config, checkpoints.source()) as groups:
        leader = groups.prefill[0].leader
        ranks_told: list[int] = []
        silent: list[bool] = []
        send = InprocControl.send

        def silenced(control: InprocControl, peer: str, message: m.Message) -> None:
            if not (silent and isinstance(message, m.Watch)):
                send(control, peer, message)

        monkeypatch.setattr(InprocControl, "send", silenced)

        def observe(source: str, destination: str, message: m.Message) -> None:
            if isinstance(message, m.RankReport):
                ranks_told.append(message.status.rank)

        groups.hub.observe(observe)

        async def work(router: Router) -> None:
            await until_async(lambda: idle(router.groups()))
            assert leader.watchers == ("router",)
            silent.append(True)
            await until_async(lambda: not leader.watchers)
            seen = len(ranks_told)
            await until_async(lambda: len(ranks_told) > seen)  # ranks go on to tell their leader
            assert set(ranks_told) == {1}, "rank 0 is the leader's own"
            silent.clear()
            await until_async(lambda: leader.watchers == ("router",))

        groups.serve(work)


def test_nothing_is_reported_when_it_is_switched_off(checkpoints: Checkpoints) -> None:
    with local_groups(small_config(2, 1, metrics_interval_s=0.0), checkpoints.source()) as groups:
        reports: list[m.Message] = []

        def observe(source: str, destination: str, message: m.Message) -> None:
            if isinstance(message, m.Watch | m.RankReport | m.GroupReport):
                reports.append(message)

        groups.hub.observe(observe)

        async def work(router: Router) -> None:
            await ask(router, "r", random_prompts(60)[0], SamplingParams(max_tokens=30))
            assert [group.ranks for group in router.groups()] == [(), ()]

        groups.serve(work)
    assert not reports
