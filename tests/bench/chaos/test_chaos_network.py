"""The command that cuts a network: real programs of this test."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from disagg.bench.chaos import network
from disagg.bench.chaos.network import CutCommand
from disagg.core.errors import DisaggError


def program(folder: Path, text: str) -> str:
    """Returns a command for `CutCommand`: a shell script with one argument of its own."""
    script = folder / "a script"
    script.write_text(f"#!/bin/sh\n{text}\n")
    script.chmod(0o700)
    return f"'{script}' {folder}/words"


def test_the_command_is_called_with_the_direction_and_at_the_end(tmp_path: Path) -> None:
    one = CutCommand(program(tmp_path, 'echo "$2" >> "$1"'))

    async def cut() -> None:
        await one.cut("forth")
        await one.mend()
        one.close()  # nothing is cut any more
        await one.cut("both")

    asyncio.run(cut())
    one.close()
    one.close()
    assert (tmp_path / "words").read_text().split() == ["forth", "mend", "both", "mend"]


def test_a_command_that_fails(tmp_path: Path) -> None:
    one = CutCommand(
        program(tmp_path, 'echo "$2" >> "$1"; echo no link >&2; exit "$([ $2 = mend ]; echo $?)"')
    )
    with pytest.raises(DisaggError, match=r"--cut-command: .*words back ended with status 1: no link"):
        asyncio.run(one.cut("back"))
    one.close()
    assert (tmp_path / "words").read_text().split() == ["back", "mend"], "it may have cut a part"


def test_a_command_that_does_not_exist() -> None:
    with pytest.raises(DisaggError, match="--cut-command: cannot run /no/such mend: No such file"):
        asyncio.run(CutCommand("/no/such").mend())


def test_a_command_that_never_ends(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(network, "COMMAND_TIMEOUT_S", 0.05)
    with pytest.raises(DisaggError, match=r"words both has not ended within 0\.05 s"):
        asyncio.run(CutCommand(program(tmp_path, "exec sleep 60")).cut("both"))


def test_the_end_waits_for_a_cut_that_was_cancelled(tmp_path: Path) -> None:
    """Otherwise the network would stay cut after the run."""
    words, go = tmp_path / "words", tmp_path / "go"
    slow = f'echo "begin $2" >> "$1"; [ "$2" = mend ] || until [ -e "{go}" ]; do sleep 0.01; done; echo "$2" >> "$1"'
    one = CutCommand(program(tmp_path, slow))

    async def cut() -> None:
        cutting = asyncio.create_task(one.cut("both"))
        while not words.exists():
            await asyncio.sleep(0.005)
        cutting.cancel()
        with pytest.raises(asyncio.CancelledError):
            await cutting
        closing = asyncio.create_task(asyncio.to_thread(one.close))
        await asyncio.wait([closing], timeout=0.1)
        go.touch()
        await closing

    asyncio.run(cut())
    assert words.read_text().splitlines() == ["begin both", "both", "begin mend", "mend"]
