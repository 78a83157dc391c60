"""Decode attention against float64, over pools where nothing may be read that is not the sequence's own.

`test_kernels_interpreted.py` runs this file again with the Triton kernels, in Triton's interpreter; a GPU runs the
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

from kernels.attention.common import AttentionParams
from kernels.attention.decode import DecodeTile, decode_attention, decode_splits_of, tile_of
from kernels.attention.splits import Splits
from kernels.dispatch import INTERPRETED

CASES = {
    "plain": Case((9, 1, 40)),
    "window": Case((9, 1, 40), window=7),
    "window of one": Case((9, 2), window=1),
    "soft cap": Case((33,), softcap=1.5),
    "sinks": Case((9, 40), sinks=True),
    "all": Case((9, 40), window=20, softcap=5.0, sinks=True),
    "padding row": Case((0, 17, 0), sinks=True),
    "only padding": Case((0,)),
    "bfloat16": Case((50, 3), q_dtype=torch.bfloat16, kv_dtype=torch.bfloat16),
    "float16": Case((50, 3), q_dtype=torch.float16, kv_dtype=torch.float16),
    "float32 from bfloat16": Case((50, 3), kv_dtype=torch.bfloat16),
    "int8": Case((50, 3), q_dtype=torch.bfloat16, kv_dtype=torch.int8, window=30),
    "e4m3": Case((50, 3), q_dtype=torch.bfloat16, kv_dtype=torch.float8_e4m3fn, window=30),
    "int8 of float16": Case((50, 1), q_dtype=torch.float16, kv_dtype=torch.int8),
    "e5m2": Case((50, 3), kv_dtype=torch.float8_e5m2, softcap=4.0),
    "head of 80": Case((19,), k_dim=80, v_dim=80, pool_dim=80),
    "K larger than V": Case((19,), k_dim=24, v_dim=16, pool_dim=24),
    "V larger than K": Case((19,), k_dim=16, v_dim=20, pool_dim=24),
    "17 query heads per KV head": Case((19,), kv_heads=1, group=17),
    "70 query heads per KV head": Case((19,), kv_heads=1, group=70, sinks=True),
}

SPLIT_SAMPLE = (
    "plain",
    "window of one",
    "all",
    "padding row",
    "only padding",
    "bfloat16",
    "float16",
    "int8",
    "e5m2",
    "V larger than K",
    "70 query heads per KV head",
)


def run(inputs: Inputs, case: Case, **more: object) -> torch.Tensor:
    out = torch.full(inputs.expected.shape, float("nan"), dtype=case.q_dtype, device=inputs.q.device)
    lengths = torch.tensor(case.lengths, dtype=torch.int32, device=inputs.q.device)
    decode_attention(inputs.q, inputs.kv, inputs.table, inputs.rows, lengths, inputs.params, out, **more)  # type: ignore[arg-type]
    return out


def check(case: Case, device: str, **more: object) -> None:
    inputs = prepare(case, device)
    found = run(inputs, case, **more)
    worst = float((found.double().cpu() - inputs.expected).abs().max())
    assert worst <= inputs.worst, f"{worst} is more than rounding explains, {inputs.worst}"


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize(
    ("name", "splits"),
    sampled(itertools.product(CASES, (1, 4)), lambda name, splits: splits == 1 or name in SPLIT_SAMPLE),
)
def test_equals_the_definition(name: str, splits: int, device: str, poison_empty: None) -> None:
    check(CASES[name], device, splits=Splits(splits, 16), tile=DecodeTile(tokens=16, stages=2))


def check_random_shape(device: str, data: st.DataObject) -> None:
    far = 40 if device == "cpu" else 3000
    pool_dim = data.draw(st.sampled_from([16, 20, 32] if device == "cpu" else [64, 80, 96, 128, 192, 256]))
    case = Case(
        lengths=tuple(data.draw(st.lists(st.integers(0, far), min_size=1, max_size=3))),
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
    tile = DecodeTile(tokens=16) if device == "cpu" else None
    splits = Splits(data.draw(st.sampled_from([1, 2, 8])), data.draw(st.integers(1, far)))
    check(case, device, splits=splits, tile=tile)


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
@pytest.mark.parametrize(
    "kv_dtype",
    [torch.float32, torch.bfloat16, torch.float16, torch.int8, torch.float8_e4m3fn, torch.float8_e5m2],
)
def test_long_contexts(q_dtype: torch.dtype, kv_dtype: torch.dtype) -> None:
    sizes = Case((4097, 33, 9001), kv_heads=4, group=7, k_dim=128, v_dim=128, pool_dim=128)
    case = replace(sizes, q_dtype=q_dtype, kv_dtype=kv_dtype)
    check(case, "cuda:0")
    check(replace(case, window=4000, softcap=30.0, sinks=True), "cuda:0")


@pytest.mark.gpu
def test_replays_in_a_cuda_graph_with_other_lengths() -> None:
    inputs = prepare(Case((900, 40), kv_heads=2), "cuda:0")
    lengths = torch.tensor((900, 40), device="cuda:0")
    out = torch.empty(inputs.expected.shape, device="cuda:0")
    arguments = (inputs.q, inputs.kv, inputs.table, inputs.rows, lengths, inputs.params, out)
    decode_attention(*arguments)  # compiles
    whole = out.clone()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        decode_attention(*arguments)
    for count in (0, 1, 333, 900):
        lengths[0] = count
        graph.replay()
        replayed = out.clone()
        decode_attention(*arguments)
        assert torch.equal(out, replayed)
        assert torch.equal(out[1], whole[1])


@pytest.mark.parametrize("device", DEVICES)
def test_a_context_that_fits_one_split_is_not_joined(device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    case = Case((32, 33, 0, 100), sinks=True)
    partial: list[torch.Tensor] = []
    empty = torch.empty

    def poisoned(*sizes: int, **options: object) -> torch.Tensor:
        found = empty(*sizes, **options)  # type: ignore[call-overload]
        if len(sizes) == 4:
            partial.append(found.fill_(float("nan")))
        return found

    monkeypatch.setattr(torch, "empty", poisoned)
    inputs = prepare(case, device)
    partial.clear()
    found = run(inputs, case, splits=Splits(3, 32), tile=DecodeTile(tokens=16, stages=2))
    written = ~partial[0].isnan().any(-1).cpu()  # [n, q_heads, splits]
    assert float((found.double().cpu() - inputs.expected).abs().max()) <= inputs.worst
    assert written[:, 0].tolist() == [[False] * 3, [True, True, False], [False] * 3, [True] * 3]
    assert bool((written == written[:, :1]).all())


def test_splits_fill_the_device(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kernels.attention.decode.multiprocessors", lambda device: 132)
    device = torch.device("cuda")
    assert decode_splits_of(64 * 8, 1 << 17, device) == Splits(16, 4096)  # none of them but in long contexts
    assert decode_splits_of(24 * 8, 4096, device) == Splits(1, 4096)
    assert decode_splits_of(16 * 8, 4096, device) == Splits(7, 640)
    assert decode_splits_of(8 * 8, 4096, device) == Splits(32, 128)
    assert decode_splits_of(8, 1 << 17, device) == Splits(128, 64)
    assert decode_splits_of(8, 512, device) == Splits(8, 64)
    assert decode_splits_of(1024 * 8, 1 << 17, device) == Splits(1, 4096)


def test_tiles_by_the_number_of_programs() -> None:
    hopper, small = 227 << 10, 99 << 10
    tokens = [tile_of(torch.bfloat16, 2, 128, load, hopper).tokens for load in (0.5, 1.0, 2.4, 4.0, 7.0)]
    assert tokens == [64, 128, 128, 64, 32]
    stages = [
        tile_of(torch.bfloat16, 2, 128, load, hopper).stages for load in (4.9, 5.0, 7.9, 8.1, 10.9, 11.0)
    ]
    assert stages == [2, 3, 3, 2, 2, 3], "as many programs at the same time as the launch has, if possible"
    assert tile_of(torch.bfloat16, 2, 128, 1.0, small).tokens == 64, "the large tile does not fit"
    assert tile_of(torch.bfloat16, 2, 256, 1.0, hopper) == tile_of(torch.bfloat16, 2, 256)
    assert tile_of(torch.bfloat16, 1, 128, 1.0, hopper) == tile_of(torch.bfloat16, 1, 128)


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"q": torch.zeros(2, 7, 16)}, "not a multiple of 2 KV heads"),
        ({"q": torch.zeros(2, 8, 17)}, r"q must be .*at most 16"),
        ({"q": torch.zeros(2, 8, 16).double()}, "q must be float"),
        ({"out": torch.zeros(2, 8, 17)}, "out must be"),
        ({"out": torch.zeros(2, 8, 16).half()}, "out must be"),
        ({"rows": torch.zeros(3).long()}, r"rows must be .*\[2\]"),
        ({"lengths": torch.zeros(2)}, "lengths must be"),
        ({"params": AttentionParams(1.0, sinks=torch.zeros(3))}, "sinks must be"),
        ({"params": AttentionParams(1.0, alibi_slopes=torch.zeros(8))}, "kernels do not support ALiBi"),
        ({"params": AttentionParams(1.0, chunk_tokens=4)}, "kernels do not support attention in chunks"),
        ({"table": torch.zeros(3, 9).long()}, "table must be"),
        ({"k_scales": torch.zeros(8, 2)}, "k_scales must be given for 8-bit quantized values"),
        ({"v": torch.zeros(8, 2, 8)}, "k and v must be"),
    ],
)
def test_bad_arguments(change: dict[str, object], said: str) -> None:
    inputs = prepare(Case((5, 3)), "cpu")
    found = {
        "q": inputs.q,
        "table": inputs.table,
        "rows": inputs.rows,
        "lengths": torch.tensor([5, 3]),
        "params": inputs.params,
        "out": torch.zeros(2, 8, 16),
    }
    if "out" not in change and "q" in change:
        found["out"] = torch.zeros(2, change["q"].shape[1], 16)  # type: ignore[attr-defined]
    kv = replace(inputs.kv, **{k: x for k, x in change.items() if k not in found})  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=said):
        decode_attention(kv=kv, **{**found, **{k: x for k, x in change.items() if k in found}})  # type: ignore[arg-type]
