"""What every test shares: deterministic Hypothesis, one torch thread, poisoned memory, no leaked threads."""

from __future__ import annotations

import contextlib
import functools
import gc
import os
import ssl
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import certifi
import pytest
import variants
from forked_workers import fork_workers
from hypothesis import HealthCheck, settings
from hypothesis.internal.conjecture import providers

from disagg.core.collection import YOUNG_OBJECTS, imports_frozen

if TYPE_CHECKING:
    from scripted_server import ScriptedServer

# Deterministic everywhere, so that a red build is red again at home; `HYPOTHESIS_PROFILE=explore` looks for
# new examples. No deadline: two shared cores make any time limit per example a coin toss.
settings.register_profile(
    "ci",
    derandomize=True,
    deadline=None,
    max_examples=50,
    stateful_step_count=30,
    database=None,
    suppress_health_check=[HealthCheck.too_slow],
)
settings.register_profile("explore", deadline=None, max_examples=1000)
settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "ci"))
# Hypothesis also draws constants that occur in the sources of imported modules. With them, the examples of a worker
# would depend on the files that the worker ran before.
assert providers._get_local_constants is not None
providers._get_local_constants = lambda: providers._local_constants

RAY = (
    "tests/cluster/on_ray/",
    "tests/cluster/test_killed.py",
    "tests/system/served/",
    "tests/system/test_user_faults_real.py",
    "tests/system/test_readme_real.py",
    "tests/cluster/test_ray_local.py",
)
"""Tests that start Ray. One worker runs them one after another: two Rays at once would starve two cores."""
FORKED = (
    "tests/bench/",
    "tests/transport/conformance/test_transport_processes.py",
    "tests/transport/test_word_processes.py",
    "tests/security/test_data_plane_closed.py",
)
"""Tests whose processes are forks and compute for long. They run on one worker, one after another."""
COMPILED = (
    "tests/kernels/attention/test_attention_code.py",
    "tests/kernels/copy/test_copy_code.py",
    "tests/kernels/layers/test_expert_code.py",
    "tests/kernels/layers/test_quantized_code.py",
    "tests/kernels/layers/test_small_layers_code.py",
    "tests/kernels/recurrent/test_recurrent_code.py",
    "tests/kernels/sampling/test_sampling_code.py",
)
"""Tests that compile kernels. On one worker: the first compilation of a process hashes all of Triton, for 2 s."""
PROCESSES = (
    *RAY,
    *FORKED,
    "tests/system/test_workers_real.py",
    "tests/commands/test_launch.py",
    "tests/commands/test_serve_workers.py",
    "tests/cli/test_cli_launch.py",
    "tests/kernels/test_kernels_interpreted.py",
)
"""Tests whose processes compute for long. They have all CPUs; other tests, and what they start, have one."""
FIRST = (
    *RAY,
    "tests/system/test_workers_real.py",
    "tests/kernels/test_kernels_interpreted.py",
    "tests/system/test_cluster_simulation.py",
    *COMPILED,
    "tests/system/test_faults.py",
    "tests/system/test_hybrid_sequences.py",
    "tests/system/test_preemption.py",
    "tests/system/test_bit_flips.py",
    "tests/nodes/test_interleav",
    "tests/api/",
    *FORKED,
)
"""The longest files, in the order in which they start. `FORKED` start when most of `RAY` have ended: the processes of
both use any CPU, at best while other tests wait, as those of `tests/api/` do."""
LAST = ("tests/kernels/", "tests/kv/", "tests/model/", "tests/plan/", "tests/staging/", "tests/vllm/")
"""Short files that compute and hardly wait, so that no CPU is idle at the end."""

# For the test process and for every rank it starts.
os.environ.setdefault("OMP_NUM_THREADS", "1")
CPUS = sorted(os.sched_getaffinity(0))
WORKER = os.environ.get("PYTEST_XDIST_WORKER", "")


