"""The benchmark of backends between two processes: every byte is compared."""

from __future__ import annotations

import pytest

from disagg.bench.common.report import Measurement
from disagg.bench.transfer import wire
from disagg.bench.transfer.wire import Backend, WireBench, WireEnd, cipher_rate, run
from disagg.core.errors import InvariantError
from transport.keys.curve import make_keys

SIZE = 1 << 16
BENCH = WireBench(sizes=(SIZE,), lanes=(2,), most_bytes=1 << 20, repeats=1)


@pytest.mark.parametrize("backend", [Backend("TLS", "tls", lanes=2), Backend("plain TCP", "tcp")])
def test_two_processes_move_every_byte(backend: Backend) -> None:
    rates = wire.measured_rates(BENCH, backend)
    assert list(rates) == [SIZE]
    assert rates[SIZE].low > 0


def test_wrong_bytes_give_no_figure() -> None:
    end = WireEnd(Backend("TLS", "tls"), make_keys(), SIZE)
    try:
        end.fill()
        end.check(SIZE)
        end.buffer[100] += 1
        with pytest.raises(InvariantError, match="wrong bytes"):
            end.check(SIZE)
    finally:
        end.close()


def test_every_backend_stands_beside_plain_tcp(monkeypatch: pytest.MonkeyPatch) -> None:
    rate = Measurement("wire", "GB/s", (1.0,))
    monkeypatch.setattr(wire, "measured_rates", lambda bench, backend: {SIZE: rate})
    monkeypatch.setattr(wire, "cipher_rate", lambda size, repeats: rate)
    results = run(BENCH)
    assert [result.labels.get("backend") for result in results[2:]] == [
        "plain TCP",
        "TLS, 2 lanes",
        "UCX over TCP",
        "UCX over shared memory",
    ]
    assert all(result.ceiling is rate for result in results[3:])


def test_the_cipher_alone_has_a_rate(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(wire, "CIPHER_BYTES", 1 << 20)
    assert cipher_rate(16, 1).low > 0
