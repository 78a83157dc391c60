"""Records that a group's ranks exchange with the cluster that starts them. Needs neither torch nor transformers."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

from disagg.core.config.read import Config
from disagg.core.types import GroupInfo, RankInfo
from disagg.node.host_memory import HostCacheSize
from disagg.node.ownership import NO_COUNTS, GroupCounts
from disagg.node.process import ProcessIdentity

if TYPE_CHECKING:
    from disagg.model.spec.model_spec import ModelSpec


class Rendezvous(NamedTuple):
    """Place where the ranks of a group, all on one host, exchange the addresses of their collective."""

    directory: str
    """Private folder of rank 0; empty for a group of one rank."""
    backend: str
    """Collective backend, `shared` or `nccl`; see `GroupPlacement.backend`."""
    host_ranks: int = 1
    """Number of ranks, of all groups, that start together on the host."""


class Started(NamedTuple):
    """Description of a rank whose model is loaded and whose channels are open."""

    info: RankInfo
    spec: ModelSpec
    fingerprint: str
    """Fingerprint of the rank's model (`ModelSource.fingerprint`)."""
    pid: int
    host: str
    """Host name of the process `pid`."""
    memory: str
    """Use of the device memory, as a text: KV pool, weights, steps and others."""
    transport: str
    """Name of the rank's transport (`Choice.name`)."""
    pool_tokens: int
    """Tokens that the rank's KV pool holds."""
    max_requests: int
    """Requests for which the rank has rows, and slots of recurrent states."""
    host_cache: HostCacheSize
    """Size of the second tier of the rank's prefix cache."""


class RankRecord(NamedTuple):
    """Data that a launch needs to adopt a rank of another launch."""

    process: ProcessIdentity
    config: Config
    keys: frozenset[str]
    """Names of the key generations that are valid on the rank."""
    group: GroupInfo | None
    started: Started | None
    linked: tuple[GroupInfo, ...]
    """Groups of the other role, without those whose ranks were reported as dead."""
    unusable: str
    """Reason why the rank cannot be adopted; empty if the rank serves."""
    counts: GroupCounts = NO_COUNTS
    """Numbers of groups from the former owner's latest pulse."""


class ClaimReply(NamedTuple):
    """Reply of a rank to a launch that claims the rank."""

    epoch: int
    """Epoch of the rank's owner after the claim."""
    record: RankRecord | None
    """Data for the adoption. None: the claim was refused, because the owner is alive or its epoch is not lower."""
