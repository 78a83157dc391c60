"""The benchmark of page copies: figures with a ceiling, and wrong bytes are no figure."""

from __future__ import annotations

import json
from collections.abc import Callable

import pytest
import torch

from disagg.bench.kernels import page_copy as bench
from disagg.cli.app import run
from disagg.core.errors import InvariantError

FLAGS = ["bench", "kernels", "--what", "page_copy", "--layers", "2", "--repeats", "2", "--device", "cpu"]


def test_the_command_shows_a_rate_for_each_width(capsys: pytest.CaptureFixture[str]) -> None:
    assert run([*FLAGS, "--rows", "264,2048", "--size", "1MiB", "--json"]) == 0
    *rates, call = json.loads(capsys.readouterr().out)["results"]
    assert [line["title"] for line in rates] == ["page copy, rows of 264 B", "page copy, rows of 2048 B"]
    assert [line["labels"]["pages"] for line in rates] == [(1 << 20) // (64 * row) for row in (264, 2048)]
    for line in rates:
        assert "share" not in line, "on a CPU the plain copy is no ceiling"
    assert call["unit"] == "us"


def one_too_far(pool: torch.Tensor, sources: torch.Tensor, destinations: torch.Tensor) -> None:
    pool.view(-1)[int(sources[0]) * 16 * pool.shape[4]] += 1


def one_too_few(pool: torch.Tensor, sources: torch.Tensor, destinations: torch.Tensor) -> None:
    pool.view(-1)[int(destinations[-1]) * 16 * pool.shape[4]] += 1


@pytest.mark.parametrize(
    ("spoil", "said"), [(one_too_far, "wrote outside of its"), (one_too_few, "moved wrong bytes")]
)
def test_wrong_bytes_are_no_figure(
    spoil: Callable[..., None], said: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = bench.copy_pages

    def wrong(pool: torch.Tensor, *rest: object) -> None:
        real(pool, *rest)  # type: ignore[arg-type]
        spoil(pool, *rest[:2])

    monkeypatch.setattr(bench, "copy_pages", wrong)
    monkeypatch.setattr(bench, "seconds_of", lambda work, device, repeats: (work(), 1.0)[1:])
    with pytest.raises(InvariantError, match=said):
        bench.run(bench.PageCopyBench(torch.device("cpu"), (256,), 1 << 18, 2, 16, 1))


@pytest.mark.parametrize(
    ("flags", "said"),
    [(["--rows", "3"], "multiples of 2"), (["--size", "1KiB"], "hold no page of 16 tokens")],
)
def test_bad_sizes_are_refused(flags: list[str], said: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert run([*FLAGS, *flags]) == 2
    assert said in capsys.readouterr().err
