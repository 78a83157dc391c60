"""Reads configuration sources into one `Config`; each mistake is one line that says where and how to mend it.

Sources, later wins: defaults < file (TOML, YAML) < environment (`DISAGG_PREFILL__TP=2`) < flags (dotted).
A source is flattened to `Setting`s: (section, key, value, origin). Each is checked against the field's type
as it is seen, so an error names the file, the variable or the flag at fault. Ranges and relations between
fields are the sections' own business (`disagg.core.config_tree`); their errors get the origin added here.
"""

from __future__ import annotations

import difflib
import os
import re
import tomllib
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple, NoReturn

import msgspec

from disagg.core.config_api import ApiConfig
from disagg.core.config_section import FieldError
from disagg.core.config_tree import (
    AttentionName,
    ClusterConfig,
    Config,
    ControlConfig,
    GroupConfig,
    LogConfig,
    MetricsConfig,
    Mode,
    ModelConfig,
    PolicyName,
    Preemption,
    Role,
    RouterConfig,
    TransferConfig,
    TransportConfig,
)
from disagg.core.errors import ConfigError

__all__ = [
    "ApiConfig",
    "AttentionName",
    "ClusterConfig",
    "Config",
    "ControlConfig",
    "FieldError",
    "GroupConfig",
    "LogConfig",
    "MetricsConfig",
    "Mode",
    "ModelConfig",
    "PolicyName",
    "Preemption",
    "Role",
    "RouterConfig",
    "TransferConfig",
    "TransportConfig",
    "load_config",
    "parse_bytes",
]

ENV_PREFIX = "DISAGG_"
_UNITS = {"": 1, "B": 1, "K": 1 << 10, "M": 1 << 20, "G": 1 << 30}
_BYTES = re.compile(r"(\d+)\s*(?:([KMG])(?:i?B)?|B)?", re.IGNORECASE)


class Setting(NamedTuple):
    """One value from one source. `text` is true when the source knows strings only (environment, flags)."""

    section: str
    key: str
    value: Any
    origin: str
    text: bool


def load_config(
    path: str | os.PathLike[str] | None = None,
    env: Mapping[str, str] | None = None,
    overrides: Mapping[str, object] | None = None,
) -> Config:
    """Defaults < the file at `path` (.toml, .yaml, .yml) < `env` < `overrides` (dotted, e.g. `prefill.tp`).

    `env` is what to read variables from (`os.environ` in the command line, nothing when left out). Raises
    `ConfigError`, one line, for whatever is wrong in any of them.
    """
    settings: dict[tuple[str, str], Setting] = {}
    sources = (_file_settings(path), _env_settings(env or {}), _flag_settings(overrides or {}))
    for setting in (one for source in sources for one in source):
        settings[setting.section, setting.key] = _checked(setting)
    return _build(settings)


def parse_bytes(text: str) -> int:
    """'64MiB', '64M', '4096' to bytes (binary units); `ConfigError` otherwise."""
    match = _BYTES.fullmatch(text.strip())
    if match is None:
        raise ConfigError(f"{text!r} is not a size: write bytes, or a number with KiB, MiB or GiB")
    return int(match[1]) * _UNITS[(match[2] or "").upper()]


def _file_settings(path: str | os.PathLike[str] | None) -> Iterator[Setting]:
    if path is None:
        return
    origin = f"file {os.fspath(path)}"
    for section, table in _read_tree(Path(path), origin).items():
        if not isinstance(table, Mapping):
            _section_fields(str(section), origin)
            raise ConfigError(f"{origin}: {section} = {table!r} is not a table of keys")
        for key, value in table.items():
            yield Setting(str(section), str(key), value, origin, text=False)


def _read_tree(path: Path, origin: str) -> Mapping[str, Any]:
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as exc:
        raise ConfigError(f"{origin}: cannot be read: {getattr(exc, 'strerror', None) or exc}") from exc
    tree = _parse(path.suffix.lower(), text, origin)
    if not isinstance(tree, Mapping):
        raise ConfigError(f"{origin}: holds {type(tree).__name__}, not a table of sections")
    return tree


