"""Measures the tiers of the prefix cache with colocated ranks in this process, and checks every answer."""

from __future__ import annotations

import asyncio
import mmap
import os
import shutil
import sys
import tempfile
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

import msgspec

from disagg.bench.common.ceilings import size_text
from disagg.bench.common.measure import host_copy_rate
from disagg.bench.common.report import Label, Measurement
from disagg.bench.storage.plain import plain_files
from disagg.bench.tiers.engine import EnginePlace, tiers_engine, whole_pages
from disagg.bench.tiers.options import HIT_PREFIXES, POOL_PREFIXES, TiersOptions
from disagg.bench.tiers.others import (
    HitPlace,
    OtherSizes,
    OthersRun,
    OthersRuns,
)
from disagg.bench.tiers.peer import PeerRun, page_endpoint, plain_transfer
from disagg.bench.tiers.ttft import PLACES, TtftRun, TtftSizes
from disagg.bench.tiers.turns import TurnSizes, TurnsRun, converse
from disagg.core.config.groups import Device
from disagg.core.config.read import ClusterConfig, ColocatedConfig, TransportConfig
from disagg.core.errors import ConfigError, InvariantError
from disagg.core.threads import SWITCH_INTERVAL_S
from disagg.kv.host_pool import block_bytes
from disagg.model.collective.base import SingleCollective
from disagg.model.runner import ModelRunner
from disagg.node.rank_start import RankModel, begin_model, load_runner
from transport.control.inproc import InprocHub
from transport.hosts import LOOPBACK
from transport.reach import choose

ReportProgress = Callable[[str], None]
HOST_PREFIXES = 8
STORED_PREFIXES = 40
"""Sizes of host memory and storage of the TTFT run, in prefixes."""
SPARE_DOCUMENTS = 2
"""Beginnings beyond those that the pool has room for: the next one of them has left the pool as a whole."""
WORKING_SET = 5
"""Tokens of all conversations, divided by the tokens of the pool."""
_READ_BYTES = 256 << 10
_READ_THREADS = 4
_HEADER_BYTES = 80
_STORAGE_ROOM = 2
"""Size of the storage, divided by the size of the records that it must hold: whole segments are evicted."""
_LEAST_STORAGE_BYTES = 64 << 20


@dataclass(frozen=True)
class TiersMeasurements:
    """Figures of a run."""

    ttft_s: dict[str, list[float]]
    """TTFTs by place: `device`, `host`, `peer`, `storage` or `nowhere`. All figures lack those of other parts."""
    plain: dict[str, Measurement]
    """Rates in GB/s by place: of a plain copy from host memory to the device (`host`), of a plain transfer between
    two processes (`peer`), and of plain reads of a file (`storage`)."""
    nbytes: int
    """Bytes of the KV of a cached beginning."""
    runs: dict[str, TurnsRun]
    """Runs of the workload by their tiers."""
    others: dict[HitPlace, list[OthersRun]]
    """Rounds of running answers by the place of the hits beside them."""
    labels: dict[str, Label]


def measure(options: TiersOptions, report_progress: ReportProgress) -> TiersMeasurements:
    """Runs all measurements. Raises `InvariantError` for wrong tokens, and for hits in another tier than expected."""
    try:
        folder = Path(tempfile.mkdtemp(prefix="disagg-bench-", dir=options.folder))
    except OSError as exc:
        raise ConfigError(f"--folder {options.folder}: no folder can be made there: {exc.strerror}") from exc
    switch_interval_s = sys.getswitchinterval()
    try:
        sys.setswitchinterval(SWITCH_INTERVAL_S)  # as in the process of a rank
        return asyncio.run(_TiersRun(options, folder, report_progress).measure())
    finally:
        sys.setswitchinterval(switch_interval_s)
        shutil.rmtree(folder)


