"""`disagg demo` and `disagg generate`: run prompts on a cluster of this machine; the demo checks the answers."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Callable, Sequence
from contextlib import aclosing
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec
from rich.console import Console
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    SpinnerColumn,
    TextColumn,
    TimeElapsedColumn,
)

from disagg.cluster.lifecycle import Cluster
from disagg.commands.local import limit_tokens, local_cluster, local_router, with_model
from disagg.commands.run_options import RunOptions
from disagg.core.config.read import Config
from disagg.core.errors import ConfigError, PromptTooLongError
from disagg.core.folders import make_folder, writing
from disagg.core.log import configure
from disagg.core.sampling import MAX_LOGPROBS
from disagg.core.types import SamplingParams, TokenLogprobs
from disagg.model.load.source import make_source
from disagg.model.load.tokenizer import load_tokenizer
from disagg.model.rounding import Judged
from disagg.reference.answers import Reference, comparable, equal_tokens, reference_answers
from disagg.reference.verdict import judged_of, verdict, within
from disagg.report.table import RequestReport, answer_lines, report_table
from disagg.report.timeline import draw_timeline
from disagg.router.answers import SessionReport
from disagg.router.router import Router
from disagg.router.text import Decode, decode_with

DEFAULT_OUT = "out"


@dataclass(slots=True)
class DemoAnswer:
    """One prompt's answer, with the measurements of its session."""

    prompt: list[int]
    text: str
    report: SessionReport
    logprobs: list[TokenLogprobs]
    """Log-probabilities of each answer token; empty if all tokens must equal the reference's."""


def run_demo(config: Config, options: RunOptions) -> None:
    """Serves the prompts, compares every token with the reference, prints a table, and writes timeline and report.

    Raises `MismatchError` if an answer differs and rounding does not explain it, `ConfigError` for colocated groups.
    """
    if config.cluster.mode != "split":
        raise ConfigError(
            f"cluster.mode = {config.cluster.mode}: the demo shows a hand-over, so it must be split; "
            f"`disagg generate` and `disagg serve` run colocated groups"
        )
    configure(config.log)
    console = Console()
    config = comparable(_exact(with_model(config, console.print)), options.deterministic)
    decode, prompts = _encode(config, options)
    out = Path(options.out_dir or DEFAULT_OUT)
    make_folder(out)
    with _progress(console) as progress:
        task = progress.add_task("starting", total=None)
        with local_cluster(config, lambda text: progress.update(task, description=text)) as cluster:
            progress.update(task, description=_words(cluster), total=1, completed=1)
            placed = cluster.config
            equal = equal_tokens(placed)
            sampling = options.sampling if equal else _with_logprobs(options.sampling)
            answers = asyncio.run(serve(cluster, prompts, sampling, decode, progress))
            spans = cluster.spans()
            cluster.check()
        reference = _compare(placed, prompts, options.sampling, progress, [one.logprobs for one in answers])
    found = [
        judged_of(answer.report.tokens, answer.logprobs, right, judge)
        for answer, right, judge in zip(answers, reference.answers, reference.judges, strict=True)
    ]
    reports = _reports(answers, found, decode)
    console.print(report_table(reports, title="Prefilled on one group, decoded on the other"))
    for line in answer_lines(reports):
        console.print(line, markup=False, highlight=False, no_wrap=True, overflow="ellipsis")
    picture = out / "timeline.png"
    with writing("--out", out):
        draw_timeline(spans, picture, title="one demo run")
        (out / "report.json").write_bytes(msgspec.json.format(msgspec.json.encode(reports), indent=2))
    console.print(
        f"timeline: [link={picture.resolve().as_uri()}]{picture}[/link]   report: {out / 'report.json'}"
    )
    names = {report.request_id: judged for report, judged in zip(reports, found, strict=True)}
    console.print(verdict(names, sum(report.answer_tokens for report in reports), reference.name))


def _exact(config: Config) -> Config:
    """Returns a copy of the configuration that disables the prefix cache. For a checkpoint, the copy also sets
    `model.dtype` to float32 unless a type is configured.

    Two different engines generate equal tokens only in float32. The prefix cache is off because the reference
    computes each prompt from its start. Every prompt is handed over: no decode group computes one.
    """
    prefill, decode = (
        msgspec.structs.replace(group, prefix_cache=False) for group in (config.prefill, config.decode)
    )
    decode = msgspec.structs.replace(decode, local_prefill_tokens=0)
    config = msgspec.structs.replace(config, prefill=prefill, decode=decode)
    if config.model.path is None or config.model.dtype != "auto":
        return config
    return msgspec.structs.replace(config, model=msgspec.structs.replace(config.model, dtype="float32"))


def run_generate(config: Config, options: RunOptions) -> None:
    """Answers the prompts one by one and streams each answer to stdout; progress goes to stderr."""
    configure(config.log)
    console = Console(stderr=True)
    config = with_model(config, console.print)
    decode, prompts = _encode(config, options)
    with console.status("starting") as status, local_cluster(config, status.update) as cluster:
        status.stop()
        asyncio.run(stream(cluster, prompts, options.sampling, decode))


