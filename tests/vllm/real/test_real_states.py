"""Recurrent layers with vLLM's own scheduler, cache manager and factory: `make test-vllm`."""

from __future__ import annotations

import pytest
import torch

REASON = "vLLM is not installed; `make test-vllm` makes an environment with it"
pytest.importorskip("vllm.v1.core.sched.scheduler", reason=REASON, exc_type=ImportError)

from real_vllm import BLOCK_SIZE, SEVERAL_GROUPS, run
from test_real_scheduler import Make, extra, hand_over, make, model, prompt_of
from vllm.v1.request import RequestStatus

__all__ = ["extra", "make", "model"]
pytestmark = pytest.mark.skipif(
    not SEVERAL_GROUPS, reason="this version of vLLM makes one KV cache group for the connector"
)
MODES = ["none", "align"]


@pytest.mark.parametrize("tokens", [1, 5, BLOCK_SIZE, BLOCK_SIZE + 1, BLOCK_SIZE + 2, 150])
@pytest.mark.parametrize("states", MODES)
@pytest.mark.parametrize(("asynchronous", "whole_blocks"), [(False, False), (True, False), (False, True)])
def test_a_prompt_is_handed_over(
    make: Make, states: str, tokens: int, asynchronous: bool, whole_blocks: bool
) -> None:
    options = {"asynchronous": asynchronous, "whole_blocks": whole_blocks, "states": states, "blocks": 80}
    p, d = make(role="kv_producer", **options), make(role="kv_consumer", **options)
    hand_over(p, d, tokens, answer=30)


@pytest.mark.parametrize(("prefill", "decode"), [MODES, MODES[::-1]])
def test_engines_with_different_cache_modes(make: Make, prefill: str, decode: str) -> None:
    """A request has one block at one engine, and a block of each 16 tokens at the other one."""
    p, d = make(role="kv_producer", states=prefill), make(role="kv_consumer", states=decode)
    hand_over(p, d, 100, answer=30)


def test_blocks_that_another_request_used_are_zeroed(make: Make) -> None:
    """The rest of the prompt's last block must not read as KV: vLLM zeroes it, and before the KV comes."""
    p, d = (make(role=role, states="align") for role in ("kv_producer", "kv_consumer"))
    for cache in d.caches.values():
        cache[1:] = 77
    prompt = prompt_of(BLOCK_SIZE + 5)
    p.prefill("p1", prompt)
    run([p], lambda: "p1" in p.params)
    second = d.submit("d1", prompt, p.params["p1"], answer=1)
    run([d], lambda: second.status is RequestStatus.WAITING_FOR_REMOTE_KVS)
    last = d.scheduler.kv_cache_manager.get_block_ids("d1")[0][-1]
    run([p, d], lambda: second.is_finished() and not d.scheduler.has_requests())
    for name in [name for name in d.caches if name.endswith("attn")]:
        rows = d.caches[name].transpose(1, 2)[last].view(torch.int16)
        assert rows[:5].any()
        assert not rows[5:].any()
