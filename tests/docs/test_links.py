"""Links and repository paths in the documentation lead to files and headings that exist."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
DESIGN = sorted((ROOT / "docs" / "design").glob("*.md"))
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").rglob("*.md"))]
LINKED = [*PAGES, ROOT / "CHANGELOG.md", *sorted((ROOT / "deploy").rglob("*.md"))]
WIDTH = 118
"""Columns of a line of prose; rows of tables are exempt."""
MOST_LINES = 150

_FENCE = re.compile(r"^( *)```.*?^ *```", re.MULTILINE | re.DOTALL)
_LINK = re.compile(r"\]\(([^)\s]+)\)")
_CODE = re.compile(r"`([^`\n]+)`")
_PATH = re.compile(r"[\w.-]+(?:/[\w.-]+)*/?")
_HEADING = re.compile(r"^#+ (.*)$", re.MULTILINE)
_FOLDERS = {path.name for path in ROOT.iterdir() if path.is_dir()}
_PYTHON_FILES = {
    path.name for folder in _FOLDERS - {".venv", ".git"} for path in (ROOT / folder).rglob("*.py")
}


def name_of(path: Path) -> str:
    """Of a page, relative to the repository."""
    return str(path.relative_to(ROOT))


def anchors_of(page: Path) -> set[str]:
    """Returns the anchors of a page's headings, as GitHub derives them."""
    headings = _HEADING.findall(_FENCE.sub("", page.read_text()))
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


def missing_links(page: Path) -> Iterator[str]:
    """Yields relative links of a page whose file or heading does not exist."""
    for link in _LINK.findall(_FENCE.sub("", page.read_text())):
        if re.match(r"[a-z]+:", link):
            continue
        file, _, anchor = link.partition("#")
        target = (page.parent / file).resolve() if file else page
        if not target.exists() or (anchor and anchor not in anchors_of(target)):
            yield link


def missing_paths(page: Path) -> Iterator[str]:
    """Yields backticked repository paths, and bare names of Python files, that do not exist."""
    for code in _CODE.findall(_FENCE.sub("", page.read_text())):
        path, _, _ = code.partition("::")
        if not _PATH.fullmatch(path):
            continue
        if "/" not in path:
            if path.endswith(".py") and path not in _PYTHON_FILES:
                yield path
        elif path.partition("/")[0] in _FOLDERS and not (ROOT / path).exists():
            yield path


@pytest.mark.parametrize("page", LINKED, ids=name_of)
def test_links_lead_somewhere(page: Path) -> None:
    assert list(missing_links(page)) == []


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_paths_exist(page: Path) -> None:
    assert list(missing_paths(page)) == []


@pytest.mark.parametrize("page", LINKED, ids=name_of)
def test_lines_are_short(page: Path) -> None:
    lines = enumerate(page.read_text().splitlines(), 1)
    assert [number for number, line in lines if len(line) > WIDTH and not line.startswith("|")] == []


@pytest.mark.parametrize("page", [ROOT / "README.md", *DESIGN], ids=name_of)
def test_pages_are_short(page: Path) -> None:
    assert len(page.read_text().splitlines()) <= MOST_LINES


def test_every_design_page_is_listed() -> None:
    overview = (ROOT / "docs" / "design" / "overview.md").read_text()
    assert [
        page.name for page in DESIGN if f"({page.name})" not in overview and page.name != "overview.md"
    ] == []


def test_a_missing_file_and_heading_are_found(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text(
        "# One\n[a](#one) [b](#two) [c](gone.md) `kernels/gone.py` `gone_file.py` `kernels/dispatch.py`\n"
    )
    assert list(missing_links(page)) == ["#two", "gone.md"]
    assert list(missing_paths(page)) == ["kernels/gone.py", "gone_file.py"]
