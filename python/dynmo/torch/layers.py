# SPDX-License-Identifier: Apache-2.0
"""A model as an ordered list of layers that a pipeline can run one by one."""
from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Optional, Protocol

import torch
from torch import Tensor, nn

from ..errors import BadInputError
from .device import Device

MicroBatch = Mapping[str, Any]
Values = dict[str, Tensor]  # the tensors between two layers, by name
HIDDEN = "hidden"  # name of the tensor that every block changes
LOSS = "loss"  # name of the last layer's result


@dataclass(frozen=True)
class Spec:
    """The name, shape and type of a tensor between two layers. If shapes may change from step to step, `shape` is the largest."""

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype

    @property
    def bytes(self) -> int:
        return math.prod(self.shape) * self.dtype.itemsize

    @property
    def has_gradient(self) -> bool:
        return self.dtype.is_floating_point

    def check(self, giver: str, tensor: Optional[Tensor]) -> None:
        """Raises BadInputError unless the tensor has this shape and type. `giver` is the layer in the message."""
        if tensor is None or tuple(tensor.shape) != self.shape or tensor.dtype != self.dtype:
            found = "nothing" if tensor is None else f"{tuple(tensor.shape)} in {tensor.dtype}"
            raise BadInputError(f"{giver} gives {found} as {self.name}, wanted {self.shape} in {self.dtype} as in the first batch")


@dataclass
class Layer:
    """A layer's own parameters and buffers by name in the model. These objects never change, only their contents."""

    name: str
    parameters: dict[str, nn.Parameter] = field(default_factory=dict)
    buffers: dict[str, Tensor] = field(default_factory=dict)

    @property
    def frozen(self) -> bool:
        return not any(parameter.requires_grad for parameter in self.parameters.values())


@dataclass
class Tie:
    """Two parameters that were one in the model. `second` is a copy of `first`."""

    first: str
    second: str
    layers: tuple[int, int]


@dataclass
class Context:
    """A micro-batch while the layers of this rank process it."""

    batch: MicroBatch
    host: MicroBatch  # the same in host memory
    notes: Any = None  # arguments of blocks that are not in boundaries
    boundaries: list[list[Spec]] = field(default_factory=list)  # after each layer but the last

    def bytes(self, layer: int) -> int:
        """Returns the bytes of the boundary after a layer; 0 if there is none."""
        return sum(spec.bytes for spec in self.boundaries[layer]) if layer < len(self.boundaries) else 0


class Split(Protocol):
    """A model as layers. The first layer gets the micro-batch, and the last one returns the loss."""

    layers: list[Layer]
    ties: list[Tie]
    module: nn.Module
    device: Device
    limits: bool  # whether the shapes of boundaries are maxima
    forces_gradients: bool  # whether a frozen first layer's output requires grad, as for reentrant checkpointing

    @property
    def width(self) -> int:
        """Returns the maximum number of tensors in a boundary."""

    def begin(self, batch: MicroBatch, step: int, host: Optional[MicroBatch] = None) -> Context:
        """Returns a context without notes. `host` is the batch in host memory."""

    def describe(self, context: Context) -> None:
        """Sets notes and boundaries of the context, if the first layer is on another rank."""

    def run(self, layer: int, values: Values, context: Context) -> Values:
        """Returns the output of a layer, or the loss of the last one."""

    def whole(self, batch: MicroBatch, before: Callable[[int], None]) -> Tensor:
        """Returns the loss of the unsplit model. Calls `before(layer)` before each layer."""


def frozen_prefix(layers: list[Layer]) -> int:
    """Returns how many layers at the start have no parameter that is trained."""
    count = 0
    for layer in layers:
        if not layer.frozen:
            break
        count += 1
    return count
