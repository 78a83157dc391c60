"""`disagg serve` as users run it: a process of its own over Ray, on the CPU, with a tiny checkpoint."""

from __future__ import annotations

import re
import subprocess
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import httpx
import openai
from api_server import TEMPLATE, until

from disagg.model.tiny import byte_tokenizer, make_tiny_checkpoint

API_KEY = "secret"


@dataclass
class Served:
    """The server's process and the way to it."""

    process: subprocess.Popen[bytes]
    url: str
    checkpoint: Path
    client: openai.OpenAI
    log: Path

    def metric(self, name: str) -> float:
        text = httpx.get(f"{self.url}/metrics", trust_env=False).text
        found = re.search(rf"^{re.escape(name)} (\S+)$", text, re.MULTILINE)
        return float(found[1]) if found else 0.0


@contextmanager
def serve_process(
    folder: Path, *flags: str, api_key: str = API_KEY, environment: Mapping[str, str] | None = None
) -> Iterator[Served]:
    """Two prefill ranks and one decode rank; ended with a signal at the end of the block, if they run until then."""
    checkpoint = make_tiny_checkpoint(folder / "tiny", layers=3, hidden=96, head_dim=8, mlp=96)
    tokenizer = byte_tokenizer()
    tokenizer.chat_template = TEMPLATE
    tokenizer.save_pretrained(checkpoint)
    (folder / "keys").write_text(f"{api_key}\n")
    command = [sys.executable, "-m", "disagg.cli", "serve", "--model", str(checkpoint), "--device", "cpu"]
    command += ["--prefill-tp", "2", "--decode-tp", "1", "--port", "0"]
    command += ["--api-key-file", str(folder / "keys"), "--set", "log.format=json", *flags]
    log = folder / "log"
    with log.open("wb") as output:
        process = subprocess.Popen(
            command,
            stdout=output,
            stderr=output,
            start_new_session=True,
            cwd=Path(__file__).parents[2],
            env=environment,
        )
    try:
        said = until(
            lambda: process.poll() is not None or re.search(r'"url": "([^"]+)"', log.read_text()),
            timeout_s=120,
        )
        assert isinstance(said, re.Match), log.read_text()
        with openai.OpenAI(base_url=f"{said[1]}/v1", api_key=api_key, max_retries=0, timeout=60) as client:
            yield Served(process, said[1], checkpoint, client, log)
    finally:
        if process.poll() is None:
            process.terminate()
            process.wait(timeout=60)
