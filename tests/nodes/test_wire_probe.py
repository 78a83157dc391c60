"""Timing the wire between two ranks: what is found is used, and whatever goes wrong leaves nothing behind."""

from __future__ import annotations

import itertools
import json
import math
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch
from conditions import PATIENCE_S, until
from local_groups import Checkpoints, LocalGroups, local_groups, random_prompts, small_config
from slow_parameters import sampled

import decode_node.probe
import prefill_node.calibration
import prefill_node.probe
from disagg.core.config.read import Config
from disagg.core.types import SamplingParams
from prefill_node.calibration import Calibrator
from prefill_node.wire_summary import Calibration
from staging.wire import PROBE_REPEATS, PROBE_SIZES_BYTES
from transport.control import messages as m
from transport.tags import is_active_message, is_probe, probe_tag

RING_BYTES = 32 << 20
TIMED = len(PROBE_SIZES_BYTES) * (1 + PROBE_REPEATS)
GREEDY = SamplingParams(max_tokens=4)


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Never the user's."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    return tmp_path / "disagg" / "wire.json"


@pytest.fixture
def soon(monkeypatch: pytest.MonkeyPatch) -> None:
    """Probes are given up soon, and not waited for much longer."""
    set_limits(monkeypatch, 0.2)


def set_limits(patch: pytest.MonkeyPatch, limit_s: float) -> None:
    patch.setattr(prefill_node.calibration, "ANSWER_S", limit_s + 0.8)
    patch.setattr(prefill_node.probe, "PROBE_LIMIT_S", limit_s)
    patch.setattr(decode_node.probe, "HELD_S", limit_s + 0.1)


def config_of(
    ring_bytes: int = RING_BYTES, peer_memory: bool = False, tp: int = 1, **transfer: Any
) -> Config:
    config = small_config(tp, tp, ring_bytes=ring_bytes, peer_memory=peer_memory)
    changes = {"calibrate": "always", **transfer}
    return msgspec.structs.replace(config, transfer=msgspec.structs.replace(config.transfer, **changes))


@pytest.fixture
def start(checkpoints: Checkpoints) -> Iterator[Callable[..., LocalGroups]]:
    """Makes groups; afterwards a request is exact, and every book empty."""
    opened: list[Any] = []

    def make(**settings: Any) -> LocalGroups:
        opened.append(local_groups(config_of(**settings), checkpoints.source(layers=3)))
        groups: LocalGroups = opened[-1].__enter__()
        return groups

    yield make
    for each in opened:
        each.__exit__(None, None, None)


def calibrate(groups: LocalGroups) -> Calibration:
    found = groups.prefill[0].calibrate(groups.decode_info)
    assert found is not None
    groups.settle()
    return found


def check_exact(groups: LocalGroups, checkpoints: Checkpoints) -> None:
    """More than what fits the ring beside a probe that was forgotten would have to wait for it."""
    prompts = random_prompts(70, 40)
    answers = groups.answers(prompts, GREEDY)
    assert [a.tokens for a in answers] == [checkpoints.greedy(groups.source, p, 4) for p in prompts]
    groups.settle()


def counted(groups: LocalGroups, wanted: Callable[[int], bool]) -> list[int]:
    """Sizes of the messages that arrive under such tags."""
    sizes: list[int] = []

    def see(source: str, destination: str, tag: int, data: torch.Tensor) -> None:
        if wanted(tag):
            sizes.append(data.numel())

    groups.fabric.observe(see)
    return sizes


def test_what_is_measured_is_used_and_kept(
    start: Callable[..., LocalGroups], checkpoints: Checkpoints, cache: Path
) -> None:
    groups = start()
    sizes = counted(groups, is_probe)
    found = calibrate(groups)
    assert sizes == [size for size in PROBE_SIZES_BYTES for _ in range(1 + PROBE_REPEATS)]
    assert (found.path, found.failed) == ("staging and ring, by inproc", False)
    assert found.found.startswith("measured: ")
    assert "a chunk of 24 tokens leaves in 1 layer group, in segments of" in found.chosen, "small, so in one"
    [(key, kept)] = json.loads(cache.read_text())["wires"].items()
    assert key.endswith("cpu; inproc")
    sender = groups.prefill[0].agent
    assert sender.cutter.wires["decode"].overhead_s == kept["overhead_s"] > 0
    assert sender.cutter.wires["decode"].bytes_per_s == kept["bytes_per_s"]
    check_exact(groups, checkpoints)


