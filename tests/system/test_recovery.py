"""Groups die in the middle of requests: answers are those of a quiet run, and only what is missing is sent again."""

from __future__ import annotations

import asyncio
import importlib
import itertools
from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgspec
import pytest
from architectures import HYBRIDS, MORE_HYBRIDS, save
from local_groups import Checkpoints, LocalGroups, ask, random_prompts, small_config

from disagg.core.config.read import RouterConfig
from disagg.core.errors import PeerLostError
from disagg.core.types import SamplingParams, Ticket
from disagg.model.load.source import ModelSource
from disagg.router.answers import Output, SessionReport
from disagg.router.router import Router
from transport.control import messages as m
from transport.control.reliable import ReliableOptions
from transport.tags import is_active_message

SHORT = ReliableOptions(heartbeat_s=0.05, peer_timeout_s=0.6)
TOKENS = 30
SEEDED = SamplingParams(max_tokens=TOKENS, temperature=0.9, top_p=0.95, seed=7, ignore_eos=True)
CASES = {
    "greedy": SamplingParams(max_tokens=TOKENS, ignore_eos=True),
    "seeded": SEEDED,
    "penalties and logprobs": msgspec.structs.replace(
        SEEDED, repetition_penalty=1.3, presence_penalty=0.9, frequency_penalty=1.1, logprobs=2
    ),
    "min_tokens": SamplingParams(max_tokens=TOKENS, min_tokens=TOKENS - 3, temperature=1.5, seed=3),
    "three answers": msgspec.structs.replace(SEEDED, n=3),
    "stop string": msgspec.structs.replace(SEEDED, stop=("~~",)),
    "beams": SamplingParams(max_tokens=12, beams=3, n=2),
}


@dataclass
class Answers:
    """What a client has received of one request."""

    report: SessionReport = field(default_factory=SessionReport)
    tokens: defaultdict[int, list[int]] = field(default_factory=lambda: defaultdict(list))
    logprobs: defaultdict[int, list[Any]] = field(default_factory=lambda: defaultdict(list))
    text: defaultdict[int, str] = field(default_factory=lambda: defaultdict(str))
    finish: dict[int, str] = field(default_factory=dict)

    def add(self, output: Output) -> None:
        assert output.answer not in self.finish, "an output behind the end"
        assert output.index == len(self.tokens[output.answer]), "a token is missing or repeated"
        self.tokens[output.answer] += output.tokens
        self.logprobs[output.answer] += output.logprobs
        self.text[output.answer] += output.text
        if output.finish is not None:
            self.finish[output.answer] = output.finish

    def content(self) -> list[Any]:
        return [dict(self.tokens), dict(self.text), self.finish]


def spell(tokens: Any) -> str:
    return "".join(chr(token % 64 + 64) for token in tokens)


async def answers_of(
    router: Router, name: str, prompt: list[int], sampling: SamplingParams, answers: Answers | None = None
) -> Answers:
    answers = answers or Answers()
    outputs = router.generate(name, prompt, sampling, timeout_s=30.0, decode=spell, report=answers.report)
    async for output in outputs:
        answers.add(output)
    return answers


class System:
    """Groups whose ranks a test kills at a message; everything that lives is free at the end."""

    def __init__(
        self,
        checkpoints: Checkpoints,
        groups: tuple[int, int],
        router: RouterConfig | None = None,
        source: ModelSource | None = None,
        state_interval_tokens: int = 1024,
        **settings: Any,
    ) -> None:
        config = small_config(1, 1, groups=groups, **settings)
        prefill = msgspec.structs.replace(config.prefill, state_interval_tokens=state_interval_tokens)
        config = msgspec.structs.replace(config, prefill=prefill)
        if router is not None:
            config = msgspec.structs.replace(config, router=router)
        self.groups = LocalGroups(config, source or checkpoints.source(), options=SHORT)
        self.killed: list[str] = []
        self.on_kill: Callable[[str], object] = lambda name: None
        """As the directory reports a death to the router."""
        self.tickets: list[Ticket] = []

    def kill_at(self, wanted: Callable[[str, m.Message], str | None], times: int = 1) -> None:
        """Kills the group that `wanted(source, message)` names, `times` times at most."""

        def observe(source: str, destination: str, message: m.Message) -> None:
            if isinstance(message, m.Reserved) and source.startswith("decode"):
                self.tickets.append(message.ticket)
            name = wanted(source, message) if len(self.killed) < times else None
            if name is not None and f"{name}-0" not in self.killed:
                self.killed.append(f"{name}-0")
                self.groups.kill(f"{name}-0")
                self.on_kill(name)

        self.groups.observe(observe)

    def __enter__(self) -> System:
        return self

    def __exit__(self, *error: object) -> None:
        try:
            if error[0] is None:
                self.groups.settle(dead=self.killed)
        finally:
            self.groups.stop()


