"""`disagg doctor` on machines that we do not have: every probe with its sources faked."""

from __future__ import annotations

import json
import resource
import sys
from collections.abc import Mapping, Sequence
from importlib import metadata
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from disagg.cli import app as cli
from disagg.doctor import gpu as doctor_gpu
from disagg.doctor import host as doctor_host
from disagg.doctor import network as doctor_network
from disagg.doctor.findings import Finding, examine, is_healthy
from disagg.doctor.probes import all_probes


def only(findings: list[Finding]) -> Finding:
    [finding] = findings
    return finding


def missing(name: str) -> str:
    raise metadata.PackageNotFoundError(name)


def test_a_broken_probe_hides_nothing() -> None:
    def probe_bad() -> list[Finding]:
        raise OSError("no luck")

    findings = examine([probe_bad, lambda: [Finding("next", "ok", "fine")]])
    assert [(one.name, one.status) for one in findings] == [("bad", "fail"), ("next", "ok")]
    assert findings[0].detail == "OSError: no luck"
    assert not is_healthy(findings)
    assert is_healthy([Finding("x", "warn", "")])


def test_command(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    good = [Finding("x", "ok", "[fine]")]
    monkeypatch.setattr("disagg.doctor.probes.all_probes", lambda: [lambda: good])
    assert cli.run(["doctor"]) == 0
    assert "[fine]" in capsys.readouterr().out
    bad = [*good, Finding("y", "fail", "broken", "mend it")]
    monkeypatch.setattr("disagg.doctor.probes.all_probes", lambda: [lambda: bad])
    assert cli.run(["doctor"]) == 1
    assert "-> mend it" in capsys.readouterr().out
    assert cli.run(["doctor", "--json"]) == 1
    shown = json.loads(capsys.readouterr().out)
    assert shown[1] == {"name": "y", "status": "fail", "detail": "broken", "mend": "mend it"}


def test_this_machine() -> None:
    """The real probes end, each with something to say; what they find depends on the machine."""
    findings = examine([probe for probe in all_probes() if probe is not doctor_network.probe_ucxx])
    assert not [one for one in findings if "check failed unexpectedly" in one.mend]
    assert {"python", "packages", "torch", "ray", "open files"} <= {one.name for one in findings}
    assert [one for one in findings if one.status != "ok" and not one.mend] == []


def test_python() -> None:
    assert only(doctor_host.probe_python((3, 10, 4))).status == "fail"
    assert only(doctor_host.probe_python((3, 12, 0))).status == "ok"


def test_packages() -> None:
    assert only(doctor_host.probe_packages(lambda name: "1.2")).detail.startswith("triton 1.2, ")
    finding = only(doctor_host.probe_packages(missing))
    assert finding.status == "fail"
    assert "missing: triton, transformers" in finding.detail


def ours(name: str) -> str:
    return str(Path(str(cli.__file__)).parents[2] / name / "__init__.py")


def test_names_that_clash() -> None:
    assert only(doctor_host.probe_clashes(ours, lambda name: False)).status == "ok"

    def hidden(name: str) -> str | None:
        return f"/usr/lib/{name}/__init__.py" if name == "kernels" else ours(name)

    finding = only(doctor_host.probe_clashes(hidden, lambda name: False))
    assert (finding.name, finding.status) == ("package kernels", "fail")
    assert "/usr/lib/kernels/__init__.py hides disagg's package" in finding.detail
    assert "pip uninstall kernels" in finding.mend

    finding = only(doctor_host.probe_clashes(ours, lambda name: name == "transport"))
    assert finding.name == "package transport"
    assert "a distribution named transport is installed" in finding.detail

    findings = doctor_host.probe_clashes(lambda name: None, lambda name: False)
    assert {one.detail for one in findings} == {"disagg's package is not importable"}


def test_shared_memory(tmp_path: Path) -> None:
    assert only(doctor_host.probe_shared_memory(lambda: (8 << 30, 8 << 30))).status == "ok"
    finding = only(doctor_host.probe_shared_memory(lambda: (64 << 20, 64 << 20)))
    assert (finding.status, finding.detail) == ("warn", "/dev/shm: 64 MiB free of 64 MiB")
    assert only(doctor_host.probe_shared_memory(path=str(tmp_path / "none"))).status == "warn"


def test_limits() -> None:
    unlimited = doctor_host.probe_limits(lambda kind: resource.RLIM_INFINITY)
    assert [one.status for one in unlimited] == ["ok", "ok"]
    low = doctor_host.probe_limits(lambda kind: 1024)
    assert [one.status for one in low] == ["warn", "warn"]
    assert "1 KiB" not in low[1].detail
    assert low[1].detail == "at most 1024"


def fake_torch(cuda: str | None, available: bool) -> SimpleNamespace:
    return SimpleNamespace(
        __version__="2.11.0",
        version=SimpleNamespace(cuda=cuda),
        cuda=SimpleNamespace(is_available=lambda: available),
    )


@pytest.mark.parametrize(
    ("cuda", "available", "gpus", "status", "mend"),
    [
        (None, False, 0, "ok", ""),
        ("13.0", True, 2, "ok", ""),
        ("13.0", False, 0, "ok", ""),
        (None, False, 2, "warn", "install a CUDA build"),
        ("13.0", False, 2, "warn", "install a driver"),
    ],
)
def test_torch(cuda: str | None, available: bool, gpus: int, status: str, mend: str) -> None:
    finding = only(doctor_gpu.probe_torch(lambda: fake_torch(cuda, available), lambda: gpus))
    assert finding.status == status
    assert finding.mend.startswith(mend)


def test_no_torch() -> None:
    def load() -> Any:
        raise ImportError("No module named 'torch'")

    assert only(doctor_gpu.probe_torch(load)).status == "fail"


class FakeNvml:
    """NVML of a machine with `gpus` GPUs; `linked` pairs have NVLink, all but `unreachable` peer access."""

    def __init__(self, gpus: int, linked: set[frozenset[int]], unreachable: set[frozenset[int]]) -> None:
        self.gpus, self.linked, self.unreachable = gpus, linked, unreachable
        self.open = True

    def nvmlDeviceGetCount(self) -> int:  # noqa: N802
        return self.gpus

    def nvmlDeviceGetHandleByIndex(self, index: int) -> int:  # noqa: N802
        return index

    def nvmlSystemGetDriverVersion(self) -> bytes:  # noqa: N802
        return b"580.1"

    def nvmlSystemGetCudaDriverVersion(self) -> int:  # noqa: N802
        return 13010

    def nvmlDeviceGetName(self, handle: int) -> str:  # noqa: N802
        return "H200"

    def nvmlDeviceGetMemoryInfo(self, handle: int) -> SimpleNamespace:  # noqa: N802
        return SimpleNamespace(total=140 << 30, free=(140 << 30) if handle == 0 else 1 << 30)

    def nvmlDeviceGetP2PStatus(self, one: int, other: int, capability: int) -> int:  # noqa: N802
        pair = frozenset({one, other})
        good = pair in self.linked if capability == doctor_gpu.P2P_NVLINK else pair not in self.unreachable
        return 0 if good else 5

    def nvmlShutdown(self) -> None:  # noqa: N802
        self.open = False


def pairs(*members: tuple[int, int]) -> set[frozenset[int]]:
    return {frozenset(pair) for pair in members}


def test_gpus_of_one_host() -> None:
    nvml = FakeNvml(3, linked=pairs((0, 1)), unreachable=pairs((1, 2)))
    driver, first, second, third, peers, links = doctor_gpu.probe_gpus(lambda: nvml)
    assert driver.detail == "580.1, CUDA up to 13.1"
    assert (first.name, first.status, first.detail) == ("GPU 0", "ok", "H200, 140 GiB free of 140 GiB")
    assert (second.status, third.status) == ("warn", "warn"), "almost all of their memory is taken"
    assert peers.status == "warn"
    assert peers.detail.splitlines()[1:] == ["  0 1 2", "0 - x x", "1 x - .", "2 x . -"]
    assert links.detail.splitlines()[1:] == ["  0 1 2", "0 - x .", "1 x - .", "2 . . -"]
    assert not nvml.open


def test_one_gpu_and_none() -> None:
    assert len(doctor_gpu.probe_gpus(lambda: FakeNvml(1, set(), set()))) == 2
    assert only(doctor_gpu.probe_gpus(lambda: None)).status == "ok"
    two = doctor_gpu.probe_gpus(lambda: FakeNvml(2, pairs((0, 1)), set()))
    assert [one.status for one in two[-2:]] == ["ok", "ok"]


UCX_INFO = """# Library version: 1.21.0
#      Transport: self
#      Transport: tcp
#      Transport: tcp
"""


def run_ucx(output: str, status: int = 0, gpus: int = 0) -> list[Finding]:
    def run(command: Sequence[str], env: Mapping[str, str]) -> tuple[int, str]:
        assert command == ["/x/ucx_info", "-v", "-d"]
        assert env == {"LD_LIBRARY_PATH": "/x"}
        return status, output

    return doctor_network.probe_ucx(run, lambda: gpus, lambda: ("/x/ucx_info", {"LD_LIBRARY_PATH": "/x"}))


def test_ucx() -> None:
    ucx, ipc, rdma = run_ucx(UCX_INFO)
    assert (ucx.status, ucx.detail) == ("ok", "1.21.0: self, tcp")
    assert ipc.detail == "not needed without GPUs"
    assert "over TCP" in rdma.detail
    assert run_ucx(UCX_INFO, gpus=1)[1].status == "warn", "GPUs, but no cuda_ipc"
    full = UCX_INFO + "#      Transport: cuda_ipc\n#      Transport: rc_mlx5\n"
    assert [one.status for one in run_ucx(full, gpus=1)] == ["ok", "ok", "ok"]
    assert "rc_mlx5" in run_ucx(full)[2].detail
    assert only(run_ucx("x\nlibucp.so.0: cannot open\n", 127)).status == "fail"
    assert run_ucx("# Library version: 1.21.0")[0].status == "fail"
    assert only(doctor_network.probe_ucx(locate=lambda: None)).status == "warn"


def test_the_transport_that_a_rank_would_choose() -> None:
    def found(output: str, status: int = 0, host: str = "10.1.2.3") -> list[Finding]:
        return doctor_network.probe_transport(lambda command, env: (status, output), lambda: host)

    local, remote = found("noise\n\nno device\n")
    assert local.detail.startswith("one host: ucx-shm (")
    assert remote.detail.startswith(
        "control.host = auto: tls (no device, and transport.trusted_network is false"
    )
    assert (local.status, remote.status) == ("ok", "ok")
    local, remote = found("seccomp\n\n")
    assert (local.status, local.detail) == ("warn", "one host: tls (seccomp)")
    assert "ucx-rdma" in remote.detail
    assert only(found("Traceback\nImportError: x", 1)).detail == "does not start: ImportError: x"


def test_ucxx() -> None:
    assert (
        only(doctor_network.probe_ucxx(lambda command, env: (0, "noise\n0.52.0\n"))).detail
        == "0.52.0 imports"
    )
    finding = only(doctor_network.probe_ucxx(lambda command, env: (-11, "")))
    assert (finding.status, finding.detail) == ("fail", "does not import: no output")


def test_commands_that_cannot_run(monkeypatch: pytest.MonkeyPatch) -> None:
    assert doctor_network.run_command(["/no/such/tool"], {})[0] == 127
    status, output = doctor_network.run_command(
        [sys.executable, "-c", "import os; print(os.environ['DOCTOR'])"], {"DOCTOR": "x"}
    )
    assert (status, output) == (0, "x\n")
    monkeypatch.setattr(doctor_network, "TIMEOUT_S", 0.01)
    assert doctor_network.run_command(["sleep", "5"], {}) == (124, "no answer within 0.01 s")


def test_ray() -> None:
    assert only(doctor_network.probe_ray(missing, {})).status == "fail"
    assert only(doctor_network.probe_ray(lambda name: "2.60.0", {})).detail == "2.60.0, RAY_AUTH_MODE not set"
    open_to_all = only(doctor_network.probe_ray(lambda name: "2.60.0", {"RAY_AUTH_MODE": "disabled"}))
    assert open_to_all.status == "warn"
