"""Whole pages are copied, every byte of them, and no other byte of the pool changes.

`test_kernels_interpreted.py` runs this file again with the Triton kernel, in Triton's interpreter.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import pytest
import torch
from host_waits import no_host_waits

from kernels.copy.page_copy import copy_pages, copy_pages_reference

torch.set_num_threads(1)
DEVICES = ["cpu", pytest.param("cuda:0", marks=pytest.mark.gpu)]
RUNS = [copy_pages, copy_pages_reference]
Run = Callable[[torch.Tensor, torch.Tensor, torch.Tensor, int], None]


@dataclass(frozen=True)
class Case:
    """A pool of random bytes, `shift` elements behind the start of its memory, and copies at random."""

    dtype: torch.dtype
    head_dim: int
    heads: int
    page_size: int
    copies: int = 3
    layers: int = 2
    pages: int = 9
    left_over: int = 0
    """Slots behind the last page."""
    shift: int = 0
    index_dtype: torch.dtype = torch.int64
    planes: int = 2

    def pool(self, device: str) -> tuple[torch.Tensor, torch.Tensor]:
        """(the whole allocation as bytes, the pool in it)."""
        shape = (
            self.layers,
            self.planes,
            self.pages * self.page_size + self.left_over,
            self.heads,
            self.head_dim,
        )
        count = int(np.prod(shape)) + self.shift + 8
        generator = torch.Generator().manual_seed(self.page_size)
        nbytes = count * self.dtype.itemsize
        memory = torch.randint(0, 256, (nbytes,), dtype=torch.uint8, generator=generator).to(device)
        return memory, memory.view(self.dtype)[self.shift : count - 8].view(shape)

    def numbers(self) -> tuple[list[int], list[int]]:
        """Sources, some more than once, and destinations, which are others."""
        generator = torch.Generator().manual_seed(self.copies)
        order = torch.randperm(self.pages, generator=generator).tolist()
        sources = order[self.copies :]
        picked = torch.randint(0, len(sources), (self.copies,), generator=generator).tolist()
        return [sources[index] for index in picked], order[: self.copies]

    def expected(self, memory: torch.Tensor, pool: torch.Tensor) -> np.ndarray:
        """Byte by byte: what the allocation must hold."""
        before = memory.cpu().numpy().copy()
        after = before.copy()
        token_bytes = self.heads * self.head_dim * self.dtype.itemsize
        first, page_bytes = self.shift * self.dtype.itemsize, token_bytes * self.page_size
        for plane in range(self.planes * self.layers):
            start = first + plane * pool.shape[2] * token_bytes
            for source, destination in zip(*self.numbers(), strict=True):
                here, there = (start + page * page_bytes for page in (source, destination))
                after[there : there + page_bytes] = before[here : here + page_bytes]
        return after


CASES = [
    *(  # every element type, heads of odd sizes too: a quantized head of 64 is 132 bytes
        Case(dtype, head_dim, heads, page_size)
        for dtype, head_dim in ((torch.float32, 5), (torch.bfloat16, 8), (torch.uint8, 132), (torch.uint8, 3))
        for heads in (1, 3, 8)
        for page_size in (1, 4, 32)
    ),
    *(Case(torch.float16, 16, heads, 16) for heads in range(1, 9)),
    *(Case(torch.uint8, 132, heads, 4, planes=1) for heads in (1, 4)),  # K and V of a head in one row
    *(Case(torch.uint8, 132, 2, 2, shift=shift) for shift in (1, 2, 4, 8, 16)),  # only narrow words fit
    Case(torch.bfloat16, 128, 8, 16),  # a page of several tiles
    Case(torch.bfloat16, 128, 5, 3, copies=1),
    Case(torch.float32, 3, 1, 1, copies=60, pages=70),  # more than one tile of pages
    Case(torch.bfloat16, 20, 3, 7, copies=8),  # all but one page are destinations of the one that is left
    Case(torch.bfloat16, 8, 2, 4, left_over=3),
    Case(torch.bfloat16, 8, 2, 4, index_dtype=torch.int32),
    Case(torch.bfloat16, 8, 2, 4, copies=0),
]


@pytest.mark.parametrize("run", RUNS)
@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("case", CASES, ids=str)
def test_every_byte_and_no_other(case: Case, device: str, run: Run) -> None:
    memory, pool = case.pool(device)
    expected = case.expected(memory, pool)
    sources, destinations = (
        torch.tensor(pages, dtype=case.index_dtype, device=device) for pages in case.numbers()
    )
    run(pool, sources, destinations, case.page_size)
    assert (memory.cpu().numpy() == expected).all()


@pytest.mark.parametrize("seed", range(8))
@pytest.mark.parametrize("device", DEVICES)
def test_random_batches(seed: int, device: str) -> None:
    generator = torch.Generator().manual_seed(seed)
    picked = [int(torch.randint(0, bound, (1,), generator=generator)) for bound in (4, 200, 8, 32, 12)]
    dtypes = (torch.float32, torch.bfloat16, torch.float16, torch.uint8)
    _, head_dim, heads, page_size, copies = picked
    case = Case(dtypes[picked[0]], head_dim + 1, heads + 1, page_size + 1, copies, layers=1, pages=13)
    memory, pool = case.pool(device)
    expected = case.expected(memory, pool)
    sources, destinations = (torch.tensor(pages, dtype=torch.int64).to(device) for pages in case.numbers())
    copy_pages(pool, sources, destinations, case.page_size)
    assert (memory.cpu().numpy() == expected).all()


@pytest.mark.parametrize("device", DEVICES)
def test_offsets_beyond_two_to_the_31(device: str) -> None:
    """Of the 4 GiB only the touched pages ever exist on a CPU. A product kept in int32 would wrap."""
    slots, page_size = (2**31 // 3 + 1000) // 5 * 5, 5
    pool = torch.empty((1, 2, slots, 3, 1), dtype=torch.uint8, device=device)
    numbers = (
        torch.tensor([0, 3, slots // 5 - 2], device=device),
        torch.tensor([slots // 5 - 1, 1, 2]).to(device),
    )
    pages = pool.view(2, -1, page_size * 3)
    wanted = torch.randint(0, 256, (2, 3, page_size * 3), dtype=torch.uint8).to(device)
    pages[:, numbers[0]] = wanted
    copy_pages(pool, *numbers, page_size)
    assert torch.equal(pages[:, numbers[1]], wanted)
    assert torch.equal(pages[:, numbers[0]], wanted)


@pytest.mark.gpu
def test_runs_on_the_current_stream_and_never_waits() -> None:
    case = Case(torch.bfloat16, 128, 4, 16, copies=4)
    memory, pool = case.pool("cuda:0")
    content, expected = memory.clone(), case.expected(memory, pool)
    lists = [torch.tensor(pages, device="cuda:0") for pages in case.numbers()]
    copy_pages(pool, *lists, case.page_size)  # compiles, so that only a launch follows
    memory.zero_()
    torch.cuda.synchronize()
    stream = torch.cuda.Stream("cuda:0")
    with no_host_waits(), torch.cuda.stream(stream):
        torch.cuda._sleep(2_000_000_000)  # about a second: what runs elsewhere runs before the pool is filled
        memory.copy_(content)
        copy_pages(pool, *lists, case.page_size)
        done = stream.record_event()
        assert not done.query(), "the launch waited for the stream"
    stream.synchronize()
    assert (memory.cpu().numpy() == expected).all()


@pytest.mark.gpu
def test_a_recorded_copy_reads_its_lists_at_each_replay() -> None:
    case = Case(torch.uint8, 132, 4, 16, copies=4)
    memory, pool = case.pool("cuda:0")
    expected = case.expected(memory, pool)
    sources, destinations = (torch.tensor(pages, device="cuda:0") for pages in case.numbers())
    lists = torch.zeros_like(sources), torch.zeros_like(destinations)
    copy_pages(pool, *lists, case.page_size)  # compiles
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        copy_pages(pool, *lists, case.page_size)
    lists[0].copy_(sources)
    lists[1].copy_(destinations)
    graph.replay()
    assert (memory.cpu().numpy() == expected).all()


GOOD = {
    "buffer": torch.zeros(2, 2, 12, 3, 4),
    "sources": torch.tensor([1, 1]),
    "destinations": torch.tensor([0, 2]),
    "page_size": 4,
}


@pytest.mark.parametrize("run", RUNS)
@pytest.mark.parametrize(
    ("wrong", "said"),
    [
        ({"buffer": torch.zeros(2, 12, 3, 4)}, r"pool must be contiguous \[layers, 1 or 2"),
        ({"buffer": torch.zeros(2, 3, 12, 3, 4)}, r"pool must be .* got \[2, 3, 12, 3, 4\]"),
        ({"buffer": torch.zeros(2, 2, 12, 4, 3).transpose(3, 4)}, "pool must be contiguous"),
        ({"sources": torch.tensor([1])}, r"destinations must be contiguous .* got torch.int64 \[2\]"),
        ({"sources": torch.tensor([[1, 1]])}, r"sources must be .* \[1, 2\]"),
        ({"destinations": torch.tensor([0, 2]).int()}, "destinations must be .* of the same type"),
        ({"sources": torch.tensor([1.0, 1.0])}, "sources must be"),
        ({"destinations": torch.arange(4)[::2]}, "destinations must be contiguous"),
        (
            {"sources": torch.zeros(2, dtype=torch.int64, device="meta")},
            "sources must be on the pool's device",
        ),
        ({"page_size": 0}, "page_size must be 1 to the pool's 12 slots; got 0"),
        ({"page_size": 13}, "page_size must be 1 to the pool's 12 slots; got 13"),
    ],
)
def test_wrong_arguments_are_refused(run: Run, wrong: dict[str, object], said: str) -> None:
    run(**GOOD)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=said):
        run(**{**GOOD, **wrong})  # type: ignore[arg-type]
