"""The plan of models with recurrent layers, against the states of running models and the receiver's own count."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from architectures import HYBRIDS, MORE_HYBRIDS, save
from model_helpers import make_runner
from slow_parameters import sampled

from decode_node.coverage import Coverage
from disagg.cli import app as cli
from disagg.core.config.read import Config, DecodeConfig, ModelConfig, PrefillConfig
from disagg.core.errors import ConfigError, UnsupportedModelError
from disagg.core.types import KVLayout, Span, StateClass
from disagg.model.load.source import ModelSource
from disagg.plan import states as planned
from disagg.plan.draw import draw_plan
from disagg.plan.memory import memory_lines, plan_memory, planned_model
from disagg.plan.states import with_state
from disagg.plan.transfer import PlanRequest, compute_plan, plan_lines
from staging.shards import layout_shards

LAYOUT = KVLayout(4, 8, 128, "bfloat16", states=(StateClass(6, 1, 1000), StateClass(6, 16, 4096)))
TINY = ModelConfig(random_init="tiny-granite-h")


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("name", sampled([*HYBRIDS, *MORE_HYBRIDS], lambda name: name in HYBRIDS))
def test_states_are_those_of_a_running_model(name: str, dtype: torch.dtype, tmp_path: Path) -> None:
    source = ModelSource.from_directory(save((HYBRIDS | MORE_HYBRIDS)[name](), tmp_path))
    found, running = with_state(source, source.spec(dtype), dtype), make_runner(source, dtype=dtype).spec
    assert found.layout == running.layout
    assert found.layout.state_bytes > 0
    assert (found.any_chunks, found.cache_refused) == (running.any_chunks, running.cache_refused)


def test_other_models_have_no_state() -> None:
    source = ModelSource.random_init("tiny-llama")
    spec = source.spec(torch.float32)
    assert with_state(source, spec, torch.float32) is spec


@pytest.mark.parametrize(("prefill_tp", "decode_tp"), [(1, 1), (4, 2), (2, 4)])
def test_the_bytes_are_those_that_receivers_expect(prefill_tp: int, decode_tp: int) -> None:
    request = PlanRequest(layout=LAYOUT, prefill_tp=prefill_tp, decode_tp=decode_tp, tokens=300)
    plan = compute_plan(request)
    assert plan.state_bytes == decode_tp * LAYOUT.state_bytes == decode_tp * 6 * (1000 + 16 * 4096)
    assert plan.nbytes - plan.state_bytes == 300 * LAYOUT.token_bytes
    for rank in range(decode_tp):
        totals = [total for total in plan.routes if total.route.dst_rank == rank]
        expected = Coverage(tuple(total.route for total in totals), Span(0, 300), LAYOUT).total_bytes
        assert sum(total.nbytes for total in totals) == expected
    assert plan.control_messages == 2 * sum(
        len({(one.route.src_rank, one.route.dst_rank) for one in routes}) * leases
        for routes, leases in (
            ([one for one in plan.routes if one.route.layers.start < 4], plan.chunks),
            ([one for one in plan.routes if one.route.layers.start >= 4], 1),
        )
    )


def test_a_model_without_attention_hands_over_states_only(tmp_path: Path) -> None:
    plan = compute_plan(PlanRequest(layout=LAYOUT, has_kv=False, prefill_tp=1, decode_tp=1, tokens=300))
    assert plan.nbytes == plan.state_bytes == LAYOUT.state_bytes
    assert plan.control_messages == 2
    side = "prefill, 1 rank: no attention, so no KV\n  r0 recurrent state of 390 KiB"
    assert side in plan_lines(plan)
    with pytest.raises(ConfigError, match="no KV: its plan is printed, not drawn"):
        draw_plan(plan, tmp_path / "plan.png")


def test_states_meet_no_pipeline_stages() -> None:
    with pytest.raises(ConfigError, match="a model with recurrent layers needs tp >= 1 and pp = 1"):
        layout_shards(LAYOUT, 2, 2)


def test_drawing_names_the_state_in_the_title(tmp_path: Path) -> None:
    draw_plan(compute_plan(PlanRequest(layout=LAYOUT, prefill_tp=4, decode_tp=2)), tmp_path / "plan.png")
    assert (tmp_path / "plan.png").stat().st_size > 10_000


def test_the_memory_of_states() -> None:
    config = Config(
        model=TINY, prefill=PrefillConfig(tp=2, cached_states=40), decode=DecodeConfig(tp=1, max_requests=8)
    )
    prefill, decode = plan_memory(config, 80 * 10**9)
    layout = planned_model(config).decode.layout
    each, half = layout.state_bytes, layout.state_bytes_of(2)
    assert (each, half) == (28160, 28160 // 2 + 256), "both ranks hold B and C"
    assert (prefill.request_state_bytes, decode.request_state_bytes) == (half, each)
    assert (prefill.max_requests, prefill.cached_states) == (256, 40)
    assert prefill.budget.state_bytes == (256 + 1 + 40) * half
    assert decode.cached_states == 1, "for preempted requests"
    assert decode.budget.state_bytes == (8 + 1 + 1) * each
    lines = memory_lines([prefill, decode])
    assert lines[1] == (
        "prefill, recurrent states: 4.06 MiB on each rank = 256 requests (prefill.max_requests) + 40 cached "
        "(prefill.cached_states) + 1 for padding, 14 KiB each"
    )
    assert lines[4].endswith(
        "= 8 requests (decode.max_requests) + 1 cached (decode.cached_states) + 1 for padding, 27.5 KiB each"
    )
    many = Config(model=TINY, prefill=PrefillConfig(tp=2, cached_states=10_000), decode=DecodeConfig(tp=1))
    assert plan_memory(many, 10**9)[0].cached_states == 10**8 // half, "a tenth of the GPU at most"


def test_states_limit_an_automatic_number_of_requests() -> None:
    config = Config(model=TINY, prefill=PrefillConfig(tp=2), decode=DecodeConfig(tp=1, mem_fraction=0.5))
    layout = planned_model(config).decode.layout
    prefill, decode = plan_memory(config, 10**7)
    for group, ranks in ((prefill, 2), (decode, 1)):
        each = layout.state_bytes_of(ranks)
        left_bytes = group.budget.limit_bytes - group.budget.weights_bytes
        assert group.max_requests == left_bytes // 4 // each < 256
        assert group.limited_by_states
    assert decode.cached_states == decode.max_requests // 8
    assert (
        f"= {decode.max_requests} requests (decode.max_requests, automatic: states of requests take at most 1/4 of "
        "the memory beside the weights) + "
    ) in memory_lines([decode])[1]
    large = plan_memory(config, 80 * 10**9)
    assert [(one.max_requests, one.limited_by_states) for one in large] == [(256, False)] * 2


def test_with_a_pool_of_given_size_states_may_use_the_whole_gpu_as_on_a_rank() -> None:
    config = Config(
        model=TINY,
        prefill=PrefillConfig(tp=1, mem_fraction=0.5),
        decode=DecodeConfig(tp=1, mem_fraction=0.5, pool_tokens=1024),
    )
    half, whole = plan_memory(config, 10**7)
    assert (half.budget.limit_bytes, whole.budget.limit_bytes) == (10**7 // 2, 10**7)
    left_bytes = 10**7 - whole.budget.weights_bytes
    assert whole.max_requests == left_bytes // 4 // whole.request_state_bytes > half.max_requests


def test_a_state_that_needs_values_is_one_line(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def needs_values(*_: object) -> None:
        raise NotImplementedError("Cannot copy out of meta tensor; no data!\nmore")

    monkeypatch.setattr(planned, "_one_token", needs_values)
    why = (
        "GraniteMoeHybridForCausalLM: the size of its recurrent state is unknown without weights: Cannot copy"
    )
    source = ModelSource.random_init("tiny-granite-h")
    with pytest.raises(UnsupportedModelError, match=why):
        with_state(source, source.spec(torch.float32), torch.float32)
    flags = "plan --random-init tiny-granite-h --prefill-tp 2 --decode-tp 1 --gpu-memory-gb 80"
    assert cli.run(flags.split()) == 0
    shown = capsys.readouterr().out
    assert [line for line in shown.splitlines() if "state" in line] == [
        f"{why} out of meta tensor; no data!; this plan leaves the state out"
    ]


def test_command(capsys: pytest.CaptureFixture[str]) -> None:
    flags = "plan --random-init tiny-granite-h --prefill-tp 2 --decode-tp 2 --tokens 300 --gpu-memory-gb 80"
    assert cli.run(flags.split()) == 0
    shown = capsys.readouterr().out
    assert "decode, recurrent states: " in shown
    assert "= 2 x 2 pairs of ranks x (2 chunks + 1 state)" in shown
    assert (
        "a request transfers 103 KiB = 75 KiB of KV + 28 KiB of recurrent state, 14 KiB to each decode rank"
        in shown
    )
    assert "  r1 recurrent state of 14 KiB: heads 6-11 of 12\n" in shown
    assert "states 2-3" in shown
    assert "states 6-7 │  6-11" in shown, "rank 1 sends its heads"


def test_command_for_a_model_without_attention(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    model = save(HYBRIDS["mamba2"](), tmp_path)
    assert cli.run(["plan", "--model", str(model), "--prefill-tp", "1", "--decode-tp", "1"]) == 0
    assert "decode, 1 rank: no attention, so no KV" in capsys.readouterr().out
