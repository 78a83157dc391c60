"""NIXL beside ours: descriptors that name a slice's bytes once each, and ranks over an agent that copies in memory.

With NIXL installed, the command is run for real as well.
"""

from __future__ import annotations

import ctypes
import importlib.util
import json
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import numpy as np
import pytest

from disagg.bench.common.processes import Processes, SilentError
from disagg.bench.common.report import Label, Measurement, Result
from disagg.bench.nixl import peer as nixl_peer
from disagg.bench.nixl.descriptors import Descriptors, PoolMemory, built, chosen, prepared, unit_tokens
from disagg.bench.nixl.peer import Pair, measure
from disagg.bench.nixl.ranks import WAYS, load
from disagg.bench.transfer.pools import TransferBench
from disagg.cli.app import run
from disagg.core.errors import ConfigError, InvariantError, TransportError
from disagg.core.types import KVLayout, Shard, Span
from disagg.kv.pages import slots_of

LAYOUT = KVLayout(layers=2, kv_heads=4, head_dim=8, dtype="bfloat16")
PAIRS = {"1 to 1": (1, 1), "1 to 2": (1, 2), "2 to 1": (2, 1), "3 to 2": (3, 2), "8 to 4": (8, 4)}
SMALL = ["--device", "cpu", "--layers", "2", "--kv-heads", "4", "--head-dim", "16", "--repeats", "1"]
RINGS = ["--ring-bytes", "256KiB", "--staging-bytes", "256KiB", "--in-flight", "2"]
FOUND = importlib.util.find_spec("nixl")
INSTALLED = FOUND is not None and FOUND.origin is not None
"""The folder of this file is importable as `nixl` too, as a package without an origin."""


def bench(tp: tuple[int, int] = (1, 1), tokens: int = 70, repeats: int = 1) -> TransferBench:
    sizes = {"prefill_page_size": 16, "decode_page_size": 16}
    options = {"in_flight": 2, "repeats": repeats, "cuda": False, "prefill_tp": tp[0], "decode_tp": tp[1]}
    return TransferBench(LAYOUT, (tokens,), **options, **sizes)


# --- descriptors


@pytest.fixture(params=PAIRS.values(), ids=PAIRS.keys())
def pair(request: pytest.FixtureRequest) -> Pair:
    return Pair.of(bench(request.param))


def memories(pair: Pair) -> tuple[PoolMemory, PoolMemory]:
    head_bytes = LAYOUT.head_bytes
    return (
        PoolMemory(1 << 40, 256, head_bytes, LAYOUT.planes, pair.shards[0]),
        PoolMemory(3, 320, head_bytes, LAYOUT.planes, pair.shards[1]),
    )


def request_slots(pages: list[int], page_size: int, tokens: int) -> Any:
    return slots_of(pages, page_size, Span(0, tokens)).long().numpy()


SLOTS = (request_slots([9, 3, 4, 1, 12], 16, 70), request_slots([2, 7, 8, 19, 5], 16, 70))


def bytes_of(rows: Descriptors) -> list[int]:
    """Addresses of all bytes, in the order in which they are named."""
    return [address + i for address, length, _ in rows.tolist() for i in range(length)]


def cells(memory: PoolMemory, part: Shard, slots: Any) -> set[int]:
    """Every byte of the slice, the slow way."""
    shard, found = memory.shard, set()
    for layer in part.layers:
        for side in range(2):
            for slot in slots.tolist():
                for head in part.heads:
                    plane = (layer - shard.layers.start) * 2 + side
                    row = (plane * memory.slots + slot) * len(shard.heads) + head - shard.heads.start
                    first = memory.address + row * memory.head_bytes
                    found.update(range(first, first + memory.head_bytes))
    return found


def chosen_rows(pair: Pair, page_sizes: tuple[int, int] = (16, 16)) -> list[Descriptors]:
    both = memories(pair)
    unit = unit_tokens(both, pair.part, page_sizes, 70)
    return [
        prepared(memory, pair.part, unit)[chosen(memory, pair.part, slots, unit)]
        for memory, slots in zip(both, SLOTS, strict=True)
    ]


