"""Probes of the host: Python, packages and clashes of package names, shared memory, resource limits."""

from __future__ import annotations

import importlib.util
import platform
import resource
import shutil
import sys
from collections.abc import Callable
from importlib import metadata
from pathlib import Path

from disagg.doctor.findings import Finding
from disagg.plan.transfer import describe_bytes

REQUIRED = ("triton", "transformers", "pyzmq", "msgspec", "xxhash", "cryptography")
"""Required distributions; torch, ray and ucxx have their own probes."""
OUR_PACKAGES = ("kernels", "staging", "transport", "prefill_node", "decode_node")
SHARED_MEMORY_BYTES = 1 << 30
OPEN_FILES = 4096


def probe_python(version: tuple[int, int, int] = sys.version_info[:3]) -> list[Finding]:
    """Checks the Python version and the platform."""
    detail = f"{version[0]}.{version[1]}.{version[2]} on {platform.system()} {platform.machine()}"
    if version[:2] < (3, 11):
        return [Finding("python", "fail", detail, "install Python 3.11 or newer")]
    if not sys.platform.startswith("linux"):
        return [Finding("python", "fail", detail, "run disagg on Linux, which UCX, Triton and CUDA IPC need")]
    return [Finding("python", "ok", detail)]


def probe_packages(version_of: Callable[[str], str] = metadata.version) -> list[Finding]:
    """Checks that the `REQUIRED` distributions are installed."""
    found, missing = [], []
    for name in REQUIRED:
        try:
            found.append(f"{name} {version_of(name)}")
        except metadata.PackageNotFoundError:
            missing.append(name)
    if missing:
        mend = "pip install -c constraints.txt -e .  (in the project's folder)"
        return [Finding("packages", "fail", "missing: " + ", ".join(missing), mend)]
    return [Finding("packages", "ok", ", ".join(found))]


def probe_clashes(
    origin_of: Callable[[str], str | None] | None = None, installed: Callable[[str], bool] | None = None
) -> list[Finding]:
    """Checks that no installed distribution has the name of one of our top-level packages. Hugging Face, for example,
    publishes a `kernels`."""
    import disagg

    root = Path(str(disagg.__file__)).resolve().parent.parent
    findings = []
    for name in OUR_PACKAGES:
        origin = (origin_of or _origin)(name)
        if origin is None:
            mend = "pip install -c constraints.txt -e .  (in the project's folder)"
            findings.append(Finding(f"package {name}", "fail", "disagg's package is not importable", mend))
        elif not Path(origin).resolve().is_relative_to(root):
            mend = f"pip uninstall {name}, or give disagg an environment of its own (make venv)"
            findings.append(
                Finding(f"package {name}", "fail", f"{origin} hides disagg's package in {root}", mend)
            )
        elif (installed or _is_installed)(name):
            mend = f"pip uninstall {name}, or give disagg an environment of its own (make venv)"
            detail = f"a distribution named {name} is installed; the order of sys.path decides which one is imported"
            findings.append(Finding(f"package {name}", "fail", detail, mend))
    return findings or [Finding("package names", "ok", f"{', '.join(OUR_PACKAGES)}: ours")]


def _origin(name: str) -> str | None:
    spec = importlib.util.find_spec(name)
    return spec.origin if spec is not None else None


def _is_installed(name: str) -> bool:
    """Returns whether a distribution with exactly this name is installed. Our own distribution is named `disagg`."""
    try:
        metadata.distribution(name)
    except metadata.PackageNotFoundError:
        return False
    return True


def probe_shared_memory(
    total_and_free: Callable[[], tuple[int, int]] | None = None, path: str = "/dev/shm"
) -> list[Finding]:
    """Checks the size of /dev/shm, where Ray, UCX and NCCL allocate buffers; containers often get 64 MiB."""
    try:
        total, free = (total_and_free or (lambda: _disk(path)))()
    except OSError as exc:
        return [Finding("shared memory", "warn", f"{path}: {exc.strerror}", "mount a tmpfs at this path")]
    detail = f"{path}: {describe_bytes(free)} free of {describe_bytes(total)}"
    if free < SHARED_MEMORY_BYTES:
        mend = "container: --shm-size=8g (Kubernetes: an emptyDir with medium Memory); else free space in /dev/shm"
        return [Finding("shared memory", "warn", detail, mend)]
    return [Finding("shared memory", "ok", detail)]


def _disk(path: str) -> tuple[int, int]:
    usage = shutil.disk_usage(path)
    return usage.total, usage.free


def probe_limits(soft_limit: Callable[[int], int] | None = None) -> list[Finding]:
    """Checks two resource limits: locked memory (for RDMA), and open files (each pair of ranks has a connection)."""
    limit = soft_limit or (lambda kind: resource.getrlimit(kind)[0])
    return [_memlock(limit(resource.RLIMIT_MEMLOCK)), _open_files(limit(resource.RLIMIT_NOFILE))]


def _memlock(value: int) -> Finding:
    if value == resource.RLIM_INFINITY:
        return Finding("locked memory", "ok", "unlimited")
    detail = f"at most {describe_bytes(value)}: enough within one host, too little for RDMA between hosts"
    return Finding("locked memory", "warn", detail, "ulimit -l unlimited (container: --ulimit memlock=-1)")


def _open_files(value: int) -> Finding:
    if value == resource.RLIM_INFINITY or value >= OPEN_FILES:
        return Finding("open files", "ok", "unlimited" if value == resource.RLIM_INFINITY else str(value))
    return Finding("open files", "warn", f"at most {value}", f"ulimit -n {OPEN_FILES} or more")
