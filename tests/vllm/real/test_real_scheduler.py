"""`DisaggConnector` with vLLM's own scheduler, cache manager and factory: `make test-vllm`."""

from __future__ import annotations

import inspect
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

REASON = "vLLM is not installed; `make test-vllm` makes an environment with it"
pytest.importorskip("vllm.v1.core.sched.scheduler", reason=REASON, exc_type=ImportError)

from real_vllm import BLOCK_SIZE, SEVERAL_GROUPS, Make, RealEngine, prompt_of, run, vllm_config
from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorBase_V1, SupportsHMA
from vllm.v1.request import RequestStatus

from disagg.vllm.connector import ConnectorMethods


def hand_over(p: RealEngine, d: RealEngine, tokens: int, **answer: int) -> None:
    """Runs a prompt at `p`, then an answer at `d`; all KV but that of the last token comes from `p`."""
    prompt = prompt_of(tokens)
    p.prefill("p1", prompt)
    run([p], lambda: "p1" in p.params)
    second = d.submit("d1", prompt, p.params["p1"], **answer)
    run([p, d], lambda: second.is_finished() and not p.scheduler.requests)
    assert second.status is RequestStatus.FINISHED_LENGTH_CAPPED
    assert d.external["d1"] == tokens - 1  # vLLM computes the last token again
    run([p, d], lambda: not d.scheduler.has_requests())
    p.check_empty()
    d.check_empty()


def test_methods_have_the_parameters_of_the_base_class() -> None:
    """Also with the newest vLLM: the engine may pass any parameter by name."""
    for name, ours in vars(ConnectorMethods).items():
        base = SupportsHMA if name == "request_finished_all_groups" else KVConnectorBase_V1
        added = name in ("get_transfer_results", "get_loaded_kv_cache_group_ids")
        newer = added and not SEVERAL_GROUPS
        if inspect.isfunction(ours) and name != "__init__" and not newer:
            theirs = inspect.signature(getattr(base, name)).parameters
            assert list(inspect.signature(ours).parameters) == list(theirs), name


def test_the_factory_makes_the_class(model: Path, extra: Callable[[], dict[str, Any]]) -> None:
    config = vllm_config(model, extra(), "kv_both")
    found = KVConnectorFactory.get_connector_class(config.kv_transfer_config)
    assert issubclass(found, KVConnectorBase_V1)
    assert found.__name__ == "DisaggConnector"
    assert not inspect.isabstract(found)
    assert config.scheduler_config.disable_hybrid_kv_cache_manager is not SEVERAL_GROUPS


@pytest.mark.parametrize("tokens", [5, 2 * BLOCK_SIZE, 150])
@pytest.mark.parametrize(("asynchronous", "whole_blocks"), [(False, False), (True, False), (False, True)])
def test_a_prompt_is_handed_over(make: Make, tokens: int, asynchronous: bool, whole_blocks: bool) -> None:
    """150 tokens are three chunks."""
    options = {"asynchronous": asynchronous, "whole_blocks": whole_blocks}
    p, d = make(role="kv_producer", **options), make(role="kv_consumer", **options)
    hand_over(p, d, tokens)


@pytest.mark.parametrize(
    ("asynchronous", "other_process", "steps"),
    [(False, False, 2), (True, False, 2), (False, True, 2), (True, True, 3)],
)
def test_steps_until_a_request_is_scheduled(
    make: Make, asynchronous: bool, other_process: bool, steps: int
) -> None:
    """The first step reports the KV that has come; the last one is that of the request's token."""
    p, d = make(role="kv_producer"), make(asynchronous=asynchronous, other_process=other_process)
    p.prefill("p1", prompt_of(100))
    run([p], lambda: "p1" in p.params)
    second = d.submit("d1", prompt_of(100), p.params["p1"])
    for _ in range(2):  # also the step whose result vLLM reads after the next one is launched
        d.step()
    consuming = d.worker.working.consuming
    run([p], lambda: consuming.statistics().landed == 1)
    assert second.status is RequestStatus.WAITING_FOR_REMOTE_KVS
    for _ in range(steps):
        assert "d1" not in d.external
        d.step()
    assert d.external["d1"] == 99
    run([p, d], lambda: second.is_finished() and not d.scheduler.has_requests())
    p.check_empty()
    d.check_empty()


