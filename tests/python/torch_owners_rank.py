# SPDX-License-Identifier: Apache-2.0
"""One rank of torch_owners_test.py: rank 1 holds something of a parameter that cannot be given away then."""
import weakref

import torch
import torch.distributed as dist

import dynmo
import dynmo.torch as dt
import torch_cases

CASE = {"family": "llama", "micro_batches": 2}
OWNERS = (
    ("has live views or a graph", lambda parameter: parameter.view(-1)),
    ("has live views or a graph", lambda parameter: parameter * parameter),
    ("has weak references", weakref.ref),
)


def cut(first):
    stages = [{"stage": rank, "rank": rank, "first_layer": rank * first, "layers": [first, 6 - first][rank]} for rank in range(2)]
    return {"format": "dynmo-plan-1", "ranks": 2, "schedule": "1f1b", "stages": stages}


def refused(text, call):
    try:
        call()
        raise AssertionError(f"not refused: {text}")
    except dynmo.BadInputError as error:
        assert str(error).startswith(text) and "\n" not in str(error), error


def at_the_start(text, hold):
    model = torch_cases.make_model(CASE)
    held = hold(model.lm_head.weight) if dist.get_rank() == 1 else None
    refused(f"rank 1: model: parameter lm_head.weight {text}", lambda: dt.Pipeline(model, micro_batches=2, timeout_s=60))
    assert not any(parameter.device.type == "meta" for parameter in model.parameters())
    del held


def in_balance(text, hold):
    """The layer stays until nothing holds its parameter, and then it moves."""
    model = torch_cases.make_model(CASE)
    optimizer = torch_cases.make_optimizer(CASE, model.parameters())
    pipe = dt.Pipeline(model, optimizer, micro_batches=2, plan=cut(3), timeout_s=60)
    pipe._balancer.decide = lambda plan, step: {
        "migrate": True, "plan": cut(4), "current_step_s": 2.0, "planned_step_s": 1.0, "reason": "a test",
    }
    pipe.step(**torch_cases.batch_of(CASE, 0))
    refused("rank 1: parameter model.layers.2", pipe.balance)
    optimizer.step()
    optimizer.zero_grad()
    held = hold(model.model.layers[2].mlp.up_proj.weight) if pipe.rank == 1 else None
    refused(f"rank 1: parameter model.layers.2.mlp.up_proj.weight {text}", pipe.balance)
    assert pipe.plan.cut == "3|3"
    before = pipe.step(**torch_cases.batch_of(CASE, 1))
    optimizer.zero_grad()
    del held
    assert str(pipe.balance()).startswith("3|3 -> 4|2, ")
    assert torch.equal(pipe.step(**torch_cases.batch_of(CASE, 1)), before)


def main():
    dist.init_process_group("gloo")
    for text, hold in OWNERS:
        at_the_start(text, hold)
        in_balance(text, hold)
    dist.destroy_process_group()


if __name__ == "__main__":
    torch.set_num_threads(1)
    main()
