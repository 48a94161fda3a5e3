# SPDX-License-Identifier: Apache-2.0
"""What a pipeline asks of a model: an ordered list of layers that it can run one by one."""
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
HIDDEN = "hidden"  # the one that every block changes
LOSS = "loss"  # what the last layer gives


@dataclass(frozen=True)
class Spec:
    """A tensor between two layers. `shape` is a limit where shapes may change from step to step."""

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
        """Raises BadInputError unless the tensor has this shape and type."""
        if tensor is None or tuple(tensor.shape) != self.shape or tensor.dtype != self.dtype:
            found = "nothing" if tensor is None else f"{tuple(tensor.shape)} in {tensor.dtype}"
            raise BadInputError(f"{giver} gives {found} as {self.name}, wanted {self.shape} in {self.dtype} as in the first batch")


@dataclass
class Layer:
    """A layer's own parameters and buffers by their name in the model. The objects stay the same ones."""

    name: str
    parameters: dict[str, nn.Parameter] = field(default_factory=dict)
    buffers: dict[str, Tensor] = field(default_factory=dict)

    @property
    def frozen(self) -> bool:
        return not any(parameter.requires_grad for parameter in self.parameters.values())


@dataclass
class Tie:
    """Two parameters that the model had as one; `second` is our copy of `first`."""

    first: str
    second: str
    layers: tuple[int, int]


@dataclass
class Context:
    """A micro-batch on its way through the layers of this rank."""

    batch: MicroBatch
    host: MicroBatch  # the same in host memory
    notes: Any = None  # what the blocks are given beside the tensors of a boundary
    boundaries: list[list[Spec]] = field(default_factory=list)  # behind each layer but the last

    def bytes(self, layer: int) -> int:
        """Those of the boundary behind a layer."""
        return sum(spec.bytes for spec in self.boundaries[layer]) if layer < len(self.boundaries) else 0


class Split(Protocol):
    """A model as layers. The first one gets the micro-batch, the last one gives the loss."""

    layers: list[Layer]
    ties: list[Tie]
    module: nn.Module
    device: Device
    limits: bool  # whether the shapes of boundaries are limits
    forces_gradients: bool  # whether the output of a frozen first layer requires grad, as reentrant checkpointing wants

    @property
    def width(self) -> int:
        """The most tensors of a boundary."""

    def begin(self, batch: MicroBatch, step: int, host: Optional[MicroBatch] = None) -> Context:
        """A context without notes. `host` is the batch in host memory."""

    def describe(self, context: Context) -> None:
        """Fills in notes and boundaries where the first layer is not on this rank."""

    def run(self, layer: int, values: Values, context: Context) -> Values:
        """The layer's output; of the last one the loss."""

    def whole(self, batch: MicroBatch, before: Callable[[int], None]) -> Tensor:
        """The loss of the model as it is. Calls `before` ahead of each layer."""


def frozen_prefix(layers: list[Layer]) -> int:
    """How many layers at the start have nothing to train."""
    count = 0
    for layer in layers:
        if not layer.frozen:
            break
        count += 1
    return count
