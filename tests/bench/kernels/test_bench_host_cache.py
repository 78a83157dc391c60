"""The benchmark of the second tier's copies: figures for both ways, and wrong bytes are no figure."""

from __future__ import annotations

import json

import pytest
import torch

from disagg.bench.kernels import host_cache
from disagg.bench.kernels.page_copy import PageCopyBench
from disagg.cli.app import run
from disagg.core.errors import InvariantError
from disagg.core.types import Span
from disagg.kv.host_pool import HostPool

FLAGS = ["bench", "kernels", "--what", "host_cache", "--layers", "2", "--repeats", "2", "--device", "cpu"]


def test_the_command_shows_both_ways(capsys: pytest.CaptureFixture[str]) -> None:
    assert run([*FLAGS, "--rows", "264,2048", "--size", "1MiB", "--json"]) == 0
    results = json.loads(capsys.readouterr().out)["results"]
    assert [line["title"] for line in results] == [
        f"{way}, rows of {row} B, {order} blocks"
        for row in (264, 2048)
        for order in ("consecutive", "scattered")
        for way in ("store", "load")
    ]
    assert [line["labels"]["pages"] for line in results[::4]] == [
        (1 << 20) // (64 * row) for row in (264, 2048)
    ]


@pytest.mark.parametrize(
    ("layers", "pages", "said"),
    [(1, 0, "a store and a load moved wrong bytes"), (2, 1, "a load wrote outside of its pages")],
)
def test_wrong_bytes_are_no_figure(
    layers: int, pages: int, said: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A load without its last layer; a load to a page that was stored."""

    def wrong(self: HostPool, targets: list[int], blocks: list[int]) -> None:
        list(self.load_groups(targets, blocks, [Span(0, layers)]))
        if pages:
            others = [page for page in range(2 * len(targets)) if page not in targets]
            list(self.load_groups(others[:1], blocks[1:2], [Span(0, self.layers)]))

    monkeypatch.setattr(HostPool, "load", wrong)
    with pytest.raises(InvariantError, match=said):
        host_cache.run(PageCopyBench(torch.device("cpu"), (256,), 1 << 18, 2, 16, 1))
