"""Keys of stored pages: what determines them, and parts that groups of any size share."""

from __future__ import annotations

from dataclasses import replace
from itertools import product

import pytest
from hypothesis import given
from hypothesis import strategies as st

from disagg.core.errors import ConfigError
from disagg.core.prefixes import PrefixKey
from disagg.core.types import KVLayout, LayerClass, StateClass
from disagg.storage.contract import ITEM_BYTES, KEY_BYTES
from disagg.storage.keys import PageKeys, StoredModel, part_name
from disagg.storage.parts import PartGrid
from staging.shards import layout_shards, make_shards

LAYOUT = KVLayout(4, 8, 64, "bfloat16")
STATES = (
    StateClass(3, 2, 96),
    StateClass(1, 1, 8),
    StateClass(5, 8, 32, layer_heads=8, layer_groups=4),
    StateClass(5, 4, 64, joined=True, layer_heads=8, layer_groups=4),
)
"""Two classes of layers that ranks cannot share, and a convolution of 8 heads in 4 groups."""
HYBRID = KVLayout(4, 8, 64, "bfloat16", more=(LayerClass(2, 4, 128),), states=STATES)
MODEL = StoredModel("abc", PartGrid(LAYOUT, 4))
TOKENS = list(range(40))


def keys_of(model: StoredModel, salt: str = "", tokens: list[int] = TOKENS) -> set[bytes]:
    keys = PageKeys(model)
    return set(
        keys.keys(keys.links(PrefixKey.of(tokens, salt)), model.grid.kv_parts + model.grid.state_parts)
    )


def test_all_parts_of_all_pages_differ() -> None:
    model = StoredModel("abc", PartGrid(HYBRID, 4))
    found = keys_of(model)
    assert len(found) == 10 * (8 + 4 + 1 + 1 + 8 + 4)
    assert {len(one) for one in found} == {KEY_BYTES}


def test_the_parts_of_an_item_share_the_beginning_of_their_keys() -> None:
    """Other groups know pages and states by this beginning; a page and the state behind it have different ones."""
    model = StoredModel("abc", PartGrid(HYBRID, 4))
    keys = PageKeys(model)
    links = keys.links(PrefixKey.of(TOKENS))
    for parts, state in ((model.grid.kv_parts, False), (model.grid.state_parts, True)):
        found = keys.keys(links, parts)
        assert found == [keys.part_key(link, part) for link in links for part in parts]
        assert [key[:ITEM_BYTES] for key in found[:: len(parts)]] == [
            keys.item(link, state=state) for link in links
        ]
        assert {key[ITEM_BYTES:] for key in found} == {part_name(part) for part in parts}
    assert len({key[:ITEM_BYTES] for key in keys_of(model)}) == 2 * len(links)


def test_keys_are_the_same_in_every_process() -> None:
    """A changed encoding must change this value knowingly: stored pages are then not found."""
    keys = PageKeys(MODEL)
    link = keys.links(PrefixKey.of(TOKENS, "tenant"))[-1]
    assert keys.part_key(link, MODEL.grid.kv_parts[3]).hex() == EXPECTED


EXPECTED = "0a04b737486f8ccc2a1b81f7fc076fa3236cbe45bbac3e5fa698a5e902332341"


@pytest.mark.parametrize(
    "other",
    [
        replace(MODEL, fingerprint="abd"),
        replace(MODEL, variant="deterministic"),
        replace(MODEL, grid=PartGrid(LAYOUT, 8)),
        replace(MODEL, grid=PartGrid(LAYOUT, 4, unit_heads=2)),
        replace(MODEL, grid=PartGrid(LAYOUT, 4, unit_layers=2)),
        replace(MODEL, grid=PartGrid(KVLayout(4, 8, 64, "float16"), 4)),
        replace(MODEL, grid=PartGrid(KVLayout(4, 8, 64, "int8"), 4)),
        replace(MODEL, grid=PartGrid(HYBRID, 4)),
        replace(MODEL, fingerprint="ab", variant="c"),  # fields are hashed with their lengths
    ],
)
def test_another_model_shares_no_key(other: StoredModel) -> None:
    assert not keys_of(MODEL) & keys_of(other)


