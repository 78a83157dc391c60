"""What must hold: at any time, and when all requests have ended and the network is whole."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from cluster_simulation.rank_process import RankProcess
    from cluster_simulation.router_process import RouterProcess
    from cluster_simulation.world import World


def check(world: World) -> None:
    """Every structure of every living process is consistent."""
    for process in world.ranks():
        process.rank.agent.check()
        process.rank.transport.check()
        process.control.check()
        if process.rank.leader is not None:
            process.rank.leader.check()
    for router in world.living_routers():
        router.control.check()
        router.router.check()


def check_empty(world: World) -> None:
    """No process of the cluster holds anything of any request. Raises `AssertionError`."""
    check(world)
    for process in world.ranks():
        _check_rank(process)
    for router in world.living_routers():
        _check_router(world, router)
    assert {group.role for group in world.groups if group.lives} == {"prefill", "decode"}, (
        "no group came back"
    )
    assert all(group.lives for group in world.groups), [
        group.name for group in world.groups if not group.lives
    ]


def _check_rank(process: RankProcess) -> None:
    name, rank = process.name, process.rank
    transfer: Any = rank.agent.statistics()
    assert transfer.tickets == 0, f"{name} holds tickets: {transfer}"
    held = getattr(transfer, "ring_in_use_bytes", 0) + getattr(transfer, "staging_in_use_bytes", 0)
    assert held == 0, f"{name} holds ring or staging space: {transfer}"
    assert getattr(transfer, "checksum_mismatches", 0) == 0, f"{name}: nothing was damaged: {transfer}"
    pending = rank.transport.statistics().pending
    assert pending == 0, f"{name}: {pending} operations never end: {rank.transport.statistics()}"
    assert not rank.transfer_loop.posted, f"{name}: work was never done"
    assert process.control.statistics().unacknowledged == 0, f"{name}: {process.control.statistics()}"
    if rank.leader is None:
        return
    assert not rank.broken, f"{name}: {rank.broken}"
    found = rank.leader.statistics()
    memory, host = found.memory, getattr(found, "host", None)
    assert rank.leader.wait_idle(0.0), f"{name} holds requests: {list(rank.leader.scheduler.requests)}"
    assert memory.free_rows == memory.rows, f"{name} holds rows: {memory}"
    cached = memory.cache.cached_pages if memory.cache else 0
    assert memory.pages.references == cached, f"{name} holds pages: {memory}"
    assert not (memory.cache and memory.cache.locked_pages), f"{name} locks pages: {memory}"
    assert host is None or host.used_blocks == 0, f"{name} holds host memory: {host}"
    tier = memory.host
    assert tier is None or tier.storing_pages == tier.loading_pages == 0, f"{name} still copies: {tier}"


def _check_router(world: World, router: RouterProcess) -> None:
    name, dispatcher = router.name, router.dispatcher
    assert not dispatcher.receivers, f"{name} holds receivers: {list(dispatcher.receivers)}"
    up = {group.name for group in world.groups if group.lives}
    assert {engine.group.name for engine in router.router.engines} == up, f"{name}: not the groups {up}"
    assert not router.router.suspected(), f"{name} suspects {router.router.suspected()}"
    for engine in router.router.engines:
        local = (engine.local_prompts, engine.local_tokens, engine.answering)
        load = (engine.requests, engine.tokens, *local)
        assert not any(load), f"{name}: {engine.group.name} still counts {load}"
        lost = dispatcher.lost.intersection(rank.control_address for rank in engine.group.ranks)
        assert not lost, f"{name} takes {engine.group.name} for lost"
    assert len(dispatcher.listeners) <= 1 + len(up), f"{name}: {sorted(dispatcher.listeners)}"
