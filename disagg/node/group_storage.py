"""Opens the storage of a group (the third tier of its prefix cache); computes the keys and parts of stored pages."""

from __future__ import annotations

from disagg.core.config.read import Config, GroupConfig
from disagg.core.errors import ConfigError
from disagg.core.types import GroupInfo
from disagg.model.spec.model_spec import ModelSpec
from disagg.node.block_parts import BlockParts
from disagg.storage.contract import PageStorage
from disagg.storage.keys import PageKeys, StoredModel
from disagg.storage.open import open_storage
from disagg.storage.parts import PartGrid


def part_grid(group: GroupConfig, spec: ModelSpec) -> PartGrid:
    """Returns the parts of a group's pages: one KV head each, so that groups of any size can share pages."""
    return PartGrid(spec.layout, group.page_size)


def open_group_storage(group: GroupConfig, spec: ModelSpec) -> PageStorage | None:
    """Opens the storage of a group; None without a storage or a prefix cache. Raises `ConfigError`."""
    if not group.storage or spec.cache_refused:
        return None
    if spec.has_state:
        raise ConfigError(
            f"{group.role}.storage is not available for models with recurrent layers ({spec.architecture}): the "
            f"storage keeps no recurrent states. Unset {group.role}.storage"
        )
    grid = part_grid(group, spec)
    return open_storage(group.storage, group.storage_bytes, max(map(grid.nbytes, grid.kv_parts)))


def page_keys(info: GroupInfo, config: Config, group: GroupConfig, spec: ModelSpec) -> PageKeys:
    """Returns the `PageKeys` of a group. Groups whose pages have the same content get equal keys."""
    settings = ["deterministic"] if config.model.deterministic else []
    if spec.layout.quantized:  # otherwise the layout already has the dtype of the computation
        settings.append(f"quantized from {config.model.dtype}")
    return PageKeys(StoredModel(info.fingerprint, part_grid(group, spec), ", ".join(settings)))


def rank_parts(info: GroupInfo, rank: int, grid: PartGrid) -> tuple[BlockParts, BlockParts]:
    """Returns the page parts that a rank reads from the storage, and those that the rank writes."""
    shards = [one.shard for one in info.ranks]
    read, written = grid.parts_of(shards[rank]), grid.parts_to_store(shards, rank)
    return BlockParts(grid, shards[rank], read), BlockParts(grid, shards[rank], written)
