# SPDX-License-Identifier: Apache-2.0
"""torch_moves_rank.py FOLDER MOVES: a rank that gives layers away and takes them in, and counts what it holds."""
import gc
import json
import os
import resource
import sys
import time

import torch
import torch.distributed as dist

import dynmo.torch as dt
import torch_cases

CASE = {"family": "llama", "micro_batches": 2}
LAYERS = 6


def cut(first):
    stages = [
        {"stage": rank, "rank": rank, "first_layer": rank * first, "layers": [first, LAYERS - first][rank]} for rank in range(2)
    ]
    return {"format": "dynmo-plan-1", "ranks": 2, "schedule": "1f1b", "stages": stages}


def resident():
    with open("/proc/self/statm", encoding="ascii") as file:
        return int(file.read().split()[1]) * resource.getpagesize()


def held():
    gc.collect()
    tensors = sum(isinstance(thing, torch.Tensor) for thing in gc.get_objects())
    return {"bytes": resident(), "descriptors": len(os.listdir("/proc/self/fd")), "tensors": tensors}


def train(pipe, optimizer):
    pipe.step(**torch_cases.batch_of(CASE, 0))
    optimizer.step()
    optimizer.zero_grad()


def main():
    folder, moves = sys.argv[1], int(sys.argv[2])
    dist.init_process_group("gloo")
    model = torch_cases.make_model(CASE)
    optimizer = torch_cases.make_optimizer(CASE, model.parameters())
    objects = dict(model.named_parameters())
    pipe = dt.Pipeline(model, optimizer, micro_batches=2, plan=cut(3), balance=False)
    counts, seconds = [], 0.0
    for number in range(moves):
        if number % 100 == 0:
            train(pipe, optimizer)
        start = time.perf_counter()
        assert pipe.move_to(cut(2 + number % 3)).done
        seconds += time.perf_counter() - start
        if number in (moves // 5, moves - 2):  # under the same plan
            counts.append(held())
    train(pipe, optimizer)
    same = all(objects[name] is parameter for name, parameter in model.named_parameters())
    with open(os.path.join(folder, f"held-{pipe.rank}.json"), "w", encoding="utf-8") as file:
        json.dump({"held": counts, "same_objects": same, "ms_a_move": seconds / moves * 1e3}, file)
    dist.destroy_process_group()


if __name__ == "__main__":
    torch.set_num_threads(1)
    main()
