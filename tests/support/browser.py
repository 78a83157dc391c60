"""Headless Chromium, spoken to over its DevTools pipe: no driver, no port, no package beside the browser.

https://chromedevtools.github.io/devtools-protocol/ ; each message ends with a zero byte.
"""

from __future__ import annotations

import base64
import json
import os
import select
import shutil
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from conditions import PATIENCE_S

CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
WHY_SKIPPED = "no chromium on the PATH (Debian: apt-get install --no-install-recommends chromium)"
END_S = 30.0
FLAGS = (
    "--headless=new",
    "--remote-debugging-pipe",
    "--no-sandbox",  # it cannot be had as root
    "--disable-gpu",
    "--disable-dev-shm-usage",
    "--disable-extensions",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
    "--disable-features=PreloadTopChromeWebUI",  # a process for each window, for menus that nobody sees
    "--no-first-run",
    "--no-default-browser-check",
    "--hide-scrollbars",
    "--host-resolver-rules=MAP * ~NOTFOUND, EXCLUDE 127.0.0.1",
)
# The pipe is file descriptors 3 and 4, which `subprocess` cannot choose.
_LAUNCH = """
import os, sys
from fcntl import F_DUPFD, fcntl
reads, writes = (fcntl(int(given), F_DUPFD, 10) for given in sys.argv[1:3])
os.dup2(reads, 3)
os.dup2(writes, 4)
os.execv(sys.argv[3], sys.argv[3:])
"""


