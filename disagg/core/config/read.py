"""Reads configuration sources into one `Config`; each error is one line with the value's origin and the remedy.

Sources, in ascending priority: defaults < file (TOML, YAML) < environment (`DISAGG_PREFILL__TP=2`) < flags (dotted).
Each source becomes `Setting`s (section, key, value, origin), checked against the field's type, so an error names the
file, variable or flag. The sections check ranges and relations of fields; `load_config` adds the origin to their
errors.
"""

from __future__ import annotations

import difflib
import os
import re
import tomllib
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple, NoReturn, get_args

import msgspec

from disagg.core.config.api import ApiConfig
from disagg.core.config.cluster import ClusterConfig, ControlConfig, Mode, PolicyName, RouterConfig
from disagg.core.config.groups import (
    BatchingConfig,
    ColocatedConfig,
    DecodeConfig,
    GroupConfig,
    Preemption,
    PrefillConfig,
    Role,
)
from disagg.core.config.model import AttentionName, ModelConfig
from disagg.core.config.observability import LogConfig, MetricsConfig
from disagg.core.config.section import FieldError
from disagg.core.config.transfer import TransferConfig, TransportConfig
from disagg.core.config.tree import Config
from disagg.core.errors import ConfigError

__all__ = [
    "ApiConfig",
    "AttentionName",
    "BatchingConfig",
    "ClusterConfig",
    "ColocatedConfig",
    "Config",
    "ControlConfig",
    "DecodeConfig",
    "FieldError",
    "GroupConfig",
    "LogConfig",
    "MetricsConfig",
    "Mode",
    "ModelConfig",
    "PolicyName",
    "Preemption",
    "PrefillConfig",
    "Role",
    "RouterConfig",
    "Setting",
    "TransferConfig",
    "TransportConfig",
    "load_config",
    "parse_bytes",
    "read_settings",
    "with_settings",
]

ENV_PREFIX = "DISAGG_"
_UNITS = {"": 1, "B": 1, "K": 1 << 10, "M": 1 << 20, "G": 1 << 30}
_BYTES = re.compile(r"(\d+)\s*(?:([KMG])(?:i?B)?|B)?", re.IGNORECASE)


class Setting(NamedTuple):
    """One value of one source. `text`: whether the source has only strings (environment, flags)."""

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
    """Merges defaults < file at `path` (.toml, .yaml, .yml) < `env` < `overrides` (dotted, e.g. `prefill.tp`).

    `env`: environment variables; the command line passes `os.environ`. Raises `ConfigError` with one line.
    """
    return with_settings(Config(), read_settings(path, env, overrides))


def read_settings(
    path: str | os.PathLike[str] | None = None,
    env: Mapping[str, str] | None = None,
    overrides: Mapping[str, object] | None = None,
) -> list[Setting]:
    """Returns the settings that the sources of `load_config` name, without defaults. A setting has the value of the
    source with the highest priority.

    Raises `ConfigError` for an unknown setting or a value of the wrong type.
    """
    settings: dict[tuple[str, str], Setting] = {}
    sources = (_file_settings(path), _env_settings(env or {}), _flag_settings(overrides or {}))
    for setting in (one for source in sources for one in source):
        settings[setting.section, setting.key] = _checked(setting)
    return list(settings.values())


def with_settings(config: Config, changes: Iterable[Setting]) -> Config:
    """Returns `config` with changed settings. Raises `ConfigError`, which names the origin of the value."""
    checked = map(_checked, changes)
    return _build(config, {(one.section, one.key): one for one in checked})


def parse_bytes(text: str) -> int:
    """Converts '64MiB', '64M' or '4096' to bytes (binary units). Raises `ConfigError`."""
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
        import yaml  # imported on first use

        try:
            return yaml.safe_load(text) or {}
        except yaml.YAMLError as exc:
            raise ConfigError(f"{origin}: is not valid YAML: {' '.join(str(exc).split())}") from exc
    raise ConfigError(f"{origin}: its name must end in .toml, .yaml or .yml")


def _env_settings(env: Mapping[str, str]) -> Iterator[Setting]:
    for name in sorted(env):
        # Settings have a double underscore: Kubernetes adds variables like DISAGG_ROUTER_SERVICE_HOST to pods.
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
    """Returns the setting with its value converted. Raises `ConfigError` for an unknown key or a wrong type."""
    section, key, value, origin, text = setting
    fields = _section_fields(section, origin)
    if key not in fields:
        _unknown_key(section, key, fields, origin)
    if text and key.endswith("_bytes"):
        try:
            value = parse_bytes(value)
        except ConfigError as exc:
            raise ConfigError(f"{origin}: {section}.{key} = {exc}") from None
    try:
        return setting._replace(value=msgspec.convert(value, fields[key], strict=not text), text=False)
    except msgspec.ValidationError:
        raise ConfigError(
            f"{origin}: {section}.{key} = {value!r} is not allowed; it must be {_describe(fields[key])}"
        ) from None


def _section_fields(section: str, origin: str) -> dict[str, Any]:
    sections = {field.name: field.type for field in msgspec.structs.fields(Config)}
    if section not in sections:
        _unknown(f"section {section}", section, sections, origin)
    return {field.name: field.type for field in msgspec.structs.fields(sections[section])}


def _unknown_key(section: str, key: str, fields: Iterable[str], origin: str) -> NoReturn:
    roles = get_args(Role)
    others = [role for role in roles if section in roles and key in _section_fields(role, origin)]
    if others:
        raise ConfigError(
            f"{origin}: unknown key {key} in section {section}; set it in {' and '.join(others)}"
        )
    _unknown(f"key {key} in section {section}", key, fields, origin)


def _unknown(what: str, name: str, known: Iterable[str], origin: str) -> NoReturn:
    nearest = difflib.get_close_matches(name, list(known), n=1)
    hint = f"did you mean {nearest[0]}?" if nearest else "known: " + ", ".join(known)
    raise ConfigError(f"{origin}: unknown {what}; {hint}")


def _describe(annotation: Any) -> str:
    """Returns a field's type as text for users."""
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


def _build(config: Config, settings: Mapping[tuple[str, str], Setting]) -> Config:
    changed: dict[str, Any] = {}
    for section in dict.fromkeys(name for name, _ in settings):
        values = {key: one.value for (owner, key), one in settings.items() if owner == section}
        try:
            changed[section] = msgspec.structs.replace(getattr(config, section), **values)
        except FieldError as exc:
            raise ConfigError(f"{_origin(settings, section, exc.field)}: {section}.{exc}") from None
    return msgspec.structs.replace(config, **changed)


def _origin(settings: Mapping[tuple[str, str], Setting], section: str, field: str) -> str:
    """Returns the origin of a field's value. For a default, the text also names the origin of another set field of
    the section, because the two may conflict."""
    if (section, field) in settings:
        return settings[section, field].origin
    others = [one.origin for (owner, _), one in settings.items() if owner == section]
    return f"default (with {others[-1]})"
