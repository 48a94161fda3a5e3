# SPDX-License-Identifier: Apache-2.0
"""Bubble of schedules with I and W apart on emulated layers, which sleep for their work, beside the replay and 1f1b.

bubble.py [--rounds N] [--steps N]   (starts its four ranks by itself)
"""
import argparse
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from typing import Any, Optional

import torch
import torch.distributed as dist
from torch import Tensor, nn

import dynmo
import dynmo.torch as dt

RANKS, LAYERS, MICRO_BATCHES, WIDTH = 4, 8, 8, 4
FORWARD_S, INPUT_S, WEIGHT_S = 16e-3, 16e-3, 12e-3
SCHEDULES = ("1f1b", "zb-h1", "zb-v", "adaptive")


class SleepsInInputGradient(torch.autograd.Function):
    """The identity, whose backward takes INPUT_S."""

    @staticmethod
    def forward(ctx: Any, given: Tensor) -> Tensor:
        return given.clone()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        time.sleep(INPUT_S)
        return gradient


class Emulated(nn.Module):
    """A product that takes FORWARD_S forward, and INPUT_S and WEIGHT_S for its two gradients."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.eye(WIDTH))
        self.weight.register_hook(self._sleep)  # type: ignore[no-untyped-call]

    def _sleep(self, gradient: Optional[Tensor]) -> None:
        if gradient is not None:  # I gives it none
            time.sleep(WEIGHT_S)

    def forward(self, given: Tensor) -> Tensor:
        time.sleep(FORWARD_S)
        product: Tensor = nn.functional.linear(given, self.weight)
        apply: Callable[..., Tensor] = SleepsInInputGradient.apply
        return apply(product)


def plan_of(kind: str) -> dict[str, Any]:
    """Equal stages, or what search cuts and orders for these layers."""
    if kind == "adaptive":
        layer = {"forward_s": FORWARD_S, "backward_input_s": INPUT_S, "backward_weight_s": WEIGHT_S, "parameter_bytes": 64, "gradient_bytes": 64,
                 "boundary_bytes": 64}
        profile = {"format": "dynmo-profile-1", "layers": [{**layer, "name": f"layer {number}"} for number in range(LAYERS)]}
        document: dict[str, Any] = dynmo.plan(profile, ranks=RANKS, micro_batches=MICRO_BATCHES, balancer="search", schedule=kind).document
        return document
    owners = [*range(RANKS), *reversed(range(RANKS))] if kind == "zb-v" else [*range(RANKS)]
    each = LAYERS // len(owners)
    stages = [{"stage": stage, "rank": rank, "first_layer": each * stage, "layers": each} for stage, rank in enumerate(owners)]
    return {"format": "dynmo-plan-1", "ranks": RANKS, "schedule": kind, "stages": stages}


class Side:
    """A pipeline under one schedule."""

    def __init__(self, kind: str) -> None:
        torch.manual_seed(0)
        modules = [(f"layer {number}", Emulated()) for number in range(LAYERS)]
        self.optimizer = torch.optim.SGD([parameter for _, module in modules for parameter in module.parameters()], lr=1e-3)
        self.pipe = dt.Pipeline(
            layers=modules, optimizer=self.optimizer, micro_batches=MICRO_BATCHES, loss_fn=nn.functional.mse_loss, hidden=torch.empty_like,
            plan=plan_of(kind),
        )
        self.losses: list[float] = []

    def round(self, steps: int) -> tuple[float, float, float, float]:
        """Seconds of a step and bubble, measured and of the replay with the times of the layers that were measured."""
        walls, works = [], []
        dist.barrier()
        for number in range(steps):
            rows = torch.arange(MICRO_BATCHES * WIDTH, dtype=torch.float32).reshape(MICRO_BATCHES, WIDTH) * (number + 1) / 100
            dist.barrier()
            start = time.perf_counter()
            self.losses.append(self.pipe.step(rows, rows.flip(0)).item())
            self.optimizer.step()
            self.optimizer.zero_grad()
            walls.append(time.perf_counter() - start)
            marks = self.pipe.marks
            work = torch.tensor([sum(marks.forward_s) + sum(marks.backward_s) + sum(marks.weights_s)], dtype=torch.float64)
            dist.all_reduce(work)
            works.append(work.item() / RANKS)
        step_s, work_s = statistics.median(walls), statistics.median(works)
        predicted_s = self.pipe.predicted_step_s()
        return step_s, 1 - work_s / step_s, predicted_s, 1 - work_s / predicted_s


def compare(rounds: int, steps: int) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    sides = {kind: Side(kind) for kind in SCHEDULES}
    found: dict[str, list[tuple[float, float, float, float]]] = {kind: [] for kind in SCHEDULES}
    for side in sides.values():
        side.round(2)
        side.losses.clear()
    for _ in range(rounds):
        for kind, side in sides.items():
            found[kind].append(side.round(steps))
    if dist.get_rank() == 0:
        print("schedule   step measured, replay (ratio: median, least to most)      bubble measured, replay")
        for kind, rows in found.items():
            step_s, bubble, predicted_s, predicted = (statistics.median(row[column] for row in rows) for column in range(4))
            ratios = [row[0] / row[2] for row in rows]
            print(
                f"{kind:10} {step_s * 1e3:.1f} ms, {predicted_s * 1e3:.1f} ms ({statistics.median(ratios):.3f}, {min(ratios):.3f} to "
                f"{max(ratios):.3f})   {bubble:.2%}, {predicted:.2%}; losses equal: {sides[kind].losses == sides['1f1b'].losses}"
            )
    dist.destroy_process_group()


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=5)
    options = parser.parse_args()
    if "RANK" in os.environ:
        compare(options.rounds, options.steps)
        return
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={RANKS}"]
    sys.exit(subprocess.run([*launcher, *sys.argv], check=False).returncode)


if __name__ == "__main__":
    main()
