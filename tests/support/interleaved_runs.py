"""Seeded runs of both groups in one thread, for the `test_interleav*` files (see `simulated_groups`).

Whatever the order of events, tokens are exact or the request ends with an error, no byte is read or written after
its page, staging or ring space was freed, and at the end every resource is free. A failure names its seed: the run
repeats.
"""

from __future__ import annotations

import random
from collections.abc import Iterable
from typing import Any

import msgspec
import pytest
from bit_flips import install
from local_groups import small_config
from simulated_groups import Simulation
from simulated_router import SimulatedRequest

from decode_node.incoming import IncomingTransfer
from disagg.core.config.read import Config
from disagg.core.errors import TransportError
from disagg.core.types import SamplingParams, Segment
from prefill_node.probe import Probed
from transport.inproc import InprocTransport
from transport.tags import is_active_message

STEPS = 1500
CROWDED_TOKENS = 96


def config_of(choose: random.Random, peer_memory: bool, crowded: bool = False) -> Config:
    """Small in every way, so that requests wait for pages, rows, ring and staging; `crowded`: with a small pool."""
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
        async_steps=choose.random() < 0.5,
    )
    blocks = random.Random(choose.random())  # of 4 KiB, the smallest block
    prefill = msgspec.structs.replace(config.prefill, host_cache_bytes=blocks.choice([0, 12, 80]) * 4096)
    decode = msgspec.structs.replace(decode, host_cache_bytes=blocks.choice([0, 12, 80]) * 4096)
    prefill = msgspec.structs.replace(prefill, async_steps=blocks.random() < 0.5)
    return msgspec.structs.replace(config, transfer=transfer, prefill=prefill, decode=decode)


def with_tiers(config: Config, blocks: int) -> Config:
    """Small pools, and host memory of `blocks` blocks of 4 KiB, the smallest size; a pool has 24 pages."""
    small = {"page_size": 4, "pool_tokens": 96, "max_context_tokens": 96, "host_cache_bytes": blocks * 4096}
    few_segments = {
        "max_segment_bytes": 0,
        "segment_overhead_s": 1.0,
        "ring_bytes": 1 << 16,
        "layer_groups": 1,
    }
    return msgspec.structs.replace(
        config,
        transfer=msgspec.structs.replace(config.transfer, **few_segments),
        prefill=msgspec.structs.replace(config.prefill, **small),
        decode=msgspec.structs.replace(config.decode, **small),
    )


def with_write_back(config: Config) -> Config:
    """Pages are copied to host memory when they are evicted."""
    back: dict[str, Any] = {
        role: msgspec.structs.replace(getattr(config, role), host_cache_write="back")
        for role in ("prefill", "decode")
    }
    return msgspec.structs.replace(config, **back)


def with_local_prefill(config: Config, choose: random.Random) -> Config:
    """The decode group computes prompts too, in small chunks."""
    decode = msgspec.structs.replace(config.decode, local_prefill_tokens=choose.choice([2, 7]))
    return msgspec.structs.replace(config, decode=decode)


def with_words(config: Config) -> Config:
    """Direct writes are reported by completion words, which need segments without checksums."""
    return msgspec.structs.replace(
        config,
        transfer=msgspec.structs.replace(config.transfer, checksum=False),
        transport=msgspec.structs.replace(config.transport, peer_memory=True, completion_words=True),
    )


def with_storage(config: Config, choose: random.Random) -> Config:
    """Host memory for few documents, and one storage of both groups, which has all of them."""
    roles: dict[str, Any] = {}
    for role in ("prefill", "decode"):
        storage = {
            "storage": "simulated",
            "prefetch": choose.choice(["best_effort", "timeout", "wait"]),
            "prefetch_base_s": choose.choice([0.01, 1.0]),
            "prefetch_min_tokens": 1,
        }
        roles[role] = msgspec.structs.replace(getattr(config, role), **storage)
    return msgspec.structs.replace(config, **roles)


