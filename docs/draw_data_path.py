"""Draws docs/data_path.svg: the path of one prompt's KV cache between ranks. Run: python docs/draw_data_path.py"""

from __future__ import annotations

from pathlib import Path
from xml.sax.saxutils import escape

WIDTH, HEIGHT = 1040, 470
INK, SOFT, PAPER = "#343a40", "#868e96", "#ffffff"
RANK_COLORS = ("#4c6ef5", "#f08c00")
HEADS = 4


class Drawing:
    """Collects SVG elements and returns them as one SVG file."""

    def __init__(self) -> None:
        self.parts: list[str] = []

    def box(
        self, x: float, y: float, w: float, h: float, fill: str, stroke: str = "none", r: float = 6
    ) -> None:
        """Adds a rectangle with round corners."""
        self.parts.append(
            f'<rect x="{x}" y="{y}" width="{w}" height="{h}" rx="{r}" fill="{fill}" stroke="{stroke}"/>'
        )

    def text(
        self,
        x: float,
        y: float,
        text: str,
        *,
        size: int = 13,
        bold: bool = False,
        color: str = INK,
        anchor: str = "start",
    ) -> None:
        """Adds one line of text, whose baseline is at `y`."""
        weight = ' font-weight="600"' if bold else ""
        self.parts.append(
            f'<text x="{x}" y="{y}" font-size="{size}" fill="{color}" text-anchor="{anchor}"{weight}>'
            f"{escape(text)}</text>"
        )

    def arrow(self, x0: float, y0: float, x1: float, y1: float, color: str, dashed: bool = False) -> None:
        """Adds a line with an arrow head at its end."""
        dash = ' stroke-dasharray="5 4"' if dashed else ""
        self.parts.append(
            f'<line x1="{x0}" y1="{y0}" x2="{x1}" y2="{y1}" stroke="{color}" stroke-width="2"{dash} '
            f'marker-end="url(#head-{color[1:]})"/>'
        )

    def svg(self, colors: tuple[str, ...]) -> str:
        """Returns the text of the SVG file."""
        heads = "".join(
            f'<marker id="head-{c[1:]}" viewBox="0 0 8 8" refX="7" refY="4" markerWidth="7" markerHeight="7" '
            f'orient="auto"><path d="M0 0L8 4L0 8z" fill="{c}"/></marker>'
            for c in colors
        )
        return (
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" '
            f"font-family=\"system-ui, 'DejaVu Sans', sans-serif\">\n<defs>{heads}</defs>\n"
            + "\n".join([f'<rect width="{WIDTH}" height="{HEIGHT}" fill="{PAPER}"/>', *self.parts])
            + "\n</svg>\n"
        )


def pool(drawing: Drawing, x: float, y: float, colors: list[str | None]) -> None:
    """Draws a KV pool with pages as rows and heads as columns. None is a head that the rank does not have."""
    width = 16
    for page in range(4):
        for head, color in enumerate(colors):
            fill = color or "#f1f3f5"
            drawing.box(x + head * width, y + page * 17, width - 2, 14, fill, r=2)


def stages(drawing: Drawing, x: float, y: float, color: str, title: str, note: str) -> None:
    """Draws a staging buffer or a ring with some segments."""
    drawing.box(x, y, 118, 34, "#f8f9fa", SOFT)
    for number in range(4):
        drawing.box(x + 7 + number * 27, y + 7, 22, 20, color if number < 3 else "#f1f3f5", r=3)
    drawing.text(x + 59, y - 8, title, size=12, anchor="middle")
    drawing.text(x + 59, y + 50, note, size=11, color=SOFT, anchor="middle")


