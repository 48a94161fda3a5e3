# SPDX-License-Identifier: Apache-2.0
"""One rank of torch_peers_test.py: the same modules and batches by torch.distributed.pipelining and by dynmo.torch."""
import copy
import tempfile

import torch
import torch.distributed as dist
from torch.distributed.pipelining import PipelineStage, Schedule1F1B, ScheduleGPipe, ScheduleInterleaved1F1B
from torch.distributed.pipelining.schedules import _PipelineScheduleRuntime

import dynmo
import dynmo.torch as dt

WIDTH, SAMPLES, MICRO_BATCHES = 16, 16, 8  # a power of two, so that dividing losses or gradients by it rounds nothing
KINDS = {"gpipe": ScheduleGPipe, "1f1b": Schedule1F1B, "interleaved": ScheduleInterleaved1F1B}


def make_layers():
    torch.manual_seed(7)
    return [
        (f"layer{index}", torch.nn.Sequential(torch.nn.LayerNorm(WIDTH), torch.nn.Linear(WIDTH, WIDTH), torch.nn.GELU()))
        for index in range(9)
    ]


def plan_of(kind, counts):
    """Stage s on rank s modulo ranks, as torch places them."""
    ranks = dist.get_world_size()
    stages = [
        {"stage": index, "rank": index % ranks, "first_layer": sum(counts[:index]), "layers": count} for index, count in enumerate(counts)
    ]
    return {"format": "dynmo-plan-1", "ranks": ranks, "schedule": kind, "stages": stages}


def by_torch(kind, counts, given, target, csv):
    """Gradients by layer and the losses, of torch's own runtime."""
    layers, rank, ranks = make_layers(), dist.get_rank(), dist.get_world_size()
    stages = []
    for index in range(rank, len(counts), ranks):
        first = sum(counts[:index])
        part = torch.nn.Sequential(*[module for _, module in layers[first : first + counts[index]]])
        stages.append(PipelineStage(part, index, len(counts), torch.device("cpu")))
    loss_fn = torch.nn.functional.mse_loss
    if csv is not None:
        schedule = _PipelineScheduleRuntime(stages, MICRO_BATCHES, loss_fn=loss_fn)
        with tempfile.NamedTemporaryFile("w", suffix=".csv") as file:
            file.write(csv)
            file.flush()
            schedule._load_csv(file.name, format="compute_only")
    elif kind == "interleaved":
        schedule = ScheduleInterleaved1F1B(stages, MICRO_BATCHES, loss_fn=loss_fn)
    else:
        schedule = KINDS[kind](stages[0], MICRO_BATCHES, loss_fn=loss_fn)
    losses = []
    last = rank == (len(counts) - 1) % ranks
    arguments = (given,) if rank == 0 else ()
    schedule.step(*arguments, **({"target": target, "losses": losses} if last else {}))
    gradients = {
        name: [parameter.grad for parameter in module.parameters()]
        for name, module in layers
        if next(module.parameters()).grad is not None
    }
    return gradients, [loss.detach() for loss in losses]


def by_dynmo(kind, counts, given, target):
    layers = make_layers()
    pipe = dt.Pipeline(
        layers=layers, loss_fn=torch.nn.functional.mse_loss, hidden=torch.empty_like, micro_batches=MICRO_BATCHES,
        plan=plan_of(kind, counts), balance=False,
    )
    pipe.step(given, target)
    gradients = {
        name: [parameter.grad for parameter in module.parameters()]
        for name, module in layers
        if next(module.parameters()).grad is not None
    }
    return gradients, pipe.losses


def compare(kind, counts, csv=None):
    torch.manual_seed(11)
    given, target = torch.randn(SAMPLES, WIDTH), torch.randn(SAMPLES, WIDTH)
    theirs, their_losses = by_torch(kind, counts, given, copy.deepcopy(target), csv)
    ours, our_losses = by_dynmo(kind, counts, given, target)
    owned = sum(counts[dist.get_rank() :: dist.get_world_size()])
    assert theirs.keys() == ours.keys() and len(ours) == owned, (kind, counts, sorted(theirs), sorted(ours))
    for name, gradients in ours.items():
        for one, other in zip(gradients, theirs[name], strict=True):
            assert torch.equal(one, other), (kind, counts, name, (one - other).abs().max())
    if their_losses:
        assert torch.equal(torch.stack(their_losses), torch.tensor(our_losses)), (kind, counts)


def main():
    dist.init_process_group("gloo")
    ranks = dist.get_world_size()
    uneven, loops = ([6, 3], [3, 1, 4, 1]) if ranks == 2 else ([5, 1, 3], [2, 1, 3, 1, 1, 1])
    for kind in ("gpipe", "1f1b"):
        compare(kind, uneven)
    if MICRO_BATCHES % ranks == 0:
        compare("interleaved", loops)
    # The plan of an unbalanced model, its order written as torch reads it.
    times = [1e-3] * 5 + [4e-3] * 4
    costs = {"forward_s": times, "backward_input_s": times, "backward_weight_s": times}
    planned = dynmo.plan(costs, ranks=ranks, micro_batches=MICRO_BATCHES, balancer="optimal", schedule="1f1b")
    counts = [stage["layers"] for stage in planned.document["stages"]]
    assert max(counts) > min(counts), counts
    compare("1f1b", counts, planned.emit("csv").files["schedule.csv"])
    dist.destroy_process_group()


if __name__ == "__main__":
    torch.set_num_threads(1)
    main()
