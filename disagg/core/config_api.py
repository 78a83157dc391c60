"""The section `api` of the configuration tree: what `disagg serve` listens on, and what it takes from clients."""

from __future__ import annotations

from disagg.core.config_section import Section

KIB = 1 << 10


class ApiConfig(Section, frozen=True):
    """The HTTP API. An *answer* is one choice: a request with 2 prompts and `n = 3` asks for 6 answers."""

    host: str = "127.0.0.1"
    """Address to listen on. Other machines reach the server only on another one, e.g. 0.0.0.0, with API keys."""
    port: int = 8000
    """0 takes a free one; it is logged."""
    model_name: str | None = None
    """What clients call the model; None takes the checkpoint folder's name, or the architecture's."""
    key_file: str | None = None
    """API keys, one a line; with those of the variable DISAGG_API_KEYS. None at all: no key is asked for, and `host`
    must be a loopback address."""
    allow_no_key: bool = False
    """Without API keys, serve also on an address that other machines reach."""
    max_running: int = 64
    """Answers that the engine is given at one time; those to one prompt that it makes together count as one."""
    max_queued: int = 256
    """Answers that wait for their turn; what comes on top is refused at once (429)."""
    max_queue_s: float = 10.0
    """Nor do more wait than will have their turn within so long, by how many have ended lately; but clients that only
    ask again when they have their answer may go on."""
    max_slowdown: float = 1.5
    """When the queue is full and clearly more comes than can be answered, who waits is turned away too (429), and
    only so many are taken in that half of the answers take at most so many times as long as on an idle server; 0: no
    such bound."""
    request_timeout_s: float = 120.0
    """Time for a whole request, from its headers to its last token; a client may ask for less."""
    drain_timeout_s: float = 30.0
    """How long a stop waits for running answers before it aborts them."""
    max_connections: int = 1024
    """Open at one time. Beyond that the one that waited longest for a request is closed; with none, new ones get a
    503."""
    max_connections_per_address: int = 512
    """Of one client address (IPv6: network of 64 bits), with the same rule. Behind a proxy all clients have the
    proxy's address: set it to `max_connections` there, and let the proxy limit its clients."""
    idle_timeout_s: int = 30
    """A connection without a request is closed after so long."""
    header_timeout_s: float = 10.0
    """A request's head that is not whole by then is answered by a 408, also the first one of a new connection."""
    body_timeout_s: float = 10.0
    """A request's body that is not whole by then is answered by a 408; received bytes extend the time, see
    `min_body_bytes_per_s`."""
    min_body_bytes_per_s: int = 16 * KIB
    """Each so many bytes of a body that have come extend `body_timeout_s` by a second, within `request_timeout_s`."""
    max_body_bytes: int = 4096 * KIB
    max_header_bytes: int = 32 * KIB
    """Request line and headers together."""
    max_line_bytes: int = 8 * KIB
    """The request line, or one header."""
    max_prompts: int = 64
    """Prompts in one request."""
    max_n: int = 16
    """Answers to one prompt."""
    max_stop: int = 16
    """Stop strings, and stop tokens, in one request."""

    def __post_init__(self) -> None:
        self._needs(bool(self.host), "host", "an address or a host name")
        self._needs(0 <= self.port < 1 << 16, "port", "from 0 to 65535")
        self._needs(self.model_name != "", "model_name", "a name, or left out")
        self._at_least(
            1,
            "max_running",
            "max_connections",
            "max_connections_per_address",
            "min_body_bytes_per_s",
            "idle_timeout_s",
            "max_prompts",
            "max_n",
            "max_stop",
            "max_body_bytes",
        )
        self._at_least(0, "max_queued", "drain_timeout_s")
        self._at_least(1024, "max_header_bytes")
        self._positive("request_timeout_s", "max_queue_s", "header_timeout_s", "body_timeout_s")
        self._needs(self.max_slowdown == 0 or self.max_slowdown >= 1, "max_slowdown", "0, or from 1")
        self._needs(
            128 <= self.max_line_bytes <= self.max_header_bytes,
            "max_line_bytes",
            f"from 128 to max_header_bytes ({self.max_header_bytes})",
        )
