"""The connector in a worker of vLLM: it passes the scheduler's work and the computed layers to the data path."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterable, Mapping
from functools import partial
from typing import Any

import structlog
import torch

from disagg.core.errors import ConfigError, TransportError
from disagg.core.ports import Clock
from disagg.core.threads import SWITCH_INTERVAL_S
from disagg.core.types import Span
from disagg.data_path.consumer import KVConsumer
from disagg.data_path.endpoint import Endpoint, EndpointOptions, Wires
from disagg.data_path.producer import KVProducer
from disagg.node.device import record_event
from disagg.vllm.caches import BorrowedCaches, borrow_caches
from disagg.vllm.compat import EngineFacts
from disagg.vllm.consuming import Consuming
from disagg.vllm.groups import is_plain
from disagg.vllm.producing import Producing
from disagg.vllm.received import LINGER_S, NewlyReceived, ReceivedRequests, taken
from disagg.vllm.scheduler import group_name
from disagg.vllm.settings import VllmSettings
from disagg.vllm.work import StepWork, WorkerHandshake
from prefill_node.step_part import StepPart
from transport.control.zmq import make_control
from transport.select import TLSOptions, make_transport

REST_LIMIT_S = 0.5
"""Longest time for which a step waits for the rest of KV that was reported early. Other requests wait with it."""
END_LIMIT_S = 10.0
"""Time limit for the transfer thread to end a transfer."""
log = structlog.get_logger(__name__)

MakeWires = Callable[[torch.device], Wires]
"""Makes the connections of one endpoint, whose pools are on the device."""


class WorkerSide:
    """A worker's connector. Method names and semantics are those of vLLM; its thread calls them."""

    def __init__(
        self,
        facts: EngineFacts,
        settings: VllmSettings,
        tp_rank: int,
        make_wires: MakeWires,
        clock: Clock = time.monotonic,
    ) -> None:
        self._facts, self._settings, self._tp_rank = facts, settings, tp_rank
        self._make_wires = make_wires
        self.producing = Producing(tp_rank, settings.lease_s, clock) if facts.produces else None
        """Outgoing transfers; None in a consumer."""
        link_s, self._early = settings.config.control.peer_timeout_s, settings.early_s > 0
        self.consuming = (
            Consuming(tp_rank, settings.lease_s, link_s, clock, settings.early_s) if facts.consumes else None
        )
        """Incoming transfers; None in a producer."""
        self._caches: BorrowedCaches | None = None
        self._chunk: StepPart | None = None
        """The part of the running step; None when it sends nothing."""
        self._awaited: set[str] = set()
        """Requests whose KV has been asked for, and that were not reported."""
        self._linger_s = 0.0
        """Time for which an empty step waits for KV; 0 until the endpoints' threads run."""
        self._may_wait = self._reported = False
        self._logged_early = 1
        """Number of early reports at which they are logged next."""

    @property
    def endpoints(self) -> list[Endpoint[Any]]:
        """The endpoints of this worker, after `register_kv_caches`."""
        return [side.endpoint for side in (self.producing, self.consuming) if side is not None]

    # --- set-up

    def register_kv_caches(self, kv_caches: Mapping[str, torch.Tensor]) -> None:
        """Makes the endpoints over vLLM's KV cache. Raises ConfigError for caches that are not supported."""
        self._caches = borrow_caches(kv_caches, self._facts, self._tp_rank)
        device = self._caches.pools.device
        if self.producing is not None:
            options = self._endpoint_options(self._caches, "prefill")
            self.producing.endpoint = KVProducer(options, self._make_wires(device), self.producing)
        if self.consuming is not None:
            options = self._endpoint_options(self._caches, "decode")
            self.consuming.endpoint = KVConsumer(options, self._make_wires(device), self.consuming)

    def start(self) -> None:
        """Starts the endpoints' threads, and lets Python switch between threads as often as in a rank of ours."""
        sys.setswitchinterval(min(sys.getswitchinterval(), SWITCH_INTERVAL_S))
        for endpoint in self.endpoints:
            endpoint.start()
        self._linger_s = LINGER_S

    def _endpoint_options(self, caches: BorrowedCaches, role: str) -> EndpointOptions:
        name, config = group_name(self._facts.engine_id, role), self._settings.config
        return EndpointOptions(name, self._tp_rank, caches.shard, caches.pools, caches.tables, config)

    def get_handshake_metadata(self) -> WorkerHandshake:
        """Returns this worker's part of the engine's groups. Raises ConfigError before `register_kv_caches`."""
        if self._caches is None:
            raise ConfigError("vLLM asks for the handshake before it has registered its KV cache")
        return WorkerHandshake(
            self._caches.layout,
            self._settings.choice().name,
            bool(self._settings.config.transfer.checksum),
            self.producing.endpoint.info() if self.producing is not None else None,
            self.consuming.endpoint.info() if self.consuming is not None else None,
            self._caches.tables.of_classes,
        )

    # --- steps

    def begin_step(self, work: StepWork) -> None:
        """Passes the outgoing work of a step on, before the model runs.

        Blocks while KV comes of requests that were reported early, for `REST_LIMIT_S` at most. Raises TransportError
        when a transfer thread has ended: blocks would be held for ever.
        """
        self._check_threads()
        if self.consuming is not None:
            self._await_rests(self.consuming, work)
        # Not before: during the wait, the transfer thread needs the interpreter.
        for endpoint in self.endpoints:
            endpoint.computing = True
        if self.producing is not None:
            self._post_outgoing(self.producing, work)

    def _check_threads(self) -> None:
        for endpoint in self.endpoints:
            if endpoint.broken:
                raise TransportError(endpoint.broken)

    def _await_rests(self, consuming: Consuming, work: StepWork) -> None:
        """After it, all blocks of `work.due` have their KV or are reported as lost with this step."""
        for request_id in work.forgets:
            consuming.received.forget(request_id)
        late = consuming.received.await_rests(work.due, REST_LIMIT_S)
        self._check_threads()  # one that has ended during the wait cannot give up
        for request_id in late:
            reason = f"the rest of the KV did not come within {REST_LIMIT_S:g} s"
            consuming.endpoint.post(partial(consuming.give_up, request_id, reason))
        if consuming.received.await_rests(late, END_LIMIT_S):
            raise TransportError(f"the transfer thread did not end transfers within {END_LIMIT_S:g} s")

    def start_load_kv(self, work: StepWork) -> None:
        """Passes the incoming work of a step on. Never blocks. vLLM 0.32 calls it after the model has run."""
        if self.consuming is not None:
            self._post_incoming(self.consuming, work)
            self._awaited.update(one.request_id for one in work.receives)
        self._may_wait = work.may_wait

    def _post_incoming(self, consuming: Consuming, work: StepWork) -> None:
        endpoint, post = consuming.endpoint, consuming.endpoint.post
        if work.receives:  # steps that are launched may still write for the blocks' earlier owners
            post(partial(endpoint.after, record_event(endpoint.options.pools.device)))
        for receive in work.receives:
            post(partial(consuming.receive, receive))
        for request_id in work.cancels:
            consuming.received.forget(request_id)
            post(partial(consuming.cancel, request_id))
        for release in work.releases:
            post(partial(consuming.release, release))

    def _post_outgoing(self, producing: Producing, work: StepWork) -> None:
        endpoint, self._chunk = producing.endpoint, None
        if not (work.prefills or work.holds or work.drops):
            return
        event = record_event(endpoint.options.pools.device)
        for hold in work.holds:
            endpoint.post(partial(producing.hold, hold, endpoint.next_part(), event))
        for request_id in work.drops:
            endpoint.post(partial(producing.drop, request_id))
        if work.prefills:
            self._chunk = chunk = endpoint.next_part()
        for prefill in work.prefills:
            parts = (endpoint.next_part(), chunk)
            endpoint.post(partial(producing.prefill, prefill, parts, event))

    def save_kv_layer(self, layer_name: str) -> None:
        """Reports that the step has queued a layer's KV on the device. Never blocks."""
        if self._chunk is None or self._caches is None or self.producing is None:
            return
        layers = self._caches.layers.get(layer_name)
        ends = {group.stop for group in self.producing.endpoint.layer_groups}
        if layers is not None and layers.stop in ends:
            self._computed(self.producing, self._chunk, [layers])

    def wait_for_save(self) -> None:
        """Reports all layers of the step, also where a recorded graph did not call `save_kv_layer`. Never blocks.

        vLLM overwrites blocks only after the request has been reported by `get_finished`.
        """
        if self._chunk is not None and self._caches is not None and self.producing is not None:
            self._computed(self.producing, self._chunk, self.producing.endpoint.classes)
        self._chunk = None

    @staticmethod
    def _computed(producing: Producing, part: StepPart, spans: Iterable[Span]) -> None:
        endpoint = producing.endpoint
        event = record_event(endpoint.options.pools.device)
        for layers in spans:
            endpoint.post(partial(endpoint.computed, part, layers, event))

    def get_finished(self) -> tuple[set[str] | None, set[str] | None]:
        """Returns the requests whose blocks are read no more, and those whose blocks are written no more.

        With early reports, requests are among the second ones when their KV has come or is about to come, and among
        the first ones when their blocks are written no more; `UnsettledRequests` divides the first ones.
        """
        for endpoint in self.endpoints:
            endpoint.computing = False  # vLLM calls this method at the end of each step
        sent = set(taken(self.producing.finished)) if self.producing is not None else set()
        if self.consuming is not None:
            settled = self.consuming.received.take_settled()
            sent |= settled if self._early else set()
        return sent or None, self._received() or None

    def _received(self) -> set[str]:
        if self.consuming is None:
            return set()
        # The step after a report does not wait: another process queues it before it reads the report.
        wait = self._may_wait and self._awaited and not self._reported
        received = self.consuming.received.take(self._linger_s if wait else 0.0)
        if self.consuming.received.early >= self._logged_early:
            self._log_early(self.consuming.received)
        self._awaited -= received
        self._reported = bool(received)
        return received

    def _log_early(self, received: ReceivedRequests) -> None:
        """Logs the number of early reports whenever it has doubled: vLLM ends workers without a last call."""
        log.info("early_reports", requests=received.early, waited_s=round(received.waited_s, 4))
        self._logged_early = 2 * received.early

    def newly_received(self) -> NewlyReceived | None:
        """Returns the requests whose KV has come, for a scheduler in this process; None if this rank is not alone.

        vLLM may schedule a request only when all ranks have its KV. The caller has called `get_finished` before.
        """
        if self.consuming is None or self._facts.tp_size > 1:
            return None
        return self.consuming.received.newest()

    def failed_requests(self) -> set[str]:
        """Returns the requests whose KV did not come, if vLLM cannot find them by their blocks.

        That is so with several KV cache groups, and where vLLM takes tokens before the first such block as computed
        although their KV was not needed. The caller has called `get_finished` before.
        """
        if self.consuming is None or is_plain(self._facts.groups):
            return set()
        return {work.request_id for work in taken(self.consuming.failed)}

    def get_block_ids_with_load_errors(self) -> set[int]:
        """Returns the blocks whose KV did not come, where `failed_requests` has nothing to report."""
        if self.consuming is None or not is_plain(self._facts.groups):
            return set()
        failed = {block for work in taken(self.consuming.failed) for block in work.tables[0]}
        return failed | self.consuming.received.lost_blocks()

    def shutdown(self) -> None:
        """Ends the endpoints' threads and connections."""
        for endpoint in self.endpoints:
            endpoint.stop()


def make_wires(settings: VllmSettings, device: torch.device) -> Wires:
    """Returns the connections of an endpoint on this host."""
    config, keys, choice = settings.config, settings.keys(), settings.choice()
    control = make_control(config.control, keys)
    tls = TLSOptions(keys, host_of(control.address), config.transport.tls_lanes)
    transport = make_transport(
        choice.backend, gpu=device.type == "cuda", reach=choice.reach, interface=choice.interface, tls=tls
    )
    return Wires(control, transport)


def host_of(address: str) -> str:
    """Returns the host of a control address `tcp://host:port`."""
    return address.removeprefix("tcp://").rpartition(":")[0]
