# SPDX-License-Identifier: Apache-2.0
"""Trains a list of modules of one's own, and goes on from a checkpoint on any number of ranks.

torchrun --nproc-per-node=2 examples/torch/layers.py --save FOLDER [--steps N]
torchrun --nproc-per-node=3 examples/torch/layers.py --load FOLDER [--steps N]
"""
import argparse

import torch
import torch.distributed as dist
from torch import nn

import dynmo.torch as dt

WIDTH = 64


def make_layers() -> list[tuple[str, nn.Module]]:
    torch.manual_seed(0)
    blocks = [nn.Sequential(nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 2 ** (i % 3) * WIDTH), nn.GELU(), nn.LazyLinear(WIDTH)) for i in range(8)]
    for block in blocks:
        block(torch.zeros(1, WIDTH))
    return [(f"blocks.{i}", block) for i, block in enumerate(blocks)]


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--save", default="")
    parser.add_argument("--load", default="")
    options = parser.parse_args()
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    layers = make_layers()
    optimizer = torch.optim.AdamW([parameter for _, module in layers for parameter in module.parameters()], lr=1e-3)
    pipe = dt.Pipeline(
        layers=layers, optimizer=optimizer, loss_fn=nn.functional.mse_loss,
        hidden=torch.empty_like,  # the tensor between two layers has the input's shape and type
        micro_batches=4, steps=options.steps,
    )
    if options.load:
        pipe.load(options.load)
    batches = torch.Generator().manual_seed(1)
    for step in range(options.steps):
        given = torch.randn(16, WIDTH, generator=batches)
        loss = pipe.step(given, given.flip(-1))
        optimizer.step()
        optimizer.zero_grad()
        move = pipe.balance()
        if dist.get_rank() == 0 and (move or step % 10 == 0):
            print(f"step {step:4}  loss {loss.item():.4f}" + (f"  {move}" if move else ""), flush=True)
    if options.save:
        pipe.save(options.save)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
