"""Prefill attention against float64, over pools where nothing may be read that no query sees.

`test_kernels_interpreted.py` runs this file again with the Triton kernel, in Triton's interpreter; a GPU runs the
same cases and longer ones.
"""

from __future__ import annotations

import itertools
from dataclasses import replace

import pytest
import torch
from attention_cases import DEVICES, Case, Inputs, prepare
from hypothesis import given, settings
from hypothesis import strategies as st
from slow_parameters import sampled

from kernels.attention.prefill import (
    PackedQueries,
    PrefillTile,
    prefill_attention,
    prefill_splits_of,
    prefill_tile_of,
)
from kernels.attention.splits import Splits
from kernels.dispatch import INTERPRETED

SMALL = PrefillTile(rows=16, tokens=16, warps=4, stages=2)
CASES = {
    "whole prompt": Case((21,), (21,)),
    "chunks of several sequences": Case((40, 9, 17), (11, 9, 1)),
    "window": Case((40,), (25,), window=7),
    "window of one": Case((9,), (5,), window=1),
    "window larger than the context": Case((19,), (12,), window=64),
    "soft cap": Case((33,), (7,), softcap=1.5),
    "sinks": Case((20, 4), (9, 3), sinks=True),
    "all": Case((40,), (25,), window=20, softcap=5.0, sinks=True),
    "nothing to do for one": Case((7, 0, 9), (3, 0, 9)),
    "bfloat16": Case((20,), (12,), q_dtype=torch.bfloat16, kv_dtype=torch.bfloat16),
    "float16": Case((20,), (12,), q_dtype=torch.float16, kv_dtype=torch.float16),
    "int8": Case((20,), (12,), q_dtype=torch.bfloat16, kv_dtype=torch.int8),
    "e4m3": Case((20,), (12,), q_dtype=torch.bfloat16, kv_dtype=torch.float8_e4m3fn, window=5),
    "e5m2": Case((20,), (12,), kv_dtype=torch.float8_e5m2),
    "head of 80": Case((19,), (5,), k_dim=80, v_dim=80, pool_dim=80),
    "K larger than V": Case((19,), (5,), k_dim=24, v_dim=16, pool_dim=24),
    "group of 3": Case((19,), (13,), group=3),
    "group larger than a block": Case((19,), (5,), kv_heads=1, group=37),
}


SPLIT_SAMPLE = {"window", "sinks", "nothing to do for one", "int8"}
"""Cases that `make test` also runs with several splits; the interpreter takes long for each."""


def packed(case: Case, inputs: Inputs) -> PackedQueries:
    counts, device = torch.tensor(case.queries), inputs.q.device
    return PackedQueries(
        rows=inputs.rows,
        firsts=(counts.cumsum(0) - counts).to(device),
        starts=(torch.tensor(case.lengths) - counts).int().to(device),
        counts=counts.to(device),
        most=max(case.queries),
    )


def check(case: Case, device: str, splits: Splits | None = None, tile: PrefillTile | None = None) -> None:
    inputs = prepare(case, device)
    queries = packed(case, inputs)
    out = torch.full(inputs.expected.shape, float("nan"), dtype=case.q_dtype, device=device)
    prefill_attention(
        inputs.q, inputs.kv, inputs.table, queries, inputs.params, out, splits=splits, tile=tile
    )
    worst = float((out.double().cpu() - inputs.expected).abs().max())
    assert worst <= inputs.worst, f"{worst} is more than rounding explains, {inputs.worst}"


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize(
    ("name", "splits"),
    sampled(itertools.product(CASES, (1, 3)), lambda name, splits: splits == 1 or name in SPLIT_SAMPLE),
)
def test_equals_the_definition(name: str, splits: int, device: str) -> None:
    check(CASES[name], device, Splits(splits, 16), SMALL)


def check_random_shape(device: str, data: st.DataObject) -> None:
    far = 40 if device == "cpu" else 600
    pool_dim = data.draw(st.sampled_from([16, 20, 32] if device == "cpu" else [64, 80, 96, 128, 192, 256]))
    lengths = data.draw(st.lists(st.integers(1, far), min_size=1, max_size=3))
    case = Case(
        lengths=tuple(lengths),
        counts=tuple(data.draw(st.integers(1, min(length, 12))) for length in lengths),
        kv_heads=data.draw(st.integers(1, 3)),
        group=data.draw(st.integers(1, 16)),
        k_dim=data.draw(st.integers(1, pool_dim)),
        v_dim=data.draw(st.integers(1, pool_dim)),
        pool_dim=pool_dim,
        q_dtype=data.draw(st.sampled_from([torch.float32, torch.bfloat16])),
        kv_dtype=data.draw(st.sampled_from([torch.float32, torch.bfloat16, torch.int8, torch.float8_e4m3fn])),
        window=data.draw(st.none() | st.integers(1, far)),
        softcap=data.draw(st.none() | st.floats(0.5, 50)),
        sinks=data.draw(st.booleans()),
        seed=data.draw(st.integers(0, 9)),
    )
    splits = Splits(data.draw(st.sampled_from([1, 2, 8])), data.draw(st.integers(1, far)))
    check(case, device, splits, SMALL if device == "cpu" else None)


@pytest.mark.parametrize("device", DEVICES)
@settings(max_examples=4 if INTERPRETED else 8)
@given(data=st.data())
def test_random_shapes(device: str, data: st.DataObject) -> None:
    check_random_shape(device, data)


@pytest.mark.slow
@pytest.mark.parametrize("device", ["cpu"] if INTERPRETED else [])
@settings(max_examples=30)
@given(data=st.data())
def test_more_random_shapes(device: str, data: st.DataObject) -> None:
    check_random_shape(device, data)