def _stay_on(cpus: set[int]) -> None:
    """Keeps all threads of this process, and what they start later, on these CPUs."""
    for thread in Path("/proc/self/task").iterdir():
        with contextlib.suppress(ProcessLookupError):
            os.sched_setaffinity(int(thread.name), cpus)


def pytest_configure(config: pytest.Config) -> None:
    """One of several workers stays on one CPU.

    Systems in one process have dozens of threads, which take turns at the interpreter lock. Between two CPUs each
    turn wakes a sleeping CPU: tests of whole systems take a third more CPU time, most of all in virtual machines.
    """
    if WORKER:
        _stay_on({_own_cpu()})
    if WORKER and _has_all_tests(config):
        config.args = _rotated(config.rootpath / "tests")


def _has_all_tests(config: pytest.Config) -> bool:
    return [config.invocation_params.dir / one for one in config.args] == [config.rootpath / "tests"]


@pytest.hookimpl(optionalhook=True)  # without xdist there is no such hook
def pytest_xdist_setupnodes(config: pytest.Config, specs: list[Any]) -> None:
    """Workers of a run of all tests share the imports of torch and transformers."""
    if _has_all_tests(config):
        fork_workers(config, specs)


def _rotated(tests: Path) -> list[str]:
    """Returns the folders and files of `tests`. Each worker begins with others, and ends where it began.

    In a fresh clone pytest compiles each test file. Workers that collect in one order compile every file at the same
    time; here each finds most files compiled by another one.
    """
    found = sorted({str(tests / path.relative_to(tests).parts[0]) for path in tests.rglob("test_*.py")})
    first = len(found) * int(WORKER.removeprefix("gw")) // int(os.environ["PYTEST_XDIST_WORKER_COUNT"])
    return found[first:] + found[:first]


def _own_cpu() -> int:
    return CPUS[int(WORKER.removeprefix("gw")) % len(CPUS)]


# Ray reads it when it is imported, once for a process: as `disagg` sets it, whichever test imports Ray first.
os.environ.setdefault("RAY_AUTH_MODE", "token")


@pytest.hookimpl(optionalhook=True)  # without xdist there is no such hook
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    """Keeps files on one worker: those of a folder with an `__init__.py`, which share a server, `RAY`, `FORKED` and
    `COMPILED`.

    Files go out as `pytest_collection_modifyitems` orders them; xdist would put those with few tests last.
    """
    if config.getvalue("dist") != "loadfile":
        return None
    config.option.loadscopereorder = False
    from xdist.scheduler import LoadFileScheduling

    class WithWholeFolders(LoadFileScheduling):
        def _split_scope(self, nodeid: str) -> str:
            if nodeid.startswith(RAY):
                return "ray"
            if nodeid.startswith(FORKED):
                return "forked"
            if nodeid.startswith(COMPILED):
                return "compiled"
            file: str = super()._split_scope(nodeid)
            folder = Path(file).parent
            return str(folder) if (config.rootpath / folder / "__init__.py").exists() else file

    return WithWholeFolders(config, log)


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Iterator[None]:
    """The imports of all test files create two million objects that live as long as the process.

    Garbage collection during them takes a third of the time, and no later collection need visit the objects.
    Collections happen as seldom as in a server: with Python's thresholds they take 5 % of the tests of models.
    """
    with imports_frozen():
        result = yield
    gc.set_threshold(YOUNG_OBJECTS, 20, 20)
    return result


def pytest_itemcollected(item: pytest.Item) -> None:
    """Marks the variants of `tests/slow_variants.txt` as slow."""
    variants.mark(item)


