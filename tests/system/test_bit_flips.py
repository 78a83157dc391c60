"""A bit that is inverted on the way is noticed, and the segment sent once more: tokens stay exact.

In staging, on the wire and in the ring it is the same message; a segment that a peer wrote is damaged in the pool.
"""

from __future__ import annotations

import asyncio
import itertools
import random
import threading
from collections.abc import Callable
from typing import Any

import msgspec
import pytest
import torch
from architectures import HYBRIDS, save
from bit_flips import Choose, FlippingTransport, Flips, before_scatters, first_sendings, install
from local_groups import (
    Answered,
    Checkpoints,
    LocalGroups,
    ask,
    local_groups,
    random_prompts,
    small_config,
    with_quarantine,
)
from slow_parameters import sampled

from decode_node.incoming import IncomingSegment, IncomingTransfer
from decode_node.ring import ReceiveRing
from disagg.core.config.read import ModelConfig, RouterConfig
from disagg.core.errors import ChecksumError, HandshakeError, PeerLostError
from disagg.core.types import SamplingParams, Segment
from disagg.model.load.source import ModelSource
from disagg.node.links import make_link
from disagg.reference.answers import reference_answers
from disagg.router.router import Router
from transport.active_messages import ActiveMessages
from transport.control import messages as m
from transport.control.reliable import ReliableOptions
from transport.tags import is_active_message
from transport.ucx.transport import UcxTransport

TOKENS = 6
LONG_TOKENS = 300
"""An answer that runs for longer than what was lost takes to be sent again; it is aborted when that has come."""
GREEDY = SamplingParams(max_tokens=TOKENS)
VICTIM, BYSTANDER = "victim", "bystander"
PATHS = pytest.mark.parametrize("peer_memory", [False, True], ids=["staged", "written"])


def mismatches(groups: LocalGroups) -> int:
    return sum(rank.statistics()["transfer"].checksum_mismatches for rank in groups.decode)


def sent_again(groups: LocalGroups) -> int:
    return sum(rank.statistics()["transfer"].segments_sent_again for rank in groups.prefill)


def segments(groups: LocalGroups) -> int:
    return sum(rank.statistics()["transfer"].segments_landed for rank in groups.decode)


def check_all_healed(groups: LocalGroups, flips: Flips) -> None:
    assert flips.struck
    assert mismatches(groups) == sent_again(groups) == len(flips.struck)


def in_sample(tp: tuple[int, int], trailer: bool, peer_memory: bool) -> bool:
    """Every pair of two parameters' values, and half of the triples."""
    return trailer == (peer_memory != (tp[0] == 1))


@pytest.mark.parametrize(
    ("tp", "trailer", "peer_memory"),
    sampled(itertools.product([(1, 1), (2, 1), (1, 2), (3, 2)], [False, True], [False, True]), in_sample),
    ids=str,
)
def test_every_segment_is_damaged_once(
    checkpoints: Checkpoints,
    monkeypatch: pytest.MonkeyPatch,
    tp: tuple[int, int],
    trailer: bool,
    peer_memory: bool,
) -> None:
    source, prompts = checkpoints.source(), random_prompts(5, 61, 29, 90, seed=sum(tp))
    flips = install(monkeypatch, first_sendings(sum(tp), trailer))
    config = small_config(*tp, prefill_page=4, chunk_tokens=23, ring_bytes=16384, peer_memory=peer_memory)
    with local_groups(config, source) as groups:
        groups.damages = True
        answers = groups.answers(prompts, GREEDY)
        check_all_healed(groups, flips)
        assert len(flips.struck) == segments(groups), "none was spared"
    assert [a.tokens for a in answers] == [checkpoints.greedy(source, p, TOKENS) for p in prompts]


@PATHS
def test_the_tail_of_a_large_prompt(
    checkpoints: Checkpoints, monkeypatch: pytest.MonkeyPatch, peer_memory: bool
) -> None:
    """It is written, verified and repaired by itself. What goes through the ring has none."""
    source, prompts = checkpoints.source(), random_prompts(61, 90, seed=3)
    counts: list[int] = []
    for tail_bytes in (1 << 40, 256):
        monkeypatch.setattr("prefill_node.chunks.CHECKED_TAIL_BYTES", tail_bytes)
        flips = install(monkeypatch, first_sendings(3))
        with local_groups(small_config(2, 2, chunk_tokens=16, peer_memory=peer_memory), source) as groups:
            groups.damages = True
            answers = groups.answers(prompts, GREEDY)
            check_all_healed(groups, flips)
            counts.append(segments(groups))
        assert [a.tokens for a in answers] == [checkpoints.greedy(source, p, TOKENS) for p in prompts]
        monkeypatch.undo()
    pairs_of_ranks = 2
    assert counts[1] - counts[0] == (len(prompts) * pairs_of_ranks if peer_memory else 0)


