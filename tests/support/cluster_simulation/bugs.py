"""Bugs on purpose: the simulation must report each of them, or its silence about the real code means nothing."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import msgspec
import pytest

from cluster_simulation.network import SimulatedControl
from disagg.core.errors import PeerLostError
from disagg.node.kv_manager import KVManager
from disagg.node.leader import Leader
from disagg.router.answers import Answer
from disagg.router.session import Session
from prefill_node.scheduler import PrefillRequest, PrefillScheduler
from transport.control import messages as m
from transport.control.reliable import Envelope, Reliable


def drop_a_token(patch: pytest.MonkeyPatch) -> None:
    """The decode group streams one token less of each longer answer."""
    send = SimulatedControl.send

    def send_some(self: SimulatedControl, peer: str, message: m.Message) -> None:
        tokens = message.tokens if isinstance(message, m.StepTokens) else [message]
        kept = [
            one for one in tokens if not (isinstance(one, m.Tokens) and one.index == 2 and not one.finish)
        ]
        if isinstance(message, m.StepTokens):
            message = m.StepTokens([one for one in kept if isinstance(one, m.Tokens)])
        if kept:
            send(self, peer, message)

    patch.setattr(SimulatedControl, "send", send_some)


def repeat_an_output(patch: pytest.MonkeyPatch) -> None:
    """The router gives the client its third output twice."""
    add = Answer.add

    def add_twice(self: Any, message: m.Tokens) -> Any:
        for output, cut in add(self, message):
            yield output, cut
            if output.index == 2:
                yield output, cut

    patch.setattr(Answer, "add", add_twice)


def leak_pages(patch: pytest.MonkeyPatch) -> None:
    """A prefill group never frees what the first request holds."""
    closed = PrefillScheduler.rank_closed

    def forget(self: PrefillScheduler, request: PrefillRequest, rank: int) -> None:
        if request.key.request_id != "r1":
            closed(self, request, rank)

    patch.setattr(PrefillScheduler, "rank_closed", forget)


def free_pages_early(patch: pytest.MonkeyPatch) -> None:
    """A group frees the last page of a request when it has reserved it."""
    reserve = KVManager.reserve

    def reserve_freed(self: Any, *arguments: Any, **named: Any) -> Any:
        block_table = reserve(self, *arguments, **named)
        if block_table is not None:
            self.allocator.free(list(block_table.pages)[-1:])
        return block_table

    patch.setattr(KVManager, "reserve", reserve_freed)


def count_a_load_twice(patch: pytest.MonkeyPatch) -> None:
    """The router never takes an ended request out of its groups' loads."""
    patch.setattr("disagg.router.policy.SessionLoad.end", lambda self: None)


def never_resend(patch: pytest.MonkeyPatch) -> None:
    """A control channel does not retransmit."""

    patch.setattr("transport.control.reliable.RESEND_WINDOW", 0)


def deliver_twice(patch: pytest.MonkeyPatch) -> None:
    """A control channel passes a repeated packet on."""
    receive = Reliable.receive

    def receive_again(self: Reliable, envelope: Envelope, now_s: float) -> None:
        peer = self.known.get(envelope.source)
        if peer is not None and peer.their_stream == envelope.stream and 0 < envelope.seq == peer.delivered:
            peer.delivered -= 1
        receive(self, envelope, now_s)

    patch.setattr(Reliable, "receive", receive_again)


def miss_a_lost_peer(patch: pytest.MonkeyPatch) -> None:
    """A router's sessions ignore the loss of a leader."""

    on_message = Session.on_message

    def ignore(self: Session, peer: str, message: Any, now_s: float) -> Any:
        return [] if isinstance(message, PeerLostError) else on_message(self, peer, message, now_s)

    patch.setattr(Session, "on_message", ignore)


def drop_a_recovery(patch: pytest.MonkeyPatch) -> None:
    """The router gives up a request whose group is lost."""

    def give_up(request_id: str, branch: Any, dead: Any, max_recoveries: int, error: Exception) -> None:
        raise error

    patch.setattr("disagg.router.request_run.require_recoverable", give_up)


def go_on_from_a_wrong_token(patch: pytest.MonkeyPatch) -> None:
    """A recovered answer goes on behind another token than the last one."""
    send = SimulatedControl.send

    def send_wrong(self: SimulatedControl, peer: str, message: m.Message) -> None:
        if isinstance(message, m.Reserve | m.Prefill) and message.answered:
            *before, last = message.answered
            message = msgspec.structs.replace(message, answered=[*before, last ^ 1])
        send(self, peer, message)

    patch.setattr(SimulatedControl, "send", send_wrong)


def break_a_suspected_group(patch: pytest.MonkeyPatch) -> None:
    """A leader gives up a group whose rank is silent for a moment."""
    patch.setattr(Leader, "on_peer_suspected", lambda self, peer, silent: self.on_peer_lost(peer))


BUGS: dict[str, Callable[[pytest.MonkeyPatch], None]] = {
    "drop a token": drop_a_token,
    "repeat an output": repeat_an_output,
    "leak pages": leak_pages,
    "free pages early": free_pages_early,
    "count a load twice": count_a_load_twice,
    "never resend": never_resend,
    "deliver twice": deliver_twice,
    "miss a lost peer": miss_a_lost_peer,
    "drop a recovery": drop_a_recovery,
    "go on from a wrong token": go_on_from_a_wrong_token,
}
