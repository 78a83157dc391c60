"""Memory by kind, of made-up statuses: what is counted as what, over time, and what is drawn of it."""

from __future__ import annotations

import io
from pathlib import Path
from typing import Any

import pytest
from matplotlib.figure import Figure
from matplotlib.image import imread
from msgspec.structs import replace
from rich.console import Console
from status_pictures import MIB, service, with_states, with_tiers

from disagg.core.status import GroupStatus, RankStatus, ServiceStatus
from disagg.stats.draw import KIND_STYLES, draw_memory
from disagg.stats.memory import KINDS, GroupSeries, Growth, group_memory, memory_now, memory_series
from disagg.stats.tables import tables
from disagg.stats.tiers import tier_use

KIB = 1024


def decode_group(**fields: Any) -> GroupStatus:
    """20 pages of 10 tokens, 1 KiB a token on each of two ranks."""
    rank = RankStatus("decode r0", 0, weights_bytes=300 * KIB, kv_bytes=200 * KIB, ring_bytes=64 * KIB)
    ranks = (rank, replace(rank, name="decode r1", rank=1, ring_used_bytes=16 * KIB))
    return replace(GroupStatus("decode", "decode", ranks, page_size=10, pages=20), **fields)


def picture(at_s: float, *groups: GroupStatus) -> ServiceStatus:
    return replace(service(at_s), groups=groups)


def test_every_slot_is_of_one_kind() -> None:
    found = group_memory(decode_group(pages_used=8, pages_cached=5, tokens_held=71))
    tokens = (found.used_tokens, found.waste_tokens, found.cached_tokens, found.free_tokens)
    assert tokens == (71, 9, 50, 70)
    assert sum(tokens) == found.pool_tokens == 200
    first, second = found.ranks
    assert first.kinds == {
        "weights": 300 * KIB,
        "kv_tokens": 71 * KIB,
        "kv_waste": 9 * KIB,
        "kv_cached": 50 * KIB,
        "kv_free": 70 * KIB,
        "state_used": 0,
        "state_cached": 0,
        "state_free": 0,
        "transfer_used": 0,
        "transfer_free": 64 * KIB,
    }
    assert (second.kinds["transfer_used"], second.kinds["transfer_free"]) == (16 * KIB, 48 * KIB)
    assert found.kind_bytes("kv_tokens") == 142 * KIB


def test_states_are_used_cached_or_free() -> None:
    kinds = group_memory(with_states(decode_group())).ranks[1].kinds
    assert (kinds["state_used"], kinds["state_cached"], kinds["state_free"]) == (20 * MIB, 8 * MIB, 44 * MIB)


def test_numbers_of_different_moments_never_fall_below_nothing() -> None:
    found = group_memory(decode_group(pages_used=19, pages_cached=4, tokens_held=195))
    assert (found.used_tokens, found.waste_tokens, found.free_tokens) == (190, 0, 0)


def test_a_group_without_a_pool_or_ranks_is_no_trouble() -> None:
    assert memory_now(picture(1.0, GroupStatus("decode", "decode"))) == []
    empty = group_memory(GroupStatus("decode", "decode", (RankStatus("decode r0", 0, kv_bytes=5),)))
    assert set(empty.ranks[0].kinds.values()) == {0}


def test_series_follow_groups_that_come_and_go() -> None:
    first, later = decode_group(), replace(decode_group(pages_used=3, tokens_held=30), name="decode-2")
    found = memory_series(
        [
            picture(100.0, first),
            picture(101.0, first, later),
            picture(103.0, replace(later, ranks=())),
            picture(104.5, later),
        ]
    )
    assert [(one.name, one.at_s) for one in found] == [("decode", (0.0, 1.0)), ("decode-2", (1.0, 4.5))]
    assert found[1].kinds["kv_tokens"] == (60 * KIB, 60 * KIB)
    assert memory_series([]) == []


