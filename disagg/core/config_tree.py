"""The one configuration tree: frozen, validated, passed as an argument and never looked up globally.

Every value is checked in its section's `__post_init__`, so a section made by hand in a test is as safe as one
that was loaded from a file. `disagg.core.config` reads the sources and is the module to import from.
"""

from __future__ import annotations

from typing import Literal

import msgspec

from disagg.core.config_api import ApiConfig
from disagg.core.config_section import FieldError, Section
from disagg.core.errors import ConfigError
from disagg.core.types import CHECKSUM_BYTES

MIB = 1 << 20
CPU_POOL_TOKENS = 16384
"""What a KV pool holds on a CPU, where nothing else is said."""

Role = Literal["prefill", "decode", "colocated"]
"""The kinds of group; each has a section of its name."""
Mode = Literal["split", "colocated"]
Device = Literal["auto", "cpu", "cuda"]
CollectiveName = Literal["auto", "shared", "nccl"]
DTypeName = Literal["auto", "float32", "bfloat16", "float16"]
AttentionName = Literal["auto", "torch", "triton"]
KVDTypeName = Literal["auto", "int8", "float8_e4m3fn", "float8_e5m2"]
GroupKVDTypeName = Literal["model", "auto", "int8", "float8_e4m3fn", "float8_e5m2"]
MAX_TLS_LANES = 16
TransportName = Literal["auto", "ucx", "tls", "inproc"]
Preemption = Literal["auto", "recompute", "swap"]
PolicyName = Literal["prefix_aware", "least_loaded", "round_robin"]
EvictionName = Literal["lru", "lfu", "fifo"]
Calibrate = Literal["auto", "always", "off"]
LogLevel = Literal["debug", "info", "warning", "error"]
LogFormat = Literal["plain", "json"]


class ModelConfig(Section, frozen=True):
    """Which model: `path` or `random_init`, not both; neither is an error only where a model is loaded."""

    path: str | None = None
    """Folder of a Hugging Face checkpoint."""
    random_init: str | None = None
    """Name of a small architecture to fill with random weights: for demos and tests without a checkpoint."""
    dtype: DTypeName = "auto"
    seed: int = 0
    """Seed of the random weights; prefill and decode groups must use the same."""
    attention: AttentionName = "auto"
    """Who does attention. auto: the Triton kernels on a GPU, for models that they can do, else torch."""
    kv_dtype: KVDTypeName = "auto"
    """How KV is stored and moved. auto: in the model's own type; else in 8 bits, with a scale for each head of each
    token: half of the memory and of the wire, and answers that differ a little."""
    fused: bool = True
    """On a GPU: norms, rotary embeddings and gated MLPs in Triton kernels, where those agree with the model."""
    deterministic: bool = False
    """A request's logits are the same bits whatever else is in the batch, on any group: fixed tiles and split sizes,
    sums in one order. Slower by some per cent. All groups that are linked must have it the same."""

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


