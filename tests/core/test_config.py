"""Configuration: the order of the sources, and one line for each mistake."""

from __future__ import annotations

from contextlib import nullcontext
from pathlib import Path

import msgspec
import pytest

from disagg.core.config.read import (
    ApiConfig,
    BatchingConfig,
    ColocatedConfig,
    Config,
    DecodeConfig,
    GroupConfig,
    PrefillConfig,
    TransferConfig,
    load_config,
    parse_bytes,
)
from disagg.core.errors import ConfigError
from disagg.core.types import GroupInfo, KVLayout

TOML = """
[prefill]
tp = 4
page_size = 32

[transfer]
lease_timeout_s = 5
"""
YAML = "prefill: {tp: 4, page_size: 32}\ntransfer:\n  lease_timeout_s: 5\n"


def test_defaults_are_the_documented_ones() -> None:
    config = load_config()
    assert config == Config()
    assert (config.prefill.tp, config.decode.tp) == (None, None), "chosen from what the machine has"
    on_cpu, on_h200 = config.transfer.sized(0), config.transfer.sized(141 << 30)
    assert on_cpu.ring_bytes == on_cpu.staging_bytes == 32 << 20
    assert on_cpu.segment_limit_bytes == (8 << 20) - 8, "four segments and their checksums"
    assert on_h200.ring_bytes == on_h200.staging_bytes == 1 << 30
    assert (on_cpu.segment_overhead_s, on_h200.segment_overhead_s) == (0.0, 1e-4)
    assert on_cpu.wire_bytes_per_s == on_h200.wire_bytes_per_s == 350e9
    assert on_h200.sized(0) == on_h200, "what is chosen stays"


@pytest.mark.parametrize(("name", "text"), [("a.toml", TOML), ("a.yaml", YAML), ("a.yml", YAML)])
def test_later_sources_win(tmp_path: Path, name: str, text: str) -> None:
    path = tmp_path / name
    path.write_text(text)
    env = {"DISAGG_PREFILL__PAGE_SIZE": "8", "DISAGG_DECODE__TP": "3", "PATH": "/bin"}
    config = load_config(path, env, {"decode.tp": 5, "transport.trusted_network": "true"})
    assert config.prefill.tp == 4, "from the file"
    assert config.transfer.lease_timeout_s == 5.0, "a whole number where a float is expected"
    assert config.prefill.page_size == 8, "the environment beats the file"
    assert config.decode.tp == 5, "a flag beats the environment"
    assert config.transport.trusted_network is True
    assert config.prefill.chunk_tokens == PrefillConfig().chunk_tokens, "unset fields keep their defaults"


def test_the_cluster_section(tmp_path: Path) -> None:
    assert (Config().cluster.ray, Config().cluster.restart) == ("local", True)
    assert (Config().control.host, Config().control.directory_port) == ("127.0.0.1", 5570)
    config = load_config(None, {"DISAGG_CLUSTER__RESTART": "false"}, {"cluster.restart_backoff_s": "0.5"})
    assert (config.cluster.restart, config.cluster.restart_backoff_s) == (False, 0.5)
    assert (Config().cluster.step_floor_s("cuda"), Config().cluster.step_floor_s("cpu")) == (30.0, 300.0)
    assert load_config(None, {}, {"cluster.step_timeout_s": "7"}).cluster.step_floor_s("cpu") == 7.0
    for key, value, allowed in (
        ("cluster.restart_tries", 0, "at least 1"),
        ("cluster.step_timeout_s", -1, "at least 0"),
        ("cluster.hang_timeout_s", 0, "more than 0"),
        ("cluster.adopt_timeout_s", 15, "0, or more than hang_timeout_s \\(15\\)"),
        ("cluster.start_timeout_s", 0, "more than 0"),
        ("cluster.ray", "", "local, auto or the address"),
        ("control.directory_port", 65536, "from 0 to 65535"),
    ):
        with pytest.raises(ConfigError, match=rf"flag {key}: {key} = .*{allowed}"):
            load_config(None, {}, {key: value})


