# SPDX-License-Identifier: Apache-2.0
"""A pipeline of the user's own list of modules, each of which is given what the one before gave."""
from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Optional

import torch
from torch import Tensor, nn

from ..errors import BadInputError
from .layers import Context, Layer, MicroBatch, Tie

INPUT, TARGET = "input", "target"


class Sequential:
    """Modules in order, then a loss of the last one's output and the target.

    Between the first and the last module the tensor keeps its shape and type: `hidden` says which from an input.
    """

    def __init__(
        self,
        layers: Sequence[tuple[str, nn.Module]],
        loss_fn: Callable[[Any, Any], Tensor],
        hidden: Callable[[Any], Tensor],
    ) -> None:
        if len(layers) < 2 or len({name for name, _ in layers}) != len(layers):
            raise BadInputError(f"layers: {[name for name, _ in layers]}, wanted two or more with a name each of its own")
        self._modules = [module for _, module in layers]
        self._loss_fn, self._hidden = loss_fn, hidden
        self.module: nn.Module = nn.ModuleDict({name.replace(".", "_"): module for name, module in layers})
        self.ties: list[Tie] = []
        self.layers = [Layer(name) for name, _ in layers]
        owner: dict[int, str] = {}
        for layer, key in zip(self.layers, self.module._modules):
            module = self.module._modules[key]
            assert module is not None
            for name, parameter in module.named_parameters(prefix=key):
                if id(parameter) in owner:
                    raise BadInputError(f"layers: {owner[id(parameter)]} and {name} are one parameter, wanted none shared by layers")
                owner[id(parameter)] = name
                layer.parameters[name] = parameter
            layer.buffers.update(module.named_buffers(prefix=key))

    def begin(self, batch: MicroBatch, step: int) -> Context:
        return Context(batch)

    def describe(self, context: Context) -> None:
        if context.shape == ():
            with torch.no_grad():
                like = self._hidden(context.batch[INPUT])
            context.shape, context.dtype = tuple(like.shape), like.dtype

    def run(self, layer: int, hidden: Optional[Tensor], context: Context) -> Tensor:
        output = self._modules[layer](context.batch[INPUT] if layer == 0 else hidden)
        if layer == len(self._modules) - 1:
            return self._loss_fn(output, context.batch[TARGET])
        self.describe(context)
        if tuple(output.shape) != context.shape or output.dtype != context.dtype:
            raise BadInputError(
                f"layer {self.layers[layer].name} gives {tuple(output.shape)} in {output.dtype}, wanted {context.shape} in "
                f"{context.dtype} as `hidden` says"
            )
        assert isinstance(output, Tensor)
        return output
