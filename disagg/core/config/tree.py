"""The configuration tree: frozen, validated, passed as an argument.

Each section checks its values in `__post_init__`, also when constructed directly. Import from
`disagg.core.config.read`, which reads the sources.
"""

from __future__ import annotations

from typing import Literal

import msgspec

from disagg.core.config.api import ApiConfig
from disagg.core.config.groups import ColocatedConfig, DecodeConfig, GroupConfig, PrefillConfig, Role
from disagg.core.config.section import Section
from disagg.core.errors import ConfigError
from disagg.core.types import CHECKSUM_BYTES

MIB = 1 << 20

Mode = Literal["split", "colocated"]
DTypeName = Literal["auto", "float32", "bfloat16", "float16"]
AttentionName = Literal["auto", "torch", "triton"]
KVDTypeName = Literal["auto", "int8", "float8_e4m3fn", "float8_e5m2"]
MAX_TLS_LANES = 16
TransportName = Literal["auto", "ucx", "tls", "inproc"]
PolicyName = Literal["prefix_aware", "least_loaded", "round_robin"]
Calibrate = Literal["auto", "always", "off"]
LogLevel = Literal["debug", "info", "warning", "error"]
LogFormat = Literal["plain", "json"]


class ModelConfig(Section, frozen=True):
    """The model: `path` or `random_init`, not both."""

    path: str | None = None
    """Folder of a Hugging Face checkpoint."""
    random_init: str | None = None
    """Name of a small architecture with random weights, for demos and tests without a checkpoint."""
    dtype: DTypeName = "auto"
    seed: int = 0
    """Seed of the random weights; prefill and decode groups must use the same."""
    attention: AttentionName = "auto"
    """Attention backend. auto: Triton kernels on a GPU for supported models, else torch."""
    kv_dtype: KVDTypeName = "auto"
    """Type of stored and transferred KV. auto: the model's type. The 8-bit types have a scale per head and token:
    half of the memory and the traffic, with slightly different answers."""
    fused: bool = True
    """On a GPU: use Triton kernels for the norms, rotary embeddings and gated MLPs that their registries name."""
    deterministic: bool = False
    """Makes a request's logits bitwise independent of the batch and the group: fixed tile and split sizes, one
    order of sums. Some per cent slower. Linked groups must have the same value."""

    def __post_init__(self) -> None:
        self._one_of("dtype", DTypeName)
        self._one_of("attention", AttentionName)
        self._one_of("kv_dtype", KVDTypeName)
        self._at_least(0, "seed")
        self._needs(
            not (self.path and self.random_init),
            "random_init",
            "left out when model.path is given (one model)",
        )


_WITHIN_A_HOST = ("inproc", "ucx-shm")
"""Transports within one host, by their names in the handshake."""