def test_a_group_named_in_a_file_keeps_its_own_defaults(tmp_path: Path) -> None:
    path = tmp_path / "a.toml"
    path.write_text("[prefill]\npage_size = 32\n")
    assert load_config(path).prefill == PrefillConfig(page_size=32)


def test_kubernetes_variables_are_not_ours() -> None:
    assert load_config(env={"DISAGG_ROUTER_SERVICE_HOST": "10.0.0.1", "DISAGG_PORT": "1"}) == Config()


FILE_MISTAKES = [
    ("a.toml", "[prefil]\ntp = 1", "unknown section prefil; did you mean prefill?"),
    ("a.toml", "[prefill]\ntpp = 1", "unknown key tpp in section prefill; did you mean tp?"),
    (
        "a.toml",
        "[transport]\nzzzz = 1",
        "unknown key zzzz in section transport; known: backend, tls_lanes, trusted_network, peer_memory",
    ),
    ("a.toml", "[prefill]\ntp = 0", "prefill.tp = 0 is not allowed; it must be at least 1"),
    ("a.toml", "[prefill]\ntp = '2'", "prefill.tp = '2' is not allowed; it must be a whole number"),
    ("a.toml", "[prefill]\ntp = true", "prefill.tp = True is not allowed; it must be a whole number"),
    ("a.toml", "[model]\npath = 3", "model.path = 3 is not allowed; it must be text or nothing"),
    ("a.toml", "[transport]\ntrusted_network = 1", "it must be true or false"),
    ("a.toml", "prefill = 3", "prefill = 3 is not a table of keys"),
    ("a.toml", "prefil = 3", "unknown section prefil; did you mean prefill?"),
    ("a.toml", "[prefill\n", "is not valid TOML"),
    ("a.yaml", "a: [\n", "is not valid YAML"),
    ("a.yaml", "- 1\n", "holds list, not a table of sections"),
    ("a.json", "{}", "its name must end in .toml, .yaml or .yml"),
    ("a.toml", None, "cannot be read: No such file or directory"),
]


@pytest.mark.parametrize(("name", "text", "expected"), FILE_MISTAKES)
def test_file_mistakes(tmp_path: Path, name: str, text: str | None, expected: str) -> None:
    path = tmp_path / name
    if text is not None:
        path.write_text(text)
    with pytest.raises(ConfigError) as caught:
        load_config(path)
    assert str(caught.value).startswith(f"file {path}: ")
    assert expected in str(caught.value)
    assert "\n" not in str(caught.value)


def test_a_file_that_is_not_text(tmp_path: Path) -> None:
    path = tmp_path / "a.toml"
    path.write_bytes(b"\xff\xfe")
    with pytest.raises(ConfigError, match=r"cannot be read.*utf-8"):
        load_config(path)


ENV_MISTAKES = [
    ("DISAGG_PREFILL__TPP", "2", "unknown key tpp in section prefill; did you mean tp?"),
    ("DISAGG_PREFIL__TP", "2", "unknown section prefil; did you mean prefill?"),
    ("DISAGG_DECODE__TP", "two", "decode.tp = 'two' is not allowed; it must be a whole number or nothing"),
    ("DISAGG_LOG__FORMAT", "xml", "log.format = 'xml' is not allowed; it must be one of plain, json"),
]


@pytest.mark.parametrize(("name", "value", "expected"), ENV_MISTAKES)
def test_environment_mistakes(name: str, value: str, expected: str) -> None:
    with pytest.raises(ConfigError) as caught:
        load_config(env={name: value})
    assert str(caught.value) == f"variable {name}: {expected}"


