"""A prefill and a decode group of real ranks, each a process, and the router's side of what is asked of them."""

from __future__ import annotations

import asyncio
import itertools
import time
from collections import defaultdict
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from typing import NamedTuple, TypeVar

from disagg.bench.handoff_ranks import StepTime, TimedDecodeHost, TimedHost, TimedPrefillHost
from disagg.bench.processes import Processes, Remote, call_all
from disagg.core.config import Config
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
from disagg.model.rounding import Judge
from disagg.node.assemble import make_source
from disagg.node.host import Started
from disagg.placement import choose_placement
from disagg.router.mail import Mail, MailRoom
from disagg.router.router import Router
from disagg.serve_local import check_split
from transport import messages as m
from transport.control_zmq import make_control
from transport.keys import make_keys

START_TIMEOUT_S = 900.0
"""Loading a large model takes minutes."""
REQUEST_TIMEOUT_S = 600.0
Kind = TypeVar("Kind", bound=m.Message)
_ROLES: tuple[tuple[str, type[TimedHost]], ...] = (("prefill", TimedPrefillHost), ("decode", TimedDecodeHost))


def spread_gpus(
    gpus: Sequence[str], prefill_tp: int, decode_tp: int
) -> tuple[list[str | None], list[str | None]]:
    """The GPU of each prefill and of each decode rank, by the rule of `disagg.placement`; None on a CPU."""
    if not gpus:
        return [None] * prefill_tp, [None] * decode_tp
    for_decode = min(decode_tp, len(gpus) - 1)
    split = len(gpus) - for_decode
    mine, theirs = gpus[:split], gpus[split:] or gpus
    return [mine[i % len(mine)] for i in range(prefill_tp)], [
        theirs[i % len(theirs)] for i in range(decode_tp)
    ]


class Groups:
    """Both groups, up and linked. Their processes end with `processes`."""

    def __init__(self, config: Config, processes: Processes, gpus: Sequence[str]) -> None:
        """Raises `ConfigError`, `UnsupportedModelError`, and what a rank raises."""
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
            meeting = ranks[0].call("rendezvous", where.backend)
            for rank in ranks:
                rank.ask("start", meeting)
        self.prefill_info = self._info("prefill", self.prefill)
        self.decode_info = self._info("decode", self.decode)
        for ranks, own, other in (
            (self.prefill, self.prefill_info, self.decode_info),
            (self.decode, self.decode_info, self.prefill_info),
        ):
            call_all(ranks, "join", own)
            call_all(ranks, "link", other)

    def restart(self) -> None:
        """A measurement begins; no request is under way."""
        call_all([*self.prefill, *self.decode], "restart")

    def spans(self) -> list[TimelineSpan]:
        """What happened on all ranks since the last call or `restart`."""
        return [span for spans in call_all([*self.prefill, *self.decode], "spans") for span in spans]

    def step_times(self, ranks: Sequence[Remote]) -> list[list[StepTime]]:
        """Forward passes of each rank since `restart`; no request is under way."""
        return call_all(ranks, "step_times")

    def unsplit(self, prompt: Sequence[int], max_tokens: int) -> tuple[list[int], float]:
        """Answer and seconds of the prefill group's engine when it decodes too; no request is under way."""
        answers: list[tuple[list[int], float]] = call_all(self.prefill, "unsplit", prompt, max_tokens)
        return answers[0]

    def judge(self, prompt: Sequence[int], answer: Sequence[int], asked: Sequence[int]) -> Judge:
        """What the prefill group's engine makes of the last token of `answer`; no request is under way."""
        judges: list[Judge] = call_all(self.prefill, "judge", prompt, answer, asked)
        return judges[0]

    def check_kv(self, key: RequestKey, tokens: int) -> None:
        """Raises `InvariantError` unless every decode rank holds what a prefill rank computed for the prompt, bit for
        bit, or that quantized to its own type.

        `tokens` are the prompt's. No request has come since this one, which has ended.
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
        """Raises `InvariantError` when a structure of any rank finds its books wrong."""
        call_all([*self.prefill, *self.decode], "check")

    def _info(self, role: str, ranks: Sequence[Remote]) -> GroupInfo:
        started: list[Started] = [rank.answer(START_TIMEOUT_S) for rank in ranks]
        group = self.config.prefill if role == "prefill" else self.config.decode
        return GroupInfo(
            name=role,
            role=role,
            protocol_version=PROTOCOL_VERSION,
            fingerprint=started[0].spec.fingerprint,
            layout=started[0].spec.layout,
            page_size=group.page_size,
            transport=started[0].transport,
            ranks=tuple(one.info for one in started),
            deterministic=self.config.model.deterministic,
            checksum=self.config.transfer.checksum,
        )


class Served(NamedTuple):
    """One answer, with times on this process' `time.monotonic()`."""

    key: RequestKey
    """As a string, its name in timeline spans."""
    began_s: float
    """It was handed to the router."""
    tokens: list[int]
    times_s: list[float]
    """When each token came."""
    ended_s: float
    """Nothing of it is left on any rank."""


