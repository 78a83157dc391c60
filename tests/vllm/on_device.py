"""Compares a prefill and a decode server of vLLM, with DisaggConnector, with one vLLM server: equal greedy tokens.

    VLLM_PP=/path/of/vllm DISAGG_PP=/path/of/disagg:/path/of/its/site-packages python3 tests/vllm/on_device.py

`VLLM_PP`, `DISAGG_PP`: entries of PYTHONPATH, with colons between them; the first entry of `DISAGG_PP` is the tree of
disagg. The script itself needs Python's standard library only. It makes a small Llama with random weights, so that
no network is used. `--cpu` needs a build of vLLM for CPUs.
Exit code 0: all answers are equal, KV has moved, and the prefill server has freed its blocks.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import random
import re
import signal
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

TAIL_LINES = 60
MODEL = """
import json, pathlib, sys
from disagg.model.load.tiny import make_tiny_checkpoint
sizes = {"layers": 8, "hidden": 512, "q_heads": 8, "kv_heads": 4, "head_dim": 64, "mlp": 1024, "context_tokens": 8192}
file, window = make_tiny_checkpoint(pathlib.Path(sys.argv[1]), **sizes) / "config.json", int(sys.argv[2])
if window:
    kinds = ["full_attention", "sliding_attention", "sliding_attention", "sliding_attention"] * 2
    file.write_text(json.dumps(json.loads(file.read_text()) | {"layer_types": kinds, "sliding_window": window}))
