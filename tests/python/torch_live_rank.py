# SPDX-License-Identifier: Apache-2.0
"""torch_live_rank.py FOLDER: half of a model freezes, and the controller moves layers while it trains."""
import json
import os

import torch

import torch_cases
from dynmo.torch import live
from plans import plan_of
from torch_ranks import make_pipe, run_rank

CASE = {
    "family": "llama", "micro_batches": 4, "samples": 2, "clip": 1.0, "steps": 24, "freeze": True,
    "config": {"num_hidden_layers": 10, "hidden_size": 64, "intermediate_size": 128},
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


def main(folder):
    even_clock()
    pipe = make_pipe(CASE, steps=CASE["steps"], plan=plan_of([6, 6]), run=folder, metrics=("tensorboard", "prometheus"))
    scheduler = torch_cases.make_scheduler(pipe.optimizer)
    losses, moves, frozen_backwards = [], [], 0
    for step in range(CASE["steps"]):
        if step == torch_cases.FREEZE_AT:
            freeze(pipe.module)
        total = pipe.step(**torch_cases.batch_of(CASE, step)).item()
        losses += [pipe.clip_grad_norm_(CASE["clip"]).item(), total]
        torch_cases.update(pipe.optimizer, scheduler)
        if step >= torch_cases.FREEZE_AT:
            frozen_backwards += sum(pipe.marks.backwards[:7])
        if move := pipe.balance():
            moves.append((step, str(move), pipe.plan.cut))
    profile = pipe.profile()
    pipe.close()
    torch.save(torch_cases.result_of(pipe.module, pipe.optimizer, losses), os.path.join(folder, f"rank-{pipe.rank}-0.pt"))
    with open(os.path.join(folder, f"moves-{pipe.rank}.json"), "w", encoding="utf-8") as file:
        json.dump({"moves": moves, "frozen_backwards": frozen_backwards, "profile": profile, "layers": pipe.layers}, file)


if __name__ == "__main__":
    run_rank(main)
