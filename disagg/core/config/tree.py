"""The configuration tree, which is frozen, validated, and passed as an argument.

Each section checks its values in `__post_init__`, also when constructed directly. Import `Config` from
`disagg.core.config.read`, which also reads the sources.
"""

from __future__ import annotations

import msgspec

from disagg.core.config.api import ApiConfig
from disagg.core.config.cluster import ClusterConfig, ControlConfig, RouterConfig
from disagg.core.config.groups import ColocatedConfig, DecodeConfig, GroupConfig, PrefillConfig, Role
from disagg.core.config.model import KVDTypeName, ModelConfig
from disagg.core.config.observability import LogConfig, MetricsConfig
from disagg.core.config.transfer import TransferConfig, TransportConfig
from disagg.core.errors import ConfigError


class Config(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """The whole tree. `Config()` has the defaults; change parts with `msgspec.structs.replace`.

    Raises `ConfigError` if prefill and decode groups cannot exchange KV.
    """

    model: ModelConfig = ModelConfig()
    prefill: PrefillConfig = PrefillConfig()
    decode: DecodeConfig = DecodeConfig()
    colocated: ColocatedConfig = ColocatedConfig()
    transfer: TransferConfig = TransferConfig()
    transport: TransportConfig = TransportConfig()
    control: ControlConfig = ControlConfig()
    cluster: ClusterConfig = ClusterConfig()
    router: RouterConfig = RouterConfig()
    api: ApiConfig = ApiConfig()
    metrics: MetricsConfig = MetricsConfig()
    log: LogConfig = LogConfig()

    def __post_init__(self) -> None:
        if self.cluster.mode == "colocated":
            return
        sent, stored = self.kv_dtype_of(self.prefill), self.kv_dtype_of(self.decode)
        if sent != stored and sent != "auto":
            raise ConfigError(
                f"prefill groups would store KV in {sent}, decode groups in {stored}: the sender can quantize KV, "
                "but not convert quantized KV. Set decode.kv_dtype only, or model.kv_dtype for both"
            )

    def kv_dtype_of(self, group: GroupConfig) -> KVDTypeName:
        """Returns the type of a group's stored KV; see `ModelConfig.kv_dtype`."""
        return self.model.kv_dtype if group.kv_dtype == "model" else group.kv_dtype

    @property
    def kinds(self) -> dict[Role, GroupConfig]:
        """Roles of groups in the mode `cluster.mode`, each with its section."""
        if self.cluster.mode == "colocated":
            return {"colocated": self.colocated}
        return {"prefill": self.prefill, "decode": self.decode}
