"""An ASGI extension of this server: parts of a response's body are written at once, without an `await`."""

from __future__ import annotations

from collections.abc import Callable
from typing import cast

from starlette.types import Scope
from uvicorn.protocols.http.httptools_impl import RequestResponseCycle

EXTENSION = "disagg.body_writer"


def body_writer(scope: Scope) -> Callable[[bytes], bool] | None:
    """Returns the function that writes a part of the response's body; None if the server has none.

    The function needs a response that was started and has not ended. It returns False, and has written nothing, if
    the part must be sent with an `await`: the client reads too slowly, or the response has no HTTP/1.1 chunks.
    """
    found: Callable[[bytes], bool] | None = scope.get("extensions", {}).get(EXTENSION)
    return found


def offer_body_writer(cycle: RequestResponseCycle) -> None:
    """Adds the extension to the scope of a request."""

    def write(data: bytes) -> bool:
        if cycle.flow.write_paused or not cycle.chunked_encoding:
            return False
        if data and not cycle.disconnected:  # an empty chunk would end the body
            cycle.transport.write(b"%x\r\n%b\r\n" % (len(data), data))
        return True

    scope: Scope = cast(Scope, cycle.scope)  # uvicorn's type does not know further extensions
    scope["extensions"] = {EXTENSION: write}