"""
"""Makes the model: its greedy answers depend on the whole prompt, and the best token leads by a clear margin."""


def main() -> int:
    options = parser(__doc__ or "").parse_args()
    run = Run(options)
    return run_to_end(run, run.compare)


def run_to_end(run: Run, check: Callable[[], int]) -> int:
    """Starts the servers, checks, and ends the servers; returns the exit code."""
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))  # `timeout`: the servers end too
    try:
        run.start()
        return check()
    except RunError as exc:
        say(f"FAILED: {exc}")
        run.show_logs()
        return 1
    finally:
        run.stop()


def parser(description: str) -> argparse.ArgumentParser:
    """Arguments of a run with servers."""
    parser = argparse.ArgumentParser(
        description=description, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--prefill-gpu", default="0", help="CUDA_VISIBLE_DEVICES of the prefill server")
    parser.add_argument("--decode-gpu", default="0")
    parser.add_argument("--plain-gpu", default="0", help="of the unsplit server")
    parser.add_argument("--prefill-tp", type=int, default=1)
    parser.add_argument("--decode-tp", type=int, default=1)
    parser.add_argument(
        "--plain-tp",
        type=int,
        default=1,
        help="ranks of the unsplit server; in 16 bits, other numbers of ranks round otherwise",
    )
    parser.add_argument(
        "--cpu", action="store_true", help="run on the CPU, with prompts of at most 1,000 tokens"
    )
    parser.add_argument("--memory", default="0.3", help="--gpu-memory-utilization of each server")
    parser.add_argument("--kv-bytes", default=str(1 << 30), help="--kv-cache-memory-bytes of each server")
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument(
        "--window",
        type=int,
        default=0,
        help="sliding window of six of the eight layers: several KV cache groups",
    )
    parser.add_argument(
        "--chunked", action="store_true", help="a model of which six of eight layers attend within chunks"
    )
    parser.add_argument(
        "--recurrent", action="store_true", help="a model with recurrent layers: six of eight are of Mamba-2"
    )
    parser.add_argument("--graphs", action="store_true", help="without --enforce-eager")
    parser.add_argument(
        "--sync", action="store_true", help="--no-async-scheduling: layers leave during the step"
    )
    parser.add_argument("--transport", default="auto", help="transport.backend of DisaggConnector")
    parser.add_argument("--block-size", default="", help="--block-size of the decode server")
    parser.add_argument("--policy", default="fail", help="kv_load_failure_policy")
    parser.add_argument(
        "--peer-timeout", type=float, default=10.0, help="control.peer_timeout_s of DisaggConnector"
    )
    parser.add_argument("--lease", type=float, default=120.0, help="lease_s of DisaggConnector")
    parser.add_argument("--early", type=float, default=0.0, help="early_s of DisaggConnector")
    parser.add_argument("--tokens", type=int, default=32)
    parser.add_argument("--seconds", type=float, default=235.0)
    parser.add_argument("--vllm-arg", action="append", default=[], help="for each vLLM server; repeatable")
    parser.add_argument("--out", default=str(Path(os.environ.get("OUT", "/tmp")) / "vllm_on_device"))
    return parser


class RunError(Exception):
    """A check failed, or a server."""


class Run:
    """Servers and requests of one run."""

    def __init__(self, options: argparse.Namespace) -> None:
        self.options, self.out = options, Path(options.out)
        self.out.mkdir(parents=True, exist_ok=True)
        self.end_s = time.monotonic() + options.seconds
        vllm, ours = os.environ["VLLM_PP"].split(":"), os.environ["DISAGG_PP"].split(":")
        # vLLM's dependencies come before ours; our packages before others of the same name (`kernels`).
        self.vllm_path = ":".join([ours[0], *vllm, *ours[1:]])
        self.our_path = ":".join(ours)
        self.processes: dict[str, subprocess.Popen[bytes]] = {}
        self.urls: dict[str, str] = {}

    # --- servers

    def start(self) -> None:
        model, keys = self.out / "model", self.out / "keys.json"
        if not (model / "config.json").exists():
            self.make_model(model)
        if not keys.exists():
            self.ours("keys", "-m", "disagg", "keys", str(keys))
        self.serve("prefill", self.options.prefill_gpu, self.options.prefill_tp, "kv_producer")
        decode_args = ["--block-size", self.options.block_size] if self.options.block_size else []
        self.serve("decode", self.options.decode_gpu, self.options.decode_tp, "kv_consumer", *decode_args)
        self.serve("plain", self.options.plain_gpu, self.options.plain_tp, None)
        for name in ("prefill", "decode", "plain"):
            self.wait_ready(name, "/health")
        port = free_port()
        pair = ("--prefill", self.urls["prefill"], "--decode", self.urls["decode"])
        command = [sys.executable, "-m", "disagg", "vllm-proxy", *pair, "--port", str(port)]
        self.launch("proxy", command, {"PYTHONPATH": self.our_path}, port)
        self.wait_ready("proxy", "/v1/models")

    def make_model(self, folder: Path) -> None:
        scripts = Path(__file__).parent
        if self.options.recurrent:
            self.ours("model", str(scripts / "tiny_hybrid.py"), str(folder))
        elif self.options.chunked:
            self.ours("model", str(scripts / "tiny_chunked.py"), str(folder))
        else:
            self.ours("model", "-c", MODEL, str(folder), str(self.options.window))

    def ours(self, name: str, *arguments: str) -> None:
        log = self.out / f"{name}.log"
        with log.open("wb") as file:
            done = subprocess.run(
                [sys.executable, *arguments],
                env=os.environ | {"PYTHONPATH": self.our_path},
                stdout=file,
                stderr=subprocess.STDOUT,
                timeout=90,
                check=False,
            )
        if done.returncode:
            raise RunError(f"{name}: exit code {done.returncode}")

    def serve(self, name: str, gpu: str, tp: int, role: str | None, *more: str) -> None:
        """Starts a server; one that was started before under this name is replaced, at its port."""
        options = self.options
        port = int(self.urls[name].rpartition(":")[2]) if name in self.urls else free_port()
        command = [
            *(sys.executable, "-m", "vllm.entrypoints.openai.api_server"),
            *("--model", str(self.out / "model"), "--served-model-name", "m", "--port", str(port)),
            *("--dtype", options.dtype, "--max-model-len", "8192", "--max-num-seqs", "32"),
            *("--max-num-batched-tokens", "2048", "--tensor-parallel-size", str(tp)),
            *self.device_arguments(),
            *([] if options.graphs else ["--enforce-eager"]),
            *(["--no-async-scheduling"] if options.sync else []),
            *more,
            *options.vllm_arg,
        ]
        if role is not None:
            extra = {
                "port": free_port(),
                "control": {
                    "host": "127.0.0.1",
                    "key_file": str(self.out / "keys.json"),
                    "peer_timeout_s": options.peer_timeout,
                },
                "transport": {"backend": options.transport},
                "lease_s": options.lease,
                "early_s": options.early,
            }
            transfer = {
                "kv_connector": "DisaggConnector",
                "kv_connector_module_path": "disagg.vllm.connector",
                "kv_role": role,
                "kv_load_failure_policy": options.policy,
                "kv_connector_extra_config": extra,
            }
            command += ["--kv-transfer-config", json.dumps(transfer)]
        else:
            command += ["--no-enable-prefix-caching"]
        more_env = {
            **({"VLLM_CPU_OMP_THREADS_BIND": "nobind", "OMP_NUM_THREADS": "1"} if options.cpu else {}),
            **({"VLLM_CPU_KVCACHE_SPACE": "1"} if options.cpu else {"CUDA_VISIBLE_DEVICES": gpu}),
            "PYTHONPATH": self.vllm_path,
            "VLLM_USE_FLASHINFER_SAMPLER": "0",
            "HF_HUB_OFFLINE": "1",
            "VLLM_NO_USAGE_STATS": "1",
            "PYTHONUNBUFFERED": "1",
        }
        self.launch(name, command, more_env, port)

    def device_arguments(self) -> tuple[str, ...]:
        if self.options.cpu:
            return ()
        return (
            "--gpu-memory-utilization",
            self.options.memory,
            "--kv-cache-memory-bytes",
            self.options.kv_bytes,
        )

    def launch(self, name: str, command: list[str], more_env: dict[str, str], port: int) -> None:
        with (self.out / f"{name}.log").open("ab") as log:
            self.processes[name] = subprocess.Popen(
                command,
                env=os.environ | more_env,
                stdout=log,
                stderr=subprocess.STDOUT,
                # Not a session: Linux shares cores among sessions first, and left one without any for seconds.
                process_group=0,
            )
        self.urls[name] = f"http://127.0.0.1:{port}"

    def wait_ready(self, name: str, path: str) -> None:
        while True:
            if (code := self.processes[name].poll()) is not None:
                raise RunError(f"{name} ended with exit code {code}")
            if time.monotonic() > self.end_s - 40:
                raise RunError(f"{name} is not ready")
            with contextlib.suppress(OSError), urllib.request.urlopen(self.urls[name] + path, timeout=5):
                say(f"{name} is ready, {self.end_s - time.monotonic():.0f} s are left")
                return
            time.sleep(0.5)

    def stop(self) -> None:
        for process in self.processes.values():
            with contextlib.suppress(ProcessLookupError):
                process.terminate()
        end_s = time.monotonic() + 8
        for name, process in self.processes.items():
            try:
                code = process.wait(max(0.1, end_s - time.monotonic()))
                say(f"{name} ended with {code}")
            except subprocess.TimeoutExpired:
                say(f"{name} did not end within 8 s of SIGTERM")
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)

    def show_logs(self) -> None:
        for log in sorted(self.out.glob("*.log")):
            lines = log.read_text(errors="replace").splitlines()
            errors = [
                line for line in lines if re.search(r"Error|Traceback|not_linked|kv_not_received", line)
            ]
            say(f"===== {log.name}: {len(lines)} lines; first errors, then the end")
            for line in errors[:12] + lines[-TAIL_LINES:]:
                say(line[:300])

    # --- requests

    def compare(self) -> int:
        rng = random.Random(5)
        tail = [rng.randrange(32, 255) for _ in range(12)]
        lengths = (20, 33, 64, 100, 333, 1000, 1900, 2100, 4500)
        lengths = tuple(length for length in lengths if length <= 1000 or not self.options.cpu)
        prompts = [[rng.randrange(32, 255) for _ in range(length)] + tail for length in lengths]
        plain = [self.answer("plain", prompt) for prompt in prompts]
        if len({tuple(one["tokens"]) for one in plain}) < len(plain):
            raise RunError(
                "answers do not depend on the start of the prompt, so equal answers would show nothing"
            )
        wrong = 0
        say("one at a time:")
        for prompt, expected in zip(prompts, plain, strict=True):
            wrong += self.differs(prompt, expected, self.answer("proxy", prompt))
        self.check_moved(sum(len(prompt) for prompt in prompts))
        say("at the same time, with streams, other prompts:")
        others = [
            [rng.randrange(32, 255) for _ in range(length)] + tail for length in lengths for _ in range(3)
        ]
        with ThreadPoolExecutor(len(others)) as pool:
            expected_answers = list(pool.map(lambda one: self.answer("plain", one), others))
            answers = list(pool.map(lambda one: self.answer("proxy", one, stream=True), others))
        for prompt, expected, answer in zip(others, expected_answers, answers, strict=True):
            wrong += self.differs(prompt, expected, answer)
        self.check_moved(sum(len(prompt) for prompt in prompts + others))
        self.check_freed()
        if wrong:
            raise RunError(f"{wrong} answers differ")
        say(f"PASSED: {len(prompts) + len(others)} answers are equal")
        return 0

    def answer(self, name: str, prompt: list[int], stream: bool = False) -> dict[str, Any]:
        """Returns the tokens, their likeliest alternatives, and the time that the answer took."""
        began_s = time.monotonic()
        body = {
            **{"model": "m", "prompt": prompt, "max_tokens": self.options.tokens, "temperature": 0},
            **{"ignore_eos": True, "return_token_ids": True, "logprobs": 2, "stream": stream},
        }
        request = urllib.request.Request(
            self.urls[name] + "/v1/completions",
            json.dumps(body).encode(),
            {"Content-Type": "application/json"},
        )
        try:
            with urllib.request.urlopen(request, timeout=max(1, self.end_s - 15 - time.monotonic())) as reply:
                text = reply.read().decode()
                took_s = time.monotonic() - began_s
        except urllib.error.HTTPError as exc:
            raise RunError(f"{name} answered {exc.code}: {exc.read()[:500]!r}") from exc
        except OSError as exc:
            raise RunError(f"{name} did not answer a prompt of {len(prompt)} tokens: {exc}") from exc
        if not stream:
            choices = json.loads(text)["choices"]
        else:
            # Not splitlines(): JSON strings may hold U+2028 and other characters that end a line of text.
            lines = [line for line in text.split("\n") if line.startswith("data: ")]
            events = [line.removeprefix("data: ") for line in lines if line != "data: [DONE]"]
            chunks = [json.loads(event) for event in events]
            if bad := [chunk for chunk in chunks if "choices" not in chunk]:
                raise RunError(f"{name} answered {bad[0]}")
            choices = [chunk["choices"][0] for chunk in chunks if chunk["choices"]]
        tokens = [token for choice in choices for token in choice.get("token_ids") or ()]
        tops = [top for choice in choices for top in (choice.get("logprobs") or {}).get("top_logprobs") or ()]
        return {"tokens": tokens, "tops": tops, "took_s": took_s}

    def differs(self, prompt: list[int], expected: dict[str, Any], answer: dict[str, Any]) -> int:
        """Returns 1 for an answer that differs where the reference has a clear choice."""
        took_ms = answer["took_s"] * 1e3
        say(f"  prompt of {len(prompt)} tokens: {len(answer['tokens'])} tokens, {took_ms:.0f} ms", end="")
        if expected["tokens"] == answer["tokens"]:
            say(", equal")
            return 0
        pairs = zip(expected["tokens"], answer["tokens"], strict=False)
        first = next((i for i, (one, other) in enumerate(pairs) if one != other), len(answer["tokens"]))
        top = (
            sorted(expected["tops"][first].values())[::-1] if first < len(expected["tops"]) else [0.0, -99.0]
        )
        gap = top[0] - top[1]
        # Kernels for other batch sizes sum in another order; only a near tie may then fall the other way.
        near = gap < 0.03
        say(f", differs from token {first}, where two tokens are {gap:.4f} apart{' (a tie)' if near else ''}")
        return 0 if near else 1

    # --- checks of the servers

    def metric(self, name: str, pattern: str) -> float:
        with urllib.request.urlopen(self.urls[name] + "/metrics", timeout=10) as reply:
            text = reply.read().decode()
        found = re.findall(rf"^{pattern}\S*\s+(\S+)$", text, re.MULTILINE)
        if not found:
            raise RunError(f"{name} has no metric {pattern}")
        return sum(float(value) for value in found)

    def moved(self) -> float:
        """Prompt tokens that have come to the decode server."""
        return self.prompt_tokens("external_kv_transfer")

    def prompt_tokens(self, source: str) -> float:
        """Prompt tokens of the decode server by source, each prompt counted once its first token is computed."""
        return self.metric("decode", rf'vllm:prompt_tokens_by_source_total\S*source="{source}"')

    def check_moved(self, tokens: int) -> None:
        moved = self.moved()
        say(f"decode server: {moved:.0f} of {tokens} prompt tokens came from the prefill server")
        if moved < tokens * 0.9:
            raise RunError("the decode server computed prompts itself")

    def check_freed(self, *names: str, limit_s: float = 15) -> None:
        names = names or ("prefill", "decode")
        end_s = time.monotonic() + limit_s
        while True:
            used = {name: self.metric(name, "vllm:kv_cache_usage_perc") for name in names}
            if not any(used.values()):
                say(f"all blocks are free: {', '.join(names)}")
                return
            if time.monotonic() > end_s:
                raise RunError(f"blocks are still in use, as shares of the cache: {used}")
            time.sleep(0.5)


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as listening:
        return int(listening.getsockname()[1])


def say(text: str, end: str = "\n") -> None:
    sys.stdout.write(text + end)
    sys.stdout.flush()


if __name__ == "__main__":
    sys.exit(main())
