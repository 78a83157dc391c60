"""The recurrent states of one rank: windows of convolutions, and states of state space models and linear attention.

The size of a state does not depend on the length of its request. All states are therefore allocated once, in a few
tensors `[places, slots, ...]`, one for each kind, shape and dtype, as in SGLang's `MambaPool`. A *place* is one state
tensor of one layer. A request's state is the same slot of all tensors. Where ranks share a layer by heads, a rank
holds the states of its heads only.

Packed steps read and write the pool in place, by slot (`at`). Steps through transformers' cache also work in place if
their slots are consecutive (a single sequence always is). Other batches are gathered and scattered, with two launches
for each tensor of the pool, however many layers the model has.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import NamedTuple

import torch

from disagg.core.errors import InvariantError
from disagg.core.types import StateClass
from disagg.kv.upload import upload


class StatePlace(NamedTuple):
    """Identifies one state tensor of a request."""

    layer: int
    number: int
    """Index among the states of the layer."""
    kind: str
    """Kind of the state: `conv` or `recurrent`."""


class StateSection(NamedTuple):
    """Consecutive elements of a state tensor's first dimension: an equal number for each of some heads or groups."""

    heads: int
    """Number of heads, or groups of heads, in the whole model."""
    own: int
    """Number of these that the rank holds."""
    rows: int
    """Elements of the first dimension for each of them."""


class StateHeads(NamedTuple):
    """Division of a state tensor's first dimension, for layers that ranks can share by heads."""

    layer_heads: int
    layer_groups: int
    """Heads of the layer, and their groups, in the whole model; see `StateClass`."""
    sections: tuple[StateSection, ...]


class StateForm(NamedTuple):
    """Shape of one state tensor."""

    place: StatePlace
    shape: tuple[int, ...]
    """Shape of the rank's tensor without the batch dimension."""
    dtype: torch.dtype
    heads: StateHeads | None = None
    """None if every rank holds the whole tensor."""


States = list[tuple[StatePlace, torch.Tensor]]
"""State tensors of one batch, `[batch, *shape]` each."""


class MambaPoolStatistics(NamedTuple):
    """Sizes of a pool."""

    slots: int
    slot_bytes: int
    """Bytes of one request's state."""
    nbytes: int
    """Bytes of the pool."""