async def stream(
    cluster: Cluster, prompts: Sequence[list[int]], sampling: SamplingParams, decode: Decode
) -> None:
    async with local_router(cluster) as router:
        for number, prompt in enumerate(prompts):
            answer = router.generate(
                f"generate-{number}",
                prompt,
                sampling,
                timeout_s=cluster.config.router.request_timeout_s,
                decode=decode,
            )
            async with aclosing(answer):  # releases the request before the router closes its channel
                async for output in answer:
                    sys.stdout.write(output.text)
                    sys.stdout.flush()
            sys.stdout.write("\n")


async def serve(
    cluster: Cluster,
    prompts: Sequence[list[int]],
    sampling: SamplingParams,
    decode: Decode,
    progress: Progress,
) -> list[DemoAnswer]:
    """Serves all prompts concurrently. Raises the error of the first request that fails."""
    task = progress.add_task("tokens", total=len(prompts) * sampling.max_tokens)
    tasks: list[asyncio.Task[DemoAnswer]] = []
    try:
        async with local_router(cluster) as router, asyncio.TaskGroup() as group:
            for number, prompt in enumerate(prompts):
                name, advance = f"demo-{number}", _advance(progress, task)
                one = _one(router, name, prompt, sampling, cluster.config, decode, advance)
                tasks.append(group.create_task(one))
    except ExceptionGroup as failed:
        raise failed.exceptions[0] from failed
    progress.update(task, total=sum(len(t.result().report.tokens) for t in tasks))
    return [task.result() for task in tasks]


def _advance(progress: Progress, task: Any) -> Callable[[int], None]:
    return lambda tokens: progress.advance(task, tokens)


async def _one(
    router: Router,
    request_id: str,
    prompt: list[int],
    sampling: SamplingParams,
    config: Config,
    decode: Decode,
    advance: Callable[[int], None],
) -> DemoAnswer:
    report, pieces = SessionReport(), []
    logprobs: list[TokenLogprobs] = []
    timeout_s = config.router.request_timeout_s
    answer = router.generate(request_id, prompt, sampling, timeout_s=timeout_s, decode=decode, report=report)
    async with aclosing(answer):
        async for output in answer:
            pieces.append(output.text)
            logprobs += output.logprobs
            advance(len(output.tokens))
    return DemoAnswer(prompt, "".join(pieces), report, logprobs)


def _encode(config: Config, options: RunOptions) -> tuple[Decode, list[list[int]]]:
    """Returns the detokenizer and the tokenized prompts. Raises `PromptTooLongError` if a prompt is too long."""
    source = make_source(config)
    tokenizer = load_tokenizer(source)
    prompts = [list(tokenizer(text)["input_ids"]) for text in options.prompts]
    limit = limit_tokens(config, source)
    for number, prompt in enumerate(prompts, 1):
        if len(prompt) + options.sampling.max_tokens > limit:
            raise PromptTooLongError(
                f"prompt {number} has {len(prompt)} tokens; with an answer of up to {options.sampling.max_tokens} "
                f"it exceeds the {limit} tokens that model and pools allow: shorten it, lower --max-tokens, or raise "
                f"prefill/decode.max_context_tokens if the model allows"
            )
    return decode_with(tokenizer), prompts


def _compare(
    config: Config,
    prompts: Sequence[list[int]],
    sampling: SamplingParams,
    progress: Progress,
    others: Sequence[Sequence[TokenLogprobs]],
) -> Reference:
    task = progress.add_task("reference", total=len(prompts))
    reference = reference_answers(config, prompts, sampling, lambda: progress.advance(task), others)
    progress.update(task, description=f"reference: {reference.name}", completed=len(prompts))
    return reference


def _with_logprobs(sampling: SamplingParams) -> SamplingParams:
    return msgspec.structs.replace(sampling, logprobs=MAX_LOGPROBS)


def _reports(
    answers: Sequence[DemoAnswer], found: Sequence[list[Judged] | None], decode: Decode
) -> list[RequestReport]:
    return [
        RequestReport(
            request_id=f"demo-{number}",
            prompt_tokens=len(answer.prompt),
            answer_tokens=len(answer.report.tokens),
            ttft_s=answer.report.ttft_s,
            total_s=answer.report.ended_s,
            nbytes=answer.report.nbytes,
            segments=answer.report.segments,
            control_messages=answer.report.messages,
            transfer_s=answer.report.transfer_s,
            exact=judged is None,
            within_rounding=within(judged),
            text=decode(answer.report.tokens),
        )
        for number, (answer, judged) in enumerate(zip(answers, found, strict=True))
    ]


def _words(cluster: Cluster) -> str:
    prefill, decode = cluster.placement.prefill, cluster.placement.decode
    return f"up: prefill TP {prefill.tp}, decode TP {decode.tp}, {cluster.placement.why}"


def _progress(console: Console) -> Progress:
    return Progress(
        SpinnerColumn(),
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        console=console,
    )
