# SPDX-License-Identifier: Apache-2.0
"""One rank of torch_peers_test.py: the same modules and batches by torch.distributed.pipelining and by dynmo.torch."""
import copy
import tempfile

import torch
import torch.distributed as dist
from torch.distributed.pipelining import PipelineStage

import dynmo
import dynmo.torch as dt
from plans import plan_of
from torch_adviser_rank import torch_schedule
from torch_ranks import run_rank

WIDTH, SAMPLES, MICRO_BATCHES = 16, 16, 8  # a power of two, so that dividing losses or gradients by it rounds nothing


def make_layers():
    torch.manual_seed(7)
    return [
        (f"layer{index}", torch.nn.Sequential(torch.nn.LayerNorm(WIDTH), torch.nn.Linear(WIDTH, WIDTH), torch.nn.GELU()))
        for index in range(9)
    ]


def gradients_of(layers):
    """By layer, of this rank's own."""
    return {
        name: [parameter.grad for parameter in module.parameters()]
        for name, module in layers
        if next(module.parameters()).grad is not None
    }


def by_torch(kind, counts, given, target, csv):
    """Gradients by layer and the losses, of torch's own runtime."""
    layers, rank, ranks = make_layers(), dist.get_rank(), dist.get_world_size()
    stages = []
    for index in range(rank, len(counts), ranks):
        first = sum(counts[:index])
        part = torch.nn.Sequential(*[module for _, module in layers[first : first + counts[index]]])
        stages.append(PipelineStage(part, index, len(counts), torch.device("cpu")))
    schedule = torch_schedule({"interleaved": "Interleaved1F1B"}.get(kind, kind), stages, MICRO_BATCHES, torch.nn.functional.mse_loss, csv)
    losses = []
    last = rank == (len(counts) - 1) % ranks
    arguments = (given,) if rank == 0 else ()
    schedule.step(*arguments, **({"target": target, "losses": losses} if last else {}))
    return gradients_of(layers), [loss.detach() for loss in losses]


def by_dynmo(kind, counts, given, target):
    layers = make_layers()
    pipe = dt.Pipeline(
        layers=layers, loss_fn=torch.nn.functional.mse_loss, hidden=torch.empty_like, micro_batches=MICRO_BATCHES,
        plan=plan_of(counts, kind, dist.get_world_size()), balance=False,
    )
    pipe.step(given, target)
    return gradients_of(layers), pipe.losses


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
    with tempfile.NamedTemporaryFile("w", suffix=".csv") as file:
        file.write(planned.emit("csv").files["schedule.csv"])
        file.flush()
        compare("1f1b", counts, file.name)


if __name__ == "__main__":
    run_rank(main)
