"""Opens the storage of a group (the third tier of its prefix cache); computes the keys and parts of stored pages."""

from __future__ import annotations

from disagg.core.config.read import Config, GroupConfig
from disagg.core.errors import ConfigError
from disagg.core.types import GroupInfo
from disagg.model.spec.model_spec import ModelSpec
from disagg.node.block_parts import BlockParts
from disagg.node.stored_items import StoredParts
from disagg.storage.contract import PageStorage
from disagg.storage.keys import PageKeys, StoredModel
from disagg.storage.open import least_capacity, open_storage
from disagg.storage.parts import PartGrid


def part_grid(group: GroupConfig, spec: ModelSpec) -> PartGrid:
    """Returns the parts of a group's pages: one KV head each, so that groups of any size can share pages."""
    return PartGrid(spec.layout, group.page_size)


def largest_part_bytes(group: GroupConfig, spec: ModelSpec) -> int:
    """Returns the size of the largest part of a page or a recurrent state."""
    grid = part_grid(group, spec)
    return max(map(grid.nbytes, (*grid.kv_parts, *grid.state_parts)))


def shares_host_cache(group: GroupConfig, spec: ModelSpec) -> bool:
    """Returns whether the group shares its second tier with other groups. Raises `ConfigError`."""
    if not group.host_cache_shared or spec.cache_refused:
        return False
    _need_kv("host_cache_shared", group, spec)
    return True


def open_group_storage(group: GroupConfig, spec: ModelSpec) -> PageStorage | None:
    """Opens the storage of a group; None without a storage or a prefix cache. Raises `ConfigError`."""
    if not group.storage or spec.cache_refused:
        return None
    _need_kv("storage", group, spec)
    largest_bytes = largest_part_bytes(group, spec)
    if group.storage_bytes < (least_bytes := least_capacity(group.storage, largest_bytes)):
        raise ConfigError(
            f"{group.role}.storage_bytes = {group.storage_bytes} is too small for {spec.architecture}, of which the "
            f"largest stored part has {largest_bytes} bytes: set it to {least_bytes} or more"
        )
    return open_storage(group.storage, group.storage_bytes, largest_bytes)


def _need_kv(setting: str, group: GroupConfig, spec: ModelSpec) -> None:
    if not spec.has_attention:
        raise ConfigError(
            f"{group.role}.{setting} is not available for models without attention ({spec.architecture}): they have "
            f"no KV, and no second tier. Unset {group.role}.{setting}"
        )


def page_keys(info: GroupInfo, config: Config, group: GroupConfig, spec: ModelSpec) -> PageKeys:
    """Returns the `PageKeys` of a group. Groups whose pages have the same content get equal keys."""
    settings = ["deterministic"] if config.model.deterministic else []
    if config.model.deterministic and spec.has_state:  # the bits depend on where prompts are cut into chunks
        settings.append(f"chunks of {group.chunk_tokens}")
    if spec.layout.quantized:  # otherwise the layout already has the dtype of the computation
        settings.append(f"quantized from {config.model.dtype}")
    return PageKeys(StoredModel(info.fingerprint, part_grid(group, spec), ", ".join(settings)))


def page_parts(info: GroupInfo, rank: int, grid: PartGrid) -> StoredParts:
    """Returns the parts of pages that a rank reads from the storage and writes to it."""
    shards = [one.shard for one in info.ranks]
    read, written = grid.parts_of(shards[rank]), grid.parts_to_store(shards, rank)
    return StoredParts(BlockParts(grid, shards[rank], read), BlockParts(grid, shards[rank], written))


def state_parts(info: GroupInfo, rank: int, grid: PartGrid) -> StoredParts | None:
    """Returns the parts of recurrent states that a rank reads and writes; None without states in host memory."""
    if not all(one.host_states for one in info.ranks):
        return None
    shards = [one.shard for one in info.ranks]
    read, written = grid.states_of(shards[rank]), grid.states_to_store(shards, rank)
    return StoredParts(BlockParts(grid, shards[rank], read), BlockParts(grid, shards[rank], written))
