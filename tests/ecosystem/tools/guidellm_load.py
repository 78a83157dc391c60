"""GuideLLM on each API, with synthetic texts: all requests answered, with the lengths that were asked for."""

from __future__ import annotations

import json
from typing import Any

from common import Checks, Target, command, equal, target

REQUESTS = 20
PROMPT_TOKENS = 64
ANSWER_TOKENS = 12


def run(server: Target, route: str, profile: str) -> dict[str, Any]:
    """Runs `guidellm run`, and returns the only benchmark of its report."""
    name = f"{route}-{profile}".replace("/", "_").replace(",", "_").replace("=", "_")
    report = server.out / f"{name}.json"
    data = f"kind=synthetic_text,prompt_tokens={PROMPT_TOKENS},output_tokens={ANSWER_TOKENS}"
    command(
        "guidellm",
        *("run", "--backend"),
        f"kind=openai_http,target={server.url},model={server.model},request_format={route},api_key={server.key}",
        *("--tokenizer", f"kind=huggingface_auto,model={server.folder}", "--data", data),
        *("--profile", profile, "--constraint", f"kind=max_requests,count={REQUESTS}"),
        *("--output", f"kind=json,path={report}", "--disable-console-interactive"),
        log=server.out / f"{name}.log",
        environment={"HF_HUB_OFFLINE": "1"},
    )
    [benchmark] = json.loads(report.read_text())["benchmarks"]
    found: dict[str, Any] = benchmark
    return found


def loaded(server: Target, route: str, profile: str = "kind=concurrent,streams=4") -> str:
    """Checks the counts of a run.

    On a busy machine GuideLLM can end before one of its processes has reported its last request: the report then has
    19 successful ones, none that failed, and the server's log has 20.
    """
    benchmark = run(server, route, profile)
    metrics, counts = benchmark["metrics"], benchmark["metrics"]["request_totals"]
    equal(benchmark["scheduler_state"]["created_requests"], REQUESTS)
    equal((counts["errored"], counts["incomplete"]), (0, 0))
    assert REQUESTS - 1 <= counts["successful"] <= REQUESTS, counts
    tokens = metrics["output_token_count"]["successful"]
    equal((tokens["min"], tokens["max"]), (ANSWER_TOKENS, ANSWER_TOKENS))
    first = metrics["time_to_first_token_ms"]["successful"]["median"]
    return f"{counts['successful']} requests, {ANSWER_TOKENS} tokens each, first token p50 {first:.0f} ms"


def main() -> None:
    """Runs all checks."""
    server, checks = target(), Checks("guidellm")
    for route in ("/v1/completions", "/v1/chat/completions", "/v1/responses"):
        checks.run(route, lambda route=route: loaded(server, route))
    checks.run("chat, constant rate", lambda: loaded(server, "/v1/chat/completions", "kind=constant,rate=10"))


if __name__ == "__main__":
    main()
