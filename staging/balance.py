"""Distribution of KV cells over replicas that can all send them, with the least load on the busiest sender."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

Holders = tuple[int, ...]
Quotas = dict[Holders, dict[int, int]]
Step = tuple[int, Holders]
"""A link of a chain: the rank that gives cells, and the demand from which it gives."""


def balanced_quotas(demands: Mapping[Holders, int], load: Mapping[int, int]) -> Quotas:
    """Returns, for each demand, the number of cells that each of its holders sends.

    A demand is a number of cells that any one of its holders can send; `load` is the number of other cells
    that each rank sends. The result minimizes the largest total, then the second largest, and so on.

    Cells are unit jobs: an assignment is optimal when no chain of moves takes a unit from a rank to another
    with at least two fewer (semi-matchings; Harvey, Ladner, Lovász and Tamir, 2003). The result does not
    depend on the order of the arguments.
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
    """Returns the share of each of `loads` when `amount` fills up the lowest loads to a common level."""
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
    """Moves cells along chains of demands until no rank can give to a rank with at least two fewer."""
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
    """Returns the ranks that cells of `giving` can reach, each with the last link of a shortest chain to it."""
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
    """Moves up to `most` cells along the chain to `taking`, limited by the ranks between; returns the number
    moved."""
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
