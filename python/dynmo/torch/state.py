# SPDX-License-Identifier: Apache-2.0
"""Moves layers out of and into a rank. Parameters stay the same objects, and their contents are swapped.

`torch.utils.swap_tensors` exchanges the contents of two parameters. So the user's optimizer, its groups, schedulers and every dictionary of
parameters stay valid. Only `optimizer.state[parameter]` is removed and added.
"""
from __future__ import annotations

import copy
import itertools
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Optional

import torch
from torch import Tensor, nn

from .device import empty_on_host, to_device, to_host
from .layers import Layer

ALIGNMENT = 64
OWN_MESSAGE = 1 << 16  # bytes: tensors from this size on have messages of their own; the others of a layer share one

Key = tuple[str, str]  # name of a parameter or buffer, key of the optimizer's state ("" for the tensor itself)
Entry = tuple[str, str, torch.dtype, tuple[int, ...], bool]  # name, key, type, shape, whether it is on a device


def _bytes(tensor: Tensor) -> Tensor:
    return tensor.detach().contiguous().reshape(-1).view(torch.uint8)


def _aligned(size: int) -> int:
    return -(-size // ALIGNMENT) * ALIGNMENT


@dataclass
class Content:
    """A layer with its optimizer state: its tensors, and its other values.

    A copy is in host memory, or one message on a device. `of_device` names the tensors whose originals are on a device.
    """

    tensors: dict[Key, Tensor] = field(default_factory=dict)
    values: dict[Key, Any] = field(default_factory=dict)
    of_device: set[Key] = field(default_factory=set)


@dataclass
class Head:
    """The types and shapes of a layer, which a receiver gets before the bytes."""

    entries: list[Entry]
    values: dict[Key, Any]

    @property
    def payload(self) -> int:
        return sum(_size(dtype, shape) for _, _, dtype, shape, _ in self.entries)

    @property
    def there(self) -> list[Entry]:
        """Returns the entries of tensors on a device."""
        return [entry for entry in self.entries if entry[4]]

    @property
    def on_host(self) -> Head:
        """Returns the head without the tensors on a device."""
        return Head([entry for entry in self.entries if not entry[4]], self.values)

    @property
    def packed(self) -> list[Entry]:
        return [entry for entry in self.entries if _size(*entry[2:4]) < OWN_MESSAGE]

    @property
    def packed_size(self) -> int:
        return sum(_aligned(_size(dtype, shape)) for _, _, dtype, shape, _ in self.packed)


def _size(dtype: torch.dtype, shape: tuple[int, ...]) -> int:
    size = dtype.itemsize
    for extent in shape:
        size *= extent
    return size


def content_of(layer: Layer, optimizer: Optional[torch.optim.Optimizer]) -> Content:
    content = Content()
    for name, parameter in layer.parameters.items():
        content.tensors[(name, "")] = parameter.detach()
        state = optimizer.state.get(parameter, {}) if optimizer is not None else {}
        for key, value in state.items():
            if isinstance(value, Tensor):
                content.tensors[(name, key)] = value
            else:
                content.values[(name, key)] = value
    for name, buffer in layer.buffers.items():
        content.tensors[(name, "")] = buffer
    return content


def head_of(content: Content) -> Head:
    entries = [
        (*place, tensor.dtype, tuple(tensor.shape), tensor.device.type != "cpu" or place in content.of_device)
        for place, tensor in content.tensors.items()
    ]
    return Head(entries, content.values)


def _on_host(tensors: dict[Key, Tensor]) -> dict[Key, Tensor]:
    """Returns the tensors in host memory. Those of a device are packed there and copied together."""
    there = {key: tensor for key, tensor in tensors.items() if tensor.device.type != "cpu"}
    if not there:
        return tensors
    flat = _flat(list(there.values()))
    return {**tensors, **cut(to_host([flat])[0], [(*key, tensor.dtype, tuple(tensor.shape), True) for key, tensor in there.items()])}


def _flat(tensors: Sequence[Tensor]) -> Tensor:
    """Returns the bytes of tensors of one device as one tensor, each aligned."""
    parts = [_bytes(tensor) for tensor in tensors]
    ends = list(itertools.accumulate(_aligned(part.numel()) for part in parts))
    flat = torch.zeros(max([ALIGNMENT, *ends]), dtype=torch.uint8, device=tensors[0].device if tensors else None)
    for part, end in zip(parts, ends):
        flat[end - _aligned(part.numel()) :][: part.numel()] = part
    return flat


def flat_of(content: Content, head: Head, device: torch.device) -> Tensor:
    """Returns the layer's tensors of a device as one message on `device`. Copies in host memory are moved there first."""
    tensors = [content.tensors[entry[:2]] for entry in head.there]
    if all(tensor.device == device for tensor in tensors):
        return _flat(tensors)
    return to_device(_flat(to_host(tensors)), device)


def flat_room(head: Head, device: torch.device) -> Tensor:
    """Returns memory for a message of flat_of()."""
    return torch.empty(max(ALIGNMENT, sum(_aligned(_size(*entry[2:4])) for entry in head.there)), dtype=torch.uint8, device=device)


def cut(flat: Tensor, entries: Sequence[Entry]) -> dict[Key, Tensor]:
    """Returns views of the tensors in `flat`, which are adjacent and aligned."""
    found, offset = {}, 0
    for name, key, dtype, shape, _ in entries:
        size = _size(dtype, shape)
        found[(name, key)] = flat[offset : offset + size].view(dtype).view(shape)
        offset += _aligned(size)
    return found


def messages_of(content: Content, head: Head, behind: int) -> list[Tensor]:
    """Returns the layer's bytes as messages: its large tensors, then one with all others, each aligned, and `behind` more bytes."""
    tensors = _on_host({entry[:2]: content.tensors[entry[:2]] for entry in head.entries})
    packed = torch.zeros(head.packed_size + behind, dtype=torch.uint8)
    offset = 0
    for name, key, dtype, shape, _ in head.packed:
        size = _size(dtype, shape)
        packed[offset : offset + size] = _bytes(tensors[(name, key)])
        offset += _aligned(size)
    large = [_bytes(tensors[(name, key)]) for name, key, dtype, shape, _ in head.entries if _size(dtype, shape) >= OWN_MESSAGE]
    return [*large, packed]


def room_for(head: Head, behind: int) -> tuple[Content, list[Tensor]]:
    """Returns memory for a layer that arrives, and the messages that fill it. unpack() fills in the small tensors."""
    there = head.there
    room = empty_on_host([sum(_aligned(_size(*entry[2:4])) for entry in there)], torch.uint8) if there else torch.empty(0)
    content = Content(cut(room, there), head.values, {entry[:2] for entry in there})
    messages = []
    for name, key, dtype, shape, on_device in head.entries:
        if not on_device:
            content.tensors[(name, key)] = torch.empty(shape, dtype=dtype)
        if _size(dtype, shape) >= OWN_MESSAGE:
            messages.append(_bytes(content.tensors[(name, key)]))
    return content, [*messages, torch.empty(head.packed_size + behind, dtype=torch.uint8)]


def unpack(packed: Tensor, head: Head, content: Content) -> None:
    offset = 0
    for name, key, dtype, shape, _ in head.packed:
        size = _size(dtype, shape)
        _bytes(content.tensors[(name, key)]).copy_(packed[offset : offset + size])
        offset += _aligned(size)


def _swap(one: nn.Parameter, other: nn.Parameter) -> None:
    torch.clear_autocast_cache()  # the cache has copies of other types, and weak references
    torch.utils.swap_tensors(one, other)  # type: ignore[no-untyped-call]


def give_away(layer: Layer, optimizer: Optional[torch.optim.Optimizer]) -> None:
    """Frees a layer's tensors and optimizer state on this rank. Its parameters are then on meta."""
    for parameter in layer.parameters.values():
        if parameter.device.type == "meta":
            continue
        empty = nn.Parameter(torch.empty_like(parameter, device="meta"), requires_grad=parameter.requires_grad)
        _swap(parameter, empty)
        if optimizer is not None:
            optimizer.state.pop(parameter, None)


def take_in(layer: Layer, optimizer: Optional[torch.optim.Optimizer], content: Content, device: torch.device) -> None:
    """Sets a layer's tensors and optimizer state to `content`. Tensors of a device are put on this rank's `device`.

    Parts of one message from device to device are cloned, because kernels depend on alignment, and bits on kernels.
    """
    tensors = {
        key: tensor.clone() if tensor.device == device and not tensor.is_cpu else to_device(tensor, device) if key in content.of_device else tensor
        for key, tensor in content.tensors.items()
    }
    for (name, key), tensor in tensors.items():
        if name in layer.buffers:
            layer.buffers[name].copy_(tensor)
        elif key == "":
            parameter = layer.parameters[name]
            _swap(parameter, nn.Parameter(tensor, requires_grad=parameter.requires_grad))
    if optimizer is None:
        return
    for (name, key), value in [*tensors.items(), *content.values.items()]:
        if key != "":
            optimizer.state[layer.parameters[name]][key] = value


def clone_of(content: Content) -> Content:
    """Returns a copy in host memory, which shares nothing with `content`."""
    of_device = content.of_device | {key for key, tensor in content.tensors.items() if tensor.device.type != "cpu"}
    tensors = {key: tensor.clone() for key, tensor in _on_host(content.tensors).items()}
    return Content(tensors, copy.deepcopy(content.values), of_device)


def put_back(layer: Layer, optimizer: Optional[torch.optim.Optimizer], content: Content, device: torch.device) -> None:
    """Sets a layer, whether it is on this rank or not, to a copy of an earlier content."""
    copied = clone_of(content)
    for name, parameter in layer.parameters.items():
        if optimizer is not None:
            optimizer.state.pop(parameter, None)
        if parameter.device.type != "meta":
            with torch.no_grad():
                parameter.copy_(copied.tensors.pop((name, "")))
    take_in(layer, optimizer, copied, device)
