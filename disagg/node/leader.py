"""Base class of all leaders: one lock, messages to ranks and routers, deadlines, and the end of requests.

A leader connects rank 0's scheduler to the control channel. Messages arrive on the control thread (and from rank 0's
transfer thread); steps run on the compute thread. One lock guards the scheduler and is never held while the model
runs. No operation under the lock blocks: `send` queues, and work for rank 0's transfer thread is posted. Plans are
encoded under the lock, so the transfer thread must not wait for the lock: it passes its messages to `post`.
"""

from __future__ import annotations

import threading
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import ClassVar

import structlog

from disagg.core.config.read import Role
from disagg.core.errors import (
    BusyError,
    DisaggError,
    PeerLostError,
    ProtocolError,
    RequestError,
    RequestTimeoutError,
)
from disagg.core.ports import Clock
from disagg.core.prefixes import PrefixKey, Tier
from disagg.core.status import GroupStatus, RankStatus
from disagg.core.tokens import TokenIds
from disagg.core.types import GroupInfo, RequestKey, TokenLogprobs
from disagg.kv.cache_operations import StorageReport
from disagg.kv.event_log import KVEventLog
from disagg.model.sampling.constraints import Constraints, no_tokenizer
from disagg.model.spec.model_spec import ModelSpec
from disagg.node.group_status import Scheduled, group_status
from disagg.node.kv_event_publisher import KVEventPublisher
from disagg.node.led_scheduler import LedRequest, LedScheduler
from disagg.node.plan import StepPlan
from disagg.node.prompt_logprobs import prompt_messages
from disagg.node.reports import Reports
from disagg.node.request_checks import finish_reason
from transport.control import messages as m

log = structlog.get_logger(__name__)

IDLE_S = 0.25
"""Interval at which an idle leader checks deadlines."""

FETCH_SHARE = 0.5
"""Largest part of a request's time in the queue that the request waits for its prefetch from the third tier."""

Send = Callable[[str, m.Message], None]