class _TiersRun:
    """The measurements of one run, which share the model."""

    def __init__(self, options: TiersOptions, folder: Path, report_progress: ReportProgress) -> None:
        self._options, self._folder, self._progress = options, folder, report_progress
        report_progress("loading the model")
        self._group = _group(options)
        self._config = msgspec.structs.replace(
            options.config,
            colocated=self._group,
            cluster=ClusterConfig(mode="colocated"),
            transport=TransportConfig(backend="inproc", peer_memory=False),
        )
        self._model: RankModel = begin_model(self._config, self._group)
        self._runner: ModelRunner = load_runner(self._model, SingleCollective(), 0, "colocated")[0]
        self._spec = self._runner.spec
        if self._spec.has_state:  # hits end at a state, so no prefix is in a tier as a whole
            raise ConfigError(
                f"{self._spec.architecture} has recurrent layers, whose hits this benchmark cannot place in a tier: "
                f"choose another model with --model or --random-init"
            )
        if options.longest_tokens > self._spec.context_tokens:
            raise ConfigError(
                f"the model has a context of {self._spec.context_tokens} tokens, the run needs "
                f"{options.longest_tokens}: lower --tokens, --turns or --turn-tokens"
            )
        prefix_tokens = self._group.pool_tokens // POOL_PREFIXES
        self._ttft_group = self._with_tiers(
            HOST_PREFIXES * prefix_tokens,
            STORED_PREFIXES * prefix_tokens,
            "ttft" if "storage" in options.parts else "",
        )
        self._peer_group = msgspec.structs.replace(
            self._with_tiers(HOST_PREFIXES * prefix_tokens, 0, ""), host_cache_shared=True
        )
        self._documents = self._group.pool_tokens // options.tokens + SPARE_DOCUMENTS
        self._others_group = self._with_tiers(
            (self._documents + HIT_PREFIXES) * prefix_tokens + 2 * options.others_room(self._group.page_size),
            0,
            "",
        )
        self._choice = choose(TransportConfig(backend=options.transport), LOOPBACK)
        self._conversations = -(-WORKING_SET * self._group.pool_tokens // options.history_tokens)
        self._turns_groups = self._groups_by_tiers()
        self._check_disk()

    async def measure(self) -> TiersMeasurements:
        """See `measure`."""
        options = self._options
        nbytes = options.tokens * self._spec.layout.token_bytes
        ttft_s: dict[str, list[float]] = {}
        plain: dict[str, Measurement] = {}
        if {"hits", "storage"} & set(options.parts):
            ttft_s |= await self._hits()
            self._progress("plain copies")
            plain["host"] = host_copy_rate(self._model.device, nbytes, options.repeats, out=False)
            if "storage" in options.parts:
                plain["storage"] = _read_rate(self._folder, nbytes, options.repeats)
        if "peer" in options.parts:
            ttft_s["peer"] = await self._peer(self._ttft_sizes)
            plain["peer"] = plain_transfer(self._choice, nbytes, options.repeats)
        runs = await self._turns() if "conversations" in options.parts else {}
        others = await self._others() if "others" in options.parts else {}
        return TiersMeasurements(ttft_s, plain, nbytes, runs, others, self._labels())

    @property
    def _ttft_sizes(self) -> TtftSizes:
        options = self._options
        return TtftSizes(
            options.tokens, options.new_tokens, options.answer_tokens, options.repeats, self._spec.vocab_size
        )

    async def _hits(self) -> dict[str, list[float]]:
        """Returns TTFTs of hits in each tier of the group, and of no hit."""
        group, stored = self._ttft_group, "storage" in self._options.parts
        sizes = self._ttft_sizes if stored else replace(self._ttft_sizes, places=PLACES[:-1])
        async with tiers_engine(self._config, group, self._model, self._runner) as engine:
            ttft = TtftRun(engine, sizes, self._progress)
            await ttft.run()
        if stored:
            shutil.rmtree(group.storage)  # the next storage needs its room on the disk
        return dict(ttft.ttft_s)

    async def _others(self) -> dict[HitPlace, list[OthersRun]]:
        """Returns rounds of running answers by the place of the hits beside them."""
        options = self._options
        sizes = OtherSizes(
            options.tokens,
            options.new_tokens,
            options.answer_tokens,
            options.others,
            options.other_tokens,
            self._documents,
            options.repeats,
            self._spec.vocab_size,
        )
        async with tiers_engine(self._config, self._others_group, self._model, self._runner) as engine:
            runs = OthersRuns(engine, sizes, self._progress)
            await runs.run()
        return dict(runs.runs)

    async def _peer(self, sizes: TtftSizes) -> list[float]:
        """Returns TTFTs of hits in the host memory of a second group, which has weights of its own."""
        self._progress("loading the model of another group")
        owner_runner = load_runner(self._model, SingleCollective(), 0, "colocated")[0]
        group = self._peer_group
        config = msgspec.structs.replace(self._config, colocated=group)
        endpoint, hub = page_endpoint(self._choice), InprocHub()
        reader_at = EnginePlace(hub, "colocated", endpoint())
        owner_at = EnginePlace(hub, "colocated-2", endpoint())
        async with (
            tiers_engine(config, group, self._model, self._runner, reader_at) as reader,
            tiers_engine(config, group, self._model, owner_runner, owner_at) as owner,
        ):
            run = PeerRun(reader, owner, sizes, self._progress)
            await run.run()
        return run.ttft_s

    async def _turns(self) -> dict[str, TurnsRun]:
        """Runs the workload with each of the groups.

        Raises `InvariantError` if a token differs between the runs.
        """
        options = self._options
        sizes = TurnSizes(
            self._conversations,
            options.turns,
            options.turn_tokens,
            options.answer_tokens,
            options.concurrency,
            self._spec.vocab_size,
        )
        runs: dict[str, TurnsRun] = {}
        for name, group in self._turns_groups.items():
            self._progress(f"{self._conversations} conversations, {name}")
            async with tiers_engine(self._config, group, self._model, self._runner) as engine:
                runs[name] = await converse(engine, sizes)
            if runs[name].transcripts != next(iter(runs.values())).transcripts:
                raise InvariantError(f"conversations with {name} have other tokens than without lower tiers")
        return runs

    def _groups_by_tiers(self) -> dict[str, ColocatedConfig]:
        """Returns groups without lower tiers, with host memory for all KV, and with less of it and a storage.

        Conversations wait for the storage as long as they do with the default settings.
        """
        pool_tokens = self._group.pool_tokens
        all_tokens = (
            self._conversations * (self._options.history_tokens + self._group.page_size) + pool_tokens
        )
        stored = self._with_tiers(2 * pool_tokens, all_tokens, "turns")
        return {
            "no lower tier": self._group,
            "host memory": self._with_tiers(all_tokens, 0, ""),
            "host memory and storage": msgspec.structs.replace(stored, prefetch=ColocatedConfig().prefetch),
        }

    def _check_disk(self) -> None:
        """Raises `ConfigError` if the folder has no room for the largest storage of the parts that run."""
        parts = self._options.parts
        groups = [
            self._ttft_group,
            *(self._turns_groups.values() if "conversations" in parts else []),
        ]
        needed_bytes = max((group.storage_bytes for group in groups if group.storage), default=0)
        free_bytes = shutil.disk_usage(self._folder).free
        if free_bytes < needed_bytes:
            raise ConfigError(
                f"{self._folder} has {size_text(free_bytes)} free, the run needs {size_text(needed_bytes)}: name "
                "another --folder, or lower --tokens, --turns, --turn-tokens or --concurrency"
            )

    def _with_tiers(self, host_tokens: int, stored_tokens: int, folder: str) -> ColocatedConfig:
        """Returns the group with host memory and storage of these sizes; without a storage if `folder` is empty."""
        layout, page = self._spec.layout, self._group.page_size
        host_bytes = whole_pages(host_tokens, page) // page * block_bytes(page * layout.token_bytes)
        group = msgspec.structs.replace(self._group, host_cache_bytes=host_bytes)
        if not folder:
            return group
        # A record of a head has a header, and is aligned.
        record_bytes = block_bytes(page * layout.token_bytes // layout.kv_heads + _HEADER_BYTES)
        stored_bytes = whole_pages(stored_tokens, page) // page * layout.kv_heads * record_bytes
        stored_bytes = max(_STORAGE_ROOM * stored_bytes, _LEAST_STORAGE_BYTES)
        path = self._folder / folder
        return msgspec.structs.replace(group, storage=str(path), storage_bytes=stored_bytes)

    def _labels(self) -> dict[str, Label]:
        options = self._options
        return {
            "model": self._model.source.name,
            "dtype": str(self._runner.pool.dtype).removeprefix("torch."),
            "deterministic": int(options.config.model.deterministic),
            "pool_tokens": self._group.pool_tokens,
            "tokens": options.tokens,
            "new_tokens": options.new_tokens,
            "turns": options.turns,
            "turn_tokens": options.turn_tokens,
            "answer_tokens": options.answer_tokens,
            "concurrency": options.concurrency,
            "others": options.others,
            "transport": self._choice.name,
        }


def _group(options: TiersOptions) -> ColocatedConfig:
    device: Device = "cuda" if options.cuda else "cpu"
    return ColocatedConfig(
        device=device,
        tp=1,
        pool_tokens=options.pool_tokens(ColocatedConfig().page_size),
        max_context_tokens=options.longest_tokens,
        max_requests=max(8, options.concurrency + 2, options.others + 2),
        prefetch="wait",  # a hit in the storage is complete, and prompts of any length are searched
        prefetch_min_tokens=1,
    ).sized(device)


def _read_rate(folder: Path, nbytes: int, repeats: int) -> Measurement:
    """Measures plain reads of a file of at least `nbytes` bytes; direct I/O where the file system supports it."""
    count = -(-nbytes // _READ_BYTES)
    pages, into = (
        [whole[i * _READ_BYTES : (i + 1) * _READ_BYTES] for i in range(count)]
        for whole in (memoryview(mmap.mmap(-1, count * _READ_BYTES)) for _ in range(2))
    )
    for page in pages:
        page[:] = os.urandom(_READ_BYTES)
    direct = os.O_DIRECT if _takes_direct(folder) else 0
    seconds = [plain_files(folder, pages, into, _READ_THREADS, direct)[1] for _ in range(repeats)]
    name = "plain read" if direct else "plain read of the page cache"
    return Measurement(name, "GB/s", tuple(count * _READ_BYTES / one / 1e9 for one in seconds))


def _takes_direct(folder: Path) -> bool:
    path = folder / "direct"
    try:
        os.close(os.open(path, os.O_RDWR | os.O_CREAT | os.O_DIRECT, 0o600))
    except OSError:
        return False
    finally:
        path.unlink(missing_ok=True)
    return True
