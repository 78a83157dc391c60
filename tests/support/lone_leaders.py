"""A decode leader without ranks and routers: the test sends it their messages."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

from fake_model import fake_spec

from decode_node.costs import CostEstimates
from decode_node.leader import DecodeLeader
from decode_node.scheduler import DecodeScheduler
from decode_node.scheduler_options import SchedulerOptions
from disagg.model.chunks import PromptChunks
from disagg.node.kv_manager import KVManager
from transport.control import messages as m

FIRST_TICKET = 7


def lone_decode_leader(
    send: Callable[[str, m.Message], None] = lambda peer, message: None,
    clock: Callable[[], float] = lambda: 0.0,
    *,
    ranks: int = 1,
    pool_tokens: int = 256,
    max_waiting: int = 4,
    **options: Any,
) -> DecodeLeader:
    """Returns the leader of the group "decode" with the ranks `decode-0`, ..., linked with the group "prefill".

    `options`: of the scheduler.
    """
    kv_manager = KVManager(pool_tokens=pool_tokens, page_size=4, rows=8, eviction="lru")
    defaults = {"max_batch": 8, "chunks": PromptChunks(64), "rates": CostEstimates(1e3, 1e3)}
    scheduler_options: Any = SchedulerOptions(
        group="decode",
        ranks=ranks,
        max_context_tokens=pool_tokens,
        first_ticket=FIRST_TICKET,
        **{**defaults, **options},  # type: ignore[arg-type]
    )
    scheduler, spec = DecodeScheduler(kv_manager, scheduler_options), fake_spec(layers=1, kv_heads=1)
    leader = DecodeLeader(scheduler, (), spec, send, lambda message: None, clock, max_waiting)
    members = tuple(SimpleNamespace(control_address=f"decode-{n}", swap_blocks=0) for n in range(ranks))
    group: Any = SimpleNamespace(ranks=members, role="decode", name="decode", leader=members[0])
    leader.join(group)
    link_prefill(leader, "prefill")
    return leader


def link_prefill(leader: DecodeLeader, name: str) -> None:
    """Links the leader with the prefill group `name`, led by its rank at `name`-0."""
    prefill: Any = SimpleNamespace(name=name, leader=SimpleNamespace(control_address=f"{name}-0"))
    leader.link(prefill)


def scheduler_of(leader: DecodeLeader) -> DecodeScheduler:
    """Returns the leader's scheduler."""
    scheduler = leader.scheduler
    assert isinstance(scheduler, DecodeScheduler)
    return scheduler
