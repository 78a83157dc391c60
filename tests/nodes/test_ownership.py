"""A rank that outlives its launch: pulses, claims of other launches, its end without any."""

from __future__ import annotations

import threading
from concurrent.futures import FIRST_COMPLETED, ThreadPoolExecutor, wait

import pytest
from conditions import PATIENCE_S

from decode_node.rank import DecodeRank
from disagg.core.config.read import Config
from disagg.node.host import RankHost
from disagg.node.ownership import DISOWNED, NO_COUNTS, GroupCounts, Owner, Ownership
from transport.keys.curve import make_keys

LAPSE_S = 3.0
FIRST, SECOND, THIRD = Owner("first", 1), Owner("second", 2), Owner("third", 3)


class Time:
    """A clock."""

    def __init__(self) -> None:
        self.now_s = 0.0

    def __call__(self) -> float:
        return self.now_s


@pytest.fixture
def time() -> Time:
    return Time()


@pytest.fixture
def ownership(time: Time) -> Ownership:
    return Ownership(FIRST, LAPSE_S, time)


def test_an_owner_that_lives_keeps_its_rank(ownership: Ownership, time: Time) -> None:
    for _ in range(3):
        time.now_s += LAPSE_S
        assert not ownership.claim(SECOND)
        assert ownership.pulse("first")


def test_a_rank_of_a_dead_owner_is_claimed_once(ownership: Ownership, time: Time) -> None:
    time.now_s = LAPSE_S + 1
    assert ownership.claim(SECOND)
    assert (ownership.epoch, ownership.is_owner("second")) == (2, True)
    assert not ownership.claim(THIRD), "a claim counts as a pulse"
    assert ownership.claim(SECOND._replace(epoch=4)), "the owner may raise its epoch"
    assert ownership.epoch == 4


def test_a_former_owner_s_pulse_is_refused_and_keeps_nothing(ownership: Ownership, time: Time) -> None:
    time.now_s = LAPSE_S + 1
    assert ownership.claim(SECOND)
    time.now_s += LAPSE_S + 1
    assert not ownership.pulse("first")
    assert ownership.claim(THIRD)


def test_a_claim_that_was_late_loses_against_a_higher_epoch(ownership: Ownership, time: Time) -> None:
    time.now_s = LAPSE_S + 1
    assert ownership.claim(THIRD)
    time.now_s += LAPSE_S + 1
    assert not ownership.claim(SECOND)
    assert ownership.is_owner("third")


def test_an_owner_that_was_paused_keeps_a_rank_that_nobody_claimed(ownership: Ownership, time: Time) -> None:
    time.now_s = 10 * LAPSE_S
    assert ownership.pulse("first")
    assert not ownership.claim(SECOND)


def test_a_rank_is_abandoned_when_the_pulses_end() -> None:
    ownership, abandoned = Ownership(FIRST, LAPSE_S), threading.Event()

    def wait() -> None:
        ownership.wait_abandoned(0.5)
        abandoned.set()

    threading.Thread(target=wait, daemon=True).start()
    for _ in range(20):
        assert not abandoned.wait(0.05), "the owner lives"
        ownership.pulse("first")
    assert abandoned.wait(PATIENCE_S)


class Host(RankHost):
    """A rank without a model."""

    role = "decode"

    @staticmethod
    def rank_class() -> type[DecodeRank]:
        return DecodeRank


def test_a_later_park_of_the_owner_ends_the_earlier_one(time: Time) -> None:
    host = Host(0, Config(), make_keys(), "decode-7", FIRST, clock=time)
    with ThreadPoolExecutor(3) as threads:
        earlier = threads.submit(host.park, "first")
        later = threads.submit(host.park, "first")
        done, _ = wait([earlier, later], PATIENCE_S, FIRST_COMPLETED)
        assert [one.result() for one in done] == [""]
        assert host.park("another launch") == DISOWNED
        assert not (earlier.done() and later.done())
        host.stop(0.0)
        assert (earlier.result(PATIENCE_S), later.result(PATIENCE_S)) == ("", "")


def test_park_of_a_former_owner_ends_and_the_new_owner_s_does_not(time: Time) -> None:
    keys = make_keys()
    config = Config()
    host = Host(0, config, keys, "decode-7", FIRST, clock=time)
    with ThreadPoolExecutor(2) as threads:
        former = threads.submit(host.park, "first")
        refused = host.claim(SECOND)
        assert (refused.epoch, refused.record) == (1, None)
        counts = GroupCounts(1, {"decode": 3})
        assert host.pulse("first", counts)
        assert not host.pulse("stranger", NO_COUNTS)
        time.now_s += config.cluster.hang_timeout_s + 1.0  # its pulse has lapsed
        granted = host.claim(SECOND)
        assert former.result(PATIENCE_S) == DISOWNED
        assert not host.pulse("first")
        owners = threads.submit(host.park, "second")
        host.stop(0.0)
        assert owners.result(PATIENCE_S) == ""
    assert granted.epoch == 2
    assert granted.record is not None
    assert granted.record.unusable == "its start or its end was interrupted"
    assert granted.record.counts == counts, "of the former owner's latest pulse"
    assert granted.record.keys == {keys.name}
