# SPDX-License-Identifier: Apache-2.0
"""torch_live_rank.py FOLDER: half of a model freezes, and the controller moves layers while it trains."""
import json
import os
import sys

import torch
import torch.distributed as dist

import dynmo.torch as dt
import torch_cases
from dynmo.torch import live

CASE = {
    "family": "llama", "micro_batches": 4, "samples": 2, "clip": 1.0, "steps": 24, "freeze": True,
    "config": {"num_hidden_layers": 10, "hidden_size": 64, "intermediate_size": 128},
}


HALF = {
    "format": "dynmo-plan-1", "ranks": 2, "schedule": "1f1b",
    "stages": [{"stage": rank, "rank": rank, "first_layer": 6 * rank, "layers": 6} for rank in range(2)],
}


def freeze(model):
    """The embedding and the first six blocks."""
    model.model.embed_tokens.requires_grad_(False)
    for block in model.model.layers[:6]:
        block.requires_grad_(False)


def even_clock():
    """Every layer takes 1 ms forward and 2 ms backward, so that no decision of this test depends on the machine."""
    real = live.Balancer.own_part

    def own_part(self, plan, rank, marks, losses, schedule_s, boundary):
        marks.forward_s = [1e-3 * count for count in marks.forwards]
        marks.backward_s = [2e-3 * count for count in marks.backwards]
        marks.wait_s = 0.0
        self.times.update_s = self.times.overhead_s = self.times.plan_s = 1e-3
        self.times.migrate_s = min(self.times.migrate_s, 1e-3)
        return real(self, plan, rank, marks, losses, sum(marks.forward_s) + sum(marks.backward_s), boundary)

    live.Balancer.own_part = own_part


def main():
    folder = sys.argv[1]
    dist.init_process_group("gloo")
    model = torch_cases.make_model(CASE)
    optimizer = torch_cases.make_optimizer(CASE, model.parameters())
    scheduler = torch_cases.make_scheduler(optimizer)
    pipe = dt.Pipeline(model, optimizer, micro_batches=CASE["micro_batches"], steps=CASE["steps"], plan=HALF, run=folder,
                       metrics=("tensorboard", "prometheus"))
    losses, moves, frozen_backwards = [], [], 0
    for step in range(CASE["steps"]):
        if step == torch_cases.FREEZE_AT:
            freeze(model)
        total = pipe.step(**torch_cases.batch_of(CASE, step)).item()
        losses += [pipe.clip_grad_norm_(CASE["clip"]).item(), total]
        optimizer.step()
        scheduler.step()
        optimizer.zero_grad()
        if step >= torch_cases.FREEZE_AT:
            frozen_backwards += sum(pipe.marks.backwards[:7])
        if move := pipe.balance():
            moves.append((step, str(move), pipe.plan.cut))
    profile = pipe.profile()
    pipe.close()
    torch.save(torch_cases.result_of(model, optimizer, losses), os.path.join(folder, f"rank-{pipe.rank}-0.pt"))
    with open(os.path.join(folder, f"moves-{pipe.rank}.json"), "w", encoding="utf-8") as file:
        json.dump({"moves": moves, "frozen_backwards": frozen_backwards, "profile": profile, "layers": pipe.layers}, file)
    dist.destroy_process_group()


if __name__ == "__main__":
    torch.set_num_threads(1)
    even_clock()
    main()
