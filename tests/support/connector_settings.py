"""Settings of `DisaggConnector` for several engines on one host."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from transport.keys.curve import make_keys
from transport.keys.file import save_keys


def connector_settings(folder: Path, **control: Any) -> dict[str, Any]:
    """`kv_connector_extra_config` without a port: small buffers, and new keys in `folder`."""
    save_keys(make_keys(), folder / "keys.json")
    return {
        "control": {"key_file": str(folder / "keys.json"), **control},
        "transport": {"backend": "tls"},
        "transfer": {"ring_bytes": 1 << 16, "staging_bytes": 1 << 16, "calibrate": "off"},
    }
