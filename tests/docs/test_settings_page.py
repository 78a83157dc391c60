"""docs/settings.md and docs/flags.md are those that docs/write_settings.py makes from the code."""

from __future__ import annotations

import runpy
from pathlib import Path

import msgspec
import pytest

from disagg.core.config.read import Config

DOCS = Path(__file__).resolve().parents[2] / "docs"
MADE = runpy.run_path(str(DOCS / "write_settings.py"))


@pytest.mark.parametrize(("file", "page"), [("settings.md", "settings_page"), ("flags.md", "flags_page")])
def test_the_page_is_that_of_the_code(file: str, page: str) -> None:
    assert (DOCS / file).read_text() == MADE[page](), "run python docs/write_settings.py"


def test_every_setting_has_a_text() -> None:
    found = [
        f"{section.name}.{one.name}"
        for section in msgspec.structs.fields(Config)
        for one in MADE["settings_of"](section.type)
        if not one.text
    ]
    assert found == []
