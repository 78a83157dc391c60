"""Probes of UCX, its Python binding, the choice of transport, and Ray."""

from __future__ import annotations

import importlib.util
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from importlib import metadata
from pathlib import Path

from disagg.core.config.read import TransportConfig
from disagg.doctor.findings import Finding
from disagg.doctor.gpu import gpu_count
from transport.hosts import AUTO, LOOPBACK, own_host
from transport.reach import Probes, choose

Runner = Callable[[Sequence[str], Mapping[str, str]], tuple[int, str]]
"""Function that runs a command with extra environment variables, and returns its exit status and its output."""

TIMEOUT_S = 60.0
_ASK_TRANSPORT = (
    "from transport.reach import why_no_rdma, why_no_shared_memory as shm; print(shm()); print(why_no_rdma())"
)
REINSTALL = "pip install -c constraints.txt -e .  (in the project's folder)"


def run_command(command: Sequence[str], extra_env: Mapping[str, str]) -> tuple[int, str]:
    """Runs a command as a subprocess; a `Runner`. Returns status 127 if it cannot start, 124 if it times out."""
    try:
        done = subprocess.run(
            list(command),
            env={**os.environ, **extra_env},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            timeout=TIMEOUT_S,
            check=False,
        )
    except OSError as exc:
        return 127, str(exc)
    except subprocess.TimeoutExpired:
        return 124, f"no answer within {TIMEOUT_S:g} s"
    return done.returncode, done.stdout


def probe_ucxx(run: Runner = run_command) -> list[Finding]:
    """Checks that ucxx imports, in a subprocess, because a broken native library may crash the importing process."""
    status, output = run([sys.executable, "-c", "import ucxx; print(ucxx.__version__)"], {})
    if status == 0:
        return [Finding("ucxx", "ok", f"{_last_line(output)} imports")]
    return [Finding("ucxx", "fail", f"does not import: {_last_line(output)}", REINSTALL)]


def probe_ucx(
    run: Runner = run_command,
    gpus: Callable[[], int] = gpu_count,
    locate: Callable[[], tuple[str, dict[str, str]] | None] | None = None,
) -> list[Finding]:
    """Reports version and transports of the UCX that ucxx loads, and whether KV can use CUDA IPC and RDMA."""
    found = (locate or find_ucx_info)()
    if found is None:
        return [Finding("UCX", "warn", "no ucx_info found: the transports of UCX are unknown", REINSTALL)]
    tool, env = found
    status, output = run([tool, "-v", "-d"], env)
    if status != 0:
        return [Finding("UCX", "fail", f"{tool}: {_last_line(output)}", REINSTALL)]
    version = re.search(r"version:? (\d+\.\d+\.\d+)", output)
    transports = list(dict.fromkeys(re.findall(r"Transport: (\S+)", output)))
    detail = f"{version[1] if version else 'unknown version'}: {', '.join(transports) or 'no transport'}"
    findings = [Finding("UCX", "ok" if transports else "fail", detail, "" if transports else REINSTALL)]
    return [*findings, _cuda_ipc(transports, gpus()), _between_hosts(transports)]


def find_ucx_info() -> tuple[str, dict[str, str]] | None:
    """Returns the path of the `ucx_info` that belongs to the UCX that ucxx loads, and environment variables for it.

    Returns None if there is none.
    """
    prefer_system = os.environ.get("RAPIDS_LIBUCX_PREFER_SYSTEM_LIBRARY", "false").lower() != "false"
    spec = importlib.util.find_spec("libucx")
    system = shutil.which("ucx_info")
    if spec is not None and spec.origin and not (prefer_system and system):
        folder = Path(spec.origin).parent
        if (folder / "bin" / "ucx_info").is_file():
            return str(folder / "bin" / "ucx_info"), {"LD_LIBRARY_PATH": str(folder / "lib")}
    return (system, {}) if system else None


def _cuda_ipc(transports: Sequence[str], gpus: int) -> Finding:
    if not gpus:
        return Finding("CUDA IPC", "ok", "not needed without GPUs")
    if "cuda_ipc" in transports:
        return Finding(
            "CUDA IPC", "ok", "UCX offers cuda_ipc; ranks in containers must share IPC and PID spaces"
        )
    mend = "use the libucx wheel or a UCX built with CUDA; in containers check that the driver is mounted"
    return Finding(
        "CUDA IPC", "warn", "UCX has no cuda_ipc here: KV between GPUs goes through the host", mend
    )


def _between_hosts(transports: Sequence[str]) -> Finding:
    rdma = [name for name in transports if name.startswith(("rc", "dc", "ud"))]
    if rdma:
        return Finding("RDMA", "ok", f"between hosts: {', '.join(rdma)}")
    detail = "none: KV between hosts goes over TCP, encrypted (tls); KV within one host needs no RDMA"
    return Finding("RDMA", "ok", detail)


def probe_transport(
    run: Runner = run_command, host: Callable[[], str] = lambda: own_host(AUTO)
) -> list[Finding]:
    """Reports the KV transports of the default configuration, within a host and between hosts, with reasons."""
    status, output = run([sys.executable, "-c", _ASK_TRANSPORT], {})
    if status != 0:
        return [Finding("transport", "fail", f"does not start: {_last_line(output)}", REINSTALL)]
    no_shared_memory, no_rdma = output.splitlines()[-2:]
    probes = Probes(rdma=lambda: no_rdma, one_host=lambda: no_shared_memory)
    config = TransportConfig()
    local, remote = choose(config, LOOPBACK, probes), choose(config, host(), probes)
    mend = (
        "" if local.backend == "ucx" else "set kernel.yama.ptrace_scope to 0 or 1, or allow process_vm_readv"
    )
    return [
        Finding("transport", "warn" if mend else "ok", f"one host: {local.name} ({local.reason})", mend),
        Finding("transport", "ok", f"control.host = auto: {remote.name} ({remote.reason})"),
    ]


def probe_ray(
    version_of: Callable[[str], str] = metadata.version, env: Mapping[str, str] = os.environ
) -> list[Finding]:
    """Reports Ray's version, and whether its ports require a token."""
    try:
        version = version_of("ray")
    except metadata.PackageNotFoundError:
        return [Finding("ray", "fail", "not installed", REINSTALL)]
    mode = env.get("RAY_AUTH_MODE", "")
    detail = f"{version}, RAY_AUTH_MODE {mode or 'not set'}"
    if mode == "disabled":
        mend = "unset RAY_AUTH_MODE or set it to token, unless no other user can reach the network"
        return [Finding("ray", "warn", f"{detail}: every client that reaches its ports can run code", mend)]
    return [Finding("ray", "ok", detail)]


def _last_line(output: str) -> str:
    lines = [line for line in output.strip().splitlines() if line.strip()]
    return lines[-1].strip() if lines else "no output"
