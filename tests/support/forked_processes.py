"""Processes forked from a server that has imported torch and transformers once: a start takes milliseconds."""

from __future__ import annotations

import multiprocessing
import os
from collections.abc import Callable, Sequence
from multiprocessing.connection import Connection
from multiprocessing.context import ForkServerContext
from multiprocessing.process import BaseProcess
from multiprocessing.reduction import DupFd
from typing import Any

import pytest
from forked_workers import FORKED_PROCESSES


class _Inherited:
    """The parent's environment, stdout and stderr: a forked process would have the fork server's."""

    def __getstate__(self) -> Any:
        return dict(os.environ), DupFd(1), DupFd(2)

    def __setstate__(self, state: Any) -> None:
        environment, stdout, stderr = state
        os.environ.clear()
        os.environ.update(environment)
        for number, file in ((1, stdout), (2, stderr)):
            with os.fdopen(file.detach(), "wb") as theirs:
                os.dup2(theirs.fileno(), number)


class ForkedContext:
    """The part of multiprocessing's context `spawn` that our processes use."""

    def __init__(self) -> None:
        self._context: ForkServerContext = multiprocessing.get_context("forkserver")
        self._context.set_forkserver_preload(list(FORKED_PROCESSES))

    def Pipe(self) -> tuple[Connection, Connection]:  # noqa: N802 - multiprocessing's name
        return self._context.Pipe()

    def Process(  # noqa: N802 - multiprocessing's name
        self, target: Callable[..., object], args: Sequence[object] = (), **options: Any
    ) -> BaseProcess:
        return self._context.Process(target=_run, args=(_Inherited(), target, *args), **options)


def _run(inherited: _Inherited, target: Callable[..., object], *arguments: object) -> None:
    target(*arguments)


def fork_instead_of_spawn(monkeypatch: pytest.MonkeyPatch) -> None:
    """Makes the product's spawned processes forked ones. Not for processes that use a GPU."""
    forked, real = ForkedContext(), multiprocessing.get_context
    monkeypatch.setattr(
        multiprocessing, "get_context", lambda method=None: forked if method == "spawn" else real(method)
    )