def test_tenants_share_no_key() -> None:
    each = [keys_of(MODEL, salt) for salt in ("", "a", "b", "ab")]
    assert len(set.union(*each)) == sum(map(len, each))


@given(st.lists(st.integers(0, 3), max_size=24), st.lists(st.integers(0, 3), max_size=24))
def test_links_are_equal_for_equal_prefixes_only(one: list[int], other: list[int]) -> None:
    keys = PageKeys(MODEL)
    links = [keys.links(PrefixKey.of(tokens)) for tokens in (one, other)]
    for i, j in product(range(len(links[0])), range(len(links[1]))):
        assert (links[0][i] == links[1][j]) == (one[: 4 * i + 4] == other[: 4 * j + 4])


def test_links_go_on_from_a_page() -> None:
    keys, key = PageKeys(MODEL), PrefixKey.of(TOKENS)
    links = keys.links(key)
    assert links[:3] + keys.extended(links[2], key.data[3 * 16 :]) == links
    assert len(keys.links(key.shortened(39))) == 9


@pytest.mark.parametrize(("writers", "readers"), [*product((1, 2, 3, 4, 8, 16), repeat=2)])
@pytest.mark.parametrize("layout", [LAYOUT, HYBRID], ids=["one class", "hybrid"])
def test_a_group_of_any_size_reads_what_another_stored(layout: KVLayout, writers: int, readers: int) -> None:
    grid = PartGrid(layout, 16)
    shards = layout_shards(layout, writers)
    stored = [part for rank in range(writers) for part in grid.parts_to_store(shards, rank)]
    assert sorted(stored) == sorted(grid.kv_parts)  # each part once
    for shard in layout_shards(layout, readers):
        mine = grid.parts_of(shard)
        assert set(mine) <= set(stored)
        assert sum(map(grid.nbytes, mine)) == 16 * layout.token_bytes_of(shard)


def test_stages_read_groups_of_layers() -> None:
    grid = PartGrid(LAYOUT, 16, unit_heads=2, unit_layers=2)
    shards = make_shards(4, 8, tp=2, pp=2)
    stored = [part for rank in range(4) for part in grid.parts_to_store(shards, rank)]
    assert sorted(stored) == sorted(grid.kv_parts)
    with pytest.raises(ConfigError, match="cut through the stored part"):
        PartGrid(LAYOUT, 16).parts_of(shards[0])
    with pytest.raises(ConfigError, match="store smaller parts"):
        grid.parts_of(make_shards(4, 8, tp=8)[1])


def test_states_are_parts_of_one_position() -> None:
    grid = PartGrid(HYBRID, 16)
    assert [grid.nbytes(part) for part in grid.state_parts] == [3 * 2 * 96, 8, *[5 * 32] * 8, *[5 * 64] * 4]
    assert sum(map(grid.nbytes, grid.state_parts)) == HYBRID.state_bytes


@pytest.mark.parametrize(("writers", "readers"), [*product((1, 2, 3, 4, 8, 16), repeat=2)])
def test_a_group_of_any_size_reads_the_states_of_another(writers: int, readers: int) -> None:
    """Groups of 3 ranks hold the divided layers whole too; with more ranks than groups of heads, ranks share one."""
    grid = PartGrid(HYBRID, 16)
    shards = layout_shards(HYBRID, writers)
    stored = [part for rank in range(writers) for part in grid.states_to_store(shards, rank)]
    assert sorted(stored) == sorted(grid.state_parts)  # each part once
    for shard in layout_shards(HYBRID, readers):
        mine = grid.states_of(shard)
        assert set(mine) <= set(stored)
        assert sum(map(grid.nbytes, mine)) == HYBRID.state_bytes_of(readers)


@pytest.mark.parametrize(
    "sizes", [{"unit_heads": 3}, {"unit_layers": 3}, {"unit_heads": 0}, {"page_size": 0}]
)
def test_sizes_that_do_not_divide_are_errors(sizes: dict[str, int]) -> None:
    with pytest.raises(ConfigError):
        PartGrid(LAYOUT, **{"page_size": 16, **sizes})
