"""All groups in one process, each rank with its real threads: the whole system without Ray and without sockets."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch
from conditions import PATIENCE_S, until
from copied_runners import copied_runner
from plain_greedy import clearly_largest
from transformers import AutoModelForCausalLM

from decode_node.rank import DecodeRank
from disagg.colocated.rank import ColocatedRank
from disagg.core.config.read import (
    ClusterConfig,
    ColocatedConfig,
    Config,
    DecodeConfig,
    GroupConfig,
    MetricsConfig,
    PrefillConfig,
    RouterConfig,
    TransferConfig,
    TransportConfig,
)
from disagg.core.errors import BusyError, PeerLostError, TransportError
from disagg.core.ports import Clock
from disagg.core.types import PROTOCOL_VERSION, GroupInfo, SamplingParams, TokenLogprobs
from disagg.model.collective.base import SingleCollective, ThreadCollective
from disagg.model.load.source import ModelSource
from disagg.model.load.tiny import make_tiny_checkpoint
from disagg.node.assemble import make_runner
from disagg.node.group_storage import shares_host_cache
from disagg.node.links import make_link
from disagg.node.renewed_exchange import PageEndpoint
from disagg.router.answers import Output, SessionReport
from disagg.router.response_dispatcher import ResponseDispatcher
from disagg.router.router import Router
from disagg.router.status import watching
from prefill_node.rank import PrefillRank
from transport.base import Transport
from transport.control import messages as m
from transport.control.inproc import InprocControl, InprocHub
from transport.control.reliable import ReliableOptions
from transport.inproc import InprocFabric, InprocTransport
from transport.tags import is_active_message

RANKS: dict[str, type[Any]] = {"prefill": PrefillRank, "decode": DecodeRank, "colocated": ColocatedRank}


NOBODY_COMES = RouterConfig(group_wait_s=0.2)
"""No group is replaced: a request that lost the last group of a role fails soon."""


def small_config(
    prefill_tp: int = 1,
    decode_tp: int = 1,
    *,
    prefill_page: int = 16,
    decode_page: int = 16,
    chunk_tokens: int = 24,
    pool_tokens: int = 1024,
    ring_bytes: int = 1 << 20,
    layer_groups: int = 2,
    max_requests: int = 8,
    lease_timeout_s: float = 30.0,
    watermark_interval_s: float = 0.25,
    peer_memory: bool = False,
    completion_words: bool = False,
    groups: tuple[int, int] = (1, 1),
    metrics_interval_s: float = 1.0,
    checksum: bool | None = None,
    async_steps: bool = True,
) -> Config:
    """A configuration for tiny models; pools and rings are small, so that they fill up. Steps run as on a GPU."""
    shared: dict[str, Any] = {
        "pool_tokens": pool_tokens,
        "max_context_tokens": min(512, pool_tokens),
        "max_requests": max_requests,
    }
    return Config(
        prefill=PrefillConfig(
            tp=prefill_tp,
            page_size=prefill_page,
            chunk_tokens=chunk_tokens,
            groups=groups[0],
            async_steps=async_steps,
            **shared,
        ).sized("cpu"),
        decode=DecodeConfig(
            tp=decode_tp,
            page_size=decode_page,
            groups=groups[1],
            async_steps=async_steps,
            local_prefill_tokens=0,  # on a GPU too, every prompt takes the way over a prefill group
            **shared,
        ).sized("cpu"),
        transfer=TransferConfig(
            ring_bytes=ring_bytes,
            staging_bytes=max(4096, ring_bytes),
            layer_groups=layer_groups,
            lease_timeout_s=lease_timeout_s,
            watermark_interval_s=watermark_interval_s,
            checksum=not completion_words if checksum is None else checksum,
        ),
        transport=TransportConfig(
            backend="inproc", peer_memory=peer_memory, completion_words=completion_words
        ),
        metrics=MetricsConfig(interval_s=metrics_interval_s),
        router=NOBODY_COMES,
    )


def without_recovery(config: Config) -> Config:
    """A request fails with its session."""
    return msgspec.structs.replace(config, router=msgspec.structs.replace(config.router, max_recoveries=0))


def with_quarantine(config: Config, quarantine_s: float) -> Config:
    """Frees pages and ring bytes `quarantine_s` after their writer was lost; by default after 20 s."""
    control = msgspec.structs.replace(
        config.control, peer_timeout_s=quarantine_s / 2, heartbeat_s=quarantine_s / 4
    )
    return msgspec.structs.replace(config, control=control)


def colocated_config(
    tp: int = 1,
    *,
    page: int = 16,
    chunk_tokens: int = 24,
    pool_tokens: int = 1024,
    max_requests: int = 8,
    max_batch: int = 8,
    groups: int = 1,
    async_steps: bool = True,
) -> Config:
    """The same for groups that prefill and decode."""
    group = ColocatedConfig(
        tp=tp,
        groups=groups,
        page_size=page,
        chunk_tokens=chunk_tokens,
        pool_tokens=pool_tokens,
        max_context_tokens=min(512, pool_tokens),
        max_requests=max_requests,
        max_batch=max_batch,
        async_steps=async_steps,
    )
    return Config(
        colocated=group,
        cluster=ClusterConfig(mode="colocated"),
        transport=TransportConfig(backend="inproc", peer_memory=False),
        router=NOBODY_COMES,
    )


@dataclass
class Answered:
    """What a session gave."""

    tokens: list[int] = field(default_factory=list)
    finish: str | None = None
    text: str = ""
    logprobs: list[TokenLogprobs] = field(default_factory=list)
    prompt_logprobs: list[TokenLogprobs] = field(default_factory=list)
    report: SessionReport = field(default_factory=SessionReport)


class LocalGroups:
    """Ranks of all groups as threads of this process. Use `local_groups`.

    A second prefill group is `prefill-2`, and its first rank, for `kill`, `prefill-2-0`.
    """

    def __init__(
        self,
        config: Config,
        source: ModelSource,
        device: str = "cpu",
        options: ReliableOptions | None = None,
        max_message_bytes: Mapping[str, int] | None = None,
    ) -> None:
        """`max_message_bytes`: of the channels that take smaller messages, by their names."""
        self.config, self.source = config, source
        self._max_message_bytes = max_message_bytes or {}
        self.router_clock: Clock = time.monotonic
        """Clock of the routers that `serve` makes."""
        self.damages = False
        """The test damages segments; without that no checksum may differ."""
        self._options = options or ReliableOptions()
        self._collectives: dict[str, Any] = {}
        self.device = torch.device(device)
        self.hub = InprocHub()
        self.fabric = InprocFabric()
        self.closed: set[str] = set()
        """Names of transports that cannot be opened."""
        self.groups: dict[str, list[Any]] = {}
        for role, group in config.kinds.items():
            self.groups.update(self._groups(RANKS[role], group))
        self.ranks: list[Any] = [rank for ranks in self.groups.values() for rank in ranks]
        self.infos = {name: self._info(name, ranks) for name, ranks in self.groups.items()}
        for rank in self.ranks:
            rank.join(self.infos[rank.name])
        for rank in self.ranks:
            for info in self.infos.values():
                if info.role != rank.role:
                    rank.link(info)
        for rank in self.ranks:
            rank.know_groups(list(self.infos.values()))
        if config.transport.peer_memory:
            self.wait_for_pools()

    @property
    def prefill(self) -> list[Any]:
        """Ranks of the first prefill group."""
        return self.groups["prefill"]

    @property
    def decode(self) -> list[Any]:
        """Ranks of the first decode group."""
        return self.groups["decode"]

    @property
    def prefill_info(self) -> GroupInfo:
        """What the others know of it."""
        return self.infos["prefill"]

    @property
    def decode_info(self) -> GroupInfo:
        """What the others know of it."""
        return self.infos["decode"]

    def wait_for_pools(self) -> None:
        """Returns when every prefill rank has opened the pools that it writes to, or refused them."""
        decodes = [info for info in self.infos.values() if info.role == "decode"]
        for rank in [rank for rank in self.ranks if rank.role == "prefill"]:
            links = [make_link(self.infos[rank.name], decode) for decode in decodes]
            wanted = sum(len(link.destinations_of(rank.rank)) for link in links)
            until(partial(_known_pools, rank, wanted), lambda rank=rank: rank.statistics()["transfer"])  # type: ignore[misc]

    def observe(self, callback: Callable[[str, str, m.Message], None]) -> None:
        """Calls back with source, destination and message, whichever way it goes. Under a lock: must not send.

        A message with the tokens of several requests comes first, then the tokens of each.
        """

        def control(source: str, destination: str, message: m.Message) -> None:
            callback(source, destination, message)
            for tokens in message.tokens if isinstance(message, m.StepTokens) else ():
                callback(source, destination, tokens)

        def active(source: str, destination: str, tag: int, data: torch.Tensor) -> None:
            if is_active_message(tag):
                for message in m.decode_frame(data.numpy().tobytes()):
                    callback(source, destination, message)

        self.hub.observe(control)
        self.fabric.observe(active)

    def transport(self, name: str) -> Transport:
        """The data plane of the rank `name`."""
        if name in self.closed:
            raise TransportError(f"{name} cannot be opened")
        return InprocTransport(self.fabric, name)

    def serve(self, work: Callable[[Router], Awaitable[Any]]) -> Any:
        """Runs `work` with a router of its own, and what comes back from it."""

        async def main() -> Any:
            async with self.router() as router:
                return await work(router)

        return asyncio.run(main())

    @asynccontextmanager
    async def router(self) -> AsyncIterator[Router]:
        """A router of its own on the running loop; its groups are asked how they are each `metrics.interval_s`."""
        dispatcher = ResponseDispatcher(self._control("router"), asyncio.get_running_loop())
        dispatcher.start()
        try:
            router = Router(
                dispatcher, self.infos.values(), config=self.config.router, clock=self.router_clock
            )
            async with watching(router.statuses, self.config.metrics.interval_s):
                yield router
        finally:
            dispatcher.close()

    def answers(self, prompts: Sequence[Sequence[int]], sampling: SamplingParams) -> list[Answered]:
        """All prompts at once, greedily or however `sampling` says."""

        async def work(router: Router) -> list[Answered]:
            return await asyncio.gather(
                *(ask(router, f"r{i}", prompt, sampling) for i, prompt in enumerate(prompts))
            )

        found: list[Answered] = self.serve(work)
        return found

    def settle(self, dead: Sequence[str] = ()) -> None:
        """Soon everything is free and every book is right, on all ranks but the `dead`. No request is under way."""
        deadline_s = time.monotonic() + PATIENCE_S
        while True:
            try:
                self._check_free(dead)
                return
            except AssertionError:
                if time.monotonic() > deadline_s:
                    raise
                time.sleep(0.005)

    def _check_free(self, dead: Sequence[str]) -> None:
        for rank in self.ranks:
            if f"{rank.name}-{rank.rank}" in dead:
                continue
            rank.check()
            statistics = rank.statistics()
            mismatches = getattr(statistics["transfer"], "checksum_mismatches", 0)
            assert self.damages or not mismatches, f"{rank.lane}: nothing was damaged, and a checksum differs"
            assert statistics["faults"] == 0, f"{rank.lane}: an exception escaped on the transfer thread"
            transfer = statistics["transfer"]
            assert transfer.tickets == 0, f"{rank.lane}: {transfer}"
            held = getattr(transfer, "ring_in_use_bytes", 0) + getattr(transfer, "staging_in_use_bytes", 0)
            assert held == 0, f"{rank.lane}: {transfer}"
            if "leader" in statistics:
                memory = statistics["leader"].memory
                cached = memory.cache.cached_pages if memory.cache else 0
                assert memory.pages.references == cached, f"{rank.lane}: {memory}"
                assert not (memory.cache and memory.cache.locked_pages), f"{rank.lane}: {memory}"
                assert memory.free_rows == memory.rows, f"{rank.lane}: {memory}"

    def kill(self, name: str) -> None:
        """What the others see when the process of a rank, such as `decode-1`, dies."""
        self.hub.cut(name)
        self.fabric.kill(name)
        self.fabric.kill(f"{name}-pages")
        self._collectives[name].close()

    def restart(self, name: str, *, loss_known: bool = True) -> Any:
        """Replaces a killed group, a colocated one of one rank, by another of the same name. Returns the new rank.

        `loss_known`: whether the other ranks have noticed the loss before.
        """
        (dead,) = self.groups[name]
        address = dead.control.address
        dead.stop()
        for other in [rank for rank in self.ranks if loss_known and rank is not dead]:
            other.peer_lost(address)
        self.hub.mend(address)
        [(number, collective)] = _collectives(dead.group_config)
        new = self._rank(type(dead), dead.group_config, name, number, collective)
        self.ranks[self.ranks.index(dead)], self.groups[name] = new, [new]
        self.infos[name] = self._info(name, [new])
        new.join(self.infos[name])
        for rank in self.ranks:
            rank.know_groups(list(self.infos.values()))
        return new

    def stop(self) -> None:
        """Ends every thread, of all ranks at once, as a cluster does."""
        with ThreadPoolExecutor(len(self.ranks)) as pool:
            for stopped in [pool.submit(rank.stop) for rank in self.ranks]:
                stopped.result()

    def _groups(self, cls: type[Any], group: GroupConfig) -> dict[str, list[Any]]:
        names = [cls.role, *(f"{cls.role}-{number}" for number in range(2, group.groups + 1))]
        return {n: [self._rank(cls, group, n, r, c) for r, c in _collectives(group)] for n in names}

    def _rank(self, cls: type[Any], group: GroupConfig, group_name: str, rank: int, collective: Any) -> Any:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr("disagg.node.assemble.ModelRunner", copied_runner)
            runner = make_runner(self.config, group, self.source, collective, self.device)
        runner.pool.poison()  # unwritten KV that is read turns the answer into NaN
        name = f"{group_name}-{rank}"
        self._collectives[name] = collective
        node = cls(
            rank=rank,
            config=self.config,
            group_config=group,
            name=group_name,
            runner=runner,
            control=self._control(name),
            transport=self.transport(name),
        )
        if shares_host_cache(group, runner.spec):
            node.share_host_cache(PageEndpoint(partial(self.transport, f"{name}-pages"), "inproc"))
        return node

    def _control(self, name: str) -> InprocControl:
        limit_bytes = self._max_message_bytes.get(name, m.MAX_MESSAGE_BYTES)
        return InprocControl(self.hub, name, self._options, limit_bytes)

    def _info(self, name: str, ranks: Sequence[Any]) -> GroupInfo:
        spec, group = ranks[0].runner.spec, ranks[0].group_config
        infos = tuple(rank.start() for rank in ranks)
        return GroupInfo(
            name,
            ranks[0].role,
            PROTOCOL_VERSION,
            self.source.fingerprint,
            spec.layout,
            group.page_size,
            "inproc",
            infos,
            checksum=self.config.transfer.checksum,
        )


def _known_pools(rank: Any, wanted: int) -> bool:
    transfer = rank.statistics()["transfer"]
    return bool(transfer.open_pools + transfer.refused_pools == wanted)


def _collectives(group: GroupConfig) -> list[tuple[int, Any]]:
    if group.ranks == 1:
        return [(0, SingleCollective())]
    return list(enumerate(ThreadCollective.group(group.ranks, timeout_s=PATIENCE_S)))


@contextmanager
def local_groups(
    config: Config,
    source: ModelSource,
    device: str = "cpu",
    options: ReliableOptions | None = None,
    dead: Sequence[str] = (),
    max_message_bytes: Mapping[str, int] | None = None,
) -> Iterator[LocalGroups]:
    """All groups, up and linked; at the end every book (not of the `dead`) is checked and every thread ended."""
    groups = LocalGroups(config, source, device, options, max_message_bytes)
    try:
        yield groups
        groups.settle(dead)
    finally:
        groups.stop()


_latest_answers: dict[tuple[int, ...], list[int]] = {}
"""The answer of the latest request with each prompt."""


class Checkpoints:
    """Tiny checkpoints on disk, and what Hugging Face's `generate()` answers with them; both kept."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._models: dict[str, Any] = {}
        self._answers: dict[tuple[str, tuple[int, ...], int], list[int]] = {}
        self._beams: dict[tuple[str, tuple[int, ...], SamplingParams], list[list[int]]] = {}

    def source(self, architecture: str = "llama", kv_heads: int = 4, layers: int = 2) -> ModelSource:
        """A model with 12 query heads; Mistral's and Gemma2's window is 20 tokens.

        Three layers are sent in groups of unequal sizes; most tests need two only, which take a third less time.
        """
        path = self._directory / f"{architecture}-{kv_heads}-{layers}"
        if not path.exists():
            window = 20 if architecture in ("mistral", "gemma2") else None
            make_tiny_checkpoint(
                path,
                architecture,
                layers=layers,
                hidden=96,
                q_heads=12,
                kv_heads=kv_heads,
                head_dim=8,
                mlp=96,
                sliding_window=window,
            )
        return ModelSource.from_directory(path)

    def greedy(self, source: ModelSource, prompt: Sequence[int], max_tokens: int) -> list[int]:
        """The reference's answer.

        The latest answer to this prompt of a system in this process is a draft of it, which one pass of the reference
        confirms. `generate()` needs a pass for each token.
        """
        key = (source.name, tuple(prompt), max_tokens)
        if key not in self._answers:
            draft = _latest_answers.get(tuple(prompt), [])[:max_tokens]
            confirmed = self._confirms(source, prompt, draft, max_tokens)
            self._answers[key] = draft if confirmed else self._generated(source, prompt, max_tokens)
        return self._answers[key]

    def _generated(self, source: ModelSource, prompt: Sequence[int], max_tokens: int) -> list[int]:
        ids = torch.tensor([list(prompt)])
        output = self._model(source).generate(
            ids, max_new_tokens=max_tokens, do_sample=False, attention_mask=torch.ones_like(ids)
        )
        answer: list[int] = output[0, len(prompt) :].tolist()
        return answer

    def _confirms(
        self, source: ModelSource, prompt: Sequence[int], draft: Sequence[int], max_tokens: int
    ) -> bool:
        """Whether each token of `draft` has clearly the largest logit, and the answer ends with it."""
        ends = self._model(source).generation_config.eos_token_id
        ends = ends if isinstance(ends, list) else [ends]
        whole = bool(draft) and (len(draft) == max_tokens or draft[-1] in ends)
        if not whole or any(token in ends for token in draft[:-1]):
            return False
        logits = self.logits(source, [*prompt, *draft[:-1]])
        return clearly_largest(logits[len(prompt) - 1 :]) == list(draft)

    def beams(self, source: ModelSource, prompt: Sequence[int], sampling: SamplingParams) -> list[list[int]]:
        """The reference's best answers by beam search."""
        key = (source.name, tuple(prompt), sampling)
        if key not in self._beams:
            self._beams[key] = self._searched(source, prompt, sampling)
        return self._beams[key]

    def _searched(
        self, source: ModelSource, prompt: Sequence[int], sampling: SamplingParams
    ) -> list[list[int]]:
        ids = torch.tensor([list(prompt)])
        eos = [*source.spec(torch.float32).eos_ids, *sampling.stop_token_ids]
        output = self._model(source).generate(
            ids,
            attention_mask=torch.ones_like(ids),
            max_new_tokens=sampling.max_tokens,
            min_new_tokens=sampling.min_tokens or None,
            do_sample=False,
            num_beams=sampling.beams,
            num_return_sequences=sampling.n,
            length_penalty=sampling.length_penalty,
            early_stopping=sampling.early_stopping,
            eos_token_id=None if sampling.ignore_eos else eos,
            pad_token_id=0,
        )
        answers = output[:, len(prompt) :].tolist()
        ends = [next((i + 1 for i, t in enumerate(a) if t in eos), len(a)) for a in answers]
        return [a if sampling.ignore_eos else a[:end] for a, end in zip(answers, ends, strict=True)]

    def logits(self, source: ModelSource, tokens: Sequence[int]) -> torch.Tensor:
        """The reference's, float32 `[len(tokens), vocab]`."""
        with torch.no_grad():
            found: torch.Tensor = self._model(source)(torch.tensor([list(tokens)])).logits[0]
        return found

    def _model(self, source: ModelSource) -> Any:
        if source.name not in self._models:
            model = AutoModelForCausalLM.from_pretrained(source.name, dtype=torch.float32)
            self._models[source.name] = model
        return self._models[source.name]


