"""The sections `prefill`, `decode` and `colocated`: groups of ranks, each with the settings of its role."""

from __future__ import annotations

from typing import ClassVar, Literal, Self

import msgspec

from disagg.core.config.section import FieldError, Section

CPU_POOL_TOKENS = 16384
"""Default size of the KV pool on a CPU."""
CPU_CONTEXT_TOKENS = 4096
"""Default limit of prompt plus answer on a CPU, in tokens."""
CPU_REQUESTS = 32
"""Automatic `max_requests` on a CPU."""
GPU_REQUESTS = 256
"""Largest automatic `max_requests` on a GPU."""

Role = Literal["prefill", "decode", "colocated"]
"""Roles of groups; each has a section of the same name."""
Device = Literal["auto", "cpu", "cuda"]
GroupKVDTypeName = Literal["model", "auto", "int8", "float8_e4m3fn", "float8_e5m2"]
Preemption = Literal["auto", "recompute", "swap"]
EvictionName = Literal["lru", "lfu", "fifo"]
HostWriteName = Literal["through", "second_hit", "back"]
PrefetchName = Literal["best_effort", "timeout", "wait"]

STORAGE_SCHEMES = ("redis", "rediss", "unix")
"""Schemes of URLs of a storage on a server; all other storages are folders."""
LEAST_STORAGE_BYTES = 1 << 20


