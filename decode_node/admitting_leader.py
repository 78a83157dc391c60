"""The part of the decode leader that admits requests, also those that take over the pages of an earlier attempt."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import NamedTuple

from decode_node.request import DecodeRequest, NewRequest, Resumption
from decode_node.scheduler import DecodeScheduler
from disagg.core.errors import (
    BusyError,
    DisaggError,
    InvalidRequestError,
    NotLinkedError,
    PeerLostError,
)
from disagg.core.local_prefill import computes_locally
from disagg.core.ports import Clock
from disagg.core.sampling import ending_tokens
from disagg.core.types import GroupInfo, RequestKey
from disagg.model.sampling.beam_search import BeamSearch
from disagg.model.sampling.penalties import history_of
from disagg.model.spec.model_spec import ModelSpec
from disagg.node.leader import Send
from disagg.node.led_scheduler import LedRequest
from disagg.node.request_checks import check_request
from disagg.node.reserving_leader import ReservingLeader
from disagg.node.waiting import WaitingRequest
from transport.control import messages as m

CLAIM_S = 0.5
"""Longest wait of an attempt for the pages of the request's earlier attempt. Pages are not released while a lost peer
may still write them."""


class Claim(NamedTuple):
    """An attempt that waits until the request's earlier attempt has released its row and pages."""

    old: DecodeRequest
    message: m.Reserve
    until_s: float
    """End of the wait for the pages, on the leader's clock."""