async def exact_again(router: Router, checkpoints: Checkpoints) -> None:
    """Soon requests are taken again; meanwhile they end with a clear error, and what ends well is exact."""
    prompts, greedy = random_prompts(60, 30), SamplingParams(max_tokens=8)
    async with asyncio.timeout(PATIENCE_S):
        for number in range(1_000_000):
            asked = (ask(router, f"again{number}-{i}", p, greedy) for i, p in enumerate(prompts))
            try:
                answers = await asyncio.gather(*asked)
            except (PeerLostError, BusyError):
                await asyncio.sleep(0.02)
                continue
            for answer, prompt in zip(answers, prompts, strict=True):
                assert answer.tokens == checkpoints.greedy(checkpoints.source(), prompt, 8)
            return


def random_prompts(*lengths: int, seed: int = 0) -> list[list[int]]:
    """Prompts of printable bytes."""
    generator = torch.Generator().manual_seed(seed)
    return [torch.randint(32, 127, (length,), generator=generator).tolist() for length in lengths]


async def ask(
    router: Router,
    request_id: str,
    prompt: Sequence[int],
    sampling: SamplingParams,
    *,
    timeout_s: float = PATIENCE_S,
    decode: Any = None,
    on_output: Callable[[Output], None] = lambda _: None,
    answered: Answered | None = None,
) -> Answered:
    """One request, to its end."""
    answered = answered or Answered()
    outputs = router.generate(
        request_id, prompt, sampling, timeout_s=timeout_s, decode=decode, report=answered.report
    )
    async for output in outputs:
        answered.tokens.extend(output.tokens)
        answered.text += output.text
        answered.logprobs.extend(output.logprobs)
        answered.prompt_logprobs.extend(output.prompt_logprobs)
        answered.finish = output.finish
        on_output(output)
    _latest_answers[tuple(prompt)] = answered.tokens
    return answered
