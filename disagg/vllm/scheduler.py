"""The connector in vLLM's scheduler: which requests are sent and received, and which blocks are held meanwhile."""

from __future__ import annotations

import itertools
import secrets
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import structlog

from disagg.core.types import PROTOCOL_VERSION, GroupInfo, RankInfo, RequestKey, Span, Ticket
from disagg.vllm.compat import (
    EngineFacts,
    ScheduledTokens,
    answers_one_token,
    block_tables_of,
    computes_nothing,
    drop_last_prompt_token,
    newly_received,
    preempted,
    prompt_is_computed,
    scheduled,
)
from disagg.vllm.directory import EngineDirectory
from disagg.vllm.groups import BlockTables, block_span
from disagg.vllm.unsettled import UnsettledRequests
from disagg.vllm.work import (
    HoldWork,
    PrefillWork,
    PromptStates,
    ReceiveWork,
    ReleaseWork,
    StepWork,
    WorkerHandshake,
)
from transport.tags import TICKET_NUMBERS

log = structlog.get_logger(__name__)

_SOURCE = ("remote_engine_id", "remote_request_id", "remote_host", "remote_port")


@dataclass(slots=True)
class _Prompt:
    """A request that this engine computes for another one."""

    key: str
    tokens: int
    one_token: bool
    """Whether the request ends with the step that computes its prompt."""
    tables: BlockTables = ()
    announced: bool = False
    """Whether the workers may read its blocks."""


@dataclass(frozen=True, slots=True)
class SchedulingStatistics:
    """Requests whose blocks the connector holds, or waits for."""

    prompts: int
    holding: int
    receiving: int