several_groups = pytest.mark.skipif(
    not SEVERAL_GROUPS, reason="this version of vLLM makes one KV cache group for the connector"
)
kinds_of_groups = pytest.mark.parametrize(
    "groups",
    [
        {},
        pytest.param({"windows": (30,)}, marks=several_groups),
        pytest.param({"states": "none"}, marks=several_groups),
        pytest.param({"states": "align"}, marks=several_groups),
    ],
    ids=["full", "window", "states", "cached states"],
)


@several_groups
@pytest.mark.parametrize("tokens", [1, 5, *range(83, 86), 150])
@pytest.mark.parametrize(("asynchronous", "whole_blocks"), [(False, False), (True, False), (False, True)])
def test_a_prompt_of_several_groups_is_handed_over(
    make: Make, tokens: int, asynchronous: bool, whole_blocks: bool
) -> None:
    """With 84 tokens, the last token attends to the last token of the block before those that vLLM keeps then."""
    options = {"asynchronous": asynchronous, "whole_blocks": whole_blocks, "windows": (21, 40), "blocks": 80}
    p, d = make(role="kv_producer", **options), make(role="kv_consumer", **options)
    hand_over(p, d, tokens, answer=30)


@kinds_of_groups
@pytest.mark.parametrize("asynchronous", [False, True])
def test_both_engines_at_once(make: Make, asynchronous: bool, groups: dict[str, Any]) -> None:
    p = make(role="kv_producer", asynchronous=asynchronous, **groups)
    d = make(role="kv_consumer", **groups)
    prompts = [prompt_of(100, seed) for seed in (1, 2)]
    p.prefill("p0", prompts[0])
    run([p], lambda: "p0" in p.params)
    first = d.submit("d0", prompts[0], dict(p.params["p0"]))
    run([p, d], first.is_finished)
    known = {name: p.params["p0"][name] for name in ("remote_engine_id", "remote_host", "remote_port")}
    params = known | {"do_remote_prefill": True, "transfer_id": "t", "remote_request_id": "t"}
    second = d.submit("d1", prompts[1], params)
    run([d], lambda: second.status is RequestStatus.WAITING_FOR_REMOTE_KVS)
    p.prefill("p1", prompts[1], transfer_id="t")
    run([p, d], lambda: second.is_finished() and not p.scheduler.requests)
    assert d.external["d1"] == 99
    run([p, d], lambda: not d.scheduler.has_requests())
    p.check_empty()
    d.check_empty()


@kinds_of_groups
def test_cached_blocks_are_not_moved(make: Make, groups: dict[str, Any]) -> None:
    p, d = make(role="kv_producer", **groups), make(role="kv_consumer", **groups)
    prompt = prompt_of(70)
    warm = d.submit("d0", prompt[:40], None)
    run([d], warm.is_finished)
    for number in (1, 2):  # the second time the consumer holds all full blocks
        p.prefill(f"p{number}", prompt)
        run([p], lambda number=number: f"p{number}" in p.params)
        one = d.submit(f"d{number}", prompt, p.params[f"p{number}"])
        run([p, d], lambda one=one: one.is_finished() and not p.scheduler.requests)
        assert d.external[f"d{number}"] == 69
    run([p, d], lambda: not d.scheduler.has_requests())
    p.check_empty()
    d.check_empty()


