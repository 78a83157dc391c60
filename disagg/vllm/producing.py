"""Transfers out of one worker: prompts that are computed or held, matched with the tickets of consumers.

A transfer needs two things, which come in any order: the prompt's blocks, from this engine's scheduler, and a
`PushRequest` of each consumer rank that this rank sends to. `Producing` runs on the transfer thread.
"""

from __future__ import annotations

import enum
import math
from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass, field

import structlog

from disagg.core.errors import DisaggError, InvariantError
from disagg.core.ports import Clock
from disagg.core.types import GroupInfo, RankInfo, RequestKey, Span, Ticket
from disagg.data_path.events import TransferEvent, TransferEventKind
from disagg.data_path.producer import KVProducer
from disagg.kv.pages import pages_for
from disagg.node.device import DeviceEvent
from disagg.node.links import Link
from disagg.vllm.groups import NULL_BLOCK, BlockTables, block_span, holds
from disagg.vllm.states import check_exchange
from disagg.vllm.work import HoldWork, PrefillWork, PromptStates
from prefill_node.step_part import StepPart
from transport.control import messages as m

log = structlog.get_logger(__name__)


class OutgoingState(enum.Enum):
    """State of a prompt's transfer out of this worker."""

    WAITING = "waiting"
    """A `PushRequest`, or the link with its group, is missing."""
    OPEN = "open"
    CLOSING = "closing"
    """The data path may still read the blocks."""
    DONE = "done"
    """The blocks are not read any more; the request has not finished yet."""


@dataclass(slots=True, eq=False)
class HeldPrompt:
    """A prompt whose blocks this worker may read."""

    key: RequestKey
    request_id: str
    tables: BlockTables
    positions: int
    """Positions of the data path that hold the prompt; see `EngineFacts.positions`."""
    states: PromptStates
    state: OutgoingState = OutgoingState.WAITING
    held: bool = False
    """Whether the request has finished: its blocks are freed when this worker reports the request."""
    until_s: float = math.inf
    """End of the lease."""
    ticket: int = -1
    """Number of the open ticket."""


@dataclass(slots=True, eq=False)
class _Pushes:
    """What a consumer's ranks have sent for one key, possibly before the prompt is known."""

    until_s: float
    requests: dict[int, tuple[str, m.PushRequest]] = field(default_factory=dict)
    """Peer and request, by consumer rank."""
    cancelled: bool = False


@dataclass(frozen=True, slots=True)
class ProducingStatistics:
    """Counts of one worker's outgoing transfers."""

    prompts: int
    unmatched: int
    """Keys that consumers have named, without a prompt."""
    expired: int
    """Prompts whose lease ended before a consumer asked for them."""
    refused: int


