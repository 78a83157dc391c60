"""The data plane over UCX (through `ucxx`): shared memory and CUDA IPC, RDMA, or TCP on a trusted network.

`transport.ucx.options` selects the links. The owner thread drives UCX's worker, without a progress thread or an event
loop. A tag probe takes each arriving message out of UCX's matching queue. The message is then received on the
sender's endpoint, so closing this endpoint ends the receive.

A discard receives the message into a small buffer. UCX ends this receive as truncated and completes the peer's send
(measured for eager and rendezvous messages).
"""

from __future__ import annotations

import select
import time
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

import torch

from disagg.core.errors import ConfigError, InvariantError, PeerLostError, TransportError
from transport.alarm import Alarm
from transport.base import Arrival, Operation, Transport, TransportStatistics
from transport.operation_tracker import OperationTracker
from transport.tags import unpack
from transport.ucx import options as ucx_options
from transport.ucx.library import load, unwrap_address, wrap_address
from transport.ucx.reach import Reach

FENCE_TIMEOUT_S = 10.0
"""Time limit for UCX to end all accesses to the memory of a fenced peer's operations."""
FENCE_WAIT_S = 0.02
"""Time limit for `disconnect` to block until UCX has cancelled the peer's operations. `progress` continues a slower
fence."""
_SCRATCH_BYTES = 64
_KEPT_BYTES = 4096
_KEPT = 1024
"""Limits of the cache of ucxx arrays: the largest size of a host view, and the number of views. The cache serves
small messages, which reuse their memory. Segments do not reuse theirs."""
_PROGRESS_STEPS = 64
"""Limit of UCX progress calls in one call of `progress`: a steady stream of messages must not block the owner
thread."""
_MAX_IDLE_WAKEUPS = 100
_NAP_S = 0.0006


class _CudaBytes:
    """Exposes device memory by the CUDA array interface. torch's own implementation is slower than a whole send."""

    __slots__ = ("__cuda_array_interface__",)

    def __init__(self, address: int, nbytes: int) -> None:
        self.__cuda_array_interface__ = {
            "shape": (nbytes,),
            "typestr": "|u1",
            "data": (address, False),
            "strides": None,
            "version": 3,
        }


@dataclass(slots=True, eq=False)
class _UCXPeer:
    address: bytes
    endpoint: Any


@dataclass(slots=True, eq=False)
class _Fence:
    """A disconnected peer whose operations UCX has not ended yet."""

    peer: str
    operations: list[Operation]
    until_s: float