def prefill_rank(drawing: Drawing, y: float, rank: int) -> None:
    """Draws one prefill rank: its part of the pool, the gather, and staging."""
    color = RANK_COLORS[rank]
    heads: list[str | None] = [color if head // 2 == rank else None for head in range(HEADS)]
    drawing.box(40, y, 400, 110, "#ffffff", color, r=10)
    drawing.text(56, y + 22, f"prefill r{rank}", bold=True)
    drawing.text(56, y + 42, f"heads {2 * rank}-{2 * rank + 1}", size=12, color=SOFT)
    drawing.text(56, y + 58, "all layers", size=12, color=SOFT)
    pool(drawing, 150, y + 22, heads)
    drawing.text(182, y + 104, "paged KV pool", size=11, color=SOFT, anchor="middle")
    drawing.arrow(222, y + 56, 296, y + 56, color)
    drawing.text(258, y + 48, "gather", size=12, anchor="middle")
    stages(drawing, 304, y + 40, color, "staging", "contiguous segments")


def draw() -> str:
    """Returns the whole picture as SVG text."""
    drawing = Drawing()
    drawing.text(40, 34, "prefill group, TP 2", size=17, bold=True)
    drawing.text(620, 34, "decode group, TP 1", size=17, bold=True)
    drawing.box(620, 54, 380, 242, "#ffffff", SOFT, r=10)
    for rank, y in enumerate((54, 186)):
        prefill_rank(drawing, y, rank)
        drawing.arrow(424, y + 57, 636, 160 + rank * 30, RANK_COLORS[rank])
    drawing.text(528, 116, "UCX", size=13, bold=True, anchor="middle")
    drawing.text(636, 76, "decode r0", bold=True)
    drawing.text(716, 76, "heads 0-3, all layers", size=12, color=SOFT)
    drawing.box(644, 148, 118, 54, "#f8f9fa", SOFT)
    for number in range(4):
        drawing.box(651 + number * 27, 155, 22, 18, RANK_COLORS[0] if number < 3 else "#f1f3f5", r=3)
        drawing.box(651 + number * 27, 177, 22, 18, RANK_COLORS[1] if number < 3 else "#f1f3f5", r=3)
    drawing.text(703, 138, "receive ring", size=12, anchor="middle")
    drawing.text(703, 220, "leases, transit only", size=11, color=SOFT, anchor="middle")
    drawing.arrow(770, 175, 848, 175, INK)
    drawing.text(808, 166, "scatter", size=12, anchor="middle")
    pool(drawing, 858, 142, [RANK_COLORS[0]] * 2 + [RANK_COLORS[1]] * 2)
    drawing.text(890, 226, "paged KV pool", size=11, color=SOFT, anchor="middle")
    drawing.text(636, 270, "pages are reserved before anything is sent;", size=12, color=SOFT)
    drawing.text(636, 286, "tokens are decoded when all segments have landed", size=12, color=SOFT)
    drawing.arrow(620, 250, 444, 250, SOFT, dashed=True)
    drawing.text(530, 270, "leases, watermark", size=12, color=SOFT, anchor="middle")
    timeline(drawing, 340)
    return drawing.svg((*RANK_COLORS, INK, SOFT))


def timeline(drawing: Drawing, y: float) -> None:
    """Draws two rows over time: compute of the layer groups, and the transfer of each group one compute later."""
    drawing.text(
        40,
        y,
        "One chunk of a prompt, four layer groups: a group is sent while the next one computes",
        bold=True,
    )
    for group in range(4):
        x = 150 + group * 150
        drawing.box(x, y + 18, 146, 26, "#dbe4ff", RANK_COLORS[0], r=4)
        drawing.text(x + 73, y + 36, f"compute group {group}", size=12, anchor="middle")
        drawing.box(x + 150, y + 56, 110, 26, "#fff3bf", RANK_COLORS[1], r=4)
        drawing.text(x + 205, y + 74, f"move group {group}", size=12, anchor="middle")
    drawing.text(138, y + 36, "GPU compute", size=12, color=SOFT, anchor="end")
    drawing.text(138, y + 74, "transfer", size=12, color=SOFT, anchor="end")
    drawing.arrow(150, y + 100, 900, y + 100, SOFT)
    drawing.text(908, y + 104, "time", size=12, color=SOFT)


if __name__ == "__main__":
    Path(__file__).with_name("data_path.svg").write_text(draw(), encoding="utf-8")
