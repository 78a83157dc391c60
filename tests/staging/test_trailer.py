"""Where checksums stand in messages, and how much room they leave."""

from __future__ import annotations

import torch
from hypothesis import given
from hypothesis import strategies as st

from disagg.core.types import CHECKSUM_BYTES
from kernels.copy.checksum import SUM_BYTES
from staging.trailer import largest_segment_bytes, message_bytes, trailer


def test_a_checksum_is_what_the_kernels_compute() -> None:
    assert CHECKSUM_BYTES == SUM_BYTES == torch.int64.itemsize


@given(st.integers(1, 10_000))
def test_a_checksum_is_aligned_behind_its_segment(nbytes: int) -> None:
    message = message_bytes(nbytes, checked=True)
    assert nbytes + 8 <= message < nbytes + 16
    assert message % 8 == 0
    memory = torch.zeros(message, dtype=torch.uint8)
    trailer(memory).fill_(-1)
    assert memory.tolist() == [0] * (message - 8) + [255] * 8


@given(st.integers(16, 10_000))
def test_the_largest_segment_fits_and_a_larger_one_does_not(limit_bytes: int) -> None:
    largest = largest_segment_bytes(limit_bytes, checked=True)
    assert message_bytes(largest, checked=True) <= limit_bytes < message_bytes(largest + 1, checked=True)


def test_without_checksums_a_message_is_its_segment() -> None:
    assert message_bytes(13, checked=False) == largest_segment_bytes(13, checked=False) == 13