@pytest.mark.parametrize("case", CASES)
def test_an_answer_goes_on_behind_the_death_of_its_decode_group(checkpoints: Checkpoints, case: str) -> None:
    sampling, (prompt,) = CASES[case], random_prompts(40)

    def middle(source: str, message: m.Message) -> str | None:
        if sampling.beams:
            return (
                reserved[-1] if isinstance(message, m.Prefilled) and message.key.request_id == "r" else None
            )
        struck = isinstance(message, m.Tokens) and message.key.request_id == "r" and message.index == 9
        return source[:-2] if struck else None

    with System(checkpoints, (1, 2)) as system:
        reserved: list[str] = []

        async def work(router: Router) -> tuple[Answers, Answers]:
            quiet = await answers_of(router, "quiet", prompt, sampling)
            system.kill_at(middle)
            system.groups.observe(
                lambda source, destination, message: (
                    reserved.append(message.ticket.group) if isinstance(message, m.Reserved) else None
                )
            )
            return quiet, await answers_of(router, "r", prompt, sampling)

        quiet, found = system.groups.serve(work)
    assert system.killed
    assert found.content() == quiet.content()
    assert found.report.recoveries, "the prefill group may report the loss before the silence shows"
    for number, logprobs in quiet.logprobs.items():
        again = found.logprobs[number]
        assert [one.token for one in again] == [one.token for one in logprobs]
        assert [one.logprob for one in again] == pytest.approx([one.logprob for one in logprobs], abs=1e-4)


@pytest.mark.parametrize("landed", [False, True])
def test_only_the_rest_of_a_prompt_is_sent_again(checkpoints: Checkpoints, landed: bool) -> None:
    """The prefill group dies before or behind its first segments; the decode group keeps the pages that have landed.

    The ring, which is smaller than the prompt's KV, has a watermark above 0 when a segment has landed. The decode
    rank reports it with the next grant if the prefill group is slow, and by itself if segments wait for room.
    """
    (prompt,) = random_prompts(90)
    prefill: list[str] = []

    def middle(source: str, message: m.Message) -> str | None:
        if isinstance(message, m.LeaseRequest):
            prefill.append(source[:-2])
            return None if landed else prefill[-1]
        reports = isinstance(message, m.LeaseGrant | m.Watermark) and message.watermark
        return prefill[-1] if landed and reports else None

    sizes = {"chunk_tokens": 16, "ring_bytes": 16384, "layer_groups": 1, "decode_page": 4}
    with System(checkpoints, (2, 1), source=checkpoints.source(layers=3), **sizes) as system:
        system.kill_at(middle)
        found = system.groups.serve(
            lambda router: answers_of(router, "r", prompt, SamplingParams(max_tokens=12))
        )
        page_size = system.groups.config.decode.page_size
    assert system.killed
    assert found.tokens[0] == checkpoints.greedy(system.groups.source, prompt, 12)
    assert found.report.recoveries == ["prefill_lost"]
    first, second = system.tickets
    assert (first.tokens.start, first.tokens.stop) == (0, 90)
    # The prefill group's compute thread may have chosen the first token, which then belongs to the new prompt.
    assert second.tokens.stop in (90, 91)
    assert second.tokens.start % page_size == 0
    assert (second.tokens.start > 0) == landed
    assert second.row == first.row


