# SPDX-License-Identifier: Apache-2.0
"""torch_rank.py FOLDER: one rank that trains cases.pt with dynmo.torch, moving layers every third step."""
import itertools
import os
import random

import torch

import dynmo
import dynmo.torch as dt
import torch_cases
from plans import plan_of
from torch_live_rank import even_clock
from torch_ranks import make_pipe, run_rank


def random_plan(rng, layers, ranks, micro_batches, kinds=("1f1b", "gpipe", "interleaved")):
    """Any cut on any ranks, in any order; some ranks idle."""
    used = rng.sample(range(ranks), rng.randint(1, ranks))
    kind = rng.choice(kinds)
    if kind == "adaptive":
        return searched_plan(rng, layers, ranks, micro_batches)
    twice = 2 * len(used) <= layers and (kind == "zb-v" or kind == "interleaved" and len(used) > 1 and micro_batches % len(used) == 0)
    kind = kinds[0] if kind in ("interleaved", "zb-v") and not twice else kind
    owners = used + used[::-1] if kind == "zb-v" else used * 2 if kind == "interleaved" else used
    ends = [0, *sorted(rng.sample(range(1, layers), len(owners) - 1)), layers]
    return plan_of([after - first for first, after in itertools.pairwise(ends)], kind, ranks, owners)


def searched_plan(rng, layers, ranks, micro_batches):
    """An order for costs that nobody has measured."""
    costs = [
        {"name": str(layer), **{f"{key}_s": rng.uniform(1e-3, 3e-3) for key in ("forward", "backward_input", "backward_weight")},
         "parameter_bytes": 1000, "gradient_bytes": 1000, "optimizer_bytes": 1000}
        for layer in range(layers)
    ]
    return dynmo.plan({"format": "dynmo-profile-1", "layers": costs}, ranks=ranks, micro_batches=micro_batches, balancer="search", schedule="adaptive").document


def reload(case, pipe):
    """Saves, and loads into another number of replicas."""
    pipe.save(case["reload"]["folder"])
    other = make_pipe({**case, "seed": 99}, replicas=case["reload"]["replicas"], balance=False)
    drop_others(other, case)
    other.load(case["reload"]["folder"])
    assert other.steps == case["steps"]
    return other


def drop_others(pipe, case):
    """The first step drops layers of other ranks; its gradients are dropped, too."""
    pipe.step(**torch_cases.batches_of({**case, "replicas": pipe.replicas}, 0)[pipe.replica])
    pipe.optimizer.zero_grad()


def train(case, after_step=lambda pipe, step: None):
    model, optimizer = torch_cases.make(case)
    scheduler = torch_cases.make_scheduler(optimizer)
    objects = dict(model.named_parameters())
    rng = random.Random(case.get("seed", 0))
    options = {"accumulation": case.get("accumulation", 1), "balance": case.get("balance", False), "replicas": case.get("replicas", 1)}
    kinds = ("zb-h1", "zb-v", "adaptive") if case.get("apart") else ("1f1b", "gpipe", "interleaved")
    pipe = dt.Pipeline(model, optimizer, micro_batches=case["micro_batches"], schedule=kinds[0], **options)
    losses, cuts, moves = [], [], 0
    for step in range(case["steps"]):
        torch_cases.freeze_or_thaw(case, model, step)
        if case.get("balance") and pipe.balance():
            moves += 1
        if step % 3 == 0:
            assert pipe.move_to(random_plan(rng, len(pipe.layers), pipe.ranks, case["micro_batches"], kinds)).done
        batch = torch_cases.batches_of(case, step)[pipe.replica]
        total = torch.zeros(())
        with torch.autocast(case.get("device", "cpu"), torch.bfloat16, enabled=case.get("autocast", False)):
            for _ in range(case.get("accumulation", 1) - 1):
                total = pipe.accumulate(**batch)
            total = pipe.step(**batch) if case.get("accumulation", 1) == 1 else total + pipe.step(**batch)
        if case.get("clip"):
            losses.append(pipe.clip_grad_norm_(case["clip"]).item())
        torch_cases.update(optimizer, scheduler)
        losses.append(total.item())
        cuts.append(pipe.plan.cut)
        after_step(pipe, step)
    assert moves > 0 or not case.get("balance"), case  # the random plans are worse than the controller's
    for name, parameter in model.named_parameters():
        assert name not in objects or parameter is objects[name], name
    if case.get("reload"):
        pipe = reload(case, pipe)
    return {**torch_cases.result_of(pipe.module, pipe.optimizer, losses), "cuts": cuts}


def main(folder):
    rank = int(os.environ.get("RANK", "0"))
    if "STRICT_DEVICE" in os.environ:
        import strict_torch

        strict_torch.open_device()
    cases = torch.load(os.path.join(folder, "cases.pt"))
    if any(case.get("balance") for case in cases):
        even_clock()
    for index, case in enumerate(cases):
        torch.save(train(case), os.path.join(folder, f"rank-{rank}-{index}.pt"))


if __name__ == "__main__":
    run_rank(main)