class Leader(ABC):
    """Base class of `PrefillLeader`, `DecodeLeader` and `ColocatedLeader`."""

    _role: ClassVar[Role]
    _scheduler: LedScheduler

    def __init__(
        self, spec: ModelSpec, send: Send, to_self: Callable[[m.Message], None], clock: Clock
    ) -> None:
        self._spec = spec
        self._channel_send = send
        self._to_self = to_self
        self._clock = clock
        self._changed = threading.Condition()
        self._posted: deque[tuple[str, m.Message]] = deque()
        """Messages from threads that must not wait for the lock, in order of arrival."""
        self._group: GroupInfo | None = None
        self._reports = Reports(send, clock)
        self._kv_event_publisher = KVEventPublisher(send)
        self._step_tokens: dict[str, list[m.Tokens]] | None = None
        """Tokens of the step that is being committed, by router; None between steps."""
        self._silent_ranks: set[int] = set()
        self.constraints = Constraints(no_tokenizer)
        """Constraints of answers, such as grammars.

        The rank replaces this object by one with a tokenizer, and closes it.
        """
        self.broken: str = ""
        """Reason why the group cannot serve requests any more; empty while the group works."""
        self.on_broken: Callable[[str], None] = lambda reason: None
        """Callback with the reason when the group breaks; runs once, under the lock. The owner of the rank's process
        then ends the group."""

    @property
    def changed(self) -> threading.Condition:
        """The leader's lock and condition, notified at each change that may add work or end a wait."""
        return self._changed

    @property
    def watchers(self) -> tuple[str, ...]:
        """Routers that receive the group's reports."""
        return self._reports.watchers

    @property
    def scheduler(self) -> LedScheduler:
        """The scheduler, guarded by the leader's lock."""
        return self._scheduler

    # --- for the rank that hosts the leader

    def join(self, group: GroupInfo) -> None:
        """Sets the description of the group, after all its ranks have started."""
        self._group = group

    def handle(self, peer: str, message: m.Message) -> None:
        """Handles a message to the leader. Any thread may call it."""
        with self._changed:
            match message:
                case m.Watch():
                    self._reports.watch(peer, message, self._status())
                    self._kv_event_publisher.watch(peer, message)
                    self._publish_kv_events()
                case m.RankReport():
                    self._on_report(message.status)
                case m.CacheMoved():
                    self._scheduler.kv_manager.moved(
                        message.operation, message.rank, message.error, message.seconds
                    )
                    self._memory_freed()
                case m.StorageMoved():
                    self._scheduler.kv_manager.storage_moved(_storage_report(message))
                    self._memory_freed()
                case _:
                    self._on_message(peer, message)
            self._changed.notify_all()

    def post(self, peer: str, message: m.Message) -> bool:
        """Queues a message, and handles all queued messages if the lock is free; never blocks.

        Returns False if another thread has the lock. The caller must then arrange a call of `handle_posted` on a
        thread that may wait for the lock.
        """
        self._posted.append((peer, message))
        if not self._changed.acquire(blocking=False):
            return False
        try:
            self.handle_posted()
        finally:
            self._changed.release()
        return True

    def handle_posted(self) -> None:
        """Handles the messages queued by `post`, in order; then raises the errors of failed handlers (bugs)."""
        errors: list[Exception] = []
        with self._changed:
            while self._posted:
                try:
                    self.handle(*self._posted.popleft())
                except Exception as error:  # noqa: BLE001 - raised again after the last message
                    errors.append(error)
        if errors:
            raise ExceptionGroup("handlers of posted messages failed", errors)

    def on_peer_lost(self, peer: str) -> None:
        """Ends the requests of a lost router; a lost rank breaks the group."""
        with self._changed:
            self._reports.lost(peer)
            for request in [r for r in self._requests() if r.router == peer]:
                self._on_router_lost(request)
            if self._group and peer in {rank.control_address for rank in self._group.ranks}:
                self._break(f"lost {self._group.role} rank {peer}")
            self._changed.notify_all()

    def on_peer_suspected(self, peer: str, silent: bool) -> None:
        """Reports to the routers that a rank of the group is silent, or responds again.

        Routers can then avoid the group while its leader still responds.
        """
        with self._changed:
            ranks = self._group.ranks if self._group is not None else ()
            number = next((rank.rank for rank in ranks if rank.control_address == peer), None)
            if number is None:
                return
            if silent:
                log.warning("rank_silent", role=self._role, rank=number)
                self._silent_ranks.add(number)
            else:
                self._silent_ranks.discard(number)
            self._reports.publish(self._status())

    def break_group(self, reason: str) -> None:
        """Marks the group as broken: fails every request, and refuses new requests."""
        with self._changed:
            self._break(reason)
            self._changed.notify_all()

    def next_plan(self) -> StepPlan | None:
        """Returns the next plan, already sent to the other ranks; None after `IDLE_S` without work.

        Returns None at once if the next plan depends on a step in flight that must be committed first.
        """
        with self._changed:
            self.expire()
            plan = None if self.broken else self._next_step()
            if plan is None and not self._steps_in_flight():
                self._changed.wait(IDLE_S)
                plan = None if self.broken else self._next_step()
            if plan is not None:
                if self._ranks > 1:
                    self._to_others(m.Plan(plan.step, plan.encode()))
                if plan.work:
                    self._reports.step_begins()
            return plan

    def wake(self) -> None:
        """Makes a blocked `next_plan` return."""
        with self._changed:
            self._changed.notify_all()

    def wait_idle(self, timeout_s: float) -> bool:
        """Waits until no request is left; returns False on timeout."""
        with self._changed:
            return self._changed.wait_for(lambda: not list(self._requests()), timeout_s)

    def status(self) -> GroupStatus:
        """Returns the group's status with the latest report of each rank."""
        with self._changed:
            return self._status()

    def check(self) -> None:
        """Raises `InvariantError` if the scheduler is inconsistent, for example if pages are lost or owned twice."""
        with self._changed:
            self._scheduler.check()

    # --- for the kinds of leader

    def _step_ended(self, tokens: int, prompt_tokens: int = 0) -> float:
        """Counts a step as ended, and returns its duration in seconds; see `Reports.step_ended`."""
        seconds = self._reports.step_ended(tokens, prompt_tokens)
        self._scheduler.kv_manager.set_prompt_rate(self._reports.prompt_tokens_per_s)
        return seconds

    @property
    def max_sequences(self) -> int:
        """Largest number of answers or beams of one request."""
        return 1

    @property
    def local_prefill_tokens(self) -> int:
        """Tokens of a step in which a decode group computes prompts of new requests itself; 0: it never does."""
        return 0

    @property
    def tail_tokens(self) -> int:
        """See `RankInfo.tail_tokens`."""
        return 0

    @abstractmethod
    def link(self, other: GroupInfo) -> None:
        """Links this group with `other`, so that requests can move from one group to the other."""

    @abstractmethod
    def statistics(self) -> object:
        """Returns the scheduler's statistics."""

    @abstractmethod
    def _scheduled(self) -> Scheduled:
        """Returns the scheduler's part of the group's status. Called under the lock."""

    @abstractmethod
    def _on_message(self, peer: str, message: m.Message) -> None: ...

    @abstractmethod
    def _next_step(self) -> StepPlan | None: ...

    @abstractmethod
    def _memory_freed(self) -> None:
        """Admits waiting requests, because pages may have become free. Called under the lock."""

    def _steps_in_flight(self) -> int:
        """Returns the number of steps that are planned and not committed."""
        return 0

    def _kv_events(self) -> Mapping[Tier, KVEventLog]:
        """Returns the KV events of each tier of the prefix cache; empty without one. Called under the lock."""
        return {}

    def _on_router_lost(self, request: LedRequest) -> None:
        """Ends a request whose router is lost."""
        self._close(request.key, "lost the router")

    @abstractmethod
    def _close(self, key: RequestKey, reason: str) -> None:
        """Starts to close a request; no effect if the request is unknown or already closing."""

    def _on_report(self, status: RankStatus) -> None:
        self._reports.update_rank(status, self._ranks)
        if status.rank == 0:  # the group's reports follow the interval of rank 0
            self._reports.publish(self._status())
            self._publish_kv_events()

    def _publish_kv_events(self, at_least: int = 1) -> None:
        """Sends KV events to each watching router that lacks at least `at_least` events of a tier."""
        kv_events = self._kv_events()
        if kv_events:
            assert self._group is not None, "a leader is used after join"
            switch_tokens = self._spec.rope_switch_tokens
            self._kv_event_publisher.publish(
                kv_events, self._reports.watchers, self._group.name, switch_tokens, at_least
            )

    def _prefix(self, prompt: TokenIds, salt: str) -> PrefixKey:
        """Returns the prefix cache's key of a prompt.

        Some models use other rotary embeddings for long prompts, so that the KV of long and short prompts differs.
        The keys of long and short prompts then differ too.
        """
        spec = self._spec
        return PrefixKey.of(prompt, salt, spec.rope_switch_tokens, prompt_only=spec.answers_differ)

    def _status(self) -> GroupStatus:
        assert self._group is not None, "a leader is used after join"
        name, scheduled = self._group.name, self._scheduled()
        routers = len({request.router for request in self._scheduler.requests.values()})
        return group_status(
            name, self._role, scheduled, self._reports, self.broken, self._silent_ranks, routers
        )

    def _requests(self) -> list[LedRequest]:
        return list(self._scheduler.requests.values())

    def _release(self, router: str, message: m.Release) -> None:
        """Releases a request. Confirms at once if the router has no request with this key here.

        A router also releases a request that was refused because another router uses its key.
        """
        request = self._scheduler.requests.get(message.key)
        if request is not None and request.router != router:
            request = None
        if request is not None:
            request.release_requested = True
            self._close(message.key, message.reason)
        if self.broken or request is None or message.key not in self._scheduler.requests:
            # A broken group confirms the release at once: its memory is freed when its processes end.
            self._send(router, m.Released(message.key))

    def _has_ended(self, router: str, message: m.Reserve) -> bool:
        """Returns whether the answer so far of a recovered request is complete, and sends its end to the router.

        The answer is complete if the lost group sent its last token, but not the message that the answer has ended.
        """
        if not message.answered:
            return False
        finish = finish_reason(message.answered, message.sampling, self._spec.eos_ids)
        if finish is not None:
            self._send(router, m.Tokens(message.key, len(message.answered), [], finish))
        return finish is not None

    def _confirm_release(self, request: LedRequest) -> None:
        if request.release_requested and request.key not in self._scheduler.requests:
            self._send(request.router, m.Released(request.key))

    def _send(self, router: str, message: m.Message) -> None:
        """Sends a message to a router or another leader. A message that is too large fails its request instead.

        During a step's commit, the tokens to one router are collected. They are sent together at the end of the
        commit, or before another message to that router.
        """
        if self._step_tokens is not None:
            if isinstance(message, m.Tokens):
                self._step_tokens.setdefault(router, []).append(message)
                return
            self._send_together(router, self._step_tokens.pop(router, []))
        self._send_now(router, message)

    def _send_now(self, router: str, message: m.Message) -> None:
        try:
            self._channel_send(router, message)
        except ProtocolError as error:
            self._fail_too_large(message, error)

    @contextmanager
    def _one_message_each(self) -> Iterator[None]:
        """Collects the tokens sent within the block and sends each router one message, to save wake-ups."""
        self._step_tokens = {}
        try:
            yield
        finally:
            together, self._step_tokens = self._step_tokens, None
            for router, tokens in together.items():
                self._send_together(router, tokens)

    def _send_together(self, router: str, tokens: list[m.Tokens]) -> None:
        if len(tokens) > 1:
            try:
                self._channel_send(router, m.StepTokens(tokens))
                return
            except ProtocolError:
                log.info("step_tokens_sent_apart", role=self._role, messages=len(tokens))
        for one in tokens:
            self._send_now(router, one)

    def _to_ranks(self, message: m.Message) -> None:
        """Sends a message to all ranks of the group. A message that is too large is not sent; its request fails."""
        try:
            self._to_others(message)
        except ProtocolError as error:
            self._fail_too_large(message, error)
        else:
            self._to_self(message)

    def _fail_too_large(self, message: m.Message, error: ProtocolError) -> None:
        key = message.ticket.key if isinstance(message, m.OpenReceive) else getattr(message, "key", None)
        request = self._scheduler.requests.get(key) if isinstance(key, RequestKey) else None
        if request is None or request.closing:
            log.error("message_too_large", role=self._role, kind=type(message).__name__, error=str(error))
        else:
            self._fail(request, error)

    def _to_others(self, message: m.Message) -> None:
        assert self._group is not None, "a leader is used after join"
        for rank in self._group.ranks[1:]:
            self._channel_send(rank.control_address, message)

    @property
    def _ranks(self) -> int:
        assert self._group is not None, "a leader is used after join"
        return len(self._group.ranks)

    def _refuse(self, router: str, key: RequestKey, error: DisaggError, *, resumable: bool = False) -> None:
        retry_after_s = error.retry_after_s if isinstance(error, BusyError) else 0.0
        failed = m.Failed(key, error.code, str(error), error.retryable, retry_after_s, resumable)
        self._send(router, failed)

    def _fail(self, request: LedRequest, error: DisaggError) -> None:
        """Sends `Failed` to the router, once, and closes the request."""
        if not request.closing:
            self._refuse(request.router, request.key, error)
            self._close(request.key, str(error))

    def _send_prompt_logprobs(
        self, plan: StepPlan, requests: Sequence[LedRequest], found: Mapping[int, Sequence[TokenLogprobs]]
    ) -> None:
        """Sends the log-probabilities `found` of a finished step's prompts, keyed by row, to the routers."""
        for work, request in zip(plan.work, requests, strict=True):
            if work.row not in found or request.closing:
                continue
            try:
                for message in prompt_messages(work, found[work.row]):
                    self._send(request.router, message)
            except RequestError as error:
                self._fail(request, error)

    def _break(self, reason: str) -> None:
        first = not self.broken
        if first:
            log.error("group_broken", reason=reason)
            self.broken = reason
            if self._group is not None:
                self._reports.publish(self._status())
        for request in list(self._requests()):
            self._fail(request, PeerLostError(reason))
            if request.release_requested:  # the end of the group's processes frees the memory
                self._send(request.router, m.Released(request.key))
        if first:
            self.on_broken(reason)  # last: the group's processes may end at once

    def expire(self) -> None:
        """Fails the requests that are past their deadline. Called under the lock."""
        now_s = self._clock()
        for request in [r for r in self._scheduler.requests.values() if now_s > r.deadline_s]:
            self._fail(request, RequestTimeoutError(f"request {request.key} is past its deadline"))


def _storage_report(message: m.StorageMoved) -> StorageReport:
    return StorageReport(
        message.operation,
        message.rank,
        message.items,
        message.done,
        message.error,
        message.seconds,
        message.states,
    )