class TransferConfig(Section, frozen=True):
    """Transfer of KV from prefill to decode ranks."""

    ring_bytes: int = 0
    """Size of each decode rank's receive ring; 0: by the device, see `sized`."""
    staging_bytes: int = 0
    """Size of each prefill rank's staging buffer; 0: by the device, see `sized`."""
    layer_groups: int = 4
    """Largest number of layer groups: each is sent while the next one computes."""
    calibrate: Calibrate = "auto"
    """Whether prefill ranks measure their wires at linking, for the unset ones of `segment_overhead_s`,
    `wire_bytes_per_s`, `max_segment_bytes`. auto: on a GPU, for pairs of ranks not in the cache
    (`disagg.node.wire_cache`); always: at every start, also on a CPU; off: never."""
    segment_overhead_s: float | None = None
    """Cost of a further segment, used to choose the number of layer groups (`staging.planner.group_count`). None:
    measured, else 100 us on a GPU (NVLink, with both copies), 0 on a CPU."""
    wire_bytes_per_s: float = 0.0
    """Bandwidth between two ranks, for the same choice. 0: measured, else 350e9 (NVLink 4)."""
    lease_timeout_s: float = 30.0
    """Time limit of a ring lease to be granted and written; then the request fails, and the fenced lease is freed."""
    watermark_interval_s: float = 0.25
    """Interval of repeated watermarks."""
    max_segment_bytes: int = 0
    """Largest segment; 0: by the measured wire, at most the default of `segment_limit_bytes`."""
    checksum: bool | None = None
    """Whether each segment carries a 64-bit checksum. The decode rank checks the bytes copied from its ring, or its
    pages after direct writes, before the prompt counts as landed. A damaged segment is sent once more; a second
    mismatch fails the request. All groups must have the same value. None: only if KV crosses a network; within one
    host checksums cost small prompts more than 2 % of the transfer rate."""
    spin_s: float = 0.005
    """Time that a rank on a GPU polls after the last traffic before it sleeps; a wake-up takes up to 1 ms."""
    drain_timeout_s: float = 10.0
    """Time that running transfers have to finish before a shutdown aborts them."""

    def __post_init__(self) -> None:
        for name in ("ring_bytes", "staging_bytes"):
            if getattr(self, name) != 0:
                self._at_least(4096, name)
        self._one_of("calibrate", Calibrate)
        self._at_least(1, "layer_groups")
        self._at_least(0, "max_segment_bytes", "spin_s", "wire_bytes_per_s")
        if self.segment_overhead_s is not None:
            self._at_least(0, "segment_overhead_s")
        self._positive("lease_timeout_s", "drain_timeout_s")
        self._at_least(0.001, "watermark_interval_s")  # a shorter interval would occupy the transfer thread
        smaller = min((n for n in (self.ring_bytes, self.staging_bytes) if n), default=0)  # 0: resolved later
        self._needs(
            self.max_segment_bytes <= smaller or smaller == 0,
            "max_segment_bytes",
            f"at most the smaller of ring_bytes and staging_bytes ({smaller})",
        )
        self._needs(
            self.watermark_interval_s < self.lease_timeout_s,
            "watermark_interval_s",
            f"less than lease_timeout_s ({self.lease_timeout_s:g})",
        )

    def sized(self, gpu_memory_bytes: int) -> TransferConfig:
        """Returns the section with device-dependent defaults resolved; `gpu_memory_bytes` is 0 on a CPU.

        Ring and staging buffer have 1/128 of a GPU's memory each, from 64 MiB to 1 GiB; 32 MiB on a CPU.
        """
        automatic = max(64 * MIB, min(gpu_memory_bytes // 128, 1024 * MIB)) if gpu_memory_bytes else 32 * MIB
        overhead_s = self.segment_overhead_s
        return msgspec.structs.replace(
            self,
            ring_bytes=self.ring_bytes or automatic,
            staging_bytes=self.staging_bytes or automatic,
            segment_overhead_s=(1e-4 if gpu_memory_bytes else 0.0) if overhead_s is None else overhead_s,
            wire_bytes_per_s=self.wire_bytes_per_s or 350e9,
        )

    def checks(self, transport: str) -> bool:
        """Returns whether segments carry checksums over the transport of this handshake name."""
        return transport not in _WITHIN_A_HOST if self.checksum is None else self.checksum

    @property
    def segment_limit_bytes(self) -> int:
        """Largest planned segment: `max_segment_bytes`, or a quarter of the smaller of ring and staging buffer, so
        four segments with checksums can be in flight."""
        quarter = min(self.ring_bytes, self.staging_bytes) // 4
        return self.max_segment_bytes or (quarter if self.checksum is False else quarter - CHECKSUM_BYTES)


class TransportConfig(Section, frozen=True):
    """Backend of the data path."""

    backend: TransportName = "auto"
    """auto: UCX over shared memory on one host (a loopback `control.host`). Between hosts: UCX over RDMA, else UCX
    over TCP on a trusted network, else tls. ucx: the same without tls. tls: always TLS over TCP."""
    tls_lanes: int = 0
    """Connections per peer over which the TLS transport spreads a large message; each uses a core while sending. 0:
    half of the process's cores, from 1 to 2."""
    trusted_network: bool = False
    """Allows UCX over TCP between hosts. UCX's TCP is neither authenticated nor encrypted: a machine that reaches
    its port can read and write the memory of the rank."""
    peer_memory: bool = True
    """Let prefill ranks write directly to a decode rank's pool if they can map it; otherwise KV goes through
    staging."""

    def __post_init__(self) -> None:
        self._one_of("backend", TransportName)
        self._needs(0 <= self.tls_lanes <= MAX_TLS_LANES, "tls_lanes", f"from 0 to {MAX_TLS_LANES}")


class ControlConfig(Section, frozen=True):
    """The control channel (ZMQ)."""

    host: str = "127.0.0.1"
    """Address to listen on and to announce; `auto`: the address of each process's host."""
    router_port: int = 0
    """Port of a router; 0 takes a free one, as ranks always do."""
    directory_port: int = 5570
    """Port of the directory of groups in `disagg launch`; 0 takes a free one."""
    key_file: str | None = None
    """File of CURVE keys (`disagg keys`), reloaded on change; None: new keys for each run."""
    peer_timeout_s: float = 10.0
    """Silence after which a peer counts as lost."""
    heartbeat_s: float = 1.0
    max_message_bytes: int = 16 * MIB
    """Largest control message; a request that needs a larger one fails. Only messages with a prompt's tokens and
    pages can exceed the smallest allowed value."""

    def __post_init__(self) -> None:
        self._needs(bool(self.host), "host", "an address or a host name")
        self._positive("peer_timeout_s")
        self._at_least(0.01, "heartbeat_s")  # a shorter interval would occupy the peers
        for port in ("router_port", "directory_port"):
            self._needs(0 <= getattr(self, port) < 1 << 16, port, "from 0 to 65535")
        self._needs(
            MIB <= self.max_message_bytes <= 16 * MIB, "max_message_bytes", f"from {MIB} to {16 * MIB}"
        )
        self._needs(
            self.heartbeat_s * 2 <= self.peer_timeout_s,
            "heartbeat_s",
            f"at most half of peer_timeout_s ({self.peer_timeout_s:g}), so that one lost heartbeat is tolerated",
        )


class ClusterConfig(Section, frozen=True):
    """Placement of groups, and replacement of dead ones (not in `demo` and `generate`)."""

    mode: Mode = "split"
    """split: prefill and decode groups; colocated: groups of both roles, as a baseline."""
    ray: str = "local"
    """`local`: start Ray on this machine; `auto` or `host:port`: use a running cluster."""
    restart: bool = True
    """Whether `launch` and `serve` replace a dead group."""
    restart_backoff_s: float = 1.0
    """Pause before a replacement; doubles after each failure, up to a minute."""
    restart_tries: int = 5
    """Consecutive failed replacements after which the group stays down."""
    step_timeout_s: float = 0.0
    """Least limit of one step. A step that takes longer, and ten times longer than the longest step before, breaks
    its group, which is replaced. 0: 30 s on a GPU, 300 s on a CPU."""

    def __post_init__(self) -> None:
        self._one_of("mode", Mode)
        self._needs(bool(self.ray), "ray", "local, auto or the address of a Ray cluster")
        self._at_least(0, "restart_backoff_s", "step_timeout_s")
        self._at_least(1, "restart_tries")

    def step_floor_s(self, device: str) -> float:
        """Returns `step_timeout_s`, or its default for `device`, `cpu` or `cuda`."""
        return self.step_timeout_s or (30.0 if device == "cuda" else 300.0)


class RouterConfig(Section, frozen=True):
    """Choice of groups and life of a request."""

    policy: PolicyName = "prefix_aware"
    """Choice of a request's groups among several of a role. prefix_aware: by queued tokens and prefix cache hits, the
    decode group of a session by its name; least_loaded: by load; round_robin: in turn. Routers receive KV events
    every `metrics.interval_s`."""
    request_timeout_s: float = 120.0
    reserve_retry_s: float = 0.05
    """Pause before the next `Reserve` to a full decode group."""
    max_recoveries: int = 3
    """How often a request whose groups are lost may continue on others, within its time limit. 0: it fails."""
    recoveries_per_s: float = 100.0
    """Recoveries that a router starts per second, and at once after a quiet second; others wait."""
    group_wait_s: float = 60.0
    """How long a request waits for a group where no group of a role is up, within its time limit."""

    def __post_init__(self) -> None:
        self._one_of("policy", PolicyName)
        self._positive("request_timeout_s", "reserve_retry_s", "recoveries_per_s")
        self._at_least(0, "max_recoveries", "group_wait_s")


class MetricsConfig(Section, frozen=True):
    """Metrics of ranks, groups and routers."""

    interval_s: float = 1.0
    """Interval of reports from ranks to leaders and from leaders to routers; 0: no reports, no groups in
    `/metrics`."""
    otlp_endpoint: str | None = None
    """Collector for a trace span per request of `serve` (OTLP over HTTP), such as http://localhost:4318."""

    def __post_init__(self) -> None:
        # A shorter interval would occupy ranks and leaders.
        self._needs(
            self.interval_s == 0 or 0.01 <= self.interval_s <= 3600, "interval_s", "0, or from 0.01 to 3600"
        )
        http = self.otlp_endpoint is None or self.otlp_endpoint.startswith(("http://", "https://"))
        self._needs(http, "otlp_endpoint", "a URL that begins with http:// or https://")


class LogConfig(Section, frozen=True):
    """Log level and format."""

    level: LogLevel = "info"
    format: LogFormat = "plain"

    def __post_init__(self) -> None:
        self._one_of("level", LogLevel)
        self._one_of("format", LogFormat)


class Config(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """The whole tree. `Config()` has the defaults; change parts with `msgspec.structs.replace`.

    Raises `ConfigError` if prefill and decode groups cannot exchange KV.
    """

    model: ModelConfig = ModelConfig()
    prefill: PrefillConfig = PrefillConfig()
    decode: DecodeConfig = DecodeConfig()
    colocated: ColocatedConfig = ColocatedConfig()
    transfer: TransferConfig = TransferConfig()
    transport: TransportConfig = TransportConfig()
    control: ControlConfig = ControlConfig()
    cluster: ClusterConfig = ClusterConfig()
    router: RouterConfig = RouterConfig()
    api: ApiConfig = ApiConfig()
    metrics: MetricsConfig = MetricsConfig()
    log: LogConfig = LogConfig()

    def __post_init__(self) -> None:
        if self.cluster.mode == "colocated":
            return
        sent, stored = self.kv_dtype_of(self.prefill), self.kv_dtype_of(self.decode)
        if sent != stored and sent != "auto":
            raise ConfigError(
                f"prefill groups would store KV in {sent}, decode groups in {stored}: the sender can quantize KV, "
                "but not convert quantized KV. Set decode.kv_dtype only, or model.kv_dtype for both"
            )

    def kv_dtype_of(self, group: GroupConfig) -> KVDTypeName:
        """Returns the type of a group's stored KV; see `ModelConfig.kv_dtype`."""
        return self.model.kv_dtype if group.kv_dtype == "model" else group.kv_dtype

    @property
    def kinds(self) -> dict[Role, GroupConfig]:
        """Roles that `cluster.mode` runs, each with its section."""
        if self.cluster.mode == "colocated":
            return {"colocated": self.colocated}
        return {"prefill": self.prefill, "decode": self.decode}