def _parse(suffix: str, text: str, origin: str) -> Any:
    if suffix == ".toml":
        try:
            return tomllib.loads(text)
        except tomllib.TOMLDecodeError as exc:
            raise ConfigError(f"{origin}: is not valid TOML: {exc}") from exc
    if suffix in {".yaml", ".yml"}:
        import yaml  # only those who use YAML pay for it

        try:
            return yaml.safe_load(text) or {}
        except yaml.YAMLError as exc:
            raise ConfigError(f"{origin}: is not valid YAML: {' '.join(str(exc).split())}") from exc
    raise ConfigError(f"{origin}: its name must end in .toml, .yaml or .yml")


def _env_settings(env: Mapping[str, str]) -> Iterator[Setting]:
    for name in sorted(env):
        # Only names with a double underscore are ours: Kubernetes adds DISAGG_ROUTER_SERVICE_HOST and such
        # to every pod beside a service of that name.
        section, double, key = name.removeprefix(ENV_PREFIX).partition("__")
        if name.startswith(ENV_PREFIX) and double:
            yield Setting(section.lower(), key.lower(), env[name], f"variable {name}", text=True)


def _flag_settings(overrides: Mapping[str, object]) -> Iterator[Setting]:
    for dotted, value in overrides.items():
        section, dot, key = dotted.partition(".")
        if not dot or not key:
            raise ConfigError(f"flag {dotted}: a setting is written section.key=value, e.g. prefill.tp=2")
        yield Setting(section, key, value, f"flag {dotted}", text=isinstance(value, str))


def _checked(setting: Setting) -> Setting:
    """The setting with its value in the field's type; `ConfigError` for an unknown key or a wrong type."""
    section, key, value, origin, text = setting
    fields = _section_fields(section, origin)
    if key not in fields:
        _unknown(f"key {key} in section {section}", key, fields, origin)
    if text and key.endswith("_bytes"):
        try:
            value = parse_bytes(value)
        except ConfigError as exc:
            raise ConfigError(f"{origin}: {section}.{key} = {exc}") from None
    try:
        return setting._replace(value=msgspec.convert(value, fields[key], strict=not text))
    except msgspec.ValidationError:
        raise ConfigError(
            f"{origin}: {section}.{key} = {value!r} is not allowed; it must be {_describe(fields[key])}"
        ) from None


def _section_fields(section: str, origin: str) -> dict[str, Any]:
    sections = {field.name: field.type for field in msgspec.structs.fields(Config)}
    if section not in sections:
        _unknown(f"section {section}", section, sections, origin)
    return {field.name: field.type for field in msgspec.structs.fields(sections[section])}


def _unknown(what: str, name: str, known: Iterable[str], origin: str) -> NoReturn:
    nearest = difflib.get_close_matches(name, list(known), n=1)
    hint = f"did you mean {nearest[0]}?" if nearest else "known: " + ", ".join(known)
    raise ConfigError(f"{origin}: unknown {what}; {hint}")


def _describe(annotation: Any) -> str:
    """A field's type in the user's words."""
    words = {
        int: "a whole number",
        float: "a number",
        bool: "true or false",
        str: "text",
        type(None): "nothing",
    }
    if annotation in words:
        return words[annotation]
    arguments = annotation.__args__
    if all(isinstance(argument, str) for argument in arguments):
        return "one of " + ", ".join(arguments)
    return " or ".join(words[argument] for argument in arguments)


def _build(settings: Mapping[tuple[str, str], Setting]) -> Config:
    config = Config()
    changed: dict[str, Any] = {}
    for section in dict.fromkeys(name for name, _ in settings):
        values = {key: one.value for (owner, key), one in settings.items() if owner == section}
        try:
            changed[section] = msgspec.structs.replace(getattr(config, section), **values)
        except FieldError as exc:
            raise ConfigError(f"{_origin(settings, section, exc.field)}: {section}.{exc}") from None
    return msgspec.structs.replace(config, **changed)


def _origin(settings: Mapping[tuple[str, str], Setting], section: str, field: str) -> str:
    """Where a field's value came from; for a default that another setting made wrong, that one's."""
    if (section, field) in settings:
        return settings[section, field].origin
    others = [one.origin for (owner, _), one in settings.items() if owner == section]
    return f"default (with {others[-1]})"