FLAG_MISTAKES = [
    ({"prefill": 1}, "flag prefill: a setting is written section.key=value, e.g. prefill.tp=2"),
    ({"prefill.": 1}, "flag prefill.: a setting is written section.key=value, e.g. prefill.tp=2"),
    ({"transfer.ring_bytes": "12Q"}, "flag transfer.ring_bytes: transfer.ring_bytes = '12Q' is not a size"),
    ({"transfer.ring_bytes": "1K"}, "it must be at least 4096"),
    (
        {
            "transfer.max_segment_bytes": "33MiB",
            "transfer.ring_bytes": "32MiB",
            "transfer.staging_bytes": "64MiB",
        },
        "at most the smaller of ring_bytes and staging_bytes (33554432)",
    ),
    ({"transfer.watermark_interval_s": 30}, "it must be less than lease_timeout_s (30)"),
    ({"transfer.lease_timeout_s": "nan"}, "it must be more than 0"),
    ({"transfer.layer_groups": 0}, "it must be at least 1"),
    ({"prefill.device": "gpu"}, "prefill.device = 'gpu' is not allowed; it must be one of auto, cpu, cuda"),
    (
        {"prefill.pool_tokens": 1000, "prefill.max_context_tokens": 9},
        "it must be a multiple of page_size (16)",
    ),
    (
        {"prefill.pool_tokens": 16384, "prefill.max_context_tokens": 1 << 20},
        "it must be at most pool_tokens (16384)",
    ),
    ({"decode.pool_tokens": -16}, "it must be at least 0"),
    ({"decode.mem_fraction": 0}, "it must be more than 0 and at most 1"),
    ({"decode.mem_fraction": 1.5}, "it must be more than 0 and at most 1"),
    ({"metrics.interval_s": 1e-6}, "it must be 0, or from 0.01 to 3600"),
    ({"transfer.watermark_interval_s": 0}, "it must be at least 0.001"),
    ({"transfer.watermark_interval_s": -1}, "it must be at least 0.001"),
    ({"transfer.watermark_interval_s": 1e-6}, "it must be at least 0.001"),
    ({"control.heartbeat_s": 0}, "it must be at least 0.01"),
    ({"control.suspect_after_s": -1}, "it must be at least 0"),
    ({"control.heartbeat_s": -1}, "it must be at least 0.01"),
    ({"control.heartbeat_s": 1e-6}, "it must be at least 0.01"),
    ({"control.max_message_bytes": "1023KiB"}, "it must be from 1048576 to 16777216"),
    ({"control.max_message_bytes": "17MiB"}, "it must be from 1048576 to 16777216"),
    ({"control.heartbeat_s": 6}, "it must be at most half of peer_timeout_s (10)"),
    ({"control.host": ""}, "it must be an address or a host name"),
    ({"router.request_timeout_s": 0}, "it must be more than 0"),
    ({"model.path": "/m", "model.random_init": "tiny"}, "it must be left out when model.path is given"),
    ({"model.seed": -1}, "it must be at least 0"),
]


@pytest.mark.parametrize(("overrides", "expected"), FLAG_MISTAKES)
def test_flag_mistakes(overrides: dict[str, object], expected: str) -> None:
    with pytest.raises(ConfigError) as caught:
        load_config(overrides=overrides)
    assert expected in str(caught.value)
    assert str(caught.value).startswith("flag ")
    assert "\n" not in str(caught.value)


def test_a_default_made_wrong_names_both() -> None:
    with pytest.raises(ConfigError) as caught:
        load_config(overrides={"transfer.lease_timeout_s": 0.125})
    assert str(caught.value) == (
        "default (with flag transfer.lease_timeout_s): transfer.watermark_interval_s = 0.25 is not allowed; "
        "it must be less than lease_timeout_s (0.125)"
    )