class GroupConfig(Section, frozen=True):
    """Settings that every role has. Code for all roles takes this type. A group of ranks holds one copy of the
    model."""

    role: ClassVar[Role]
    """Role of the groups, and name of the section."""
    groups: int = 1
    """Number of groups."""
    tp: int | None = None
    """Tensor-parallel size: ranks per group. None: chosen by placement from the available GPUs."""
    page_size: int = 16
    """Tokens in one KV page."""
    kv_dtype: GroupKVDTypeName = "model"
    """Type of stored KV. model: `model.kv_dtype`. With 8 bits in decode groups and the model's type in prefill
    groups, the sender quantizes KV, which halves the transferred bytes."""
    pool_tokens: int = 0
    """Size of the KV pool in tokens, a multiple of `page_size`. 0: set by `mem_fraction`; on a CPU the larger of
    16384 and `max_context_tokens`."""
    mem_fraction: float = 0.88
    """Fraction of a GPU's memory for weights, steps, transfer buffers and KV pool. Ranks on the same GPU share it.
    Unused if `pool_tokens` is set."""
    max_requests: int = 0
    """Largest number of requests that hold KV pages; in a decode group each answer and each beam counts as a request.
    With recurrent layers, memory for the states of all these requests is allocated at the start. 0: 32 on a CPU; 256
    on a GPU, or as many as have room for their states in a quarter of the memory that the weights leave."""
    max_context_tokens: int = 0
    """Largest sum of prompt and answer. 0: the model's context (on a CPU at most 4096), or the pool's size if
    smaller."""
    device: Device = "auto"
    """Kind of device of the ranks. auto: the GPUs, which ranks share if there are too few; without a GPU, the CPU."""
    chunk_tokens: int = 0
    """Prompt tokens of one prefill step (chunked prefill). In a decode group: tokens recomputed per step after a
    preemption. In a colocated group: tokens of prompts and answers per step. 0: 2048 on a GPU, 256 on a CPU."""
    graphs: bool = True
    """Whether to record decode steps and short prefill steps as CUDA graphs, if the model supports it."""
    prefix_cache: bool = True
    """Whether to keep KV in unused pages for later requests with the same prefix. Prefill groups cache prompts;
    decode and colocated groups cache prompts and answers. A hit saves computation; in a decode group a hit saves
    transfer. With recurrent layers a hit ends at a cached state."""
    state_interval_tokens: int = 1024
    """Distance between two positions of a prompt at which the recurrent state is cached. The state at the prompt's
    end is cached too. States of an answer are cached at an eighth of this distance."""
    cached_states: int | None = None
    """Number of recurrent states that a group with `prefix_cache` caches. They take at most a tenth of a GPU's
    memory. In a decode group they serve the recomputation of preempted requests. None: four times `max_requests` on a
    GPU, two times `max_requests` on a CPU; in a decode group an eighth of `max_requests`."""
    host_cache_bytes: int | None = None
    """Host memory of each rank for a second tier of the prefix cache, pinned at the start as long as an eighth of the
    host's memory is available: cached KV is also copied there, and loaded again after its eviction from the GPU. 0:
    no second tier. None: a quarter of the host's available memory, divided by the number of ranks on the host and
    less `swap_bytes`, at most four times the pool, and none if that is less than a quarter of the pool. On a CPU no
    second tier, unless `storage` or `host_cache_shared` is set."""
    host_cache_write: HostWriteName = "through"
    """KV that is copied to the second tier. through: all cached KV. second_hit: only prefixes that a second request
    has used, so that a prompt used once costs no copies. back: only KV that is evicted from the pool; a new request
    then waits for the copy."""
    host_cache_shared: bool = False
    """Whether groups of the same model read each other's second tier, over the data plane, as a third tier of their
    prefix cache. Only groups with this setting serve their pages and read those of others. With `storage` too, a page
    that no group has in memory is read from the storage. Needs a second tier, and a model with KV."""
    storage: str = ""
    """Third tier of the prefix cache, behind host memory: a folder, or the URL of a Redis server
    (`redis://HOST:PORT/DB`, `rediss://` for TLS, `unix:///PATH`). Groups of the same model share the stored pages,
    also after a restart. Needs a second tier, and a model with KV. Empty: no third tier."""
    storage_bytes: int = 64 << 30
    """Largest total size of the files that each rank writes to a `storage` folder. A Redis server has its own
    limit."""
    prefetch: PrefetchName = "timeout"
    """Whether a queued prompt waits while its KV is read from `storage` into host memory. best_effort: no; the prompt
    uses the pages that have been read by the time it is scheduled. wait: until all pages are read. timeout: as wait,
    with a time limit; in prefill and colocated groups as best_effort while reading is measured to take longer than
    computing, except for short trials."""
    prefetch_base_s: float = 0.2
    """Constant part of the time limit of `prefetch = "timeout"`. The search and the reading have a separate limit
    each."""
    prefetch_s_per_1k_tokens: float = 0.1
    """Increase of the time limit of `prefetch = "timeout"` for each 1024 tokens of the prefix. A recurrent state
    counts as the tokens whose KV has as many bytes."""
    prefetch_min_tokens: int = 256
    """Smallest number of tokens of a prompt, beyond those cached in memory, for which `storage` is searched."""
    async_steps: bool | None = None
    """Whether to launch a step before the host has read the tokens of the previous one, so that the GPU does not wait
    for the host. None: on a GPU only. On a CPU the launch of a step computes the whole step, so this option would
    only delay its tokens by one step. In a colocated group with this option, an answer with penalties waits for its
    step, and gets a token in every second step beside other answers. The option has no effect on colocated groups of
    models with recurrent layers."""
    eviction: EvictionName = "lru"
    """Eviction policy of the prefix cache. lru: least recently used. lfu: least frequently used. fifo: oldest."""

    def __post_init__(self) -> None:
        self._at_least(1, "tp", "page_size", "groups", "state_interval_tokens")
        self._at_least(0, "pool_tokens", "max_requests", "max_context_tokens", "chunk_tokens")
        self._at_least(0, "host_cache_bytes", "cached_states")
        self._one_of("device", Device)
        self._one_of("kv_dtype", GroupKVDTypeName)
        self._one_of("eviction", EvictionName)
        self._one_of("host_cache_write", HostWriteName)
        self._check_storage()
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

    def _check_storage(self) -> None:
        self._one_of("prefetch", PrefetchName)
        self._at_least(LEAST_STORAGE_BYTES, "storage_bytes")
        self._at_least(0, "prefetch_base_s", "prefetch_s_per_1k_tokens", "prefetch_min_tokens")
        if self.host_cache_shared and (not self.prefix_cache or self.host_cache_bytes == 0):
            raise FieldError(
                "host_cache_shared", True, "false without prefix_cache, or with host_cache_bytes = 0"
            )
        if not self.storage:
            return
        scheme, separator, _ = self.storage.partition("://")
        schemes = ", ".join(f"{one}://" for one in STORAGE_SCHEMES)
        if separator and scheme not in STORAGE_SCHEMES:  # the rest of the URL may contain a password
            raise FieldError("storage", f"{scheme}://...", f"a folder, or a URL that begins with {schemes}")
        if not self.prefix_cache or self.host_cache_bytes == 0:
            shown = f"{scheme}://..." if separator else self.storage
            raise FieldError("storage", shown, "empty without prefix_cache, or with host_cache_bytes = 0")

    @property
    def ranks(self) -> int:
        """Number of ranks in a group. Raises `FieldError` before placement has chosen `tp`."""
        if self.tp is None:
            raise FieldError("tp", None, "chosen before a group starts")
        return self.tp

    @property
    def decode_batch(self) -> int:
        """Largest number of answers in one step, valid after `sized`; 0 in a role that does not decode."""
        return 0

    def steps_ahead(self, device: str) -> int:
        """Returns the number of steps planned before the host has read the running step's tokens: 0 or 1.

        `device`: `cpu` or `cuda`.
        """
        return int(device == "cuda" if self.async_steps is None else self.async_steps)

    def sized(self, device: str, *, requests: bool = True) -> Self:
        """Returns the section with its automatic sizes chosen for `device`, `cpu` or `cuda`.

        On a GPU `max_context_tokens` may stay 0: each rank takes the limit from its model and its measured pool.
        Without `requests`, an automatic `max_requests` stays 0 on a GPU too: ranks choose it (`with_requests`).
        """
        gpu = device == "cuda"
        cpu_context_tokens = min(CPU_CONTEXT_TOKENS, self.pool_tokens or CPU_CONTEXT_TOKENS)
        return msgspec.structs.replace(
            self,
            max_requests=self.max_requests or (GPU_REQUESTS * requests if gpu else CPU_REQUESTS),
            chunk_tokens=self.chunk_tokens or (2048 if gpu else 256),
            max_context_tokens=self.max_context_tokens or (0 if gpu else cpu_context_tokens),
        )

    def with_requests(self, count: int) -> Self:
        """Returns the section with `count` as `max_requests`, if this is automatic."""
        return msgspec.structs.replace(self, max_requests=self.max_requests or count)

    def context_limit(self, model_tokens: int) -> int:
        """Returns the longest prompt plus answer for a model with a context of `model_tokens`."""
        return min(model_tokens, self.max_context_tokens or self.pool_tokens or model_tokens)

    @property
    def initial_pool_tokens(self) -> int:
        """Size of the pool on a CPU, or on a GPU before its memory is measured.

        The size is `pool_tokens` if set. Otherwise it is the larger of `CPU_POOL_TOKENS` and `max_context_tokens`,
        rounded up to whole pages.
        """
        least = max(CPU_POOL_TOKENS, self.max_context_tokens)
        return self.pool_tokens or -(-least // self.page_size) * self.page_size


class PrefillConfig(GroupConfig, frozen=True):
    """Settings of prefill groups, which compute prompts."""

    role = "prefill"


class BatchingConfig(GroupConfig, frozen=True):
    """Settings that decode and colocated groups have in addition."""

    max_batch: int = 0
    """Largest decode batch; each answer and each beam counts. 0: `max_requests`."""
    max_waiting: int = 1024
    """Largest number of requests, from all routers, that wait in a group for a row and pages; further requests are
    refused."""

    def __post_init__(self) -> None:
        super().__post_init__()
        self._at_least(0, "max_batch", "max_waiting")

    @property
    def decode_batch(self) -> int:
        """Largest number of answers in one step: `max_batch`, but at most `max_requests`. Valid after `sized`."""
        return min(self.max_batch or self.max_requests, self.max_requests)

    def sized(self, device: str, *, requests: bool = True) -> Self:
        """Resolves `max_batch` too; see `GroupConfig.sized`."""
        found = super().sized(device, requests=requests)
        return msgspec.structs.replace(found, max_batch=self.max_batch or found.max_requests)

    def with_requests(self, count: int) -> Self:
        """Resolves `max_batch` too; see `GroupConfig.with_requests`."""
        found = super().with_requests(count)
        return msgspec.structs.replace(found, max_batch=self.max_batch or found.max_requests)


class DecodeConfig(BatchingConfig, frozen=True):
    """Settings of decode groups, which receive the KV of prompts and compute answers."""

    role = "decode"
    prefetch: PrefetchName = "best_effort"
    """As `prefetch` of the other groups. The default differs, because the prefill group usually sends KV faster than
    a storage can be read."""
    preemption: Preemption = "auto"
    """Preemption of requests. recompute: compute the KV again. swap: copy the KV to host memory, or recompute if the
    host memory is full. auto: the faster of both, by an estimate for each request."""
    swap_bytes: int | None = None
    """Pinned host memory of each rank for swapping, pinned on demand; 0 for none. None: on a GPU 4 GiB, at most 1/16
    of the host's memory; 0 on a CPU."""
    watermark: float = 0.01
    """Fraction of a group's pages that admission keeps free for running requests."""
    local_prefill_tokens: int | None = None
    """Tokens of a step in which the group also computes prompts, one of each running answer included; at least 48
    tokens of prompts. Routers send the group whole requests while the prefill groups are busy
    (`router.local_prefill_queue_tokens`) or down. 0: prefill groups compute all prompts. At most `chunk_tokens`.
    None: 128 on a GPU; 0 on a CPU, for models with recurrent layers, with a `kv_dtype` of the group's own, and with
    `model.deterministic` if `prefill.tp` differs from `tp`."""

    def __post_init__(self) -> None:
        super().__post_init__()
        self._one_of("preemption", Preemption)
        self._at_least(0, "swap_bytes", "local_prefill_tokens")
        self._needs(0 <= self.watermark < 1, "watermark", "at least 0 and less than 1")


class ColocatedConfig(BatchingConfig, frozen=True):
    """Settings of colocated groups, which compute prompts and answers in the same steps."""

    role = "colocated"
