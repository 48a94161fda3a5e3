# SPDX-License-Identifier: Apache-2.0
"""Computes gradients of weights apart from those of inputs, for schedules with I and W.

Each product with a weight becomes a graph of its own. Its backward computes the input's gradient only, and queues the weight's, which W
computes. Autograd uses the same kernels for both as in B, so the bits are the same. Gradients of other parameters (norms, biases,
embeddings) are part of I.
"""
from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

# The functions that multiply by weights. Gradients of other operations cost little.
PRODUCTS = frozenset((
    nn.functional.linear, torch.addmm, torch.mm, torch.matmul, torch.bmm, torch.baddbmm, torch.einsum, nn.functional.conv1d,
    Tensor.matmul, Tensor.__matmul__, Tensor.mm, Tensor.bmm,
))


@dataclass
class Pending:
    """A product whose weights' gradients are still to be computed."""

    output: Tensor
    gradient: Tensor
    weights: list[nn.Parameter]


Queue = list[Pending]


class Deferring(TorchFunctionMode):
    """While active, makes products leave the gradients of their weights to `queue`."""

    def __init__(self, queue: Queue) -> None:
        super().__init__()
        self._queue = queue

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        named = kwargs or {}
        if function in PRODUCTS and torch.is_grad_enabled() and not _checkpointed():
            given = (*args, *named.values())
            weights = [value for value in given if isinstance(value, nn.Parameter) and value.requires_grad and value.dim() > 1]
            others = [value for value in given if isinstance(value, Tensor) and not any(value is weight for weight in weights)]
            if weights and not any(isinstance(value, (tuple, list)) for value in given):
                call = self._product(function, args, named, others)
                apply: Callable[..., Tensor] = _Apart.apply
                return apply(call, len(others), weights, self._queue, *others, *weights)
        return function(*args, **named)

    def _product(self, function: Any, args: Any, named: dict[str, Any], others: list[Tensor]) -> Callable[[list[Tensor]], Tensor]:
        def call(inner: list[Tensor]) -> Tensor:
            by = {id(other): value for other, value in zip(others, inner)}
            product: Tensor = function(
                *(by.get(id(value), value) for value in args), **{name: by.get(id(value), value) for name, value in named.items()}
            )
            return product

        return call


class _Apart(torch.autograd.Function):
    """Runs one operation in a graph of its own, from its inputs to its output."""

    @staticmethod
    def forward(
        ctx: Any, call: Callable[[list[Tensor]], Tensor], count: int, weights: list[nn.Parameter], queue: Queue, *given: Tensor
    ) -> Tensor:
        inner = [tensor.detach().requires_grad_(tensor.requires_grad) for tensor in given[:count]]
        with torch.enable_grad():
            ctx.output = call(inner)
        ctx.inner, ctx.weights, ctx.queue = inner, weights, queue
        output: Tensor = ctx.output.detach()
        return output

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        wanted = [tensor for tensor in ctx.inner if tensor.requires_grad]
        found: Iterator[Tensor] = iter(
            torch.autograd.grad(ctx.output, wanted, gradient, retain_graph=True) if wanted else ()
        )
        ctx.queue.append(Pending(ctx.output, gradient, ctx.weights))
        gradients = [next(found) if tensor.requires_grad else None for tensor in ctx.inner]
        nothing = [None] * len(ctx.weights)
        ctx.output = ctx.inner = ctx.weights = ctx.queue = None
        return (None, None, None, None, *gradients, *nothing)


def _checkpointed() -> bool:
    """Returns whether hooks replace saved tensors, as checkpointing does. It would then run the block again for each product."""
    return torch._C._autograd._top_saved_tensors_default_hooks(True) is not None


def add_weight_gradients(queue: Queue) -> None:
    """Computes the queued gradients of weights and adds them, in the order of B. Empties the queue."""
    if queue:
        weights = {id(weight): weight for pending in queue for weight in pending.weights}
        with torch.autocast(queue[0].output.device.type, enabled=False):
            torch.autograd.backward(
                [pending.output for pending in queue], [pending.gradient for pending in queue], inputs=list(weights.values())
            )
        queue.clear()
