# SPDX-License-Identifier: Apache-2.0
"""Copies of all layers from before some step, each in the memory of at least two ranks.

Without replicas the owner and the next rank of the ring keep them: a copy for the neighbour travels like a move, with digests. With
replicas each owner of a layer copies its own, and no bytes travel. All ranks vote. A rank that learns that all have the new snapshot drops
the old one. Otherwise it keeps both. So there is always one snapshot that all survivors have.

With replicas the layers themselves are the newest snapshot, as long as no rank has begun to update them.
"""
from __future__ import annotations

import copy
import gc
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from time import perf_counter
from typing import Any, Optional

import torch
from torch import nn

from . import checks, state
from .layers import Layer, Split
from .move import Mover, Transfer
from .program import Plan
from .ranks import Ranks

SHARE = 0.01  # share of a step's time that snapshots may take
Key = tuple[int, int]  # step, generation of the group
LIVE = 1 << 30  # stands for a generation if the layers themselves are the snapshot
Holding = dict[Key, list[int]]  # the layers that a rank holds, by snapshot


@dataclass
class Common:
    """The state that is equal on all ranks between two steps."""

    plan: Plan
    groups: list[dict[str, Any]]  # of the optimizer
    kept: list[Any]
    trained: list[bool]
    modes: list[bool]


@dataclass
class Slot:
    """The part of a snapshot that one rank holds."""

    common: Common
    layers: dict[int, state.Content]


@dataclass
class _Live:
    """The layers as they were before a step, with the versions that show whether the layers have changed since."""

    step: int
    common: Common
    updates: int
    versions: list[int]


class Snapshots:
    """The snapshots of a rank. Used by the pipeline's thread, by all ranks together."""

    def __init__(
        self, split: Split, ranks: Ranks, mover: Mover, optimizer: Optional[torch.optim.Optimizer], keep: Sequence[Any], every: int,
        updates: Callable[[], int],
    ) -> None:
        self._split, self._ranks, self._mover, self._optimizer, self._keep = split, ranks, mover, optimizer, keep
        self.fixed = self.every = every
        self._updates = updates  # returns the number of updates that the optimizer has begun
        self.cost_s = 0.0  # seconds of the newest, on the slowest rank
        self._slots: dict[Key, Slot] = {}
        self._live: Optional[_Live] = None
        self._due = 0
        self._taken: Optional[tuple[int, float]] = None  # step and end time of the newest

    def is_due(self, step: int) -> bool:
        return self._ranks.world > 1 and step >= self._due

    def holdings(self) -> Holding:
        found = {key: sorted(slot.layers) for key, slot in self._slots.items()}
        live = self._live
        if live is not None and (live.updates, live.versions) == (self._updates(), self._versions()):
            found[(live.step, LIVE)] = self._here()
        return found

    def clear(self) -> None:
        self._slots, self._live = {}, None
        self.restart()

    def restart(self) -> None:
        """Drops the step times of the previous group. A snapshot is due at once."""
        self._due, self._taken = 0, None

    def note(self, plan: Plan, step: int, changes: bool = False) -> None:
        """Notes that the layers now are those before `step`. If there are replicas, or the ranks change without a loss, they serve
        as a snapshot.
        """
        if self._ranks.replicas > 1 or changes:
            self._live = _Live(step, self._common(plan), self._updates(), self._versions())

    def take(self, generation: int, plan: Plan, step: int) -> None:
        """Takes a snapshot. The next one is due `every` steps later. Unless `every` is fixed, chooses it for 1 % of the time."""
        begin = perf_counter()
        step_s = (begin - self._taken[1]) / max(1, step - self._taken[0]) if self._taken is not None else 0.0
        layers: Optional[dict[int, state.Content]] = {}
        if self._ranks.replicas == 1:
            layers, _ = self._mover.copy(plan.owners, [(owner + 1) % self._ranks.size for owner in plan.owners], plan, on_host=True)
        if layers is not None:
            for index, owner in enumerate(plan.owners):
                if owner == self._ranks.rank:
                    layers[index] = state.clone_of(state.content_of(self._split.layers[index], self._optimizer))
            self._slots[(step, generation)] = Slot(self._common(plan), layers)
        cells = torch.zeros(self._ranks.world, 3, dtype=torch.float64)
        cells[self._ranks.number] = torch.tensor([layers is None, perf_counter() - begin, step_s], dtype=torch.float64)
        failed, cost_s, slowest_s = self._ranks.sum(cells).amax(0).tolist()
        if failed:
            self._slots.pop((step, generation), None)
            self._due = step + 1
            return
        self._slots = {(step, generation): self._slots[(step, generation)]}
        self.cost_s = cost_s
        self.every = self.fixed or (math.ceil(cost_s / (SHARE * slowest_s)) if slowest_s > 0 else 1)
        self._due, self._taken = step + self.every, (step, perf_counter())

    def common(self, key: Key) -> Common:
        """Returns the part of a snapshot that a joining process receives."""
        return self._slot(key).common

    def adopt(self, key: Key, common: Common) -> None:
        """Stores a snapshot without layers, on a rank that has just joined."""
        if key[1] == LIVE:
            self._live = _Live(key[0], common, self._updates(), self._versions())
        else:
            self._slots[key] = Slot(common, {})

    def rewind(self, key: Key) -> Plan:
        """Drops gradients, and restores the state that is equal on all ranks. Returns the plan of the snapshot."""
        common = self._slot(key).common
        for layer in self._split.layers:
            for parameter in layer.parameters.values():
                parameter.grad = None
        if checks.check_free(pair for layer in self._split.layers for pair in layer.parameters.items()):
            gc.collect()  # slow, so only if the graph of the failed step still exists
        for group, values in zip(self._optimizer.param_groups if self._optimizer is not None else [], common.groups):
            group.update(copy.deepcopy(values))
        for kept, values in zip(self._keep, common.kept):
            kept.load_state_dict(copy.deepcopy(values))
        for parameter, trained in zip(self._parameters(), common.trained):
            parameter.requires_grad_(trained)
        for module, mode in zip(self._split.module.modules(), common.modes):
            module.training = mode
        return common.plan

    def restore(self, key: Key, holders: Sequence[Sequence[int]], plan: Plan) -> bool:
        """Sends a snapshot's layers from the ranks `holders`, by layer, to their ranks under `plan`. Returns False if a digest differs."""
        slot, own = self._slot(key), self._ranks.number
        sizes = [sum(parameter.numel() for parameter in layer.parameters.values()) for layer in self._split.layers]
        transfers = transfers_of(holders, plan.owners, self._ranks.layout, sizes)
        contents = {transfer.layer: slot.layers[transfer.layer] for transfer in transfers if transfer.source == own}
        arrived, _ = self._mover.carry(transfers, contents, plan)
        if not self._mover.vote(arrived is not None):
            return False
        assert arrived is not None
        for index, (layer, owner) in enumerate(zip(self._split.layers, plan.owners)):
            if owner != self._ranks.rank:
                state.give_away(layer, self._optimizer)
            elif index in arrived:
                state.give_away(layer, self._optimizer)
                state.take_in(layer, self._optimizer, arrived[index], self._split.device.device)
            elif key[1] != LIVE:
                state.put_back(layer, self._optimizer, slot.layers[index], self._split.device.device)
        self._live = None
        self.note(plan, key[0])
        return True

    # --- Inside. ---

    def _here(self) -> list[int]:
        """Returns the layers that this rank has."""
        return [index for index, layer in enumerate(self._split.layers) if all(p.device.type != "meta" for p in layer.parameters.values())]

    def _slot(self, key: Key) -> Slot:
        if key[1] != LIVE:
            return self._slots[key]
        assert self._live is not None
        layers = {index: state.content_of(self._split.layers[index], self._optimizer) for index in self._here()}
        return Slot(self._live.common, layers)

    def _parameters(self) -> list[nn.Parameter]:
        return [parameter for layer in self._split.layers for parameter in layer.parameters.values()]

    def _versions(self) -> list[int]:
        """Returns a number for each parameter and buffer that changes with every write to it."""
        return [tensor._version for layer in self._split.layers for tensor in _tensors(layer)]

    def _common(self, plan: Plan) -> Common:
        groups = self._optimizer.param_groups if self._optimizer is not None else []
        return Common(
            plan,
            [copy.deepcopy({name: value for name, value in group.items() if name != "params"}) for group in groups],
            [copy.deepcopy(kept.state_dict()) for kept in self._keep],
            [parameter.requires_grad for parameter in self._parameters()],
            [module.training for module in self._split.module.modules()],
        )