class MambaPool:
    """Recurrent states of `slots` requests. Not thread-safe: owned by the rank's compute thread.

    The memory starts uninitialized: `clear` a slot before its request's first token.
    """

    def __init__(self, forms: Sequence[StateForm], slots: int, device: torch.device | str = "cpu") -> None:
        """Allocates the pool. `forms`: the state tensors of a request. Raises ValueError without slots or forms."""
        if slots < 1 or not forms:
            raise ValueError(
                f"a pool of recurrent states needs slots and states, not {slots} and {len(forms)}"
            )
        self.slots, self.forms, self.device = slots, tuple(forms), torch.device(device)
        self.buffers: list[torch.Tensor] = []
        """Contiguous `[places, slots, *shape]`, one for each kind, shape and dtype."""
        self._at: list[tuple[int, int]] = []
        """For each form: the index of its buffer, and of its place within the buffer."""
        groups = _groups(self.forms)
        numbers = {key: number for number, key in enumerate(groups)}
        for form in self.forms:
            key = _key(form)
            self._at.append((numbers[key], groups[key].index(form)))
        self._indices = {form.place: at for form, at in zip(self.forms, self._at, strict=True)}
        for (_, shape, dtype, _), members in groups.items():
            self.buffers.append(torch.empty(len(members), slots, *shape, dtype=dtype, device=self.device))

    def clear(self, slot: int) -> None:
        """Zeroes a slot."""
        self._require(slot)
        for buffer in self.buffers:
            buffer[:, slot].zero_()

    def states(self, slot: int) -> States:
        """Returns the state in `slot`: views `[1, *shape]` of the pool."""
        return self._views(slot, 1)

    def at(self, place: StatePlace) -> torch.Tensor:
        """Returns the states of all slots at a place: a view `[slots, *shape]` of the pool."""
        buffer, at = self._indices[place]
        return self.buffers[buffer][at]

    @contextmanager
    def batch(self, slots: Sequence[int]) -> Iterator[States]:
        """Yields the states of several slots as one batch; writes to the yielded tensors change the pool.

        If the slots are not consecutive, the batch is a copy, which is written back at the end of the block unless
        the block raises. No slot may occur twice. Copies are queued on the current stream, without synchronization.
        """
        if len(set(slots)) != len(slots) or not slots:
            raise InvariantError(f"a batch of recurrent states needs different slots: {list(slots)}")
        for slot in slots:
            self._require(slot)
        if all(slot == slots[0] + at for at, slot in enumerate(slots)):
            yield self._views(slots[0], len(slots))
            return
        index = upload(slots, self.device)
        gathered = [buffer.index_select(1, index) for buffer in self.buffers]
        yield [
            (form.place, gathered[buffer][at])
            for form, (buffer, at) in zip(self.forms, self._at, strict=True)
        ]
        for buffer, new in zip(self.buffers, gathered, strict=True):
            buffer.index_copy_(1, index, new)

    def copy(self, sources: Sequence[int], destinations: Sequence[int]) -> None:
        """Copies the state in slot `sources[i]` to slot `destinations[i]`, for all `i` at once.

        A slot may therefore be both a source and a destination. Needs two kernel launches per buffer, and no
        synchronization.

        Raises InvariantError for a slot outside of the pool, or a destination that occurs twice.
        """
        if not sources:
            return
        for slot in (*sources, *destinations):
            self._require(slot)
        if len(set(destinations)) != len(destinations) or len(sources) != len(destinations):
            raise InvariantError(
                f"recurrent states: {list(sources)} cannot be copied to {list(destinations)}"
            )
        source, destination = upload([*sources, *destinations], self.device).view(2, -1)
        with torch.inference_mode():
            for buffer in self.buffers:
                buffer.index_copy_(1, destination, buffer.index_select(1, source))

    def byte_views(self) -> list[torch.Tensor]:
        """Returns a contiguous uint8 view `[places, 1, slots, 1, slot_bytes]` of each buffer."""
        return [
            buffer.view(-1).view(torch.uint8).view(len(buffer), 1, self.slots, 1, -1)
            for buffer in self.buffers
        ]

    def class_views(self) -> list[torch.Tensor]:
        """Returns the rank's part of each of `state_classes`, uint8 `[places, 1, slots, heads, head_bytes]`."""
        return class_views(self.byte_views(), state_classes(self.forms), _own_heads(self.forms))

    def statistics(self) -> MambaPoolStatistics:
        """Returns the sizes of the pool."""
        nbytes = sum(buffer.nbytes for buffer in self.buffers)
        return MambaPoolStatistics(self.slots, nbytes // self.slots, nbytes)

    def check(self) -> None:
        """Raises `InvariantError` unless each place has separate memory with the shape and dtype of its form."""
        if len(set(self._at)) != len(self.forms):
            raise InvariantError("recurrent states: two places share memory")
        for form, (buffer, at) in zip(self.forms, self._at, strict=True):
            held = self.buffers[buffer]
            if (*held.shape[2:],) != form.shape or held.dtype != form.dtype or at >= len(held):
                raise InvariantError(f"recurrent states: {form} lies in {tuple(held.shape)} {held.dtype}")
            sections = form.heads.sections if form.heads is not None else ()
            if sections and sum(one.own * one.rows for one in sections) != form.shape[0]:
                raise InvariantError(
                    f"recurrent states: the sections of {form} do not add up to its first dimension"
                )

    def _views(self, start: int, count: int) -> States:
        self._require(start)
        return [
            (form.place, self.buffers[buffer][at, start : start + count])
            for form, (buffer, at) in zip(self.forms, self._at, strict=True)
        ]

    def _require(self, slot: int) -> None:
        if not 0 <= slot < self.slots:
            raise InvariantError(f"recurrent states: slot {slot} is not one of 0..{self.slots - 1}")


def state_classes(forms: Sequence[StateForm]) -> tuple[StateClass, ...]:
    """Returns the classes of state tensors of the whole model: one for each section of each buffer of a `MambaPool`
    of `forms`, in the order of the buffers."""
    found = []
    for (_, shape, dtype, heads), members in _groups(forms).items():
        if heads is None:
            parts = _undivided_parts(shape)
            found.append(StateClass(len(members), parts, math.prod(shape) * dtype.itemsize // parts))
            continue
        row_bytes = math.prod(shape[1:]) * dtype.itemsize
        for number, one in enumerate(heads.sections):
            divided = number > 0, heads.layer_heads, heads.layer_groups
            found.append(StateClass(len(members), one.heads, one.rows * row_bytes, *divided))
    return tuple(found)


def class_views(
    buffers: Sequence[torch.Tensor], classes: Sequence[StateClass], heads: Sequence[int]
) -> list[torch.Tensor]:
    """Returns a view `[places, 1, slots, heads, head_bytes]` for each of `classes`, of which a rank holds `heads`
    parts.

    `buffers`: the rank's `MambaPool.byte_views`. Views of joined classes have gaps between slots. Raises ValueError
    if the slots of a buffer are too small for its classes.
    """
    views: list[torch.Tensor] = []
    numbers, start = iter(buffers), 0
    for one, count in zip(classes, heads, strict=True):
        if not one.joined:
            buffer, start = next(numbers), 0
        width = count * one.head_bytes
        if start + width > buffer.shape[4]:
            raise ValueError(
                f"slots of recurrent states have {buffer.shape[4]} bytes, less than {start + width}"
            )
        part = buffer[:, :, :, 0, start : start + width]
        views.append(torch.unflatten(part, 3, (count, one.head_bytes)))
        start += width
    return views


_Key = tuple[str, tuple[int, ...], torch.dtype, StateHeads | None]
"""Kind, shape, dtype and division of the state tensors in one buffer."""


def _key(form: StateForm) -> _Key:
    return form.place.kind, form.shape, form.dtype, form.heads


def _groups(forms: Sequence[StateForm]) -> dict[_Key, list[StateForm]]:
    """Returns the forms by key."""
    groups: dict[_Key, list[StateForm]] = {}
    for form in forms:
        groups.setdefault(_key(form), []).append(form)
    return groups


def _undivided_parts(shape: Sequence[int]) -> int:
    """Returns the number of heads of a state tensor without sections: the first of three or more dimensions, or 1."""
    return shape[0] if len(shape) > 2 else 1


def _own_heads(forms: Sequence[StateForm]) -> list[int]:
    """Returns the number of parts that the rank holds of each of `state_classes`."""
    found: list[int] = []
    for _, shape, _, heads in _groups(forms):
        if heads is None:
            found.append(_undivided_parts(shape))
        else:
            found += [one.own for one in heads.sections]
    return found
