# SPDX-License-Identifier: Apache-2.0
"""One rank of torch_owners_test.py: rank 1 holds something of a parameter that cannot be given away then."""
import weakref

import torch
import torch.distributed as dist

import dynmo.torch as dt
import torch_cases
from plans import plan_of
from torch_ranks import is_whole, make_pipe, refused, run_rank

CASE = {"family": "llama", "micro_batches": 2}
OWNERS = (
    ("has live views or a graph", lambda parameter: parameter.view(-1)),
    ("has live views or a graph", lambda parameter: parameter * parameter),
    ("has weak references", weakref.ref),
)


def at_the_start(text, hold):
    model = torch_cases.make_model(CASE)
    held = hold(model.lm_head.weight) if dist.get_rank() == 1 else None
    refused(f"rank 1: model: parameter lm_head.weight {text}", lambda: dt.Pipeline(model, micro_batches=2, timeout_s=60), str.startswith)
    assert is_whole(model)
    del held


def in_balance(text, hold):
    """The layer stays until nothing holds its parameter, and then it moves."""
    pipe = make_pipe(CASE, plan=plan_of([3, 3]), timeout_s=60)
    pipe._balancer.decide = lambda plan, step: {
        "migrate": True, "plan": plan_of([4, 2]), "current_step_s": 2.0, "planned_step_s": 1.0, "reason": "a test",
    }
    pipe.step(**torch_cases.batch_of(CASE, 0))
    refused("rank 1: parameter model.layers.2", pipe.balance, str.startswith)
    torch_cases.update(pipe.optimizer)
    held = hold(pipe.module.model.layers[2].mlp.up_proj.weight) if pipe.rank == 1 else None
    refused(f"rank 1: parameter model.layers.2.mlp.up_proj.weight {text}", pipe.balance, str.startswith)
    assert pipe.plan.cut == "3|3"
    before = pipe.step(**torch_cases.batch_of(CASE, 1))
    pipe.optimizer.zero_grad()
    del held
    assert str(pipe.balance()).startswith("3|3 -> 4|2, ")
    assert torch.equal(pipe.step(**torch_cases.batch_of(CASE, 1)), before)


def main():
    for text, hold in OWNERS:
        at_the_start(text, hold)
        in_balance(text, hold)


if __name__ == "__main__":
    run_rank(main)
