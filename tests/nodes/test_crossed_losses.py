"""A rank's control channel loses a peer while the rank links the peer's group."""

from __future__ import annotations

import threading
from typing import Any

import pytest
from conditions import PATIENCE_S
from local_groups import Checkpoints, exact_again, local_groups, small_config


@pytest.mark.parametrize("role", ["prefill", "decode"])
def test_a_peer_that_is_met_before_its_loss_is_repeated(checkpoints: Checkpoints, role: str) -> None:
    """The control thread handles the loss and the new stream while the transfer thread still connects."""
    connected = threading.Event()
    with local_groups(small_config(1, 1), checkpoints.source()) as groups:
        rank: Any = getattr(groups, role)[0]
        silences, other = rank.peers.silences, groups.infos["decode" if role == "prefill" else "prefill"]
        peer = other.leader.control_address
        rank.transfer_loop.post(lambda: connected.wait(PATIENCE_S))
        silences.dead(peer)  # as before `RankNode.link`
        rank.peers.silent(peer)
        silences.linked(other, [peer])  # as `RankNode.link` does at the end of its connect
        rank.peers.met(peer)
        connected.set()
        rank.transfer_loop.call(lambda: None, PATIENCE_S)
        groups.serve(lambda router: exact_again(router, checkpoints))
        assert not silences.silent
