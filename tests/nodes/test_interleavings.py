"""Every order of events: thousands of seeded runs of both groups in one thread (see `simulated_groups`).

Whatever the order, tokens are exact or the request ends with an error, no byte is read or written after its page,
staging or ring space was freed, and at the end nothing is left anywhere. A failure names its seed: the run repeats.
"""

from __future__ import annotations

import itertools
import random
from collections import Counter

import msgspec
import pytest
from bit_flips import install
from local_groups import small_config
from simulated_groups import Simulation
from simulated_router import SimulatedRequest

from decode_node.incoming import Incoming
from disagg.core.config import Config
from disagg.core.errors import TransportError
from disagg.core.types import SamplingParams, Segment
from prefill_node.probe import Probed
from transport import messages as m
from transport.inproc import InprocTransport
from transport.tags import is_letter

STEPS = 1500
SEEDS = 40
SEEDS_OF = {
    "abort fail death": 60,
    "letters fail": 60,
    "crowded": 5,
    "crowded abort": 5,
    "crowded death": 6,
    "crowded deadline": 5,
}
"""Where an end is rarer, or a run longer."""
CROWDED_TOKENS = 96


def config_of(choose: random.Random, peer_memory: bool, crowded: bool = False) -> Config:
    """Small in every way, so that requests wait for pages, rows, ring and staging; `crowded`: answers for pages."""
    config = small_config(
        choose.choice([1, 2, 3]),
        choose.choice([1, 2, 3]),
        prefill_page=choose.choice([1, 4, 16]),
        decode_page=choose.choice([1, 4, 16]),
        chunk_tokens=choose.choice([5, 16, 64]),
        pool_tokens=CROWDED_TOKENS if crowded else choose.choice([96, 256]),
        ring_bytes=4096,
        layer_groups=choose.choice([1, 2, 3]),
        max_requests=choose.choice([2, 6]),
        peer_memory=peer_memory,
    )
    transfer = msgspec.structs.replace(
        config.transfer,
        max_segment_bytes=choose.choice([0, 256, 1024]),
        segment_overhead_s=choose.choice([0.0, 1.0]),  # with 1, in one group below 2.25 KB
        wire_bytes_per_s=1e3,
    )
    decode = msgspec.structs.replace(
        config.decode,
        preemption=choose.choice(["auto", "recompute", "swap", "swap"]),
        swap_bytes=choose.choice([0, 8192, 1 << 20]),
        chunk_tokens=choose.choice([7, 64]),
        max_requests=6 if crowded else config.decode.max_requests,
    )
    return msgspec.structs.replace(config, transfer=transfer, decode=decode)


def add_faults(simulation: Simulation, what: str, choose: random.Random) -> None:
    faults = simulation.fabric.faults
    first = choose.randrange(12)
    if "fail" in what:  # one after the other, as when a connection breaks
        letters = "letters" in what
        for nth in range(first, first + choose.choice([1, 2, 5])):
            faults.fail_send(nth, lambda source, destination, tag: is_letter(tag) == letters)
    if "repeat" in what:
        faults.duplicate(first)
        faults.duplicate(first + 3)
    if "short" in what:
        faults.truncate(8, first, lambda source, destination, tag: not is_letter(tag))


def damage(simulation: Simulation, what: str, patch: pytest.MonkeyPatch, seed: int) -> None:
    """Bits of segments and of checksums, of some when they come first; with `twice` also when they come again."""
    generator = random.Random(seed)
    simulation.damages = True

    def choose(incoming: Incoming, segment: Segment, again: bool) -> int | None:
        if again and ("twice" not in what or generator.random() < 0.5):
            return None
        return generator.randrange(-64, 8 * segment.nbytes) if generator.random() < 0.4 else None

    install(patch, choose)


STRIKES = {"death", "host", "fence", "silence", "leaders", "router"}


def no_fence(self: InprocTransport, peer: str) -> None:
    raise TransportError(f"{peer} cannot be fenced")


def strike(simulation: Simulation, what: str, choose: random.Random) -> None:
    if "host" in what:
        role = choose.choice(["prefill", "decode"])
        for name in [n for n in sorted(simulation.ranks) if n.startswith(role)]:
            simulation.kill(name)
    if "death" in what or "fence" in what:
        simulation.kill(choose.choice(sorted(simulation.ranks)))
    if "leaders" in what:
        simulation.part("prefill-0", "decode-0")
    if "silence" in what:
        sides = [
            [n for n in sorted(simulation.ranks) if n.startswith(role)] for role in ("prefill", "decode")
        ]
        simulation.part(*(choose.choice(side) for side in sides))
    if "router" in what:
        simulation.kill_router()


