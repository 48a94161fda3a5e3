# SPDX-License-Identifier: Apache-2.0
"""Asks the adviser of a pipeline of torch.distributed.pipelining whether another cut pays, and writes it.

torchrun --nproc-per-node=2 examples/torch/adviser.py [--steps N] [--out FOLDER]
"""
import argparse

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.pipelining import PipelineStage, Schedule1F1B

import dynmo.torch as dt

WIDTH, LAYERS, MICRO_BATCHES = 128, 8, 8


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=10)
    parser.add_argument("--out", default="")
    options = parser.parse_args()
    torch.set_num_threads(1)
    torch.manual_seed(0)
    dist.init_process_group("gloo")
    rank, ranks = dist.get_rank(), dist.get_world_size()
    # The second half of the layers is as wide again: an even cut leaves the first ranks waiting.
    layers = [
        nn.Sequential(nn.Linear(WIDTH, wide * WIDTH), nn.GELU(), nn.Linear(wide * WIDTH, WIDTH)) for wide in [2] * (LAYERS // 2) + [8] * (LAYERS // 2)
    ]
    cut = [LAYERS * index // ranks for index in range(ranks + 1)]
    module = nn.Sequential(*layers[cut[rank] : cut[rank + 1]])
    stage = PipelineStage(module, rank, ranks, torch.device("cpu"))
    adviser = dt.Adviser([stage], "1F1B", micro_batches=MICRO_BATCHES)
    schedule = Schedule1F1B(stage, MICRO_BATCHES, loss_fn=adviser.timed_loss(nn.functional.mse_loss))
    optimizer = torch.optim.AdamW(module.parameters())
    given = torch.randn(64, WIDTH)
    for _ in range(options.steps):
        schedule.step(*((given,) if rank == 0 else ()), target=given if rank == ranks - 1 else None)
        optimizer.step()
        optimizer.zero_grad()
    advice = adviser.advise()  # such as at a checkpoint
    if rank == 0:
        pays = advice.pays(restart_s=60, steps=100_000)
        print(f"{advice}; stopping for 60 s {'pays' if pays else 'does not pay'} in 100,000 steps")
        if options.out:
            advice.write(options.out)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