@pytest.mark.parametrize("way", WAYS)
def test_every_byte_of_the_slice_is_named_once(pair: Pair, way: str) -> None:
    sides = built(memories(pair), pair.part, SLOTS) if way == "built" else chosen_rows(pair)
    for memory, slots, rows in zip(memories(pair), SLOTS, sides, strict=True):
        named = bytes_of(rows)
        assert len(set(named)) == len(named)
        assert set(named) == cells(memory, pair.part, slots)


@pytest.mark.parametrize("way", WAYS)
def test_what_is_written_is_the_same_cell(pair: Pair, way: str) -> None:
    """Piece by piece: layer, side, token and head of the source are those of the destination."""
    both = memories(pair)
    sides = built(both, pair.part, SLOTS) if way == "built" else chosen_rows(pair)
    assert sides[0][:, 1].tolist() == sides[1][:, 1].tolist()
    assert not sides[0][:, 2].any()
    there = dict(zip(bytes_of(sides[0]), bytes_of(sides[1]), strict=True))
    for token in (0, 15, 16, 69):
        for plane in range(2 * len(pair.part.layers)):
            source, destination = (
                int(memory.planes(pair.part)[plane]) + int(slots[token]) * memory.row_bytes
                for memory, slots in zip(both, SLOTS, strict=True)
            )
            assert there[source] == destination


def test_whole_heads_go_page_by_page_and_neighbours_together() -> None:
    pair = Pair.of(bench((1, 1)))
    source, _ = built(memories(pair), pair.part, SLOTS)
    token_bytes = 4 * LAYOUT.head_bytes
    # pages 3, 4 and 7, 8 are neighbours on both sides
    assert source[:4, 1].tolist() == [16 * token_bytes, 32 * token_bytes, 16 * token_bytes, 6 * token_bytes]
    assert len(source) == 4 * 2 * LAYOUT.layers


@pytest.mark.parametrize("tp", [(1, 2), (2, 1)])
def test_a_part_of_the_heads_goes_token_by_token(tp: tuple[int, int]) -> None:
    pair = Pair.of(bench(tp))
    source, _ = built(memories(pair), pair.part, SLOTS)
    assert source[:, 1].tolist() == [2 * LAYOUT.head_bytes] * (70 * 2 * LAYOUT.layers)


@pytest.mark.parametrize(
    ("tp", "page_sizes", "tokens", "unit"),
    [
        ((1, 1), (16, 16), 128, 16),
        ((1, 1), (64, 16), 128, 16),
        ((1, 1), (16, 16), 70, 2),
        ((2, 1), (16, 16), 128, 1),
        ((1, 2), (16, 16), 128, 1),
    ],
)
def test_prepared_pieces_are_as_large_as_nothing_else_allows(
    tp: tuple[int, int], page_sizes: tuple[int, int], tokens: int, unit: int
) -> None:
    pair = Pair.of(bench(tp))
    assert unit_tokens(memories(pair), pair.part, page_sizes, tokens) == unit


def test_a_pair_and_its_share() -> None:
    pair = Pair.of(bench((1, 2)))
    assert (pair.part.heads, pair.routes) == (Span(0, 2), 2)
    assert pair.nbytes(bench(), 10) == 10 * LAYOUT.token_bytes // 2


# --- ranks over an agent in this process


@dataclass
class FakeHandle:
    rows: tuple[Any, Any]
    release: Callable[[], None] = lambda: None


