"""A prefill group and a decode group of real ranks, each rank a process, and a client that acts as their router."""

from __future__ import annotations

import asyncio
import itertools
import time
from collections import defaultdict
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from typing import NamedTuple, TypeVar

from disagg.bench.common.processes import Processes, Remote, call_all
from disagg.bench.handoff.ranks import StepTime, TimedDecodeHost, TimedHost, TimedPrefillHost
from disagg.cluster.placement import choose_placement
from disagg.commands.local import check_split
from disagg.core.config.read import Config, RouterConfig
from disagg.core.errors import DisaggError, InvariantError, PeerLostError, error_from_code
from disagg.core.sampling import MAX_BIAS, MAX_LOGPROBS
from disagg.core.timeline import TimelineSpan
from disagg.core.tokens import pack_tokens
from disagg.core.types import (
    PROTOCOL_VERSION,
    GroupInfo,
    RequestKey,
    SamplingParams,
    Span,
    Ticket,
    TokenLogprobs,
)
from disagg.model.load.source import make_source
from disagg.model.rounding import Judge
from disagg.node.rank_records import Started
from disagg.router.response_dispatcher import ResponseDispatcher, ResponseInbox
from disagg.router.router import Router
from transport.control import messages as m
from transport.control.zmq import make_control
from transport.keys.curve import make_keys

START_TIMEOUT_S = 900.0
"""Time limit for starting the ranks; loading a large model takes minutes."""
REQUEST_TIMEOUT_S = 600.0
Kind = TypeVar("Kind", bound=m.Message)
_ROLES: tuple[tuple[str, type[TimedHost]], ...] = (("prefill", TimedPrefillHost), ("decode", TimedDecodeHost))


def spread_gpus(
    gpus: Sequence[str], prefill_tp: int, decode_tp: int
) -> tuple[list[str | None], list[str | None]]:
    """Returns the GPU of each prefill and each decode rank, as `disagg.cluster.placement` would choose it; None for a
    rank on a CPU."""
    if not gpus:
        return [None] * prefill_tp, [None] * decode_tp
    for_decode = min(decode_tp, len(gpus) - 1)
    split = len(gpus) - for_decode
    mine, theirs = gpus[:split], gpus[split:] or gpus
    return [mine[i % len(mine)] for i in range(prefill_tp)], [
        theirs[i % len(theirs)] for i in range(decode_tp)
    ]


