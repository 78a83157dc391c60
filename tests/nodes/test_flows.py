"""What a sender counts: busy time of things that overlap, flows by path, transfer that compute did not hide."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st

from disagg.core.status import RouteStatus
from prefill_node.exposed import Exposed
from prefill_node.flows import BusyTime, Flows


@settings(max_examples=50)
@given(st.lists(st.tuples(st.integers(0, 50), st.integers(0, 20)), max_size=12))
def test_busy_is_the_union_of_what_overlaps(spans: list[tuple[int, int]]) -> None:
    busy = BusyTime()
    events = sorted([(start, 1) for start, _ in spans] + [(start + length, 2) for start, length in spans])
    before = 0.0
    for moment, event in events:
        (busy.begin if event == 1 else busy.end)(moment)
        assert busy.total_s(moment) >= before, "a total never falls"
        before = busy.total_s(moment)
    covered = {tick for start, length in spans for tick in range(start, start + length)}
    assert busy.total_s(1000) == len(covered)


def test_busy_grows_while_something_is_under_way() -> None:
    busy = BusyTime()
    busy.begin(3.0)
    assert (busy.total_s(3.5), busy.total_s(5.0)) == (0.5, 2.0)
    busy.end(6.0)
    assert busy.total_s(100.0) == 3.0


def test_flows_are_reported_by_path_and_forgotten_with_their_peer() -> None:
    flows, paths = Flows(), {"a": "staged", "b": "peer"}
    flows.link("a", "decode r0")
    flows.link("b", "decode r1")

    def routes() -> tuple[RouteStatus, ...]:
        return flows.statuses(10.0, lambda peer: paths[peer])  # type: ignore[return-value, arg-type]

    assert routes() == (RouteStatus("decode r0", "staged"), RouteStatus("decode r1", "peer"))
    paths["a"] = "peer"
    assert routes()[0] == RouteStatus("decode r0", "peer"), "the other path was never taken"
    held = flows.of("a", "staged")
    held.nbytes, held.segments = 512, 1
    assert [route.path for route in routes()] == ["peer", "staged", "peer"]
    assert routes()[1].bytes_total == 512
    flows.forget("a")
    held.nbytes += 512  # a segment of it that was still under way
    assert routes() == (RouteStatus("decode r1", "peer"),)
    flows.link("a", "decode r0")
    assert routes()[0].bytes_total == 0, "another rank of the same address begins anew"


@dataclass(eq=False)
class Prompt:
    """As much of an `Outgoing` as is needed."""

    all_computing: bool = True
    computed_s: float | None = None


class Event:
    """A marker on the device."""

    done = False

    def query(self) -> bool:
        return self.done


def test_exposed_begins_when_the_last_kv_is_written() -> None:
    exposed, first, second, unfinished = Exposed(), Event(), Event(), Event()
    one: Any = Prompt()
    other: Any = Prompt()
    exposed.computed([Prompt(all_computing=False)], unfinished, 0.5)  # type: ignore[list-item]
    assert not exposed, "another chunk follows"
    exposed.computed([one], first, 1.0)
    exposed.computed([other], second, 1.5)
    exposed.poll(2.0)
    assert (one.computed_s, other.computed_s) == (None, None)
    first.done = True
    exposed.poll(3.0)
    assert (one.computed_s, other.computed_s) == (3.0, None)
    exposed.poll(3.5)
    exposed.finished(one, 4.0)
    assert exposed.total_s == 1.0
    second.done = True
    exposed.finished(other, 5.0)  # found to be written only now
    assert exposed.total_s == 1.0
    assert not exposed


def test_a_prompt_that_had_nothing_to_send_exposes_nothing() -> None:
    exposed, nothing = Exposed(), Prompt()
    exposed.finished(nothing, 4.0)  # type: ignore[arg-type]
    assert exposed.total_s == 0.0
