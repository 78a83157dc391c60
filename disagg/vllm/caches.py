"""vLLM's KV cache tensors as pools of the data path: classes of layers and states, shards, planes of each tensor."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import NamedTuple

import msgspec
import torch

from disagg.core.errors import ConfigError
from disagg.core.types import DTYPE_BYTES, KVLayout, LayerClass, Shard, Span, StateClass, dtype_name
from disagg.kv.page_tables import PageTables
from disagg.kv.transfer_pools import BorrowedPools
from disagg.vllm.compat import EngineFacts
from disagg.vllm.groups import CacheGroup
from disagg.vllm.states import pages_of, sections_of
from kernels.copy.layer_pool import LayerPool
from staging.shards import layout_shards


@dataclass(frozen=True, slots=True)
class BorrowedCaches:
    """One worker's KV cache."""

    layout: KVLayout
    """Layout of the whole model's KV cache."""
    shard: Shard
    pools: BorrowedPools
    layers: dict[str, Span]
    """For each layer's name, the layers (global) of its class up to and including the layer."""
    tables: PageTables
    """Page table of each class, and state slot of each class of recurrent states."""


class _Class(NamedTuple):
    """What layers of one class have in common."""

    table: int
    """Page table; see `EngineFacts.attention`."""
    heads: int
    head_dim: int
    planes: int


def borrow_caches(caches: Mapping[str, torch.Tensor], facts: EngineFacts, tp_rank: int) -> BorrowedCaches:
    """Returns the pools over `caches` (`register_kv_caches`). Raises ConfigError for caches that are not supported.

    Layers are ordered by the numbers in their names. Layers of another KV cache group, with other heads or another
    head size form a class. Layers that share the tensors of an earlier layer of their group are ignored; layers of
    different groups share tensors too, but no blocks. Each group of recurrent layers has classes of states.
    """
    classes: dict[_Class, list[str]] = {}
    planes, seen = {}, set[tuple[int, int]]()
    tables = _tables_by_layer(caches, facts)
    for name in sorted(tables, key=_order):
        table = tables[name]
        parts = planes_of(name, caches[name], facts, facts.attention[table])
        if (parts[0].data_ptr(), table) in seen:
            continue
        seen.add((parts[0].data_ptr(), table))
        planes[name] = parts
        kind = _Class(table, parts[0].shape[2], parts[0].shape[3], len(parts))
        classes.setdefault(kind, []).append(name)
    if not planes:
        raise ConfigError("vLLM registered no KV cache; DisaggConnector needs a model with attention layers")
    states = _borrow_states(caches, facts, tp_rank)
    layout = _layout(classes, {one.dtype for parts in planes.values() for one in parts}, facts)
    layout = msgspec.structs.replace(layout, states=tuple(one.of_model for one in states))
    shard = layout_shards(layout, facts.tp_size)[tp_rank]
    for kind, part in zip(classes, shard.parts, strict=True):
        if kind.heads != len(part.heads):
            raise ConfigError(
                f"worker {tp_rank} of {facts.tp_size} has {kind.heads} KV heads a layer, not {len(part.heads)} of "
                f"the model's {facts.kv_heads}; DisaggConnector cannot split these heads"
            )
    try:
        pools = [LayerPool([planes[name] for name in names]) for names in classes.values()]
        pools += [LayerPool([[plane] for plane in one.planes]) for one in states]
    except ValueError as exc:
        raise ConfigError(f"DisaggConnector cannot use vLLM's KV cache: {exc}") from exc
    layers: dict[str, Span] = {}
    for names, span in zip(classes.values(), layout.spans, strict=True):
        layers.update({name: Span(span.start, span.start + i + 1) for i, name in enumerate(names)})
    of_classes = tuple(kind.table for kind in classes)
    page_tables = PageTables(facts.page_sizes, of_classes, tuple(one.slot for one in states))
    return BorrowedCaches(layout, shard, BorrowedPools(tuple(pools)), layers, page_tables)


class _States(NamedTuple):
    """One class of recurrent states on this rank."""

    slot: int
    """Number among the groups of recurrent layers: the state slot of a request that the class is in."""
    of_model: StateClass
    planes: list[torch.Tensor]


