"""Settings of `DisaggConnector`, from `kv_connector_extra_config` of vLLM's `--kv-transfer-config`."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import msgspec

from disagg.core.config.read import Config
from disagg.core.errors import ConfigError
from disagg.vllm.compat import EngineFacts
from transport.control.zmq import make_control
from transport.hosts import own_host
from transport.keys.ring import KeyRing
from transport.reach import Choice, choose

DEFAULT_PORT = 5580
DEFAULT_LEASE_S = 120.0
DEFAULT_EARLY_S = 0.0
_SECTIONS = ("transfer", "transport", "control")
_OWN = ("port", "lease_s", "early_s")
LONGEST_EARLY_S = 0.05
"""Bound of `early_s`: steps wait for about as long, with all their requests."""


@dataclass(frozen=True, slots=True)
class VllmSettings:
    """Settings of one engine."""

    config: Config
    """Sections `transfer`, `transport` and `control`, as in the configuration of `disagg`."""
    port: int
    """Port of the scheduler's control channel, which other engines connect to: `port` plus the data-parallel rank."""
    lease_s: float
    """Time for which a computed prompt waits for its consumer, and a consumer for its KV."""
    early_s: float = 0.0
    """Time before the expected end of a transfer at which a worker reports it; 0: at the end."""
    early_refused: str = ""
    """Why `early_s` is 0 although the settings have another value; empty otherwise."""

    @classmethod
    def of(cls, facts: EngineFacts) -> VllmSettings:
        """Returns the settings. Raises ConfigError for unknown or invalid ones."""
        extra = facts.extra
        unknown = sorted(set(extra) - {*_SECTIONS, *_OWN})
        if unknown:
            raise ConfigError(
                f"kv_connector_extra_config has {', '.join(unknown)}; DisaggConnector knows "
                f"{', '.join((*_OWN, *_SECTIONS))}"
            )
        port, lease_s = extra.get("port", DEFAULT_PORT), extra.get("lease_s", DEFAULT_LEASE_S)
        if not isinstance(port, int) or not 0 < port + facts.dp_rank < 1 << 16:
            raise ConfigError(f"port of kv_connector_extra_config is {port!r}; it must be from 1 to 65535")
        if not isinstance(lease_s, int | float) or lease_s <= 0:
            raise ConfigError(f"lease_s of kv_connector_extra_config is {lease_s!r}; it must be above 0 s")
        early_s = extra.get("early_s", DEFAULT_EARLY_S)
        if not isinstance(early_s, int | float) or not 0 <= early_s <= LONGEST_EARLY_S:
            raise ConfigError(
                f"early_s of kv_connector_extra_config is {early_s!r}; it must be from 0 to {LONGEST_EARLY_S:g} s"
            )
        refused = facts.early_refused if early_s else ""
        early_s = 0.0 if refused else float(early_s)
        return cls(_config(extra), port + facts.dp_rank, float(lease_s), early_s, refused)

    def choice(self) -> Choice:
        """Returns the transport of this host's ranks. Raises ConfigError."""
        return choose(self.config.transport, own_host(self.config.control.host))

    def keys(self) -> KeyRing:
        """Returns the keys of the engines, which follow their file. Raises ConfigError without a file."""
        file = self.config.control.key_file
        if file is None:
            raise ConfigError(
                "DisaggConnector needs the keys that all engines share: make them with `disagg keys keys.json`, and "
                'set {"control": {"key_file": "keys.json"}} in kv_connector_extra_config'
            )
        return KeyRing.follow(file)

    def scheduler_channel(self) -> Any:
        """Returns the control channel of the engine's scheduler. Raises ConfigError if the port is in use."""
        return make_control(self.config.control, self.keys(), self.port)


def _config(extra: Mapping[str, Any]) -> Config:
    sections = {name: extra[name] for name in _SECTIONS if name in extra}
    try:
        config = msgspec.convert(sections, Config)
    except msgspec.ValidationError as exc:
        raise ConfigError(f"kv_connector_extra_config: {exc}") from exc
    # The pools are vLLM's, a tensor for each layer: other ranks cannot write to them directly.
    transport = msgspec.structs.replace(config.transport, peer_memory=False)
    choice = choose(transport, own_host(config.control.host))
    transfer = msgspec.structs.replace(config.transfer, checksum=config.transfer.checks(choice.name))
    return msgspec.structs.replace(config, transport=transport, transfer=transfer)
