"""aiperf (NVIDIA's load generator) on each API: all requests answered, with the lengths that were asked for."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from common import Checks, Target, command, equal, target

REQUESTS = 20
PROMPT_TOKENS = 64
ANSWER_TOKENS = 12
KINDS = ("completions", "chat", "responses", "messages")
"""aiperf's types of endpoints."""


EXTRA = json.dumps({"ignore_eos": True, "temperature": 0})
"""Greedy answers of the tiny model are ASCII. Others have invalid bytes, which aiperf's tokenizer counts thrice."""


def profile(server: Target, kind: str, *flags: str) -> dict[str, Any]:
    """Runs `aiperf profile`, and returns the file of its metrics."""
    out = server.out / f"{kind}{'_'.join(flags).replace('/', '_')}"
    command(
        "aiperf",
        *("profile", "--model", server.model, "--tokenizer", str(server.folder), "--url", server.url),
        *("--api-key", server.key, "--endpoint-type", kind, "--concurrency", "4"),
        *("--request-count", str(REQUESTS), "--isl", str(PROMPT_TOKENS), "--isl-stddev", "0"),
        *("--osl", str(ANSWER_TOKENS), "--extra-inputs", EXTRA, "--ui", "none"),
        *("--no-gpu-telemetry", "--output-artifact-dir", str(out), *flags),
        log=server.out / f"{out.name}.log",
    )
    [file] = out.rglob("profile_export_aiperf.json")
    found: dict[str, Any] = json.loads(Path(file).read_text())
    return found


def loaded(server: Target, kind: str, *flags: str) -> str:
    """Checks the counts of a run."""
    found = profile(server, kind, *flags)
    equal(found["request_count"]["avg"], REQUESTS)
    equal(found.get("error_summary") or [], [])
    equal(found["output_sequence_length"]["avg"], ANSWER_TOKENS)
    shown = f"{REQUESTS} requests, {found['request_throughput']['avg']:.1f} a second"
    if "--streaming" not in flags:
        return shown
    return f"{shown}, first token p50 {found['time_to_first_token']['p50']:.0f} ms"


def main() -> None:
    """Runs all checks."""
    server, checks = target(), Checks("aiperf")
    for kind in KINDS:
        checks.run(f"{kind}, streaming", lambda kind=kind: loaded(server, kind, "--streaming"))
    checks.run("chat, whole replies", lambda: loaded(server, "chat", "--use-server-token-count"))


if __name__ == "__main__":
    main()
