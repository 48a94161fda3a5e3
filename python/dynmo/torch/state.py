# SPDX-License-Identifier: Apache-2.0
"""Gives layers away and takes them in. Parameters stay the same objects; what they hold is swapped.

`torch.utils.swap_tensors` exchanges the contents of two parameters, so the user's optimizer, its groups, schedulers and every
dictionary of parameters stay valid. Only `optimizer.state[parameter]` is taken out and put in.
"""
from __future__ import annotations

import copy
from dataclasses import dataclass, field
from typing import Any, Optional

import torch
from torch import Tensor, nn

from .layers import Layer

ALIGNMENT = 64
OWN_MESSAGE = 1 << 16  # bytes: a tensor as large is sent as it is; the others of a layer are packed into one message

# Name of a parameter or buffer, key of the optimizer's state ("" for the tensor itself), type, shape.
Entry = tuple[str, str, torch.dtype, tuple[int, ...]]


def _bytes(tensor: Tensor) -> Tensor:
    return tensor.detach().contiguous().reshape(-1).view(torch.uint8)


def _aligned(size: int) -> int:
    return -(-size // ALIGNMENT) * ALIGNMENT


@dataclass
class Content:
    """A layer with its optimizer state: tensors, and values that are none."""

    tensors: dict[tuple[str, str], Tensor] = field(default_factory=dict)
    values: dict[tuple[str, str], Any] = field(default_factory=dict)


@dataclass
class Head:
    """What a receiver knows of a layer before its bytes come."""

    entries: list[Entry]
    values: dict[tuple[str, str], Any]

    @property
    def payload(self) -> int:
        return sum(_size(dtype, shape) for _, _, dtype, shape in self.entries)

    @property
    def packed(self) -> list[Entry]:
        return [entry for entry in self.entries if _size(*entry[2:]) < OWN_MESSAGE]

    @property
    def packed_size(self) -> int:
        return sum(_aligned(_size(dtype, shape)) for _, _, dtype, shape in self.packed)


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
    entries = [(name, key, tensor.dtype, tuple(tensor.shape)) for (name, key), tensor in content.tensors.items()]
    return Head(entries, content.values)


def messages_of(content: Content, head: Head, behind: int) -> list[Tensor]:
    """The layer's bytes: its large tensors as they are, then the others in one, each aligned, with `behind` bytes after them."""
    packed = torch.zeros(head.packed_size + behind, dtype=torch.uint8)
    offset = 0
    for name, key, dtype, shape in head.packed:
        size = _size(dtype, shape)
        packed[offset : offset + size] = _bytes(content.tensors[(name, key)])
        offset += _aligned(size)
    large = [_bytes(content.tensors[(name, key)]) for name, key, dtype, shape in head.entries if _size(dtype, shape) >= OWN_MESSAGE]
    return [*large, packed]


def room_for(head: Head, behind: int) -> tuple[Content, list[Tensor]]:
    """Where a layer arrives: its large tensors, the others once unpack() has been called; and the messages that fill it."""
    content = Content(values=head.values)
    messages = []
    for name, key, dtype, shape in head.entries:
        content.tensors[(name, key)] = torch.empty(shape, dtype=dtype)
        if _size(dtype, shape) >= OWN_MESSAGE:
            messages.append(_bytes(content.tensors[(name, key)]))
    return content, [*messages, torch.empty(head.packed_size + behind, dtype=torch.uint8)]


def unpack(packed: Tensor, head: Head, content: Content) -> None:
    offset = 0
    for name, key, dtype, shape in head.packed:
        size = _size(dtype, shape)
        _bytes(content.tensors[(name, key)]).copy_(packed[offset : offset + size])
        offset += _aligned(size)


def _swap(one: nn.Parameter, other: nn.Parameter) -> None:
    torch.clear_autocast_cache()  # has copies of other types, and weak references
    torch.utils.swap_tensors(one, other)  # type: ignore[no-untyped-call]


def give_away(layer: Layer, optimizer: Optional[torch.optim.Optimizer]) -> None:
    """Frees what the layer holds here; its parameters are on meta afterwards."""
    for parameter in layer.parameters.values():
        if parameter.device.type == "meta":
            continue
        empty = nn.Parameter(torch.empty_like(parameter, device="meta"), requires_grad=parameter.requires_grad)
        _swap(parameter, empty)
        if optimizer is not None:
            optimizer.state.pop(parameter, None)


def take_in(layer: Layer, optimizer: Optional[torch.optim.Optimizer], content: Content) -> None:
    for (name, key), tensor in content.tensors.items():
        if name in layer.buffers:
            layer.buffers[name].copy_(tensor)
        elif key == "":
            parameter = layer.parameters[name]
            _swap(parameter, nn.Parameter(tensor, requires_grad=parameter.requires_grad))
    if optimizer is None:
        return
    for (name, key), value in [*content.tensors.items(), *content.values.items()]:
        if key != "":
            optimizer.state[layer.parameters[name]][key] = value


def clone_of(content: Content) -> Content:
    """A copy that shares no memory."""
    return Content({key: tensor.clone() for key, tensor in content.tensors.items()}, copy.deepcopy(content.values))


def put_back(layer: Layer, optimizer: Optional[torch.optim.Optimizer], content: Content) -> None:
    """Gives a layer, which may be here or not, a copy of what it once held."""
    copied = clone_of(content)
    for name, parameter in layer.parameters.items():
        if optimizer is not None:
            optimizer.state.pop(parameter, None)
        if parameter.device.type != "meta":
            with torch.no_grad():
                parameter.copy_(copied.tensors.pop((name, "")))
    take_in(layer, optimizer, copied)
