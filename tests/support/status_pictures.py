"""Pictures of a service that never was: every total grows evenly, so that each rate is known."""

from __future__ import annotations

from typing import Any

from msgspec.structs import replace

from disagg.core.status import GroupStatus, RankStatus, RecentAnswer, RouteStatus, ServiceStatus

MIB = 1 << 20
BEGAN_UNIX_S = 1_800_000_000.0
ROUTE_BYTES_PER_S = 3_000_000.0
PREFILL_TOKENS_PER_S, DECODE_TOKENS_PER_S = 800.0, 120.0


def service(
    at_s: float,
    prefill: tuple[int, ...] = (2,),
    decode: tuple[int, ...] = (1, 1),
    *,
    began_unix_s: float = BEGAN_UNIX_S,
    **fields: Any,
) -> ServiceStatus:
    """The service `at_s` seconds after its start; `prefill` and `decode` have the ranks of each group."""
    names = [_name("decode", at) for at in range(len(decode))]
    targets = [f"{name} r{rank}" for name, ranks in zip(names, decode, strict=True) for rank in range(ranks)]
    groups = [_prefill(_name("prefill", at), ranks, targets, at_s) for at, ranks in enumerate(prefill)]
    groups += [_decode(name, ranks, at_s) for name, ranks in zip(names, decode, strict=True)]
    status = ServiceStatus(
        model="tiny",
        version="0.1.0",
        unix_s=began_unix_s + at_s,
        uptime_s=at_s,
        ready="ready",
        requests_running=5,
        requests_queued=2,
        max_running=64,
        max_queued=256,
        prompt_tokens_total=int(PREFILL_TOKENS_PER_S * at_s),
        generated_tokens_total=int(DECODE_TOKENS_PER_S * at_s),
        errors_total=1,
        aborts_total=2,
        refused_total=3,
        ttft_p50_s=0.12,
        ttft_p99_s=0.9,
        itl_p50_s=0.011,
        itl_p99_s=0.042,
        groups=tuple(groups),
        recent=answers(began_unix_s + at_s),
    )
    return replace(status, **fields)


def with_states(group: GroupStatus) -> GroupStatus:
    """The group of a model with recurrent layers: 40 state slots of 1 MiB, 20 in use, 8 cached of 32."""
    ranks = tuple(replace(rank, state_bytes=72 * MIB) for rank in group.ranks)
    return replace(
        group,
        ranks=ranks,
        state_slots=40,
        state_slots_used=20,
        cached_state_slots=32,
        cached_states=8,
        evicted_states_total=7,
    )


def with_tiers(group: GroupStatus, at_s: float) -> GroupStatus:
    """The group with host memory and a storage: of 400 tokens a second, it finds a half, an eighth and a quarter."""
    return replace(
        group,
        queried_tokens_total=int(400 * at_s),
        cached_tokens_total=int(350 * at_s),
        prompt_tokens_per_s=1000.0,
        host_pages=4096,
        host_pages_used=1024,
        host_storing_pages=3,
        host_loading_pages=4,
        host_stored_pages_total=int(25 * at_s),
        host_skipped_pages_total=2,
        host_loaded_tokens_total=int(150 * at_s),
        host_load_s_total=0.01 * at_s,
        storage_hit_tokens_total=int(100 * at_s),
        storage_writing_pages=1,
        storage_fetching_pages=2,
        storage_fetch_s_total=0.02 * at_s,
        storage_written_pages_total=20,
        storage_fetched_pages_total=7,
        storage_skipped_pages_total=1,
    )


def answers(unix_s: float) -> tuple[RecentAnswer, ...]:
    """One for each ending, one that runs and one that waits; newest first."""
    done = RecentAnswer(
        id="cmpl-5",
        arrived_unix_s=unix_s - 4,
        prefill="prefill",
        decode="decode-2",
        prompt_tokens=512,
        tokens=64,
        turn_s=0.05,
        reserved_s=0.08,
        ttft_s=0.4,
        transfer_s=0.2,
        transfer_bytes=MIB,
        ended_s=1.5,
        ending="length",
    )
    return (
        RecentAnswer("cmpl-9", unix_s - 0.4, prompt_tokens=30),
        replace(done, id="cmpl-8", arrived_unix_s=unix_s - 1, ended_s=0, tokens=9, ending=""),
        replace(done, id="cmpl-7", ttft_s=0, tokens=0, ended_s=0.7, ending="error", error="peer_lost"),
        replace(done, id="cmpl-6", ended_s=0.9, tokens=20, ending="aborted"),
        done,
        replace(done, id="cmpl-4", ended_s=2.5, tokens=200, ending="stop"),
    )


def _name(role: str, at: int) -> str:
    return f"{role}-{at + 1}" if at else role


def _prefill(name: str, ranks: int, targets: list[str], at_s: float) -> GroupStatus:
    def routes(rank: int) -> tuple[RouteStatus, ...]:
        return tuple(
            RouteStatus(
                target,
                "peer" if (rank + at) % 2 else "staged",
                bytes_total=int(ROUTE_BYTES_PER_S * at_s),
                segments_total=int(9 * at_s),
                busy_s_total=0.25 * at_s,
            )
            for at, target in enumerate(targets)
        )

    return GroupStatus(
        name,
        "prefill",
        tuple(
            RankStatus(
                f"{name} r{at}",
                at,
                "cpu",
                weights_bytes=512 * MIB,
                kv_bytes=1024 * MIB,
                staging_bytes=64 * MIB,
                staging_used_bytes=24 * MIB,
                routes=routes(at),
                exposed_s_total=0.01 * at_s,
            )
            for at in range(ranks)
        ),
        requests_waiting=3,
        requests_running=2,
        page_size=16,
        pages=1024,
        pages_used=300,
        pages_cached=200,
        tokens_held=4200,
        tokens_total=int(PREFILL_TOKENS_PER_S * at_s),
        cached_tokens_total=int(200 * at_s),
        steps_total=int(20 * at_s),
        step_s_total=0.6 * at_s,
    )


def _decode(name: str, ranks: int, at_s: float) -> GroupStatus:
    return GroupStatus(
        name,
        "decode",
        tuple(
            RankStatus(
                f"{name} r{at}",
                at,
                "cpu",
                weights_bytes=768 * MIB,
                kv_bytes=512 * MIB,
                ring_bytes=64 * MIB,
                ring_used_bytes=5 * MIB,
                ring_waits_total=int(at_s),
                ring_wait_s_total=0.01 * at_s,
                landed_bytes_total=int(ROUTE_BYTES_PER_S * at_s),
            )
            for at in range(ranks)
        ),
        requests_running=4,
        page_size=32,
        pages=512,
        pages_used=96,
        tokens_held=2500,
        tokens_total=int(DECODE_TOKENS_PER_S * at_s),
        steps_total=int(30 * at_s),
        step_s_total=0.4 * at_s,
    )
