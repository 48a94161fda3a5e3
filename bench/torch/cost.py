# SPDX-License-Identifier: Apache-2.0
"""What balancing costs: the CPU of all that it does in a step without a move, the pause of a move beside a bare send, and memory.

cost.py [--steps N] [--moves N]   (starts its two ranks by itself; the model is that of gain.py)
"""
import argparse
import os
import pathlib
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist

import gain
from dynmo.torch import exchange, marks, pipeline
from dynmo.torch.marks import Stamps

LAYERS = 14


class Meter:
    """CPU seconds of this thread in calls, by name and step."""

    def __init__(self) -> None:
        self.steps: dict[str, list[float]] = {}

    def wrap(self, name: str, call: Callable[..., Any]) -> Callable[..., Any]:
        def metered(*arguments: Any, **named: Any) -> Any:
            start = time.thread_time()
            result = call(*arguments, **named)
            self.steps.setdefault(name, []).append(time.thread_time() - start)
            return result

        return metered

    def median(self, name: str) -> float:
        return statistics.median(self.steps[name])


def marks_cpu_s(layers: int, micro_batches: int, repeats: int = 200) -> float:
    """Of a rank's marks in a step: passes through its layers with and without them, where a layer does next to nothing."""
    noted = marks.Marks(layers)
    taken: dict[bool, list[float]] = {True: [], False: []}
    for repeat in range(2 * repeats):
        marked = repeat % 2 == 0
        hidden = torch.zeros(1, requires_grad=True)
        stamps: Stamps = []
        start = time.thread_time()
        for layer in range(layers):
            if marked:
                with noted.forward(layer):
                    hidden = hidden + 1
                noted.watch({"hidden": hidden}, stamps, layer)
            else:
                hidden = hidden + 1
        if marked:
            with noted.waiting():
                pass
            with noted.waiting(), noted.backward(layers - 1, stamps):
                hidden.backward()  # type: ignore[no-untyped-call]
        else:
            hidden.backward()  # type: ignore[no-untyped-call]
        noted.settle()
        taken[marked].append(time.thread_time() - start)
    return (statistics.median(taken[True]) - statistics.median(taken[False])) * micro_batches


def step_cost(steps: int, tokens: torch.Generator) -> dict[str, float]:
    """Milliseconds of CPU in a step, by part."""
    side, meter = gain.Side(True), Meter()
    balancer = side.pipe._balancer
    assert balancer is not None
    real = exchange.exchange
    balancer.own_part = meter.wrap("own part", balancer.own_part)  # type: ignore[method-assign]
    balancer.observe = meter.wrap("observe", balancer.observe)  # type: ignore[method-assign]
    setattr(pipeline, "exchange", meter.wrap("exchange", real))
    side.round(3, tokens)
    meter.steps.clear()
    side.balance_cpu_s.clear()
    side.round(steps, tokens)
    setattr(pipeline, "exchange", real)
    losses = meter.wrap("losses", real)
    for _ in range(steps):
        losses(side.pipe._ranks, gain.MICRO_BATCHES, LAYERS, exchange.Told(dict.fromkeys(range(gain.MICRO_BATCHES), 1.0)), whole=False)
    found = {
        "marks": marks_cpu_s(LAYERS // 2, gain.MICRO_BATCHES),
        "own part": meter.median("own part"),
        "exchange beyond losses": meter.median("exchange") - meter.median("losses"),
        "observe": meter.median("observe"),
        "balance()": statistics.median(side.balance_cpu_s),
    }
    return {name: seconds * 1e3 for name, seconds in found.items()}


def move_cost(moves: int, tokens: torch.Generator) -> None:
    """Moves back and forth, each beside a bare send of the same bytes the same way."""
    side = gain.Side(False)
    side.step(torch.randint(0, 512, (gain.MICRO_BATCHES * gain.SAMPLES, gain.TOKENS), generator=tokens))
    for first in (9, 12):
        pauses, bares, resident, size = [], [], [], 0
        for number in range(2 * moves):
            there = number % 2 == 0
            dist.barrier()
            start = time.perf_counter()
            moved = side.pipe.move_to(plan(first if there else 7))
            pauses.append(slowest(time.perf_counter() - start))
            size = moved.bytes
            bares.append(slowest(bare_send(size, 1 if there else 0)))
            if not there:
                resident.append(slowest(resident_mib()))
        if dist.get_rank() == 0:
            pairs = [pause - 2 * bare for pause, bare in zip(pauses, bares)]
            pause, bare = statistics.median(pauses) * 1e3, statistics.median(bares) * 1e3
            print(
                f"move 7|7 <-> {first}|{LAYERS - first}  {size / 2**20:.1f} MiB: pause {pause:.1f} ms ({max(pauses) * 1e3:.1f} at most, "
                f"{pause / size * 2**20:.2f} ms/MiB), bare send {bare:.1f} ms; pause - 2 x bare send: {max(pairs) * 1e3:.1f} ms at most; "
                f"a rank's memory: {resident[len(resident) // 10]:.0f} MiB after {len(pauses) // 10} moves, {resident[-1]:.0f} MiB after {len(pauses)}"
            )


def bare_send(size: int, source: int) -> float:
    """Seconds that one message of so many bytes takes."""
    buffer = torch.zeros(size, dtype=torch.uint8)
    dist.barrier()
    start = time.perf_counter()
    if dist.get_rank() == source:
        dist.send(buffer, 1 - source)
    else:
        dist.recv(buffer, source)
    return time.perf_counter() - start


def slowest(seconds: float) -> float:
    cell = torch.tensor([seconds], dtype=torch.float64)
    dist.all_reduce(cell, op=dist.ReduceOp.MAX)
    return cell.item()


def resident_mib() -> float:
    """Memory of this process."""
    return int(pathlib.Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE") / 2**20


def plan(first: int) -> dict[str, Any]:
    stages = [
        {"stage": rank, "rank": rank, "first_layer": rank * first, "layers": [first, LAYERS - first][rank]} for rank in range(2)
    ]
    return {"format": "dynmo-plan-1", "ranks": 2, "schedule": "1f1b", "stages": stages}


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--moves", type=int, default=10)
    options = parser.parse_args()
    if "RANK" not in os.environ:
        launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
        sys.exit(subprocess.run([*launcher, *sys.argv], check=False).returncode)
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    tokens = torch.Generator().manual_seed(1)
    parts = step_cost(options.steps, tokens)
    if dist.get_rank() == 0:
        print(f"balancing without a move    {sum(parts.values()):.2f} ms of CPU a step: " + ", ".join(f"{n} {ms:.2f}" for n, ms in parts.items()))
    move_cost(options.moves, tokens)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
