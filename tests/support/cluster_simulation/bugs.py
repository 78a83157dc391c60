"""Bugs on purpose: the simulation must report each of them, or its silence about the real code means nothing."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from decode_node.leader import DecodeLeader
from disagg.node.kv_manager import KVManager
from disagg.router.answers import Answer
from disagg.router.response_dispatcher import ResponseDispatcher
from disagg.router.session import Session
from prefill_node.leader import PrefillLeader
from transport.control import messages as m
from transport.control.reliable import Reliable


def drop_a_token(patch: pytest.MonkeyPatch) -> None:
    """The decode group streams one token less of each longer answer."""
    emit = DecodeLeader._emit

    def emit_some(self: Any, request: Any, sequence: Any, index: int, tokens: Any, logprobs: Any) -> None:
        if index == 2 and len(sequence.tokens) < request.sampling.max_tokens:
            return
        emit(self, request, sequence, index, tokens, logprobs)

    patch.setattr(DecodeLeader, "_emit", emit_some)


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
    closed = PrefillLeader._closed

    def forget(self: Any, message: m.RankClosed) -> None:
        if message.key.request_id != "r1":
            closed(self, message)

    patch.setattr(PrefillLeader, "_closed", forget)


def free_pages_early(patch: pytest.MonkeyPatch) -> None:
    """A group frees the last page of a request when it has reserved it."""
    reserve = KVManager.reserve

    def reserve_freed(self: Any, *arguments: Any, **named: Any) -> Any:
        block_table = reserve(self, *arguments, **named)
        if block_table is not None:
            self._pages.free(list(block_table.pages)[-1:])
        return block_table

    patch.setattr(KVManager, "reserve", reserve_freed)


def count_a_load_twice(patch: pytest.MonkeyPatch) -> None:
    """The router never takes an ended request out of its groups' loads."""
    patch.setattr("disagg.router.policy.SessionLoad.end", lambda self: None)


def never_resend(patch: pytest.MonkeyPatch) -> None:
    """A control channel does not retransmit."""

    def wait(self: Any, peer: Any, now_s: float) -> None:
        peer.resend_at_s = now_s + 1.0

    patch.setattr(Reliable, "_resend", wait)


def deliver_twice(patch: pytest.MonkeyPatch) -> None:
    """A control channel passes a repeated packet on."""
    take = Reliable._take

    def take_again(self: Any, peer: Any, envelope: Any) -> None:
        if envelope.seq == peer.delivered:
            peer.delivered -= 1
        take(self, peer, envelope)

    patch.setattr(Reliable, "_take", take_again)


def miss_a_lost_peer(patch: pytest.MonkeyPatch) -> None:
    """A router does not pass the loss of a leader on to its sessions."""

    def lose(self: Any, peer: str) -> None:
        self.lost.add(peer)

    patch.setattr(ResponseDispatcher, "_lose", lose)


def drop_a_recovery(patch: pytest.MonkeyPatch) -> None:
    """The router gives up a request whose group is lost."""

    def give_up(request_id: str, branch: Any, dead: Any, max_recoveries: int, error: Exception) -> None:
        raise error

    patch.setattr("disagg.router.request_run.require_recoverable", give_up)


def go_on_from_a_wrong_token(patch: pytest.MonkeyPatch) -> None:
    """A recovered answer goes on behind another token than the last one."""
    begin = Session.__post_init__

    def begin_wrong(self: Any) -> None:
        begin(self)
        if self._answered:
            self._answered[-1] ^= 1

    patch.setattr(Session, "__post_init__", begin_wrong)


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