class FakeAgent:
    """As much of NIXL's agent as a rank uses; a transfer copies within this process, when its state is queried."""

    lost = 0
    """Descriptors that a transfer leaves out."""
    state = "DONE"

    def __init__(self, name: str, config: Any) -> None:
        assert config.backends == ["UCX"]
        self.name, self.registered = name, []

    def register_memory(self, tensor: Any) -> Any:
        self.registered.append(tensor)
        return tensor

    def deregister_memory(self, tensor: Any) -> None:
        self.registered = [held for held in self.registered if held is not tensor]

    def get_agent_metadata(self) -> bytes:
        return self.name.encode()

    def add_remote_agent(self, metadata: bytes) -> str:
        return metadata.decode()

    def prep_xfer_dlist(self, owner: str, rows: Any, kind: str, backends: list[str]) -> Any:
        assert (owner in ("NIXL_INIT_AGENT", "destination"), kind, backends) == (True, "DRAM", ["UCX"])
        return rows

    def get_xfer_descs(self, rows: Any, kind: str) -> Any:
        assert kind == "DRAM"
        return rows

    def make_prepped_xfer(
        self, operation: str, mine: Any, first: Any, theirs: Any, second: Any
    ) -> FakeHandle:
        assert operation == "WRITE"
        return FakeHandle((mine[first], theirs[second]))

    def initialize_xfer(self, operation: str, mine: Any, theirs: Any, agent: str) -> FakeHandle:
        assert (operation, agent) == ("WRITE", "destination")
        return FakeHandle((mine, theirs))

    def transfer(self, handle: FakeHandle) -> str:
        return "PROC"

    def check_xfer_state(self, handle: FakeHandle) -> str:
        mine, theirs = handle.rows
        for (source, length, _), (destination, _, _) in list(
            zip(mine.tolist(), theirs.tolist(), strict=True)
        )[self.lost :]:
            ctypes.memmove(destination, source, length)
        return self.state


class Here(Processes):
    """Ranks in this process, called directly."""

    def start(self, name: str, gpu: str | None, make: Callable[..., Any], *arguments: object) -> Any:
        held = make(*arguments)
        answers: list[Any] = []

        def call(method: str, *given: object) -> Any:
            return getattr(held, method)(*given)

        return SimpleNamespace(
            call=call,
            start_call=lambda method, *given: answers.append(call(method, *given)),
            answer=lambda timeout_s: answers.pop(),
            end=held.close,
        )


@pytest.fixture
def agent(monkeypatch: pytest.MonkeyPatch) -> type[FakeAgent]:
    fake = type("Agent", (FakeAgent,), {})
    module = ModuleType("nixl")
    module.nixl_agent, module.nixl_agent_config = fake, SimpleNamespace  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "nixl", module)
    monkeypatch.setattr(nixl_peer, "Processes", Here)
    return fake


@pytest.mark.parametrize("tp", PAIRS.values(), ids=PAIRS.keys())
def test_ranks_move_every_byte_both_ways(tp: tuple[int, int], agent: type[FakeAgent]) -> None:
    given = bench(tp, repeats=2)
    found = measure(given, Pair.of(given), 70, threads=0)
    assert [one.way for one in found] == list(WAYS)
    for one in found:
        assert len(one.moved) == 2
        assert not one.given_up
        assert all(moved.descriptors_s > 0 and moved.transfer_s > 0 for moved in one.moved)


def test_a_descriptor_that_is_left_out_is_found(agent: type[FakeAgent]) -> None:
    agent.lost = 1
    with pytest.raises(InvariantError, match="layer 0, k, token 0, head 0"):
        measure(bench((2, 1)), Pair.of(bench((2, 1))), 70, threads=0)


def test_a_transfer_that_fails_is_an_error(agent: type[FakeAgent]) -> None:
    agent.state = "ERR"
    with pytest.raises(TransportError, match="with ERR"):
        measure(bench(), Pair.of(bench()), 70, threads=0)


def test_a_transfer_without_end_is_given_up(agent: type[FakeAgent], monkeypatch: pytest.MonkeyPatch) -> None:
    def silent(self: Here, *given: Any) -> Any:
        remote = start(self, *given)
        remote.answer = stuck
        return remote

    def stuck(timeout_s: float) -> None:
        raise SilentError("asleep")

    start = Here.start
    monkeypatch.setattr(Here, "start", silent)
    found = measure(bench(), Pair.of(bench()), 70, threads=0)
    assert [(one.way, one.moved, one.given_up) for one in found] == [("prepared", (), True)]


