"""1,000 JSON schemas of the JSON Schema Test Suite: each answer is valid and complete, or the schema refused (400).

Schemas are drawn at random until the server has answered 1,000, or until none is left. The suite is part of the
source distribution of `jsonschema`, which pip downloads. With SCHEMAS_FOLDER in the environment, the schemas are the
JSON files below that folder instead, such as `data` of JSONSchemaBench (github.com/guidance-ai/jsonschemabench, by
the authors of llguidance).

The model is random, and a bias toward quotes, brackets and the end makes its answers short. A truncated answer is
asked for again, with more tokens, a stronger bias, and a bias toward pieces of texts (`../vocabulary.py`): without
them, a random model does not find texts such as a UUID anywhere in a string. If this answer is truncated too,
because the schema requires hundreds of texts without a limit, a last one has a bias with which each text ends as
soon as it may. The bias is the same for all schemas.

`answers.jsonl` in the output folder has all answers. With SCHEMAS_ANSWERS in the environment, it is this file
instead, and a run that was stopped continues: answers that the file has are not asked for again.
"""

from __future__ import annotations

import functools
import importlib.metadata
import json
import os
import random
import re
import subprocess
import sys
import tarfile
import threading
from collections import Counter
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple

from common import Checks, Target, target
from jsonschema.validators import validator_for

SCHEMAS = 1000
"""Number of schemas that the server answers."""
SEED = 7
AT_ONCE = 16
ANSWER_TOKENS, MORE_TOKENS = 400, 15000
"""Limits of the first answer, and of later ones, which almost fill the model's context."""
MOST_ANSWERS = 3
"""Answers that are asked for, until one is not truncated."""
PROGRESS_EACH = 50
REFUSAL = "response_format: "
"""Beginning of the error of a schema that the server refuses. Any other error is a failure."""
NOT_CHECKED = "not checked"
DIALECTS = {
    "draft4": "http://json-schema.org/draft-04/schema#",
    "draft6": "http://json-schema.org/draft-06/schema#",
    "draft7": "http://json-schema.org/draft-07/schema#",
    "draft2019-09": "https://json-schema.org/draft/2019-09/schema",
    "draft2020-12": "https://json-schema.org/draft/2020-12/schema",
}
MIN_ANSWERED = 500
"""Without this bound, a server that refuses everything passes."""
END_ID = 257
BIAS = {str(ord(character)): 6.0 for character in '"}]'} | {str(END_ID): 12.0}
"""`logit_bias` of the tiny model, whose first tokens are bytes."""
STRONG_BIAS = {
    str(ord(character)): bias
    for characters, bias in (('"', 80.0), ("@./#-:", 78.0), ("}]", 70.0), (",", 60.0), (" \t\r\n", -50.0))
    for character in characters
} | {str(END_ID): 90.0}
"""Ends each value as soon as its schema allows. A text that must not end yet gets pieces of texts."""
PIECE_BIAS = 78.0
LAST_BIAS = {str(ord('"')): 100.0}
"""Added to `STRONG_BIAS` for a third answer."""


class Asked(NamedTuple):
    """A schema, and what the server made of it."""

    draw: int
    """Place of the schema among all that were drawn; also the seed of the answer."""
    schema: dict[str, Any]
    status: int
    text: str
    """The answer, or the reason of the refusal."""
    whole: bool
    """Whether the answer is not truncated."""
    before: int = 0
    """Number of truncated answers before this one."""


def schemas_in(folder: Path) -> list[dict[str, Any]]:
    """Returns the schemas below a folder, one in each JSON file."""
    found = (json.loads(path.read_text()) for path in sorted(folder.rglob("*.json")))
    return [schema for schema in found if isinstance(schema, dict)]


def suite(out: Path) -> list[dict[str, Any]]:
    """Downloads the suite, and returns its schemas that are objects, each once in each dialect."""
    version = importlib.metadata.version("jsonschema")
    pip = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--no-binary", "jsonschema"]
    subprocess.run([*pip, f"jsonschema=={version}", "--dest", str(out)], check=True)
    [archive] = out.glob("jsonschema-*.tar.gz")
    with tarfile.open(archive) as files:
        files.extractall(out, filter="data")
    found: dict[str, dict[str, Any]] = {}
    for dialect, address in DIALECTS.items():
        for path in sorted(
            (out / archive.name.removesuffix(".tar.gz") / "json/tests" / dialect).rglob("*.json")
        ):
            for group in json.loads(path.read_text()):
                if isinstance(group["schema"], dict):
                    schema = {"$schema": address, **group["schema"]}
                    found[json.dumps(schema, sort_keys=True)] = schema
    return list(found.values())