class Producing:
    """Outgoing transfers of one worker, the engine of its `KVProducer`."""

    def __init__(self, rank: int, lease_s: float, clock: Clock) -> None:
        self._rank, self._lease_s, self._clock = rank, lease_s, clock
        self.endpoint: KVProducer
        """Set before the endpoint starts."""
        self._prompts: dict[str, HeldPrompt] = {}
        self._keys: dict[str, str] = {}
        """Key of each prompt, by request."""
        self._pushes: dict[str, _Pushes] = {}
        self._expired = self._refused = 0
        self.finished: deque[str] = deque()
        """Requests whose blocks may be freed; any thread may pop."""

    # --- work of the engine's scheduler

    def prefill(self, work: PrefillWork, parts: tuple[StepPart, StepPart], event: DeviceEvent) -> None:
        """Plans a prompt that is about to be computed. `parts`: earlier positions, which `event` marks as computed,
        and the positions of the step."""
        if work.key in self._prompts:
            return  # `hold` reports the request whose key another one has
        prompt = self._add(work, work.positions.stop)
        earlier, chunk = parts
        if work.positions.start:
            self.endpoint.plan(prompt.key, earlier, Span(0, work.positions.start))
            self._computed(earlier, event)
        self.endpoint.plan(prompt.key, chunk, work.positions)
        self.endpoint.plan_state(prompt.key, chunk, work.positions.stop)
        self._maybe_open(prompt)

    def hold(self, work: HoldWork, part: StepPart, event: DeviceEvent) -> None:
        """Holds a computed prompt. `event` marks the end of its computation."""
        prompt = self._prompts.get(work.key)
        if prompt is None:
            prompt = self._add(work, work.positions)
            self.endpoint.plan(prompt.key, part, Span(0, work.positions))
            self.endpoint.plan_state(prompt.key, part, work.positions)
            self._computed(part, event)
        elif prompt.request_id != work.request_id:
            log.warning("key_in_use", key=work.key, request=work.request_id)
            self.finished.append(work.request_id)
            return
        self._hold(prompt)
        self._maybe_open(prompt)

    def drop(self, request_id: str) -> None:
        """Ends the transfer of an aborted request, which its scheduler holds."""
        prompt = self._prompts.get(self._keys.get(request_id, ""))
        if prompt is None:
            self.finished.append(request_id)
            return
        self._hold(prompt)
        self._end(prompt, "the producer has aborted the request")

    # --- messages of consumers

    def on_message(self, peer: str, message: m.Message) -> None:
        """Handles a control message; see `disagg.data_path.endpoint.Engine`."""
        match message:
            case m.EngineGroups(groups=[own, other]):
                try:
                    check_exchange(own, other)
                    self.endpoint.link(own, other)
                except DisaggError as exc:
                    log.error("not_linked", group=other.name, error=str(exc))
            case m.PushRequest():
                self._on_push(peer, message)
            case m.PushCancelled():
                self._on_cancelled(message)
            case _:
                log.warning("unexpected_message", kind=type(message).__name__, peer=peer)

    def on_linked(self, group: GroupInfo) -> None:
        """Opens the tickets that waited for the link."""
        for prompt in list(self._prompts.values()):
            self._maybe_open(prompt)

    def _on_push(self, peer: str, push: m.PushRequest) -> None:
        key = push.ticket.key.request_id
        prompt = self._prompts.get(key)
        if prompt is None and push.held:
            self._refuse(peer, push, "the request is not held here: its lease has ended, or it was aborted")
            return
        if prompt is not None and prompt.state is not OutgoingState.WAITING:
            self._refuse(peer, push, "the request is being sent for another ticket, or has ended")
            return
        pushes = self._pushes.setdefault(key, _Pushes(self._clock() + self._lease_s))
        if pushes.cancelled:  # by another rank of the consumer
            self._refuse(peer, push, "the consumer has cancelled the transfer")
            return
        if any(other.ticket.number != push.ticket.number for _, other in pushes.requests.values()):
            pushes.requests.clear()  # of an earlier try
        pushes.requests[push.dst_rank] = (peer, push)
        if prompt is not None:
            self._maybe_open(prompt)

    def _on_cancelled(self, message: m.PushCancelled) -> None:
        prompt = self._prompts.get(message.request)
        if prompt is None:
            self._pushes.setdefault(message.request, _Pushes(self._clock() + self._lease_s)).cancelled = True
        else:
            # Also of an open transfer: a consumer that closes early does not verify the checksums of its KV.
            self._end(prompt, "the consumer needs no KV")

    # --- the data path

    def on_event(self, event: TransferEvent) -> None:
        """Handles an event of a transfer."""
        prompt = self._prompts.get(event.key.request_id)
        if prompt is None or prompt.ticket != event.ticket:
            return
        if event.kind is TransferEventKind.CLOSED:
            self._ended(prompt)
        elif prompt.state is OutgoingState.OPEN:
            if event.kind is TransferEventKind.FAILED:
                log.warning("kv_not_sent", request=prompt.request_id, error=event.reason)
                self._refuse_all(prompt, event.reason)
            self._end(prompt, event.reason or event.kind.value)

    def on_tick(self, now_s: float) -> None:
        """Ends the leases that are over."""
        for prompt in [one for one in self._prompts.values() if one.until_s <= now_s]:
            if prompt.state is OutgoingState.WAITING:
                self._expired += 1
                log.warning("lease_ended", request=prompt.request_id, lease_s=self._lease_s)
                self._refuse_all(prompt, f"the lease of {self._lease_s:g} s (lease_s) has ended")
            self._end(prompt, f"not sent within {self._lease_s:g} s (lease_s)")
        for key in [key for key, pushes in self._pushes.items() if pushes.until_s <= now_s]:
            if key not in self._prompts:
                self._answer_all(key, f"the request did not come within {self._lease_s:g} s (lease_s)")

    # --- states

    def _add(self, work: PrefillWork | HoldWork, positions: int) -> HeldPrompt:
        prompt = HeldPrompt(RequestKey(work.key), work.request_id, work.tables, positions, work.states)
        self._prompts[work.key], self._keys[work.request_id] = prompt, work.key
        return prompt

    def _hold(self, prompt: HeldPrompt) -> None:
        prompt.held = True
        prompt.until_s = min(prompt.until_s, self._clock() + self._lease_s)
        if prompt.state is OutgoingState.DONE:
            self._forget(prompt)

    def _maybe_open(self, prompt: HeldPrompt) -> None:
        pushes = self._pushes.get(prompt.key.request_id)
        if pushes is None or prompt.state is not OutgoingState.WAITING:
            return
        if pushes.cancelled:
            self._end(prompt, "the consumer needs no KV")
            return
        push = next(iter(pushes.requests.values()))[1]
        link = self.endpoint.link_with(push.ticket.group)
        if link is None or not {peer.rank for peer in requesters(link, self._rank)} <= set(pushes.requests):
            return
        if problem := self._missing(prompt, push.ticket) or self._missing_state(prompt, push.tokens):
            self._refuse_all(prompt, problem)
            self._end(prompt, problem)
            return
        prompt.state, prompt.ticket = OutgoingState.OPEN, push.ticket.number
        prompt.until_s = self._clock() + self._lease_s
        sizes = self.endpoint.options.tables.page_sizes
        needed = [pages_for(push.ticket.tokens.stop, size) for size in sizes]
        tables = [blocks[:count] for blocks, count in zip(prompt.tables, needed, strict=True)]
        # The sender looks tickets up by this key; a second ticket of the same key is refused while this one is open.
        self.endpoint.open(push.ticket, tables, prompt.states.blocks)

    def _missing(self, prompt: HeldPrompt, ticket: Ticket) -> str:
        """Returns which KV of the ticket this engine does not have; empty if it has all."""
        tables, stop = self.endpoint.options.tables, ticket.tokens.stop
        if stop > prompt.positions:
            return f"the prompts of both engines differ: {prompt.positions} positions here, not {stop}"
        for number, start in enumerate(ticket.starts or [ticket.tokens.start]):
            table = tables.table_of(number)
            if not holds(prompt.tables[table], block_span(start, stop, tables.page_sizes[table])):
                return (
                    f"vLLM has freed blocks of positions {start} to {stop - 1} here. With sliding windows, the "
                    "producer's request must have max_tokens 1, and the consumer's blocks must not be larger"
                )
        return ""

    def _missing_state(self, prompt: HeldPrompt, tokens: int) -> str:
        """Returns why this engine does not have the recurrent state after `tokens`; empty if it has."""
        if not self.endpoint.options.shard.states:
            return ""
        if not prompt.states.blocks or NULL_BLOCK in prompt.states.blocks:
            return "the recurrent state of the prompt is gone here: the producer's request must have max_tokens 1"
        if tokens != prompt.states.tokens:
            return (
                f"the recurrent state here is that after {prompt.states.tokens} tokens, not {tokens}. Both engines "
                "need the same prompt, and the producer's request must not ask for log-probabilities of the prompt"
            )
        return ""

    def _end(self, prompt: HeldPrompt, reason: str) -> None:
        """Stops the transfer; the blocks stay held until the data path has closed it."""
        if prompt.state is OutgoingState.WAITING:
            self._ended(prompt)
        elif prompt.state is OutgoingState.OPEN:
            prompt.state, prompt.until_s = OutgoingState.CLOSING, math.inf
            self.endpoint.close(prompt.key, prompt.ticket, reason)

    def _ended(self, prompt: HeldPrompt) -> None:
        self.endpoint.drop(prompt.key)
        prompt.state, prompt.until_s = OutgoingState.DONE, math.inf
        self._pushes.pop(prompt.key.request_id, None)
        if prompt.held:
            self._forget(prompt)

    def _forget(self, prompt: HeldPrompt) -> None:
        """Reports the request: the scheduler frees its blocks."""
        del self._prompts[prompt.key.request_id], self._keys[prompt.request_id]
        self.finished.append(prompt.request_id)

    def _computed(self, part: StepPart, event: DeviceEvent) -> None:
        for layers in self.endpoint.classes:
            self.endpoint.computed(part, layers, event)

    def _refuse_all(self, prompt: HeldPrompt, reason: str) -> None:
        """Answers the consumers of a prompt whose sender has no ticket, and so does not answer itself."""
        if self.endpoint.agent.tickets.find(prompt.key, prompt.ticket) is None:
            self._answer_all(prompt.key.request_id, reason)

    def _answer_all(self, key: str, reason: str) -> None:
        pushes = self._pushes.pop(key, None)
        for peer, push in pushes.requests.values() if pushes is not None else ():
            self._refuse(peer, push, reason)

    def _refuse(self, peer: str, push: m.PushRequest, reason: str) -> None:
        self._refused += 1
        key, number = push.ticket.key, push.ticket.number
        self.endpoint.wires.control.send(peer, m.SenderEnded(key, number, self._rank, [], reason))

    # --- inspection

    def statistics(self) -> ProducingStatistics:
        """Returns the counts at this moment."""
        unmatched = sum(key not in self._prompts for key in self._pushes)
        return ProducingStatistics(len(self._prompts), unmatched, self._expired, self._refused)

    def check(self) -> None:
        """Raises `InvariantError` unless states and indices agree."""
        if {prompt.request_id: key for key, prompt in self._prompts.items()} != self._keys:
            raise InvariantError(f"prompts {self._prompts} have the keys {self._keys}")
        for prompt in self._prompts.values():
            if prompt.state is OutgoingState.DONE and prompt.held:
                raise InvariantError(f"{prompt.request_id} is done and was not reported")
            if prompt.held and prompt.state is OutgoingState.WAITING and prompt.until_s == math.inf:
                raise InvariantError(f"{prompt.request_id} is held without a lease")


def requesters(link: Link, src_rank: int) -> Iterable[RankInfo]:
    """Returns the consumer ranks whose `PushRequest` producer rank `src_rank` waits for.

    A rank whose heads another rank sends waits for consumer rank 0, and then sends nothing.
    """
    return link.destinations_of(src_rank) or link.decode.ranks[:1]


def pushed_to(link: Link, dst_rank: int) -> list[RankInfo]:
    """Returns the producer ranks to which consumer rank `dst_rank` sends its `PushRequest`."""
    return [
        one for one in link.prefill.ranks if dst_rank in {peer.rank for peer in requesters(link, one.rank)}
    ]
