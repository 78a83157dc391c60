"""lm-eval over `/v1/completions` and `/v1/chat/completions`: the scores of lm-eval's own backend `hf`.

The tasks are local files. Log-likelihoods and texts of each sample are compared with those that `hf` computes from
the same checkpoint. The targets of `generated` are the answers of `hf` for every second document, so the score must
be one half.
"""

from __future__ import annotations

import json
import os
import random
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from common import Checks, Target, command, equal, target
from lm_eval import simple_evaluate
from lm_eval.tasks import TaskManager

DOCUMENTS = 24
CHOICES = 4
ANSWER_TOKENS = 24
LARGEST_DIFFERENCE = 2e-3
"""Of two sums of float32 log-probabilities of about 20 tokens."""
WORDS = (
    "river",
    "stone",
    "apple",
    "cloud",
    "seven",
    "green",
    "walks",
    "under",
    "table",
    "quick",
    "paper",
    "north",
)
COMMON = {"dataset_path": "json", "test_split": "test", "metadata": {"version": 1}}
TASKS: dict[str, dict[str, Any]] = {
    "choices": {
        "output_type": "multiple_choice",
        "doc_to_text": "{{question}}\nAnswer:",
        "doc_to_choice": "{{choices}}",
        "doc_to_target": "{{answer}}",
        "metric_list": [{"metric": "acc"}, {"metric": "acc_norm"}],
    },
    "rolling": {
        "output_type": "loglikelihood_rolling",
        "doc_to_text": "",
        "doc_to_target": "{{question}}",
        "metric_list": [{"metric": "bits_per_byte"}],
    },
    "generated": {
        "output_type": "generate_until",
        "doc_to_text": "{{question}}\nAnswer:",
        "doc_to_target": "{{target}}",
        "generation_kwargs": {"until": ["zq", "\n\n"], "max_gen_toks": ANSWER_TOKENS, "do_sample": False},
        "metric_list": [{"metric": "exact_match"}],
    },
}


def documents(targets: Sequence[str]) -> list[dict[str, Any]]:
    """Returns questions with choices. `targets`: answers for the documents with even numbers, or nothing."""
    draw = random.Random(5)

    def text(words: int) -> str:
        return " ".join(draw.choice(WORDS) for _ in range(words))

    found = []
    for number in range(DOCUMENTS):
        choices = [f" {text(draw.randint(1, 4))}" for _ in range(CHOICES)]
        known = number % 2 == 0 and number < len(targets)
        found.append(
            {
                "number": number,
                "question": f"{text(draw.randint(4, 30))}?",
                "choices": choices,
                "answer": draw.randrange(CHOICES),
                "target": targets[number] if known else "another text",
            }
        )
    return found


class Evaluation:
    """Runs the tasks, all in this process: a new one would import torch for each run."""

    def __init__(self, server: Target) -> None:
        self.server = server
        self._tasks = server.out / "tasks"
        self._tasks.mkdir(parents=True, exist_ok=True)

    def write(self, targets: Sequence[str] = ()) -> None:
        """Writes the tasks and their documents."""
        data = self._tasks / ("answered.jsonl" if targets else "documents.jsonl")
        data.write_text("".join(f"{json.dumps(one)}\n" for one in documents(targets)))
        for name, task in TASKS.items():
            whole = COMMON | task | {"task": name, "dataset_kwargs": {"data_files": {"test": str(data)}}}
            (self._tasks / f"{name}.yaml").write_text(json.dumps(whole))

    def run(self, model: str, arguments: Mapping[str, Any], tasks: Sequence[str], **options: Any) -> Outcome:
        """Runs tasks, as the command `lm_eval run` does."""
        manager = TaskManager(include_path=str(self._tasks), include_defaults=False)
        return Outcome(
            simple_evaluate(
                model, dict(arguments), tasks=list(tasks), task_manager=manager, bootstrap_iters=0, **options
            )
        )

    def hf(self, *tasks: str, **options: Any) -> Outcome:
        """Runs tasks in lm-eval's own backend."""
        arguments = {"pretrained": str(self.server.folder), "dtype": "float32"}
        return self.run("hf", arguments, tasks, device="cpu", batch_size=1, **options)

    def served(self, *tasks: str, **arguments: Any) -> Outcome:
        """Runs tasks over `/v1/completions`."""
        url = f"{self.server.url}/v1/completions"
        given = {"model": self.server.model, "base_url": url, "tokenizer": str(self.server.folder)}
        return self.run("local-completions", given | arguments, tasks)

    def chat(self, *tasks: str, **arguments: Any) -> Outcome:
        """Runs tasks over `/v1/chat/completions`."""
        url = f"{self.server.url}/v1/chat/completions"
        given = {"model": self.server.model, "base_url": url}
        return self.run("local-chat-completions", given | arguments, tasks, apply_chat_template=True)

    def commanded(self) -> Outcome:
        """Runs multiple choice by the command, as users do."""
        out, server = self.server.out / "command", self.server
        arguments = f"model={server.model},base_url={server.url}/v1/completions,tokenizer={server.folder}"
        command(
            "lm_eval",
            *("--model", "local-completions", "--model_args", arguments, "--tasks", "choices"),
            *("--include_path", str(self._tasks), "--output_path", str(out), "--log_samples"),
            log=self.server.out / "command.log",
        )
        [scores] = out.rglob("results_*.json")
        [lines] = out.rglob("samples_choices_*.jsonl")
        samples = [json.loads(line) for line in lines.read_text().splitlines()]
        return Outcome({**json.loads(scores.read_text()), "samples": {"choices": samples}})


