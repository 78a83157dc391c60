"""Checks two vLLM servers split by DisaggConnector under load: clients that leave, and a prefill server that dies.

    VLLM_PP=... DISAGG_PP=... python3 tests/vllm/under_load.py    (as on_device.py, whose arguments it has)

 1. Requests of mixed lengths at the same time, and others whose clients leave before or during the answer.
 2. SIGKILL to the prefill server and all its processes, while requests go to the proxy and, without a prefill
    server, to the decode server. Requests to the decode server must all be answered; requests to the proxy may end
    with an error.
 3. A new prefill server takes the place of the killed one.
Each answer must equal that of one unsplit server, and all blocks must be freed after each part.
"""

from __future__ import annotations

import contextlib
import http.client
import json
import os
import random
import signal
import sys
import threading
import urllib.parse
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from on_device import Run, RunError, parser, run_to_end, say

AT_ONCE = 16
LEAVING = 8
LENGTHS = (20, 33, 64, 100, 130, 257, 333, 500, 700, 1000)
KILLED_AFTER = 12
"""Answers after which the prefill server is killed."""


class LoadRun:
    """The three parts; see the module."""

    def __init__(self, run: Run) -> None:
        self.run, self.choose = run, random.Random(11)
        self.wrong = 0

    def check(self) -> int:
        """Returns the exit code. Raises RunError."""
        self.concurrent("1: at the same time, with clients that leave", leaving=LEAVING)
        self.killed()
        self.concurrent("3: with a new prefill server", leaving=0)
        if self.wrong:
            raise RunError(f"{self.wrong} answers differ")
        say("PASSED")
        return 0

    def prompts(self, count: int) -> list[list[int]]:
        """Random prompts of mixed lengths."""
        chosen = [LENGTHS[i % len(LENGTHS)] for i in range(count)]
        return [[self.choose.randrange(32, 255) for _ in range(length)] for length in chosen]

    def expected(self, prompts: list[list[int]]) -> list[dict[str, Any]]:
        """The answers of the unsplit server."""
        with ThreadPoolExecutor(AT_ONCE) as pool:
            return list(pool.map(lambda prompt: self.run.answer("plain", prompt), prompts))

    def compare(self, prompt: list[int], expected: dict[str, Any], answer: dict[str, Any]) -> None:
        self.wrong += self.run.differs(prompt, expected, answer)

    def streamed(self, name: str, prompt: list[int]) -> dict[str, Any]:
        return self.run.answer(name, prompt, stream=True)

    # --- clients that leave

    def concurrent(self, title: str, leaving: int) -> None:
        """Requests at the same time; the prompts must have come from the prefill server.

        The server does not count the clients that leave apart. Its computed tokens are therefore limited too, so that
        moved prompts of clients that leave do not make up for computed prompts of answers.
        """
        say(title)
        prompts, left = self.prompts(AT_ONCE), self.prompts(leaving)
        expected, before = self.expected(prompts), self.run.moved()
        computed_before = self.run.prompt_tokens("local_compute")
        with ThreadPoolExecutor(AT_ONCE + max(leaving, 1)) as pool:
            gone = [pool.submit(self.leave, prompt, i % 3) for i, prompt in enumerate(left)]
            answers = list(pool.map(lambda prompt: self.streamed("proxy", prompt), prompts))
            for one in gone:
                one.result()
        for prompt, known, answer in zip(prompts, expected, answers, strict=True):
            self.compare(prompt, known, answer)
        moved, tokens = self.run.moved() - before, sum(map(len, prompts))
        computed = self.run.prompt_tokens("local_compute") - computed_before
        say(f"  {moved:.0f} prompt tokens came from the prefill server, {computed:.0f} were computed")
        say(f"  {tokens} prompt tokens belong to answers")
        if moved < 0.9 * tokens or computed > 0.1 * tokens:
            raise RunError("the decode server computed prompts itself")
        self.run.check_freed(limit_s=self.run.options.lease + 15)

    def leave(self, prompt: list[int], events: int) -> None:
        """A client that closes its connection after `events` parts of the answer."""
        url = urllib.parse.urlsplit(self.run.urls["proxy"])
        connection = http.client.HTTPConnection(url.hostname or "", url.port, timeout=120)
        body = {"model": "m", "prompt": prompt, "max_tokens": 500, "ignore_eos": True, "stream": True}
        connection.request("POST", "/v1/completions", json.dumps(body), {"Content-Type": "application/json"})
        if events:
            answer = connection.getresponse()
            while events and (line := answer.readline()):
                events -= line.startswith(b"data: ")
        connection.close()

    # --- a killed server

    def killed(self) -> None:
        """Half of the clients use the proxy, and half the decode server alone."""
        say("2: SIGKILL to the prefill server under load")
        prompts = self.prompts(3 * AT_ONCE)
        expected = self.expected(prompts)
        kill, answered = threading.Event(), [0]

        def client(number: int) -> dict[str, Any] | None:
            name = ("proxy", "decode")[number % 2]
            try:
                answer = self.streamed(name, prompts[number])
            except RunError as exc:
                if name == "decode" or not kill.is_set():
                    raise
                say(f"  prompt of {len(prompts[number])} tokens: {str(exc)[:160]}")
                return None
            answered[0] += 1
            if answered[0] == KILLED_AFTER:
                kill.set()
                os.killpg(self.run.processes["prefill"].pid, signal.SIGKILL)
                say("  the prefill server is killed")
            return answer

        with ThreadPoolExecutor(AT_ONCE) as pool:
            answers = list(pool.map(client, range(len(prompts))))
        failed = answers.count(None)
        say(f"  {len(prompts) - failed} answers, {failed} errors of the proxy")
        if not 0 < failed < AT_ONCE * 3 // 2:
            raise RunError("the prefill server was not killed under load")
        for prompt, known, answer in zip(prompts, expected, answers, strict=True):
            if answer is not None:
                self.compare(prompt, known, answer)
        for prompt, known in zip(prompts[:4], expected[:4], strict=True):
            self.compare(prompt, known, self.streamed("decode", prompt))
        self.run.check_freed("decode", limit_s=self.run.options.lease + 15)
        self.run.serve("prefill", self.run.options.prefill_gpu, self.run.options.prefill_tp, "kv_producer")
        self.run.wait_ready("prefill", "/health")


def main() -> int:
    """Returns the exit code."""
    options = parser(__doc__ or "")
    options.set_defaults(policy="recompute", lease=20.0, seconds=500.0)
    run = Run(options.parse_args())
    with contextlib.suppress(KeyboardInterrupt):
        return run_to_end(run, LoadRun(run).check)
    return 1


if __name__ == "__main__":
    sys.exit(main())