def first_sends() -> Callable[[str, str, int], bool]:
    """Matches each data message when it is sent for the first time: a second damage would fail its request."""
    seen: set[tuple[str, str, int]] = set()

    def matches(source: str, destination: str, tag: int) -> bool:
        message = (source, destination, tag)
        if is_active_message(tag) or message in seen:
            return False
        seen.add(message)
        return True

    return matches


@pytest.mark.parametrize("seed", sampled(range(4), lambda seed: seed < 2))
def test_a_bit_on_the_wire(checkpoints: Checkpoints, seed: int) -> None:
    """Of any data message, in its segment or in its checksum."""
    choose, source, prompts = random.Random(seed), checkpoints.source(), random_prompts(70, 55, seed=seed)
    with local_groups(small_config(2, 2, chunk_tokens=16), source) as groups:
        groups.damages = True
        for nth in (0, 3, 11):
            groups.fabric.faults.flip(choose.randrange(1 << 20), nth, first_sends())
        answers = groups.answers(prompts, GREEDY)
        assert mismatches(groups) == sent_again(groups) == 3
    assert [a.tokens for a in answers] == [checkpoints.greedy(source, p, TOKENS) for p in prompts]


def test_bits_on_ucx(checkpoints: Checkpoints, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every data message arrives damaged when it comes first; the ranks are threads that have a UCX worker each."""

    def damaging(self: LocalGroups, name: str) -> Any:
        return FlippingTransport(UcxTransport(), seed=len(name))

    monkeypatch.setattr(LocalGroups, "transport", damaging)
    source, prompts = checkpoints.source(), random_prompts(70, 55, seed=2)
    with local_groups(small_config(2, 1, chunk_tokens=16), source) as groups:
        groups.damages = True
        answers = groups.answers(prompts, GREEDY)
        assert mismatches(groups) == sent_again(groups) == segments(groups) > 0
    assert [a.tokens for a in answers] == [checkpoints.greedy(source, p, TOKENS) for p in prompts]


@PATHS
def test_quantized_values_and_scales(
    checkpoints: Checkpoints, monkeypatch: pytest.MonkeyPatch, peer_memory: bool
) -> None:
    """KV is quantized during the transfer: the checksum covers the quantized values and scales in the pool."""
    source, prompts = checkpoints.source(), random_prompts(5, 61, 29, seed=3)
    rows, generator = 2 * (8 + 2), random.Random(4)

    def choose(incoming: IncomingTransfer, segment: Segment, again: bool) -> int | None:
        row, in_scale = generator.randrange(segment.nbytes // rows), generator.random() < 0.5
        byte = row * rows + (16 + generator.randrange(4) if in_scale else generator.randrange(16))
        return None if again else 8 * byte + generator.randrange(8)

    flips = install(monkeypatch, choose)
    config = small_config(2, 1, chunk_tokens=23, peer_memory=peer_memory)
    decode = msgspec.structs.replace(config.decode, kv_dtype="int8")
    model = ModelConfig(path=str(source.directory), dtype="float32")
    config = msgspec.structs.replace(config, decode=decode, model=model)
    with local_groups(config, source) as groups:
        groups.damages = True
        answers = groups.answers(prompts, GREEDY)
        check_all_healed(groups, flips)
    expected = reference_answers(config, prompts, GREEDY, lambda: None).answers
    assert [a.tokens for a in answers] == expected


@PATHS
def test_a_recurrent_state(
    checkpoints: Checkpoints, tmp_path: Any, monkeypatch: pytest.MonkeyPatch, peer_memory: bool
) -> None:
    """Its bytes travel behind the prompt's KV; here only they are damaged."""
    name = next(iter(HYBRIDS))
    source = ModelSource.from_directory(save(HYBRIDS[name](), tmp_path / name))
    prompts, generator = random_prompts(5, 49, 24), random.Random(5)
    lengths = {f"r{i}": len(prompt) for i, prompt in enumerate(prompts)}

    def choose(incoming: IncomingTransfer, segment: Segment, again: bool) -> int | None:
        of_state = segment.tokens.start >= lengths[incoming.key.request_id]
        return generator.randrange(8 * segment.nbytes) if of_state and not again else None

    flips = install(monkeypatch, choose)
    with local_groups(small_config(2, 1, max_requests=3, peer_memory=peer_memory), source) as groups:
        groups.damages = True
        answers = groups.answers(prompts, SamplingParams(max_tokens=8))
        check_all_healed(groups, flips)
    assert [a.tokens for a in answers] == [checkpoints.greedy(source, p, 8) for p in prompts]


@pytest.mark.parametrize("left", ["zeros", "an earlier message"])
def test_a_message_that_was_not_written(
    checkpoints: Checkpoints, monkeypatch: pytest.MonkeyPatch, left: str
) -> None:
    """The receive ends, but the ring holds what was there before, with a checksum that fits it."""
    source, prompts = checkpoints.source(), random_prompts(70, 70, seed=8)
    earlier: dict[Segment, torch.Tensor] = {}
    struck: list[Segment] = []

    def stale(ring: ReceiveRing, item: IncomingSegment) -> None:
        message = ring.view(item)
        found = earlier.setdefault(item.segment, message.clone())
        if left == "zeros":
            found = torch.zeros_like(message)
        if not item.again and (left == "zeros" or not torch.equal(found, message)):
            struck.append(item.segment)
            message.copy_(found)

    before_scatters(monkeypatch, stale)
    with local_groups(small_config(1, 1, chunk_tokens=16, peer_memory=False), source) as groups:
        groups.damages = True
        answers = [groups.answers([prompt], GREEDY)[0] for prompt in prompts]
        assert mismatches(groups) == sent_again(groups) == len(struck) > 0
    assert [a.tokens for a in answers] == [checkpoints.greedy(source, p, TOKENS) for p in prompts]


def always_of(name: str, seed: int = 0) -> Choose:
    """The same request's segments, each time they come."""
    generator = random.Random(seed)

    def choose(incoming: IncomingTransfer, segment: Segment, again: bool) -> int | None:
        return generator.randrange(8 * segment.nbytes) if incoming.key.request_id == name else None

    return choose


def both(
    groups: LocalGroups, prompts: list[list[int]], gone: threading.Event | None = None
) -> tuple[Any, list[int]]:
    """The victim's error, or None, and the bystander's tokens. The victim's client leaves when `gone` is set."""

    async def work(router: Router) -> tuple[Any, list[int]]:
        other = asyncio.create_task(ask(router, BYSTANDER, prompts[1], GREEDY))
        victim = asyncio.create_task(ask(router, VICTIM, prompts[0], GREEDY))
        while gone is not None and not victim.done():
            if gone.is_set():
                victim.cancel()
            await asyncio.wait([victim], timeout=0.002)
        (error,) = await asyncio.gather(victim, return_exceptions=True)
        return error if isinstance(error, BaseException) else None, (await other).tokens

    found: tuple[Any, list[int]] = groups.serve(work)
    return found


@PATHS
def test_what_is_damaged_twice_ends_its_request(
    checkpoints: Checkpoints, monkeypatch: pytest.MonkeyPatch, peer_memory: bool
) -> None:
    """With an error that names the segment and both ranks. Others go on; `local_groups` finds every book empty."""
    source, prompts = checkpoints.source(), random_prompts(70, 55, seed=5)
    install(monkeypatch, always_of(VICTIM))
    config = small_config(2, 2, chunk_tokens=16, ring_bytes=16384, peer_memory=peer_memory)
    config = msgspec.structs.replace(config, router=RouterConfig(max_recoveries=1))
    with local_groups(config, source) as groups:
        groups.damages = True
        error, tokens = both(groups, prompts)
        assert mismatches(groups) >= 2
        again = groups.answers(prompts[1:], GREEDY)
    assert isinstance(error, ChecksumError)
    assert "damaged twice" in str(error)
    assert "Segment(" in str(error)
    assert "prefill rank" in str(error)
    assert "decode rank" in str(error)
    assert tokens == again[0].tokens == checkpoints.greedy(source, prompts[1], TOKENS)


def test_a_request_that_is_damaged_before_its_first_token_is_tried_elsewhere(
    checkpoints: Checkpoints, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of two decode groups one has faulty memory. The first token is held back until the damage is known."""
    source, prompts = checkpoints.source(), random_prompts(70, seed=6)
    faulty: list[str] = []

    def choose(incoming: IncomingTransfer, segment: Segment, again: bool) -> int | None:
        faulty[:] = faulty or [incoming.ticket.group]
        return 9 if incoming.ticket.group in faulty else None

    install(monkeypatch, choose)
    # Segments of the first chunk are compared while later chunks are computed.
    with local_groups(small_config(1, 1, chunk_tokens=2, groups=(1, 2)), source) as groups:
        groups.damages = True
        answers = groups.answers(prompts, GREEDY)
        seen = {answer.report.decode for answer in answers}
    assert seen.isdisjoint(faulty)
    assert [a.tokens for a in answers] == [checkpoints.greedy(source, p, TOKENS) for p in prompts]


def check_freed_early(groups: LocalGroups, checkpoints: Checkpoints, prompt: list[int]) -> None:
    """Answers the prompt. All is sent, verified and free on the prefill side while the answer still goes on."""
    seen = list[type[m.Message]]()
    answer = Answered()

    async def work(router: Router) -> None:
        loop, freed, begun = asyncio.get_running_loop(), asyncio.Event(), asyncio.Event()

        def observe(source: str, destination: str, message: m.Message) -> None:
            seen.append(type(message))
            if isinstance(message, m.Transferred):
                loop.call_soon_threadsafe(freed.set)

        groups.observe(observe)
        sampling, count = SamplingParams(max_tokens=LONG_TOKENS), lambda _: begun.set()
        one = ask(router, VICTIM, prompt, sampling, answered=answer, on_output=count)
        asked, waits = asyncio.create_task(one), [asyncio.create_task(e.wait()) for e in (freed, begun)]
        await asyncio.wait([asked, asyncio.gather(*waits)], return_when=asyncio.FIRST_COMPLETED)
        asked.cancel()
        await asyncio.gather(asked, return_exceptions=True)

    groups.serve(work)
    assert seen.index(m.Transferred) < seen.index(m.Release)
    assert answer.tokens
    assert answer.tokens == checkpoints.greedy(groups.source, prompt, len(answer.tokens))


@pytest.mark.parametrize(
    ("peer_memory", "fault"),
    sampled(
        itertools.product([False, True], ["drop", "duplicate", "delay"]),
        lambda peer_memory, fault: peer_memory == (fault == "duplicate"),
    ),
)
def test_a_wish_is_lost_repeated_or_late(
    checkpoints: Checkpoints, monkeypatch: pytest.MonkeyPatch, peer_memory: bool, fault: str
) -> None:
    source, (prompt,) = checkpoints.source(), random_prompts(70, seed=5)
    flips = install(monkeypatch, first_sendings(7))
    with local_groups(small_config(2, 2, chunk_tokens=16, peer_memory=peer_memory), source) as groups:
        groups.damages = True
        getattr(groups.hub, fault)(m.SendAgain)
        check_freed_early(groups, checkpoints, prompt)
        groups.hub.release()
        check_all_healed(groups, flips)
        assert groups.hub.struck == 1


@pytest.mark.parametrize(
    ("peer_memory", "fault"),
    sampled(
        itertools.product([False, True], ["drop", "duplicate", "delay"]),
        lambda peer_memory, fault: peer_memory == (fault == "duplicate"),
    ),
)
def test_the_word_that_all_is_verified_is_lost(
    checkpoints: Checkpoints, monkeypatch: pytest.MonkeyPatch, peer_memory: bool, fault: str
) -> None:
    """As an active message; and once more, repeated or late, as the control message that takes its place."""
    source, (prompt,) = checkpoints.source(), random_prompts(70, seed=5)
    with local_groups(small_config(2, 2, chunk_tokens=16, peer_memory=peer_memory), source) as groups:
        send = ActiveMessages.send

        def failing(self: ActiveMessages, peer: str, message: m.Message) -> None:
            if isinstance(message, m.TransferVerified):
                own = threading.get_ident()  # faults are chosen on the sender's thread
                groups.fabric.faults.fail_send(
                    0,
                    lambda source, destination, tag: is_active_message(tag) and threading.get_ident() == own,
                )
            send(self, peer, message)

        monkeypatch.setattr(ActiveMessages, "send", failing)
        getattr(groups.hub, fault)(m.TransferVerified)
        check_freed_early(groups, checkpoints, prompt)
        groups.hub.release()
        assert groups.hub.struck == 1


@PATHS
def test_the_client_goes_while_a_segment_is_wanted_once_more(
    checkpoints: Checkpoints, monkeypatch: pytest.MonkeyPatch, peer_memory: bool
) -> None:
    source, prompts = checkpoints.source(), random_prompts(70, 55, seed=5)
    install(monkeypatch, first_sendings(7))
    config = small_config(2, 2, chunk_tokens=16, ring_bytes=16384, peer_memory=peer_memory)
    with local_groups(config, source) as groups:
        groups.damages = True
        gone = threading.Event()

        def observe(source: str, destination: str, message: m.Message) -> None:
            if isinstance(message, m.SendAgain) and message.key.request_id == VICTIM:
                gone.set()

        groups.observe(observe)
        _, tokens = both(groups, prompts, gone)
    assert gone.is_set()
    assert tokens == checkpoints.greedy(source, prompts[1], TOKENS)


@pytest.mark.parametrize(
    ("peer_memory", "rank"),
    sampled(
        itertools.product([False, True], ["prefill-0", "decode-0"]),
        lambda peer_memory, rank: peer_memory == (rank == "decode-0"),
    ),
)
def test_a_rank_dies_while_a_segment_is_wanted_once_more(
    checkpoints: Checkpoints, monkeypatch: pytest.MonkeyPatch, peer_memory: bool, rank: str
) -> None:
    source, prompts = checkpoints.source(), random_prompts(70, 55, seed=5)
    install(monkeypatch, first_sendings(8))
    config = with_quarantine(small_config(2, 2, chunk_tokens=16, peer_memory=peer_memory), 1.0)
    options = ReliableOptions(peer_timeout_s=0.8, heartbeat_s=0.1)
    groups = LocalGroups(config, source, options=options)
    try:
        groups.damages = True
        struck: list[str] = []

        def observe(source: str, destination: str, message: m.Message) -> None:
            if isinstance(message, m.SendAgain) and not struck:
                struck.append(rank)
                groups.kill(rank)

        groups.observe(observe)

        async def work(router: Router) -> Any:
            asked = (ask(router, f"r{i}", prompt, GREEDY) for i, prompt in enumerate(prompts))
            return await asyncio.gather(*asked, return_exceptions=True)

        results = groups.serve(work)
        assert struck
        assert all(isinstance(result, PeerLostError) for result in results), results
        groups.settle(dead=[f"{rank[:-2]}-0", f"{rank[:-2]}-1"])
    finally:
        groups.stop()


@PATHS
def test_without_checksums_nothing_is_added(checkpoints: Checkpoints, peer_memory: bool) -> None:
    source, prompts = checkpoints.source(), random_prompts(70, 55, seed=5)
    with local_groups(small_config(2, 1, peer_memory=peer_memory, checksum=False), source) as groups:
        kinds: list[type[m.Message]] = []
        nbytes: list[int] = []
        groups.observe(lambda source, destination, message: kinds.append(type(message)))
        groups.fabric.observe(
            lambda s, d, tag, data: None if is_active_message(tag) else nbytes.append(len(data))
        )
        answers = groups.answers(prompts, GREEDY)
    assert [a.tokens for a in answers] == [checkpoints.greedy(source, p, TOKENS) for p in prompts]
    assert m.TransferVerified not in kinds
    assert peer_memory or sum(nbytes) == sum(answer.report.nbytes for answer in answers)


def test_with_checksums_a_message_has_eight_bytes_more(checkpoints: Checkpoints) -> None:
    source, prompts = checkpoints.source(), random_prompts(70, 55, seed=5)
    with local_groups(small_config(2, 1), source) as groups:
        nbytes: list[int] = []
        groups.fabric.observe(
            lambda s, d, tag, data: None if is_active_message(tag) else nbytes.append(len(data))
        )
        answers = groups.answers(prompts, GREEDY)
    assert sum(nbytes) == sum(answer.report.nbytes + 8 * answer.report.segments for answer in answers)


def test_groups_that_differ_are_refused(checkpoints: Checkpoints) -> None:
    with local_groups(small_config(1, 1), checkpoints.source()) as groups:
        without = msgspec.structs.replace(groups.decode_info, checksum=False)
        with pytest.raises(HandshakeError, match=r"transfer\.checksum"):
            make_link(groups.prefill_info, without)