class Outcome:
    """Scores and samples of a run."""

    def __init__(self, result: Any) -> None:
        self._result = result

    def scores(self, task: str) -> dict[str, float]:
        """Returns the values of a task's metrics."""
        found = self._result["results"][task]
        return {
            name: value for name, value in found.items() if name.endswith(",none") and "stderr" not in name
        }

    def answers(self, task: str) -> list[Any]:
        """Returns the backend's answers for each document, in the documents' order."""
        samples = sorted(self._result["samples"][task], key=lambda sample: sample["doc"]["number"])
        return [sample["resps"] for sample in samples]


def same_likelihoods(found: Outcome, right: Outcome, task: str) -> str:
    """Compares log-likelihoods, whether they are those of greedy answers, and scores."""
    pairs = list(zip(numbers_of(found.answers(task)), numbers_of(right.answers(task)), strict=True))
    largest = max(abs(float(one) - float(other)) for one, other in pairs)
    if largest > LARGEST_DIFFERENCE:
        raise AssertionError(f"a log-likelihood differs by {largest:.2g}")
    scores, expected = found.scores(task), right.scores(task)
    equal(sorted(scores), sorted(expected))
    differences = [abs(scores[name] - expected[name]) for name in scores]
    if max(differences) > 1e-4:
        raise AssertionError(f"scores {scores} are not {expected}")
    return f"{task} {shown(scores)} ({len(pairs)} values, largest difference {largest:.1g})"


def shown(scores: Mapping[str, float]) -> str:
    """Returns the scores as text."""
    return ", ".join(f"{name.removesuffix(',none')} {value:.4g}" for name, value in scores.items())


def numbers_of(answers: Any) -> list[float]:
    """Returns all numbers in nested lists. Values are texts in files; `is_greedy` counts as 0 or 1."""
    if isinstance(answers, list | tuple):
        return [number for one in answers for number in numbers_of(one)]
    return [float({"True": 1, "False": 0}.get(str(answers), answers))]


def same_texts(found: Outcome, right: Outcome) -> str:
    """Compares the texts, and the score with one half."""
    texts = found.answers("generated")
    equal(texts, right.answers("generated"))
    [score] = found.scores("generated").values()
    equal(score, 0.5)
    return f"exact_match {score}; {len(texts)} texts equal"


def main() -> None:
    """Runs `hf` once, then each way to use the server."""
    checks = Checks("lm-eval")
    server = target()
    os.environ["OPENAI_API_KEY"] = server.key
    evaluation = Evaluation(server)
    right: dict[str, Outcome] = {}

    def reference() -> str:
        evaluation.write()
        right["texts"] = evaluation.hf(*TASKS)
        right["chat"] = evaluation.hf("generated", apply_chat_template=True)
        return "; ".join(f"{task} {shown(right['texts'].scores(task))}" for task in TASKS)

    def likelihoods(**arguments: Any) -> str:
        found = evaluation.served("choices", "rolling", **arguments)
        return "; ".join(same_likelihoods(found, right["texts"], task) for task in ("choices", "rolling"))

    def texts(run: str, evaluate: Callable[..., Outcome], **arguments: Any) -> str:
        evaluation.write([one[0][0] for one in right[run].answers("generated")])
        return same_texts(evaluate("generated", **arguments), right[run])

    checks.run("reference: backend hf", reference)
    checks.run(
        "multiple choice, by the command",
        lambda: same_likelihoods(evaluation.commanded(), right["texts"], "choices"),
    )
    checks.run("multiple choice and rolling, concurrent", lambda: likelihoods(num_concurrent=4))
    checks.run("the same, batches of 8", lambda: likelihoods(batch_size=8))
    checks.run("the same, prompts as text", lambda: likelihoods(tokenized_requests=False))
    checks.run("generate_until, concurrent", lambda: texts("texts", evaluation.served, num_concurrent=4))
    checks.run("generate_until, batches of 8", lambda: texts("texts", evaluation.served, batch_size=8))
    checks.run("generate_until, chat", lambda: texts("chat", evaluation.chat, num_concurrent=4))


if __name__ == "__main__":
    main()
