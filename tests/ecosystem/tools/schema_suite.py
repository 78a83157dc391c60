"""1,000 JSON schemas of the JSON Schema Test Suite: each complete answer is valid; other schemas are refused (400).

The suite is part of the source distribution of `jsonschema`, which pip downloads. With SCHEMAS_FOLDER in the
environment, the schemas are the JSON files below that folder instead, such as `data` of JSONSchemaBench
(github.com/guidance-ai/jsonschemabench, by the authors of llguidance). The model is random, and a bias toward quotes,
brackets and the end makes its answers short. `answers.jsonl` in the output folder has all answers.
"""

from __future__ import annotations

import importlib.metadata
import json
import os
import random
import re
import subprocess
import sys
import tarfile
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple

from common import Checks, Target, target
from jsonschema.validators import validator_for

SCHEMAS = 1000
SEED = 7
AT_ONCE = 16
ANSWER_TOKENS = 400
DIALECTS = {
    "draft4": "http://json-schema.org/draft-04/schema#",
    "draft6": "http://json-schema.org/draft-06/schema#",
    "draft7": "http://json-schema.org/draft-07/schema#",
    "draft2019-09": "https://json-schema.org/draft/2019-09/schema",
    "draft2020-12": "https://json-schema.org/draft/2020-12/schema",
}
MIN_VALID, MAX_TRUNCATED = 500, 50
"""Bounds of the numbers of answers. Without them, a server that refuses or truncates everything passes."""
END_ID = 257
BIAS = {str(ord(character)): 6.0 for character in '"}]'} | {str(END_ID): 12.0}
"""`logit_bias` of the tiny model, whose tokens are bytes."""


class Asked(NamedTuple):
    """A schema, and what the server made of it."""

    schema: dict[str, Any]
    status: int
    text: str
    """The answer, or the reason of the refusal."""
    whole: bool
    """Whether the answer is not truncated."""


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


def ask(server: Target, schema: dict[str, Any], seed: int) -> Asked:
    """Asks for an answer that follows the schema."""
    body = {
        "model": server.model,
        "messages": [{"role": "user", "content": "JSON, please."}],
        "max_tokens": ANSWER_TOKENS,
        "seed": seed,
        "logit_bias": BIAS,
        "response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": schema}},
    }
    status, reply = server.post("/v1/chat/completions", body)
    if status != 200:
        return Asked(schema, status, reply["error"]["message"], whole=False)
    [choice] = reply["choices"]
    return Asked(schema, status, choice["message"]["content"] or "", choice["finish_reason"] == "stop")


def fault_of(asked: Asked) -> str:
    """Returns why an answer is not valid; empty for a valid one."""
    try:
        value = json.loads(asked.text)
    except ValueError as fault:
        return f"not JSON: {fault}"
    validator = validator_for(asked.schema)(asked.schema)
    return "; ".join(error.message for error in validator.iter_errors(value))


def kind_of(asked: Asked, fault: str) -> str:
    """Returns the name under which an answer is counted."""
    if asked.whole:
        return "invalid" if fault else "valid"
    return {200: "truncated", 400: "refused"}.get(asked.status, "failed")


def answered(server: Target) -> list[Asked]:
    """Asks for `SCHEMAS` random schemas of the suite, some at once."""
    folder = os.environ.get("SCHEMAS_FOLDER")
    schemas = random.Random(SEED).sample(schemas_in(Path(folder)) if folder else suite(server.out), SCHEMAS)
    with ThreadPoolExecutor(AT_ONCE) as pool:
        return list(pool.map(lambda pair: ask(server, pair[1], pair[0]), enumerate(schemas)))


def checked(server: Target) -> str:
    """Validates each complete answer, and the number of answers."""
    counts, faults, lines = Counter[str](), list[str](), list[str]()
    for asked in answered(server):
        try:
            fault = fault_of(asked) if asked.whole else ""
            kind = kind_of(asked, fault)
        except re.error as limit:  # expressions that JavaScript has, and Python has not
            kind, fault = "not checked", f"jsonschema: {limit}"
        counts[kind] += 1
        lines.append(json.dumps({"kind": kind, **asked._asdict(), "fault": fault}))
        if kind in ("invalid", "failed"):
            faults.append(f"{fault or asked.text} ({json.dumps(asked.schema)} -> {asked.text[:200]})")
    (server.out / "answers.jsonl").write_text("\n".join(lines))
    shown = ", ".join(f"{number} {kind}" for kind, number in counts.most_common())
    if faults or counts["valid"] < MIN_VALID or counts["truncated"] > MAX_TRUNCATED:
        raise AssertionError(f"{shown}; {faults[:3]}")
    return shown


def main() -> None:
    """Runs the check."""
    server, checks = target(), Checks("jsonschema")
    checks.run(f"{SCHEMAS} schemas", lambda: checked(server))


if __name__ == "__main__":
    main()
