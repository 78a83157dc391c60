"""Placement, policy, text and KV manager: the parts that decide without doing."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from disagg.cluster.placement import choose_placement, place_colocated
from disagg.core.errors import BusyError, ConfigError, InvariantError
from disagg.core.prefixes import PrefixKey
from disagg.core.types import PROTOCOL_VERSION, GroupInfo, KVLayout, RankInfo, Shard, Span
from disagg.node.block_table import BlockTable
from disagg.node.kv_manager import KVManager
from disagg.router.policy import POLICIES, Policy, RoutedGroup, RoutingRequest, least_loaded, round_robin
from disagg.router.text import TextStream


@pytest.mark.parametrize(
    ("gpus", "sizes", "expected"),
    [
        (0, (None, None), (2, 1, 0.0, 0.0, "shared", "shared")),
        (0, (1, 3), (1, 3, 0.0, 0.0, "shared", "shared")),
        (1, (None, None), (1, 1, 0.5, 0.5, "shared", "shared")),
        (1, (2, 1), (2, 1, 0.3333, 0.3333, "shared", "shared")),
        (2, (None, None), (1, 1, 1.0, 1.0, "nccl", "nccl")),
        (2, (2, 1), (2, 1, 0.5, 1.0, "shared", "nccl")),
        (2, (1, 2), (1, 2, 1.0, 0.5, "nccl", "shared")),
        (2, (2, 2), (2, 2, 0.5, 0.5, "shared", "shared")),
        (3, (None, None), (2, 1, 1.0, 1.0, "nccl", "nccl")),
        (8, (4, 2), (4, 2, 1.0, 1.0, "nccl", "nccl")),
    ],
)
def test_placement(
    gpus: int, sizes: tuple[int | None, int | None], expected: tuple[int, int, float, float, str, str]
) -> None:
    placed = choose_placement(gpus, *sizes)
    found = (
        placed.prefill.tp,
        placed.decode.tp,
        placed.prefill.gpus_per_rank,
        placed.decode.gpus_per_rank,
        placed.prefill.backend,
        placed.decode.backend,
    )
    assert found == expected
    assert placed.prefill.device == placed.decode.device == ("cuda" if gpus else "cpu")


@given(st.integers(1, 8), st.integers(1, 8), st.integers(1, 8))
def test_placement_never_asks_for_more_than_there_is(gpus: int, prefill: int, decode: int) -> None:
    """Ranks of a share below one are packed, as many to a GPU as fit."""
    placed = choose_placement(gpus, prefill, decode)
    if gpus == 1:
        assert placed.prefill.gpus_per_rank * prefill + placed.decode.gpus_per_rank * decode <= 1
        return
    whole = sum(
        -(-group.tp // max(1, int(1 / group.gpus_per_rank))) for group in (placed.prefill, placed.decode)
    )
    assert whole <= gpus


def test_placement_on_a_cpu_by_wish_and_on_a_gpu_that_is_not_there() -> None:
    assert choose_placement(4, device="cpu").prefill.device == "cpu"
    with pytest.raises(ConfigError, match="no GPU"):
        choose_placement(0, device="cuda")


ASKING = RoutingRequest(5, "session")


def engine(name: str, **changes: int | bool) -> RoutedGroup:
    rank = RankInfo(0, Shard(0, Span(0, 1), Span(0, 1)), name, b"")
    info = GroupInfo(name, "prefill", PROTOCOL_VERSION, "f", KVLayout(1, 1, 1, "float32"), 1, "ucx", (rank,))
    one = RoutedGroup(info)
    for field, value in changes.items():
        setattr(one, field, value)
    return one


def test_least_loaded() -> None:
    assert least_loaded([engine("a", tokens=5), engine("b", tokens=4)], ASKING).group.name == "b"
    assert least_loaded([engine("a", requests=2), engine("b", requests=1)], ASKING).group.name == "b"
    assert least_loaded([engine("a"), engine("b")], ASKING).group.name == "a"
    assert least_loaded([engine("a", lost=True), engine("b", tokens=9)], ASKING).group.name == "b"
    with pytest.raises(BusyError, match="prefill"):
        least_loaded([engine("a", lost=True)], ASKING)


def test_round_robin() -> None:
    engines = [engine("a"), engine("b"), engine("c", lost=True), engine("d", draining=True)]
    chosen = []
    for _ in range(5):
        one = round_robin(engines, ASKING)
        one.served += 1
        chosen.append(one.group.name)
    assert chosen == ["a", "b", "a", "b", "a"]


@pytest.mark.parametrize("choose", POLICIES.values())
def test_a_group_that_drains_is_given_nothing(choose: Policy) -> None:
    assert choose([engine("a", draining=True), engine("b", tokens=9)], ASKING).group.name == "b"
    with pytest.raises(BusyError, match="prefill"):
        choose([engine("a", draining=True)], ASKING)


@pytest.mark.parametrize(
    ("gpus", "sizes", "groups", "expected"),
    [
        (0, (1, 1), (2, 3), (1, 1, 0.0, "shared")),
        (8, (2, 1), (2, 4), (2, 1, 1.0, "nccl")),
        (8, (None, None), (2, 2), (1, 1, 1.0, "nccl")),
        (4, (2, 1), (2, 1), (2, 1, 0.5, "shared")),
    ],
)
def test_placement_of_several_groups(
    gpus: int, sizes: tuple[int | None, int | None], groups: tuple[int, int], expected: object
) -> None:
    placed = choose_placement(gpus, *sizes, groups=groups)
    assert (placed.prefill.groups, placed.decode.groups) == groups
    assert (
        placed.prefill.tp,
        placed.decode.tp,
        placed.prefill.gpus_per_rank,
        placed.prefill.backend,
    ) == expected


@pytest.mark.parametrize(
    ("gpus", "tp", "groups", "expected"),
    [
        (0, None, 2, (1, "cpu", 0.0, "shared")),
        (2, 1, 2, (1, "cuda", 1.0, "nccl")),
        (2, 2, 2, (2, "cuda", 0.5, "shared")),
        (8, None, 1, (1, "cuda", 1.0, "nccl")),
    ],
)
def test_placement_of_colocated_groups(
    gpus: int, tp: int | None, groups: int, expected: tuple[int, str, float, str]
) -> None:
    placement = place_colocated(gpus, tp, groups=groups)
    placed = placement.kinds["colocated"]
    assert (placed.tp, placed.device, placed.gpus_per_rank, placed.backend) == expected
    assert placement.ranks == expected[0] * groups


def test_colocated_ranks_asked_to_run_on_gpus_need_some() -> None:
    assert place_colocated(4, device="cpu").kinds["colocated"].device == "cpu"
    with pytest.raises(ConfigError, match="shows no GPU"):
        place_colocated(0, device="cuda")


def decode_bytes(tokens: object) -> str:
    return bytes(tokens).decode(errors="replace")  # type: ignore[call-overload, no-any-return]


@given(st.text(max_size=20), st.integers(1, 5))
def test_text_comes_out_whole_whatever_the_pieces(text: str, step: int) -> None:
    data = text.encode(errors="ignore")
    stream, pieces = TextStream(decode_bytes), []
    for start in range(0, len(data), step):
        piece = stream.push(data[start : start + step])
        assert "\ufffd" not in piece or "\ufffd" in text, "half a character never comes out"
        pieces.append(piece)
    pieces.append(stream.push(b"", last=True))
    assert "".join(pieces) == data.decode()


@given(st.integers(1, 4))
def test_a_stop_string_and_what_follows_never_come_out(step: int) -> None:
    data = b"one two STOP three"
    stream, out = TextStream(decode_bytes, ("STOP", "never")), ""
    for start in range(0, len(data), step):
        out += stream.push(data[start : start + step])
        assert "S" not in out, "the beginning of a stop string is held back"
    assert out == "one two "
    assert stream.stopped
    assert stream.push(b"more") == ""


def test_what_only_looked_like_a_stop_string_comes_out() -> None:
    stream = TextStream(decode_bytes, ("abcd",))
    assert [stream.push(b"xab"), stream.push(b"c"), stream.push(b"x"), stream.push(b"ab", last=True)] == [
        "x",
        "",
        "abcx",
        "ab",
    ]


def test_the_first_of_several_stop_strings_counts() -> None:
    stream = TextStream(decode_bytes, ("zz", "b"))
    assert stream.push(b"abzz") == "a"


def test_kv_manager_gives_both_or_none() -> None:
    kv_manager = KVManager(pool_tokens=64, page_size=16, rows=2)
    assert kv_manager.capacity_tokens == 64
    first = kv_manager.reserve(33)
    assert first is not None
    assert len(first.pages) == 3
    assert kv_manager.reserve(17) is None, "two pages are not there"
    second = kv_manager.reserve(16)
    assert second is not None
    assert kv_manager.reserve(0) is None, "no row is left"
    kv_manager.check([[first], [second]])
    with pytest.raises(InvariantError):
        kv_manager.check([[first]])
    kv_manager.release(first)
    with pytest.raises(ValueError, match="released twice"):
        kv_manager.release(first)
    kv_manager.release(second)
    kv_manager.check([])
    assert kv_manager.statistics().free_rows == 2


def test_kv_manager_begins_with_what_is_cached_and_evicts_the_rest_when_it_must() -> None:
    kv_manager = KVManager(pool_tokens=64, page_size=16, rows=3, eviction="lru")
    prompt, other = PrefixKey.of(range(40)), PrefixKey.of(range(100, 140))
    first = kv_manager.reserve(40, prompt)
    assert first is not None
    assert first.cached_tokens == 0
    kv_manager.keep(first, prompt)
    second = kv_manager.reserve(33, PrefixKey.of(range(33)))
    assert second is not None
    assert second.cached_tokens == 32
    assert second.pages[:2] == first.pages[:2]
    assert second.pages[2] != first.pages[2], "the last page is its own"
    kv_manager.check([[first], [second]])
    before = kv_manager.statistics()
    assert kv_manager.reserve(40, other) is None, "what is read cannot be evicted"
    assert kv_manager.statistics() == before
    kv_manager.release(first)
    kv_manager.release(second)
    third = kv_manager.reserve(64, other)
    assert third is not None
    assert kv_manager.statistics().cache.evicted_pages == 2
    kv_manager.release(third)
    kv_manager.check([])


def test_kv_manager_leaves_a_token_to_compute() -> None:
    kv_manager = KVManager(pool_tokens=64, page_size=16, rows=3, eviction="lru")
    prompt = PrefixKey.of(range(32))
    first = kv_manager.reserve(32, prompt)
    kv_manager.keep(first, prompt)
    again = kv_manager.reserve(32, prompt)
    assert again.cached_tokens == 16
    kv_manager.keep(again, prompt)
    kv_manager.release(again)
    kv_manager.release(first)
    assert kv_manager.statistics().cache.cached_pages == 2, "its second copy of the last page is gone"
    kv_manager.check([])


def test_kv_manager_detects_a_page_owned_twice() -> None:
    kv_manager = KVManager(pool_tokens=64, page_size=16, rows=2)
    one = kv_manager.reserve(16)
    assert one is not None
    with pytest.raises(InvariantError):
        kv_manager.check([[one], [BlockTable(1, one.sequence)]])


def test_kv_manager_detects_a_lost_reference() -> None:
    kv_manager = KVManager(pool_tokens=64, page_size=16, rows=2)
    one = kv_manager.reserve(16)
    assert one is not None
    kv_manager.allocator.share(one.pages)  # nobody drops it
    with pytest.raises(InvariantError):
        kv_manager.check([[one]])