def test_sections_made_by_hand_are_checked_too() -> None:
    with pytest.raises(ConfigError, match="tp = 0 is not allowed"):
        PrefillConfig(tp=0)
    with pytest.raises(ConfigError, match="one of auto, cpu, cuda"):
        msgspec.structs.replace(DecodeConfig(), device="tpu")
    with pytest.raises(ConfigError, match="one of lru, lfu, fifo"):
        msgspec.structs.replace(ColocatedConfig(), eviction="random")
    with pytest.raises(ConfigError, match="one of auto, recompute, swap"):
        msgspec.structs.replace(DecodeConfig(), preemption="never")
    with pytest.raises(ConfigError, match="max_batch = -1 is not allowed"):
        ColocatedConfig(max_batch=-1)


@pytest.mark.parametrize(
    ("model", "prefill", "decode", "said"),
    [
        ("auto", "model", "int8", ""),
        ("int8", "auto", "model", ""),
        ("int8", "model", "model", ""),
        ("int8", "float8_e5m2", "float8_e5m2", ""),
        ("auto", "int8", "model", "prefill groups would store KV in int8, decode groups in auto"),
        ("int8", "model", "auto", "prefill groups would store KV in int8, decode groups in auto"),
        ("int8", "model", "float8_e5m2", "store KV in int8, decode groups in float8_e5m2"),
    ],
)
def test_kv_may_be_quantized_on_its_way_and_nothing_else(
    model: str, prefill: str, decode: str, said: str
) -> None:
    values = {"model.kv_dtype": model, "prefill.kv_dtype": prefill, "decode.kv_dtype": decode}
    with pytest.raises(ConfigError, match=said) if said else nullcontext():
        load_config(overrides=values)
    alone = load_config(overrides=values | {"cluster.mode": "colocated"})
    assert alone.kv_dtype_of(alone.colocated) == model


def test_the_tree_is_frozen() -> None:
    with pytest.raises(AttributeError):
        Config().prefill.tp = 3  # type: ignore[misc]


def test_segment_limit() -> None:
    quarter = TransferConfig(ring_bytes=1 << 20).sized(0).segment_limit_bytes
    assert quarter == (1 << 18) - 8, "of the smaller buffer, less the checksum"
    assert TransferConfig(staging_bytes=1 << 16).sized(0).segment_limit_bytes == (1 << 14) - 8
    assert TransferConfig(ring_bytes=1 << 20, checksum=False).sized(0).segment_limit_bytes == 1 << 18
    assert TransferConfig(max_segment_bytes=5000).sized(0).segment_limit_bytes == 5000


def test_pool_on_a_cpu() -> None:
    assert PrefillConfig().initial_pool_tokens == 16384
    assert PrefillConfig(page_size=15).initial_pool_tokens == 16395, "whole pages"
    assert DecodeConfig(max_context_tokens=40000).initial_pool_tokens == 40000, "one longest request fits"
    assert DecodeConfig(pool_tokens=4096).initial_pool_tokens == 4096


@pytest.mark.parametrize("name", ["ring_bytes", "staging_bytes"])
def test_a_segment_larger_than_the_one_buffer_that_is_chosen(name: str) -> None:
    """Refused when it is written down, not when a rank starts and chooses the other one."""
    with pytest.raises(ConfigError, match="max_segment_bytes = 8192"):
        TransferConfig(**{name: 4096}, max_segment_bytes=8192)


@pytest.mark.parametrize(
    ("text", "nbytes"),
    [("0", 0), ("4096", 4096), ("4096B", 4096), ("64KiB", 1 << 16), ("64k", 1 << 16), (" 3 GiB ", 3 << 30)],
)
def test_sizes(text: str, nbytes: int) -> None:
    assert parse_bytes(text) == nbytes


@pytest.mark.parametrize("text", ["", "-1", "1.5M", "MiB", "1TiB", "0x10", "1_000"])
def test_not_sizes(text: str) -> None:
    with pytest.raises(ConfigError, match="is not a size"):
        parse_bytes(text)


