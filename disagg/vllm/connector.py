"""`DisaggConnector`, the class that vLLM loads: `kv_connector_module_path` is `disagg.vllm.connector`.

The class is made when it is first read, because its base class is vLLM's.
"""

from __future__ import annotations

import time
from functools import cache, partial
from typing import Any

import structlog
import torch

from disagg.vllm import compat
from disagg.vllm.directory import EngineDirectory
from disagg.vllm.scheduler import SchedulerSide
from disagg.vllm.settings import VllmSettings
from disagg.vllm.work import StepWork, WorkerHandshake
from disagg.vllm.worker import WorkerSide, host_of, make_wires

log = structlog.get_logger(__name__)


class ConnectorMethods:
    """Methods of a connector in both roles, in vLLM's names; see `KVConnectorBase_V1`."""

    scheduling: SchedulerSide
    """The connector in the scheduler; not set in a worker."""
    working: WorkerSide
    """The connector in a worker; not set in the scheduler."""

    def __init__(self, vllm_config: Any, role: Any, kv_cache_config: Any) -> None:
        """Raises ConfigError for an engine or settings that are not supported."""
        super().__init__(vllm_config, role, kv_cache_config)  # type: ignore[call-arg]
        facts = compat.facts_of(vllm_config, kv_cache_config)
        settings = VllmSettings.of(facts)
        if compat.is_scheduler(role):
            channel = settings.scheduler_channel()
            directory = EngineDirectory(channel, time.monotonic)
            host, early = host_of(channel.address), settings.early_s > 0
            if settings.early_refused:  # the workers have the same settings
                log.warning("early_s_has_no_effect", reason=settings.early_refused)
            self.scheduling = SchedulerSide(facts, directory, host, settings.port, early=early)
        else:
            rank = compat.tensor_parallel_rank()
            self.working = WorkerSide(facts, settings, rank, partial(make_wires, settings))

    # --- worker

    def register_kv_caches(self, kv_caches: dict[str, torch.Tensor]) -> None:
        """Makes the data path over the KV cache, and starts its threads."""
        self.working.register_kv_caches(kv_caches)
        self.working.start()

    def get_handshake_metadata(self) -> WorkerHandshake:
        """Returns this worker's addresses and its part of the KV."""
        return self.working.get_handshake_metadata()

    def bind_connector_metadata(self, connector_metadata: StepWork) -> None:
        """Starts the outgoing transfers of the step, before the model runs. Waits for KV that was reported early."""
        super().bind_connector_metadata(connector_metadata)  # type: ignore[misc]
        self.working.begin_step(connector_metadata)

    def start_load_kv(self, forward_context: Any, **kwargs: Any) -> None:
        """Starts the incoming transfers of the step. Never blocks."""
        work: StepWork = self._get_connector_metadata()  # type: ignore[attr-defined]
        self.working.start_load_kv(work)

    def wait_for_layer_load(self, layer_name: str) -> None:
        """Does nothing: `bind_connector_metadata` waits for all KV, because recorded graphs do not call this."""

    def save_kv_layer(
        self, layer_name: str, kv_layer: torch.Tensor, attn_metadata: Any, **kwargs: Any
    ) -> None:
        """Sends the layer's KV of the prompts that the step computes. Never blocks."""
        self.working.save_kv_layer(layer_name)

    def wait_for_save(self) -> None:
        """Sends the layers that `save_kv_layer` was not called for. Never blocks."""
        self.working.wait_for_save()

    def get_finished(self, finished_req_ids: set[str]) -> tuple[set[str] | None, set[str] | None]:
        """Returns the requests whose blocks may be freed, and the requests whose KV has come or failed to.

        A step without tokens waits for KV up to `LINGER_S`.
        """
        return self.working.get_finished()

    def get_transfer_results(self, finished_req_ids: set[str]) -> Any:
        """Returns the requests of `get_finished`, and those whose KV did not come; newer versions of vLLM call it."""
        sent, received = self.get_finished(finished_req_ids)
        return compat.transfer_results(sent, received, self.working.failed_requests())

    def get_block_ids_with_load_errors(self) -> set[int]:
        """Returns the blocks whose KV did not come."""
        return self.working.get_block_ids_with_load_errors()

    def build_connector_worker_meta(self) -> Any:
        """Returns the requests whose KV has come, for a scheduler in this process."""
        return self.working.newly_received()

    # --- scheduler

    def bind_gpu_block_pool(self, gpu_block_pool: Any) -> None:
        """Keeps what removes blocks from vLLM's prefix cache, for KV that is lost after its early report."""
        if self.scheduling.unsettled is not None:
            self.scheduling.unsettled.evict = gpu_block_pool.evict_blocks

    def on_new_request(self, request: Any) -> None:
        """Shortens a prompt by one token if another engine continues it, and vLLM frees blocks or has states."""
        self.scheduling.on_new_request(request)

    def set_xfer_handshake_metadata(self, metadata: dict[int, WorkerHandshake]) -> None:
        """Begins to answer other engines."""
        self.scheduling.set_xfer_handshake_metadata(metadata)

    def get_num_new_matched_tokens(self, request: Any, num_computed_tokens: int) -> tuple[int, bool]:
        """Returns how many tokens another engine sends, and True if it sends any."""
        return self.scheduling.get_num_new_matched_tokens(request, num_computed_tokens)

    def get_loaded_kv_cache_group_ids(self, request: Any) -> tuple[int, ...]:
        """Returns no group: vLLM zeroes the blocks of the KV of another engine before the step that passes them on.

        The KV does not fill the last block, and the rest may hold a recurrent state that reads as infinite KV.
        Transfers into the blocks begin after the step's work on the device (`WorkerSide.start_load_kv`).
        """
        return ()

    def update_state_after_alloc(self, request: Any, blocks: Any, num_external_tokens: int) -> None:
        """Follows a prompt to be sent, or reserves `blocks` for KV of another engine."""
        self.scheduling.update_state_after_alloc(request, blocks, num_external_tokens)

    def build_connector_meta(self, scheduler_output: Any) -> StepWork:
        """Returns the workers' work of a step."""
        return self.scheduling.build_connector_meta(scheduler_output)

    def request_finished(self, request: Any, block_ids: list[int]) -> tuple[bool, dict[str, Any] | None]:
        """Returns whether the request's blocks are held, and the parameters of the consumer's request."""
        return self.scheduling.request_finished(request, compat.tables_of(block_ids))

    def request_finished_all_groups(
        self, request: Any, block_ids: tuple[list[int], ...]
    ) -> tuple[bool, dict[str, Any] | None]:
        """Does the same for all KV cache groups, in versions of vLLM where the connector `SupportsHMA`."""
        return self.scheduling.request_finished(request, compat.tables_of(block_ids))

    def update_connector_output(self, connector_output: Any) -> None:
        """Forgets the requests that all workers have reported; adds those whose KV has come since."""
        self.scheduling.update_connector_output(connector_output)

    def has_pending_push_work(self) -> bool:
        """Returns whether blocks are held, so that vLLM goes on stepping."""
        return self.scheduling.has_pending_push_work()

    # --- both

    def shutdown(self) -> None:
        """Ends the connector's threads and connections."""
        side = getattr(self, "scheduling", None) or getattr(self, "working", None)
        if side is not None:
            side.shutdown()


@cache
def _connector_class() -> type:
    bases = (ConnectorMethods, *compat.base_classes())
    return type("DisaggConnector", bases, {"__module__": __name__, "__doc__": ConnectorMethods.__doc__})


def __getattr__(name: str) -> Any:
    if name == "DisaggConnector":
        return _connector_class()
    raise AttributeError(f"module {__name__} has no attribute {name}")
