"""Packed steps of recurrent layers: one model call, states in place, the formula of each token's position."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import transformers
from architectures import HYBRIDS, MORE_HYBRIDS, save
from model_helpers import load_plain, make_runner, prompts
from plain_greedy import plain_greedy
from slow_parameters import sampled
from transformers import AutoModelForCausalLM

from disagg.core.errors import ConfigError, InvariantError
from disagg.core.types import SamplingParams, Span
from disagg.kv.mamba_pool import MambaPool, StatePlace
from disagg.model.batch import SequenceSlice, StepBatch
from disagg.model.graphs import Agreed, DecodeGraphs
from disagg.model.recurrent.registry import RECURRENT, pack_recurrent
from disagg.model.recurrent.step import PackedStates, decode_step, step_of
from disagg.model.runner import ModelRunner
from disagg.model.unsplit import generate_unsplit
from kernels.dispatch import INTERPRETED

CPU = torch.device("cpu")
TOKENS, INTERPRETED_TOKENS = 8, 4
PARAMS = SamplingParams(max_tokens=TOKENS, ignore_eos=True)
TWO_FORMULAS = ("zamba2", "nemotron-h")
"""Models that bound the time step of a prompt's tokens only."""
KINDS = ("qwen3-next", "kimi-linear", "bamba", "jamba", "zamba", "lfm2")
"""A model of each kernel and shape."""


def test_each_registered_class_is_one_of_transformers() -> None:
    for name in RECURRENT:
        package, _, kind = name.partition(".")
        module = getattr(transformers.models, package)
        assert hasattr(getattr(module, f"modeling_{package}"), kind), name


@pytest.mark.parametrize(
    ("name", "chunk_tokens"),
    sampled(
        [(name, size) for name in (*TWO_FORMULAS, "jamba", "falcon-h1") for size in (1, 13, 64)],
        lambda name, size: size in (1, {"zamba2": 13, "nemotron-h": 64}.get(name)),
    ),
)
def test_chunks_of_any_size_are_exact(name: str, chunk_tokens: int, tmp_path: Path) -> None:
    directory = save((HYBRIDS | MORE_HYBRIDS)[name](), tmp_path)
    plain, own = load_plain(directory), prompts()
    expected = [plain_greedy(plain, prompt, TOKENS) for prompt in own]
    assert generate_unsplit(make_runner(directory), own, PARAMS, chunk_tokens=chunk_tokens) == expected


@pytest.mark.skipif(not INTERPRETED, reason="the interpreter of Triton is off")
@pytest.mark.parametrize("name", KINDS)
def test_the_kernels_give_the_tokens_of_generate(name: str, tmp_path: Path) -> None:
    directory = save((HYBRIDS | MORE_HYBRIDS)[name](), tmp_path)
    plain, own = load_plain(directory), prompts()[:2]
    runner = make_runner(directory, recurrent_kernels="triton", attention="torch", fused=False)
    found = generate_unsplit(runner, own, PARAMS, chunk_tokens=5)
    assert found == [plain_greedy(plain, prompt, TOKENS) for prompt in own]


class LaunchedGraphs(DecodeGraphs):
    """Decode steps as they are recorded: padded, with inputs on the device only; launched instead of replayed."""

    recorded = True

    def record(self, agreed: Agreed) -> None:
        pass

    def run(self, batch: StepBatch) -> torch.Tensor:
        numbers = torch.tensor(self.step_numbers(4, batch.sequences))
        return self._compute(numbers, 128)[: len(batch.sequences)]