def test_a_known_wire_is_not_measured_again(start: Callable[..., LocalGroups], cache: Path) -> None:
    measured = calibrate(start())
    groups = start(calibrate="always")
    sizes = counted(groups, is_probe)
    groups.prefill[0].user_config = config_of(calibrate="auto")
    assert groups.prefill[0].calibrate(groups.decode_info) is None, "not on a CPU, unless it must"
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Calibrator, "wanted", True)
        found = calibrate(groups)
    assert sizes == []
    assert found.found == measured.found.replace("measured", "cached")
    assert found.chosen == measured.chosen


def test_what_is_set_wins(start: Callable[..., LocalGroups]) -> None:
    groups = start(segment_overhead_s=0.0, max_segment_bytes=4096)
    assert "in 2 layer groups, in segments of 0.00391 MiB" in calibrate(groups).chosen
    sender = groups.prefill[0].agent
    assert sender.cutter.limits == {"decode": {0: 4096}}
    assert sender.cutter.wires["decode"].overhead_s == 0


def test_all_is_set(start: Callable[..., LocalGroups]) -> None:
    groups = start(segment_overhead_s=1e-4, wire_bytes_per_s=1e9, max_segment_bytes=1 << 20)
    sizes = counted(groups, is_active_message)
    found = calibrate(groups)
    assert (sizes, found.failed) == ([], False)
    assert (
        found.found == "not measured (the wire and the segment size are configured): "
        "100 us for one more segment and 1 GB/s are assumed"
    )


def test_peer_memory_is_not_measured(start: Callable[..., LocalGroups]) -> None:
    groups = start(peer_memory=True, tp=2)
    sizes = counted(groups, is_probe)
    found = calibrate(groups)
    assert (sizes, found.path, found.failed) == ([], "peer memory", False)
    assert "the decode pool is written directly" in found.found
    assert found.chosen == "a chunk of 24 tokens leaves in 2 layer groups", "as before"


def test_a_pool_that_is_refused_meanwhile_is_measured(start: Callable[..., LocalGroups]) -> None:
    groups = start()
    receiver, sender = groups.decode[0], groups.prefill[0]
    receiver.transfer_loop.call(lambda: receiver.agent.parts.writes.peers.add("prefill-0"))
    asked: list[str] = []

    def refuse(source: str, destination: str, message: m.Message) -> None:
        if isinstance(message, m.ProbeAnswer):
            asked.append(message.refused)
            receiver.transfer_loop.post(lambda: receiver.agent.parts.writes.peers.discard("prefill-0"))

    groups.observe(refuse)
    assert sender.calibrate(groups.decode_info).found.startswith("measured")
    assert ["offered" in why for why in asked] == [True, False]


@pytest.mark.parametrize("ring_bytes", [4096, 1 << 19])
def test_a_ring_that_is_too_small(start: Callable[..., LocalGroups], ring_bytes: int) -> None:
    found = calibrate(start(ring_bytes=ring_bytes))
    assert "too small" in found.found
    assert not found.failed


def test_a_small_ring_gets_small_messages(start: Callable[..., LocalGroups]) -> None:
    groups = start(ring_bytes=2 << 20)
    sizes = counted(groups, is_probe)
    assert calibrate(groups).found.startswith("measured")
    assert set(sizes) == {64 << 10, 1 << 20}


def test_a_ring_in_use(start: Callable[..., LocalGroups], checkpoints: Checkpoints, soon: None) -> None:
    """A request's lease is there: nothing is sent beside it."""
    groups = start()
    sizes = counted(groups, is_probe)
    agent = groups.decode[0].agent
    leases: list[Any] = []
    groups.decode[0].transfer_loop.call(
        lambda: leases.append(agent.parts.ring.allocator.assign(256, owner="a request"))
    )
    found = groups.prefill[0].calibrate(groups.decode_info)
    assert (sizes, found.failed) == ([], True)
    assert "the decode rank's ring is in use within 0.2 s" in found.found
    assert found.chosen.startswith("a chunk of 24 tokens leaves in 2 layer groups"), "as before"
    groups.decode[0].transfer_loop.call(lambda: agent.parts.ring.allocator.free(leases[0].id))
    check_exact(groups, checkpoints)


LOST: dict[str, Callable[[int], bool]] = {"active message": is_active_message, "message": is_probe}


