"""The table of what a server chose at its start."""

from __future__ import annotations

import msgspec

from disagg.core.config.read import (
    ApiConfig,
    Config,
    DecodeConfig,
    PrefillConfig,
    Role,
    TransferConfig,
)
from disagg.core.types import GroupInfo, KVLayout, PageServer, RankInfo, Shard, Span, StateClass
from disagg.node.host_memory import HostCacheSize
from disagg.report.choices import choices, choices_table

HOST_CACHES: dict[Role, HostCacheSize] = {
    "prefill": HostCacheSize(3 << 29, "automatic: some memory"),
    "decode": HostCacheSize(0, "automatic: none on a CPU without a storage"),
}


def info(role: str, context_tokens: int, checksum: bool = False, max_requests: int = 256) -> GroupInfo:
    layout = KVLayout(layers=2, kv_heads=2, head_dim=8, dtype="float32")
    limits = {"context_tokens": context_tokens, "max_requests": max_requests}
    return GroupInfo(role, role, 1, "", layout, 16, "ucx-shm", (), checksum=checksum, **limits)


def as_dict(
    given: Config, device: str, infos: list[GroupInfo], max_running: int
) -> dict[str, tuple[str, str]]:
    kinds = {role: msgspec.structs.replace(kind, tp=1, device=device) for role, kind in given.kinds.items()}
    running = msgspec.structs.replace(
        given, **{role: kind.sized(device, requests=False) for role, kind in kinds.items()}
    )
    found = choices(given, running, infos, max_running, HOST_CACHES)
    assert choices_table(found).row_count == len(found)
    return {one.setting: (one.value, one.reason) for one in found}


def test_automatic_sizes_and_their_reasons() -> None:
    found = as_dict(Config(), "cuda", [info("prefill", 131072), info("decode", 90000)], 256)
    assert found["prefill.chunk_tokens"] == ("2048", "automatic on a GPU")
    assert found["decode.max_requests"] == ("256", "automatic on a GPU")
    assert found["decode.max_batch"] == ("256", "max_requests")
    assert found["decode.max_context_tokens"] == ("90,000", "the model's context, or the pool's size")
    assert found["longest prompt and answer"][0] == "90,000 tokens", "the smaller group's"
    assert found["api.max_running"] == ("256", "max_requests of the groups that decode")
    assert found["prefill.host_cache_bytes"] == ("1.5 GiB on each rank", "automatic: some memory")
    assert found["decode.host_cache_bytes"] == ("0", "automatic: none on a CPU without a storage")
    assert found["transfer.checksum"] == ("off", "off within one host, on over a network")


def test_set_sizes_are_called_so() -> None:
    shared = {"tp": 1, "max_requests": 3, "chunk_tokens": 8, "max_context_tokens": 64}
    config = Config(
        prefill=PrefillConfig(**shared),
        decode=DecodeConfig(max_batch=2, **shared),
        api=ApiConfig(max_running=5),
        transfer=TransferConfig(checksum=True),
    )
    found = as_dict(config, "cpu", [info("prefill", 64, True), info("decode", 64, True)], 5)
    automatic = {name for name, (_, reason) in found.items() if reason != "set"}
    hosts = {f"{role}.host_cache_bytes" for role in HOST_CACHES}
    assert automatic == {"transport", "longest prompt and answer"} | hosts
    assert found["transfer.checksum"] == ("on", "set")


def test_groups_that_share_their_host_memory() -> None:
    shared = PrefillConfig(host_cache_shared=True)
    group = info("prefill", 64)
    rank = RankInfo(0, Shard(0, Span(0, 2), Span(0, 2)), "", b"", page_server=PageServer(1, b"", "ucx-shm"))
    serving = msgspec.structs.replace(group, ranks=(rank,))
    found = as_dict(Config(prefill=shared), "cuda", [serving, info("decode", 64)], 5)
    assert found["prefill.host_cache_shared"] == ("true, over ucx-shm", "set")
    assert "decode.host_cache_shared" not in found
    found = as_dict(Config(prefill=shared), "cuda", [group, info("decode", 64)], 5)
    assert found["prefill.host_cache_shared"] == ("false: the model has no prefix cache", "set")


def with_states(group: GroupInfo, slots: int) -> GroupInfo:
    layout = msgspec.structs.replace(group.layout, states=(StateClass(4, 8, 32 << 10),))
    rank = RankInfo(0, Shard(0, Span(0, 2), Span(0, 2)), "", b"", state_slots=slots)
    return msgspec.structs.replace(group, layout=layout, ranks=(rank,))


def test_memory_of_recurrent_states() -> None:
    infos = [with_states(info("prefill", 64), 256 + 1024), with_states(info("decode", 64), 256)]
    found = as_dict(Config(), "cuda", infos, 256)
    assert found["prefill recurrent states"] == (
        "1,280 of 1 MiB, 1.25 GiB on each rank",
        "prefill.max_requests + 1,024 prefill.cached_states",
    )
    assert found["decode recurrent states"] == ("256 of 1 MiB, 256 MiB on each rank", "decode.max_requests")
    others = as_dict(Config(), "cuda", [info("prefill", 64), info("decode", 64)], 256)
    assert not any("states" in name for name in others)


def test_fewer_requests_where_their_states_are_large() -> None:
    infos = [
        with_states(info("prefill", 64), 256 + 1024),
        with_states(info("decode", 64, max_requests=60), 67),
    ]
    why = "automatic on a GPU: states of requests take at most 1/4 of the memory beside the weights"
    found = as_dict(Config(), "cuda", infos, 60)
    assert found["prefill.max_requests"] == ("256", "automatic on a GPU")
    assert found["decode.max_requests"] == ("60", why)
    assert found["decode.max_batch"] == ("60", "max_requests")
    assert found["decode recurrent states"] == (
        "67 of 1 MiB, 67 MiB on each rank",
        "decode.max_requests + 7 decode.cached_states",
    )
    given = Config(decode=DecodeConfig(max_requests=60))
    assert as_dict(given, "cuda", infos, 60)["decode.max_requests"] == ("60", "set")