class GroupConfig(Section, frozen=True):
    """Engines of one kind: groups of ranks that each hold one copy of the model."""

    groups: int = 1
    """How many of them."""
    tp: int | None = None
    """Tensor-parallel size: number of ranks. None lets the placement choose from what the machine has."""
    page_size: int = 16
    """Tokens in one KV page."""
    kv_dtype: GroupKVDTypeName = "model"
    """How these groups store KV. model: as `model.kv_dtype` says. Decode groups may have 8 bits where prefill groups
    have the model's own type: then KV is quantized where it is sent, and half of the bytes cross the wire."""
    pool_tokens: int = 0
    """Tokens the KV pool holds; a multiple of `page_size`. 0: what
    `mem_fraction` leaves; on a CPU, `CPU_POOL_TOKENS`."""
    mem_fraction: float = 0.88
    """Of a GPU's memory, what weights, steps, transfer buffers and KV pool may take together. Ranks that share a GPU
    share it too. Not looked at where `pool_tokens` is set."""
    max_requests: int = 32
    """Requests with pages at one time; in a decode group each of several answers, and each beam, counts."""
    max_context_tokens: int = 4096
    """Longest prompt plus answer."""
    device: Device = "auto"
    chunk_tokens: int = 256
    """Prompt tokens that one prefill step computes; in a decode group, tokens that one step computes again after a
    preemption; in a colocated group, tokens of prompts and answers together."""
    max_batch: int = 32
    """Requests that one step decodes; each of several answers, and each beam, counts."""
    graphs: bool = True
    """Record decode steps and short prefill steps as CUDA graphs, where the model allows it."""
    prefix_cache: bool = True
    """Whether a prefill group keeps the KV of prompts, and a decode group that of prompts and answers, for others
    that begin alike, in pages that nothing else needs: the one does not compute it again, the other is not sent it.
    A colocated group does as both. Not for models with recurrent layers."""
    eviction: EvictionName = "lru"
    """What goes first when the pages are needed: longest unused, least often used, oldest."""
    collective: CollectiveName = "auto"
    preemption: Preemption = "auto"
    """What becomes of the KV of a request whose pages others need (decode): computed again, or copied to host memory
    and back (computed again where that is full). auto: whichever takes less time."""
    swap_bytes: int | None = None
    """Pinned host memory of each decode rank for that; 0 for none. None: on a GPU 4 GiB, at most 1/16 of the host's
    memory; none on a CPU. Taken when it is first needed, piece by piece."""
    watermark: float = 0.01
    """Share of a decode group's pages that new requests leave free for the answers of those that run."""

    def __post_init__(self) -> None:
        if self.tp is not None:
            self._at_least(1, "tp")
        self._at_least(1, "page_size", "max_requests", "max_context_tokens")
        self._at_least(0, "pool_tokens")
        self._at_least(1, "chunk_tokens", "max_batch", "groups")
        self._one_of("device", Device)
        self._one_of("kv_dtype", GroupKVDTypeName)
        self._one_of("collective", CollectiveName)
        self._one_of("preemption", Preemption)
        if self.swap_bytes is not None:
            self._at_least(0, "swap_bytes")
        self._needs(0 <= self.watermark < 1, "watermark", "at least 0 and less than 1")
        self._one_of("eviction", EvictionName)
        self._needs(
            self.pool_tokens % self.page_size == 0,
            "pool_tokens",
            f"a multiple of page_size ({self.page_size})",
        )
        self._needs(0 < self.mem_fraction <= 1, "mem_fraction", "more than 0 and at most 1")
        self._needs(
            self.max_context_tokens <= self.pool_tokens or self.pool_tokens == 0,
            "max_context_tokens",
            f"at most pool_tokens ({self.pool_tokens})",
        )
        self._needs(
            not (self.device == "cpu" and self.collective == "nccl"),
            "collective",
            "auto or shared on device cpu (nccl needs GPUs)",
        )

    @property
    def ranks(self) -> int:
        """Number of ranks, once it is chosen."""
        if self.tp is None:
            raise FieldError("tp", None, "chosen before a group starts")
        return self.tp

    @property
    def initial_pool_tokens(self) -> int:
        """`pool_tokens` as set; else of a CPU, and of a GPU until its memory is measured: whole pages of at least
        `CPU_POOL_TOKENS` and one longest request."""
        least = max(CPU_POOL_TOKENS, self.max_context_tokens)
        return self.pool_tokens or -(-least // self.page_size) * self.page_size


class TransferConfig(Section, frozen=True):
    """How KV crosses from prefill to decode ranks."""

    ring_bytes: int = 0
    """Receive ring of each decode rank; 0 chooses by the device, see `sized`."""
    staging_bytes: int = 0
    """Send staging buffer of each prefill rank; 0 chooses by the device, see `sized`."""
    layer_groups: int = 4
    """Most groups that a model's layers are sent in: a group leaves while the next one computes."""
    calibrate: Calibrate = "auto"
    """Whether each prefill rank times its wire when the groups are joined, for what is not set of
    `segment_overhead_s`, `wire_bytes_per_s`, `max_segment_bytes`. auto: on a GPU, and only where the cache
    (`disagg.node.wire_cache`) does not know this pair of ranks; always: at every start, on a CPU too; off: never."""
    segment_overhead_s: float | None = None
    """What one more segment costs; chunks are sent in fewer groups for its sake (`staging.planner.group_count`).
    None: measured; where it is not, 100 us on a GPU (found on NVLink, with both copies), 0 on a CPU."""
    wire_bytes_per_s: float = 0.0
    """What the wire carries between two ranks, for the same choice. 0: measured; else 350e9 (NVLink 4)."""
    lease_timeout_s: float = 30.0
    """A ring lease not granted or not written by then ends its request, and is taken back once no write can land."""
    watermark_interval_s: float = 0.25
    """Watermarks are sent again this often, also when nothing changed."""
    max_segment_bytes: int = 0
    """Largest unit of transfer; 0: what the measured wire needs, at most `segment_limit_bytes`' default."""
    checksum: bool = True
    """Whether each segment carries a 64-bit checksum of its bytes. The decode rank compares it with what it copied
    from its ring, or with its pages where they were written directly, before the prompt counts as landed. A damaged
    segment is sent once more; a second mismatch fails the request. All groups must have it alike."""
    spin_s: float = 0.005
    """A rank on a GPU polls for so long after the last traffic before it sleeps: to be woken takes up to 1 ms."""
    drain_timeout_s: float = 10.0
    """How long a shutdown waits for transfers under way before it aborts them."""

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
        self._at_least(0.001, "watermark_interval_s")  # more often, the transfer thread does nothing else
        smaller = min((n for n in (self.ring_bytes, self.staging_bytes) if n), default=0)  # 0: not chosen yet
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
        """With the choices made that depend on the device: its memory, or 0 on a CPU.

        A ring and a staging buffer take 1/128 of a GPU's memory, from 64 MiB to 1 GiB; 32 MiB on a CPU.
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

    @property
    def segment_limit_bytes(self) -> int:
        """The largest segment to plan: `max_segment_bytes`, or a quarter of the ring, and never more than a
        quarter of the staging buffer, so that four segments, with their checksums, can be under way at once."""
        quarter = min(self.ring_bytes, self.staging_bytes) // 4
        return self.max_segment_bytes or (quarter - CHECKSUM_BYTES if self.checksum else quarter)


class TransportConfig(Section, frozen=True):
    """The data path's backend."""

    backend: TransportName = "auto"
    """auto: UCX over shared memory on one host (a loopback `control.host`). Between hosts: UCX over RDMA, else UCX
    over TCP on a trusted network, else tls. ucx: the same without tls. tls: always TLS over TCP."""
    tls_lanes: int = 0
    """Connections to each peer over which the TLS transport spreads a large message; each takes a core while it
    sends. 0: half of the process's cores, from 1 to 4."""
    trusted_network: bool = False
    """Allows UCX over TCP between hosts. UCX's TCP is neither authenticated nor encrypted: a machine that reaches
    its port can read and write the memory of the rank."""
    peer_memory: bool = True
    """Prefill ranks write straight into a decode rank's pool where they can open it; else, always through staging."""

    def __post_init__(self) -> None:
        self._one_of("backend", TransportName)
        self._needs(0 <= self.tls_lanes <= MAX_TLS_LANES, "tls_lanes", f"from 0 to {MAX_TLS_LANES}")


class ControlConfig(Section, frozen=True):
    """The control channel (ZMQ)."""

    host: str = "127.0.0.1"
    """Address to listen on and to be reached at; `auto`: each process takes its own host's."""
    router_port: int = 0
    """Port on which a router listens; 0 takes a free one, as ranks always do."""
    directory_port: int = 5570
    """Port on which `disagg launch` tells routers of its groups; 0 takes a free one."""
    key_file: str | None = None
    """CURVE keys (`disagg keys`), read again when the file changes; None makes fresh ones for each run."""
    peer_timeout_s: float = 10.0
    """A peer silent for so long is taken for lost."""
    heartbeat_s: float = 1.0
    max_message_bytes: int = 16 * MIB
    """A request that needs a larger control message ends with an error. What groups tell of themselves is less than
    the least that may be set; what grows with a prompt are its tokens and pages."""

    def __post_init__(self) -> None:
        self._needs(bool(self.host), "host", "an address or a host name")
        self._positive("peer_timeout_s")
        self._at_least(0.01, "heartbeat_s")  # more often, peers do nothing but ask each other
        for port in ("router_port", "directory_port"):
            self._needs(0 <= getattr(self, port) < 1 << 16, port, "from 0 to 65535")
        self._needs(
            MIB <= self.max_message_bytes <= 16 * MIB, "max_message_bytes", f"from {MIB} to {16 * MIB}"
        )
        self._needs(
            self.heartbeat_s * 2 <= self.peer_timeout_s,
            "heartbeat_s",
            f"at most half of peer_timeout_s ({self.peer_timeout_s:g}), so that one lost beat is forgiven",
        )


class ClusterConfig(Section, frozen=True):
    """Where groups are placed, and what happens when one dies. `demo` and `generate` never place one again."""

    mode: Mode = "split"
    """split: prefill and decode groups; colocated: groups that do both, as a baseline to measure against."""
    ray: str = "local"
    """`local`: a Ray of our own on this machine; `auto` or `host:port`: a cluster that runs already."""
    restart: bool = True
    """Whether `launch` and `serve` place a new group where one has died."""
    restart_backoff_s: float = 1.0
    """Pause before that; twice as long after each try that failed, up to a minute."""
    restart_tries: int = 5
    """After so many in a row that failed, the group is given up."""

    def __post_init__(self) -> None:
        self._one_of("mode", Mode)
        self._needs(bool(self.ray), "ray", "local, auto or the address of a Ray cluster")
        self._at_least(0, "restart_backoff_s")
        self._at_least(1, "restart_tries")


class RouterConfig(Section, frozen=True):
    """One request's way through the pair of engines."""

    policy: PolicyName = "prefix_aware"
    """How a request's groups are chosen where there are several of a kind: by what is before it and what of its
    beginning they have cached, a session's decode group by the session; by load alone; each in turn. Routers hear of
    caches each `metrics.interval_s`, or never."""
    request_timeout_s: float = 120.0
    reserve_retry_s: float = 0.05
    """Pause before a busy decode group is asked again."""

    def __post_init__(self) -> None:
        self._one_of("policy", PolicyName)
        self._positive("request_timeout_s", "reserve_retry_s")


class MetricsConfig(Section, frozen=True):
    """What ranks, groups and routers tell of themselves."""

    interval_s: float = 1.0
    """Ranks tell their leader, leaders the routers, this often; 0: nobody tells, and `/metrics` has no groups."""
    otlp_endpoint: str | None = None
    """Where `serve` sends a span for each request (OpenTelemetry, OTLP over HTTP), such as http://localhost:4318."""

    def __post_init__(self) -> None:
        # More often, telling is all that ranks and leaders do.
        self._needs(
            self.interval_s == 0 or 0.01 <= self.interval_s <= 3600, "interval_s", "0, or from 0.01 to 3600"
        )
        http = self.otlp_endpoint is None or self.otlp_endpoint.startswith(("http://", "https://"))
        self._needs(http, "otlp_endpoint", "a URL that begins with http:// or https://")


class LogConfig(Section, frozen=True):
    """What is logged, and how."""

    level: LogLevel = "info"
    format: LogFormat = "plain"

    def __post_init__(self) -> None:
        self._one_of("level", LogLevel)
        self._one_of("format", LogFormat)


class Config(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """The whole tree. `Config()` is the set of defaults; change parts with `msgspec.structs.replace`.

    Raises `ConfigError` for kinds of group between which KV could not move.
    """

    model: ModelConfig = ModelConfig()
    prefill: GroupConfig = GroupConfig()
    decode: GroupConfig = GroupConfig()
    colocated: GroupConfig = GroupConfig()
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
                f"prefill groups would store KV in {sent}, decode groups in {stored}: KV can be quantized where it "
                "is sent, and not turned back or into other codes. Set decode.kv_dtype alone, or model.kv_dtype for "
                "both"
            )

    def kv_dtype_of(self, group: GroupConfig) -> KVDTypeName:
        """How a group stores KV; see `ModelConfig.kv_dtype`."""
        return self.model.kv_dtype if group.kv_dtype == "model" else group.kv_dtype

    @property
    def kinds(self) -> dict[Role, GroupConfig]:
        """The kinds of group that `cluster.mode` runs, each with its section."""
        if self.cluster.mode == "colocated":
            return {"colocated": self.colocated}
        return {"prefill": self.prefill, "decode": self.decode}