def _borrow_states(caches: Mapping[str, torch.Tensor], facts: EngineFacts, tp_rank: int) -> list[_States]:
    found = []
    recurrent = [(group.layers, group.recurrent) for group in facts.groups if group.recurrent is not None]
    for slot, (names, kind) in enumerate(recurrent):
        missing = [name for name in names if name not in caches]
        if missing or not names:
            raise ConfigError(
                f"vLLM registered no state of {', '.join(missing) or 'a group of recurrent layers'}"
            )
        pages = [pages_of(name, caches[name], kind, facts.blocks) for name in sorted(names, key=_order)]
        for section in sections_of(kind, tp_rank, facts.tp_size):
            planes = [plane for one in pages for plane in section.planes(one)]
            of_model = msgspec.structs.replace(section.of_model, layers=len(planes))
            found.append(_States(slot, of_model, planes))
    return found


def _tables_by_layer(caches: Mapping[str, torch.Tensor], facts: EngineFacts) -> dict[str, int]:
    """Returns the page table of each attention layer, without those that use the KV of a layer of a group."""
    if len(facts.groups) == 1:
        return dict.fromkeys(caches, 0)
    groups = enumerate(facts.attention)
    found = {name: number for number, group in groups for name in group.layers if name in caches}
    tensors = {caches[name].data_ptr() for name in found}
    recurrent = {name for group in facts.groups if group.recurrent is not None for name in group.layers}
    for name in caches.keys() - found.keys() - recurrent:
        if caches[name].data_ptr() not in tensors:
            raise ConfigError(f"{name} is in none of the model's {len(facts.groups)} KV cache groups")
    return found


def planes_of(name: str, cache: torch.Tensor, facts: EngineFacts, group: CacheGroup) -> list[torch.Tensor]:
    """Returns the planes of a layer, views `[blocks, block_size, heads, head_dim]`. Raises ConfigError.

    vLLM passes logical views, whatever the order in memory: `[blocks, heads, block_size, 2 * head_dim]` with K and V
    in one row, `[blocks, block_size, latent]` for MLA, or `[2, blocks, block_size, heads, head_dim]` (ROCm). With
    `whole_blocks`, all elements of a head in a block form the row of one position.
    """
    dims = cache.dim() if isinstance(cache, torch.Tensor) else 0
    block_size = group.block_size
    tokens = facts.blocks * block_size
    if dims == 3:
        found = [cache.unsqueeze(2)]
    elif dims == 4:
        found = [cache.transpose(1, 2)]
    elif dims == 5 and cache.shape[0] == 2:
        found = [cache[0], cache[1]]
    else:
        found = []
    if facts.whole_blocks:
        found, tokens = [plane for one in found for plane in _whole_blocks(one)], facts.blocks
    if not found or any(plane.shape[0] * plane.shape[1] != tokens for plane in found):
        shape = f"the shape {list(cache.shape)}" if dims else f"the type {type(cache).__name__}"
        raise ConfigError(
            f"the KV cache of {name} has {shape}, which does not hold {facts.blocks} blocks of "
            f"{block_size} tokens in a layout that DisaggConnector knows"
        )
    return found


def _whole_blocks(plane: torch.Tensor) -> list[torch.Tensor]:
    """Returns the view `[blocks, 1, heads, block_size * head_dim]` of a plane; nothing unless a head is one run."""
    blocks, size, heads, row = plane.shape
    if plane.stride(1) != row:
        return []
    return [plane.transpose(1, 2).view(blocks, 1, heads, size * row)]


def _layout(classes: Mapping[_Class, list[str]], dtypes: set[torch.dtype], facts: EngineFacts) -> KVLayout:
    if len(dtypes) > 1:
        names = ", ".join(sorted(map(dtype_name, dtypes)))
        raise ConfigError(f"layers of vLLM's KV cache hold {names}; DisaggConnector needs one element type")
    (dtype,) = dtypes
    # Quantized caches of vLLM have no scales in their rows: they are moved as plain bytes.
    name = "uint8" if dtype.itemsize == 1 else dtype_name(dtype)
    if name not in DTYPE_BYTES:
        raise ConfigError(f"vLLM's KV cache holds {name}; DisaggConnector moves {', '.join(DTYPE_BYTES)}")
    found = [
        LayerClass(len(names), facts.kv_heads, kind.head_dim, kind.planes == 2)
        for kind, names in classes.items()
    ]
    first, *more = found
    return KVLayout(first.layers, first.kv_heads, first.head_dim, name, more=tuple(more), has_v=first.has_v)


def _order(name: str) -> tuple[list[int], str]:
    return [int(number) for number in re.findall(r"\d+", name)], name
