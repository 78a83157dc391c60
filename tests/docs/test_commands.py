"""Commands in the documentation have flags that exist."""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator
from pathlib import Path

import pytest

from disagg.cli.app import command_line
from disagg.cli.hints import flags_of_commands

ROOT = Path(__file__).resolve().parents[2]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md")), ROOT / "deploy" / "README.md"]
FLAGS = flags_of_commands(command_line())
_BLOCK = re.compile(r"^```sh\n(.*?)^```", re.MULTILINE | re.DOTALL)
_INLINE = re.compile(r"`(disagg [^`]+)`")


def commands(page: str) -> Iterator[list[str]]:
    """Yields the words behind `disagg` of each command, in blocks and in the text."""
    blocks = "\n".join(_BLOCK.findall(page)).replace("\\\n", " ").splitlines()
    for line in [*blocks, *(" ".join(found.split()) for found in _INLINE.findall(page))]:
        if found := re.match(r"(?:\S*/)?disagg (?!-)(.*)", line.split(" # ")[0]):
            yield shlex.split(found[1].split("&&")[0])


def unknown(words: list[str]) -> list[str]:
    """Returns the flags that the command lacks, or the command itself if there is none."""
    name = next((" ".join(words[:count]) for count in (2, 1) if " ".join(words[:count]) in FLAGS), "")
    if not name:
        return [] if words in (["bench"], ["COMMAND", "-h"]) else words[:1]
    given = [word.split("=")[0] for word in words if re.match(r"--?[a-z]", word)]
    return [flag for flag in given if flag not in (*FLAGS[name], "-h", "--help")]


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_flags_exist(page: Path) -> None:
    found = [(words, bad) for words in commands(page.read_text()) if (bad := unknown(words))]
    assert found == []


def test_a_flag_that_does_not_exist_is_found() -> None:
    page = "`disagg serve DIR --prefill-ranks 2`\n```sh\n.venv/bin/disagg top --url x --bad  # --worse\n```\n"
    assert [unknown(words) for words in commands(page)] == [["--bad"], ["--prefill-ranks"]]
