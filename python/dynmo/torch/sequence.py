# SPDX-License-Identifier: Apache-2.0
"""A pipeline of the user's own list of modules, each of which is given what the one before gave."""
from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Optional, Union

import torch
from torch import Tensor, nn

from ..errors import BadInputError
from .batches import INPUT, TARGET
from .device import device_of
from .layers import HIDDEN, LOSS, Context, Layer, MicroBatch, Spec, Tie, Values

MAX_NAMES = 16
Between = Union[Tensor, dict[str, Tensor]]  # what a module gives to the next one


class Sequential:
    """Modules in order, and a loss of the last one's output and the target.

    `hidden(input)` returns an empty tensor like those between two modules, or a dictionary of them by name. With `limits` its shapes are
    the largest.
    """

    def __init__(
        self,
        layers: Sequence[tuple[str, nn.Module]],
        loss_fn: Callable[[Any, Any], Tensor],
        hidden: Callable[[Any], Between],
        limits: bool = False,
    ) -> None:
        if len(layers) < 2 or len({name for name, _ in layers}) != len(layers):
            raise BadInputError(f"layers: {[name for name, _ in layers]}, wanted two or more with a name each of its own")
        self._modules = [module for _, module in layers]
        self._loss_fn, self._hidden, self.limits = loss_fn, hidden, limits
        self._named = False  # whether modules return dictionaries
        self.width, self.forces_gradients = MAX_NAMES, False
        self.module: nn.Module = nn.ModuleDict({name.replace(".", "_"): module for name, module in layers})
        self.device = device_of("layers", [self.module])
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

    def begin(self, batch: MicroBatch, step: int, host: Optional[MicroBatch] = None) -> Context:
        return Context(batch, host or batch)

    def describe(self, context: Context) -> None:
        if context.boundaries:
            return
        with torch.no_grad():
            between = self._hidden(context.batch[INPUT])
        self._named = isinstance(between, dict)
        if self._named and not 1 <= len(between) <= MAX_NAMES:
            raise BadInputError(f"hidden: it names {len(between)} tensors, wanted 1 to {MAX_NAMES}")
        specs = [Spec(name, tuple(tensor.shape), tensor.dtype) for name, tensor in self._by_name(between).items()]
        context.boundaries = [specs] * (len(self.layers) - 1)

    def run(self, layer: int, values: Values, context: Context) -> Values:
        self.describe(context)
        given = context.batch[INPUT] if layer == 0 else values if self._named else values[HIDDEN]
        output = self._modules[layer](given)
        if layer == len(self._modules) - 1:
            return {LOSS: self._loss(output, context.batch)}
        found = self._by_name(output) if isinstance(output, dict) == self._named else {}
        specs = context.boundaries[layer]
        if found.keys() != {spec.name for spec in specs}:
            kind = sorted(output) if isinstance(output, dict) else type(output).__name__
            raise BadInputError(
                f"layer {self.layers[layer].name} gives {kind}, wanted {[spec.name for spec in specs] if self._named else 'a tensor'} as "
                "`hidden` says"
            )
        for spec in specs:
            self._check(self.layers[layer].name, spec, found[spec.name])
        return {spec.name: found[spec.name] for spec in specs}

    def whole(self, batch: MicroBatch, before: Callable[[int], None]) -> Tensor:
        value = batch[INPUT]
        for index, module in enumerate(self._modules):
            before(index)
            value = module(value)
        return self._loss(value, batch)

    def _loss(self, output: Any, batch: MicroBatch) -> Tensor:
        loss = self._loss_fn(output, batch[TARGET])
        if not isinstance(loss, Tensor) or loss.numel() != 1:
            raise BadInputError(f"loss_fn: it gives {_shown(loss)}, wanted a tensor of one number")
        return loss

    def _by_name(self, between: Between) -> Values:
        return dict(between) if isinstance(between, dict) else {HIDDEN: between}

    def _check(self, layer: str, spec: Spec, output: Any) -> None:
        shape = tuple(output.shape) if isinstance(output, Tensor) else ()
        fits = len(shape) == len(spec.shape) and all(map(int.__le__ if self.limits else int.__eq__, shape, spec.shape))
        if not isinstance(output, Tensor) or not fits or output.dtype != spec.dtype:
            most = "at most " if self.limits else ""
            name = f" as {spec.name}" if self._named else ""
            raise BadInputError(
                f"layer {layer} gives {_shown(output)}{name}, wanted {most}{spec.shape} in {spec.dtype} as `hidden` says"
            )


def _shown(value: Any) -> str:
    return f"{tuple(value.shape)} in {value.dtype}" if isinstance(value, Tensor) else f"a {type(value).__name__}"
