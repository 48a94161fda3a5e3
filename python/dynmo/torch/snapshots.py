# SPDX-License-Identifier: Apache-2.0
"""Copies of all layers as they were before some step, in the memory of two ranks each: the owner and the next rank of the ring.

A copy of a neighbour's layers travels as a move does, with digests. All ranks vote; whoever hears that all have the new snapshot drops
the old one. A rank that does not hear it has both, so there is always one snapshot that all survivors hold.
"""
from __future__ import annotations

import copy
import gc
import math
from collections.abc import Sequence
from dataclasses import dataclass
from time import perf_counter
from typing import Any, Optional

import torch
from torch import nn

from . import checks, state
from .layers import Split
from .move import Mover
from .program import Plan
from .ranks import Ranks

SHARE = 0.01  # of a step's time, for snapshots
Key = tuple[int, int]  # generation of the group, step


@dataclass
class Slot:
    """A snapshot as one rank holds it. Owners are members (lines.py), by layer."""

    plan: Plan
    owners: list[int]
    layers: dict[int, state.Content]  # of this rank, and of the one before it
    groups: list[dict[str, Any]]  # of the optimizer
    kept: list[Any]
    trained: list[bool]
    modes: list[bool]


# What a rank tells of a slot: who owned each layer, and which layers it holds.
Holding = dict[Key, tuple[list[int], list[int]]]


class Snapshots:
    """Used by the pipeline's thread, by all ranks together."""

    def __init__(
        self, split: Split, ranks: Ranks, mover: Mover, optimizer: Optional[torch.optim.Optimizer], keep: Sequence[Any], every: int
    ) -> None:
        self._split, self._ranks, self._mover, self._optimizer, self._keep = split, ranks, mover, optimizer, keep
        self._fixed = self.every = every
        self.cost_s = 0.0  # of the newest, on the slowest rank
        self._slots: dict[Key, Slot] = {}
        self._due = 0
        self._taken: Optional[tuple[int, float]] = None  # the step of the newest, and when it was done

    def is_due(self, step: int) -> bool:
        return self._ranks.world > 1 and step >= self._due

    def holdings(self) -> Holding:
        return {key: (slot.owners, sorted(slot.layers)) for key, slot in self._slots.items()}

    def clear(self) -> None:
        self._slots = {}
        self.restart()

    def restart(self) -> None:
        """The group is another one: a snapshot is due, and steps have taken other times."""
        self._due, self._taken = 0, None

    def take(self, generation: int, members: list[int], plan: Plan, step: int) -> None:
        """Takes a snapshot, and says when the next one is due: `every` steps later, else so that they cost 1 % of the time."""
        begin = perf_counter()
        step_s = (begin - self._taken[1]) / max(1, step - self._taken[0]) if self._taken is not None else 0.0
        after = [(owner + 1) % self._ranks.size for owner in plan.owners]
        layers, _ = self._mover.copy(plan.owners, after, plan)
        if layers is not None:
            for index, owner in enumerate(plan.owners):
                if owner == self._ranks.rank:
                    layers[index] = state.clone_of(state.content_of(self._split.layers[index], self._optimizer))
            self._slots[(generation, step)] = self._slot(plan, [members[owner] for owner in plan.owners], layers)
        cells = torch.zeros(self._ranks.world, 3, dtype=torch.float64)
        cells[self._ranks.number] = torch.tensor([layers is None, perf_counter() - begin, step_s], dtype=torch.float64)
        failed, cost_s, slowest_s = self._ranks.sum(cells).amax(0).tolist()
        if failed:
            self._slots.pop((generation, step), None)
            self._due = step + 1
            return
        self._slots = {(generation, step): self._slots[(generation, step)]}
        self.cost_s = cost_s
        self.every = self._fixed or (math.ceil(cost_s / (SHARE * slowest_s)) if slowest_s > 0 else 1)
        self._due, self._taken = step + self.every, (step, perf_counter())

    def restore(self, key: Key, sources: list[int], member: int) -> Plan:
        """Puts back the layers whose source this member is, drops all others, and returns the plan of the snapshot."""
        slot = self._slots[key]
        for layer in self._split.layers:
            for parameter in layer.parameters.values():
                parameter.grad = None
        if checks.check_free(pair for layer in self._split.layers for pair in layer.parameters.items()):
            gc.collect()  # takes long: only if a graph of the step that failed is still there
        for index, layer in enumerate(self._split.layers):
            if sources[index] == member:
                state.put_back(layer, self._optimizer, slot.layers[index], self._split.device.device)
            else:
                state.give_away(layer, self._optimizer)
        for group, values in zip(self._optimizer.param_groups if self._optimizer is not None else [], slot.groups):
            group.update(copy.deepcopy(values))
        for kept, values in zip(self._keep, slot.kept):
            kept.load_state_dict(copy.deepcopy(values))
        for parameter, trained in zip(self._parameters(), slot.trained):
            parameter.requires_grad_(trained)
        for module, mode in zip(self._split.module.modules(), slot.modes):
            module.training = mode
        return slot.plan

    def _parameters(self) -> list[nn.Parameter]:
        return [parameter for layer in self._split.layers for parameter in layer.parameters.values()]

    def _slot(self, plan: Plan, owners: list[int], layers: dict[int, state.Content]) -> Slot:
        groups = self._optimizer.param_groups if self._optimizer is not None else []
        return Slot(
            plan, owners, layers,
            [copy.deepcopy({name: value for name, value in group.items() if name != "params"}) for group in groups],
            [copy.deepcopy(kept.state_dict()) for kept in self._keep],
            [parameter.requires_grad for parameter in self._parameters()],
            [module.training for module in self._split.module.modules()],
        )


def choose(told: Sequence[Holding], members: Sequence[int]) -> "tuple[Key, list[int]] | None":
    """The newest snapshot that all survivors hold and that has every layer, with the member each layer comes from: its owner, or a holder.

    `told` has what each survivor holds, in the order of `members`.
    """
    for key in sorted(told[0], reverse=True):
        if not all(key in holding for holding in told):
            continue
        sources = []
        for layer, owner in enumerate(told[0][key][0]):
            holders = [member for member, holding in zip(members, told) if layer in holding[key][1]]
            if not holders:
                break
            sources.append(owner if owner in holders else holders[0])
        else:
            return key, sources
    return None