class SchedulerSide:
    """The scheduler's connector. Owned by the scheduler's thread. Method names and semantics are those of vLLM."""

    def __init__(
        self, facts: EngineFacts, directory: EngineDirectory, host: str, port: int, *, early: bool = False
    ) -> None:
        """`host`, `port`: address at which consumers reach this engine's `directory`. `early`: whether workers report
        requests before all KV has come."""
        self._facts, self._directory, self._address = facts, directory, (host, port)
        self._work = StepWork()
        self._prompts: dict[str, _Prompt] = {}
        self._holding: set[str] = set()
        self._receiving: set[str] = set()
        self._early: set[str] = set()
        """Received requests that vLLM knows of before their worker's report."""
        self.unsettled = UnsettledRequests() if early else None
        """Requests whose blocks may still be written; None without early reports."""
        self._was_empty = False
        """Whether the latest step computed nothing."""
        self._tables: tuple[int, ...] = (0,)
        """Page table of each layer class."""
        self._computed: dict[str, int] = {}
        """First token that each request may receive; vLLM may reserve blocks for a part of the tokens after it."""
        # Not from 0: messages of an earlier life of this engine must not match a new ticket.
        self._numbers = itertools.count(secrets.randbelow(TICKET_NUMBERS))

    # --- set-up

    def set_xfer_handshake_metadata(self, workers: Mapping[int, WorkerHandshake]) -> None:
        """Makes the engine's groups known to other engines, from the workers' handshake metadata by rank."""
        ordered = [workers[rank] for rank in sorted(workers)]
        self._tables = ordered[0].tables
        producers = [one.producer for one in ordered if one.producer is not None]
        consumers = [one.consumer for one in ordered if one.consumer is not None]
        groups = [
            self._group(role, ranks, ordered[0])
            for role, ranks in (("prefill", producers), ("decode", consumers))
            if ranks
        ]
        self._directory.start(groups)

    def _group(self, role: str, ranks: Iterable[RankInfo], first: WorkerHandshake) -> GroupInfo:
        return GroupInfo(
            name=group_name(self._facts.engine_id, role),
            role=role,
            protocol_version=PROTOCOL_VERSION,
            fingerprint=self._facts.fingerprint,
            layout=first.layout,
            page_size=self._facts.page_sizes[0],
            transport=first.transport,
            ranks=tuple(ranks),
            checksum=first.checksum,
        )

    # --- scheduling

    def on_new_request(self, request: Any) -> None:
        """Shortens a prompt that another engine continues, where `EngineFacts.handed_over` counts one token less."""
        params = request.kv_transfer_params or {}
        if params.get("do_remote_decode") and self._facts.produces and self._facts.local:
            drop_last_prompt_token(request)

    def get_num_new_matched_tokens(self, request: Any, num_computed_tokens: int) -> tuple[int, bool]:
        """Returns how many tokens after the computed ones another engine sends, and whether asynchronously."""
        params = request.kv_transfer_params or {}
        if params.get("do_remote_prefill") and self._facts.consumes:
            missing = [name for name in _SOURCE if not params.get(name)]
            count = self._facts.handed_over(request.num_prompt_tokens) - num_computed_tokens
            if missing:
                log.warning("kv_transfer_params", request=request.request_id, missing=", ".join(missing))
            elif count > 0:
                self._computed[request.request_id] = num_computed_tokens
                return count, True
        return 0, False

    def update_state_after_alloc(self, request: Any, blocks: Any, num_external_tokens: int) -> None:
        """Makes the ticket of a request whose blocks are reserved, or begins to follow a prompt to be sent."""
        params = request.kv_transfer_params or {}
        if self.unsettled is not None:
            self._uses(self.unsettled, request.request_id, block_tables_of(blocks))
        if params.get("do_remote_decode") and self._facts.produces:
            key = str(params.get("transfer_id") or request.request_id)
            prompt = _Prompt(key, request.num_prompt_tokens, answers_one_token(request))
            self._prompts.setdefault(request.request_id, prompt)
        elif params.get("do_remote_prefill") and self._facts.consumes:
            params["do_remote_prefill"] = False  # one transfer for each request
            computed = self._computed.pop(request.request_id, 0)
            if any(not params.get(name) for name in _SOURCE):
                return
            self._directory.meet(_address_of(params))
            if num_external_tokens > 0:
                tokens = Span(computed, computed + num_external_tokens)
                self._receive(request, block_tables_of(blocks), tokens)
            else:
                self._release(params)

    def _receive(self, request: Any, tables: BlockTables, tokens: Span) -> None:
        params = request.kv_transfer_params
        needed = tuple(
            blocks[block_span(tokens.start, tokens.stop, group.block_size)]
            for group, blocks in zip(self._facts.attention, self._facts.page_tables(tables), strict=True)
        )
        group = group_name(self._facts.engine_id, "decode")
        number = next(self._numbers) % TICKET_NUMBERS
        positions, starts = self._facts.positions(tokens), self._facts.starts(tokens, self._tables)
        ticket = Ticket(RequestKey(_key_of(params)), number, group, positions, starts=starts)
        source, held = group_name(params["remote_engine_id"], "prefill"), bool(params.get("remote_block_ids"))
        states = self._states(tables, tokens.stop)
        self._work.receives.append(ReceiveWork(request.request_id, ticket, needed, states, source, held))
        self._receiving.add(request.request_id)
        if self.unsettled is not None:
            self.unsettled.add(request.request_id, needed[0])

    def _release(self, params: Mapping[str, Any]) -> None:
        group = group_name(params["remote_engine_id"], "prefill")
        self._work.releases.append(ReleaseWork(_key_of(params), group))

    def build_connector_meta(self, scheduler_output: Any) -> StepWork:
        """Returns the workers' work of a step, and forgets it."""
        for one in scheduled(scheduler_output):
            prompt = self._prompts.get(one.request_id)
            if prompt is not None:
                self._scheduled(one, prompt)
            if self.unsettled is not None:
                self._uses(self.unsettled, one.request_id, one.tables)
                self.unsettled.schedule(one.request_id)
        work, self._work = self._work, StepWork()
        # Not in the first empty step: with asynchronous scheduling, the tokens of the step before are still unread.
        empty = computes_nothing(scheduler_output)
        if self.unsettled is not None:
            self.unsettled.preempt(preempted(scheduler_output))
            work.forgets = self.unsettled.forgets()
            if not empty or work.receives:  # vLLM may give the blocks of a preempted request to another one
                work.due = self.unsettled.due()
        work.may_wait = self._facts.steps_alone and empty and self._was_empty
        self._was_empty = empty
        return work

    @staticmethod
    def _uses(unsettled: UnsettledRequests, request_id: str, tables: BlockTables) -> None:
        for blocks in tables:  # there is one group
            unsettled.uses(request_id, blocks)

    def _scheduled(self, one: ScheduledTokens, prompt: _Prompt) -> None:
        if one.replaces or not prompt.tables:
            prompt.tables = one.tables
        else:
            for blocks, more in zip(prompt.tables, one.tables, strict=False):  # there may be no new blocks
                blocks.extend(more)
        last = one.computed + one.tokens >= prompt.tokens
        # With asynchronous scheduling vLLM may preempt the request, and give its blocks away, before the step ends.
        if last and prompt.one_token and not prompt.announced and not self._facts.async_scheduling:
            prompt.announced = True
            positions = self._facts.positions(Span(one.computed, prompt.tokens))
            # When the step ends, vLLM frees the blocks that `kept` leaves out.
            tables = self._facts.kept(prompt.tables, prompt.tokens)
            pages, states = self._facts.page_tables(tables), self._states(tables, prompt.tokens)
            self._work.prefills.append(PrefillWork(prompt.key, one.request_id, pages, positions, states))

    def _states(self, tables: BlockTables, tokens: int) -> PromptStates:
        return PromptStates(tokens, self._facts.state_blocks(tables, tokens))

    # --- ends

    def request_finished(self, request: Any, tables: BlockTables) -> tuple[bool, dict[str, Any] | None]:
        """Returns whether the request's blocks are held until `get_finished` names the request, and the parameters of
        the consumer's request. `tables`: blocks of each group, with null blocks for those that vLLM has freed."""
        request_id, params = request.request_id, request.kv_transfer_params or {}
        self._computed.pop(request_id, None)
        if params.get("do_remote_prefill") and self._facts.consumes:  # its blocks were never reserved
            params["do_remote_prefill"] = False
            if all(params.get(name) for name in _SOURCE):
                self._directory.meet(_address_of(params))
                self._release(params)
            return False, None
        held = self.unsettled is not None and self.unsettled.finish(request_id)
        if request_id in self._receiving:
            self._work.cancels.append(request_id)
            return True, None
        if held:  # not cancelled: other requests may have its blocks from vLLM's prefix cache
            return True, None
        prompt = self._prompts.pop(request_id, None)
        if prompt is None:
            return False, None
        if prompt_is_computed(request) and any(tables):
            self._holding.add(request_id)
            positions = self._facts.positions(Span(0, prompt.tokens)).stop
            # The state moves on with each token of an answer: a longer answer leaves none of the prompt.
            states = self._states(tables, prompt.tokens) if prompt.one_token else PromptStates(0)
            pages = self._facts.page_tables(tables)
            self._work.holds.append(HoldWork(prompt.key, request_id, pages, positions, states))
            return True, self._consumer_params(request_id, params, tables)
        if prompt.announced:
            self._holding.add(request_id)
            self._work.drops.append(request_id)
        return prompt.announced, None

    def _consumer_params(
        self, request_id: str, params: Mapping[str, Any], tables: BlockTables
    ) -> dict[str, Any]:
        host, port = self._address
        found = {
            "do_remote_prefill": True,
            "do_remote_decode": False,
            "remote_engine_id": self._facts.engine_id,
            "remote_request_id": request_id,
            "remote_block_ids": list(tables),  # a list for each KV cache group, as NixlConnector's
            "remote_host": host,
            "remote_port": port,
            "tp_size": self._facts.tp_size,
        }
        if params.get("transfer_id"):
            found["transfer_id"] = params["transfer_id"]
        return found

    def update_connector_output(self, connector_output: Any) -> None:
        """Forgets the requests that all workers have reported. Raises TransportError as `UnsettledRequests.lost`.

        Adds the requests whose KV has come since the worker's report, so that vLLM schedules them in its next step.
        Their reports follow, and are removed, because vLLM expects one for each request.
        """
        sent = set(connector_output.finished_sending or ())
        reported = set(connector_output.finished_recving or ())
        received = reported - self._early
        newest = (newly_received(connector_output) & self._receiving) - received
        self._early = (self._early - reported) | newest
        told = received | newest
        self._receiving -= told
        if self.unsettled is not None:
            self.unsettled.lost(connector_output.invalid_block_ids or set())
            told, sent = self.unsettled.tell(told), self.unsettled.settle(sent)
            connector_output.finished_sending = sent
        self._holding -= sent
        connector_output.finished_recving = told

    def has_pending_push_work(self) -> bool:
        """Returns whether steps without requests are needed, so that blocks that were sent are freed."""
        return bool(self._holding)

    def shutdown(self) -> None:
        """Ends the control channel."""
        self._directory.close()

    def statistics(self) -> SchedulingStatistics:
        """Returns the counts at this moment."""
        receiving = len(self._receiving) if self.unsettled is None else len(self.unsettled)
        return SchedulingStatistics(len(self._prompts), len(self._holding), receiving)


def group_name(engine_id: str, role: str) -> str:
    """Returns the name of an engine's group of one role."""
    return f"{engine_id}/{role}"


def _key_of(params: Mapping[str, Any]) -> str:
    """Returns the name of a transfer on both sides: one that a proxy chose, or the producer's request."""
    return str(params.get("transfer_id") or params["remote_request_id"])


def _address_of(params: Mapping[str, Any]) -> str:
    return f"tcp://{params['remote_host']}:{params['remote_port']}"
