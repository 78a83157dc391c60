"""Which rank runs where, from what the machine has. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from disagg.core.config import Role
from disagg.core.errors import ConfigError


@dataclass(frozen=True, slots=True)
class GroupPlacement:
    """Where the ranks of one kind of group run."""

    tp: int
    device: str
    """`cpu` or `cuda`."""
    gpus_per_rank: float
    """What a rank asks of Ray: a whole GPU, a share of one, or 0 on a CPU."""
    backend: str
    """Collective among the ranks: `nccl` where each has a GPU of its own, else `shared` (memory of the host)."""
    groups: int = 1
    """Groups of this kind."""

    @property
    def ranks(self) -> int:
        """Of all groups of this kind."""
        return self.tp * self.groups


@dataclass(frozen=True, slots=True)
class Placement:
    """Where everything runs, with the reason in words."""

    kinds: Mapping[Role, GroupPlacement]
    """`prefill` and `decode`, or `colocated`."""
    why: str

    @property
    def prefill(self) -> GroupPlacement:
        """Of a split cluster."""
        return self.kinds["prefill"]

    @property
    def decode(self) -> GroupPlacement:
        """Of a split cluster."""
        return self.kinds["decode"]

    @property
    def ranks(self) -> int:
        """All of them."""
        return sum(kind.ranks for kind in self.kinds.values())


def choose_placement(
    gpus: int,
    prefill_tp: int | None = None,
    decode_tp: int | None = None,
    device: str = "auto",
    groups: tuple[int, int] = (1, 1),
) -> Placement:
    """Places `groups` prefill and decode groups where there are `gpus` GPUs; sizes that are None are chosen.

    Three GPUs or more, and enough for all ranks: a GPU each. Two: one for each group, whose ranks share it. One, or
    too few for several groups of a kind: everybody shares them. None, or `device` is `cpu`: CPU. Raises
    `ConfigError` when GPUs are asked for and there is none.
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
    """Places `groups` groups that prefill and decode, of `tp` ranks each (1 when None), where there are `gpus` GPUs.

    A GPU for each rank while there are enough, else they share them. Raises `ConfigError` as `choose_placement`.
    """
    ranks = (tp or 1) * groups
    if why := _on_cpu(gpus, device):
        return Placement({"colocated": _group(tp or 1, "cpu", 0.0, groups)}, why)
    share, why = (
        (1.0, "one for each rank") if ranks <= gpus else (_share(ranks, gpus), "all ranks share them")
    )
    return Placement({"colocated": _group(tp or 1, "cuda", share, groups)}, f"{gpus} GPUs: {why}")


def _on_cpu(gpus: int, device: str) -> str:
    """Why the CPU is what is left; empty when GPUs are used."""
    if device == "cuda" and gpus == 0:
        raise ConfigError(
            "device is cuda, but this machine shows no GPU: check the driver, or use --device cpu"
        )
    if device == "cpu":
        return "on the CPU"
    return "" if gpus else "no GPU here: on the CPU"


def _share(ranks: int, gpus: int) -> float:
    """Of a GPU, for each rank: they add up to at most one. Ray counts in steps of 1/10000."""
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