def drawn(schemas: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Returns all schemas in random order."""
    numbers, found = random.Random(SEED), dict[int, dict[str, Any]]()
    while len(found) < len(schemas):
        number = numbers.randrange(len(schemas))
        found.setdefault(number, schemas[number])
    return list(found.values())


def ask(server: Target, draw: int, schema: dict[str, Any], before: int = 0) -> Asked:
    """Asks for an answer that follows the schema; after truncated answers `before` it, as the module describes."""
    pieces = json.loads((server.folder / "pieces.json").read_text())
    strong = STRONG_BIAS | {str(token): PIECE_BIAS for token in pieces.values()}
    strong |= LAST_BIAS if before > 1 else {}
    body = {
        "model": server.model,
        "messages": [{"role": "user", "content": "JSON, please."}],
        "max_tokens": MORE_TOKENS if before else ANSWER_TOKENS,
        "seed": draw,
        "logit_bias": strong if before else BIAS,
        "response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": schema}},
    }
    status, reply = server.post("/v1/chat/completions", body)
    if status != 200:
        return Asked(draw, schema, status, reply["error"]["message"], whole=False, before=before)
    [choice] = reply["choices"]
    text, whole = choice["message"]["content"] or "", choice["finish_reason"] == "stop"
    return Asked(draw, schema, status, text, whole, before)


def ask_until_whole(server: Target, draw: int, schema: dict[str, Any]) -> Asked:
    """Asks for an answer, and for others as long as they are truncated, up to `MOST_ANSWERS`."""
    for before in range(MOST_ANSWERS):
        asked = ask(server, draw, schema, before)
        if asked.status != 200 or asked.whole:
            break
    return asked


@functools.cache
def _fault(schema: str, text: str) -> str:
    try:
        value = json.loads(text)
    except ValueError as fault:
        return f"not JSON: {fault}"
    validator = validator_for(json.loads(schema))(json.loads(schema))
    try:
        return "; ".join(error.message for error in validator.iter_errors(value))
    except re.error as limit:  # expressions that JavaScript has, and Python has not
        return f"{NOT_CHECKED}: {limit}"


def fault_of(asked: Asked) -> str:
    """Returns why a complete answer is not valid; empty for a valid one."""
    return _fault(json.dumps(asked.schema), asked.text) if asked.whole else ""


def kind_of(asked: Asked) -> str:
    """Returns the name under which an answer is counted."""
    if asked.whole:
        fault = fault_of(asked)
        return NOT_CHECKED if fault.startswith(NOT_CHECKED) else "invalid" if fault else "valid"
    if asked.status == 400 and asked.text.startswith(REFUSAL):
        return "refused"
    return "truncated" if asked.status == 200 else "failed"


class Answers:
    """The answers of a run, in a file that grows with each."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._writing = threading.Lock()
        lines = path.read_text().splitlines() if path.exists() else []
        kept = (Asked(**json.loads(line)) for line in lines)
        self.by_draw = {asked.draw: asked for asked in kept if kind_of(asked) != "failed"}

    def add(self, asked: Asked) -> None:
        """Keeps an answer, and prints the progress now and then."""
        with self._writing, self._path.open("a") as file:
            file.write(json.dumps(asked._asdict()) + "\n")
            self.by_draw[asked.draw] = asked
            if len(self.by_draw) % PROGRESS_EACH == 0:
                print(json.dumps({"progress": shown(count(self.by_draw.values()))}), flush=True)


def count(all_asked: Iterable[Asked]) -> Counter[str]:
    """Counts answers by `kind_of`, truncated ones that were asked for again also as `asked again`."""
    counts = Counter[str]()
    for asked in all_asked:
        counts[kind_of(asked)] += 1
        counts["asked again"] += bool(asked.before)
    return counts


def shown(counts: Counter[str]) -> str:
    """Returns the counts as a text."""
    return ", ".join(f"{number} {kind}" for kind, number in counts.most_common())


def answered(server: Target) -> list[Asked]:
    """Asks for answers to random schemas, some at once, until `SCHEMAS` are not refused."""
    folder = os.environ.get("SCHEMAS_FOLDER")
    schemas = drawn(schemas_in(Path(folder)) if folder else suite(server.out))
    answers = Answers(Path(os.environ.get("SCHEMAS_ANSWERS", server.out / "answers.jsonl")))
    found: list[Asked] = []
    missing = SCHEMAS
    with ThreadPoolExecutor(AT_ONCE) as pool:
        while missing and len(found) < len(schemas):
            draws = range(len(found), min(len(found) + missing, len(schemas)))
            new = [draw for draw in draws if draw not in answers.by_draw]
            list(pool.map(lambda draw: answers.add(ask_until_whole(server, draw, schemas[draw])), new))
            found += [answers.by_draw[draw] for draw in draws]
            missing = SCHEMAS - sum(kind_of(asked) != "refused" for asked in found)
    return found


def checked(server: Target) -> str:
    """Validates each answer."""
    found = answered(server)
    counts = count(found)
    refused = counts.pop("refused", 0)
    total = len(found) - refused
    result = f"{total} schemas answered: {shown(counts)}; beside them {refused} refused"
    faults = [asked for asked in found if kind_of(asked) in ("failed", "invalid", "truncated")]
    if faults or total < min(SCHEMAS, MIN_ANSWERED):
        named = [f"{fault_of(one)} ({json.dumps(one.schema)} -> {one.text[:200]})" for one in faults[:3]]
        raise AssertionError(f"{result}; {named}")
    return result


def main() -> None:
    """Runs the check."""
    server, checks = target(), Checks("jsonschema")
    checks.run(f"{SCHEMAS} schemas", lambda: checked(server))


if __name__ == "__main__":
    main()
