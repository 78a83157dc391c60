"""Random lifecycles of many requests on two engines, with aborts, deaths and passing time: no block is leaked."""

from __future__ import annotations

import itertools
import random
from collections import Counter
from dataclasses import replace

import pytest
from engine_network import EngineNetwork
from fake_vllm import (
    LEASE_S,
    FakeEngine,
    FakeRequest,
    asks_decode,
    asks_prefill,
    full_and,
    full_and_states,
    small_settings,
)
from layer_pools import SHARED

from disagg.vllm.groups import CacheGroup

PACKED = ("nhd, packed", "hnd, packed")
LAYOUTS = (*PACKED, "padded blocks", *SHARED)
WINDOWS, STATES = full_and(20, -32), full_and_states(16)
IN_A_RUN = 60
MOST_AT_ONCE = 5


class Lifecycles:
    """Two engines that both produce and consume, and the requests between them."""

    def __init__(
        self,
        seed: int,
        patch: pytest.MonkeyPatch,
        groups: tuple[CacheGroup, ...] = (),
        early_s: float = 0.0,
    ) -> None:
        """`groups`: KV cache groups; empty: one group. `early_s`: above 0, workers report KV before it has come, at
        random times; requests whose KV does not come then fail. Both engines produce too, which the settings of such
        an engine forbid: they share no blocks here."""
        self.choose, self._groups = random.Random(seed), groups
        self._layouts = PACKED if any(group.recurrent for group in groups) else LAYOUTS
        self.network = EngineNetwork(patch)
        self._settings = small_settings(checksum=seed % 2 == 1, early_s=early_s)
        self.lives = Counter({"a": 0, "b": 0})
        self.made: list[FakeEngine] = []
        self.engines = {name: self._engine(name) for name in ("a", "b")}
        self._numbers = itertools.count(1)
        self._prefilled: list[tuple[str, FakeRequest]] = []
        """Requests that the other engine may continue, with that engine's name."""
        self.submitted: list[FakeRequest] = []
        self.consumers: list[FakeRequest] = []

    def _engine(self, name: str) -> FakeEngine:
        """A new life of an engine, under a new id, as vLLM makes one."""
        self.lives[name] += 1
        tp, layout, size = (self.choose.choice(values) for values in ((1, 1, 2), self._layouts, (16, 32)))
        engine = FakeEngine(
            self.network,
            f"{name}{self.lives[name]}",
            tp=tp,
            layout=layout,
            block_size=size,
            blocks=24 * max(1, len(self._groups)),
            settings=self._settings,
            late_loads=self.choose.random() < 0.5,
            groups=tuple(replace(group, block_size=size) for group in self._groups),
            asynchronous=self.choose.random() < 0.5,
        )
        self.made.append(engine)
        engine.patience = self.choose.choice((20, 1000, 1000))
        return engine

    def run(self, lifecycles: int) -> None:
        # Each group has segments of its own, and of recurrent layers several.
        messages = 80 * max(1, sum(3 if group.recurrent else 1 for group in self._groups))
        kinds = [self._message] * messages + [self._step] * 12 + [self._submit] * 2 + [self._continue] * 3
        kinds += [self._abort, self._pass_time] + [self._hurry] * (4 if self._settings.early_s else 0)
        while len(self.submitted) < lifecycles:
            self.choose.choice(kinds)()
            if self.choose.random() < 0.0003:
                self.choose.choice((self._restart, self._sever))()
        self._end()

    def _message(self) -> None:
        self.network.step(self.choose)

    def _step(self) -> None:
        engine = self.choose.choice(list(self.engines.values()))
        engine.step()
        engine.check()

    def _hurry(self) -> None:
        self.choose.choice(list(self.engines.values())).hurry(begun=self.choose.random() < 0.9)

    def _submit(self) -> None:
        if sum(len(engine.requests) for engine in self.engines.values()) >= MOST_AT_ONCE:
            return
        source, target = self.choose.sample(sorted(self.engines), 2)
        number, tokens = next(self._numbers), self.choose.choice((1, 15, 16, 33, 64, 90))
        both = self.choose.random() < 0.4
        p, d = self.engines[source], self.engines[target]
        first = asks_prefill(f"p{number}", number, tokens, f"t{number}" if both else "")
        consumer = None
        if both:
            source_of = {"remote_engine_id": p.name, "remote_request_id": first.request_id}
            params = {"do_remote_prefill": True, "transfer_id": f"t{number}", **source_of}
            params.update(remote_host=p.name, remote_port=5580)
            consumer = self._with_prefix(d, FakeRequest(f"d{number}", number, tokens, params))
        pair = [(p, first), (d, consumer)]
        self.choose.shuffle(pair)
        for engine, request in pair:
            if request is not None:
                self.submitted.append(engine.submit(request))
        if consumer is not None:
            self.consumers.append(consumer)
        else:
            self._prefilled.append((target, first))

    def _continue(self) -> None:
        ready = [pair for pair in self._prefilled if pair[1].finished]
        if not ready:
            return
        target, first = pair = self.choose.choice(ready)
        self._prefilled.remove(pair)
        if first.answer_params is not None and self.choose.random() < 0.9:  # else its client has gone
            engine = self.engines[target]
            request = self._with_prefix(engine, asks_decode("d" + first.request_id[1:], first))
            self.consumers.append(request)
            self.submitted.append(engine.submit(request))

    def _with_prefix(self, engine: FakeEngine, request: FakeRequest) -> FakeRequest:
        """The engine's prefix cache may hold full blocks of the prompt, but never its last token."""
        blocks = (request.num_prompt_tokens - 1) // engine.block_size
        request.cached = self.choose.choice((0, 0, self.choose.randint(0, blocks))) * engine.block_size
        return request

    def _abort(self) -> None:
        engine = self.choose.choice(list(self.engines.values()))
        waiting = [request for request in engine.requests.values() if not request.finished]
        if waiting and self.choose.random() < 0.5:
            engine.abort(self.choose.choice(waiting))

    def _pass_time(self) -> None:
        self.network.now_s += self.choose.choice((0.01, 0.3, 1.0, LEASE_S / 3))

    def _restart(self) -> None:
        name = self.choose.choice(sorted(self.engines))
        self.engines[name].kill()
        self.engines[name] = self._engine(name)

    def _sever(self) -> None:
        """A data connection breaks between two workers that live."""
        one, other = self.choose.sample(sorted(self.network.endpoints), 2)
        self.network.fabric.sever(one, other)

    def _end(self) -> None:
        for pause in (0.0, 0.5, LEASE_S + 1, 0.5, LEASE_S + 1, 25.0, 0.5):
            self.network.now_s += pause
            for _ in range(8):
                self.network.settle()
                for engine in self.engines.values():
                    engine.step()
        for engine in self.engines.values():
            engine.check_empty()


