"""Chooses the devices of all ranks from the number of GPUs. Pure functions."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from disagg.core.config.read import Role
from disagg.core.errors import ConfigError


@dataclass(frozen=True, slots=True)
class GroupPlacement:
    """Placement of the ranks of one kind of group."""

    tp: int
    device: str
    """Device of the ranks: `cpu` or `cuda`."""
    gpus_per_rank: float
    """GPUs that Ray reserves for a rank: 1, a fraction of a GPU, or 0 on a CPU."""
    backend: str
    """Collective backend of the ranks: `nccl` if each rank has its own GPU, else `shared` (host memory)."""
    groups: int = 1
    """Number of groups of this kind."""

    @property
    def ranks(self) -> int:
        """Number of ranks in all groups of this kind."""
        return self.tp * self.groups


@dataclass(frozen=True, slots=True)
class Placement:
    """Placement of all groups of a cluster."""

    kinds: Mapping[Role, GroupPlacement]
    """Placement of each kind of group: `prefill` and `decode`, or `colocated`."""
    why: str
    """Reason for this placement, as text for the user."""

    @property
    def prefill(self) -> GroupPlacement:
        """Placement of the prefill groups; only in a split cluster."""
        return self.kinds["prefill"]

    @property
    def decode(self) -> GroupPlacement:
        """Placement of the decode groups; only in a split cluster."""
        return self.kinds["decode"]

    @property
    def ranks(self) -> int:
        """Number of ranks in all groups."""
        return sum(kind.ranks for kind in self.kinds.values())


def choose_placement(
    gpus: int,
    prefill_tp: int | None = None,
    decode_tp: int | None = None,
    device: str = "auto",
    groups: tuple[int, int] = (1, 1),
) -> Placement:
    """Places `groups` = (prefill, decode) groups on `gpus` GPUs; chooses TP sizes that are None.

    With enough GPUs, each rank gets its own. With fewer, one prefill and one decode group use different GPUs, and the
    ranks of a group may share its GPUs. With a single GPU, or with more groups, all ranks share all GPUs. Without
    GPUs, or with `device` `cpu`, ranks run on the CPU. Raises `ConfigError` when `device` is `cuda` and there is no
    GPU.
    """
    if why := _on_cpu(gpus, device):
        return _both(prefill_tp or 2, decode_tp or 1, groups, "cpu", 0.0, 0.0, why)
    prefill, decode = prefill_tp or (2 if gpus >= 3 and groups == (1, 1) else 1), decode_tp or 1
    ranks = prefill * groups[0] + decode * groups[1]
    if ranks <= gpus:
        return _both(prefill, decode, groups, "cuda", 1.0, 1.0, f"{gpus} GPUs: one for each rank")
    if gpus == 1 or groups != (1, 1):
        share = _share(ranks, gpus)
        why = "one GPU: every rank shares it" if gpus == 1 else f"{gpus} GPUs: all ranks share them"
        return _both(prefill, decode, groups, "cuda", share, share, why)
    if decode + 1 <= gpus:
        share, why = _share(prefill, gpus - decode), f"{gpus} GPUs: prefill ranks share {gpus - decode}"
        return _both(prefill, decode, groups, "cuda", share, 1.0, why)
    share = _share(decode, gpus - 1)
    return _both(prefill, decode, groups, "cuda", _share(prefill, 1), share, f"{gpus} GPUs: ranks share them")


def place_colocated(gpus: int, tp: int | None = None, device: str = "auto", groups: int = 1) -> Placement:
    """Places `groups` colocated groups of `tp` ranks each (1 when None) on `gpus` GPUs.

    With enough GPUs, each rank gets its own; with fewer, all ranks share all GPUs. Raises `ConfigError` when `device`
    is `cuda` and there is no GPU.
    """
    ranks = (tp or 1) * groups
    if why := _on_cpu(gpus, device):
        return Placement({"colocated": _group(tp or 1, "cpu", 0.0, groups)}, why)
    share, why = (
        (1.0, "one for each rank") if ranks <= gpus else (_share(ranks, gpus), "all ranks share them")
    )
    return Placement({"colocated": _group(tp or 1, "cuda", share, groups)}, f"{gpus} GPUs: {why}")


def _on_cpu(gpus: int, device: str) -> str:
    """Returns why the ranks run on the CPU; empty if they use GPUs."""
    if device == "cuda" and gpus == 0:
        raise ConfigError(
            "device is cuda, but this machine shows no GPU: check the driver, or use --device cpu"
        )
    if device == "cpu":
        return "on the CPU"
    return "" if gpus else "no GPU here: on the CPU"


def _share(ranks: int, gpus: int) -> float:
    """Returns each rank's share of a GPU: a multiple of 1/10000, as Ray requires. The shares of one GPU sum to at
    most 1."""
    ranks_per_gpu = -(-ranks // gpus)
    return int(10000 / ranks_per_gpu) / 10000


def _both(
    prefill: int,
    decode: int,
    groups: tuple[int, int],
    device: str,
    prefill_gpus: float,
    decode_gpus: float,
    why: str,
) -> Placement:
    kinds: dict[Role, GroupPlacement] = {
        "prefill": _group(prefill, device, prefill_gpus, groups[0]),
        "decode": _group(decode, device, decode_gpus, groups[1]),
    }
    return Placement(kinds, why)


def _group(tp: int, device: str, gpus_per_rank: float, groups: int) -> GroupPlacement:
    return GroupPlacement(tp, device, gpus_per_rank, "nccl" if gpus_per_rank == 1.0 else "shared", groups)
