"""Wrong arguments are refused with the tensor's name, before anything is written; the backend is chosen."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from disagg.core.errors import ConfigError
from disagg.core.types import Span
from kernels.copy.gather import gather, gather_reference
from kernels.copy.layout import plan_copy, segment_bytes
from kernels.copy.scatter import scatter, scatter_reference
from kernels.dispatch import backend

POOL = (3, 2, 10, 4, 8)
GOOD: dict[str, Any] = {
    "pool": torch.zeros(POOL, dtype=torch.bfloat16),
    "slots": torch.arange(5),
    "layers": Span(1, 3),
    "heads": Span(0, 2),
    "staged": torch.zeros(2 * 2 * 5 * 2 * 8 * 2, dtype=torch.uint8),
}
BAD = [
    (
        {"pool": torch.zeros((3, 10, 4, 8))},
        r"pool must be contiguous \[layers, 1 or 2, slots, heads, head_dim\]",
    ),
    ({"pool": torch.zeros((3, 3, 10, 4, 8))}, r"pool must be .* got \[3, 3, 10, 4, 8\]"),
    ({"pool": torch.zeros((3, 2, 10, 8, 4)).transpose(3, 4)}, "pool must be contiguous"),
    ({"slots": torch.zeros(5)}, r"slots must be contiguous int32 or int64 \[tokens\]; got torch.float32"),
    ({"slots": torch.zeros((1, 5), dtype=torch.int64)}, r"slots must be .* \[1, 5\]"),
    ({"slots": torch.arange(10)[::2]}, "slots must be contiguous"),
    ({"slots": torch.zeros(5, dtype=torch.int64, device="meta")}, "slots must be on the pool's device cpu"),
    ({"layers": Span(2, 4)}, r"layers \[2, 4\) is outside the pool's 3 layers"),
    ({"layers": Span(-1, 1)}, r"layers \[-1, 1\) is outside"),
    ({"heads": Span(3, 5)}, r"heads \[3, 5\) is outside the pool's 4 heads"),
    ({"staged": torch.zeros(639, dtype=torch.uint8)}, "exactly the segment's 640 bytes; got 639"),
    ({"staged": torch.zeros(641, dtype=torch.uint8)}, "exactly the segment's 640 bytes; got 641"),
    ({"staged": torch.zeros(640, dtype=torch.int8)}, r"must be contiguous uint8 \[bytes\]; got torch.int8"),
    ({"staged": torch.zeros(1280, dtype=torch.uint8)[::2]}, "must be contiguous uint8"),
    ({"staged": torch.zeros(640, dtype=torch.uint8, device="meta")}, "must be on the pool's device cpu"),
]


def call_gather(run: Any, a: dict[str, Any]) -> None:
    run(a["pool"], a["slots"], a["layers"], a["heads"], a["staged"])


def call_scatter(run: Any, a: dict[str, Any]) -> None:
    run(a["staged"], a["pool"], a["slots"], a["layers"], a["heads"])


@pytest.mark.parametrize(("wrong", "message"), BAD)
@pytest.mark.parametrize(
    ("call", "run"),
    [
        (call_gather, gather),
        (call_gather, gather_reference),
        (call_scatter, scatter),
        (call_scatter, scatter_reference),
    ],
)
def test_wrong_arguments_are_refused(call: Any, run: Any, wrong: dict[str, Any], message: str) -> None:
    call(run, GOOD)
    with pytest.raises(ValueError, match=message):
        call(run, {**GOOD, **wrong})


def test_the_staging_tensor_is_called_as_the_caller_calls_it() -> None:
    short = {**GOOD, "staged": GOOD["staged"][:-1]}
    with pytest.raises(ValueError, match=r"^out must"):
        call_gather(gather, short)
    with pytest.raises(ValueError, match=r"^staged must"):
        call_scatter(scatter, short)


def test_segment_bytes() -> None:
    assert segment_bytes(GOOD["pool"], 5, Span(1, 3), Span(0, 2)) == 640
    assert segment_bytes(GOOD["pool"], 5, Span(1, 1), Span(0, 2)) == 0


@pytest.mark.parametrize(
    ("shift_bytes", "word_bytes", "vector_words"),
    [(0, 8, 2), (8, 8, 1), (4, 4, 1), (2, 2, 1), (1, 1, 1)],
)
def test_words_fit_the_addresses_of_foreign_memory(
    shift_bytes: int, word_bytes: int, vector_words: int
) -> None:
    memory = np.zeros(640 + 32, dtype=np.uint8)
    start = -memory.ctypes.data % 16 + shift_bytes
    staged = torch.from_numpy(memory[start : start + 640])  # its storage begins there, at offset 0
    pool = torch.zeros(POOL, dtype=torch.bfloat16)
    copy = plan_copy(pool, GOOD["slots"], GOOD["layers"], GOOD["heads"], staged, "staged")
    assert copy is not None
    assert (copy.word_bytes, copy.vector_words) == (word_bytes, vector_words)
    assert copy.pool_words().element_size() == copy.staged_words().element_size() == word_bytes


@pytest.mark.parametrize(
    ("variable", "device", "expected"),
    [
        (None, "cpu", "torch"),
        (None, "cuda", "triton"),
        ("torch", "cuda", "torch"),
        ("triton", "cuda", "triton"),
    ],
)
def test_backend_by_device_or_by_environment(
    variable: str | None, device: str, expected: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("DISAGG_KERNELS", raising=False)
    if variable is not None:
        monkeypatch.setenv("DISAGG_KERNELS", variable)
    assert backend(torch.device(device)) == expected


@pytest.mark.parametrize(
    ("variable", "message"), [("cuda", "must be 'torch' or 'triton'"), ("triton", "TRITON_INTERPRET=1")]
)
def test_backend_that_cannot_be(variable: str, message: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DISAGG_KERNELS", variable)
    with pytest.raises(ConfigError, match=message):
        call_gather(gather, GOOD)
