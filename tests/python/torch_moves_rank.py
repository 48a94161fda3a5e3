# SPDX-License-Identifier: Apache-2.0
"""torch_moves_rank.py FOLDER MOVES: a rank that gives layers away and takes them in, and counts what it holds."""
import gc
import json
import os
import resource
import time

import torch

import dynmo.torch as dt
import torch_cases
from plans import plan_of
from torch_ranks import run_rank, train_step

CASE = {"family": "llama", "micro_batches": 2}


def resident():
    with open("/proc/self/statm", encoding="ascii") as file:
        return int(file.read().split()[1]) * resource.getpagesize()


def held():
    gc.collect()
    tensors = sum(isinstance(thing, torch.Tensor) for thing in gc.get_objects())
    return {"bytes": resident(), "descriptors": len(os.listdir("/proc/self/fd")), "tensors": tensors}


def main(folder, moves):
    model, optimizer = torch_cases.make(CASE)
    objects = dict(model.named_parameters())
    pipe = dt.Pipeline(model, optimizer, micro_batches=2, plan=plan_of([3, 3]), balance=False)
    counts, seconds, moves = [], 0.0, int(moves)
    for number in range(moves):
        if number % 100 == 0:
            train_step(pipe, torch_cases.batch_of(CASE, 0))
        start = time.perf_counter()
        assert pipe.move_to(plan_of([2 + number % 3, 4 - number % 3])).done
        seconds += time.perf_counter() - start
        if number in (moves // 5, moves - 2):  # under the same plan
            counts.append(held())
    train_step(pipe, torch_cases.batch_of(CASE, 0))
    same = all(objects[name] is parameter for name, parameter in model.named_parameters())
    with open(os.path.join(folder, f"held-{pipe.rank}.json"), "w", encoding="utf-8") as file:
        json.dump({"held": counts, "same_objects": same, "ms_a_move": seconds / moves * 1e3}, file)


if __name__ == "__main__":
    run_rank(main)
