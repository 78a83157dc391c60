"""What a scheduler's connector tells its workers: the metadata of a step, and the workers' handshake metadata."""

from __future__ import annotations

from dataclasses import dataclass, field

from disagg.core.types import KVLayout, RankInfo, Span, Ticket
from disagg.vllm.groups import BlockTables


@dataclass(frozen=True, slots=True)
class PromptStates:
    """Recurrent states of one request after a part of its prompt."""

    tokens: int
    """Tokens of this part."""
    blocks: tuple[int, ...] = ()
    """Block of each group of recurrent layers; the null block if vLLM has no such state any more."""


@dataclass(frozen=True, slots=True)
class PrefillWork:
    """Producer: the step computes the last positions of a prompt that is sent while it is computed."""

    key: str
    """Name of the transfer on both sides."""
    request_id: str
    tables: BlockTables
    """Blocks of each group of attention layers."""
    positions: Span
    """Positions of the data path that the step computes; earlier ones are computed."""
    states: PromptStates


@dataclass(frozen=True, slots=True)
class HoldWork:
    """Producer: the request has finished; its blocks are held until they are sent, or until the lease ends."""

    key: str
    request_id: str
    tables: BlockTables
    """Blocks of each group of attention layers."""
    positions: int
    """Positions of the data path that hold the prompt; see `EngineFacts.positions`."""
    states: PromptStates


@dataclass(frozen=True, slots=True)
class ReceiveWork:
    """Consumer: blocks are reserved for KV of another engine."""

    request_id: str
    ticket: Ticket
    tables: BlockTables
    """Blocks of each group of attention layers, from the block of the ticket's first token on."""
    states: PromptStates
    group: str
    """Name of the producer's group."""
    held: bool
    """Whether the producer has finished the request."""


@dataclass(frozen=True, slots=True)
class ReleaseWork:
    """Consumer: no KV of this transfer is needed."""

    key: str
    group: str


@dataclass(slots=True)
class StepWork:
    """The connector's metadata of one step."""

    prefills: list[PrefillWork] = field(default_factory=list)
    holds: list[HoldWork] = field(default_factory=list)
    drops: list[str] = field(default_factory=list)
    """Producer: aborted requests of `prefills`, whose blocks are held until they are no longer read."""
    receives: list[ReceiveWork] = field(default_factory=list)
    cancels: list[str] = field(default_factory=list)
    """Consumer: aborted requests of `receives`, whose blocks are held until they are no longer written."""
    releases: list[ReleaseWork] = field(default_factory=list)
    due: set[str] = field(default_factory=set)
    """Consumer: requests whose blocks this step may read, and whose KV may still come. The step waits for it."""
    forgets: list[str] = field(default_factory=list)
    """Consumer: requests that were reported early, whose KV did not come, and whose blocks nothing uses any more."""
    may_wait: bool = False
    """Whether this step and the one before compute nothing, so that a worker may wait for KV for a short time."""


@dataclass(frozen=True, slots=True)
class WorkerHandshake:
    """One worker's part of the engine's groups."""

    layout: KVLayout
    transport: str
    """Name of the transport, as in `GroupInfo`."""
    checksum: bool
    producer: RankInfo | None
    consumer: RankInfo | None
    tables: tuple[int, ...] = (0,)
    """Page table of each layer class; see `EngineFacts.attention`."""
