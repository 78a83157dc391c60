"""Checks of a command's input that need neither torch nor transformers, whose imports take seconds.

The command line runs these checks before it imports a command's module. The command repeats each check where it uses
the input, because files and ports may change in between.
"""

from __future__ import annotations

import os

import msgspec

from disagg.commands.signals import exits_at_signal
from disagg.core.config.read import Config, ControlConfig, ModelConfig
from disagg.core.errors import ConfigError
from disagg.model.load.checkpoint_files import require_checkpoint
from disagg.model.load.hub import checkpoint_folder, is_hub_name
from disagg.model.load.named import require_named


def check_model(config: ModelConfig) -> None:
    """Downloads a model that is named by its name on the hub.

    Raises `ConfigError` for an incomplete checkpoint or an unknown architecture.
    """
    if config.path:
        with exits_at_signal():  # a download's threads would not end; the next start continues it
            folder = checkpoint_folder(config.path, config.revision, cached=False)
        require_checkpoint(folder)
    elif config.random_init:
        require_named(config.random_init)


def pinned(config: Config) -> Config:
    """Returns the configuration with the commit of a model on the hub as its revision, after `check_model`.

    All ranks and routers then use the same commit, on other hosts too.
    """
    model = config.model
    if model.path is None or not is_hub_name(model.path):
        return config
    commit = checkpoint_folder(model.path, model.revision).name
    return msgspec.structs.replace(config, model=msgspec.structs.replace(model, revision=commit))


def check_run(config: Config) -> None:
    """Checks the input of `disagg demo` and `disagg generate`: model, key file, port of the control channel."""
    _check_key_file(config.control)
    _check_control_ports(config.control, [config.control.router_port])
    check_model(config.model)  # last: it may download


def check_launch(config: Config) -> None:
    """Checks the input of `disagg launch`: control keys, model, port of the directory."""
    from disagg.cluster.keys import launch_keys

    launch_keys(config.control)
    _check_control_ports(config.control, [config.control.directory_port])
    check_model(config.model)  # last: it may download


def check_serve(config: Config, directory: str | None) -> None:
    """Checks the input of `disagg serve`: API keys, control keys, model, and all ports.

    `directory`: address of the directory to join, if any.
    """
    from disagg.api.keys import require_api_keys
    from disagg.api.listener import bind
    from disagg.cluster.directory import directory_host
    from disagg.cluster.keys import join_keys

    require_api_keys(config.api, dict(os.environ))
    if directory is None:
        _check_key_file(config.control)
    else:
        directory_host(directory, config.control)
        require_joined_model(config.model)
        join_keys(config.control, directory, os.environ)
    bind(config.api).close()
    first = config.control.router_port
    _check_control_ports(config.control, list(range(first, first + config.api.workers)) if first else [])
    check_model(config.model)  # last: it may download


def require_joined_model(config: ModelConfig) -> None:
    """Raises `ConfigError` if no model is configured: a router that joins groups needs their tokenizer."""
    if not (config.path or config.random_init):
        raise ConfigError(
            "--join needs the model of the groups: give --model DIR, as for their `disagg launch`"
        )


def _check_key_file(config: ControlConfig) -> None:
    from transport.keys.file import load_keys

    if config.key_file:
        load_keys(config.key_file)


def _check_control_ports(config: ControlConfig, ports: list[int]) -> None:
    """Raises `ConfigError` if the control channel cannot listen on one of `ports`; 0 stands for any free port."""
    from transport.control.zmq import make_control
    from transport.keys.curve import make_keys

    for port in ports:
        if port:
            make_control(config, make_keys(), port).close()
