"""Sources of a model's weights. Each source returns any parameter, whole or only a rank's part of it."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Collection, Mapping
from pathlib import Path
from typing import Any, Protocol

import torch
from safetensors import safe_open

from disagg.core.errors import ConfigError
from disagg.model.load.checkpoint_files import reading
from disagg.model.tensor_parallel import Cut


class WeightSource(Protocol):
    """A source that returns a model's parameters by name."""

    def load(
        self, name: str, shape: tuple[int, ...], dtype: torch.dtype, device: torch.device, cut: Cut | None
    ) -> torch.Tensor | None:
        """Returns the parameter, or its part `cut`, contiguous, as `dtype` on `device`; `shape` is the full shape.

        A result of None means that the model's own initialization is kept. Raises ConfigError when the source lacks
        the parameter.
        """

    def shape_of(self, name: str, expected: tuple[int, ...]) -> tuple[int, ...] | None:
        """Returns the shape of a stored tensor; None if the source lacks it. Random tensors have the expected
        shape."""


class RandomWeights:
    """Random normal weights. Each parameter has its own generator, so the full tensor is equal for any TP size.

    The weights are drawn on the target device. A CPU and a GPU draw different numbers from the same seed.
    """

    def __init__(self, seed: int, std: float) -> None:
        self._seed = seed
        self._std = std

    def load(
        self, name: str, shape: tuple[int, ...], dtype: torch.dtype, device: torch.device, cut: Cut | None
    ) -> torch.Tensor | None:
        """See `WeightSource.load`. Norms keep their own initialization, and biases are zero."""
        if len(shape) < 2:
            size = part_shape(shape, cut)
            return torch.zeros(size, dtype=dtype, device=device) if name.endswith(".bias") else None
        generator = torch.Generator(device).manual_seed(seed_of(self._seed, name))
        whole = torch.empty(shape, dtype=dtype, device=device).normal_(0.0, self._std, generator=generator)
        return whole if cut is None else own_part(cut, whole)

    def shape_of(self, name: str, expected: tuple[int, ...]) -> tuple[int, ...] | None:
        """See `WeightSource.shape_of`."""
        return expected


class StateDictWeights:
    """Weights of a model that transformers has already loaded into host memory."""

    def __init__(self, tensors: Mapping[str, torch.Tensor]) -> None:
        self._tensors = tensors

    def load(
        self, name: str, shape: tuple[int, ...], dtype: torch.dtype, device: torch.device, cut: Cut | None
    ) -> torch.Tensor | None:
        """See `WeightSource.load`."""
        if name not in self._tensors:
            raise ConfigError(f"the checkpoint has no weight named {name}")
        whole = self._tensors[name]
        require_shape(name, tuple(whole.shape), shape)
        part = whole if cut is None else cut.apply(whole)
        return part.to(device, dtype, copy=True).contiguous()

    def shape_of(self, name: str, expected: tuple[int, ...]) -> tuple[int, ...] | None:
        """See `WeightSource.shape_of`."""
        return tuple(self._tensors[name].shape) if name in self._tensors else None


