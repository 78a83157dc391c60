"""Converts a command's flags to a `Config`."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from typing import Any

from disagg.cli.flags import ConfigFlags, Sets
from disagg.cli.options import FlagValue, flag_values
from disagg.core.config.read import Config, Mode, load_config
from disagg.core.errors import ConfigError


def configuration(source: ConfigFlags, options: Any, extra: Mapping[str, object] | None = None) -> Config:
    """Returns the configuration from the file, the environment, `--set`, flags in `options` with `Sets`, and `extra`.

    If several sources have a value for a setting, the last source in this order is used.

    Raises `ConfigError` for bad settings and for flags that do not fit `cluster.mode`.
    """
    config = load_config(source.config, os.environ, overrides(source, options) | dict(extra or {}))
    _check_mode(options, config.cluster.mode)
    return config


def overrides(source: ConfigFlags, options: Any) -> dict[str, object]:
    """Returns the values of `--set` and of flags in `options` with `Sets`, by `section.key`. Raises `ConfigError`."""
    values: dict[str, object] = {}
    for text in source.settings or ():
        key, equals, value = text.partition("=")
        if not equals:
            raise ConfigError(f"flag --set {text}: write section.key=value, e.g. prefill.tp=2")
        values[key.strip()] = value
    for flag, sets in _settings_flags(options):
        setting = flag.value if sets.convert is None else sets.convert(flag.value)
        if setting is not None:
            values.update(dict.fromkeys(sets.keys, setting))
    return values


def _check_mode(options: Any, mode: Mode) -> None:
    for flag, sets in _settings_flags(options):
        if sets.mode not in (None, mode):
            fix = "give --colocated, or omit the flag" if sets.mode == "colocated" else "omit one of the two"
            raise ConfigError(f"{flag.flag} is for {sets.mode} groups, and cluster.mode is {mode}: {fix}")


def _settings_flags(options: Any) -> Iterator[tuple[FlagValue, Sets]]:
    """Yields each flag that has a value and overrides settings, with these settings."""
    for flag in flag_values(options):
        for sets in flag.metadata:
            if isinstance(sets, Sets) and flag.value is not None:
                yield flag, sets
