"""The live page at `/`: one HTML file with its style and script. The script requests only `/status`."""

from __future__ import annotations

import base64
import hashlib
import re
from functools import cache
from importlib.resources import files

from starlette.responses import Response


def page_response() -> Response:
    """Returns the page, which contains no data: its script requests `/status` with the user's key."""
    body, policy = _page()
    headers = {
        "Content-Security-Policy": policy,
        "X-Content-Type-Options": "nosniff",
        "Referrer-Policy": "no-referrer",
        "Cache-Control": "no-cache",  # so that browsers do not show the cached page of an older server
    }
    return Response(body, headers=headers, media_type="text/html")


@cache
def _page() -> tuple[bytes, str]:
    """Returns the file and a content security policy (CSP) that allows only the file's own script and style."""
    html = files("disagg.api").joinpath("page.html").read_text(encoding="utf-8")
    rules = {
        "default-src": "'none'",
        "script-src": _hash(html, "script"),
        "style-src": _hash(html, "style"),
        "img-src": "data:",  # the icon
        "connect-src": "'self'",
        "base-uri": "'none'",
        "form-action": "'none'",
        "frame-ancestors": "'none'",
    }
    return html.encode(), "; ".join(f"{name} {value}" for name, value in rules.items())


def _hash(html: str, tag: str) -> str:
    """Returns the CSP hash of the content of `<tag>`."""
    [content] = re.findall(f"<{tag}>(.*?)</{tag}>", html, re.DOTALL)
    return f"'sha256-{base64.b64encode(hashlib.sha256(content.encode()).digest()).decode()}'"
