"""1,000 JSON schemas of the JSON Schema Test Suite: each complete answer is valid; other schemas are refused (400).

The suite is part of the source distribution of `jsonschema`, which pip downloads. With SCHEMAS_FOLDER in the
environment, the schemas are the JSON files below that folder instead, such as `data` of JSONSchemaBench
(github.com/guidance-ai/jsonschemabench, by the authors of llguidance). The model is random, and a bias toward quotes,
brackets and the end makes its answers short. A truncated answer is asked for again, with more tokens and a stronger
bias. What is truncated then needs more tokens than the model's context has, or a text that a random model does not
find, such as a UUID anywhere in a text.
`answers.jsonl` in the output folder has all answers.
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
ANSWER_TOKENS, MORE_TOKENS = 400, 1900
"""Limits of the first answer, and of the second one, which almost fills the model's context."""
DIALECTS = {
    "draft4": "http://json-schema.org/draft-04/schema#",
    "draft6": "http://json-schema.org/draft-06/schema#",
    "draft7": "http://json-schema.org/draft-07/schema#",
    "draft2019-09": "https://json-schema.org/draft/2019-09/schema",
    "draft2020-12": "https://json-schema.org/draft/2020-12/schema",
}
MIN_VALID, MAX_TRUNCATED = 500, 15
"""Bounds of the numbers of answers. Without them, a server that refuses or truncates everything passes."""
END_ID = 257
BIAS = {str(ord(character)): 6.0 for character in '"}]'} | {str(END_ID): 12.0}
"""`logit_bias` of the tiny model, whose tokens are bytes."""
STRONG_BIAS = {
    str(ord(character)): bias
    for characters, bias in (('"', 80.0), ("@./#-", 75.0), ("}]", 70.0), (",:", 60.0), (" \t\r\n", -50.0))
    for character in characters
} | {str(END_ID): 90.0}
"""Ends each value as soon as its schema allows. A text that must not end yet gets what many patterns need once."""


class Asked(NamedTuple):
    """A schema, and what the server made of it."""

    schema: dict[str, Any]
    status: int
    text: str
    """The answer, or the reason of the refusal."""
    whole: bool
    """Whether the answer is not truncated."""
    again: bool = False
    """Whether this is the second answer."""


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


def ask(server: Target, schema: dict[str, Any], seed: int, again: bool = False) -> Asked:
    """Asks for an answer that follows the schema. `again`: with more tokens and a stronger bias."""
    body = {
        "model": server.model,
        "messages": [{"role": "user", "content": "JSON, please."}],
        "max_tokens": MORE_TOKENS if again else ANSWER_TOKENS,
        "seed": seed,
        "logit_bias": STRONG_BIAS if again else BIAS,
        "response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": schema}},
    }
    status, reply = server.post("/v1/chat/completions", body)
    if status != 200:
        return Asked(schema, status, reply["error"]["message"], whole=False, again=again)
    [choice] = reply["choices"]
    return Asked(schema, status, choice["message"]["content"] or "", choice["finish_reason"] == "stop", again)


def ask_until_whole(server: Target, schema: dict[str, Any], seed: int) -> Asked:
    """Asks for an answer, and again if the answer is truncated."""
    first = ask(server, schema, seed)
    return ask(server, schema, seed, again=True) if first.status == 200 and not first.whole else first


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
        return list(pool.map(lambda pair: ask_until_whole(server, pair[1], pair[0]), enumerate(schemas)))


def checked(server: Target) -> str:
    """Validates each complete answer, and the number of answers."""
    counts, faults, lines, again = Counter[str](), list[str](), list[str](), 0
    for asked in answered(server):
        try:
            fault = fault_of(asked) if asked.whole else ""
            kind = kind_of(asked, fault)
        except re.error as limit:  # expressions that JavaScript has, and Python has not
            kind, fault = "not checked", f"jsonschema: {limit}"
        counts[kind] += 1
        again += asked.again
        lines.append(json.dumps({"kind": kind, **asked._asdict(), "fault": fault}))
        if kind in ("invalid", "failed"):
            faults.append(f"{fault or asked.text} ({json.dumps(asked.schema)} -> {asked.text[:200]})")
    (server.out / "answers.jsonl").write_text("\n".join(lines))
    shown = ", ".join(f"{number} {kind}" for kind, number in counts.most_common()) + f"; {again} asked again"
    if faults or counts["valid"] < MIN_VALID or counts["truncated"] > MAX_TRUNCATED:
        raise AssertionError(f"{shown}; {faults[:3]}")
    return shown


def main() -> None:
    """Runs the check."""
    server, checks = target(), Checks("jsonschema")
    checks.run(f"{SCHEMAS} schemas", lambda: checked(server))


if __name__ == "__main__":
    main()