def test_repeats_end_when_their_time_is_up(agent: type[FakeAgent], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(nixl_peer, "MOST_S", -1.0)
    given = bench(repeats=5)
    assert [len(one.moved) for one in measure(given, Pair.of(given), 70, threads=0)] == [1, 1]


# --- the command


def nixl_lines(tmp_path: Path, flags: list[str]) -> list[dict[str, Any]]:
    out = ["--peer", "nixl", "--out", str(tmp_path)]
    assert run(["bench", "transfer", *SMALL, *RINGS, *flags, *out]) == 0
    lines = json.loads((tmp_path / "bench_transfer.json").read_text())["results"]
    return [line for line in lines if line["measured"] == "NIXL"]


@pytest.fixture
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """Our own side is not measured again: its figures, as another test has them for real."""
    labels: dict[str, Label] = {"tokens": 70, "in_flight": 1}
    ceiling = Measurement("device copy", "GB/s", (4.0,))
    ours = [
        Result("one", Measurement("pool to pool", "GB/s", (2.0,)), ceiling, labels | {"leases_ahead": True}),
        Result("one", Measurement("pool to pool", "us", (10.0,)), None, labels | {"leases_ahead": True}),
        Result(
            "its leases", Measurement("pool to pool", "us", (20.0,)), None, labels | {"leases_ahead": False}
        ),
    ]
    monkeypatch.setattr("disagg.bench.transfer.pools.run", lambda *given: ours)


def check_lines(lines: list[dict[str, Any]]) -> None:
    """Of one request of 70 tokens, TP 1 -> 2."""
    assert len(lines) == 4 * len(WAYS)
    compared = [line for line in lines if "ratio" in line]
    assert len(compared) == 2 * len(WAYS)
    for line in compared:
        assert line["ours"]["measured"] == "pool to pool"
        assert line["ours"]["unit"] == line["unit"] == "us"
        assert line["labels"]["tokens"] == 70
        assert line["ratio"] == pytest.approx(line["median"] / line["ours"]["median"])
    assert {line["labels"]["descriptors"] for line in lines} == {2 * 2 * 70}
    assert {line["labels"]["bytes"] for line in lines} == {70 * 2 * 2 * 2 * 16 * 2}
    assert "one of 2 such slices (heads 0-1 of 4)" in next(line["definition"] for line in lines[3:])


def test_the_command_compares(
    agent: type[FakeAgent], quick: None, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    lines = nixl_lines(tmp_path, ["--tokens", "70", "--decode-tp", "2"])
    check_lines(lines)
    assert {line["ours"]["median"] for line in lines if "ours" in line} == {10.0}
    assert {line["ceiling"]["median"] for line in lines if "ceiling" in line} == {4.0}
    assert "x ours" in capsys.readouterr().out


def test_what_was_given_up_is_said(
    agent: type[FakeAgent],
    quick: None,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr(
        nixl_peer, "measure", lambda *given: [nixl_peer.NixlResult("prepared", (), given_up=True)]
    )
    (line,) = nixl_lines(tmp_path, ["--tokens", "70"])
    assert line["labels"]["given_up"]
    assert "ratio" not in line
    assert "a lower bound, not a measurement" in capsys.readouterr().out


@pytest.mark.skipif(not INSTALLED, reason="needs NIXL: pip install nixl")
def test_nixl_itself_moves_every_byte(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("disagg.bench.common.ceilings.raw_rates", lambda *options: {})
    check_lines(nixl_lines(tmp_path, ["--tokens", "70", "--decode-tp", "2"]))


def test_without_nixl_one_line_says_how_to_install_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "nixl.py").write_text(
        "raise ImportError('no nixl here')"
    )  # a process of its own looks for it
    monkeypatch.syspath_prepend(tmp_path)
    assert run(["bench", "transfer", "--device", "cpu", "--peer", "nixl"]) == 2
    said = capsys.readouterr().err
    assert "no nixl here" in said
    assert "pip install nixl" in said


def test_a_library_that_cannot_be_loaded_is_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "nixl", None)
    with pytest.raises(ConfigError, match="pip install nixl"):
        load()


def test_descriptors_are_what_nixl_takes() -> None:
    pair = Pair.of(bench())
    for rows in (*built(memories(pair), pair.part, SLOTS), *chosen_rows(pair)):
        assert (rows.dtype, rows.shape[1], rows.flags.c_contiguous) == (np.uint64, 3, True)
