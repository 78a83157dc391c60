"""Writes docs/settings.md and docs/flags.md from the code. Run: python docs/write_settings.py

A test compares the files with the pages that this module makes.
"""

from __future__ import annotations

import ast
import inspect
import sys
import textwrap
import typing
from pathlib import Path
from typing import Any, NamedTuple

import msgspec

DOCS = Path(__file__).resolve().parent
sys.path.append(str(DOCS.parent))

from disagg.cli.hints import OTHER_SERVERS  # noqa: E402 - found by the line above
from disagg.core.config.groups import Role  # noqa: E402
from disagg.core.config.read import Config  # noqa: E402

SETTINGS = """# Settings

All settings of `disagg`, made from `disagg/core/config/` by `python docs/write_settings.py`. Units are in the names:
`_s` seconds, `_bytes` bytes (also `64MiB`, `1GiB`), `_tokens`, `_pages`. [commands.md](commands.md#settings) has the
ways to set them. `disagg serve` prints the sizes that it chooses.
"""
FLAGS = """# Flags of other servers

What replaces the flags of vLLM and SGLang, made from `disagg/cli/hints.py` by `python docs/write_settings.py`. The
command line prints the same advice for such a flag. [settings.md](settings.md) has all settings.

| flag | here |
|---|---|
| `vllm serve MODEL`, `--model-path MODEL` | `disagg serve MODEL`: a folder or a name of the hub |
| `--max-model-len N` | the same, or `--max-context-tokens N` |
| `--served-model-name NAME` | the same, or `--model-name NAME` |
| `--revision`, `--dtype`, `--host`, `--port` | the same |
"""
SAME = ("--max-model-len", "--served-model-name", "--model-path")


class Setting(NamedTuple):
    """One setting of one or several sections."""

    name: str
    values: str
    default: str
    text: str


def descriptions(section: type) -> dict[str, str]:
    """Returns the text below each field of a section, in one line."""
    found: dict[str, str] = {}
    for one in reversed(section.__mro__):
        if not issubclass(one, msgspec.Struct) or one is msgspec.Struct:
            continue
        [made] = ast.parse(textwrap.dedent(inspect.getsource(one))).body
        assert isinstance(made, ast.ClassDef)
        for field, text in zip(made.body, made.body[1:], strict=False):
            if isinstance(field, ast.AnnAssign) and isinstance(field.target, ast.Name):
                said = text.value if isinstance(text, ast.Expr) else None
                if isinstance(said, ast.Constant) and isinstance(said.value, str):
                    found[field.target.id] = " ".join(said.value.split())
    return found


def settings_of(section: type) -> list[Setting]:
    """Returns the settings of a section, in their order."""
    texts = descriptions(section)
    return [
        Setting(field.name, values_of(field.type), default_of(field), texts.get(field.name, ""))
        for field in msgspec.structs.fields(section)
    ]


def values_of(kind: Any) -> str:
    """Returns the allowed values of a type, or its name."""
    if typing.get_origin(kind) is typing.Literal:
        return ", ".join(f"`{one}`" for one in typing.get_args(kind))
    parts = [one for one in typing.get_args(kind) if one is not type(None)]
    if typing.get_origin(kind) is not tuple and parts:
        return " or ".join(map(values_of, parts))
    names = {bool: "true, false", int: "integer", float: "number", str: "text"}
    return names.get(kind, "list")


def default_of(field: Any) -> str:
    """Returns a field's default as a user writes it."""
    value = field.default
    if value is None:
        return "none"
    if isinstance(value, bool):
        return f"`{str(value).lower()}`"
    if isinstance(value, float):
        return f"`{value:g}`"
    if field.name.endswith("_bytes") and isinstance(value, int) and value and value % 1024 == 0:
        unit, size = next(
            (name, size) for name, size in (("MiB", 1 << 20), ("KiB", 1024)) if value % size == 0
        )
        return f"`{value // size}{unit}`"
    return f"`{value}`" if value != "" else ""


def table(rows: list[Setting], sections: str) -> list[str]:
    """Returns the lines of a table."""
    lines = [f"| {sections} | values | default | meaning |", "|---|---|---|---|"]
    cells = (tuple(cell.replace("|", "\\|") for cell in row) for row in rows)
    return [
        *lines,
        *(f"| `{name}` | {values} | {default} | {text} |" for name, values, default, text in cells),
    ]


def settings_page() -> str:
    """Returns docs/settings.md."""
    lines = [SETTINGS]
    roles: dict[Setting, list[str]] = {}
    for section in msgspec.structs.fields(Config):
        if section.name in typing.get_args(Role):
            for one in settings_of(section.type):
                roles.setdefault(one, []).append(section.name)
            continue
        lines += [f"## {section.name}", "", *table(settings_of(section.type), f"`{section.name}.`"), ""]
    lines += ["## prefill, decode, colocated", ""]
    for names in dict.fromkeys(map(tuple, roles.values())):
        where = ", ".join(f"`{name}.`" for name in names)
        lines += [*table([one for one, found in roles.items() if tuple(found) == names], where), ""]
    return "\n".join(lines).rstrip() + "\n"


def flags_page() -> str:
    """Returns docs/flags.md."""
    rows = [f"| `{flag}` | {text} |" for flag, text in OTHER_SERVERS.items() if flag not in SAME]
    return FLAGS + "\n".join(rows) + "\n"


def main() -> None:
    """Writes both pages."""
    (DOCS / "settings.md").write_text(settings_page())
    (DOCS / "flags.md").write_text(flags_page())


if __name__ == "__main__":
    main()