@pytest.mark.parametrize("transport", ["ucx-shm", "inproc", "ucx-rdma", "ucx-tcp", "tls"])
def test_checksums_where_kv_crosses_a_network_unless_set(transport: str) -> None:
    assert TransferConfig().checks(transport) == (transport in {"ucx-rdma", "ucx-tcp", "tls"})
    assert TransferConfig(checksum=True).checks(transport)
    assert not TransferConfig(checksum=False).checks(transport)


@pytest.mark.parametrize(
    ("section", "decodes"), [(PrefillConfig, 0), (DecodeConfig, 1), (ColocatedConfig, 1)]
)
def test_automatic_sizes_of_a_group(section: type[GroupConfig], decodes: int) -> None:
    on_gpu, on_cpu = section().sized("cuda"), section().sized("cpu")
    assert type(on_gpu) is type(on_cpu) is section
    assert (on_gpu.max_requests, on_gpu.decode_batch, on_gpu.chunk_tokens) == (256, 256 * decodes, 2048)
    assert (on_cpu.max_requests, on_cpu.decode_batch, on_cpu.chunk_tokens) == (32, 32 * decodes, 256)
    assert (on_gpu.context_limit(131072), on_cpu.context_limit(131072)) == (131072, 4096)
    assert on_gpu.sized("cuda") == on_gpu, "chosen sizes stay"
    open_ended = section().sized("cuda", requests=False)
    assert (open_ended.max_requests, open_ended.decode_batch) == (0, 0), "ranks choose it"
    assert open_ended.with_requests(60) == section(max_requests=60).sized("cuda")
    assert on_cpu.with_requests(60) == section().sized("cpu", requests=False) == on_cpu
    given = section(max_requests=7, max_context_tokens=100, chunk_tokens=9)
    assert given.with_requests(60).sized("cuda", requests=False).max_requests == 7
    assert given.sized("cuda") == given.sized("cpu")
    assert (given.sized("cuda").max_requests, given.sized("cuda").decode_batch) == (7, 7 * decodes)
    assert section(pool_tokens=1024).sized("cuda").context_limit(4096) == 1024, "no more than the pool holds"
    assert section(pool_tokens=1024).sized("cpu").max_context_tokens == 1024


@pytest.mark.parametrize(("max_batch", "answers"), [(0, 7), (3, 3), (9, 7)])
@pytest.mark.parametrize("section", [DecodeConfig, ColocatedConfig])
def test_a_step_has_at_most_an_answer_of_each_request(
    section: type[BatchingConfig], max_batch: int, answers: int
) -> None:
    group = section(max_requests=7, max_batch=max_batch)
    assert group.decode_batch == group.sized("cuda").decode_batch == answers


@pytest.mark.parametrize(
    ("setting", "roles"),
    [
        ("prefill.max_batch", "decode and colocated"),
        ("prefill.watermark", "decode"),
        ("colocated.preemption", "decode"),
        ("colocated.swap_bytes", "decode"),
    ],
)
def test_a_setting_of_another_role_names_the_roles_that_have_it(setting: str, roles: str) -> None:
    section, key = setting.split(".")
    with pytest.raises(ConfigError) as caught:
        load_config(overrides={setting: 1})
    assert str(caught.value) == f"flag {setting}: unknown key {key} in section {section}; set it in {roles}"


def test_admission_follows_the_groups_unless_set() -> None:
    def group(role: str, max_requests: int) -> GroupInfo:
        layout = KVLayout(1, 1, 8, "float32")
        return GroupInfo(role, role, 1, "model", layout, 16, "inproc", (), max_requests=max_requests)

    split = [group("prefill", 100), group("decode", 7), group("decode", 8)]
    assert ApiConfig().running_limit(split) == 15
    assert ApiConfig().running_limit([group("colocated", 9)]) == 9
    assert ApiConfig().running_limit(split[:1]) == 0, "nothing decodes"
    assert ApiConfig(max_running=3).running_limit(split) == 3