@pytest.mark.parametrize("architecture", ["zamba2", "qwen3-next"])
def test_a_recurrent_state_is_computed_behind_the_answer_so_far(
    checkpoints: Checkpoints, tmp_path: Path, architecture: str
) -> None:
    """Zamba 2 has other formulas for prompts and answers: the answer so far is computed token by token."""
    (prompt,) = random_prompts(49)
    source = ModelSource.from_directory(save((HYBRIDS | MORE_HYBRIDS)[architecture](), tmp_path))

    def middle(source: str, message: m.Message) -> str | None:
        return source[:-2] if isinstance(message, m.Tokens) and message.index == 5 else None

    with System(checkpoints, (1, 2), source=source, state_interval_tokens=16) as system:
        system.kill_at(middle)
        sampling = SamplingParams(max_tokens=16)
        found = system.groups.serve(lambda router: answers_of(router, "r", prompt, sampling))
        cache = system.groups.prefill[0].statistics()["leader"].memory.cache
    assert system.killed
    assert found.tokens[0] == checkpoints.greedy(source, prompt, 16)
    assert found.report.recoveries
    assert cache.hit_tokens == 48 * len(found.report.recoveries), (
        "each attempt begins at the last page's state"
    )


def test_a_stream_does_not_notice_the_death_of_its_prefill_group(checkpoints: Checkpoints) -> None:
    (prompt,) = random_prompts(40)

    def streaming(source: str, message: m.Message) -> str | None:
        return "prefill" if isinstance(message, m.Tokens) and message.index == 3 else None

    with System(checkpoints, (1, 1)) as system:
        system.kill_at(streaming)
        found = system.groups.serve(
            lambda router: answers_of(router, "r", prompt, SamplingParams(max_tokens=200))
        )
    assert system.killed == ["prefill-0"]
    assert found.tokens[0] == checkpoints.greedy(system.groups.source, prompt, 200)
    assert found.report.recoveries == []


def fails_once(monkeypatch: pytest.MonkeyPatch, where: str) -> list[str]:
    """The second call of a function raises; returns what has struck."""
    module, name = where.rsplit(".", 1)
    real, struck, calls = getattr(importlib.import_module(module), name), list[str](), itertools.count()

    def failing(*arguments: Any) -> Any:
        if next(calls) == 1:
            struck.append(name)
            raise RuntimeError("out of memory, say")
        return real(*arguments)

    monkeypatch.setattr(where, failing)
    return struck


LAUNCHES = ["prefill_node.mover.gather", "decode_node.landing.scatter", "decode_node.receiver.table_slots"]


@pytest.mark.parametrize("where", LAUNCHES)
def test_a_launch_that_fails_costs_a_recovery(
    checkpoints: Checkpoints, monkeypatch: pytest.MonkeyPatch, where: str
) -> None:
    struck = fails_once(monkeypatch, where)
    check_one_recovery(checkpoints, lambda system: None)
    assert struck


MESSAGES: dict[str, Callable[[str, str, int], bool]] = {
    "segment": lambda source, destination, tag: not is_active_message(tag),
    "lease request": lambda source, destination, tag: is_active_message(tag) and source.startswith("prefill"),
    "grant": lambda source, destination, tag: is_active_message(tag) and source.startswith("decode"),
}


@pytest.mark.parametrize("what", ["fail", "lose"])
@pytest.mark.parametrize("kind", MESSAGES)
def test_a_message_that_fails_or_is_lost_costs_a_recovery(
    checkpoints: Checkpoints, kind: str, what: str
) -> None:
    """A lost one fails its request by `transfer.lease_timeout_s`."""

    def strike(system: System) -> None:
        faults = system.groups.fabric.faults
        if what == "fail":
            faults.fail_send(0, MESSAGES[kind])
        elif kind == "segment":
            faults.hold(0, MESSAGES[kind])
            system.groups.observe(
                lambda source, destination, message: (
                    system.groups.fabric.release() if isinstance(message, m.SenderEnded) else None
                )
            )
        else:
            faults.truncate(1, 0, MESSAGES[kind])

    check_one_recovery(checkpoints, strike, shared=kind != "segment")


