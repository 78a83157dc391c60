"""Draws a `TransferPlan`: source ranks on the left, destination ranks on the right, an arrow for each route."""

from __future__ import annotations

import os
from typing import Any

import msgspec

from disagg.core.errors import ConfigError
from disagg.core.types import Shard
from disagg.plan.transfer import RouteTotal, TransferPlan, describe_bytes, describe_span

BAR_WIDTH, BAR_HEIGHT = 3.0, 0.56
LABEL_X, ARROW_X = 3.6, 6.6
"""X positions of the routes' labels, right of the source bars, and of the arrows' starts, right of the labels."""
DESTINATION_X = 10.0
HEIGHT_LIMIT_INCHES = 30.0
EMPTY_COLOR, TEXT_COLOR = "#f1f3f5", "#343a40"


def draw_plan(plan: TransferPlan, path: str | os.PathLike[str]) -> None:
    """Draws the plan into a PNG file at `path`.

    Each bar is a rank. The cells of a bar are the model's KV heads; the rank's own heads are coloured. Routes of
    recurrent states are not drawn; the title gives their bytes.

    Raises `ConfigError` for a layout with several classes of layers, or a model without KV.
    """
    layout = plan.request.layout
    if layout.more or not plan.request.has_kv:
        why = "the layers of this model differ in their heads" if layout.more else "this model has no KV"
        raise ConfigError(f"{why}: its plan is printed, not drawn")
    state_bytes = plan.state_bytes
    plan = msgspec.structs.replace(
        plan, routes=tuple(total for total in plan.routes if not layout.is_state(total.route.layers))
    )
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    outlets, source_y, height = _outlets(plan)
    destination_y = _even(plan, height)
    figure = Figure(figsize=(13, min(HEIGHT_LIMIT_INCHES, 1.1 + 0.5 * height)), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.add_subplot()
    colors = _rank_colors(len(plan.sources))
    for shard in plan.sources:
        _bar(axes, plan, shard, 0.0, source_y[shard.rank], dict.fromkeys(shard.heads, colors[shard.rank]))
    for shard in plan.destinations:
        cells = _origin_colors(plan, shard, colors)
        _bar(axes, plan, shard, DESTINATION_X, destination_y[shard.rank], cells)
    for total, outlet in zip(plan.routes, outlets, strict=True):
        inlet = destination_y[total.route.dst_rank] + _inlet(plan, total)
        source = total.route.src_rank
        axes.plot(
            [BAR_WIDTH, LABEL_X - 0.08], [source_y[source], outlet], color=colors[source], linewidth=1.6
        )
        _arrow(axes, total, (outlet, inlet), colors[source])
    _frame(axes, plan, height, state_bytes)
    figure.savefig(path, dpi=130)


def _outlets(plan: TransferPlan) -> tuple[list[float], dict[int, float], float]:
    """Returns the vertical position of each route's start, of each source bar by rank, and the total height.

    Each source has one line per route, so labels never overlap.
    """
    outlets: list[float] = []
    centres: dict[int, float] = {}
    top = 0.0
    for shard in plan.sources:
        lines = sum(total.route.src_rank == shard.rank for total in plan.routes)
        outlets += [top + line + 0.5 for line in range(lines)]
        centres[shard.rank] = top + max(1, lines) / 2
        top += max(1, lines)
    height = max(top, float(len(plan.destinations)))
    scale = height / top
    return [y * scale for y in outlets], {rank: y * scale for rank, y in centres.items()}, height


def _even(plan: TransferPlan, height: float) -> dict[int, float]:
    count = len(plan.destinations)
    return {shard.rank: height * (i + 0.5) / count for i, shard in enumerate(plan.destinations)}


def _inlet(plan: TransferPlan, total: RouteTotal) -> float:
    """Returns the vertical offset of an arrow's end from the centre of the destination's bar.

    Arrows that end at the same bar are in the order of the plan's routes.
    """
    ending = [one for one in plan.routes if one.route.dst_rank == total.route.dst_rank]
    return BAR_HEIGHT * ((ending.index(total) + 0.5) / len(ending) - 0.5)


def _rank_colors(ranks: int) -> list[Any]:
    from matplotlib import colormaps

    if ranks <= 10:
        return [colormaps["tab10"](rank) for rank in range(ranks)]
    return [colormaps["turbo"](0.08 + 0.84 * rank / (ranks - 1)) for rank in range(ranks)]


def _origin_colors(plan: TransferPlan, shard: Shard, colors: list[Any]) -> dict[int, Any]:
    """Returns the colour of each head of a destination: the colour of the first source rank that sends the head."""
    origin: dict[int, Any] = {}
    for total in plan.routes:
        if total.route.dst_rank == shard.rank:
            for head in total.route.heads:
                origin.setdefault(head, colors[total.route.src_rank])
    return origin


def _bar(axes: Any, plan: TransferPlan, shard: Shard, x: float, y: float, cells: dict[int, Any]) -> None:
    from matplotlib.patches import Rectangle

    heads = plan.request.layout.kv_heads
    width = BAR_WIDTH / heads
    bottom = y - BAR_HEIGHT / 2
    for head in range(heads):
        color = cells.get(head, EMPTY_COLOR)
        edge = "white" if heads <= 32 else color
        axes.add_patch(
            Rectangle((x + head * width, bottom), width, BAR_HEIGHT, facecolor=color, edgecolor=edge)
        )
        if heads <= 16 and head in cells:
            axes.text(
                x + (head + 0.5) * width, y, str(head), ha="center", va="center", color="white", fontsize=9
            )
    axes.add_patch(Rectangle((x, bottom), BAR_WIDTH, BAR_HEIGHT, fill=False, edgecolor="#868e96"))
    name = f"r{shard.rank}"
    if len(shard.layers) < plan.request.layout.layers:
        name += f"\n{describe_span('layer', shard.layers)}"
    left = x < DESTINATION_X
    axes.text(
        x - 0.15 if left else x + BAR_WIDTH + 0.15,
        y,
        name,
        ha="right" if left else "left",
        va="center",
        fontsize=10,
        color=TEXT_COLOR,
    )


def _arrow(axes: Any, total: RouteTotal, ends: tuple[float, float], color: Any) -> None:
    route = total.route
    parts = (
        describe_span("head", route.heads),
        describe_span("layer", route.layers),
        describe_bytes(total.nbytes),
    )
    label = " · ".join(parts)
    axes.text(LABEL_X, ends[0], label, ha="left", va="center", fontsize=9, color=TEXT_COLOR)
    axes.annotate(
        "",
        xy=(DESTINATION_X - 0.05, ends[1]),
        xytext=(ARROW_X, ends[0]),
        arrowprops={"arrowstyle": "-|>", "color": color, "linewidth": 1.6, "shrinkA": 0, "shrinkB": 0},
    )


def _frame(axes: Any, plan: TransferPlan, height: float, state_bytes: int) -> None:
    request, layout = plan.request, plan.request.layout
    sides = (
        (0.0, "prefill", request.prefill_tp),
        (DESTINATION_X, "decode", request.decode_tp),
    )
    for x, role, tp in sides:
        axes.text(x, -0.15, f"{role}, TP {tp}", fontsize=12, fontweight="bold", color=TEXT_COLOR)
    state = f", then {describe_bytes(state_bytes)} of recurrent state" if state_bytes else ""
    axes.set_title(
        f"{request.tokens} tokens, {layout.layers} layers x {layout.kv_heads} KV heads x {layout.head_dim} "
        f"({layout.dtype}): {describe_bytes(plan.nbytes)} in {plan.segments} segments, "
        f"{plan.control_messages} control messages{state}",
        fontsize=12,
        loc="left",
    )
    axes.set_xlim(-1.3, DESTINATION_X + BAR_WIDTH + 1.3)
    axes.set_ylim(height + 0.1, -0.7)
    axes.axis("off")
