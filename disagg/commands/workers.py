"""`disagg serve --workers`: starts, watches and stops the workers, which share the port of the HTTP API.

The parent binds the port and does not listen. Each worker listens on the same port (SO_REUSEPORT), so the kernel
spreads connections over the workers that serve. A worker that is starting or has died gets no connections.
"""

from __future__ import annotations

import asyncio
import contextlib
import multiprocessing
import pickle
import socket
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec
import structlog

from disagg.commands.router_server import Stop, model_facts
from disagg.commands.signals import SIGNALS
from disagg.commands.worker import FACTS, News, Order, WorkerSettings, run_worker
from disagg.core.config.read import Config
from disagg.core.errors import ConfigError, DisaggError, first_line
from disagg.sockets.guards import WORKERS_FOLDER

log = structlog.get_logger(__name__)

PAUSE_S, LONGEST_PAUSE_S = 1.0, 30.0
"""First and longest pause before a worker is started again; each early end doubles the pause."""
END_S = 20.0
"""Time after `api.drain_timeout_s` at which a worker that has not ended is killed."""
EARLY_S = 60.0
"""A worker that ends sooner than this after its start counts as an early end."""


@dataclass(frozen=True)
class WorkerModel:
    """What workers need to know of the model."""

    facts: bytes
    """Pickled `ModelFacts`."""
    fingerprint: str
    """Digest of the model's weights and configuration."""


def worker_model(config: Config, fingerprint: str) -> WorkerModel:
    """Returns what workers need of the configured model. Raises ConfigError if its tokenizer cannot be copied."""
    facts = model_facts(config)
    try:
        pickled = pickle.dumps(facts)
        pickle.loads(pickled)
    except Exception as exc:
        kind = type(facts.tokenizer).__name__
        raise ConfigError(
            f"the tokenizer of {facts.name}, a {kind}, cannot be copied to worker processes ({first_line(exc)}): "
            "set api.workers (--workers) to 1"
        ) from exc
    return WorkerModel(pickled, fingerprint)


async def run_workers(
    config: Config,
    model: WorkerModel,
    directory: str,
    listener: socket.socket,
    on_failed: Callable[[Callable[[], None]], None] = lambda stop: None,
) -> None:
    """Serves with `api.workers` workers until SIGINT or SIGTERM; a second signal aborts running requests.

    `listener` is a socket bound to the port. `on_failed` registers a callback that stops the workers at once; the
    callback may be called on any thread. If a worker fails before all workers have served, raises the worker's error.
    """
    with _shared(config, listener) as shared, tempfile.TemporaryDirectory(prefix=WORKERS_FOLDER) as folder:
        (Path(folder) / FACTS).write_bytes(model.facts)
        supervisor = _WorkerSupervisor(shared, model.fingerprint, directory, Path(folder))
        loop = asyncio.get_running_loop()
        for number in SIGNALS:
            loop.add_signal_handler(number, supervisor.stop)

        def on_cluster_failed() -> None:
            loop.call_soon_threadsafe(supervisor.stop_now)

        on_failed(on_cluster_failed)
        await supervisor.run()


@contextlib.contextmanager
def _shared(config: Config, listener: socket.socket) -> Iterator[Config]:
    """Lets workers bind the port of `listener` too; yields the configuration with that port.

    SO_REUSEPORT is set only after `listener` is bound, so that the bind fails if another server has the port.
    """
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
    port = listener.getsockname()[1]
    yield msgspec.structs.replace(config, api=msgspec.structs.replace(config.api, port=port))