class HandoffGroups:
    """A prefill group and a decode group, started and linked. The caller's `Processes` ends their rank processes."""

    def __init__(self, config: Config, processes: Processes, gpus: Sequence[str]) -> None:
        """Starts the ranks. Raises `ConfigError`, `UnsupportedModelError`, and any exception that a rank raises."""
        placement = choose_placement(
            len(gpus), config.prefill.ranks, config.decode.ranks, "cuda" if gpus else "cpu"
        )
        check_split(make_source(config), placement)
        self.config, self.keys = config, make_keys()
        places = spread_gpus(gpus, config.prefill.ranks, config.decode.ranks)
        self.prefill, self.decode = (
            [
                processes.start(f"{role} rank {rank}", gpu, host, rank, config, self.keys)
                for rank, gpu in enumerate(on)
            ]
            for (role, host), on in zip(_ROLES, places, strict=True)
        )
        for ranks, where in ((self.prefill, placement.prefill), (self.decode, placement.decode)):
            meeting = ranks[0].call("rendezvous", where.backend)._replace(host_ranks=placement.ranks)
            for rank in ranks:
                rank.start_call("start", meeting)
        self.prefill_info = self._info("prefill", self.prefill)
        self.decode_info = self._info("decode", self.decode)
        for ranks, own, other in (
            (self.prefill, self.prefill_info, self.decode_info),
            (self.decode, self.decode_info, self.prefill_info),
        ):
            call_all(ranks, "join", own)
            call_all(ranks, "link", other)

    def restart(self) -> None:
        """Drops all records and starts a new measurement. No request may be running."""
        call_all([*self.prefill, *self.decode], "restart")

    def spans(self) -> list[TimelineSpan]:
        """Returns the spans of all ranks since the last call or `restart`."""
        return [span for spans in call_all([*self.prefill, *self.decode], "spans") for span in spans]

    def step_times(self, ranks: Sequence[Remote]) -> list[list[StepTime]]:
        """Returns the forward passes of each rank in `ranks` since `restart`. No request may be running."""
        return call_all(ranks, "step_times")

    def unsplit(self, prompt: Sequence[int], max_tokens: int) -> tuple[list[int], float]:
        """Generates an answer with the prefill group's engine alone; returns the answer and the seconds taken. No
        request may be running."""
        answers: list[tuple[list[int], float]] = call_all(self.prefill, "unsplit", prompt, max_tokens)
        return answers[0]

    def judge(self, prompt: Sequence[int], answer: Sequence[int], candidates: Sequence[int]) -> Judge:
        """Returns the prefill engine's log-probabilities of `candidates` in place of the last token of `answer`.

        No request may be running.
        """
        judges: list[Judge] = call_all(self.prefill, "judge", prompt, answer, candidates)
        return judges[0]

    def check_kv(self, key: RequestKey, tokens: int) -> None:
        """Raises `InvariantError` unless the decode ranks' KV equals the prefill ranks' bit for bit, after
        quantization if any.

        `tokens` is the length of the prompt. Call this after the request has ended, before another one starts.
        """
        computed: defaultdict[tuple[int, int], set[tuple[int, ...]]] = defaultdict(set)
        dtype = self.decode_info.layout.dtype
        for found in call_all(self.prefill, "kv_digests", key, tokens, dtype):
            for place, digest in found.items():
                computed[place].add(digest)
        for rank, found in enumerate(call_all(self.decode, "kv_digests", key, tokens, dtype)):
            wrong = sorted(place for place, digest in found.items() if digest not in computed[place])
            if wrong:
                layer, head = wrong[0]
                raise InvariantError(
                    f"decode rank {rank} has wrong KV in {len(wrong)} of {len(found)} heads of {key}; the first: "
                    f"layer {layer}, head {head}"
                )

    def check(self) -> None:
        """Raises `InvariantError` when a rank's internal state is inconsistent."""
        call_all([*self.prefill, *self.decode], "check")

    def _info(self, role: str, ranks: Sequence[Remote]) -> GroupInfo:
        started: list[Started] = [rank.answer(START_TIMEOUT_S) for rank in ranks]
        group = self.config.prefill if role == "prefill" else self.config.decode
        return GroupInfo(
            name=role,
            role=role,
            protocol_version=PROTOCOL_VERSION,
            fingerprint=started[0].fingerprint,
            layout=started[0].spec.layout,
            page_size=group.page_size,
            transport=started[0].transport,
            ranks=tuple(one.info for one in started),
            deterministic=self.config.model.deterministic,
            checksum=self.config.transfer.checks(started[0].transport),
        )


class Served(NamedTuple):
    """One answer, with times in seconds of this process's `time.monotonic()`."""

    key: RequestKey
    """Key of the request; `str(key)` is the request's name in timeline spans."""
    began_s: float
    """Time at which the client called the router."""
    tokens: list[int]
    times_s: list[float]
    """Time at which the client received each token."""
    ended_s: float
    """Time at which all ranks have freed the request."""