class SafetensorsWeights:
    """Weights of a checkpoint directory, read part by part: a rank reads only its own slices."""

    def __init__(self, files: list[Path]) -> None:
        self._files: dict[str, tuple[Path, Any, str]] = {}
        for path in files:
            with reading(path):
                handle: Any = safe_open(path, framework="pt")
                self._files.update({name: (path, handle, name) for name in handle.keys()})  # noqa: SIM118

    def renamed(self, rename: Callable[[str], str]) -> SafetensorsWeights:
        """Returns the same weights under other names, in the same open files. `rename` maps stored names to names."""
        renamed = SafetensorsWeights([])
        renamed._files = {rename(name): found for name, found in self._files.items()}
        return renamed

    def names(self) -> set[str]:
        """Returns the names of all weights."""
        return set(self._files)

    def dtypes(self, leaves: Collection[str]) -> set[str]:
        """Returns the types of all weights whose names end with one of `leaves`, as safetensors names them."""
        chosen = (stored for name, stored in self._files.items() if name.rpartition(".")[2] in leaves)
        return {str(file.get_slice(stored_name).get_dtype()) for _, file, stored_name in chosen}

    def load(
        self, name: str, shape: tuple[int, ...], dtype: torch.dtype, device: torch.device, cut: Cut | None
    ) -> torch.Tensor | None:
        """See `WeightSource.load`."""
        if name not in self._files:
            raise ConfigError(f"the checkpoint has no weight named {name}")
        path, file, stored_name = self._files[name]
        with reading(path):
            stored = file.get_slice(stored_name)
            require_shape(name, tuple(stored.get_shape()), shape)
            part = _read(file, stored_name, stored, cut)
        require_type(name, part.dtype, dtype)
        return part.to(device, dtype, copy=True).contiguous()

    def shape_of(self, name: str, expected: tuple[int, ...]) -> tuple[int, ...] | None:
        """See `WeightSource.shape_of`."""
        if name not in self._files:
            return None
        path, file, stored_name = self._files[name]
        with reading(path):
            return tuple(file.get_slice(stored_name).get_shape())


def _read(file: Any, name: str, stored: Any, cut: Cut | None) -> torch.Tensor:
    """Returns the part `cut` of a stored tensor, reading only the bytes of that part."""
    if cut is None:
        part = file.get_tensor(name)
    else:
        before = (slice(None),) * cut.dim
        parts = [stored[(*before, slice(span.start, span.stop))] for span in cut.spans]
        part = parts[0] if len(parts) == 1 else torch.cat(parts, cut.dim)
    assert isinstance(part, torch.Tensor)
    return part


def require_shape(name: str, found: tuple[int, ...], expected: tuple[int, ...]) -> None:
    """Raises ConfigError when a weight's shape in the checkpoint differs from the configured shape."""
    if found != expected:
        raise ConfigError(f"the checkpoint's {name} is {found}, but its config.json requires {expected}")


def require_type(name: str, stored: torch.dtype, dtype: torch.dtype) -> None:
    """Raises ConfigError if a tensor's type does not fit its use: quantized values where floats are wanted, floats
    where quantized values are wanted, or quantized values of another type."""
    if stored == dtype or (dtype.itemsize > 1 and _is_quantized(stored) == _is_quantized(dtype)):
        return
    kind, wanted = (str(one).removeprefix("torch.") for one in (stored, dtype))
    if _is_quantized(dtype):
        raise ConfigError(
            f"the checkpoint's {name} is {kind}, but its config.json and its scales require {wanted}"
        )
    raise ConfigError(
        f"the checkpoint's {name} is {kind}, but the checkpoint has no scales for it that can be read"
    )


def _is_quantized(dtype: torch.dtype) -> bool:
    """Returns whether numbers of `dtype` need a scale. Numbers of float8_e8m0fnu are scales."""
    return dtype != torch.float8_e8m0fnu and (dtype.itemsize == 1 or not dtype.is_floating_point)


def part_shape(shape: tuple[int, ...], cut: Cut | None) -> tuple[int, ...]:
    """Returns the shape of the rank's part of a tensor of `shape`."""
    return shape if cut is None else (*shape[: cut.dim], len(cut), *shape[cut.dim + 1 :])


def own_part(cut: Cut, whole: torch.Tensor) -> torch.Tensor:
    """Returns a copy of the rank's part of `whole`. A view would keep the memory of the whole tensor."""
    return cut.apply(whole).clone(memory_format=torch.contiguous_format)


def seed_of(seed: int, name: str) -> int:
    """Returns a 63-bit seed for one parameter, equal on every machine."""
    digest = hashlib.blake2b(f"{seed}/{name}".encode(), digest_size=8).digest()
    return int.from_bytes(digest) >> 1
