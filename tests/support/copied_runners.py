"""Copies of runners. Each test of a whole system builds the same models again, which takes most of its time."""

from __future__ import annotations

import copy
from collections import OrderedDict
from functools import partial
from types import FunctionType, SimpleNamespace
from typing import Any

import torch

from disagg.model.load.source import ModelSource
from disagg.model.runner import ModelRunner
from disagg.model.runner_options import RunnerOptions

PLAIN = ("llama", "qwen3", "mistral", "gemma2")
"""Types of models that keep nothing outside of their modules."""
MOST_COPIED = 24
"""Runners that are kept, the latest ones; each has a pool of a megabyte or less."""
_kept: OrderedDict[object, ModelRunner] = OrderedDict()


def copied_runner(
    source: ModelSource, options: RunnerOptions, *, collective: Any, device: torch.device
) -> ModelRunner:
    """Stands in for `ModelRunner`: a second runner with the same arguments is a copy of the first one as it was new.

    The parameters, which no step writes, are shared. Plain models have no cached states.
    """
    new = partial(ModelRunner, source, options, collective=collective, device=device)
    plain = source.config.model_type in PLAIN and source.quantization is None and not options.deterministic
    if device.type != "cpu" or not plain:
        return new()
    values = [str(value) for name, value in vars(options).items() if not name.startswith("cached_states")]
    key = (source.fingerprint, *values, collective.rank, collective.size)
    if key not in _kept:
        runner = new()
        _require_no_closures(runner)
        _kept[key] = _copy(runner, SimpleNamespace(rank=collective.rank, size=collective.size))
        if len(_kept) > MOST_COPIED:
            _kept.popitem(last=False)
        return runner
    _kept.move_to_end(key)
    return _copy(_kept[key], collective)


def _copy(runner: ModelRunner, collective: Any) -> ModelRunner:
    shared = [runner.source, runner.model.config, *runner.model.parameters()]
    memo: dict[int, Any] = {id(one): one for one in shared}
    memo[id(runner.collective)] = collective
    return copy.deepcopy(runner, memo)


def _require_no_closures(runner: ModelRunner) -> None:
    """A copy of a module would call the functions of the module itself."""
    for module in runner.model.modules():
        for name, value in vars(module).items():
            found = value.values() if isinstance(value, dict) else (value,)
            assert not any(isinstance(one, FunctionType) for one in found), f"{type(module)}.{name}"