def check(
    seeds: range, in_a_run: int, groups: tuple[CacheGroup, ...] = (), early_s: float = 0.0
) -> Counter[str]:
    ends: Counter[str] = Counter()
    for seed in seeds:
        with pytest.MonkeyPatch.context() as patch:
            lifecycles = Lifecycles(seed, patch, groups, early_s)
            lifecycles.run(in_a_run)
        ends["lifecycles"] += len(lifecycles.submitted)
        ends["lives"] += lifecycles.lives.total()
        ends["waited"] += sum(engine.waited for engine in lifecycles.made)
        for request in lifecycles.consumers:
            aborted = request.status.name == "FINISHED_ABORTED"
            ends["aborted"] += aborted
            ends["landed"] += request.landed
            ends["landed after a prefix"] += request.landed and request.cached > 0
            ends["recomputed"] += request.recomputed
            ends["failed"] += request.status.name == "FINISHED_ERROR"
    return ends


@pytest.mark.parametrize(("groups", "runs"), [((), 6), (WINDOWS, 3), (STATES, 1)])
def test_no_block_is_leaked(groups: tuple[CacheGroup, ...], runs: int) -> None:
    ends = check(range(runs), IN_A_RUN, groups)
    assert ends["lifecycles"] >= runs * IN_A_RUN
    assert ends["landed"] > 5 * runs
    assert min(ends["recomputed"], ends["aborted"]) > 0
    assert ends["landed after a prefix"] > 0 or runs == 1


def test_no_block_is_leaked_with_early_reports() -> None:
    ends = check(range(4), IN_A_RUN, early_s=0.004)
    assert ends["lifecycles"] >= 4 * IN_A_RUN
    assert min(ends["landed"], ends["failed"], ends["aborted"], ends["waited"]) > 5
    assert ends["recomputed"] == 0


@pytest.mark.slow
@pytest.mark.parametrize("part", range(10))
def test_no_block_is_leaked_in_10_000_lifecycles_with_early_reports(part: int) -> None:
    ends = check(range(200 + part, 201 + part), 1000, early_s=0.004)
    assert min(ends["landed"], ends["failed"], ends["waited"]) > 10


@pytest.mark.slow
@pytest.mark.parametrize("part", range(20))
def test_no_block_is_leaked_in_100_000_lifecycles(part: int) -> None:
    ends = check(range(10 + 5 * part, 15 + 5 * part), 1000)
    assert ends["lifecycles"] >= 5_000
    assert ends["lives"] > 10  # engines died, and others took their places


@pytest.mark.slow
@pytest.mark.parametrize("groups", [WINDOWS, STATES])
@pytest.mark.parametrize("seed", range(10, 30))
def test_no_block_is_leaked_in_40_000_lifecycles_with_groups(
    seed: int, groups: tuple[CacheGroup, ...]
) -> None:
    ends = check(range(seed, seed + 1), 1000, groups)
    assert ends["lifecycles"] >= 1_000
    assert ends["lives"] > 5
