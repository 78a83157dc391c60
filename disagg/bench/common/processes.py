"""Child processes controlled by their parent: each creates one object, whose methods are called over a pipe."""

from __future__ import annotations

import multiprocessing
import os
import signal
import traceback
from collections.abc import Callable, Sequence
from multiprocessing.connection import Connection
from types import TracebackType
from typing import Any

from disagg.core.config.observability import LogConfig
from disagg.core.errors import DisaggError, TransportError
from disagg.core.log import configure

ANSWER_TIMEOUT_S = 120.0
END_TIMEOUT_S = 15.0


class SilentError(TransportError):
    """Raised when a process is alive but did not reply in time."""


class Remote:
    """One child process. A call must be answered before the next one starts."""

    def __init__(
        self, name: str, gpu: str | None, make: Callable[..., Any], arguments: Sequence[object]
    ) -> None:
        """`gpu` is the child's `CUDA_VISIBLE_DEVICES`; None leaves the variable unchanged."""
        context = multiprocessing.get_context("spawn")
        self.name = name
        self._pipe, theirs = context.Pipe()
        self._process = context.Process(
            target=_serve, args=(theirs, gpu, make, arguments), name=name, daemon=True
        )
        self._process.start()
        theirs.close()  # an open copy of the child's end would hide the child's exit from `recv`

    @property
    def pid(self) -> int:
        """The process id."""
        assert self._process.pid is not None, "started in the constructor"
        return self._process.pid

    def start_call(self, method: str, *arguments: object) -> None:
        """Starts a call; `answer` returns its result."""
        try:
            self._pipe.send((method, arguments))
        except OSError as exc:
            raise TransportError(f"the process {self.name} has ended") from exc

    def answer(self, timeout_s: float = ANSWER_TIMEOUT_S) -> Any:
        """Returns the result of the call that `start_call` started.

        Raises the call's exception, `TransportError` when the process ended, `SilentError` after `timeout_s`.
        """
        if not self._pipe.poll(timeout_s):
            raise SilentError(f"the process {self.name} did not answer within {timeout_s:g} s")
        try:
            failed, value = self._pipe.recv()
        except EOFError as exc:
            raise TransportError(f"the process {self.name} has ended") from exc
        if failed:
            raise value
        return value

    def call(self, method: str, *arguments: object) -> Any:
        """Calls a method and returns its result."""
        self.start_call(method, *arguments)
        return self.answer()

    def end(self) -> None:
        """Requests the end of the process, and kills the process if it still runs after `END_TIMEOUT_S`."""
        self._pipe.close()
        self._process.join(END_TIMEOUT_S)
        if self._process.is_alive():
            self._process.kill()
            self._process.join()


class Processes:
    """A context manager that ends every process it started."""

    def __init__(self) -> None:
        self._started: list[Remote] = []

    def start(self, name: str, gpu: str | None, make: Callable[..., Any], *arguments: object) -> Remote:
        """Starts a process that holds `make(*arguments)`, an object with a method `close`."""
        remote = Remote(name, gpu, make, arguments)
        self._started.append(remote)
        return remote

    def __enter__(self) -> Processes:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for remote in self._started:
            remote.end()


def call_all(remotes: Sequence[Remote], method: str, *arguments: object) -> list[Any]:
    """Returns the results of all processes, which run the call concurrently."""
    for remote in remotes:
        remote.start_call(method, *arguments)
    return [remote.answer() for remote in remotes]


def visible_gpus() -> list[str]:
    """Returns a name for each GPU visible to torch; each name can be a child's `CUDA_VISIBLE_DEVICES`."""
    import torch

    if not torch.cuda.is_available():
        return []
    named = os.environ.get("CUDA_VISIBLE_DEVICES")
    count = torch.cuda.device_count()
    return named.split(",")[:count] if named else [str(index) for index in range(count)]


def _serve(pipe: Connection, gpu: str | None, make: Callable[..., Any], arguments: Sequence[object]) -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent ends this process
    if gpu is not None:
        os.environ["CUDA_VISIBLE_DEVICES"] = gpu
    configure(LogConfig(level="warning"))
    held: Any = None
    try:
        while True:
            method, given = pipe.recv()
            try:
                held = make(*arguments) if held is None else held
                pipe.send((False, getattr(held, method)(*given)))
            except Exception as exc:  # noqa: BLE001 - the parent raises it
                pipe.send((True, _as_ours(exc)))
    except EOFError:
        if held is not None:
            held.close()


def _as_ours(error: Exception) -> DisaggError:
    """Converts an error to one that can be pickled. For an unexpected error, the message contains the traceback."""
    return error if isinstance(error, DisaggError) else DisaggError(traceback.format_exc())