class AdmittingLeader(ReservingLeader):
    """The part of `DecodeLeader` that reserves rows and pages for requests, and records the linked prefill groups."""

    _scheduler: DecodeScheduler

    def __init__(
        self,
        scheduler: DecodeScheduler,
        eos_ids: Sequence[int],
        spec: ModelSpec,
        send: Send,
        to_self: Callable[[m.Message], None],
        clock: Clock,
        max_waiting: int,
    ) -> None:
        super().__init__(spec, send, to_self, clock, max_waiting)
        self._scheduler = scheduler
        self._eos_ids = tuple(eos_ids)
        self._prefill_leaders: dict[str, str] = {}
        """Control address of each linked prefill group's leader."""
        self._claims: dict[RequestKey, Claim] = {}
        """Claims by the key of the new attempt, which is `DecodeRequest.successor` of the earlier attempt."""

    def link(self, other: GroupInfo) -> None:
        """Accepts requests whose prompt is computed by this prefill group."""
        with self._changed:
            self._prefill_leaders[other.name] = other.leader.control_address

    def on_peer_lost(self, peer: str) -> None:
        """Handles a lost peer. If the peer is a prefill leader, its group's requests without a first token fail.

        A queued request fails with `NotLinkedError`, which the router does not count as a recovery: nothing was
        computed for the request, and one network partition can cause many such losses.
        """
        with self._changed:
            for claim in list(self._claims.values()):
                if claim.old.router == peer:
                    self._drop_claim(claim.old)
        super().on_peer_lost(peer)
        with self._changed:
            lost = {name for name, address in self._prefill_leaders.items() if address == peer}
            error = PeerLostError(f"lost the leader of the prefill group, at {peer}")
            for request in list(self._scheduler.requests.values()):
                if request.prefill_group in lost and not request.begun:
                    self._fail(request, error)
            unlinked = NotLinkedError(f"not linked: {error}")
            self._end_waits(lambda one: unlinked if one.reserve.prefill_group in lost else None)
            self._admit_waiting()
            self._changed.notify_all()

    def _reserve(self, router: str, message: m.Reserve) -> None:
        """Admits a request. An earlier attempt of the request in this group is closed first."""
        if message.key in self._claims:
            return  # a repeated message changes nothing
        old = self._scheduler.requests.get(message.after) if message.after is not None else None
        if old is None or old.router != router or old.successor is not None or self.broken:
            self._admit(router, message)
            return
        old.successor = message.key
        self._claims[message.key] = Claim(old, message, self._clock() + CLAIM_S)
        self._close(old.key, "another attempt takes over")
        self._confirm_release(old)
        self._admit_waiting()

    def expire(self) -> None:
        """Ends requests past their deadline.

        An attempt that has waited `CLAIM_S` for the earlier attempt's pages is admitted with new pages.
        """
        super().expire()
        now_s = self._clock()
        for claim in [one for one in self._claims.values() if one.until_s < now_s]:
            self._drop_claim(claim.old)
            self._admit(claim.old.router, claim.message)

    def _drop_claim(self, old: DecodeRequest) -> m.Reserve | None:
        """Cancels the claim on `old`; returns the message of the claiming attempt, None without one."""
        key, old.successor = old.successor, None
        return self._claims.pop(key).message if key is not None else None

    def _break(self, reason: str) -> None:
        for claim in list(self._claims.values()):
            self._drop_claim(claim.old)
            self._refuse(claim.old.router, claim.message.key, PeerLostError(reason))
        super()._break(reason)

    def _confirm_release(self, request: LedRequest) -> None:
        """Sends `Released` for a settled request if the router waits for it, and admits the attempt that takes over
        the request's pages."""
        super()._confirm_release(request)
        assert isinstance(request, DecodeRequest), "this leader has decode requests only"
        if request.key not in self._scheduler.requests and (message := self._drop_claim(request)):
            self._admit(request.router, message, self._scheduler.resumption(request, message.answered))

    def _release(self, router: str, message: m.Release) -> None:
        """Releases a request, or drops the attempt that still waits for an earlier attempt's pages."""
        claim = self._claims.get(message.key)
        if claim is not None and claim.old.router == router:
            self._drop_claim(claim.old)
        super()._release(router, message)

    def _admit(self, router: str, message: m.Reserve, resumption: Resumption | None = None) -> None:
        """Reserves memory for a request, or takes over the memory of `resumption`. Without room the request waits."""
        resumption = resumption or Resumption(message.answered)
        if not self._is_admissible(router, message):
            self._scheduler.drop(resumption)
            return
        one = self._arrived(router, message)
        if resumption.block_table is None:
            self._start_or_wait(one)
        else:
            self._resume_or_wait(one, resumption)

    def _is_admissible(self, router: str, message: m.Reserve) -> bool:
        """Returns whether a request needs a reservation; False if the request is queued, admitted or refused."""
        known = self._scheduler.requests.get(message.key)
        if known is not None and not known.closing:
            if known.router != router:
                self._refuse(
                    router, message.key, BusyError(f"request {message.key} is in use by another router")
                )
            elif len(known.opened_ranks) == self._ranks:
                self._send(router, m.Reserved(known.key, known.ticket))
            return False
        if self._waits(router, message):
            return False
        try:
            self._require_admissible(known, message)
        except DisaggError as error:
            self._refuse(router, message.key, error)
            return False
        return not self._has_ended(router, message)

    def _resume_or_wait(self, one: WaitingRequest, resumption: Resumption) -> None:
        """Admits a request that takes over pages, ahead of queued requests.

        If these pages do not suffice and no others are free, the request is queued too.
        """
        try:
            is_first = self.waiting.is_first(one.reserve.priority, self._ready)
            self._start(one, replace(resumption, only_kept=not is_first))
        except BusyError as error:
            self._wait(one, error)
        except DisaggError as error:
            self._refuse(one.router, one.reserve.key, error)

    def _start(self, one: WaitingRequest, resumption: Resumption | None = None) -> None:
        message = one.reserve
        new = NewRequest(
            message.key,
            message.prompt,
            message.sampling,
            one.router,
            message.prefill_group,
            one.deadline_s,
            self._prefix_of(message),
            message.tail_tokens,
        )
        request = self._scheduler.reserve(new, resumption or Resumption(message.answered))
        request.priority = message.priority
        if message.sampling.beams:
            request.search = BeamSearch(message.sampling, ending_tokens(message.sampling, self._eos_ids))
        for sequence in request.sequences:
            sequence.history = history_of(message.prompt, message.sampling)
            sequence.constraint = self.constraints.answer(message.sampling.grammar, message.answered)
        if self._is_local(message):
            self._scheduler.prefill_here(request)
            self._send(one.router, m.Reserved(request.key, request.ticket))
            return
        pages = request.sequences[0].block_table.pages
        self._to_ranks(
            m.OpenReceive(request.ticket, pages, message.prefill_group, is_head=message.tail_tokens > 0)
        )

    def _is_local(self, message: m.Reserve) -> bool:
        """Returns whether this group is to compute the request's prompt: the router names it as prefill group too."""
        return self._group is not None and message.prefill_group == self._group.name

    def _require_local(self, message: m.Reserve) -> None:
        """Raises `InvalidRequestError` for a prompt of which this group cannot compute a part."""
        if not self._scheduler.local_prefill_tokens:
            raise InvalidRequestError("this decode group computes no prompts (decode.local_prefill_tokens)")
        if not computes_locally(message.sampling):
            raise InvalidRequestError(
                "several answers, beams, a grammar and prompt_logprobs need a prefill group for the prompt"
            )

    def _require_tail(self, message: m.Reserve) -> None:
        """Raises `InvalidRequestError` for a prompt whose tail this group cannot compute."""
        self._require_local(message)
        most = min(self._scheduler.tail_tokens, len(message.prompt) - 1)
        if message.answered or message.after is not None or message.tail_tokens > most:
            raise InvalidRequestError(
                f"a tail of {message.tail_tokens} tokens is not possible: only a new request is divided, and the "
                f"tail of this prompt has at most {most} tokens in this decode group"
            )

    def _require_admissible(self, known: DecodeRequest | None, message: m.Reserve) -> None:
        if known is not None:
            raise BusyError(f"request {message.key} is still being released from its last use")
        if self.broken:
            raise PeerLostError(self.broken)
        if self._is_local(message):
            self._require_local(message)
        elif message.prefill_group not in self._prefill_leaders:
            raise NotLinkedError(
                f"prefill group {message.prefill_group!r} is not linked to this decode group"
            )
        elif message.tail_tokens:
            self._require_tail(message)
        check_request(message.prompt, message.sampling, self._spec, message.answered)
