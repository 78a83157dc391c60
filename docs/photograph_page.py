"""Makes docs/page.png, a screenshot of a server's live page under load. Run: python docs/photograph_page.py

Needs Chromium, and `disagg` installed (`make venv`). `--scheme dark` takes the page in dark colours.
"""

from __future__ import annotations

import argparse
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from PIL import Image

ROOT = Path(__file__).resolve().parents[1]
sys.path.append(str(ROOT / "tests" / "support"))

from browser import Browser  # noqa: E402 - found by the line above

DISAGG = (sys.executable, "-m", "disagg")
SERVE = (
    "serve --device cpu --prefill-tp 2 --decode-tp 1 --set decode.groups=2 --model-name tiny-llama --port 0"
)
LOAD = (
    "bench serve --concurrency 5 --duration-s 900 --input-tokens 64-900 --output-tokens 16-120 --ignore-eos"
)
LOADED_S = 60
"""Seconds of load before the screenshot: the time that the page's latencies cover."""


@contextmanager
def running(command: str, log: Path) -> Iterator[subprocess.Popen[bytes]]:
    """Runs a `disagg` command until the end of the block; its output is written to `log`."""
    with log.open("wb") as output:
        process = subprocess.Popen([*DISAGG, *command.split()], cwd=ROOT, stdout=output, stderr=output)
    try:
        yield process
    finally:
        process.terminate()
        process.wait(60)


def url_of(server: subprocess.Popen[bytes], log: Path) -> str:
    """Waits until the server logs its URL, and returns the URL."""
    while not (found := re.search(r"http://127\.0\.0\.1:\d+", log.read_text())):
        if server.poll() is not None:
            raise SystemExit(log.read_text())
        time.sleep(0.1)
    return found[0]


def main() -> None:
    """Starts a server and load, and saves the screenshot."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--scheme", choices=("light", "dark"), default="light")
    parser.add_argument("--file", type=Path, default=ROOT / "docs" / "page.png")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        log = folder / "serve.log"
        with running(SERVE, log) as server:
            url = url_of(server, log)
            load = running(f"{LOAD} --url {url}/v1", folder / "load.log")
            with load, Browser(folder) as browser:
                tab = browser.tab(f"{url}/", width=1400, prefers_color_scheme=options.scheme)
                tab.until(
                    f"trace.length && trace.at(-1).at - trace[0].at > {LOADED_S}", timeout_s=LOADED_S * 3
                )
                tab.screenshot(options.file)
    with Image.open(options.file) as picture:
        # 256 colours need a third of the bytes; each colour differs by a few of 255 at most.
        few = picture.convert("RGB").quantize(256, Image.Quantize.MAXCOVERAGE, dither=Image.Dither.NONE)
    few.save(options.file, optimize=True)


if __name__ == "__main__":
    main()
