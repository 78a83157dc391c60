"""An ASGI extension of this server: writes parts of a response's body immediately, without an `await`."""

from __future__ import annotations

from collections.abc import Callable
from typing import cast

from starlette.types import Scope
from uvicorn.protocols.http.httptools_impl import RequestResponseCycle

EXTENSION = "disagg.body_writer"


def body_writer(scope: Scope) -> Callable[[bytes], bool] | None:
    """Returns the function that writes a part of the response's body; None on a server without the extension.

    The response must have started and not ended. The function writes the part and returns True. If the client reads
    too slowly, or the response is not chunked HTTP/1.1, the function writes nothing and returns False: the caller
    must then send the part with `await`. Before the start, an empty part returns whether the start would not wait.
    """
    found: Callable[[bytes], bool] | None = scope.get("extensions", {}).get(EXTENSION)
    return found


def offer_body_writer(cycle: RequestResponseCycle) -> None:
    """Adds the extension to the scope of a request."""

    def write(data: bytes) -> bool:
        if cycle.flow.write_paused or (cycle.response_started and not cycle.chunked_encoding):
            return False
        if data and not cycle.disconnected:  # an empty chunk would end the body
            cycle.transport.write(b"%x\r\n%b\r\n" % (len(data), data))
        return True

    scope: Scope = cast(Scope, cycle.scope)  # uvicorn's type excludes this extension
    scope["extensions"] = {EXTENSION: write}