@kinds_of_groups
@pytest.mark.parametrize("policy", ["recompute", "fail"])
def test_a_producer_that_is_gone(make: Make, policy: str, groups: dict[str, Any]) -> None:
    p = make(role="kv_producer", **groups)
    d = make(role="kv_consumer", policy=policy, **groups)
    prompt = prompt_of(50)
    p.prefill("p1", prompt)
    run([p], lambda: "p1" in p.params)
    p.shutdown()
    one = d.submit("d1", prompt, p.params["p1"])
    run([d], one.is_finished)
    expected = RequestStatus.FINISHED_LENGTH_CAPPED if policy == "recompute" else RequestStatus.FINISHED_ERROR
    assert one.status is expected
    run([d], lambda: not d.scheduler.has_requests())
    d.check_empty()


def test_a_consumer_that_never_comes(make: Make) -> None:
    p = make({"lease_s": 0.5}, role="kv_producer")
    p.prefill("p1", prompt_of(50))
    run([p], lambda: "p1" in p.params)
    run([p], lambda: not p.scheduler.requests)
    p.check_empty()


@kinds_of_groups
@pytest.mark.parametrize("waiting", [True, False])
def test_an_abort_of_the_consumer(make: Make, waiting: bool, groups: dict[str, Any]) -> None:
    p, d = make(role="kv_producer", **groups), make(role="kv_consumer", **groups)
    prompt = prompt_of(90)
    p.prefill("p1", prompt)
    run([p], lambda: "p1" in p.params)
    one = d.submit("d1", prompt, p.params["p1"])
    if waiting:
        run([d], lambda: one.status is RequestStatus.WAITING_FOR_REMOTE_KVS)
    d.abort("d1")
    run([p, d], lambda: not d.scheduler.has_requests() and not p.scheduler.requests)
    p.check_empty()
    d.check_empty()


@kinds_of_groups
@pytest.mark.parametrize("asynchronous", [False, True])
@pytest.mark.parametrize("seed", range(4))
def test_random_lifecycles(make: Make, seed: int, asynchronous: bool, groups: dict[str, Any]) -> None:
    """Two engines with few blocks, so that requests wait and are preempted; both produce and consume.

    Each engine may hold prompts for the other one in all its blocks; then both wait until leases end.
    """
    rng = random.Random(seed)
    options = {"blocks": 24, "asynchronous": asynchronous, "whole_blocks": seed % 2 == 1}
    if groups:
        options |= {"blocks": 40} | groups
    engines = [make({"lease_s": 5.0}, **options) for _ in range(2)]
    prompts = [prompt_of(rng.choice((10, 32, 70, 120)), number % 5) for number in range(30)]
    waiting, started = list(enumerate(prompts)), set[str]()
    share = (0.3, 1.0)[seed // 2]  # 1: prompts come faster than they are handed over
    decoded: list[tuple[RealEngine, str]] = []
    aborted: list[str] = []

    def advance() -> bool:
        if waiting and rng.random() < share:
            number, prompt = waiting.pop()
            rng.choice(engines).prefill(f"p{number}", prompt)
        for engine, other in (engines, engines[::-1]):
            for name in sorted(set(engine.params) - started):
                if name.startswith("p") and rng.random() < 0.5:
                    started.add(name)
                    other.submit(f"d{name}", prompts[int(name[1:])], engine.params[name])
                    decoded.append((other, f"d{name}"))
        if decoded and len(aborted) < 6 and rng.random() < 0.02:
            engine, name = rng.choice(decoded)
            if not engine.requests[name].is_finished():
                engine.abort(name)
                aborted.append(name)
        left = set().union(*(engine.params for engine in engines)) - started
        idle = all(not engine.scheduler.has_requests() for engine in engines)
        return not waiting and idle and not any(name.startswith("p") for name in left)

    run(engines, advance)
    for engine in engines:
        engine.check_empty()
    moved = [name for engine, name in decoded if engine.external.get(name, 0) > 0]
    late = asynchronous and share == 1.0  # many leases end before the other engine has blocks
    assert len(moved) > (5 if late else len(prompts) / 2)
