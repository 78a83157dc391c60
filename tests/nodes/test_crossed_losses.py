"""A rank's control channel loses a peer while the rank links the peer's group."""

from __future__ import annotations

import threading
from typing import Any

import pytest
from local_groups import Checkpoints, exact_again, local_groups, small_config

TIMEOUT_S = 20.0


@pytest.mark.parametrize("role", ["prefill", "decode"])
def test_a_peer_that_is_met_before_its_loss_is_repeated(checkpoints: Checkpoints, role: str) -> None:
    """The control thread handles the loss and the new stream while the transfer thread still connects."""
    connected = threading.Event()
    with local_groups(small_config(1, 1), checkpoints.source()) as groups:
        rank: Any = getattr(groups, role)[0]
        peer = groups.infos["decode" if role == "prefill" else "prefill"].leader.control_address
        silences: Any = rank._silences
        rank._loop.post(lambda: connected.wait(TIMEOUT_S))
        linked, silences._linked = silences._linked, {}
        rank.peer_silent(peer)
        silences._linked = linked  # as `RankNode.link` does at the end of its connect
        rank._on_met(peer)
        connected.set()
        rank._loop.call(lambda: None, TIMEOUT_S)
        groups.serve(lambda router: exact_again(router, checkpoints))
        assert not silences._silent
