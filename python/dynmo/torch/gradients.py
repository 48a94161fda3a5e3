# SPDX-License-Identifier: Apache-2.0
"""Gradients at the end of a step: the sums of tied parameters, and torch's clipping for any cut."""
from __future__ import annotations

from collections.abc import Iterator
from typing import Optional

import torch
from torch import Tensor, nn

from ..errors import BadInputError
from .device import to_device
from .layers import Split
from .ranks import Ranks

TIE_TAG = 1 << 24


def _pairs(split: Split) -> Iterator[tuple[nn.Parameter, nn.Parameter]]:
    for tie in split.ties:
        yield split.layers[tie.layers[0]].parameters[tie.first], split.layers[tie.layers[1]].parameters[tie.second]


def mirror_ties(split: Split) -> None:
    """Trains the second parameter of a tie if the first is trained."""
    for first, second in _pairs(split):
        second.requires_grad_(first.requires_grad)


def part_ties(split: Split) -> None:
    """Leaves a tie's sum of earlier steps to the first parameter only, before a step adds to both. Otherwise it would be counted twice."""
    for first, second in _pairs(split):
        if first.requires_grad:  # else add_ties() leaves both as they are
            second.grad = None


def add_ties(split: Split, ranks: Ranks, owners: list[int]) -> None:
    """Gives both parameters of each tie the same sum: the gradient of the head, then that of the embedding."""
    exchanged = False
    for index, (tie, (first, second)) in enumerate(zip(split.ties, _pairs(split))):
        if not first.requires_grad:
            continue
        here = [owners[layer] == ranks.rank for layer in tie.layers]
        mine = [parameter for parameter, own in zip((first, second), here) if own]
        for parameter in mine:
            if parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)
        if all(here):
            assert first.grad is not None and second.grad is not None
            total = second.grad + first.grad
            first.grad, second.grad = total, total.clone()
        elif mine:
            own = mine[0].grad
            assert own is not None
            other_rank = owners[tie.layers[0] if here[1] else tie.layers[1]]
            arrived = ranks.receive(torch.empty_like(own, memory_format=torch.contiguous_format), other_rank, TIE_TAG + index, purpose="tie")
            sent = ranks.send(own.contiguous(), other_rank, TIE_TAG + index, purpose="tie")
            other = arrived.wait()
            sent.wait()
            mine[0].grad = own + other if here[1] else other + own
            exchanged = True
    if exchanged:
        ranks.settle()  # before the optimizer's update


class Clip:
    """Computes torch.nn.utils.clip_grad_norm_ over all ranks, bit for bit."""

    def __init__(self, split: Split, ranks: Ranks) -> None:
        self._ranks, self._device = ranks, split.device
        copies = {tie.second for tie in split.ties}
        by_name = {name: (index, parameter) for index, layer in enumerate(split.layers) for name, parameter in layer.parameters.items()}
        names = [name for name, _ in split.module.named_parameters() if name not in copies]
        # The order of model.parameters(), in which torch stacks the norms.
        self._order: list[tuple[int, nn.Parameter]] = [by_name[name] for name in names]

    def __call__(self, owners: list[int], max_norm: float, norm_type: float, error_if_nonfinite: bool) -> Tensor:
        count = len(self._order)
        cells = torch.zeros(2 * count, dtype=torch.float64)
        own = {
            index: parameter.grad for index, (layer, parameter) in enumerate(self._order)
            if owners[layer] == self._ranks.rank and self._ranks.replica == 0 and parameter.grad is not None  # others have the same
        }
        if own:
            norms_of_own = torch._foreach_norm(list(own.values()), norm_type)  # the kernels of torch's clipping
            cells[list(own)] = torch.tensor(self._device.read(norms_of_own), dtype=torch.float64)
            cells[[count + index for index in own]] = 1
        self._ranks.sum(cells)
        norms = [
            cells[index].to(parameter.dtype) for index, (_, parameter) in enumerate(self._order) if cells[count + index] != 0
        ]
        if not norms:
            return torch.tensor(0.0)
        total: Tensor = torch.linalg.vector_norm(to_device(torch.stack(norms), self._device.device), norm_type)
        if error_if_nonfinite and not torch.isfinite(total):
            raise BadInputError(f"gradients: their norm of order {norm_type} is {total.item()}, wanted a finite one")
        return total

    def scale(self, parameters: list[nn.Parameter], total: Tensor, max_norm: float) -> None:
        factor: Optional[Tensor] = None
        for parameter in parameters:
            if parameter.grad is not None:
                if factor is None:
                    factor = torch.clamp(max_norm / (total + 1e-6), max=1.0)
                parameter.grad.mul_(factor)
