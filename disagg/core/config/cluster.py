"""The sections `control`, `cluster` and `router`: control messages, groups of ranks, and routing of requests."""

from __future__ import annotations

from typing import Literal

from disagg.core.config.section import MIB, Section

Mode = Literal["split", "colocated"]
PolicyName = Literal["prefix_aware", "least_loaded", "round_robin"]


class ControlConfig(Section, frozen=True):
    """Settings of the control channel (ZMQ), over which ranks, leaders and routers exchange messages."""

    host: str = "127.0.0.1"
    """Address to listen on and to announce; `auto`: the address of each process's host."""
    router_port: int = 0
    """Port of a router; 0: a free port. Worker n (`api.workers`) listens on this port plus n. Ranks always use free
    ports."""
    directory_port: int = 5570
    """Port of the directory of groups in `disagg launch`; 0: a free port."""
    key_file: str | None = None
    """File of CURVE keys (`disagg keys`), reloaded on change; None: new keys for each run."""
    peer_timeout_s: float = 10.0
    """Silence after which a peer counts as lost."""
    suspect_after_s: float = 2.0
    """Silence of a rank after which routers suspect its group: the group's requests continue on other groups, if
    there are any, until the rank responds again. 0, or `peer_timeout_s` or more: requests leave only lost groups."""
    heartbeat_s: float = 1.0
    """Interval of messages to a peer that receives no other ones."""
    max_message_bytes: int = 16 * MIB
    """Largest control message; a request that needs a larger one fails. Only messages with a prompt's tokens and
    pages can exceed the smallest allowed value."""

    def __post_init__(self) -> None:
        self._needs(bool(self.host), "host", "an address or a host name")
        self._positive("peer_timeout_s")
        self._at_least(0, "suspect_after_s")
        self._at_least(0.01, "heartbeat_s")  # a shorter interval would overload the peers
        for port in ("router_port", "directory_port"):
            self._needs(0 <= getattr(self, port) < 1 << 16, port, "from 0 to 65535")
        self._needs(
            MIB <= self.max_message_bytes <= 16 * MIB, "max_message_bytes", f"from {MIB} to {16 * MIB}"
        )
        self._needs(
            self.heartbeat_s * 2 <= self.peer_timeout_s,
            "heartbeat_s",
            f"at most half of peer_timeout_s ({self.peer_timeout_s:g}), so that one lost heartbeat is tolerated",
        )


class ClusterConfig(Section, frozen=True):
    """Placement of groups, and replacement of dead groups (no replacement in `demo` and `generate`)."""

    mode: Mode = "split"
    """Kinds of groups. split: prefill and decode groups; colocated: groups of both roles, as a baseline."""
    ray: str = "local"
    """Ray to use. `local`: start Ray on this machine. `auto` or `host:port`: use a running cluster."""
    name: str = "disagg"
    """Name of the set of groups that `launch` runs on a running Ray cluster; each concurrent `launch` there needs its
    own name. When a `launch` was killed, a new `launch` with the same name adopts the groups."""
    adopt_timeout_s: float = 600.0
    """Time that groups on a running Ray cluster continue to serve after their `launch` was killed. Groups that no new
    `launch` adopts within this time end. Must exceed `hang_timeout_s`. 0: groups end with their `launch`."""
    restart: bool = True
    """Whether `launch` and `serve` replace a dead group."""
    restart_backoff_s: float = 1.0
    """Pause before a replacement; doubles after each failure, up to a minute."""
    restart_tries: int = 5
    """Number of consecutive failed replacements after which each further try waits a minute."""
    start_timeout_s: float = 900.0
    """Time for all ranks of a group to load the model, warm up and record graphs."""
    hang_timeout_s: float = 15.0
    """Time without a response from a rank's process after which the rank's group is killed. This also detects a
    stopped process (SIGSTOP). Five times as long if the rank's host cannot be reached."""
    step_timeout_s: float = 0.0
    """Minimum time limit of one step. A step that exceeds both this limit and ten times the longest earlier step
    fails its group, which is then replaced. 0: 30 s on a GPU, 300 s on a CPU."""

    def __post_init__(self) -> None:
        self._one_of("mode", Mode)
        self._needs(bool(self.ray), "ray", "local, auto or the address of a Ray cluster")
        self._needs(bool(self.name) and "/" not in self.name, "name", "a name without a slash")
        self._at_least(0, "restart_backoff_s", "step_timeout_s", "adopt_timeout_s")
        self._at_least(1, "restart_tries")
        self._positive("start_timeout_s", "hang_timeout_s")
        # A new `launch` can adopt groups only after hang_timeout_s without a message of their former `launch`.
        kept = self.adopt_timeout_s == 0 or self.adopt_timeout_s > self.hang_timeout_s
        self._needs(kept, "adopt_timeout_s", f"0, or more than hang_timeout_s ({self.hang_timeout_s:g})")

    @property
    def outlives_launch(self) -> bool:
        """Whether groups keep running when their `disagg launch` is killed. With `ray = "local"`, Ray ends with
        `launch`."""
        return self.ray != "local" and self.adopt_timeout_s > 0

    def step_floor_s(self, device: str) -> float:
        """Returns `step_timeout_s` if set, else its default for `device` (`cpu` or `cuda`)."""
        return self.step_timeout_s or (30.0 if device == "cuda" else 300.0)