class Browser:
    """`with Browser(folder) as browser:` runs one; `folder` is its profile's."""

    def __init__(self, folder: Path) -> None:
        assert CHROMIUM is not None, WHY_SKIPPED
        theirs_in, self._write = os.pipe()
        self._read, theirs_out = os.pipe()
        command = [sys.executable, "-S", "-c", _LAUNCH, str(theirs_in), str(theirs_out), CHROMIUM, *FLAGS]
        with (folder / "chromium.log").open("wb") as log:
            self._process = subprocess.Popen(
                [*command, f"--user-data-dir={folder / 'profile'}", "about:blank"],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                pass_fds=(theirs_in, theirs_out),
            )
        os.close(theirs_in)
        os.close(theirs_out)
        self._number, self._rest = 0, b""
        self._tabs: dict[str, Tab] = {}
        self._targets: list[str] = []

    def __enter__(self) -> Browser:
        return self

    def __exit__(self, *exc: object) -> None:
        try:
            if exc[0] is None:
                self.call("Browser.close")
        finally:
            os.close(self._write)  # without its pipe it ends
            try:
                self._process.wait(END_S)
            except subprocess.TimeoutExpired:
                self._process.kill()
                self._process.wait()
            os.close(self._read)

    def tab(self, url: str, *, width: int = 1400, height: int = 1000, **media: str) -> Tab:
        """A new page. `media`: features, as `prefers_color_scheme="dark"`.

        Pages share cookies only: a context, and so a window, for each page would take several times as long.
        """
        target = self.call("Target.createTarget", url="about:blank")["targetId"]
        self._targets.append(target)
        session = self.call("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        tab = self._tabs[session] = Tab(self, session)
        for domain in ("Runtime", "Log", "Network", "Page"):
            tab.call(f"{domain}.enable")
        tab.size(width, height)
        features = [{"name": name.replace("_", "-"), "value": value} for name, value in media.items()]
        tab.call("Emulation.setEmulatedMedia", features=features)
        tab.load("Page.navigate", url=url)
        return tab

    def close_tabs(self) -> None:
        """Closes all pages: an open page requests and draws the status each second."""
        while self._targets:
            self.call("Target.closeTarget", targetId=self._targets.pop())
        self._tabs.clear()

    def call(self, method: str, session: str | None = None, **params: Any) -> dict[str, Any]:
        """The result of one command; events that come before it go to their tabs."""
        self._number += 1
        message = {"id": self._number, "method": method, "params": params}
        if session is not None:
            message["sessionId"] = session
        os.write(self._write, json.dumps(message).encode() + b"\0")
        deadline_s = time.monotonic() + PATIENCE_S
        while (reply := self.hear(deadline_s)).get("id") != self._number:
            pass
        assert "error" not in reply, f"{method}: {reply['error']}"
        return dict(reply["result"])

    def hear(self, deadline_s: float) -> dict[str, Any]:
        """The next message; an event has been given to its tab."""
        message = self._message(deadline_s)
        tab = self._tabs.get(message.get("sessionId", ""))
        if tab is not None and "method" in message:
            tab.hear(message["method"], message["params"])
        return message

    def _message(self, deadline_s: float) -> dict[str, Any]:
        while b"\0" not in self._rest:
            ready, _, _ = select.select([self._read], [], [], max(0.0, deadline_s - time.monotonic()))
            assert ready, "chromium does not answer"
            data = os.read(self._read, 1 << 20)
            assert data, "chromium has ended"
            self._rest += data
        message, _, self._rest = self._rest.partition(b"\0")
        return dict(json.loads(message))


class Tab:
    """One page: `problems` are its console's errors and its exceptions, `requested` every URL it asked for."""

    def __init__(self, browser: Browser, session: str) -> None:
        self._browser, self._session, self._loads = browser, session, 0
        self.problems: list[str] = []
        self.requested: list[str] = []

    def call(self, method: str, **params: Any) -> dict[str, Any]:
        """A command to this page."""
        return self._browser.call(method, self._session, **params)

    def load(self, method: str = "Page.reload", **params: Any) -> None:
        """Another page, or the same one again; returns when it is there."""
        loads, deadline_s = self._loads, time.monotonic() + PATIENCE_S
        self.call(method, **params)
        while self._loads == loads:
            self._browser.hear(deadline_s)

    def hear(self, method: str, params: dict[str, Any]) -> None:
        """An event of this page."""
        match method:
            case "Page.loadEventFired":
                self._loads += 1
            case "Runtime.exceptionThrown":
                details = params["exceptionDetails"]
                self.problems.append(details.get("exception", {}).get("description", details["text"]))
            case "Runtime.consoleAPICalled" if params["type"] in ("error", "warning", "assert"):
                self.problems.append(str(params["args"]))
            case "Log.entryAdded" if params["entry"]["level"] in ("error", "warning"):
                self.problems.append(params["entry"]["text"])
            case "Network.requestWillBeSent":
                self.requested.append(params["request"]["url"])

    def value(self, expression: str) -> Any:
        """What JavaScript says. Raises `AssertionError` for an exception."""
        reply = self.call("Runtime.evaluate", expression=expression, returnByValue=True, awaitPromise=True)
        assert "exceptionDetails" not in reply, reply["exceptionDetails"]
        return reply["result"].get("value")

    def until(self, expression: str, timeout_s: float = PATIENCE_S) -> Any:
        """Waits until the value is true, and returns it."""
        deadline_s = time.monotonic() + timeout_s
        while not (value := self.value(expression)):
            assert time.monotonic() < deadline_s, f"{expression} stays {value!r}; problems: {self.problems}"
            time.sleep(0.02)
        return value

    def text(self, selector: str) -> str:
        """What stands in the first such element; empty without one."""
        return str(self.value(f"document.querySelector({json.dumps(selector)})?.innerText ?? ''"))

    def type(self, text: str) -> None:
        """Keys pressed where the focus is; `\\r` is Enter."""
        for one in text:
            self.call("Input.dispatchKeyEvent", type="keyDown", text=one, key="Enter" if one == "\r" else one)
            self.call("Input.dispatchKeyEvent", type="keyUp", key="Enter" if one == "\r" else one)

    def point(self, x: float, y: float) -> None:
        """Moves the mouse there."""
        self.call("Input.dispatchMouseEvent", type="mouseMoved", x=x, y=y)

    def size(self, width: int, height: int) -> None:
        """Of the window, in CSS pixels."""
        self.call(
            "Emulation.setDeviceMetricsOverride",
            width=width,
            height=height,
            deviceScaleFactor=1,
            mobile=False,
        )

    def screenshot(self, file: Path) -> None:
        """The whole page as PNG."""
        height = self.value("document.documentElement.scrollHeight")
        width = self.value("innerWidth")
        area = {"x": 0, "y": 0, "width": width, "height": height, "scale": 1}
        shot = self.call("Page.captureScreenshot", clip=area, captureBeyondViewport=True)
        file.write_bytes(base64.b64decode(shot["data"]))