def test_room_that_was_made_is_marked_when_it_was_seen() -> None:
    preempted, evicted = (0, 2, 2, 5, 0, 1), (7, 7, 9, 9, 0, 0)
    looks = [
        picture(10.0 + at, decode_group(preemptions_total=one, evicted_pages_total=other))
        for at, (one, other) in enumerate(zip(preempted, evicted, strict=True))
    ]
    [found] = memory_series(looks)
    assert found.preempted == (Growth(1.0, 2), Growth(3.0, 3), Growth(5.0, 1)), "a fall is a new start"
    assert found.evicted == (Growth(2.0, 2),)


def shown(*groups: GroupStatus) -> list[str]:
    console = Console(width=140, file=io.StringIO())
    console.print(tables(memory_now(picture(1.0, *groups))))
    return [" ".join(line.split()) for line in console.file.getvalue().splitlines()]


def test_tables_say_it_in_bytes_and_in_tokens() -> None:
    group = decode_group(
        pages_used=8, pages_cached=5, tokens_held=71, preemptions_total=1234, evicted_pages_total=6
    )
    lines = shown(group)
    assert "decode r0 300 KiB 80 KiB 11% 50 KiB 70 KiB 64 KiB 0%" in lines
    assert "decode r1 300 KiB 80 KiB 11% 50 KiB 70 KiB 64 KiB 25%" in lines
    assert "decode 10 200 71 9 50 70 1,234 6" in lines
    ranks = tuple(replace(rank, device_bytes=80 << 30) for rank in group.ranks)
    assert "decode r1 300 KiB 80 KiB 11% 50 KiB 70 KiB 64 KiB 25% 80 GiB" in shown(
        replace(group, ranks=ranks)
    )
    assert shown() == ["no group has reported its memory yet"]


def test_tables_show_states_of_models_that_have_them() -> None:
    lines = shown(with_states(decode_group()), replace(decode_group(), name="other"))
    assert "decode r1 300 KiB 0 B - 0 B 200 KiB 64 KiB 25% 72 MiB 39%" in lines
    assert "decode 40 20 32 8 7" in lines
    assert not any("state" in line for line in shown(decode_group()))


def test_tables_show_lower_tiers_of_groups_that_have_them() -> None:
    group = with_tiers(decode_group(), 10.0)
    assert "decode 50% 12% 25% 80 MiB 20 MiB 4.88 MiB 2.93 MiB 400 KiB 140 KiB 10 3.2 s" in shown(group)
    assert not any("Prefix cache" in line for line in shown(decode_group()))


def test_bytes_of_the_storage_include_recurrent_states() -> None:
    """With 40 + 32 slots and one more for padding rows; all slots have 73 KiB on each of two ranks."""
    group = with_tiers(decode_group(), 10.0)
    ranks = tuple(replace(rank, state_bytes=73 * KIB) for rank in group.ranks)
    states = {"storage_written_states_total": 3, "storage_fetched_states_total": 5}
    group = replace(group, ranks=ranks, state_slots=40, cached_state_slots=32, **states)
    found, without = tier_use(group), tier_use(with_tiers(decode_group(), 10.0))
    assert found is not None
    assert without is not None
    assert found.written_bytes - without.written_bytes == 3 * 2 * KIB
    assert found.fetched_bytes - without.fetched_bytes == 5 * 2 * KIB


def test_hits_of_tiers_over_time() -> None:
    group = decode_group()
    restarted = replace(with_tiers(group, 0.5), host_pages_used=0)
    pictures = [picture(float(at), with_tiers(group, float(at))) for at in (0, 1, 3)]
    [found] = memory_series([*pictures, picture(4.0, restarted)])
    assert found.tiers is not None
    assert found.tiers.at_s == (1.0, 3.0, 4.0)
    assert found.tiers.hits == ((0.5, 0.125, 0.25), (0.5, 0.125, 0.25), (0.0, 0.0, 0.0))
    assert found.tiers.host_used == (0.25, 0.25, 0.0)
    [without] = memory_series([picture(0.0, group)])
    assert without.tiers is None


