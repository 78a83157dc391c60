"""Which rank runs where, from what the machine has. Pure."""

from __future__ import annotations

from dataclasses import dataclass

from disagg.core.errors import ConfigError


@dataclass(frozen=True, slots=True)
class GroupPlacement:
    """Where one group's ranks run."""

    tp: int
    device: str
    """`cpu` or `cuda`."""
    gpus_per_rank: float
    """What a rank asks of Ray: a whole GPU, a share of one, or 0 on a CPU."""
    backend: str
    """Collective among the ranks: `gloo`, or `nccl` where each has a GPU of its own."""


@dataclass(frozen=True, slots=True)
class Placement:
    """Where everything runs, with the reason in words."""

    prefill: GroupPlacement
    decode: GroupPlacement
    why: str


def choose_placement(
    gpus: int, prefill_tp: int | None = None, decode_tp: int | None = None, device: str = "auto"
) -> Placement:
    """Places both groups on a machine with `gpus` GPUs; sizes that are None are chosen.

    Three GPUs or more, and enough for all ranks: a GPU each. Two: one for each group, whose ranks share it. One:
    everybody shares it. None, or `device` is `cpu`: CPU. Raises `ConfigError` when GPUs are asked for and there
    is none.
    """
    if device == "cuda" and gpus == 0:
        raise ConfigError(
            "device is cuda, but this machine shows no GPU: check the driver, or use --device cpu"
        )
    if device == "cpu" or gpus == 0:
        why = "on the CPU" if device == "cpu" else "no GPU here: on the CPU"
        return _both(prefill_tp or 2, decode_tp or 1, "cpu", 0.0, 0.0, why)
    prefill, decode = prefill_tp or (2 if gpus >= 3 else 1), decode_tp or 1
    if prefill + decode <= gpus:
        return _both(prefill, decode, "cuda", 1.0, 1.0, f"{gpus} GPUs: one for each rank")
    if gpus == 1:
        # Shares add up to at most one GPU; Ray counts in steps of 1/10000.
        share = int(10000 / (prefill + decode)) / 10000
        return _both(prefill, decode, "cuda", share, share, "one GPU: every rank shares it")
    if decode + 1 <= gpus:
        share = _share(prefill, gpus - decode)
        return _both(prefill, decode, "cuda", share, 1.0, f"{gpus} GPUs: prefill ranks share {gpus - decode}")
    share = _share(decode, gpus - 1)
    return _both(prefill, decode, "cuda", _share(prefill, 1), share, f"{gpus} GPUs: ranks share them")


def _share(ranks: int, gpus: int) -> float:
    ranks_per_gpu = -(-ranks // gpus)
    return int(10000 / ranks_per_gpu) / 10000


def _both(
    prefill: int, decode: int, device: str, prefill_gpus: float, decode_gpus: float, why: str
) -> Placement:
    def group(tp: int, gpus: float) -> GroupPlacement:
        return GroupPlacement(tp, device, gpus, "nccl" if gpus == 1.0 else "gloo")

    return Placement(group(prefill, prefill_gpus), group(decode, decode_gpus), why)