@pytest.mark.gpu
@pytest.mark.parametrize("q_dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("kv_dtype", [torch.bfloat16, torch.int8, torch.float8_e4m3fn, torch.float8_e5m2])
def test_long_chunks(q_dtype: torch.dtype, kv_dtype: torch.dtype) -> None:
    sizes = Case((1500, 33, 700), (300, 33, 150), kv_heads=2, group=4, k_dim=128, v_dim=128, pool_dim=128)
    case = replace(sizes, q_dtype=q_dtype, kv_dtype=kv_dtype)
    check(case, "cuda:0")
    check(replace(case, window=333, softcap=30.0, sinks=True), "cuda:0")


@pytest.mark.gpu
@pytest.mark.parametrize("kv_dtype", [torch.bfloat16, torch.int8])
def test_a_question_behind_a_long_prefix(kv_dtype: torch.dtype) -> None:
    sizes = Case((4160, 70), (64, 3), kv_heads=2, group=4, k_dim=128, v_dim=128, pool_dim=128)
    case = replace(sizes, q_dtype=torch.bfloat16, kv_dtype=kv_dtype)
    check(case, "cuda:0")
    check(replace(case, sinks=True), "cuda:0", Splits(40, 128))
    check(replace(case, window=900, softcap=30.0, sinks=True), "cuda:0", Splits(40, 128))


@pytest.mark.gpu
def test_replays_in_a_cuda_graph_behind_other_prefixes() -> None:
    case = Case((900, 40), (12, 5))
    inputs = prepare(case, "cuda:0")
    queries = packed(case, inputs)
    out = torch.empty(inputs.expected.shape, device="cuda:0")
    arguments = (inputs.q, inputs.kv, inputs.table, queries, inputs.params, out)
    prefill_attention(*arguments)  # compiles
    whole = out.clone()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        prefill_attention(*arguments)
    for start, count in ((0, 0), (0, 12), (333, 7), (888, 12)):
        queries.starts[0], queries.counts[0] = start, count
        out.fill_(7.0)
        graph.replay()
        replayed = out.clone()
        out.fill_(7.0)
        prefill_attention(*arguments)
        assert torch.equal(out, replayed)
        assert torch.equal(out[12:], whole[12:])
        assert (out[count:12] == 7.0).all()


@pytest.mark.parametrize("device", DEVICES)
def test_tokens_of_no_sequence_are_left_alone(device: str) -> None:
    case = Case((20, 9), (7, 3))
    inputs = prepare(case, device)
    queries = packed(case, inputs)
    queries.counts[0] = 3
    out = torch.full(inputs.expected.shape, 7.0, device=device)
    prefill_attention(
        inputs.q, inputs.kv, inputs.table, queries, inputs.params, out, splits=Splits(3, 16), tile=SMALL
    )
    assert (out[3:7] == 7.0).all()
    assert float((out[7:].double().cpu() - inputs.expected[7:]).abs().max()) <= inputs.worst


def test_splits_fill_the_device(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kernels.attention.prefill.multiprocessors", lambda device: 132)
    monkeypatch.setattr("kernels.attention.prefill.shared_bytes", lambda device: shared)
    device, shared = torch.device("cuda"), 227 << 10
    wide, few = PrefillTile(128, 128, 8, 3), PrefillTile(64, 64, 4, 3)
    assert prefill_splits_of(16, 8192, wide, device) == Splits(8, 512)
    assert prefill_splits_of(16, 600, wide, device) == Splits(2, 512)
    assert prefill_splits_of(67, 8192, wide, device) == Splits(1, 512), "a second wave would cost more"
    assert prefill_splits_of(512, 8192, wide, device) == Splits(1, 512)
    assert prefill_splits_of(67, 8192, few, device) == Splits(3, 512), "two programs on a multiprocessor"
    shared = 99 << 10
    assert prefill_splits_of(67, 8192, few, device) == Splits(1, 512)


def test_a_tile_has_room() -> None:
    def tile(shared_bytes: int, element_bytes: int = 2) -> PrefillTile:
        return prefill_tile_of(torch.bfloat16, 8192, 128, element_bytes, shared_bytes)

    hopper, ampere, ada = 227 << 10, 163 << 10, 99 << 10
    assert tile(hopper) == PrefillTile(128, 128, 8, 3)
    assert tile(hopper, 1) == tile(ampere) == PrefillTile(128, 64, 8, 3)
    assert prefill_tile_of(torch.bfloat16, 1024, 128, 2, ada, few_blocks=True) == PrefillTile(64, 64, 4, 3)
    assert prefill_tile_of(torch.bfloat16, 1024, 128, 1, hopper, few_blocks=True) == tile(hopper, 1)
    assert prefill_tile_of(torch.bfloat16, 1024, 128, 2, 64 << 10, few_blocks=True) == tile(64 << 10)
    assert tile(ada) == tile(80 << 10) == PrefillTile(128, 64, 8, 2)
    assert tile(64 << 10) == PrefillTile(64, 32, 4, 2)


def test_bad_numbers() -> None:
    inputs = prepare(Case((5, 3)), "cpu")
    numbers = torch.zeros(2, dtype=torch.int64)
    queries = PackedQueries(inputs.rows, numbers, numbers, numbers[:1], 1)
    with pytest.raises(ValueError, match=r"counts must be .*\[2\]"):
        prefill_attention(inputs.q, inputs.kv, inputs.table, queries, inputs.params, torch.zeros(2, 8, 16))
