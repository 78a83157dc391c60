"""Builds a tiny model of one type, and compares our engine's greedy tokens with those of Hugging Face's
`generate()`."""

from __future__ import annotations

import tempfile
import warnings
from collections.abc import Sequence
from functools import partial
from pathlib import Path

import torch
import transformers
from transformers import AutoConfig, AutoModelForCausalLM, GenerationConfig, PreTrainedConfig
from transformers.utils import logging

from disagg.core.config.observability import LogConfig
from disagg.core.errors import ConfigError, InvariantError, UnsupportedModelError
from disagg.core.log import configure
from disagg.coverage.checkpoint import save_checkpoint
from disagg.coverage.engines import Answers, Prompts, make_runner, split_answers, unsplit_answers
from disagg.coverage.page import render
from disagg.coverage.tiny_config import VOCAB_SIZE, WINDOW_TOKENS, tiny_config
from disagg.coverage.verdict import Verdict, one_line
from disagg.model.collective.base import SingleCollective
from disagg.model.load.composite import text_part
from disagg.model.load.source import ModelSource

PROMPT_TOKENS = (40, 9, 23)
ANSWER_TOKENS = 24
CHUNKS_TOKENS = (13, 16)  # the last chunk of the 40-token prompt has 1 token, or begins at a page boundary
_SEEDS = range(1, 9)  # seeds of weights; the check uses the first seed whose answers vary
_FEWEST_TOKENS = 6  # least number of different tokens in the answers; fewer would test too little


def check_type(model_type: str) -> Verdict:
    """Checks one model type and returns the verdict. An error becomes part of the verdict, and is not raised."""
    with tempfile.TemporaryDirectory() as directory:
        try:
            return _check(model_type, Path(directory))
        except UnsupportedModelError as exc:
            return Verdict(model_type, "refused", _reason(exc))
        except Exception as exc:  # noqa: BLE001 - any error of a model's code is a finding
            return Verdict(model_type, "failed", one_line(exc))


def _check(model_type: str, directory: Path) -> Verdict:
    config = tiny_config(model_type)
    _require_readable(config, directory)
    prompts = make_prompts()
    save_checkpoint(config, directory, _SEEDS[0])
    source = ModelSource.from_directory(directory)
    make_runner(
        source, SingleCollective(), len(prompts)
    )  # raises for an unsupported type before any comparison
    expected = _varied_answers(config, directory, prompts)
    source = ModelSource.from_directory(directory)
    ours = {
        f"unsplit, chunks of {chunk}": unsplit_answers(source, prompts, ANSWER_TOKENS, chunk)
        for chunk in CHUNKS_TOKENS
    }
    ours["split 2 to 1"], whole = split_answers(source, prompts, ANSWER_TOKENS, CHUNKS_TOKENS[0])
    for run, answers in ours.items():
        if answers != expected:
            return Verdict(model_type, "wrong", f"{run}: {_difference(answers, expected)}")
    return Verdict(model_type, "exact", whole=tuple(sorted(whole)))


def _varied_answers(config: PreTrainedConfig, directory: Path, prompts: Prompts) -> Answers:
    """Writes a checkpoint to `directory` with the first seed whose answers vary; returns transformers' answers.

    Raises InvariantError when no seed's answers vary: constant answers would test nothing.
    """
    for seed in _SEEDS:
        save_checkpoint(config, directory, seed)
        answers = generated(directory, prompts)
        if len({token for answer in answers for token in answer}) >= _FEWEST_TOKENS:
            return answers
    raise InvariantError("the tiny model's answers vary for no seed, so equal tokens would prove nothing")


def _require_readable(config: PreTrainedConfig, directory: Path) -> None:
    """Raises UnsupportedModelError if the configuration alone is unsupported, before a model is built."""
    config.save_pretrained(directory)
    try:
        ModelSource.from_directory(directory)
    except UnsupportedModelError:
        raise
    except ConfigError:
        return  # the directory has no weights yet


def make_prompts() -> list[list[int]]:
    """Returns random prompts of the lengths `PROMPT_TOKENS`, without the lowest ids, which some models treat as
    special."""
    generator = torch.Generator().manual_seed(5)
    return [torch.randint(4, VOCAB_SIZE, (n,), generator=generator).tolist() for n in PROMPT_TOKENS]


def generated(directory: Path, prompts: Prompts) -> Answers:
    """Returns transformers' greedy answers in float32, one prompt at a time."""
    load = partial(
        AutoModelForCausalLM.from_pretrained, directory, dtype=torch.float32, local_files_only=True
    )
    try:
        model = load()
    except ImportError:  # a part other than the text model needs a missing library
        model = load(config=text_part(AutoConfig.from_pretrained(directory)))
    greedy = GenerationConfig(
        max_new_tokens=ANSWER_TOKENS, min_new_tokens=ANSWER_TOKENS, do_sample=False, pad_token_id=0
    )
    answers = []
    for prompt in prompts:
        ids = torch.tensor([list(prompt)])
        output = model.eval().generate(ids, attention_mask=torch.ones_like(ids), generation_config=greedy)
        answers.append(output[0, len(prompt) :].tolist())
    return answers


def page_of(verdicts: Sequence[Verdict]) -> str:
    """Returns the text of `docs/models.md` for the verdicts on all model types."""
    return render(
        verdicts,
        version=transformers.__version__,
        prompts=_listed(PROMPT_TOKENS),
        answers=ANSWER_TOKENS,
        window=WINDOW_TOKENS,
        chunks=_listed(CHUNKS_TOKENS),
    )


def quiet() -> None:
    """Silences warnings and logs, which random models produce in large numbers."""
    warnings.simplefilter("ignore")
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    configure(LogConfig(level="error"))


def _listed(numbers: Sequence[int]) -> str:
    return f"{', '.join(map(str, numbers[:-1]))} and {numbers[-1]}"


def _difference(answers: Answers, expected: Answers) -> str:
    pairs = [
        (a, b) for got, want in zip(answers, expected, strict=True) for a, b in zip(got, want, strict=True)
    ]
    return f"{sum(a != b for a, b in pairs)} of {len(pairs)} tokens differ"


def _reason(exc: UnsupportedModelError) -> str:
    """Returns the reason in the error's message, without the model's name."""
    return one_line(exc).split(" is not supported: ")[-1]