@pytest.fixture(scope="session", autouse=True)
def _tests_freeze_nothing() -> Iterator[None]:
    """Commands and ranks exclude all objects of their process from garbage collection: here, those of other tests."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(gc, "freeze", lambda: None)
        yield


@pytest.fixture(scope="session", autouse=True)
def _certificates_read_once() -> Iterator[None]:
    """Each client of httpx reads all certificates of certifi, which takes 20 ms: here they share a context."""
    create = ssl.create_default_context
    shared = functools.cache(lambda: create(cafile=certifi.where()))

    def created(*arguments: Any, **named: Any) -> ssl.SSLContext:
        own = arguments or named != {"cafile": certifi.where()}
        return create(*arguments, **named) if own else shared()

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ssl, "create_default_context", created)
        yield


def pytest_unconfigure() -> None:
    """The process ends without a last collection of torch and transformers, as a command does."""
    gc.freeze()


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Puts the files that take longest first, so that no worker runs one alone at the end, and `LAST` last."""

    def place(item: pytest.Item) -> int:
        found = (place for place, name in enumerate(FIRST) if item.nodeid.startswith(name))
        return next(found, len(FIRST) + item.nodeid.startswith(LAST))

    if hasattr(config, "workerinput"):  # a worker of xdist
        items.sort(key=lambda item: (place(item), item.path))


@pytest.fixture(autouse=True)
def _one_torch_thread() -> None:
    """Small tensors gain nothing from threads, and two cores lose; tests without torch do not import it."""
    torch = sys.modules.get("torch")
    if torch is not None and torch.get_num_threads() != 1:
        torch.set_num_threads(1)


@pytest.hookimpl(tryfirst=True)  # before the fixtures of packages, whose processes inherit the CPUs
def pytest_runtest_setup(item: pytest.Item) -> None:
    """Tests of several processes have all CPUs, other tests the worker's one."""
    if WORKER:
        wanted = set(CPUS) if item.nodeid.startswith(PROCESSES) else {_own_cpu()}
        if os.sched_getaffinity(0) != wanted:
            _stay_on(wanted)


@pytest.fixture(autouse=True)
def _no_leaked_threads() -> Iterator[None]:
    """A non-daemon thread that outlives its test would keep the process from ending: name it here instead."""
    before = set(threading.enumerate())
    yield
    leaked = [one for one in threading.enumerate() if one not in before and not one.daemon]
    for thread in leaked:
        thread.join(timeout=5)
    names = [thread.name for thread in leaked if thread.is_alive()]
    assert not names, f"threads still running after the test: {names}"


@pytest.fixture(autouse=True)
def _logs_unconfigured() -> Iterator[None]:
    """A command that ran in a test has pointed the logs at that test's stderr, which is closed after it.

    Tracebacks are plain, as `disagg` configures them: structlog's default prints each frame's source and variables,
    tensors too, and takes seconds for an error of a step.
    """
    structlog = sys.modules.get("structlog")
    if structlog is not None:
        structlog.dev.ConsoleRenderer.get_active().exception_formatter = structlog.dev.plain_traceback
    yield
    structlog = sys.modules.get("structlog")
    if structlog is not None:
        structlog.reset_defaults()


@pytest.fixture
def status_server() -> Iterator[ScriptedServer]:
    """A server that answers each GET with the status of a service."""
    import msgspec
    from scripted_server import ScriptedServer
    from status_pictures import service

    with ScriptedServer() as server:
        server.models = msgspec.to_builtins(service(10.0))
        yield server


@pytest.fixture
def poison_empty(monkeypatch: pytest.MonkeyPatch) -> None:
    """Fills what `torch.empty*` returns with 0xAB bytes: output that nobody wrote cannot pass for zeros."""
    import torch

    def poisoned(make: Any) -> Any:
        def poisoned_empty(*args: Any, **kwargs: Any) -> Any:
            tensor = make(*args, **kwargs)
            if tensor.numel() and tensor.device.type != "meta":
                tensor.untyped_storage().fill_(0xAB)
            return tensor

        return poisoned_empty

    for name in ("empty", "empty_like", "empty_strided"):
        monkeypatch.setattr(torch, name, poisoned(getattr(torch, name)))