class UcxTransport(Transport):
    """One rank's UCX worker; see `Transport`. `options` are UCX settings; by default those of
    `Reach.ONE_HOST`.

    Endpoints handle errors: UCX detects dead processes (on one host within seconds) and ends their pending
    operations. Raises `ConfigError` when ucxx is not installed or cannot start.
    """

    name: ClassVar[str] = "ucx"

    def __init__(self, options: Mapping[str, str] | None = None) -> None:
        self._ucx, self._array_type = load()
        chosen = ucx_options.options(Reach.ONE_HOST, gpu=False) if options is None else dict(options)
        try:
            features = (self._ucx.Feature.TAG, self._ucx.Feature.WAKEUP)
            self._context: Any = self._ucx.UCXContext(chosen, feature_flags=features)
            self._worker: Any = self._ucx.UCXWorker(self._context)
            self._worker.init_blocking_progress_mode()
            self._address = wrap_address(bytes(self._worker.address.tobytes()))
        except self._ucx.UCXError as exc:
            raise ConfigError(f"UCX cannot start with {chosen}: {exc}") from exc
        self._tracker = OperationTracker()
        self.peers: dict[str, _UCXPeer] = {}
        self.requests: dict[Operation, Any] = {}
        self._arrays: dict[tuple[int, int], Any] = {}
        """Cached ucxx arrays of registered host memory, by address and size in bytes."""
        self._fences: list[_Fence] = []
        self._swallowed: list[Any] = []
        """UCX requests that consume unwanted messages; each is kept until UCX no longer uses the scratch bytes."""
        self._scratch = self._array_type(bytearray(_SCRATCH_BYTES))
        self._any_tag = (self._ucx.UCXXTag(0), self._ucx.UCXXTagMask(0))
        self._alarm = Alarm()
        self._poll = select.poll()
        self._poll.register(self._alarm.fd, select.POLLIN)
        self._poll.register(self._worker.epoll_file_descriptor, select.POLLIN)
        self._idle_wakeups = 0
        self._closed = False

    @property
    def address(self) -> bytes:
        return self._address

    def connect(self, peer: str, address: bytes) -> None:
        self._ensure_open()
        known = self.peers.get(peer)
        if known is not None:
            if known.address != address:
                raise TransportError(f"{peer} is connected with another address; disconnect it first")
            return
        try:
            remote = self._ucx.UCXAddress.create_from_buffer(unwrap_address(peer, address))
            endpoint = self._worker.create_endpoint_from_worker_address(remote, True)
        except self._ucx.UCXError as exc:
            raise TransportError(
                f"cannot connect to {peer}: {exc}; both need the same kind of transport and, on one host, the same "
                "user and PID namespace"
            ) from exc
        self.peers[peer] = _UCXPeer(address, endpoint)

    def disconnect(self, peer: str) -> None:
        known = self.peers.pop(peer, None)
        if known is None:
            return
        fenced = self._fenced()
        mine = [one for one in self.requests if one.peer == peer and one not in fenced]
        # A blocking close is forced: it cancels pending requests without the other side. `close()` would wait
        # for the peer (ucxx 0.52 does not pass the flag on), and crashes after an endpoint error.
        known.endpoint.close_blocking()
        now_s = time.monotonic()
        self._fences.append(_Fence(peer, mine, now_s + FENCE_TIMEOUT_S))
        self._worker.progress()
        while not self._advance_fences() and time.monotonic() < now_s + FENCE_WAIT_S:
            self._worker.progress()

    def lost_peers(self) -> list[str]:
        return [peer for peer, known in self.peers.items() if not known.endpoint.alive]

    def register(self, memory: torch.Tensor) -> None:
        # UCX maps memory on first use and caches the mapping, so only the tracker needs the buffer.
        self._ensure_open()
        self._tracker.register(memory)

    def deregister(self, memory: torch.Tensor) -> None:
        self._tracker.deregister(memory)
        self._arrays.clear()

    def send(self, peer: str, tag: int, view: torch.Tensor, context: object = None) -> Operation:
        self._ensure_open()
        unpack(tag)
        self._tracker.check_view("send", view)
        operation = self._tracker.start("send", peer, tag, view.numel(), context, view)
        endpoint = self._usable(operation)
        if endpoint is not None:
            self._submit(operation, lambda: endpoint.tag_send(self._array(view), self._ucx.UCXXTag(tag)))
        return operation

    def arrivals(self) -> list[Arrival]:
        self._ensure_open()
        found = []
        while (probe := self._worker.tag_probe(*self._any_tag, remove=True)).matched:
            found.append(Arrival(probe.sender_tag.value, probe.length, probe))
        self._tracker.hand_out(found)
        return found

    def receive(self, peer: str, arrival: Arrival, into: torch.Tensor, context: object = None) -> Operation:
        self._ensure_open()
        self._tracker.check_view("receive", into, arrival.nbytes)
        self._tracker.consume(arrival)
        operation = self._tracker.start("receive", peer, arrival.tag, arrival.nbytes, context, into)
        endpoint = self._usable(operation)
        if endpoint is None:
            self._swallow(arrival.handle)
        else:
            self._submit(operation, lambda: endpoint.tag_recv_with_handle(self._array(into), arrival.handle))
        return operation

    def discard(self, peer: str | None, arrival: Arrival) -> Operation:
        self._ensure_open()
        self._tracker.consume(arrival)
        operation = self._tracker.start("discard", peer, arrival.tag, arrival.nbytes)
        # The worker receives the message, not an endpoint: no caller uses the scratch bytes, so no fence must cover
        # them.
        self._submit(operation, lambda: self._worker.tag_recv_with_handle(self._scratch, arrival.handle))
        return operation

    def progress(self) -> list[Operation]:
        self._ensure_open()
        for _ in range(_PROGRESS_STEPS):
            if not self._worker.progress_once():
                break
        if not all(peer.endpoint.alive for peer in self.peers.values()):
            # This call also ends the operations of failed endpoints.
            self._worker.progress()
        if self._fences and not self._advance_fences():
            self._check_fences()
        fenced = self._fenced()
        for operation in [one for one, request in self.requests.items() if request.completed]:
            if operation not in fenced:
                self._settle(operation)
        self._swallowed = [request for request in self._swallowed if not request.completed]
        return self._tracker.take_ended()

    def wait(self, timeout_s: float) -> None:
        self._ensure_open()
        if self._has_events():
            return
        if self._fences:
            timeout_s = min(timeout_s, FENCE_WAIT_S)  # UCX may end a cancelled operation without a wake-up
        if not self._worker.progress_once():
            self._sleep(max(0.0, timeout_s))
        self._alarm.clear()

    def wake(self) -> None:
        self._alarm.wake()

    def statistics(self) -> TransportStatistics:
        return self._tracker.statistics(len(self.peers))

    def check(self) -> None:
        self._tracker.check()
        if set(self._tracker.pending()) != set(self.requests):
            raise InvariantError(
                f"ucx: pending {self._tracker.pending()} differ from requests {list(self.requests)}"
            )

    def close(self) -> None:
        if self._closed:
            return
        self.arrivals()
        for arrival in self._tracker.take_arrivals():
            self._swallow(arrival.handle)
        unproven: list[TransportError] = []
        for peer in list(self.peers):
            self.disconnect(peer)
        try:
            self._complete("unreceived messages", [*self._swallowed, *self.requests.values()])
        except TransportError as exc:
            unproven.append(exc)
        self._advance_fences()
        self._closed = True
        self._release()
        if unproven:
            raise unproven[0]

    def _sleep(self, timeout_s: float) -> None:
        """Blocks until UCX or `wake` signals. UCX requires an armed worker for this.

        UCX's file descriptor can stay readable without work: while a TCP connection waits for an unresponsive
        peer, or while another process floods the shared-memory wake-up socket. After several such wake-ups in
        a row, the thread sleeps for short intervals instead.
        """
        by_ucx = True
        if self._idle_wakeups >= _MAX_IDLE_WAKEUPS:
            time.sleep(min(timeout_s, _NAP_S))  # `poll` cannot time out after less than a millisecond
        elif self._arm():
            events = self._poll.poll(timeout_s * 1000)
            by_ucx = any(fd != self._alarm.fd for fd, _ in events)
        if by_ucx:
            self._idle_wakeups = 0 if self._worker.progress_once() else self._idle_wakeups + 1

    def _arm(self) -> bool:
        """Arms the worker; returns whether the thread may sleep now.

        UCX raises "connection reset" here after an empty datagram from another process; the thread must not sleep.
        """
        try:
            return bool(self._worker.arm())
        except self._ucx.UCXError:
            return False

    def _release(self) -> None:
        """Frees UCX's objects, dependent objects first."""
        self._alarm.close()
        for operation in list(self.requests):
            self._settle(operation, lost=True)
        self._swallowed.clear()
        del self._worker, self._context

    def _array(self, view: torch.Tensor) -> Any:
        """Returns the ucxx array of `view`; small host arrays are cached until `deregister`."""
        if view.is_cuda:
            return self._array_type(_CudaBytes(view.data_ptr(), view.numel()))
        key = (view.data_ptr(), view.numel())
        array = self._arrays.get(key)
        if array is None:
            array = self._array_type(view.numpy())
            if view.numel() <= _KEPT_BYTES and len(self._arrays) < _KEPT:
                self._arrays[key] = array
        return array

    def _submit(self, operation: Operation, start: Any) -> None:
        try:
            self.requests[operation] = start()
        except self._ucx.UCXError as exc:
            error = TransportError(f"{operation.kind} tag {operation.tag:#x} with {operation.peer}: {exc}")
            error.__cause__ = exc
            self._tracker.end(operation, error)
            return
        if self.requests[operation].completed:
            self._settle(operation)

    def _settle(self, operation: Operation, lost: bool = False) -> None:
        """Ends an operation by its UCX request, and converts UCX's errors. A pending request counts as cancelled."""
        request = self.requests.pop(operation)
        error: TransportError | None = None
        if not request.completed:
            self._swallowed.append(request)
            error = PeerLostError(f"{operation.kind} tag {operation.tag:#x} with {operation.peer}: cancelled")
        try:
            request.check_error()
        except self._ucx.UCXError as exc:
            expected = operation.kind == "discard" and isinstance(exc, self._ucx.UCXMessageTruncatedError)
            if not expected:
                peer = self.peers.get(operation.peer or "")
                lost = lost or (peer is not None and not peer.endpoint.alive)
                cls = PeerLostError if lost else TransportError
                error = cls(f"{operation.kind} tag {operation.tag:#x} with {operation.peer}: {exc}")
                error.__cause__ = exc
        self._tracker.end(operation, error)

    def _usable(self, operation: Operation) -> Any:
        """Returns the live endpoint of the operation's peer. Without a live endpoint, fails the operation and returns
        None."""
        peer = self.peers.get(operation.peer or "")
        if peer is not None and peer.endpoint.alive:
            return peer.endpoint
        why = "is not connected" if peer is None else "is lost"
        what = f"{operation.kind} tag {operation.tag:#x}"
        self._tracker.end(operation, PeerLostError(f"{what}: {operation.peer} {why}"))
        return None

    def _swallow(self, handle: object) -> None:
        self._swallowed.append(self._worker.tag_recv_with_handle(self._scratch, handle))

    def _fenced(self) -> set[Operation]:
        return {operation for fence in self._fences for operation in fence.operations}

    def _advance_fences(self) -> bool:
        """Ends the operations of each fence whose UCX requests have all completed. Returns whether no fence is
        left."""
        for fence in list(self._fences):
            if all(self.requests[operation].completed for operation in fence.operations):
                self._fences.remove(fence)
                for device in self._devices(fence.operations):
                    # UCX may report a cancelled receive while its copy still runs on a stream of UCX.
                    torch.cuda.synchronize(device)
                for operation in fence.operations:
                    self._settle(operation, lost=True)
        return not self._fences

    def _check_fences(self) -> None:
        """Raises `TransportError` for a fence that is older than `FENCE_TIMEOUT_S`."""
        for fence in self._fences:
            if time.monotonic() > fence.until_s:
                pending = sum(not self.requests[operation].completed for operation in fence.operations)
                raise TransportError(
                    f"ucx: {fence.peer} was disconnected, but {pending} operations are still pending after "
                    f"{FENCE_TIMEOUT_S:g} s: no fence, so this rank must end"
                )

    def _devices(self, operations: list[Operation]) -> set[torch.device]:
        """Returns the GPUs that the operations receive into."""
        views = [self._tracker.view(operation) for operation in operations if operation.kind == "receive"]
        return {view.device for view in views if view is not None and view.is_cuda}

    def _complete(self, what: str, requests: list[Any]) -> None:
        deadline_s = time.monotonic() + FENCE_TIMEOUT_S
        while not all(request.completed for request in requests):
            self._worker.progress()
            if time.monotonic() > deadline_s:
                self._swallowed.extend(requests)
                raise TransportError(
                    f"ucx: {what}: operations still pending after {FENCE_TIMEOUT_S} s: no fence"
                )

    def _has_events(self) -> bool:
        return self._tracker.has_ended() or self._worker.tag_probe(*self._any_tag, remove=False).matched

    def _ensure_open(self) -> None:
        if self._closed:
            raise ValueError("the UCX transport is closed")
