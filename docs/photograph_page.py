"""Makes docs/page.png, a screenshot of a server's live page under load. Run: python docs/photograph_page.py

Needs Chromium, and `disagg` installed (`make venv`). `--scheme dark` takes the page in dark colours. A machine with
GPUs and without Chromium records what the page shows, and another machine takes the screenshot:

    python docs/photograph_page.py --serve "serve --random-init llama-3.1-8b --port 0" --record status.jsonl
    python docs/photograph_page.py --replay status.jsonl
"""

from __future__ import annotations

import argparse
import re
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from urllib.request import urlopen

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
RECORDED_S = LOADED_S + 10
LOOK_S = 1.0
"""Seconds between two requests of the page for the status."""


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


@contextmanager
def loaded(serve: str, load: str, folder: Path) -> Iterator[str]:
    """Runs a server under load until the end of the block; yields the server's URL."""
    log = folder / "serve.log"
    with running(serve, log) as server:
        url = url_of(server, log)
        with running(f"{load} --url {url}/v1", folder / "load.log"):
            yield url


@contextmanager
def replayed(file: Path) -> Iterator[str]:
    """Serves the page with recorded statuses, the first one when the page asks first; yields the URL."""
    from disagg.api.page import page_response

    statuses = file.read_bytes().splitlines()
    began_s: list[float] = []

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            began_s.extend([] if began_s or self.path == "/" else [time.monotonic()])
            found = page_response() if self.path == "/" else None
            second = int((time.monotonic() - began_s[0]) / LOOK_S) if began_s else 0
            body = bytes(found.body) if found is not None else statuses[min(second, len(statuses) - 1)]
            self.send_response(200)
            self.send_header("Content-Type", "text/html" if found is not None else "application/json")
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *args: object) -> None: ...

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{server.server_port}"
        server.shutdown()


def record(url: str, file: Path) -> None:
    """Writes the server's status to `file` each second, a line each time."""
    with file.open("wb") as output:
        for _ in range(int(RECORDED_S / LOOK_S)):
            began_s = time.monotonic()
            with urlopen(f"{url}/status") as reply:
                output.write(reply.read() + b"\n")
            time.sleep(max(0.0, LOOK_S - (time.monotonic() - began_s)))


def photograph(url: str, file: Path, scheme: str, folder: Path) -> None:
    """Saves a screenshot of the page after `LOADED_S`."""
    from PIL import Image

    with Browser(folder) as browser:
        tab = browser.tab(f"{url}/", width=1400, prefers_color_scheme=scheme)
        tab.until(f"trace.length && trace.at(-1).at - trace[0].at > {LOADED_S}", timeout_s=LOADED_S * 3)
        tab.screenshot(file)
    with Image.open(file) as picture:
        # 256 colours need a third of the bytes; each colour differs by a few of 255 at most.
        few = picture.convert("RGB").quantize(256, Image.Quantize.MAXCOVERAGE, dither=Image.Dither.NONE)
    few.save(file, optimize=True)


def main() -> None:
    """Starts a server and load, and saves the screenshot, or what the page shows."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--scheme", choices=("light", "dark"), default="light")
    parser.add_argument("--file", type=Path, default=ROOT / "docs" / "page.png")
    parser.add_argument("--serve", default=SERVE, help="command of disagg that starts the server")
    parser.add_argument("--load", default=LOAD, help="command of disagg that loads the server")
    parser.add_argument("--record", type=Path, help="write the statuses of a minute here; take no screenshot")
    parser.add_argument("--replay", type=Path, help="show these statuses instead of starting a server")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        if options.replay is not None:
            with replayed(options.replay) as url:
                photograph(url, options.file, options.scheme, folder)
            return
        with loaded(options.serve, options.load, folder) as url:
            if options.record is not None:
                record(url, options.record)
            else:
                photograph(url, options.file, options.scheme, folder)


if __name__ == "__main__":
    main()
