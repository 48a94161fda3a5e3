# SPDX-License-Identifier: Apache-2.0
"""What ranks tell each other at the end of a step: one sum of cells, each of which one rank fills."""
from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import Tensor

from .ranks import Ranks

LAYER_CELLS = ("forward_s", "input_gradient_s", "weight_gradient_s", "update_s", "boundary_bytes")
RANK_CELLS = ("overhead_s", "action_overhead_s", "actions", "plan_s", "migrate_s", "busy_s")


@dataclass
class Told:
    """One rank's part, and after the exchange everybody's."""

    losses: dict[int, float] = field(default_factory=dict)  # by micro-batch
    layers: dict[int, dict[str, float]] = field(default_factory=dict)
    ranks: dict[int, dict[str, float]] = field(default_factory=dict)


def exchange(ranks: Ranks, micro_batches: int, layers: int, own: Told, whole: bool) -> Told:
    """The same on all ranks; of the losses alone where not `whole`."""
    widths = (1, len(LAYER_CELLS), len(RANK_CELLS))
    counts = (micro_batches, layers if whole else 0, ranks.size if whole else 0)
    cells = torch.zeros(sum(width * count for width, count in zip(widths, counts)), dtype=torch.float64)
    parts = torch.split(cells, [width * count for width, count in zip(widths, counts)])
    for micro_batch, loss in own.losses.items():
        parts[0][micro_batch] = loss
    _fill(parts[1], LAYER_CELLS, own.layers)
    _fill(parts[2], RANK_CELLS, own.ranks)
    ranks.sum(cells)
    return Told(dict(enumerate(parts[0].tolist())), _read(parts[1], LAYER_CELLS), _read(parts[2], RANK_CELLS))


def _fill(part: Tensor, names: tuple[str, ...], rows: dict[int, dict[str, float]]) -> None:
    if part.numel() == 0 or not rows:
        return
    values = [[row.get(name, 0.0) for name in names] for row in rows.values()]
    part.view(-1, len(names))[list(rows)] = torch.tensor(values, dtype=torch.float64)


def _read(part: Tensor, names: tuple[str, ...]) -> dict[int, dict[str, float]]:
    return {row: dict(zip(names, values)) for row, values in enumerate(part.view(-1, len(names)).tolist())}