def check_one_recovery(
    checkpoints: Checkpoints, strike: Callable[[System], None], shared: bool = False
) -> None:
    """Two requests on one pair of groups, of which one meets a fault, or both if they have `shared` a message; both
    are exact."""
    prompts, sampling = random_prompts(90, 60), SamplingParams(max_tokens=12)
    with System(checkpoints, (1, 1), chunk_tokens=256, lease_timeout_s=1.0) as system:
        strike(system)

        async def work(router: Router) -> list[Answers]:
            return await asyncio.gather(
                *(answers_of(router, f"r{i}", prompt, sampling) for i, prompt in enumerate(prompts))
            )

        answers: list[Answers] = system.groups.serve(work)
    for one, prompt in zip(answers, prompts, strict=True):
        assert one.tokens[0] == checkpoints.greedy(system.groups.source, prompt, 12)
    recoveries = sorted(one.report.recoveries for one in answers)
    assert recoveries == [[], ["transfer_failed"]] or (shared and recoveries == [["transfer_failed"]] * 2)


def test_a_request_is_not_recovered_more_often_than_allowed(checkpoints: Checkpoints) -> None:
    (prompt,) = random_prompts(40)

    def middle(source: str, message: m.Message) -> str | None:
        return source[:-2] if isinstance(message, m.Tokens) and message.index == 5 else None

    with System(checkpoints, (1, 2), RouterConfig(max_recoveries=0)) as system:
        system.kill_at(middle)
        with pytest.raises(PeerLostError, match=r"more than router\.max_recoveries = 0; "):
            system.groups.serve(lambda router: answers_of(router, "r", prompt, CASES["greedy"]))


def test_a_request_that_kills_two_groups_is_given_up(checkpoints: Checkpoints) -> None:
    """Other requests go on with the groups that are left."""
    poison, other = random_prompts(40, 30)
    answers = Answers()

    def at_the_same_token(source: str, message: m.Message) -> str | None:
        struck = isinstance(message, m.Prefilled) and message.key.request_id == "poison"
        return reserved.get("poison") if struck else None

    with System(checkpoints, (1, 5)) as system:
        reserved: dict[str, str] = {}

        def observe(source: str, destination: str, message: m.Message) -> None:
            if isinstance(message, m.Reserved):
                reserved[message.key.request_id] = message.ticket.group

        async def work(router: Router) -> Answers:
            system.groups.observe(observe)
            loop = asyncio.get_running_loop()
            system.on_kill = lambda name: loop.call_soon_threadsafe(router.remove, name)
            system.kill_at(at_the_same_token, times=4)
            with pytest.raises(PeerLostError, match=r"is given up, .*: decode.* and decode.* were lost"):
                await answers_of(router, "poison", poison, SamplingParams(max_tokens=5, beams=2))
            return await answers_of(router, "other", other, SamplingParams(max_tokens=5), answers)

        system.groups.serve(work)
    assert len(system.killed) in (2, 3), "a death may show after the next try"
    assert answers.tokens[0] == checkpoints.greedy(system.groups.source, other, 5)


def test_all_requests_of_a_group_go_on_at_once(checkpoints: Checkpoints) -> None:
    """Some stream, some are being prefilled; one group of each kind is left."""
    prompts = random_prompts(60, 40, 50, 30, 70, 20)

    def streaming(source: str, message: m.Message) -> str | None:
        return (
            "decode-2"
            if isinstance(message, m.Tokens) and source == "decode-2-0" and message.index == 7
            else None
        )

    with System(checkpoints, (2, 2)) as system:
        system.kill_at(streaming)

        async def work(router: Router) -> list[Any]:
            sampling = SamplingParams(max_tokens=60)
            asked = (ask(router, f"r{number}", p, sampling) for number, p in enumerate(prompts))
            found: list[Any] = await asyncio.gather(*asked)
            assert sum(router.recoveries.values()) == sum(len(one.report.recoveries) for one in found) > 0
            return found

        found = system.groups.serve(work)
    assert [one.tokens for one in found] == [
        checkpoints.greedy(system.groups.source, prompt, 60) for prompt in prompts
    ]
