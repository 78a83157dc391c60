"""The transfer benchmark: real ranks on a CPU, exact bytes, and no figure when they are wrong."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from disagg.bench.common.noise import NoisyPool
from disagg.bench.common.rank_reports import RankReports
from disagg.bench.common.raw_ucx import raw_rates
from disagg.bench.common.report import Measurement
from disagg.bench.transfer.pools import TransferBench
from disagg.cli.app import run
from disagg.core.errors import InvariantError, TransportError
from disagg.core.types import KVLayout, RequestKey, Shard, Span
from disagg.kv.pool import MHATokenToKVPool
from transport.control import messages as m

SMALL = ["--device", "cpu", "--layers", "2", "--kv-heads", "4", "--head-dim", "16", "--repeats", "1"]
RINGS = ["--ring-bytes", "256KiB", "--staging-bytes", "256KiB", "--in-flight", "2"]
LAYOUT = KVLayout(layers=3, kv_heads=4, head_dim=8, dtype="bfloat16")


@pytest.mark.parametrize(
    "flags",
    [
        ["--tokens", "1,33"],
        ["--tokens", "70", "--prefill-tp", "2", "--prefill-page-size", "1", "--dtype", "float8_e4m3fn"],
        ["--tokens", "70", "--decode-tp", "2", "--decode-page-size", "64"],
    ],
    ids=["1 to 1", "2 to 1", "1 to 2"],
)
def test_the_command_writes_figures(
    flags: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    rate = Measurement("raw UCX", "GB/s", (1.0,))
    monkeypatch.setattr("disagg.bench.common.ceilings.raw_rates", lambda *options: {4096: rate})
    assert run(["bench", "transfer", *SMALL, *RINGS, *flags, "--out", str(tmp_path)]) == 0
    assert "one at a time" in capsys.readouterr().out
    lines = json.loads((tmp_path / "bench_transfer.json").read_text())["results"]
    moved = [line for line in lines if line["measured"] == "pool to pool"]
    assert len(moved) == 4 * len(flags[1].split(","))
    for line in moved:
        assert 0 < line["low"] <= line["median"] <= line["high"]
        assert line["labels"]["transport"] == "ucx-shm"
    assert {line["measured"] for line in lines} == {"pool to pool", "raw UCX", "device copy"}


@pytest.mark.gpu
@pytest.mark.parametrize(
    ("options", "path"),
    [
        ("--transport=auto", "peer memory"),
        ("--completion-words", "peer memory"),
        ("--transport=ucx", "staging"),
    ],
)
@pytest.mark.parametrize("tp", [("1", "1"), ("2", "1"), ("1", "2")], ids=" to ".join)
def test_ranks_on_gpus_move_every_byte(
    tp: tuple[str, str], options: str, path: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Processes that each see one GPU, which they share when there is only one."""
    rate = Measurement("raw UCX", "GB/s", (1.0,))
    monkeypatch.setattr("disagg.bench.common.ceilings.raw_rates", lambda *options: {4096: rate})
    flags = ["--device", "cuda", "--layers", "4", "--tokens", "1,300", "--repeats", "2", "--in-flight", "4"]
    sizes = ["--prefill-tp", tp[0], "--decode-tp", tp[1], "--prefill-page-size", "1"]
    rings = ["--ring-bytes", "4MiB", "--staging-bytes", "4MiB"]
    assert run(["bench", "transfer", *flags, *sizes, *rings, options, "--out", str(tmp_path)]) == 0
    lines = json.loads((tmp_path / "bench_transfer.json").read_text())["results"]
    assert {line["labels"]["path"] for line in lines if line["measured"] == "pool to pool"} == {path}


def test_the_wire_alone() -> None:
    rates = raw_rates((8, 64 << 10), (None, None), 1 << 20, 2)
    assert [len(rate.values) for rate in rates.values()] == [2, 2]


@pytest.fixture
def noisy() -> tuple[MHATokenToKVPool, NoisyPool]:
    pool = MHATokenToKVPool(2, 10, 2, LAYOUT.head_dim, torch.bfloat16)
    pool.poison()
    return pool, NoisyPool(pool, Shard(1, Span(1, 3), Span(2, 4)), LAYOUT)


def test_noise_is_found_where_it_was_written(noisy: tuple[MHATokenToKVPool, NoisyPool]) -> None:
    _, pool = noisy
    pool.fill(5, torch.tensor([7, 2, 9]))
    pool.take(5, torch.tensor([7, 2, 9]))
    pool.check_untouched()


def test_noise_of_another_request_is_wrong(noisy: tuple[MHATokenToKVPool, NoisyPool]) -> None:
    _, pool = noisy
    pool.fill(5, torch.tensor([7, 2]))
    with pytest.raises(InvariantError, match="wrong rows of request 4"):
        pool.take(4, torch.tensor([7, 2]))


def test_one_wrong_byte_is_named(noisy: tuple[MHATokenToKVPool, NoisyPool]) -> None:
    pool, noise = noisy
    noise.fill(0, torch.tensor([7, 2]))
    pool.buffer.view(torch.uint8)[1, 0, 2, 1, 3] ^= 1
    with pytest.raises(
        InvariantError, match="1 wrong rows of request 0; the first: layer 2, k, token 1, head 3"
    ):
        noise.take(0, torch.tensor([7, 2]))


def test_a_byte_beside_the_slots_is_found(noisy: tuple[MHATokenToKVPool, NoisyPool]) -> None:
    pool, noise = noisy
    pool.buffer.view(torch.uint8)[1, 1, 0, 0, 0] = 0
    with pytest.raises(InvariantError, match="outside of the requests' slots"):
        noise.check_untouched()


def test_two_shards_hold_parts_of_one_noise() -> None:
    whole = MHATokenToKVPool(3, 4, 4, LAYOUT.head_dim, torch.bfloat16)
    part = MHATokenToKVPool(1, 4, 2, LAYOUT.head_dim, torch.bfloat16)
    slots = torch.arange(4)
    NoisyPool(whole, Shard(0, Span(0, 3), Span(0, 4)), LAYOUT).fill(1, slots)
    NoisyPool(part, Shard(1, Span(2, 3), Span(2, 4)), LAYOUT).fill(1, slots)
    assert torch.equal(
        whole.buffer[2:, :, :, 2:].contiguous().view(torch.int16), part.buffer.view(torch.int16)
    )


def test_pages_are_shuffled_and_belong_to_one_request_each() -> None:
    bench = TransferBench(LAYOUT, (50,), in_flight=3, repeats=1, cuda=False)
    for case in bench.cases():
        pages = case.pages(16, bench.pool_slots(16))
        flat = [page for owned in pages for page in owned]
        assert len(pages) == case.count
        assert len(set(flat)) == len(flat) == 4 * case.count
        assert 0 not in flat
        assert flat != sorted(flat)


def test_a_failed_rank_ends_the_wait() -> None:
    reports = RankReports()
    reports.note(m.RankFailed(RequestKey("x"), 1, 0, "transport", "the wire broke"))
    with pytest.raises(TransportError, match="the wire broke"):
        reports.wait("Landed", 1)


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        (["--dtype", "float64"], "--dtype float64"),
        (["--tokens", "0"], "1 or more"),
        (["--head-dim", "3"], "multiple of 4"),
        (["--transport", "inproc"], "is not one of 'auto', 'ucx'"),
        (["--transport", "pigeon"], "one of"),
    ],
)
def test_bad_input(flags: list[str], said: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["bench", "transfer", "--device", "cpu", *flags]) == 2
    assert said in capsys.readouterr().err
