"""Leaders of simulated groups, with their directory. Control channels are real; the benchmark decides when tokens
are sent.

The answer to a prompt repeats the prompt's tokens. A request for at most `SHORT_TOKENS` tokens is answered at once.
A longer request is a stream, whose tokens are sent in steps.
"""

from __future__ import annotations

import secrets
import threading
import time
from dataclasses import dataclass, field

from disagg.cluster.directory import Directory
from disagg.core.config.read import ControlConfig, Role
from disagg.core.prefixes import Digest, pack_block_hashes
from disagg.core.status import GroupStatus, RankStatus
from disagg.core.tokens import TokenIds
from disagg.core.types import (
    PROTOCOL_VERSION,
    GroupInfo,
    KVLayout,
    RankInfo,
    RequestKey,
    Shard,
    Span,
    Ticket,
)
from transport.control import messages as m
from transport.control.zmq import make_control
from transport.keys.ring import KeyRing

SHORT_TOKENS = 2
PAGE_SIZE = 16
CONTEXT_TOKENS = 1024
MAX_REQUESTS = 16384
"""Capacity of one decode group in requests; no run has more."""
CACHED_BLOCKS = 256
"""Block hashes that each group reports as cached."""


@dataclass(slots=True)
class SimulatedStream:
    """One request in a decode group."""

    key: RequestKey
    router: str
    prompt: TokenIds
    max_tokens: int
    tokens: int = 0
    """Tokens sent so far; 0 until the prompt is computed."""

    def next(self, last: bool = False) -> m.Tokens:
        """Returns the message with the next token."""
        index = self.tokens
        self.tokens += 1
        finish = "length" if last or self.tokens >= self.max_tokens else None
        return m.Tokens(self.key, index, [self.prompt[index % len(self.prompt)]], finish)


@dataclass(slots=True)
class _Owners:
    """Maps each request to its decode leader, so that a prefill leader can start the request's stream."""

    lock: threading.Lock = field(default_factory=threading.Lock)
    decode: dict[RequestKey, SimulatedLeader] = field(default_factory=dict)