class RouterConfig(Section, frozen=True):
    """How routers choose the groups of a request, how long requests wait, and how lost requests recover."""

    policy: PolicyName = "prefix_aware"
    """Rule by which a router chooses among several groups of a role. round_robin: in rotation. least_loaded: by load.
    prefix_aware: by queued tokens and prefix cache hits; a request with a session name gets its decode group by the
    hash of the name. Routers receive KV events every `metrics.interval_s`."""
    host_load_cost: float = 0.05
    """Time to load a cached token from host memory, divided by the time to compute it. prefix_aware adds the cost of
    loads to a group's queue. Used until a group has measured its own rates of loads and of computing, and for decode
    groups, which compute no prompts. `disagg bench tiers` measures both costs."""
    storage_load_cost: float = 0.25
    """Time to load a cached token from the storage, divided by the time to compute it; used like `host_load_cost`."""
    request_timeout_s: float = 120.0
    """Time limit of a request of `disagg demo` and `disagg generate`; requests to the API have
    `api.request_timeout_s`."""
    reserve_wait_s: float = 2.0
    """Longest wait of a request in the queue of a full decode group, before the router tries another group. If only
    one decode group is up, the request waits there until the request's time limit."""
    max_recoveries: int = 3
    """Number of times that a request whose groups are lost may continue on other groups, within its time limit. 0:
    the request fails."""
    recoveries_per_s: float = 100.0
    """Rate limit of recoveries per router, with a burst of one second's worth; further recoveries are delayed."""
    local_prefill_queue_tokens: int = 8192
    """Queue of a prefill group, in prompt tokens, from which decode groups may compute prompts themselves
    (`decode.local_prefill_tokens`). With a queue of this size or more, a request goes to its decode group alone if
    that group is expected to compute the prompt sooner. Without a usable prefill group, all requests that decode
    groups can compute go there."""
    local_prefill_cost: float = 2.0
    """Time to compute a prompt's token in a decode group, divided by the time in a prefill group."""
    split_prompt_tokens: int = 2048
    """Number of tokens that the prefill group has not cached, from which both groups compute a prompt at the same
    time: the prefill group computes and sends the beginning, and the decode group computes the end, up to a half and
    up to `decode.chunk_tokens`, layer by layer behind it. Only while neither group has other requests, and where the
    decode group computes prompts (`decode.local_prefill_tokens`). 0: never."""
    group_wait_s: float = 60.0
    """Longest wait of a request while no group of a required role is up, within the request's time limit."""

    def __post_init__(self) -> None:
        self._one_of("policy", PolicyName)
        self._positive("request_timeout_s", "reserve_wait_s", "recoveries_per_s")
        self._at_least(0, "max_recoveries", "group_wait_s", "host_load_cost", "storage_load_cost")
        self._at_least(0, "local_prefill_queue_tokens", "local_prefill_cost", "split_prompt_tokens")