class _WorkerSupervisor:
    """Starts the workers, and restarts those that end, until `stop`. Used on one event loop."""

    def __init__(self, config: Config, fingerprint: str, directory: str, folder: Path) -> None:
        self._config, self._fingerprint = config, fingerprint
        self._directory, self._folder = directory, folder
        self._workers: dict[int, _WorkerProcess] = {}
        self._stop = Stop()
        self._served = False
        self._error: DisaggError | None = None

    def stop(self) -> None:
        """Drains all workers; a second call aborts running requests."""
        self._stop.request()
        self._order("abort" if self._stop.now.is_set() else "drain")

    def stop_now(self) -> None:
        """Aborts running requests and stops all workers."""
        self._stop.drain.set()
        self.stop()

    async def run(self) -> None:
        """Runs until a stop, and until all workers have ended. Raises the error of a worker that could not start."""
        try:
            await asyncio.gather(*(self._keep(number) for number in range(self._config.api.workers)))
        finally:
            for worker in self._workers.values():
                worker.kill()
        if self._error is not None:
            raise self._error

    async def _keep(self, number: int) -> None:
        """Runs one worker, and starts it again after each end."""
        pause_s = PAUSE_S
        while not self._stop.drain.is_set():
            began_s = time.monotonic()
            worker = self._workers[number] = self._start(number)
            await self._end_of(worker)
            if self._stop.drain.is_set():
                return
            if not self._served:
                self._error = self._error or worker.error or DisaggError(f"a worker ended: {worker.ending}")
                self.stop_now()
                return
            pause_s = min(2 * pause_s, LONGEST_PAUSE_S) if time.monotonic() - began_s < EARLY_S else PAUSE_S
            log.error("worker_ended", worker=number, why=worker.ending, again_in_s=pause_s)
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._stop.drain.wait(), pause_s)

    async def _end_of(self, worker: _WorkerProcess) -> None:
        """Waits for the end of a worker. After a stop, kills a worker that does not serve yet or ends too late."""
        stopped = asyncio.create_task(self._stop.drain.wait())
        either: tuple[asyncio.Future[Any], ...] = (worker.ended, stopped)
        await asyncio.wait(either, return_when=asyncio.FIRST_COMPLETED)
        stopped.cancel()
        if not worker.ended.done():
            limit_s = self._config.api.drain_timeout_s + END_S if worker.url else 0.0
            await asyncio.wait({worker.ended}, timeout=limit_s)
        worker.kill()

    def _start(self, number: int) -> _WorkerProcess:
        settings = WorkerSettings(self._config, self._fingerprint, self._directory, self._folder, number)
        return _WorkerProcess(settings, self._on_listening)

    def _on_listening(self, worker: _WorkerProcess) -> None:
        log.info("worker_serves", worker=worker.number, process_id=worker.pid)
        if not self._served and all(one.url for one in self._workers.values()):
            self._served = True
            log.info("serving", url=worker.url, workers=len(self._workers))

    def _order(self, order: Order) -> None:
        for worker in self._workers.values():
            worker.send(order)


class _WorkerProcess:
    """The parent's handle of a worker process."""

    def __init__(self, settings: WorkerSettings, on_listening: Callable[[_WorkerProcess], None]) -> None:
        self.number, self._on_listening = settings.worker, on_listening
        self.url = ""
        """URL at which the worker listens; empty until the worker serves."""
        self.error: DisaggError | None = None
        self._loop = asyncio.get_running_loop()
        self.ended: asyncio.Future[None] = self._loop.create_future()
        context = multiprocessing.get_context("spawn")
        self._pipe, theirs = context.Pipe()
        self._process = context.Process(
            target=run_worker, args=(theirs, settings), name=f"worker-{settings.worker}", daemon=True
        )
        self._process.start()
        theirs.close()  # otherwise the pipe would stay open after the end of the worker
        self._loop.add_reader(self._pipe.fileno(), self._read_news)
        self._loop.add_reader(self._process.sentinel, self._on_ended)

    @property
    def pid(self) -> int:
        """The process id."""
        return self._process.pid or 0

    @property
    def ending(self) -> str:
        """Reason for the end of the process: its error, or its exit code."""
        return str(self.error) if self.error is not None else f"exit code {self._process.exitcode}"

    def send(self, order: Order) -> None:
        """Sends an order; no effect on a worker that has ended."""
        with contextlib.suppress(OSError):
            self._pipe.send(order)

    def kill(self) -> None:
        """Kills the process if it runs, and frees the pipe. A second call does nothing."""
        if not self._pipe.closed:
            self._loop.remove_reader(self._pipe.fileno())
            self._loop.remove_reader(self._process.sentinel)
            self._process.kill()
            self._process.join()
            self._pipe.close()

    def _read_news(self) -> None:
        try:
            while self._pipe.poll():
                self._on_news(self._pipe.recv())
        except (EOFError, OSError):
            self._loop.remove_reader(self._pipe.fileno())

    def _on_news(self, news: News) -> None:
        if isinstance(news, DisaggError):
            self.error = news
        else:
            self.url = news
            self._on_listening(self)

    def _on_ended(self) -> None:
        self._loop.remove_reader(self._process.sentinel)
        self._read_news()  # messages that the worker sent before its end
        self._process.join()
        self.ended.set_result(None)
