"""Distributes KV cells over the replicas that can send them, and minimizes the load of the busiest sender.

A cell is the KV of one layer and one KV head. A demand is a number of cells that all have the same holders.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

Holders = tuple[int, ...]
"""Ranks that each hold the same cells, so that any of these ranks can send any of the cells."""
Quotas = dict[Holders, dict[int, int]]
"""For the holders of each demand: the number of cells that each holder sends."""
Step = tuple[int, Holders]
"""One link of a chain of moves: the rank that gives cells, and the holders of the demand whose cells it gives."""


def balanced_quotas(demands: Mapping[Holders, int], load: Mapping[int, int]) -> Quotas:
    """Returns, for each demand, the number of cells that each of its holders sends.

    `demands` maps holders to their number of cells; `load` is the number of other cells that each rank sends. The
    result minimizes the largest total of a rank, then the second largest, and so on. The order of the arguments does
    not change the result.

    The assignment is an optimal semi-matching with cells as unit jobs (Harvey, Ladner, Lovász and Tamir, 2003): no
    chain of moves can take a cell from one rank to a rank that sends at least two cells fewer.
    """
    total = dict(load)
    quotas: Quotas = {}
    for holders in sorted(demands, key=lambda some: (len(some), some)):
        poured = _pour([total[rank] for rank in holders], demands[holders])
        quotas[holders] = dict(zip(holders, poured, strict=True))
        for rank, cells in quotas[holders].items():
            total[rank] += cells
    _even_out(quotas, total)
    return quotas


def _pour(loads: Sequence[int], amount: int) -> list[int]:
    """Returns each rank's part of `amount` when `amount` raises the lowest `loads` to a common level."""
    order = sorted(range(len(loads)), key=lambda i: loads[i])
    total = amount
    for count, i in enumerate(order, 1):
        total += loads[i]
        if count == len(order) or total <= count * loads[order[count]]:
            break
    level, rest = divmod(total, count)
    poured = [0] * len(loads)
    for place, i in enumerate(order[:count]):
        poured[i] = level - loads[i] + (place < rest)
    return poured


def _even_out(quotas: Quotas, total: dict[int, int]) -> None:
    """Moves cells along chains of demands until no rank can give to a rank that sends at least two cells fewer."""
    demands_of: dict[int, list[Holders]] = {}
    for holders in quotas:
        for rank in holders:
            demands_of.setdefault(rank, []).append(holders)
    unsettled = sorted(demands_of)
    while unsettled:
        giving = max(unsettled, key=lambda rank: total[rank])
        steps = _reach(giving, quotas, demands_of)
        taking = min(steps, key=lambda rank: (total[rank], rank))
        surplus = (total[giving] - total[taking]) // 2
        if surplus > 0:
            moved = _move(taking, surplus, steps, quotas)
            total[giving] -= moved
            total[taking] += moved
        else:  # the ranks within reach exchange cells only with each other, and their totals differ by at most one
            unsettled = [rank for rank in unsettled if rank not in steps]


def _reach(
    giving: int, quotas: Quotas, demands_of: Mapping[int, Sequence[Holders]]
) -> dict[int, Step | None]:
    """Returns the ranks to which cells of rank `giving` can move, each with the last link of a shortest chain."""
    steps: dict[int, Step | None] = {giving: None}
    queue = [giving]
    for rank in queue:
        for holders in demands_of[rank]:
            for other in holders if quotas[holders][rank] else ():
                if other not in steps:
                    steps[other] = rank, holders
                    queue.append(other)
    return steps


def _move(taking: int, most: int, steps: Mapping[int, Step | None], quotas: Quotas) -> int:
    """Moves up to `most` cells along the chain to rank `taking`; returns the number of cells moved.

    A link of the chain can move at most the number of cells that its giving rank sends now.
    """
    chain: list[tuple[int, int, Holders]] = []
    at = taking
    while (step := steps[at]) is not None:
        chain.append((step[0], at, step[1]))
        at = step[0]
    moved = min(most, *(quotas[holders][giver] for giver, _, holders in chain))
    for giver, taker, holders in chain:
        quotas[holders][giver] -= moved
        quotas[holders][taker] += moved
    return moved
