"""Stands in for the modules of vLLM that `disagg.vllm.compat` imports, and for the configuration that vLLM passes."""

from __future__ import annotations

import enum
import sys
from abc import ABC, abstractmethod
from dataclasses import dataclass
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from disagg.vllm.compat import BASE_MODULE

NEWER = ("SupportsHMA", "KVConnectorTransferResults")


class Role(enum.Enum):
    SCHEDULER = 0
    WORKER = 1


class Base(ABC):
    """A base class with the abstract methods of vLLM's, and with its handling of metadata."""

    def __init__(self, vllm_config: Any, role: Any, kv_cache_config: Any) -> None:
        self._metadata: Any = None
        self.role = role

    def bind_connector_metadata(self, metadata: Any) -> None:
        self._metadata = metadata

    def clear_connector_metadata(self) -> None:
        self._metadata = None

    def _get_connector_metadata(self) -> Any:
        assert self._metadata is not None
        return self._metadata

    @abstractmethod
    def start_load_kv(self, forward_context: Any, **kwargs: Any) -> None: ...

    @abstractmethod
    def wait_for_layer_load(self, layer_name: str) -> None: ...

    @abstractmethod
    def save_kv_layer(self, layer_name: str, kv_layer: Any, attn_metadata: Any, **kwargs: Any) -> None: ...

    @abstractmethod
    def wait_for_save(self) -> None: ...

    @abstractmethod
    def get_num_new_matched_tokens(self, request: Any, num_computed_tokens: int) -> Any: ...

    @abstractmethod
    def update_state_after_alloc(self, request: Any, blocks: Any, num_external_tokens: int) -> None: ...

    @abstractmethod
    def build_connector_meta(self, scheduler_output: Any) -> Any: ...


class Hybrid(ABC):
    """vLLM's `SupportsHMA`."""

    @abstractmethod
    def request_finished_all_groups(self, request: Any, block_ids: Any) -> Any: ...


@dataclass
class Results:
    """vLLM's `KVConnectorTransferResults`."""

    finished_sending: set[str]
    finished_recving: set[str]
    failed_recving: set[str]


def install(patch: pytest.MonkeyPatch, tp_rank: int = 0, names: tuple[str, ...] = NEWER) -> None:
    """Makes vLLM importable, as far as the connector needs it. `names`: those that not all versions have."""
    base: Any = ModuleType(BASE_MODULE)
    base.KVConnectorBase_V1 = Base
    for name, found in zip(NEWER, (Hybrid, Results), strict=True):
        if name in names:
            setattr(base, name, found)
    parallel = ModuleType("vllm.distributed.parallel_state")
    parallel.get_tensor_model_parallel_rank = lambda: tp_rank  # type: ignore[attr-defined]
    patch.setitem(sys.modules, BASE_MODULE, base)
    patch.setitem(sys.modules, "vllm.distributed.parallel_state", parallel)


def spec_of(kind: str, parents: tuple[str, ...] = (), block_size: int = 16, **values: Any) -> Any:
    """A specification of vLLM: an instance of a class of this name, with parents of these names."""
    bases = tuple(type(name, (), {}) for name in parents)
    return type(kind, bases, {"block_size": block_size, **values})()


def configs(engine_id: str, extra: dict[str, Any], **changes: Any) -> tuple[Any, Any]:
    """`vllm_config` and `kv_cache_config` of an engine; `changes` overwrite the values below."""
    values: dict[str, Any] = {
        "tp": 1,
        "pp": 1,
        "blocks": 24,
        "groups": [spec_of("FullAttentionSpec")],
        "kv_heads": 4,
        "use_mla": False,
        "cache_dtype": "auto",
        "use_replayssm": False,
        "device": "cuda",
        "role": ("producer", "consumer"),
        "policy": "fail",
    } | changes
    vllm_config = SimpleNamespace(
        kv_transfer_config=SimpleNamespace(
            engine_id=engine_id,
            is_kv_producer="producer" in values["role"],
            is_kv_consumer="consumer" in values["role"],
            kv_connector_extra_config=extra,
            kv_load_failure_policy=values["policy"],
        ),
        parallel_config=SimpleNamespace(
            pipeline_parallel_size=values["pp"], tensor_parallel_size=values["tp"], data_parallel_index=0
        ),
        model_config=SimpleNamespace(
            model="tiny",
            dtype="float16",
            use_mla=values["use_mla"],
            get_total_num_kv_heads=lambda: values["kv_heads"],
        ),
        cache_config=SimpleNamespace(
            cache_dtype=values["cache_dtype"], use_replayssm=values["use_replayssm"]
        ),
        scheduler_config=SimpleNamespace(async_scheduling=False),
        device_config=SimpleNamespace(device_type=values["device"]),
    )
    groups = [
        SimpleNamespace(kv_cache_spec=spec, layer_names=[f"layers.{number}"])
        for number, spec in enumerate(values["groups"])
    ]
    return vllm_config, SimpleNamespace(num_blocks=values["blocks"], kv_cache_groups=groups)