def _tensors(layer: Layer) -> list[torch.Tensor]:
    return [*layer.parameters.values(), *layer.buffers.values()]


def choose(told: "Sequence[Holding | None]", layers: int) -> "tuple[Key, list[list[int]]] | None":
    """Returns the newest snapshot that all survivors have and that has every layer, with the ranks that hold each layer.

    `told` has the holding of each rank, or None if it has just joined.
    """
    survivors = {rank: holding for rank, holding in enumerate(told) if holding is not None}
    for key in sorted({key for holding in survivors.values() for key in holding}, reverse=True):
        if all(key in holding for holding in survivors.values()):
            holders = [[rank for rank, holding in survivors.items() if layer in holding[key]] for layer in range(layers)]
            if all(holders):
                return key, holders
    return None


def transfers_of(
    holders: Sequence[Sequence[int]], owners: Sequence[int], rows: Sequence[Sequence[int]], sizes: Sequence[int]
) -> list[Transfer]:
    """Returns the transfers of layers that their owners lack. Each comes from the holder that has the least to send so far."""
    sent = dict.fromkeys((rank for those in holders for rank in those), 0)
    found = []
    for layer, owner in enumerate(owners):
        for row in rows:
            if row[owner] not in holders[layer]:
                source = min(holders[layer], key=lambda rank: (sent[rank], rank))
                sent[source] += sizes[layer]
                found.append(Transfer(layer, source, row[owner]))
    return found


def rows_of(rows: Sequence[Sequence[int]], members: Sequence[int]) -> "list[list[int]] | None":
    """Returns the ranks of each replica of the new group, or None if there are fewer members than replicas.

    `rows` has the members of each replica at the start. A new member joins the shortest replica. Then members leave the longest replicas
    for the shortest ones, until their lengths are equal up to a remainder.
    """
    if len(members) < len(rows):
        return None
    left = [[member for member in row if member in members] for row in rows]
    for member in members:
        if not any(member in row for row in rows):
            min(left, key=len).append(member)
    while min(map(len, left)) < len(members) // len(rows):
        longest, shortest = max(left, key=len), min(left, key=len)
        shortest.append(longest.pop())
    return [[members.index(member) for member in row] for row in left]
