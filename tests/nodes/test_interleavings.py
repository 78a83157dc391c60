"""Every order of events: seeded runs of both groups in one thread (see `interleaved_runs`).

`make test` runs one seed of each kind of trouble that no other kind contains, `make test-slow` all the others.
"""

from __future__ import annotations

import itertools
import random

import pytest
from interleaved_runs import CONTAINED, ENDS, STRIKES, add_faults, config_of, damage, ends_of, run_seeds
from simulated_groups import Simulation
from slow_parameters import sampled

from disagg.core.types import SamplingParams
from disagg.node.leader import Leader
from transport.control import messages as m

SEEDS = 40
SEEDS_OF = {
    "abort and fail": 60,
    "abort fail death": 60,
    "messages fail": 60,
    "crowded": 5,
    "crowded abort": 5,
    "crowded death": 45,
    "crowded deadline": 5,
}
"""Of kinds of trouble with a rare end, or with a longer run."""


def first_seeds(what: str) -> tuple[int, ...]:
    """The seeds in `make test`: short runs. Half of the kinds have recurrent states and peer memory, the others have
    several layer classes."""
    if "crowded" in what or "back" in what:
        return (2,)
    if "storage" in what:  # with and without states in it
        return (3, 12)
    if what == "messages fail":  # a frame that fails has a lease request or a grant
        return (4,)
    if list(ENDS).index(what) % 2 and what != "silence":  # seed 12 ends before the silence
        return (12,)
    return (1,) if "tiers" in what else (3,)


def other_seeds(what: str) -> list[int]:
    """The seeds in `make test-slow`."""
    return [seed for seed in range(SEEDS_OF.get(what, SEEDS)) if seed not in first_seeds(what)]


@pytest.mark.parametrize("what", sampled(ENDS, lambda what: what not in CONTAINED))
def test_any_order(what: str) -> None:
    ends = ends_of(run_seeds(first_seeds(what), what))
    assert ends <= ENDS[what]
    assert ends != {"done"} or ENDS[what] == {"done"}, "the trouble struck some request"


@pytest.mark.slow
@pytest.mark.parametrize("what", ENDS)
def test_any_order_of_many(what: str) -> None:
    requests = run_seeds(other_seeds(what), what)
    assert ends_of(requests) == ENDS[what], "each of these ends must occur, and no other"
    shared = sum(request.ticket is not None and request.ticket.tokens.start > 0 for request in requests)
    few = "crowded" in what or STRIKES & set(what.split())  # few requests end before another one begins
    assert shared or few, "some prompts had a prefix in the decode group's cache"


def test_the_simulation_reaches_what_it_is_for() -> None:
    """Over these seeds every message between ranks and leaders occurs, except those of a broken step or link.

    The directory's messages pass between routers and the launcher only; those for metrics depend on the clock.
    """
    seen: set[type[m.Message]] = set()
    post = Leader.post

    def seen_post(leader: Leader, peer: str, message: m.Message) -> bool:
        seen.add(type(message))  # of rank 0, which passes it to the leader in its own process
        return post(leader, peer, message)

    for seed, what in [
        *itertools.product((3, 7), ("abort and fail", "short")),  # most other seeds have no `PoolRefused`
        (0, "crowded"),
        (0, "answers"),
        (0, "damage"),
    ]:
        with pytest.MonkeyPatch.context() as patch:
            choose = random.Random(seed)
            patch.setattr(Leader, "post", seen_post)
            simulation = Simulation(config_of(choose, seed % 2 == 1, what == "crowded"), seed, patch)
            add_faults(simulation, what, choose)
            if what == "damage":
                damage(simulation, what, patch, seed)
            simulation.probe()
            size = (10, 70) if what == "crowded" else (40, 3)
            sampling = SamplingParams(
                max_tokens=size[1],
                n=2 if what == "answers" else 1,
                prompt_logprobs=1 if what == "crowded" else None,
            )
            requests = [simulation.router.submit(size[0], sampling) for _ in range(3)]
            for _ in range(400):
                simulation.step()
            simulation.router.end(requests[0], "aborted")
            while what == "answers" and not (requests[1].over or requests[1].stopped):
                simulation.step()
                simulation.router.stop(requests[1], 0)
            simulation.settle()
            seen.update(type(message) for message in simulation.seen)
    directory = {m.Join, m.Groups, m.Using, m.Scale, m.Scaled, m.Roll, m.StopRoll, m.RollStep, m.Rolled}
    metrics = {m.Watch, m.RankReport, m.GroupReport, m.CacheDigest}
    broken = {m.RankBroken, m.LinkBroken}  # no step breaks here, and the fabric keeps every connection
    storage = {m.StorageMoved}  # of groups with a storage, which the kinds `tiers storage` have
    engines = {m.EngineGroups, m.PushRequest, m.PushCancelled}  # of other projects' engines
    sharing = {m.WatchItems, m.HeldItems}  # of groups that share host memory
    profiles = {m.Profile, m.ProfileProgress, m.Profiled, m.ProfileFailed}  # an operator asks for them
    tails = {m.Arriving}  # of prompts that both groups compute, which the kind `split` has
    absent = broken | directory | metrics | storage | engines | sharing | profiles | tails
    assert set(m.MESSAGE_TYPES) - seen == absent
