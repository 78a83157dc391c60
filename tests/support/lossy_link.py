"""A network cable between two TUN devices, in user space: it delays and loses packets, and can be cut and mended.

For machines whose kernel has no netem. What the kernel sends into one device comes out of the other, unless it is
lost; packets may overtake each other, as on a real path with jitter.
"""

from __future__ import annotations

import fcntl
import heapq
import os
import random
import selectors
import struct
import threading
import time
from dataclasses import dataclass, replace

_TUNSETIFF = 0x400454CA
_IFF_TUN, _IFF_NO_PI = 0x0001, 0x1000
_LARGEST_PACKET_BYTES = 1 << 16
_BATCH_PACKETS = 64


def open_tun(name: str) -> int:
    """A new TUN device in this process' network namespace; it goes when the descriptor is closed.

    Raises `OSError` where that is not allowed.
    """
    descriptor = os.open("/dev/net/tun", os.O_RDWR | os.O_NONBLOCK | os.O_CLOEXEC)
    try:
        fcntl.ioctl(descriptor, _TUNSETIFF, struct.pack("16sH22x", name.encode(), _IFF_TUN | _IFF_NO_PI))
    except OSError:
        os.close(descriptor)
        raise
    return descriptor


@dataclass(frozen=True, slots=True)
class LinkStatistics:
    """Packets of both directions since the link was made."""

    carried: int = 0
    carried_bytes: int = 0
    lost: int = 0
    """By chance."""
    cut: int = 0
    """While the link was cut, or its other end was full."""
    longest_delay_s: float = 0.0


class LossyLink:
    """Owns both descriptors and the thread between them. Use as a context manager."""

    def __init__(
        self, ends: tuple[int, int], *, delay_s: float, jitter_s: float, loss: float, seed: int = 0
    ) -> None:
        """Each packet takes `delay_s` +- `jitter_s`, evenly spread; `loss` of them, 0 to 1, never arrive."""
        self._ends = ends
        self._delay_s, self._jitter_s, self._loss = delay_s, jitter_s, loss
        self._random = random.Random(seed)
        self._on_the_way: list[tuple[float, int, int, bytes]] = []
        """When it arrives, a number that keeps the order of equals, at which end, the packet; a heap."""
        self._number = 0
        self._statistics = LinkStatistics()
        self._cut: frozenset[int] = frozenset()
        """Descriptors of the ends that receive nothing. Replaced as a whole."""
        self._ending = threading.Event()
        self._thread = threading.Thread(target=self._run, name="lossy-link")

    def __enter__(self) -> LossyLink:
        self._thread.start()
        return self

    def __exit__(self, *exc: object) -> None:
        self._ending.set()
        self._thread.join()
        for end in self._ends:
            os.close(end)

    @property
    def statistics(self) -> LinkStatistics:
        """Of this moment."""
        return self._statistics

    def cut(self, *ends: int) -> None:
        """Delivers no more packets to `ends` (0, 1; by default both), nor those already sent."""
        self._cut = frozenset(self._ends[end] for end in ends or (0, 1))

    def mend(self) -> None:
        """Ends a cut."""
        self._cut = frozenset()

    # --- the thread

    def _run(self) -> None:
        with selectors.DefaultSelector() as selector:
            for end, other in (self._ends, self._ends[::-1]):
                selector.register(end, selectors.EVENT_READ, other)
            while not self._ending.is_set():
                due_s = self._on_the_way[0][0] - time.monotonic() if self._on_the_way else 0.05
                for key, _ in selector.select(max(0.0, min(due_s, 0.05))):
                    self._take(key.fd, key.data)
                self._hand_out(time.monotonic())

    def _take(self, end: int, other: int) -> None:
        for _ in range(_BATCH_PACKETS):
            try:
                packet = os.read(end, _LARGEST_PACKET_BYTES)
            except BlockingIOError:
                return
            if self._random.random() < self._loss:
                self._count(lost=1)
                continue
            delay_s = self._delay_s + self._jitter_s * (2 * self._random.random() - 1)
            self._number += 1
            heapq.heappush(self._on_the_way, (time.monotonic() + delay_s, self._number, other, packet))
            if delay_s > self._statistics.longest_delay_s:
                self._statistics = replace(self._statistics, longest_delay_s=delay_s)

    def _hand_out(self, now_s: float) -> None:
        while self._on_the_way and self._on_the_way[0][0] <= now_s:
            _, _, end, packet = heapq.heappop(self._on_the_way)
            try:
                if end in self._cut:
                    raise BlockingIOError
                os.write(end, packet)
            except BlockingIOError:
                self._count(cut=1)
            else:
                self._count(carried=1, carried_bytes=len(packet))

    def _count(self, **more: int) -> None:
        values = {name: getattr(self._statistics, name) + by for name, by in more.items()}
        self._statistics = replace(self._statistics, **values)
