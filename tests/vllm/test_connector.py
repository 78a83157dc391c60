"""`DisaggConnector` as vLLM makes and calls it: both roles, with real threads, sockets and keys."""

from __future__ import annotations

import importlib
import pickle
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from connector_settings import connector_settings
from fake_vllm import FakeRequest, asks_decode, asks_prefill
from fake_vllm_module import NEWER, Base, Hybrid, Results, Role, configs, install, spec_of
from layer_pools import Memory
from ports import free_port
from structlog.testing import capture_logs

from disagg.core.errors import ConfigError
from disagg.core.types import RequestKey, Span, Ticket
from disagg.vllm.compat import facts_of
from disagg.vllm.groups import CacheGroup
from disagg.vllm.received import ReceivedRequests
from disagg.vllm.settings import VllmSettings
from disagg.vllm.work import PromptStates, ReceiveWork, StepWork

LAYERS, BLOCKS, TOKENS = 3, 24, 50
FULL = spec_of("FullAttentionSpec", sliding_window=None)
SLIDING = spec_of("SlidingWindowSpec", sliding_window=20)
RETAINING = spec_of("SlidingWindowSpec", sliding_window=20, extra_retained_tokens=3)
CHUNKED = spec_of("ChunkedLocalAttentionSpec", attention_chunk_size=32)
LARGER = spec_of("SlidingWindowSpec", block_size=32, sliding_window=20)


def recurrent(**changes: Any) -> Any:
    values = {
        "shapes": ((32, 3), (4, 4, 4)),
        "dtypes": (torch.float16, torch.float32),
        "mamba_type": "MAMBA2",
    }
    values |= {"mamba_cache_mode": "none", "num_speculative_blocks": 0, **changes}
    return spec_of("MambaSpec", **values)


RECURRENT = recurrent()
UNEQUAL = spec_of("Uniform", kv_cache_specs={"a": RECURRENT, "b": recurrent(shapes=((32, 3), (4, 4, 8)))})
NO_REQUESTS = SimpleNamespace(
    num_scheduled_tokens={},
    scheduled_new_reqs=[],
    scheduled_cached_reqs=SimpleNamespace(
        req_ids=[], new_block_ids=[], num_computed_tokens=[], resumed_req_ids=set()
    ),
)


class ConnectedEngine:
    """One engine with one worker: the scheduler's connector and the worker's."""

    def __init__(self, name: str, extra: dict[str, Any], layout: str, role: str) -> None:
        from disagg.vllm.connector import DisaggConnector

        self.memory = Memory(
            layout, LAYERS, BLOCKS, 16, 4, 8, torch.float16, torch.Generator().manual_seed(3)
        )
        settings = configs(name, extra, role=(role,))
        self.worker = DisaggConnector(settings[0], Role.WORKER, settings[1])
        self.scheduler = DisaggConnector(settings[0], Role.SCHEDULER, settings[1])
        caches = zip(self.memory.caches, range(LAYERS), strict=True)
        self.worker.register_kv_caches({f"model.layers.{i}.attn": cache for cache, i in caches})
        handshake = pickle.loads(pickle.dumps(self.worker.get_handshake_metadata()))  # as between processes
        self.scheduler.set_xfer_handshake_metadata({0: handshake})

    def step(self, output: Any = NO_REQUESTS) -> Any:
        """One step; returns what the worker reports."""
        work = pickle.loads(pickle.dumps(self.scheduler.build_connector_meta(output)))
        self.worker.bind_connector_metadata(work)
        self.worker.start_load_kv(None)
        for layer in range(LAYERS):
            name = f"model.layers.{layer}.attn"
            self.worker.wait_for_layer_load(name)
            self.worker.save_kv_layer(name, self.memory.caches[layer], None)
        self.worker.wait_for_save()
        sent, received = self.worker.get_finished(set())
        report = SimpleNamespace(finished_sending=sent, finished_recving=received)
        assert self.worker.get_block_ids_with_load_errors() == set()
        self.worker.clear_connector_metadata()
        self.scheduler.update_connector_output(report)
        return report

    def compute(self, request: FakeRequest, blocks: list[int]) -> None:
        """Computes a prompt in one step, and finishes the request."""
        assert self.scheduler.get_num_new_matched_tokens(request, 0) == (0, False)
        self.scheduler.update_state_after_alloc(request, blocks_of(blocks), 0)
        new = SimpleNamespace(req_id=request.request_id, block_ids=(blocks,), num_computed_tokens=0)
        counts = {request.request_id: request.num_prompt_tokens}
        self.step(
            SimpleNamespace(
                **vars(NO_REQUESTS) | {"scheduled_new_reqs": [new], "num_scheduled_tokens": counts}
            )
        )
        request.become("FINISHED_LENGTH_CAPPED")
        held, request.answer_params = self.scheduler.request_finished(request, blocks)
        assert held
        assert self.scheduler.has_pending_push_work()

    def rows(self, layer: int, blocks: list[int]) -> torch.Tensor:
        found = self.memory.pool.layers[layer][0][torch.tensor(blocks)].flatten(0, 1)[:TOKENS]
        return found.view(torch.int16)

    def shutdown(self) -> None:
        self.worker.shutdown()
        self.scheduler.shutdown()