@pytest.mark.parametrize(
    ("kind", "what", "nth"),
    sampled(
        itertools.product(LOST, ["fail", "hold"], [0, 2]),
        lambda kind, what, nth: kind == "active message" or (what == "fail") == (nth == 0),
    ),
)
def test_one_of_its_messages_is_lost(
    start: Callable[..., LocalGroups],
    checkpoints: Checkpoints,
    monkeypatch: pytest.MonkeyPatch,
    kind: str,
    what: str,
    nth: int,
) -> None:
    """Failed or never arriving, the request for it, its answer or end among them: nothing is held in the end."""
    over = kind == "active message" and nth == 2  # the end of a probe that is over may be lost
    at_once = (
        kind == "message" and what == "fail"
    )  # the others end at the limit, which must leave time for the fault
    groups = start()
    faults = groups.fabric.faults
    add = faults.fail_send if what == "fail" else faults.hold
    add(nth, lambda source, destination, tag: LOST[kind](tag))
    set_limits(monkeypatch, PATIENCE_S if over or at_once else 1.0)
    assert groups.prefill[0].calibrate(groups.decode_info).failed is not over
    groups.fabric.release()
    receiver = groups.decode[0]
    receiver.transfer_loop.call(lambda: receiver.agent.parts.probes.poll(math.inf))  # its time is over
    groups.settle()
    check_exact(groups, checkpoints)
    set_limits(monkeypatch, PATIENCE_S)
    assert groups.prefill[0].calibrate(groups.decode_info).found.startswith("measured"), (
        "and it can be repeated"
    )


@pytest.mark.parametrize("victim", ["prefill-0", "decode-0"])
@pytest.mark.parametrize("nth", [0, TIMED - 1])
def test_a_rank_dies_in_the_middle(checkpoints: Checkpoints, soon: None, victim: str, nth: int) -> None:
    with local_groups(config_of(), checkpoints.source(), dead=[victim]) as groups:
        groups.fabric.faults.kill(victim, nth, lambda source, destination, tag: is_probe(tag))
        found = groups.prefill[0].calibrate(groups.decode_info)
        assert found.failed
        groups.kill(victim)
        for rank in groups.ranks:
            if rank.control.address != victim:
                rank.peer_lost(victim)


def test_a_prefill_rank_that_falls_silent_loses_the_region(
    start: Callable[..., LocalGroups], checkpoints: Checkpoints, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(decode_node.probe, "HELD_S", 0.1)
    groups = start()
    receiver = groups.decode[0]
    receiver.transfer_loop.call(
        lambda: receiver.agent.parts.probes.on_request("prefill-0", m.ProbeRequest(7, RING_BYTES))
    )
    receiver.check()
    assert receiver.statistics()["transfer"].ring_in_use_bytes == RING_BYTES
    groups.settle()
    check_exact(groups, checkpoints)


def test_a_request_beside_a_probe_waits_for_the_ring_and_is_exact(
    start: Callable[..., LocalGroups], checkpoints: Checkpoints, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(decode_node.probe, "HELD_S", 0.3)
    groups = start()
    receiver = groups.decode[0]
    receiver.transfer_loop.call(
        lambda: receiver.agent.parts.probes.on_request("prefill-0", m.ProbeRequest(7, RING_BYTES))
    )
    check_exact(groups, checkpoints)
    assert receiver.statistics()["transfer"].watermarks > 0, "they had to wait"


def test_messages_of_no_probe_are_dropped(
    start: Callable[..., LocalGroups], checkpoints: Checkpoints
) -> None:
    """Late ones, or larger than what was asked for."""
    groups = start()
    receiver, sender = groups.decode[0], groups.prefill[0]
    receiver.transfer_loop.call(
        lambda: receiver.agent.parts.probes.on_request("prefill-0", m.ProbeRequest(7, 512))
    )

    def send(number: int, nbytes: int) -> None:
        sender.transport.send("decode-0", probe_tag(number), sender.agent.space.buffer.view(0, nbytes))

    for number, nbytes in ((7, 513), (8, 512)):
        sender.transfer_loop.call(partial(send, number, nbytes))
    until(lambda: receiver.transport.statistics().discards_done >= 2, receiver.transport.statistics)
    assert receiver.transport.statistics().receives_done == 0
    receiver.transfer_loop.call(lambda: receiver.agent.parts.probes.on_ended("prefill-0", m.ProbeEnded(7)))
    groups.settle()
    check_exact(groups, checkpoints)
