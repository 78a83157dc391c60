"""Flags of the path that KV takes between two groups, for `disagg bench transfer` and `disagg bench handoff`."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from disagg.core.config.read import parse_bytes

if TYPE_CHECKING:
    from disagg.core.config.read import TransferConfig, TransportConfig


@dataclass(frozen=True, kw_only=True)
class PathFlags:
    """Flags for the KV path, which correspond to settings in the sections `transfer` and `transport`."""

    layer_groups: Annotated[
        int,
        typer.Option(
            "--layer-groups", min=1, help="Maximum number of layer groups, as transfer.layer_groups."
        ),
    ] = 4
    ring_bytes: Annotated[
        str,
        typer.Option(
            "--ring-bytes", metavar="SIZE", help="Ring of each decode rank [derived from its memory]."
        ),
    ] = "0"
    staging_bytes: Annotated[
        str,
        typer.Option(
            "--staging-bytes", metavar="SIZE", help="Staging of each prefill rank [derived from its memory]."
        ),
    ] = "0"
    transport: Annotated[
        Literal["auto", "ucx"],
        typer.Option(
            "--transport",
            help="ucx: always use staging and ring, even if peers can open each other's pools.",
        ),
    ] = "auto"
    completion_words: Annotated[
        bool,
        typer.Option(
            "--completion-words/--no-completion-words",
            help="Reports of direct writes by words of shared memory (transport.completion_words).",
        ),
    ] = False
    checksum: Annotated[
        bool,
        typer.Option("--checksum/--no-checksum", help="Checksums of each segment (transfer.checksum)."),
    ] = False

    def transfer_config(self, device: Any) -> TransferConfig:
        """Returns the section `transfer`. Sizes that no flag sets are the defaults for `device`, a `torch.device`."""
        from disagg.core.config.read import TransferConfig
        from disagg.node.device import memory_bytes

        config = TransferConfig(
            ring_bytes=parse_bytes(self.ring_bytes),
            staging_bytes=parse_bytes(self.staging_bytes),
            layer_groups=self.layer_groups,
            checksum=self.checksum,
        )
        return config.sized(memory_bytes(device))

    def transport_config(self) -> TransportConfig:
        """Returns the section `transport`."""
        from disagg.core.config.read import TransportConfig

        return TransportConfig(peer_memory=self.transport == "auto", completion_words=self.completion_words)