class HandoffClient:
    """Sends requests to both groups through a router, or to the prefill group alone. Made by `client_of`."""

    def __init__(self, groups: HandoffGroups, dispatcher: ResponseDispatcher) -> None:
        self._dispatcher, self._numbers = dispatcher, itertools.count(1)
        self._prefill = groups.prefill_info
        self._decode = groups.decode_info.name
        # A divided prompt would hand over its head only.
        config = RouterConfig(split_prompt_tokens=0)
        self._router = Router(dispatcher, (groups.prefill_info, groups.decode_info), config=config)

    async def generate(
        self, prompt: Sequence[int], max_tokens: int, running: asyncio.Event | None = None
    ) -> Served:
        """Runs one greedy request to its end. `running` is set at the decode group's first token."""
        name = f"generate-{next(self._numbers)}"
        sampling = SamplingParams(max_tokens=max_tokens, ignore_eos=True)
        tokens: list[int] = []
        times_s: list[float] = []
        began_s = time.monotonic()
        async for output in self._router.generate(name, prompt, sampling, timeout_s=REQUEST_TIMEOUT_S):
            times_s += [time.monotonic()] * len(output.tokens)
            tokens += output.tokens
            if running is not None and len(tokens) > 1:
                running.set()
        return Served(RequestKey(name), began_s, tokens, times_s, time.monotonic())

    async def logprobs(self, prompt: Sequence[int], answer: Sequence[int]) -> TokenLogprobs:
        """Returns the log-probabilities of the likeliest tokens after prompt and answer, computed by the
        split system.

        If `answer` is not empty, a decode step computes the log-probabilities. The request hands over all tokens
        except the last one, which a logit bias forces as the first generated token. Raises `DisaggError` if the bias
        is too small.
        """
        name = f"logprobs-{next(self._numbers)}"
        before, last = [*prompt, *answer[:-1]], answer[-1:]
        sampling = SamplingParams(
            max_tokens=1 + len(last),
            ignore_eos=True,
            logprobs=MAX_LOGPROBS,
            logit_bias=tuple((token, MAX_BIAS) for token in last),
        )
        found: list[TokenLogprobs] = []
        async for output in self._router.generate(name, before, sampling, timeout_s=REQUEST_TIMEOUT_S):
            found += output.logprobs
        if [one.token for one in found[:-1]] != list(last):
            raise DisaggError(
                f"the split system did not generate token {last[0]} first, in spite of a logit bias of {MAX_BIAS:g}"
            )
        return found[-1]

    async def prefill_only(self, prompt: Sequence[int]) -> Served:
        """Runs the prompt on the prefill group only. The ticket requests KV of no position, so no KV is sent."""
        key, end = RequestKey(f"only-{next(self._numbers)}"), len(prompt)
        ticket = Ticket(key, 0, self._decode, Span(end, end))
        leader, sampling = self._prefill.leader.control_address, SamplingParams(max_tokens=1, ignore_eos=True)
        with self._dispatcher.open(key) as box:
            began_s = time.monotonic()
            self._dispatcher.send(
                leader, m.Prefill(key, pack_tokens(prompt), sampling, ticket, REQUEST_TIMEOUT_S)
            )
            token = (await _first(box, m.Prefilled)).first_tokens[0]
            came_s = time.monotonic()
            self._dispatcher.send(leader, m.Release(key, "measured"))
            await _first(box, m.Released)
        return Served(key, began_s, [token], [came_s], time.monotonic())


@asynccontextmanager
async def client_of(groups: HandoffGroups) -> AsyncIterator[HandoffClient]:
    """Yields a client on the running event loop."""
    dispatcher = ResponseDispatcher(
        make_control(groups.config.control, groups.keys), asyncio.get_running_loop()
    )
    dispatcher.start()
    try:
        yield HandoffClient(groups, dispatcher)
    finally:
        dispatcher.close()


async def _first(box: ResponseInbox, kind: type[Kind]) -> Kind:
    """Returns the next message of type `kind`; raises the error that a group reports, or the loss of a group."""
    while True:
        async with asyncio.timeout(REQUEST_TIMEOUT_S):
            _, message = await box.get()
        if isinstance(message, PeerLostError):
            raise message
        if isinstance(message, m.Failed):
            raise error_from_code(message.code, message.message)
        if isinstance(message, kind):
            return message