def test_the_plot_has_a_chart_of_the_tiers(drawn: list[Figure], tmp_path: Path) -> None:
    pictures = [picture(float(at), with_tiers(decode_group(), float(at))) for at in range(4)]
    draw_memory(memory_series(pictures), tmp_path / "tiers.png")
    [figure] = drawn
    memory, tiers = figure.axes
    assert memory.get_title(loc="left") == "decode"
    assert tiers.get_title(loc="left") == "decode: prefix cache"
    labels = [text.get_text() for text in tiers.get_legend().get_texts()]
    assert labels == ["hits in the pool", "hits in host memory", "hits in the storage", "host memory used"]


def test_names_in_tables_command_no_terminal() -> None:
    lines = shown(replace(decode_group(), name="\x1b[2J[red]x"))
    assert "\x1b" not in "".join(lines)
    assert any("[red]x" in line for line in lines)


@pytest.fixture
def drawn(monkeypatch: pytest.MonkeyPatch) -> list[Figure]:
    """The figures that are saved."""
    figures: list[Figure] = []
    save = Figure.savefig

    def keep(figure: Figure, *args: Any, **kwargs: Any) -> None:
        figures.append(figure)
        save(figure, *args, **kwargs)

    monkeypatch.setattr(Figure, "savefig", keep)
    return figures


def looks(device_bytes: int = 0, scale: int = 1) -> list[GroupSeries]:
    pictures = []
    for at in range(6):
        group = decode_group(pages_used=3 * at, tokens_held=29 * at, preemptions_total=max(0, at - 3))
        ranks = tuple(
            replace(r, device_bytes=device_bytes, weights_bytes=scale * r.weights_bytes) for r in group.ranks
        )
        pictures.append(
            replace(
                service(50.0 + at, (1,), ()), groups=(*service(1.0).groups[:1], replace(group, ranks=ranks))
            )
        )
    return memory_series(pictures)


def test_a_chart_for_each_group_with_an_area_for_each_kind(tmp_path: Path, drawn: list[Figure]) -> None:
    groups = looks()
    draw_memory(groups, tmp_path / "memory.png", "tiny")
    assert imread(tmp_path / "memory.png").std() > 0.05
    [figure] = drawn
    assert [axis.get_title("left") for axis in figure.axes] == ["prefill", "decode"]
    assert [axis.get_ylabel() for axis in figure.axes] == ["GiB", "MiB"], "small ones are not all zeros"
    decode = figure.axes[1]
    assert len(decode.collections) == len(KINDS)
    area = decode.collections[KINDS.index("kv_tokens")].get_paths()[0].get_extents()
    weights_mib = 2 * 300 / 1024
    assert (area.y0, area.y1) == pytest.approx((weights_mib, weights_mib + 2 * 29 * 5 / 1024))
    assert (area.x0, area.x1) == (0, 5)
    assert [list(line.get_xdata()) for line in decode.lines[1:]] == [[4.0, 5.0]]
    labels = [text.get_text() for text in figure.legends[0].get_texts()]
    shown = [label for kind, (label, _) in KIND_STYLES.items() if not kind.startswith("state")]
    assert labels == [*shown, "preempted (2)"], "no states"


@pytest.mark.parametrize(("device_bytes", "dashed"), [(MIB, 1), (1 << 36, 0)])
def test_a_limit_is_drawn_where_it_flattens_nothing(
    tmp_path: Path, drawn: list[Figure], device_bytes: int, dashed: int
) -> None:
    draw_memory(looks(device_bytes)[1:], tmp_path / "memory.png")
    [axis] = drawn[0].axes
    assert len([line for line in axis.lines if line.get_linestyle() == "--"]) == dashed
    assert ("usable" in axis.get_title("left")) == (not dashed)


def test_nothing_is_no_chart(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="no group"):
        draw_memory([], tmp_path / "memory.png")
