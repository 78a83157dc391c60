"""The transfer plan against numbers counted by hand, and against the definition."""

from __future__ import annotations

from pathlib import Path

import pytest
from architectures import CLASSED, save
from hypothesis import given
from hypothesis import strategies as st

from disagg.cli import app as cli
from disagg.core.errors import ConfigError
from disagg.core.types import KVLayout, LayerClass, Span
from disagg.plan.draw import draw_plan
from disagg.plan.transfer import PlanRequest, compute_plan, describe_bytes, plan_lines
from staging.routes import Route

PNG = b"\x89PNG\r\n\x1a\n"


def layout(layers: int = 32, kv_heads: int = 8) -> KVLayout:
    return KVLayout(layers=layers, kv_heads=kv_heads, head_dim=128, dtype="bfloat16")


def test_four_to_two_by_hand() -> None:
    plan = compute_plan(
        PlanRequest(layout=layout(), prefill_tp=4, decode_tp=2, tokens=8192, chunk_tokens=256)
    )
    everything = Span(0, 32)
    assert [total.route for total in plan.routes] == [
        Route(0, 0, everything, Span(0, 2)),
        Route(1, 0, everything, Span(2, 4)),
        Route(2, 1, everything, Span(4, 6)),
        Route(3, 1, everything, Span(6, 8)),
    ]
    # A token: 32 layers x (K + V) x 8 heads x 128 elements x 2 bytes = 131072 bytes; a route has a quarter.
    assert plan.nbytes == 8192 * 131072
    assert {total.nbytes for total in plan.routes} == {8192 * 131072 // 4}
    # A segment: 8 layers x 2 x 256 tokens x 2 heads x 256 bytes = 2 MiB, under the limit of 8 MiB: one a group.
    assert plan.chunks == 32
    assert {total.segments for total in plan.routes} == {32 * 4}
    assert plan.segments == 512
    assert (plan.pairs, plan.control_messages) == (4, 2 * 4 * 32)


def test_a_last_chunk_that_is_not_full_and_cut_segments() -> None:
    request = PlanRequest(
        layout=layout(layers=2, kv_heads=1),
        prefill_tp=1,
        decode_tp=1,
        tokens=300,
        chunk_tokens=256,
        layer_groups=2,
        max_segment_bytes=64 * 512,
    )
    plan = compute_plan(request)
    # One token of one layer is 512 bytes, so a segment has at most 64 tokens: 256 / 64 = 4 cuts, 44 / 64 -> 1.
    assert plan.chunks == 2
    assert plan.segments == 2 * (4 + 1)
    assert plan.nbytes == 300 * 2 * 512
    assert plan.control_messages == 2 * 1 * 2


def test_a_prompt_shorter_than_a_chunk() -> None:
    plan = compute_plan(PlanRequest(layout=layout(), prefill_tp=1, decode_tp=1, tokens=5))
    assert (plan.chunks, plan.segments, plan.nbytes) == (1, 4, 5 * 131072)


def test_replicated_heads_are_sent_once_and_reported() -> None:
    plan = compute_plan(PlanRequest(layout=layout(kv_heads=2), prefill_tp=8, decode_tp=1, tokens=256))
    assert plan.nbytes == 256 * 32 * 2 * 2 * 256, "once, although four ranks hold each head"
    assert not any("copies" in line or "each copy" in line for line in plan_lines(plan))
    to_many = compute_plan(PlanRequest(layout=layout(kv_heads=2), prefill_tp=1, decode_tp=8, tokens=256))
    assert to_many.nbytes == 4 * plan.nbytes
    assert "decode ranks hold each head 4 times on average; each copy is sent once" in plan_lines(to_many)


SIZES = st.integers(1, 9)


@given(SIZES, SIZES, SIZES, SIZES, st.integers(1, 700), st.integers(1, 300))
def test_bytes_equal_what_the_destinations_lack(
    kv_heads: int, layers: int, prefill_tp: int, decode_tp: int, tokens: int, chunk: int
) -> None:
    request = PlanRequest(
        layout=layout(layers, kv_heads),
        prefill_tp=prefill_tp,
        decode_tp=decode_tp,
        tokens=tokens,
        chunk_tokens=chunk,
        max_segment_bytes=1 << 15,
    )
    plan = compute_plan(request)
    cells = sum(len(shard.layers) * len(shard.heads) for shard in plan.destinations)
    assert plan.nbytes == cells * tokens * 2 * 256
    assert plan.segments >= plan.chunks * len(plan.routes)
    assert plan.control_messages == 2 * plan.pairs * -(-tokens // chunk)


def test_the_text_shows_the_shards_of_the_ranks() -> None:
    plan = compute_plan(PlanRequest(layout=layout(kv_heads=4), prefill_tp=2, decode_tp=1))
    text = "\n".join(plan_lines(plan))
    assert "prefill, 2 ranks\n  r0 [##..] heads 0-1, layers 0-31\n" in text
    assert "  r1 [..##] heads 2-3, layers 0-31\n" in text
    assert "decode, 1 rank\n  r0 [####] heads 0-3, layers 0-31\n" in text


@pytest.mark.parametrize("name", ["prefill_tp", "decode_tp", "tokens", "chunk_tokens", "layer_groups"])
def test_sizes_below_one(name: str) -> None:
    values = {"prefill_tp": 1, "decode_tp": 1, name: 0}
    with pytest.raises(ConfigError, match=f"{name} = 0 is not allowed; it must be at least 1"):
        PlanRequest(layout=layout(), **values)


@pytest.mark.parametrize(("kv_heads", "tp", "to"), [(8, 4, 2), (2, 8, 1), (4, 3, 2), (64, 16, 12)])
def test_drawing(tmp_path: Path, kv_heads: int, tp: int, to: int) -> None:
    request = PlanRequest(layout=layout(kv_heads=kv_heads), prefill_tp=tp, decode_tp=to)
    draw_plan(compute_plan(request), tmp_path / "plan.png")
    assert (tmp_path / "plan.png").read_bytes().startswith(PNG)


def test_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "plan.png"
    flags = f"plan --kv-heads 8 --layers 32 --prefill-tp 4 --decode-tp 2 --out {out}"
    assert cli.run(flags.split()) == 0
    shown = capsys.readouterr().out
    assert "8192 tokens in 32 chunks, each in 4 layer groups: 1 GiB in 512 segments of at most 8 MiB" in shown
    assert "256 control messages between the ranks = 2 x 4 pairs of ranks x 32 chunks" in shown
    assert "prefill r3" in shown
    assert out.read_bytes().startswith(PNG)


def test_each_class_of_layers_has_its_own_routes() -> None:
    """24 layers of 8 heads, 6 of 1 head that is four times as large: that one is on every rank."""
    shape = KVLayout(24, 8, 128, "bfloat16", more=(LayerClass(6, 1, 512),))
    plan = compute_plan(PlanRequest(layout=shape, prefill_tp=4, decode_tp=2, tokens=256, chunk_tokens=256))
    assert shape.token_bytes == 24 * 8 * 512 + 6 * 2048
    assert sorted(total.route for total in plan.routes if total.route.layers.start < 24) == [
        Route(rank, rank // 2, Span(0, 24), Span(2 * rank, 2 * rank + 2)) for rank in range(4)
    ]
    others = [total.route for total in plan.routes if total.route.layers.start >= 24]
    assert {route.dst_rank for route in others} == {0, 1}
    assert all(route.heads == Span(0, 1) and Span(24, 30).covers(route.layers) for route in others)
    assert sum(len(route.layers) for route in others) == 2 * 6
    assert plan.nbytes == 256 * (24 * 8 * 512 + 2 * 6 * 2048), "both decode ranks get the one head"
    assert "  r3 [#] head 0, layers 24-29 of 512" in plan_lines(plan)[0].splitlines()


def test_a_model_whose_layers_differ_is_planned(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    model = save(CLASSED["gemma4"](), tmp_path / "model")
    flags = ["plan", "--model", str(model), "--prefill-tp", "4", "--decode-tp", "2", "--gpu-memory-gb", "80"]
    assert cli.run(flags) == 0
    shown = capsys.readouterr().out
    assert "r1 [.#] head 1, layers 0-1 of 16" in shown
    assert "r1 [#] head 0, layers 2-3 of 32" in shown
    assert "prefill, 4 ranks, each" in shown
    assert cli.run([*flags, "--out", str(tmp_path / "plan.png")]) == 2
    assert "its plan is printed, not drawn" in capsys.readouterr().err


@pytest.mark.parametrize("model", [[], ["--random-init", "llama-3.1-8b"]], ids=["sizes", "model"])
def test_kv_that_is_quantized_on_its_way(model: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    sizes = model or ["--kv-heads", "8", "--layers", "32"]
    flags = ["plan", *sizes, "--prefill-tp", "4", "--decode-tp", "2", "--decode-kv-dtype", "int8"]
    assert cli.run(flags) == 0
    shown = capsys.readouterr().out
    assert "each in 4 layer groups: 520 MiB in 512 segments" in shown, "260 bytes for 512"
    assert "KV is computed in bfloat16 and sent in int8: 0.508 of its bytes" in shown


@pytest.mark.parametrize(
    ("dtype", "sent"), [("int8", "bfloat16"), ("bfloat16", "float16"), ("int8", "float8_e4m3fn")]
)
def test_kv_that_cannot_be_sent_so(dtype: str, sent: str, capsys: pytest.CaptureFixture[str]) -> None:
    flags = (
        f"plan --kv-heads 8 --layers 2 --prefill-tp 1 --decode-tp 1 --dtype {dtype} --decode-kv-dtype {sent}"
    )
    assert cli.run(flags.split()) == 2
    said = capsys.readouterr().err
    assert f"KV in {dtype} cannot be sent as {sent}" in said
    assert "quantized from floats to one of float8_e4m3fn, float8_e5m2, int8" in said


def test_a_picture_that_cannot_be_written(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    flags = f"plan --kv-heads 1 --layers 1 --prefill-tp 1 --decode-tp 1 --out {tmp_path / 'no' / 'x.png'}"
    assert cli.run(flags.split()) == 2
    assert "cannot be written: No such file or directory" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("nbytes", "text"),
    [
        (0, "0 B"),
        (999, "999 B"),
        (1000, "0.977 KiB"),
        (1536, "1.5 KiB"),
        (1 << 30, "1 GiB"),
        (5 << 40, "5 TiB"),
    ],
)
def test_bytes_for_people(nbytes: int, text: str) -> None:
    assert describe_bytes(nbytes) == text
