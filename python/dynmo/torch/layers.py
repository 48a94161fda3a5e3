# SPDX-License-Identifier: Apache-2.0
"""What a pipeline asks of a model: an ordered list of layers that it can run one by one."""
from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Optional, Protocol

import torch
from torch import Tensor, nn

MicroBatch = Mapping[str, Any]


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
    notes: Any = None  # what the blocks are given beside the hidden tensor
    shape: tuple[int, ...] = ()  # of the tensor between two layers
    dtype: torch.dtype = torch.float32

    @property
    def bytes(self) -> int:
        return math.prod(self.shape) * self.dtype.itemsize if self.shape else 0


class Split(Protocol):
    """A model as layers. The first one gets the micro-batch, the last one gives the loss."""

    layers: list[Layer]
    ties: list[Tie]
    module: nn.Module

    def begin(self, batch: MicroBatch, step: int) -> Context:
        """A context without notes."""

    def describe(self, context: Context) -> None:
        """Fills in notes, shape and dtype where the first layer is not on this rank."""

    def run(self, layer: int, hidden: Optional[Tensor], context: Context) -> Tensor:
        """The layer's output; of the last one the loss."""


def frozen_prefix(layers: list[Layer]) -> int:
    """How many layers at the start have nothing to train."""
    count = 0
    for layer in layers:
        if not layer.frozen:
            break
        count += 1
    return count