class Client:
    """Asks both groups through a router, or the prefill group alone. Use `client_of`."""

    def __init__(self, groups: Groups, mail: MailRoom) -> None:
        self._mail, self._numbers = mail, itertools.count(1)
        self._prefill = groups.prefill_info
        self._decode = groups.decode_info.name
        self._router = Router(mail, (groups.prefill_info, groups.decode_info))

    async def ask(
        self, prompt: Sequence[int], max_tokens: int, running: asyncio.Event | None = None
    ) -> Served:
        """One request, greedily, to its end. `running` is set when the decode group's first token has come."""
        name = f"ask-{next(self._numbers)}"
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

    async def told(self, prompt: Sequence[int], answer: Sequence[int]) -> TokenLogprobs:
        """Log-probabilities of the likeliest tokens behind prompt and answer, as the split system finds them.

        Those behind an answer come from a decode step, after a hand-over of everything before the answer's last
        token, which a bias makes the first one. Raises `DisaggError` when the bias is too small for that.
        """
        name = f"told-{next(self._numbers)}"
        before, last = [*prompt, *answer[:-1]], answer[-1:]
        sampling = SamplingParams(
            max_tokens=1 + len(last),
            ignore_eos=True,
            logprobs=MAX_LOGPROBS,
            logit_bias=tuple((token, MAX_BIAS) for token in last),
        )
        told: list[TokenLogprobs] = []
        async for output in self._router.generate(name, before, sampling, timeout_s=REQUEST_TIMEOUT_S):
            told += output.logprobs
        if [one.token for one in told[:-1]] != list(last):
            raise DisaggError(
                f"the split system does not answer {last[0]} first, with a bias of {MAX_BIAS:g}"
            )
        return told[-1]

    async def prefill_only(self, prompt: Sequence[int]) -> Served:
        """The prompt through the prefill group, with a ticket that lacks no position: so nothing is sent."""
        key, end = RequestKey(f"only-{next(self._numbers)}"), len(prompt)
        ticket = Ticket(key, 0, self._decode, Span(end, end))
        leader, sampling = self._prefill.leader.control_address, SamplingParams(max_tokens=1, ignore_eos=True)
        with self._mail.open(key) as box:
            began_s = time.monotonic()
            self._mail.send(leader, m.Prefill(key, pack_tokens(prompt), sampling, ticket, REQUEST_TIMEOUT_S))
            token = (await _first(box, m.Prefilled)).first_tokens[0]
            came_s = time.monotonic()
            self._mail.send(leader, m.Release(key, "measured"))
            await _first(box, m.Released)
        return Served(key, began_s, [token], [came_s], time.monotonic())


@asynccontextmanager
async def client_of(groups: Groups) -> AsyncIterator[Client]:
    """A client on the running event loop."""
    mail = MailRoom(make_control(groups.config.control, groups.keys), asyncio.get_running_loop())
    mail.start()
    try:
        yield Client(groups, mail)
    finally:
        mail.close()


async def _first(box: Mail, kind: type[Kind]) -> Kind:
    """The next message of a kind; raises what a rank or the loss of one means."""
    while True:
        async with asyncio.timeout(REQUEST_TIMEOUT_S):
            _, message = await box.get()
        if isinstance(message, PeerLostError):
            raise message
        if isinstance(message, m.Failed):
            raise error_from_code(message.code, message.message)
        if isinstance(message, kind):
            return message
