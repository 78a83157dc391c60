"""The backends and devices on which every check of the transport contract runs."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest
import torch
from transport_harness import Pair, make_node

from transport.inproc import InprocFabric

BACKENDS = [
    pytest.param(("inproc", "cpu"), id="inproc"),
    pytest.param(("ucx", "cpu"), id="ucx"),
    pytest.param(("ucx-tcp", "cpu"), id="ucx-tcp"),
    pytest.param(("tls", "cpu"), id="tls"),
    pytest.param(("tls-lanes", "cpu"), id="tls-lanes"),
    pytest.param(("inproc", "cuda"), id="inproc-cuda", marks=pytest.mark.gpu),
    pytest.param(("ucx", "cuda"), id="ucx-cuda", marks=pytest.mark.gpu),
    pytest.param(("tls", "cuda"), id="tls-cuda", marks=pytest.mark.gpu),
    pytest.param(("tls-lanes", "cuda"), id="tls-lanes-cuda", marks=pytest.mark.gpu),
]


@pytest.fixture(params=BACKENDS)
def make_pair(request: pytest.FixtureRequest) -> Iterator[Callable[..., Pair]]:
    """Makes connected pairs; closes them afterwards."""
    backend, device = request.param
    torch.set_num_threads(1)
    torch.manual_seed(7)
    made: list[Pair] = []

    def make(nbytes: int = 4 << 20, connect: bool = True) -> Pair:
        fabric = InprocFabric() if backend == "inproc" else None
        a, b = (make_node(backend, name, fabric, torch.device(device), nbytes) for name in ("a", "b"))
        pair = Pair(a, b, fabric, torch.device(device), backend)
        made.append(pair)
        if connect:
            pair.connect()
        return pair

    yield make
    for pair in made:
        pair.a.transport.close()
        pair.b.transport.close()


@pytest.fixture
def pair(make_pair: Callable[..., Pair]) -> Pair:
    """A connected pair with 4 MiB on each side."""
    return make_pair()