@pytest.mark.skipif(not INTERPRETED, reason="the interpreter of Triton is off")
@pytest.mark.parametrize(
    ("name", "how"),
    [
        pytest.param("qwen3-next", "triton", marks=pytest.mark.slow),
        ("jamba", "triton"),
        ("lfm2", "torch"),
    ],
)
def test_decode_steps_need_no_host(
    name: str, how: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    directory = save(HYBRIDS[name](), tmp_path)
    monkeypatch.setattr("disagg.model.attention.kernel_step.unsupported", lambda *sizes: "")
    monkeypatch.setattr("disagg.model.runner.DecodeGraphs", LaunchedGraphs)
    monkeypatch.setattr(ModelRunner, "recordable", True)
    runner = make_runner(directory, recurrent_kernels=how, attention="triton", fused=False)
    runner.record(4)
    assert runner.recorded
    plain, own = load_plain(directory), prompts()[:2]
    params = SamplingParams(max_tokens=INTERPRETED_TOKENS, ignore_eos=True)
    found = generate_unsplit(runner, own, params, chunk_tokens=5)
    assert found == [plain_greedy(plain, prompt, INTERPRETED_TOKENS) for prompt in own]


@pytest.mark.gpu
@pytest.mark.parametrize("how", ["torch", "triton"])
@pytest.mark.parametrize("name", KINDS)
def test_recorded_steps_give_the_tokens_of_generate(name: str, how: str, tmp_path: Path) -> None:
    directory = save((HYBRIDS | MORE_HYBRIDS)[name](), tmp_path)
    runner = make_runner(directory, device="cuda:0", recurrent_kernels=how)
    runner.record(4)
    plain, own = load_plain(directory), prompts()
    expected = [plain_greedy(plain, prompt, TOKENS) for prompt in own]
    assert generate_unsplit(runner, own, PARAMS, chunk_tokens=13) == expected


@pytest.mark.skipif(INTERPRETED, reason="Triton runs here")
def test_kernels_that_do_not_run_are_refused_at_start(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"model\.recurrent_kernels = triton"):
        make_runner(save(HYBRIDS["lfm2"](), tmp_path), recurrent_kernels="triton")


def test_a_mixed_step_is_one_model_call(tmp_path: Path) -> None:
    runner = make_runner(save(HYBRIDS["zamba2"](), tmp_path))
    rows = [_row(runner, number) for number in range(3)]
    ids = tuple(prompts()[2])
    alone = [runner.forward(StepBatch((SequenceSlice(rows[0], 0, ids[:9], 9),))).clone()]
    calls, forward = [], runner.model.forward

    def counted(*args: Any, **kwargs: Any) -> Any:
        calls.append(kwargs["input_ids"].shape)
        return forward(*args, **kwargs)

    runner.model.forward = counted
    mixed = runner.forward(
        StepBatch(
            (
                SequenceSlice(rows[0], 9, (5,), 9),
                SequenceSlice(rows[2], 0, ids[:9], 9),
                SequenceSlice(rows[1], 0, ids[:1], 30),
            )
        )
    )
    assert calls == [(1, 11)]
    torch.testing.assert_close(mixed[1:2], alone[0], rtol=1e-4, atol=1e-4)
    later = runner.forward(StepBatch((SequenceSlice(rows[2], 9, (5,), 9),)))
    torch.testing.assert_close(later, mixed[:1], rtol=1e-4, atol=1e-4)
    assert runner.states is not None
    runner.states.pool.check()


def test_a_step_of_device_inputs_is_that_of_the_host(tmp_path: Path) -> None:
    """A recorded decode step has only rows, padded by the trash row, which has a slot of its own."""
    runner = make_runner(save(HYBRIDS["qwen3-next"](), tmp_path), rows=2)
    assert runner.states is not None
    assert runner.states.pool.slots == 3
    batch = StepBatch(tuple(SequenceSlice(row, 7, (1,), 7) for row in (1, 0)))
    host = step_of(batch, CPU)
    device = decode_step(torch.tensor([1, 0, runner.req_to_token.trash_row]))
    assert host.prompts is None
    assert device.prompts is None
    assert host.answers is not None
    assert device.answers is not None
    for name in ("slots", "firsts", "counts", "begun"):
        assert torch.equal(getattr(host.answers, name), getattr(device.answers, name)[:2])
    assert host.answers.host is device.answers.host is None


def test_another_kv_pool_needs_no_second_memory_of_states(tmp_path: Path) -> None:
    """On a GPU the new KV pool fills the memory: nothing is left for a second pool of states."""
    runner = make_runner(save(HYBRIDS["falcon-h1"](), tmp_path))
    made: list[int] = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(MambaPool, "__init__", lambda *_: made.append(1))
        runner.resize(2 * runner.pool.slots)
    prompt = prompts()[0]
    assert not made
    assert generate_unsplit(runner, [prompt], PARAMS) == [plain_greedy(load_plain(tmp_path), prompt, TOKENS)]


def test_prompts_and_answers_are_told_apart() -> None:
    ones = (
        SequenceSlice(4, 0, (1,), 9),  # a prompt's first token
        SequenceSlice(3, 8, (1,), 9),  # and its last
        SequenceSlice(2, 9, (1,), 9),
        SequenceSlice(1, 9, (1,)),  # of unknown prompt length
        SequenceSlice(0, 9, (1, 2)),
    )
    step = step_of(StepBatch(ones), CPU)
    assert step.prompts is not None
    assert step.answers is not None
    assert step.prompts.host == ((4, 0, 1, False), (3, 1, 1, True), (0, 4, 2, True))
    assert (step.answers.slots.tolist(), step.answers.firsts.tolist()) == ([2, 1], [2, 3])
    for start, tokens in ((8, (1, 2)), (9, (1, 2))):
        with pytest.raises(InvariantError, match="token by token"):
            step_of(StepBatch((SequenceSlice(0, start, tokens, 9),)), CPU)


def test_models_with_other_states_or_activations_stay_as_they_are() -> None:
    config = HYBRIDS["lfm2"]()
    model, states = AutoModelForCausalLM.from_config(config), PackedStates("torch", CPU)
    places = [StatePlace(layer, 0, "conv") for layer in (0, 2)]
    assert not pack_recurrent(model, [*places, StatePlace(1, 0, "conv")], states)
    assert not pack_recurrent(model, [*places, StatePlace(2, 0, "recurrent")], states)
    model.model.layers[2].conv.activation = "gelu"
    assert not pack_recurrent(model, places, states)
    model.model.layers[2].conv.activation = "silu"
    assert pack_recurrent(model, places, states)
    with pytest.raises(InvariantError, match="before its states were allocated"):
        model.model.layers[0].conv(torch.zeros(1, 1, config.hidden_size))
    assert not pack_recurrent(AutoModelForCausalLM.from_config(MORE_HYBRIDS["minimax"]()), places, states)


def _row(runner: ModelRunner, number: int) -> int:
    row = runner.req_to_token.alloc()
    runner.req_to_token.set_slots(row, 0, list(Span(16 + 64 * number, 80 + 64 * number)))
    return row


def test_which_steps_call_their_hook_between_the_layers(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Loads of cached KV are waited for between layers, except if the step launches layers before the first call."""
    own = (SequenceSlice(row, 0, (1, 2), 2) for row in range(2))
    two = StepBatch(tuple(own))
    one = StepBatch(two.sequences[:1])
    runner = make_runner(save(HYBRIDS["qwen3-next"](), tmp_path))
    assert runner.computes_by_layer(two)
    apart = make_runner(save(HYBRIDS["qwen3-next"](), tmp_path), deterministic=True)
    assert [apart.computes_by_layer(batch) for batch in (one, two)] == [True, False]
    plain = make_runner(save(HYBRIDS["qwen3-next"](), tmp_path))
    monkeypatch.setattr(plain, "states", None)
    assert plain.computes_by_layer(two)
    monkeypatch.setattr(plain, "_graphs", SimpleNamespace(takes=lambda _: True))
    with pytest.raises(
        AttributeError, match="run"
    ):  # of the recording, which would launch the step as a whole
        plain.forward(two)
    hooks: list[int] = []
    monkeypatch.setattr(plain, "_forward", lambda _, hook, *rest: hook(7))
    plain.forward(two, hooks.append, layerwise=True)
    assert hooks == [7]
