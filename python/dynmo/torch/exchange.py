# SPDX-License-Identifier: Apache-2.0
"""Exchanges of all ranks at the beginning and at the end of a step. They are sums of cells, and one rank fills each cell.

Every rank gets the mean over the replicas of each layer's times, and the numbers of every rank.
"""
from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from . import checks
from .batches import ITEMS, Batch, first_of
from .layers import Split
from .ranks import Ranks

LAYER_CELLS = ("forward_s", "input_gradient_s", "weight_gradient_s", "update_s", "boundary_bytes")
RANK_CELLS = ("overhead_s", "action_overhead_s", "actions", "plan_s", "migrate_s", "busy_s")


AGREED = ("batch", "requires_grad flags", "training mode", ITEMS)  # must be equal on all ranks in each step
OF_REPLICAS = ("batch",)  # those of AGREED that may differ between replicas


def digest_of_flags(split: Split) -> int:
    """Returns a digest of the requires_grad flags."""
    return checks.digest(bytes(p.requires_grad for layer in split.layers for p in layer.parameters.values()))


def alike(split: Split, batch: Batch, frozen: int) -> list[int]:
    """Returns this rank's values of AGREED, for a batch in host memory and a number of frozen layers at the start."""
    mode = int(split.module.training) * 2 + int(frozen == len(split.layers))
    return [checks.digest(batch), digest_of_flags(split), mode, checks.digest(first_of(batch).get(ITEMS))]


def begin_agreement(ranks: Ranks, own: Sequence[int], refused: str = "") -> Callable[[], None]:
    """Begins to compare what must be equal on all ranks. Returns a call that waits and raises BadInputError on a difference or refusal."""
    if ranks.world == 1:
        return lambda: None
    cells = torch.zeros(ranks.world, len(own) + 1, dtype=torch.float64)
    cells[ranks.number] = torch.tensor([*own, refused != ""], dtype=torch.float64)
    wait: list[Callable[[], None]] = [ranks.begin_sum(cells)]

    def check() -> None:
        if not wait:
            return
        wait.pop()()
        found = cells.tolist()
        for rank in range(ranks.world):
            for place, kind in enumerate(AGREED):
                other = ranks.first_of(rank) if kind in OF_REPLICAS else 0
                if found[rank][place] != found[other][place]:
                    raise ranks.differs(rank, kind, other, apart=kind in OF_REPLICAS)
        if any(row[-1] for row in found):
            ranks.agree({}, refused)

    return check


@dataclass
class Told:
    """The part of one rank, or after the exchange the parts of all ranks."""

    losses: dict[int, float] = field(default_factory=dict)  # by micro-batch; after the exchange of all replicas in turn
    layers: dict[int, dict[str, float]] = field(default_factory=dict)
    ranks: dict[int, dict[str, float]] = field(default_factory=dict)  # after the exchange of all replicas in turn
    tokens: float = 0.0
    asked: bool = False  # whether the first rank asks for a change of the ranks


def exchange(ranks: Ranks, micro_batches: int, layers: int, own: Told, whole: bool) -> Told:
    """Returns the parts of all ranks, joined. The times of layers and ranks are exchanged only with `whole`."""
    widths = (1, len(LAYER_CELLS), len(RANK_CELLS), 1, 1)
    counts = (micro_batches, layers if whole else 0, ranks.size if whole else 0, 1, 1)
    cells = torch.zeros(ranks.replicas, sum(width * count for width, count in zip(widths, counts)), dtype=torch.float64)
    parts = torch.split(cells, [width * count for width, count in zip(widths, counts)], dim=1)
    for micro_batch, loss in own.losses.items():
        parts[0][ranks.replica, micro_batch] = loss
    _fill(parts[1][ranks.replica], LAYER_CELLS, own.layers)
    _fill(parts[2][ranks.replica], RANK_CELLS, own.ranks)
    if ranks.rank == 0:
        parts[3][ranks.replica, 0] = own.tokens
    parts[4][ranks.replica, 0] = own.asked
    ranks.sum(cells)
    times = parts[1].mean(0)
    losses = dict(enumerate(parts[0].reshape(-1).tolist()))
    return Told(losses, _read(times, LAYER_CELLS), _read(parts[2].contiguous(), RANK_CELLS), float(parts[3].sum()), bool(parts[4].sum() > 0))


def total_of(losses: Sequence[float], divisor: int, replicas: int, dtype: torch.dtype) -> Tensor:
    """Returns the loss of a batch, from the losses of its micro-batches, replica by replica.

    Losses are added in order within a replica, and then the replicas' sums, in fp32, or in fp64 if `dtype` is fp64.
    """
    total = torch.zeros((), dtype=torch.float32 if dtype != torch.float64 else dtype)
    for replica in torch.tensor(losses, dtype=total.dtype).view(replicas, -1):
        part = torch.zeros_like(total)
        for loss in replica:
            part = part + (loss / divisor if divisor != 1 else loss)
        total = total + part
    return total


def _fill(part: Tensor, names: tuple[str, ...], rows: dict[int, dict[str, float]]) -> None:
    if part.numel() == 0 or not rows:
        return
    values = [[row.get(name, 0.0) for name in names] for row in rows.values()]
    part.view(-1, len(names))[list(rows)] = torch.tensor(values, dtype=torch.float64)


def _read(part: Tensor, names: tuple[str, ...]) -> dict[int, dict[str, float]]:
    return {row: dict(zip(names, values)) for row, values in enumerate(part.view(-1, len(names)).tolist())}
