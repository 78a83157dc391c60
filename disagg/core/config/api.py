"""The section `api` of the configuration tree: address and limits of `disagg serve`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

from disagg.core.config.section import KIB, Section
from disagg.core.types import GroupInfo

ToolParserName = Literal[
    "auto",
    "none",
    "hermes",
    "qwen3_coder",
    "glm45",
    "llama3_json",
    "mistral",
    "deepseek",
    "kimi_k2",
    "harmony",
]
ReasoningParserName = Literal["auto", "none", "think", "magistral", "seed_oss", "kimi", "command", "harmony"]


class ApiConfig(Section, frozen=True):
    """Settings of the HTTP API. An *answer* is one choice: a request with 2 prompts and `n = 3` has 6 answers."""

    host: str = "127.0.0.1"
    """Address to listen on. 0.0.0.0 accepts connections from other machines and needs API keys."""
    port: int = 8000
    """Port to listen on; 0 takes a free port, which is logged."""
    workers: int = 1
    """Number of router processes that share the port. Each has an equal share of `max_running`, `max_queued`,
    `max_connections` and `max_connections_per_address`."""
    model_name: str | None = None
    """Name of the model for clients; None: name of the checkpoint folder or of the architecture."""
    key_file: str | None = None
    """File of API keys, one per line; the variable DISAGG_API_KEYS adds keys. If there are no keys, clients need no
    key, and `host` must be a loopback address unless `allow_no_key` is set."""
    allow_no_key: bool = False
    """Whether a `host` other than loopback is allowed without API keys."""
    max_running: int = 0
    """Largest number of running requests; answers to one prompt that are computed together count as one. 0: the
    sum of `max_requests` over the groups that decode, updated when groups join or leave."""
    max_queued: int = 256
    """Queue limit in answers; further requests are rejected at once (429)."""
    max_queue_s: float = 10.0
    """Time within which a queued request should start, estimated from the recent completion rate. If the estimate is
    longer, further requests are rejected. Closed-loop clients, which send one request after another, are exempt."""
    max_slowdown: float = 1.5
    """Limit of the median latency under overload, as a multiple of an idle server's latency; 0: no such limit. To
    keep this limit, the server also rejects queued requests (429). Overload means that the queue is full and arrivals
    clearly exceed completions."""
    request_timeout_s: float = 120.0
    """Time limit of a request, from its headers to its last token; a client may set a lower one."""
    drain_timeout_s: float = 30.0
    """Time for running answers to finish at shutdown; answers that still run afterwards are aborted."""
    max_connections: int = 1024
    """Limit of open connections. At the limit, the server closes the connection that has been idle longest in favor
    of a new one; if no connection is idle, the reply to the new one is 503."""
    max_connections_per_address: int = 512
    """Limit of open connections per client address (IPv6: /64 network). Behind a proxy all clients have the proxy's
    address: set the limit to `max_connections` there, and limit clients in the proxy."""
    idle_timeout_s: int = 30
    """Time after which a connection without a request is closed."""
    header_timeout_s: float = 10.0
    """Time limit for receiving a request line and its headers. For a connection's first request, the time begins with
    the connection. On a timeout, the reply is 408."""
    body_timeout_s: float = 10.0
    """Time limit for receiving a request's body, extended by received bytes (`min_body_bytes_per_s`). On a timeout,
    the reply is 408."""
    min_body_bytes_per_s: int = 16 * KIB
    """Body bytes that extend `body_timeout_s` by one second, up to `request_timeout_s`."""
    max_body_bytes: int = 4096 * KIB
    """Largest body of a request; a larger one is refused with 413."""
    max_header_bytes: int = 32 * KIB
    """Limit of request line and headers together."""
    max_line_bytes: int = 8 * KIB
    """Limit of the request line and of each header."""
    max_prompts: int = 64
    """Largest number of prompts in one request."""
    max_n: int = 16
    """Largest number of answers to one prompt."""
    max_stop: int = 16
    """Largest number of stop strings, and of stop tokens, in one request."""
    tool_parser: ToolParserName = "auto"
    """Parser of tool calls in chat answers. auto: the parser that the checkpoint's chat template indicates."""
    reasoning_parser: ReasoningParserName = "auto"
    """Parser of reasoning in chat answers. auto: the parser that the checkpoint's chat template indicates."""

    def running_limit(self, groups: Sequence[GroupInfo]) -> int:
        """Returns `max_running` if set, else the sum of `max_requests` over the groups that decode; 0 without such
        groups."""
        return self.max_running or sum(group.max_requests for group in groups if group.role != "prefill")

    def __post_init__(self) -> None:
        self._needs(bool(self.host), "host", "an address or a host name")
        self._needs(0 <= self.port < 1 << 16, "port", "from 0 to 65535")
        self._needs(self.model_name != "", "model_name", "a name, or left out")
        self._at_least(
            1,
            "workers",
            "max_connections",
            "max_connections_per_address",
            "min_body_bytes_per_s",
            "idle_timeout_s",
            "max_prompts",
            "max_n",
            "max_stop",
            "max_body_bytes",
        )
        self._at_least(0, "max_running", "max_queued", "drain_timeout_s")
        for limit in ("max_running", "max_connections", "max_connections_per_address"):
            value = getattr(self, limit)
            shared = value >= self.workers or (limit == "max_running" and value == 0)
            self._needs(
                shared, limit, f"at least api.workers ({self.workers}), because the workers share this limit"
            )
        self._at_least(1024, "max_header_bytes")
        self._one_of("tool_parser", ToolParserName)
        self._one_of("reasoning_parser", ReasoningParserName)
        self._positive("request_timeout_s", "max_queue_s", "header_timeout_s", "body_timeout_s")
        self._needs(self.max_slowdown == 0 or self.max_slowdown >= 1, "max_slowdown", "0, or from 1")
        self._needs(
            128 <= self.max_line_bytes <= self.max_header_bytes,
            "max_line_bytes",
            f"from 128 to max_header_bytes ({self.max_header_bytes})",
        )
