"""Sends and dispatches the active messages of a decode rank, for all parts of its receiver."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from disagg.core.errors import TransportError
from transport.active_messages import ActiveMessages, Handler
from transport.base import Transport
from transport.control import messages as m

RECEIVED = (m.LeaseRequest, m.ProbeRequest, m.ProbeEnded)
"""Types of active messages that prefill ranks send to a decode rank."""


class ReceiverMessages(ActiveMessages):
    """Active messages of one receiver, whose parts register handlers. Owned by the transfer thread."""

    def __init__(self, transport: Transport, announce: Callable[[str, m.Message], None]) -> None:
        super().__init__(transport, announce, dict.fromkeys(RECEIVED, self._dispatch), self._failed)
        self._registered: dict[type[m.Message], Handler] = {}
        self._failure_handlers: dict[type[m.Message], Callable[[str, Any, TransportError], None]] = {}

    def on(self, kind: type[m.Message], handler: Handler) -> None:
        """Registers the handler for messages of one type; `RECEIVED` lists the types."""
        self._registered[kind] = handler

    def on_failure(self, kind: type[m.Message], handler: Callable[[str, Any, TransportError], None]) -> None:
        """Registers the handler for undelivered messages of one type. Types without a handler are dropped."""
        self._failure_handlers[kind] = handler

    def _dispatch(self, peer: str, message: m.Message) -> None:
        self._registered[type(message)](peer, message)

    def _failed(self, peer: str, message: m.Message, error: TransportError) -> None:
        handler = self._failure_handlers.get(type(message))
        if handler is not None:
            handler(peer, message, error)