def blocks_of(ids: list[int]) -> Any:
    return SimpleNamespace(get_block_ids=lambda: (ids,))


def wait(condition: Callable[[], bool]) -> None:
    deadline_s = time.monotonic() + 20
    while not condition():
        assert time.monotonic() < deadline_s
        time.sleep(0.005)


@pytest.fixture
def extra(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[dict[str, Any]]:
    install(monkeypatch)
    interval_s = sys.getswitchinterval()
    sys.modules.pop("disagg.vllm.connector", None)  # its class has the base class of this test's vLLM
    yield connector_settings(tmp_path)
    sys.setswitchinterval(interval_s)
    sys.modules.pop("disagg.vllm.connector", None)


def test_a_prompt_is_handed_over(extra: dict[str, Any]) -> None:
    engines = [
        ConnectedEngine("p", extra | {"port": free_port()}, "hnd, packed", "producer"),
        ConnectedEngine("d", extra | {"port": free_port()}, "nhd, packed", "consumer"),
    ]
    p, d = engines
    try:
        first = asks_prefill("p1", 1, TOKENS)
        p.compute(first, [3, 9, 4, 7])
        second = asks_decode("d1", first)
        assert d.scheduler.get_num_new_matched_tokens(second, 16) == (TOKENS - 16, True)  # 16 are cached
        before = d.rows(0, [20, 2, 5, 11])[:16].clone()
        d.scheduler.update_state_after_alloc(second, blocks_of([20, 2, 5, 11]), TOKENS - 16)
        assert d.scheduler.get_num_new_matched_tokens(second, 16) == (0, False)  # once only
        reports: list[Any] = []
        wait(lambda: reports.append(d.step()) is None and reports[-1].finished_recving == {"d1"})
        wait(lambda: reports.append(p.step()) is None and reports[-1].finished_sending == {"p1"})
        assert not p.scheduler.has_pending_push_work()
        for layer in range(LAYERS):
            sent, come = p.rows(layer, [3, 9, 4, 7]), d.rows(layer, [20, 2, 5, 11])
            assert torch.equal(sent[16:], come[16:])
        assert torch.equal(d.rows(0, [20, 2, 5, 11])[:16], before)
        second.become("FINISHED_LENGTH_CAPPED")
        assert d.scheduler.request_finished(second, [20, 2, 5, 11]) == (False, None)
    finally:
        for engine in engines:
            engine.shutdown()


@pytest.mark.parametrize(("engines", "alone"), [(1, True), (2, False)])
def test_data_parallel_engines_wait_for_each_other(engines: int, alone: bool, extra: dict[str, Any]) -> None:
    vllm_config, caches = configs("p", extra)
    vllm_config.parallel_config.data_parallel_size = engines
    assert facts_of(vllm_config, caches).steps_alone is alone


def test_an_empty_step_waits_for_kv(extra: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    """One step reports the request, although nothing of it has come when the step begins."""
    p = ConnectedEngine("p", extra | {"port": free_port()}, "nhd, packed", "producer")
    monkeypatch.setattr("disagg.vllm.worker.LINGER_S", 100.0)
    d = ConnectedEngine("d", extra | {"port": free_port()}, "nhd, packed", "consumer")
    waits: list[float] = []
    take = ReceivedRequests.take
    monkeypatch.setattr(
        ReceivedRequests, "take", lambda one, wait_s: (waits.append(wait_s), take(one, wait_s))[1]
    )
    try:
        first = asks_prefill("p1", 1, TOKENS)
        p.compute(first, [3, 9, 4, 7])
        second = asks_decode("d1", first)
        d.step()
        assert d.scheduler.get_num_new_matched_tokens(second, 0) == (TOKENS, True)
        d.scheduler.update_state_after_alloc(second, blocks_of([20, 2, 5, 11]), TOKENS)
        assert d.step().finished_recving == {"d1"}
        d.step()
        assert waits == [0.0, 100.0, 0.0]
    finally:
        p.shutdown()
        d.shutdown()


def test_the_class_has_the_base_class_of_vllm(extra: dict[str, Any]) -> None:
    import disagg.vllm.connector as module

    assert issubclass(module.DisaggConnector, Base)
    assert module.DisaggConnector is module.DisaggConnector
    assert module.DisaggConnector.__name__ == "DisaggConnector"
    with pytest.raises(AttributeError, match="NixlConnector"):
        _ = module.NixlConnector


@pytest.mark.parametrize("names", [NEWER, NEWER[:1], ()])
def test_several_groups_need_reports_of_failed_requests(
    names: tuple[str, ...], extra: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """vLLM makes one group for a connector without `SupportsHMA`."""
    import disagg.vllm.connector as module

    install(monkeypatch, names=names)
    importlib.reload(module)
    assert issubclass(module.DisaggConnector, Hybrid) is (names == NEWER)


@pytest.mark.parametrize(
    ("groups", "expected"),
    [
        ([FULL], [CacheGroup(16, ("layers.0",))]),
        ([spec_of("MLAAttentionSpec", ("FullAttentionSpec",))], [CacheGroup(16, ("layers.0",))]),
        ([FULL, SLIDING], [CacheGroup(16, ("layers.0",)), CacheGroup(16, ("layers.1",), window=20)]),
        ([RETAINING], [CacheGroup(16, ("layers.0",), window=23)]),
        ([FULL, CHUNKED], [CacheGroup(16, ("layers.0",)), CacheGroup(16, ("layers.1",), chunk=32)]),
        (
            [spec_of("UniformSpecs", kv_cache_specs={"a": SLIDING})],
            [CacheGroup(16, ("layers.0",), window=20)],
        ),
    ],
)
def test_groups_of_vllm(groups: list[Any], expected: list[CacheGroup], extra: dict[str, Any]) -> None:
    vllm_config, caches = configs("p", extra, groups=groups)
    found = facts_of(vllm_config, caches)
    assert found.groups == tuple(expected)
    plain = found.fingerprint == "tiny float16"
    assert plain is (expected == [CacheGroup(16, ("layers.0",))])


@pytest.mark.parametrize("name", ["mamba_n_groups", "n_groups", "mamba_ngroups", "other"])
def test_what_ranks_share_of_recurrent_layers(name: str, extra: dict[str, Any]) -> None:
    """Groups of heads come from the model's configuration, and whether a rank holds all from vLLM's specification."""
    fields = {
        "shapes": ((12, 3),),
        "dtypes": (torch.float32,),
        "mamba_cache_mode": "none",
        "mamba_type": "MAMBA2",
    }
    layers = spec_of("MambaSpec", num_speculative_blocks=0, tp_replicated=name == "other", **fields)
    vllm_config, caches = configs("p", extra, groups=[FULL, layers])
    vllm_config.model_config.hf_text_config = SimpleNamespace(**{name: 8})
    found = facts_of(vllm_config, caches).groups[1].recurrent
    assert found is not None
    assert (found.kind, found.head_groups, found.replicated) == (
        "MAMBA2",
        0 if name == "other" else 8,
        name == "other",
    )


def test_windows_only_need_a_version_that_is_told_of_failed_requests(
    extra: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """vLLM would take the first blocks of such a request, which are freed or null, as computed."""
    install(monkeypatch, names=())
    vllm_config, caches = configs("p", extra, groups=[SLIDING])
    with pytest.raises(ConfigError, match="needs a version with KVConnectorTransferResults"):
        facts_of(vllm_config, caches)


def test_failed_requests_are_named(extra: dict[str, Any]) -> None:
    """Of a model with several groups, because block ids do not tell the group."""
    from disagg.vllm.connector import DisaggConnector

    port = {"port": free_port()}
    settings = configs("p", extra | port, groups=[FULL, SLIDING], blocks=BLOCKS)
    worker = DisaggConnector(settings[0], Role.WORKER, settings[1])
    memory = Memory("nhd, packed", 1, BLOCKS, 16, 4, 8, torch.float16, None)
    worker.register_kv_caches({f"layers.{i}": memory.caches[0] for i in range(2)})
    try:
        assert len(worker.get_handshake_metadata().layout.classes) == 2
        assert worker.get_transfer_results(set()) == Results(set(), set(), set())
        ticket = Ticket(RequestKey("t"), 1, "p/decode", Span(0, 32), starts=(0, 13))
        receive = ReceiveWork("d1", ticket, ([1, 2], [3, 4]), PromptStates(33), "gone/prefill", True)
        worker.bind_connector_metadata(StepWork(receives=[receive], cancels=[]))
        worker.start_load_kv(None)
        found: list[Results] = []
        wait(
            lambda: (
                found.append(worker.get_transfer_results(set())) is None and bool(found[-1].finished_recving)
            )
        )
        assert found[-1] == Results(set(), {"d1"}, {"d1"})
        assert worker.get_block_ids_with_load_errors() == set()
    finally:
        worker.shutdown()


@pytest.mark.parametrize(
    ("early_s", "changes", "refused"),
    [
        (0.004, {}, ""),
        (0.0, {"policy": "recompute"}, ""),
        (0.004, {"policy": "recompute"}, "kv_load_failure_policy must be"),
        (0.004, {"groups": [FULL, SLIDING]}, "the model must have one KV cache group"),
        (0.004, {"role": ("producer",)}, "kv_role must be"),
        # It would send what it has computed from lost KV.
        (0.004, {"role": ("producer", "consumer")}, "kv_role must be"),
    ],
)
def test_reports_are_early_only_where_vllm_can_be_told_of_a_loss(
    early_s: float, changes: dict[str, Any], refused: str, extra: dict[str, Any]
) -> None:
    from disagg.vllm.connector import DisaggConnector

    early = early_s > 0 and not refused
    vllm_config, caches = configs("p", extra | {"early_s": early_s}, **{"role": ("consumer",)} | changes)
    with capture_logs() as logs:
        connector = DisaggConnector(vllm_config, Role.SCHEDULER, caches)
    reasons = [one["reason"] for one in logs if one["event"] == "early_s_has_no_effect"]
    assert [refused in reason for reason in reasons] == [True] * bool(refused)
    evicted: list[set[int]] = []
    connector.bind_gpu_block_pool(SimpleNamespace(evict_blocks=evicted.append))
    unsettled = connector.scheduling.unsettled
    assert (unsettled is not None) is early
    settings = VllmSettings.of(facts_of(vllm_config, caches))
    assert settings.early_s == (early_s if early else 0.0)
    connector.shutdown()
    if unsettled is not None:
        unsettled.add("d1", [3])
        unsettled.tell(["d1"])
        unsettled.lost({3})
        assert evicted == [{3}]


@pytest.mark.parametrize(
    ("changes", "extra_changes", "named"),
    [
        ({"pp": 2}, {}, "pipeline_parallel_size is 2"),
        ({"groups": [RECURRENT]}, {}, "recurrent layers only"),
        (
            {"groups": [FULL, recurrent(mamba_cache_mode="all")]},
            {},
            "mamba_cache_mode all, only none and align",
        ),
        ({"groups": [FULL, recurrent(num_speculative_blocks=2)]}, {}, "speculative decoding with recurrent"),
        ({"groups": [FULL, UNEQUAL]}, {}, "recurrent layers with different states in one KV cache group"),
        ({"groups": [FULL, RECURRENT], "use_replayssm": True}, {}, "without --use-replayssm"),
        (
            {"groups": [FULL, spec_of("MambaSpec2", ("MambaSpec",))]},
            {},
            "KV cache group of MambaSpec2; .* --disable-hybrid-kv-cache-manager",
        ),
        ({"groups": [spec_of("SlidingWindowMLASpec", ("SlidingWindowSpec",))]}, {}, "SlidingWindowMLASpec"),
        ({"groups": [FULL, spec_of("MLAAttentionSpec")]}, {}, "KV cache group of MLAAttentionSpec"),
        ({"groups": [CHUNKED, CHUNKED]}, {}, "no KV to move at the end of a chunk"),
        ({"groups": [FULL, LARGER], "device": "cpu"}, {}, "blocks of 16, 32 tokens; on a CPU"),
        ({}, {"ports": 1}, "has ports; DisaggConnector knows port"),
        ({}, {"port": 70000}, "port of kv_connector_extra_config is 70000"),
        ({}, {"lease_s": 0}, "lease_s of kv_connector_extra_config is 0"),
        ({}, {"early_s": 1}, "early_s of kv_connector_extra_config is 1; it must be from 0 to 0.05 s"),
        ({}, {"early_s": "soon"}, "early_s of kv_connector_extra_config is 'soon'"),
        ({}, {"transfer": {"ring": 1}}, "kv_connector_extra_config: .*ring"),
        ({}, {"control": {}}, "disagg keys keys.json"),
    ],
)
def test_errors_name_the_setting(
    changes: dict[str, Any], extra_changes: dict[str, Any], named: str, extra: dict[str, Any]
) -> None:
    from disagg.vllm.connector import DisaggConnector

    vllm_config, caches = configs("p", extra | extra_changes, **changes)
    with pytest.raises(ConfigError, match=named):
        DisaggConnector(vllm_config, Role.SCHEDULER, caches)