def sampling_of(
    simulation: Simulation, prompt_tokens: int, max_tokens: int, choose: random.Random
) -> SamplingParams:
    """Mostly one answer; now and then several, or a beam search, of as many tokens as the group takes."""
    kind = choose.choice(["one", "one", "several", "beams"])
    most, group = simulation.groups[1].leader.max_sequences, simulation.config.decode
    count = choose.randint(2, 4)
    left_tokens = group.pool_tokens - prompt_tokens - count * group.page_size
    fitting_tokens = min(max_tokens, left_tokens // count - group.page_size, 12 if kind == "beams" else 100)
    if kind == "one" or most < count or fitting_tokens < 1:
        return SamplingParams(max_tokens=max_tokens)
    if kind == "beams":
        return SamplingParams(max_tokens=fitting_tokens, beams=count, n=choose.randint(1, count))
    return SamplingParams(max_tokens=fitting_tokens, n=count, temperature=1.0, seed=choose.randrange(100))


def run(
    seed: int,
    what: str,
    patch: pytest.MonkeyPatch,
    probed: list[Probed] | None = None,
    kv_dtype: str = "model",
) -> list[SimulatedRequest]:
    """One run: requests come and go, faults strike; then everything settles, and every answer is compared.

    In a crowded one answers outgrow the pool, and requests are preempted all the time.

    Every third model without a state has layers of three classes.

    With `probed`, which takes their ends, ranks time their wires in between. `kv_dtype` is the decode group's.
    """
    choose = random.Random(seed)
    crowded = "crowded" in what
    config = config_of(choose, seed % 2 == 1, crowded)
    decode = msgspec.structs.replace(config.decode, kv_dtype=kv_dtype)
    state_tokens = seed // 2 % 2 * 7 if kv_dtype == "model" else 0  # a state cannot be quantized
    more = ((2, 1), (4, 5)) if seed % 3 == 0 and not state_tokens else ()
    simulation = Simulation(
        msgspec.structs.replace(config, decode=decode), seed, patch, state_tokens=state_tokens, more=more
    )
    add_faults(simulation, what, choose)
    if "damage" in what:
        damage(simulation, what, patch, seed)
    if "fence" in what:
        patch.setattr(InprocTransport, "disconnect", no_fence)
    pace = 4 if crowded else 1  # answers are longer, so less happens to each token
    left, kill_at = choose.choice([2, 4, 7]), choose.randrange(100, 4000)
    if crowded:
        left, kill_at = 7, choose.randrange(5000, 15000)
    prompts, answers = (range(1, 17), [70]) if crowded else (range(1, 60), [1, 5, 30])
    often = 0.03 if seed % 8 > 1 else 0.006 / pace  # else some come when others have ended, and left their KV
    requests: list[SimulatedRequest] = []
    for step in range(kill_at + 200 if STRIKES & set(what.split()) else pace * STEPS):
        if left and choose.random() < often:
            left -= 1
            answer, limit_s = choose.choice(answers), 0.3 * pace * choose.random()
            limits = {"deadline_s": limit_s} if "deadline" in what else {}
            prompt_tokens = choose.choice(prompts)
            sampling = sampling_of(simulation, prompt_tokens, answer, choose)
            requests.append(simulation.router.submit(prompt_tokens, sampling, **limits))
        if requests and choose.random() < 0.002 / pace:
            request = choose.choice(requests)
            if request.sampling.n > 1 and not request.sampling.beams:
                simulation.router.stop(request, choose.randrange(request.sampling.n))
        if "abort" in what and requests and choose.random() < 0.002 / pace:
            simulation.router.end(choose.choice(requests), "aborted")
        if probed is not None and choose.random() < 0.01:
            simulation.probe()
        if step == kill_at:
            strike(simulation, what, choose)
            left = 0 if "router" in what else left  # nobody is there to submit to
        simulation.step()
        if step % 100 == 0:
            simulation.check()
    simulation.settle()
    for request in requests:
        assert simulation.router.exact(request), request
    if probed is not None:
        probed += simulation.probed
    return requests


ENDS = {
    "nothing": {"done"},
    "repeat": {"done"},
    "abort": {"done", "aborted"},
    "abort and repeat": {"done", "aborted"},
    "fail": {"done", "transport"},
    "abort and fail": {"done", "aborted", "transport"},
    # A prompt with a cached beginning asks in two letters at once: without the first, the second leaves a gap.
    "letters fail": {"done", "transport", "protocol"},
    "short": {"done", "protocol"},
    "death": {"done", "peer_lost"},
    "abort fail death": {"done", "aborted", "transport", "peer_lost"},
    "host": {"done", "peer_lost"},
    "fence": {"done", "peer_lost"},
    "leaders": {"done", "peer_lost"},
    "silence": {"done", "peer_lost"},
    "router": {"done", "gone"},
    "deadline": {"done", "timeout"},
    "crowded": {"done"},
    "crowded abort": {"done", "aborted"},
    "crowded death": {"done", "peer_lost"},
    "crowded deadline": {"done", "timeout"},
}
"""How requests may end, for each kind of trouble."""


@pytest.mark.parametrize("what", ENDS)
def test_any_order(what: str) -> None:
    ends: Counter[str] = Counter()
    shared = 0
    for seed in range(SEEDS_OF.get(what, SEEDS)):
        with pytest.MonkeyPatch.context() as patch:
            try:
                requests = run(seed, what, patch)
            except Exception as error:
                error.add_note(f"with {what}: run(seed={seed}, ...)")
                raise
        ends.update(request.ended for request in requests)
        shared += sum(request.ticket is not None and request.ticket.tokens.start > 0 for request in requests)
    assert set(ends) == ENDS[what], "each of these ends must occur, and no other"
    assert shared or "crowded" in what, "some found a beginning in the decode group's cache"


def run_damaged(what: str, seeds: range) -> Counter[str]:
    """How requests ended. Segments are damaged; with `twice` some come damaged again."""
    ends: Counter[str] = Counter()
    for seed in seeds:
        with pytest.MonkeyPatch.context() as patch:
            try:
                requests = run(seed, f"damage {what}", patch)
            except Exception as error:
                error.add_note(f"run(seed={seed}, 'damage {what}', ...)")
                raise
        ends.update(request.ended for request in requests)
    return ends


DAMAGED = {kind: ends for kind, ends in ENDS.items() if "crowded" not in kind} | {"crowded": {"done"}}


@pytest.mark.parametrize("what", DAMAGED)
def test_damaged_segments_in_any_order(what: str) -> None:
    """They are sent once more, whatever else happens: requests end as they do without damage."""
    ends = run_damaged(what, range(2 if "crowded" in what else 6))
    assert ends
    assert set(ends) <= DAMAGED[what]


@pytest.mark.slow
@pytest.mark.parametrize("what", DAMAGED)
def test_damaged_segments_in_many_orders(what: str) -> None:
    ends = run_damaged(what, range(6, 20 if "crowded" in what else 80))
    assert set(ends) == DAMAGED[what]


@pytest.mark.parametrize(
    ("what", "others"),
    [("nothing", set()), ("abort and fail", {"aborted", "transport"})],
    ids=["nothing", "abort and fail"],
)
def test_segments_that_are_damaged_twice_in_any_order(what: str, others: set[str]) -> None:
    ends = run_damaged(f"twice {what}", range(15))
    assert {"done", "checksum"} <= set(ends) <= {"done", "checksum"} | others


@pytest.mark.parametrize(
    "what", ["nothing", "abort and fail", "death", "crowded abort", "damage abort", "damage fail"]
)
def test_kv_that_is_quantized_on_its_way_in_any_order(what: str) -> None:
    """Codes that arrive, are shared, swapped out and come back, beside floats that are computed: all are exact."""
    ends: Counter[str] = Counter()
    for seed in range(3 if "crowded" in what else 12):
        with pytest.MonkeyPatch.context() as patch:
            try:
                requests = run(seed, what, patch, kv_dtype="int8")
            except Exception as error:
                error.add_note(f"with {what}: run(seed={seed}, ..., kv_dtype='int8')")
                raise
        ends.update(request.ended for request in requests)
    assert "done" in ends
    assert set(ends) <= ENDS[what.removeprefix("damage ")]


@pytest.mark.parametrize("what", ["nothing", "fail", "letters fail", "abort fail death", "fence", "silence"])
def test_wires_are_timed_in_any_order(what: str) -> None:
    """Beside requests and whatever happens to them: they stay exact, and nothing of a probe is left."""
    probed: list[Probed] = []
    for seed in range(6, 12):
        with pytest.MonkeyPatch.context() as patch:
            try:
                run(seed, what, patch, probed)
            except Exception as error:
                error.add_note(f"with {what}: run(seed={seed}, ..., [])")
                raise
    assert any(one.wire for one in probed), "some went through"
    assert any(one.why for one in probed), "and some did not"


def test_the_simulation_reaches_what_it_is_for() -> None:
    """Over the seeds every message occurs that ranks and leaders have for each other, but for a broken step.

    Those of the directory are between routers and the launcher only; those for metrics go by the clock.
    """
    seen: set[type[m.Message]] = set()
    for seed, what in [
        *itertools.product(range(10), ("abort and fail", "short")),
        (0, "crowded"),
        (0, "answers"),
        *itertools.product(range(2), ("damage",)),
    ]:
        with pytest.MonkeyPatch.context() as patch:
            choose = random.Random(seed)
            simulation = Simulation(config_of(choose, seed % 2 == 1, what == "crowded"), seed, patch)
            add_faults(simulation, what, choose)
            if what == "damage":
                damage(simulation, what, patch, seed)
            simulation.probe()
            size = (10, 70) if what == "crowded" else (40, 3)
            sampling = SamplingParams(max_tokens=size[1], n=2 if what == "answers" else 1)
            requests = [simulation.router.submit(size[0], sampling) for _ in range(3)]
            for _ in range(400):
                simulation.step()
            simulation.router.end(requests[0], "aborted")
            while what == "answers" and not (requests[1].over or requests[1].stopped):
                simulation.step()
                simulation.router.stop(requests[1], 0)
            simulation.settle()
            seen.update(type(message) for message in simulation.seen)
    directory = {m.Join, m.Groups, m.Using, m.Scale, m.Scaled}
    metrics = {m.Watch, m.RankReport, m.GroupReport, m.CacheDigest}
    assert set(m.MESSAGE_TYPES) - seen == {m.RankBroken} | directory | metrics