class SimulatedLeader:
    """The leader of one group. Its handlers run on its channel's thread."""

    def __init__(
        self, name: str, role: Role, fingerprint: str, config: ControlConfig, shared: _Owners
    ) -> None:
        self._control = make_control(config, KeyRing.follow(config.key_file or ""))
        self._shared = shared
        self.streams: dict[RequestKey, SimulatedStream] = {}
        self._prompts: dict[RequestKey, TokenIds] = {}
        """Prompts whose tickets have not arrived yet."""
        self._watchers: set[str] = set()
        layout = KVLayout(2, 2, 16, "bfloat16")
        rank = RankInfo(0, Shard(0, Span(0, 2), Span(0, 2)), self._control.address, b"", 0, 0, 16, 1 << 24)
        self.info = GroupInfo(
            name,
            role,
            PROTOCOL_VERSION,
            fingerprint,
            layout,
            PAGE_SIZE,
            "ucx",
            (rank,),
            context_tokens=CONTEXT_TOKENS,
            max_requests=MAX_REQUESTS,
        )
        pages = 1 << 20
        self._status = GroupStatus(
            name,
            role,
            (RankStatus(f"{name} r0", 0),),
            page_size=PAGE_SIZE,
            pages=pages,
        )

    def start(self) -> None:
        """Starts the channel."""
        self._control.start(self._on_message, self._on_lost)

    def close(self) -> None:
        """Closes the channel."""
        self._control.close()

    def send(self, peer: str, message: m.Message) -> None:
        """Sends a message."""
        self._control.send(peer, message)

    def step(self, last: bool = False) -> int:
        """Sends the next token of each stream, one message for each router; returns the number of tokens."""
        together: dict[str, list[m.Tokens]] = {}
        with self._shared.lock:
            for stream in self.streams.values():
                if stream.tokens and stream.tokens < stream.max_tokens:
                    together.setdefault(stream.router, []).append(stream.next(last))
        for router, tokens in together.items():
            self._control.send(router, m.StepTokens(tokens) if len(tokens) > 1 else tokens[0])
        return sum(map(len, together.values()))

    def begin(self, key: RequestKey) -> None:
        """Starts a stream at its second token, because the prefill leader has sent the first token. All tokens of a
        short request are sent immediately."""
        with self._shared.lock:
            stream = self.streams.get(key)
            if stream is None:
                return
            stream.tokens = 1
            rest = [stream.next() for _ in range(stream.max_tokens - 1)] if _is_short(stream) else []
        for one in rest:
            self._control.send(stream.router, one)

    def _on_message(self, peer: str, message: m.Message) -> None:
        match message:
            case m.Reserve():
                self._reserve(peer, message)
            case m.Prefill():
                self._prompts[message.key] = message.prompt
            case m.Reserved():
                self._prefill(peer, message.key)
            case m.Release():
                self._release(peer, message.key)
            case m.Watch():
                self._watch(peer, message)

    def _reserve(self, router: str, message: m.Reserve) -> None:
        tokens = len(message.prompt)
        with self._shared.lock:
            stream = SimulatedStream(message.key, router, message.prompt, message.sampling.max_tokens)
            self.streams[message.key] = stream
            self._shared.decode[message.key] = self
        pages = tuple(range(-(-tokens // PAGE_SIZE)))
        ticket = Ticket(message.key, secrets.randbelow(1 << 16), self.info.name, Span(0, tokens), 0, pages)
        self._control.send(router, m.Reserved(message.key, ticket))

    def _prefill(self, router: str, key: RequestKey) -> None:
        self._control.send(router, m.Prefilled(key, [self._prompts.pop(key)[0]]))
        self._control.send(router, m.Transferred(key, 1 << 20, 2, 4, 0.001))
        with self._shared.lock:
            decode = self._shared.decode.get(key)
        if decode is not None:
            decode.begin(key)

    def _release(self, router: str, key: RequestKey) -> None:
        self._prompts.pop(key, None)
        with self._shared.lock:
            if self.streams.pop(key, None) is not None:
                del self._shared.decode[key]
        self._control.send(router, m.Released(key))

    def _watch(self, router: str, message: m.Watch) -> None:
        if message.interval_s == 0:
            self._watchers.discard(router)
            return
        if message.prefixes == "all" or (message.prefixes == "events" and router not in self._watchers):
            held = pack_block_hashes([secrets.randbits(64) for _ in range(CACHED_BLOCKS)])
            digest = Digest(None, 1, PAGE_SIZE, held, b"")
            self._control.send(router, m.CacheDigest(self.info.name, digest))
        self._watchers.add(router)
        # A router renews its watch periodically; each renewal is answered with one report.
        self._control.send(router, m.GroupReport(self._status))

    def _on_lost(self, peer: str) -> None:
        self._watchers.discard(peer)


def _is_short(stream: SimulatedStream) -> bool:
    return stream.max_tokens <= SHORT_TOKENS


class SimulatedGroups:
    """Pairs of a prefill and a decode group, and their directory, in one process."""

    def __init__(self, pairs: int, fingerprint: str, config: ControlConfig) -> None:
        """`config` contains the path of the key file, and port 0 for the directory, which selects a free port."""
        shared = _Owners()
        self._pairs = [
            tuple(
                SimulatedLeader(f"{role}-{n}", role, fingerprint, config, shared)
                for role in ("prefill", "decode")
            )
            for n in range(1, pairs + 1)
        ]
        self._announced: list[SimulatedLeader] = []
        self._directory = Directory(make_control(config, KeyRing.follow(config.key_file or "")))
        self._directory.start()
        for leader in (one for pair in self._pairs for one in pair):
            leader.start()

    def directory(self) -> str:
        """Returns the address that a router joins."""
        return self._directory.address

    def announce(self, pairs: int) -> None:
        """Announces the first `pairs` pairs of groups to the router, through the directory."""
        self._announced = [leader for pair in self._pairs[:pairs] for leader in pair]
        self._directory.announce([leader.info for leader in self._announced], [])

    def decode(self, steps: int, tokens_per_s: float) -> int:
        """Sends `steps` tokens of each stream, at `tokens_per_s` over all streams; returns the number of tokens.

        The groups' steps are spread evenly over time.
        """
        groups = [leader for leader in self._announced if leader.streams]
        streams = sum(len(leader.streams) for leader in groups)
        pause_s = streams / tokens_per_s / max(1, len(groups))
        due_s, sent = time.monotonic(), 0
        for _ in range(steps):
            for leader in groups:
                time.sleep(max(0.0, due_s - time.monotonic()))
                sent += leader.step()
                due_s += pause_s
        return sent

    def send_steps(self, peer: str, tokens: int, messages: int, tokens_per_s: float) -> None:
        """Sends `messages` messages of `tokens` tokens each to the control channel of a `FloorServer`."""
        leader, due_s = self._pairs[0][1], time.monotonic()
        step = [m.Tokens(RequestKey(secrets.token_hex(16) + "-0"), 7, [97]) for _ in range(tokens)]
        for _ in range(messages):
            time.sleep(max(0.0, due_s - time.monotonic()))
            leader.send(peer, m.StepTokens(step) if tokens > 1 else step[0])
            due_s += tokens / tokens_per_s

    def finish(self) -> int:
        """Sends the last token of each stream; returns the number of streams."""
        return sum(leader.step(last=True) for leader in self._announced)

    def close(self) -> None:
        """Closes all channels."""
        for leader in (one for pair in self._pairs for one in pair):
            leader.close()
        self._directory.close()
