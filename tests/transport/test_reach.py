"""Which backend a rank uses where: nothing may lead to UCX's TCP but the operator's word."""

from __future__ import annotations

import itertools
from pathlib import Path

import pytest
import structlog

from disagg.core.config.read import TransportConfig
from disagg.core.errors import ConfigError
from transport import reach
from transport.hosts import interface_of
from transport.inproc import InprocFabric
from transport.reach import Choice, Probes, choose
from transport.select import make_transport
from transport.ucx import library as ucx_library
from transport.ucx.options import options, prepare_host
from transport.ucx.reach import Reach

LOCAL, REMOTE = "127.0.0.1", "10.1.2.3"
NO_RDMA, NO_SHM = "this host has no RDMA device", "seccomp"


def chosen(config: TransportConfig, host: str, *, rdma: bool = False, shm: bool = True) -> Choice:
    return choose(config, host, Probes(lambda: "" if rdma else NO_RDMA, lambda: "" if shm else NO_SHM))


@pytest.fixture(autouse=True)
def eth0(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reach, "interface_of", lambda host: "eth0")


@pytest.mark.parametrize("trusted", [False, True])
@pytest.mark.parametrize("backend", ["auto", "ucx"])
@pytest.mark.parametrize("host", [LOCAL, "localhost", "::1"])
def test_one_host_is_shared_memory(backend: str, host: str, trusted: bool) -> None:
    config = TransportConfig(backend=backend, trusted_network=trusted)  # type: ignore[arg-type]
    found = chosen(config, host, rdma=True)
    assert (found.name, found.reach, found.interface) == ("ucx-shm", Reach.ONE_HOST, "")


@pytest.mark.parametrize("trusted", [False, True])
@pytest.mark.parametrize("backend", ["auto", "ucx"])
def test_rdma_comes_before_tcp(backend: str, trusted: bool) -> None:
    config = TransportConfig(backend=backend, trusted_network=trusted)  # type: ignore[arg-type]
    assert chosen(config, REMOTE, rdma=True).name == "ucx-rdma"


def test_without_rdma_tls_unless_the_network_is_trusted() -> None:
    found = chosen(TransportConfig(), REMOTE)
    assert found.name == "tls"
    assert NO_RDMA in found.reason
    found = chosen(TransportConfig(trusted_network=True), REMOTE)
    assert (found.name, found.interface) == ("ucx-tcp", "eth0")


def test_without_cma_one_host_uses_tls() -> None:
    found = chosen(TransportConfig(), LOCAL, shm=False)
    assert (found.name, found.reason) == ("tls", NO_SHM)
    with pytest.raises(
        ConfigError, match=r"seccomp\. Set transport\.backend to auto or tls, set kernel\.yama"
    ):
        chosen(TransportConfig(backend="ucx"), LOCAL, shm=False)


def test_ucx_over_an_untrusted_network_is_refused() -> None:
    with pytest.raises(ConfigError) as refused:
        chosen(TransportConfig(backend="ucx"), REMOTE)
    for part in (REMOTE, NO_RDMA, "no authentication", "auto or tls", "transport.trusted_network = true"):
        assert part in str(refused.value)


def test_what_is_set_is_used() -> None:
    for host, rdma in itertools.product((LOCAL, REMOTE), (True, False)):
        assert chosen(TransportConfig(backend="tls"), host, rdma=rdma).name == "tls"
        assert chosen(TransportConfig(backend="inproc"), host, rdma=rdma).name == "inproc"


@pytest.mark.parametrize("gpu", [False, True])
def test_only_one_reach_has_tcp_and_none_has_sysv(gpu: bool) -> None:
    for kind in Reach:
        found = options(kind, gpu=gpu, interface="eth0")
        names = found["TLS"].split(",")
        assert ("tcp" in names) == (kind is Reach.TCP)
        assert not set(names) & {"all", "sysv", "sm", "shm", "mm"}
        assert found.get("NET_DEVICES") == ("eth0" if kind is Reach.TCP else None)


def test_environment_cannot_change_the_transports() -> None:
    with structlog.testing.capture_logs() as lines:
        prepare_host(Reach.ONE_HOST, {"UCX_TLS": "tcp"})
        prepare_host(Reach.ONE_HOST, {})
    assert [(line["event"], line["UCX_TLS"]) for line in lines] == [("ucx_tls_ignored", "tcp")]


def test_too_small_shared_memory_is_one_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ConfigError, match=r"none: No such file"):
        prepare_host(Reach.ONE_HOST, {}, tmp_path / "none")
    monkeypatch.setattr("transport.ucx.options.SHM_LEAST_BYTES", 1 << 60)
    with pytest.raises(ConfigError, match=r"MiB free.*--shm-size=1g.*volume `shm`"):
        prepare_host(Reach.ONE_HOST, {}, tmp_path)
    prepare_host(Reach.RDMA, {}, tmp_path)


def test_inproc_ignores_reach() -> None:
    made = make_transport("inproc", rank_name="a", fabric=InprocFabric(), reach=Reach.TCP)
    made.close()


def test_rdma_needs_a_device_and_a_library(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    queried: list[str] = []

    def offers(transport: str) -> bool:
        queried.append(transport)
        return len(queried) > 1

    monkeypatch.setattr(ucx_library, "offers", offers)
    monkeypatch.setattr(reach, "RDMA_DEVICES", tmp_path / "none")
    assert reach.why_no_rdma() == NO_RDMA
    monkeypatch.setattr(reach, "RDMA_DEVICES", tmp_path)
    (tmp_path / "mlx5_0").mkdir()
    assert "mlx5_0" in reach.why_no_rdma()
    assert reach.why_no_rdma() == ""
    assert queried == ["ib", "ib"]


def test_ucx_offers_what_it_has() -> None:
    assert ucx_library.offers("posix")
    assert not ucx_library.offers("no-such-transport")


def test_interface_of_an_address() -> None:
    assert interface_of("127.0.0.1") == interface_of("localhost") == "lo"
    with pytest.raises(ConfigError, match=r"203\.0\.113\.9 is not an address of this host"):
        interface_of("203.0.113.9")
