"""Probes of the GPUs: torch's build, driver, memory, peer access and NVLink (by NVML)."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from disagg.doctor.findings import Finding
from disagg.plan.transfer import describe_bytes

# NVML's indices of GPU-to-GPU capabilities, and the status that stands for "supported". They are defined here because
# NVML_P2P_CAPS_INDEX_READ of the Python binding is a tuple by mistake.
P2P_READ, P2P_NVLINK, P2P_OK = 0, 2, 0


def probe_torch(
    load: Callable[[], Any] | None = None, gpus: Callable[[], int] | None = None
) -> list[Finding]:
    """Checks that torch imports and that its build can use the machine's GPUs."""
    try:
        torch = (load or _torch)()
    except ImportError as exc:
        mend = "pip install -c constraints.txt -e .  (in the project's folder)"
        return [Finding("torch", "fail", str(exc), mend)]
    build = f"CUDA {torch.version.cuda}" if torch.version.cuda else "CPU build"
    detail = f"{torch.__version__}, {build}"
    if torch.cuda.is_available() or not (gpus or gpu_count)():
        return [Finding("torch", "ok", detail)]
    mend = "install a CUDA build: pip install -c constraints.txt torch --index-url (see pytorch.org)"
    if torch.version.cuda:
        mend = "install a driver that is new enough for this CUDA version (nvidia-smi shows yours)"
    return [Finding("torch", "warn", f"{detail}: cannot use this machine's GPUs", mend)]


def _torch() -> Any:
    import torch

    return torch


def gpu_count() -> int:
    """Returns the number of GPUs that NVML reports; 0 without a driver."""
    nvml = _open_nvml()
    if nvml is None:
        return 0
    try:
        return int(nvml.nvmlDeviceGetCount())
    finally:
        nvml.nvmlShutdown()


def _open_nvml() -> Any | None:
    """Returns the initialized NVML binding; None without a driver. The caller shuts NVML down."""
    import pynvml

    try:
        pynvml.nvmlInit()
    except pynvml.NVMLError:
        return None
    return pynvml


def probe_gpus(open_nvml: Callable[[], Any | None] = _open_nvml) -> list[Finding]:
    """Reports driver and GPUs; with several GPUs, also matrices of peer access and NVLink."""
    nvml = open_nvml()
    if nvml is None:
        return [Finding("GPUs", "ok", "none, or no NVIDIA driver: everything runs on the CPU, slowly")]
    try:
        handles = [nvml.nvmlDeviceGetHandleByIndex(i) for i in range(nvml.nvmlDeviceGetCount())]
        findings = [Finding("driver", "ok", _driver(nvml))]
        findings += [_gpu(nvml, index, handle) for index, handle in enumerate(handles)]
        if len(handles) > 1:
            findings.append(_peer_access(nvml, handles))
            findings.append(_nvlink(nvml, handles))
        return findings
    finally:
        nvml.nvmlShutdown()


def _driver(nvml: Any) -> str:
    cuda = nvml.nvmlSystemGetCudaDriverVersion()
    return f"{_text(nvml.nvmlSystemGetDriverVersion())}, CUDA up to {cuda // 1000}.{cuda % 1000 // 10}"


def _gpu(nvml: Any, index: int, handle: Any) -> Finding:
    memory = nvml.nvmlDeviceGetMemoryInfo(handle)
    free = f"{describe_bytes(memory.free)} free of {describe_bytes(memory.total)}"
    detail = f"{_text(nvml.nvmlDeviceGetName(handle))}, {free}"
    if memory.free < memory.total // 10:
        return Finding(f"GPU {index}", "warn", detail, "another process uses its memory: see nvidia-smi")
    return Finding(f"GPU {index}", "ok", detail)


def _peer_access(nvml: Any, handles: list[Any]) -> Finding:
    matrix = _matrix(nvml, handles, P2P_READ)
    detail = f"every GPU reaches every other:\n{_drawn(matrix)}"
    if _complete(matrix):
        return Finding("peer access", "ok", detail)
    detail = f"not every GPU reaches every other:\n{_drawn(matrix)}"
    return Finding(
        "peer access",
        "warn",
        detail,
        "place linked groups on GPUs with peer access; else their KV goes through host memory",
    )


def _nvlink(nvml: Any, handles: list[Any]) -> Finding:
    matrix = _matrix(nvml, handles, P2P_NVLINK)
    if _complete(matrix):
        return Finding("NVLink", "ok", f"between every pair:\n{_drawn(matrix)}")
    return Finding("NVLink", "ok", f"not between every pair (other pairs use PCIe):\n{_drawn(matrix)}")


def _matrix(nvml: Any, handles: list[Any], capability: int) -> list[list[bool | None]]:
    """Returns a matrix `[i][j]`: whether GPU i has the capability towards GPU j; None on the diagonal."""
    return [
        [
            None if one is other else nvml.nvmlDeviceGetP2PStatus(one, other, capability) == P2P_OK
            for other in handles
        ]
        for one in handles
    ]


def _complete(matrix: list[list[bool | None]]) -> bool:
    return all(cell is not False for row in matrix for cell in row)


def _drawn(matrix: list[list[bool | None]]) -> str:
    symbols = {True: "x", False: ".", None: "-"}
    width = len(str(len(matrix) - 1))
    header = " " * (width + 1) + " ".join(f"{column:>{width}}" for column in range(len(matrix)))
    rows = [
        f"{index:>{width}} " + " ".join(f"{symbols[cell]:>{width}}" for cell in row)
        for index, row in enumerate(matrix)
    ]
    return "\n".join([header, *rows])


def _text(value: str | bytes) -> str:
    """Returns a string result of NVML's binding as text; older bindings return bytes."""
    return value.decode() if isinstance(value, bytes) else value