def add_faults(simulation: Simulation, what: str, choose: random.Random) -> None:
    faults = simulation.fabric.faults
    first = choose.randrange(12)
    if "fail" in what:  # consecutive sends, as when a connection breaks
        active_messages = "messages" in what
        for nth in range(first, first + choose.choice([1, 2, 5])):
            faults.fail_send(nth, lambda source, destination, tag: is_active_message(tag) == active_messages)
    if "repeat" in what:
        faults.duplicate(first)
        faults.duplicate(first + 3)
    if "short" in what:
        faults.truncate(8, first, lambda source, destination, tag: not is_active_message(tag))


def damage(simulation: Simulation, what: str, patch: pytest.MonkeyPatch, seed: int) -> None:
    """Flips bits of some segments and checksums when they first arrive; with `twice` also when they are resent."""
    generator = random.Random(seed)
    simulation.damages = True

    def choose(incoming: IncomingTransfer, segment: Segment, again: bool) -> int | None:
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
    """Mostly one answer; sometimes several, or a beam search, of as many tokens as fit the group.

    Every third length of a prompt has penalties, unless it is a beam search.
    """
    kind = choose.choice(["one", "one", "several", "beams"])
    most, group = simulation.groups[1].leader.max_sequences, simulation.config.decode
    count = choose.randint(2, 4)
    left_tokens = group.pool_tokens - prompt_tokens - count * group.page_size
    fitting_tokens = min(max_tokens, left_tokens // count - group.page_size, 12 if kind == "beams" else 100)
    penalty = 0.0 if prompt_tokens % 3 else 0.7
    if kind == "one" or most < count or fitting_tokens < 1:
        return SamplingParams(max_tokens=max_tokens, frequency_penalty=penalty)
    if kind == "beams":
        return SamplingParams(max_tokens=fitting_tokens, beams=count, n=choose.randint(1, count))
    drawn = SamplingParams(max_tokens=fitting_tokens, temperature=1.0, seed=choose.randrange(100))
    return msgspec.structs.replace(drawn, n=count, frequency_penalty=penalty)


def run(
    seed: int,
    what: str,
    patch: pytest.MonkeyPatch,
    probed: list[Probed] | None = None,
    kv_dtype: str = "model",
) -> list[SimulatedRequest]:
    """One run: requests arrive and end, faults strike, everything settles, and every answer is compared.

    In a crowded run, answers outgrow the pool and requests are preempted all the time. Every third model without a
    recurrent state has layers of three classes. In a mixed run, requests have priorities and grammars, and some want
    log-probabilities of their prompts. In a local run, the decode group gets most prompts, and some of them move to
    the prefill group. In a split run, the decode group computes the tails of most prompts. With `probed`, which
    receives the results, ranks probe their wires meanwhile. `kv_dtype` is the decode group's.
    """
    choose = random.Random(seed)
    crowded = "crowded" in what
    config = config_of(choose, seed % 2 == 1, crowded)
    if "tiers" in what:
        config = with_tiers(config, choose.choice([16, 30] if "storage" in what else [30, 100]))
    if "storage" in what:
        config = with_storage(config, choose)
    if "words" in what:
        config = with_words(config)
    if "back" in what:
        config = with_write_back(config)
    if "local" in what or "split" in what:
        config = with_local_prefill(config, choose)
    decode = msgspec.structs.replace(config.decode, kv_dtype=kv_dtype)
    prefill = msgspec.structs.replace(config.prefill, state_interval_tokens=8)
    states = seed // 2 % 2 == 1 and "local" not in what and "split" not in what
    # A model with several classes of layers has no divided prompts.
    more = ((2, 1), (4, 5)) if seed % 3 == 0 and not states and "split" not in what else ()
    simulation = Simulation(
        msgspec.structs.replace(config, prefill=prefill, decode=decode),
        seed,
        patch,
        states=states,
        any_chunks=seed % 3 != 2,
        more=more,
    )
    add_faults(simulation, what, choose)
    if "damage" in what:
        damage(simulation, what, patch, seed)
    if "fence" in what:
        patch.setattr(InprocTransport, "disconnect", no_fence)
    documents = 6 if "storage" in what else 4
    if "tiers" in what:  # more documents than the pools have room for
        simulation.router.documents = [[choose.randrange(64) for _ in range(48)] for _ in range(documents)]
    if "mixed" in what:
        simulation.router.mixed = random.Random(seed)
    if "local" in what:
        simulation.router.local = random.Random(seed)
    if "split" in what:
        simulation.router.divides = random.Random(seed)
    if "storage" in what:  # an earlier life of the groups has stored some of them
        simulation.stock(simulation.router.documents[:4])
    pace = 4 if crowded else 1  # answers are longer, with fewer events for each token
    left, kill_at = choose.choice([2, 4, 7]), choose.randrange(100, 4000)
    if crowded:
        left, kill_at = 7, choose.randrange(5000, 15000)
    prompts, answers = (range(1, 17), [70]) if crowded else (range(1, 60), [1, 5, 30])
    if "tiers" in what:
        left, prompts, answers = 25, range(1, 9), [1, 5]
    often = 0.03 if seed % 6 > 1 else 0.006 / pace  # the rarer ones find the cached KV of ended requests
    requests: list[SimulatedRequest] = []
    for step in range(kill_at + 200 if STRIKES & set(what.split()) else pace * STEPS):
        if left and choose.random() < often:
            left -= 1
            answer, limit_s = choose.choice(answers), 3.0 * choose.random()
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
        if simulation.router.local is not None and requests and choose.random() < 0.01:
            simulation.router.move(choose.choice(requests))
        if probed is not None and choose.random() < 0.01:
            simulation.probe()
        if step == kill_at:
            strike(simulation, what, choose)
            left = 0 if "router" in what else left  # no router is left to submit to
        simulation.step()
        if step % 100 == 0:
            simulation.check()
    simulation.settle()
    for request in requests:
        assert simulation.router.exact(request), request
    if probed is not None:
        probed += simulation.probed
    return requests


def run_seeds(
    seeds: Iterable[int], what: str, probed: list[Probed] | None = None, kv_dtype: str = "model"
) -> list[SimulatedRequest]:
    """The requests of one run for each seed; see `run`."""
    requests: list[SimulatedRequest] = []
    for seed in seeds:
        with pytest.MonkeyPatch.context() as patch:
            try:
                requests += run(seed, what, patch, probed, kv_dtype)
            except Exception as error:
                error.add_note(f"run({seed}, {what!r}, ..., kv_dtype={kv_dtype!r})")
                raise
    return requests


def ends_of(requests: Iterable[SimulatedRequest]) -> set[str]:
    """The ends that occurred."""
    return {request.ended for request in requests}


ENDS = {
    "nothing": {"done"},
    "repeat": {"done"},
    "abort": {"done", "aborted"},
    "abort and repeat": {"done", "aborted"},
    "fail": {"done", "transport"},
    "abort and fail": {"done", "aborted", "transport"},
    # A prompt with a cached prefix sends two lease requests at once: without the first, the second leaves a gap.
    "messages fail": {"done", "transport"},
    "short": {"done", "protocol"},
    "death": {"done", "peer_lost", "not_linked"},
    "abort fail death": {"done", "aborted", "transport", "peer_lost", "not_linked"},
    "host": {"done", "peer_lost", "not_linked"},
    "fence": {"done", "peer_lost", "not_linked"},
    "leaders": {"done", "peer_lost", "not_linked"},
    "silence": {"done", "peer_lost", "not_linked"},
    "router": {"done", "gone"},
    "deadline": {"done", "timeout"},
    "tiers": {"done"},
    "tiers abort": {"done", "aborted"},
    "tiers death": {"done", "peer_lost", "not_linked"},
    "tiers back": {"done"},
    "tiers back abort": {"done", "aborted"},
    "tiers back death": {"done", "peer_lost", "not_linked"},
    "tiers back storage": {"done"},
    "tiers storage": {"done"},
    "tiers storage abort": {"done", "aborted"},
    "tiers storage death": {"done", "peer_lost", "not_linked"},
    "crowded": {"done"},
    "crowded abort": {"done", "aborted"},
    "crowded death": {"done", "peer_lost", "not_linked"},
    "crowded deadline": {"done", "timeout"},
}
"""The ends that requests may have, for each kind of trouble."""
CONTAINED = {
    "nothing",
    "repeat",
    "abort",
    "fail",
    "tiers",
    "tiers back",
    "tiers storage",
    "crowded",
}
"""Kinds whose troubles and memories also occur in another kind, such as `tiers back abort`."""
