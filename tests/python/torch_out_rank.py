# SPDX-License-Identifier: Apache-2.0
"""torch_out_rank.py FOLDER TASK FIRST LAST: trains steps FIRST to LAST, after a load where FIRST is not 0; then saves."""
import contextlib
import pathlib
import random
import unittest.mock

import torch
import torch.distributed as dist

import dynmo.torch as dt
import torch_cases
from dynmo.torch import saving
from plans import plan_of
from torch_rank import random_plan
from torch_ranks import make_pipe, refused, run_rank, train_step

CASES = {
    "llama": {"family": "llama", "micro_batches": 4, "clip": 1.0},
    "mixtral": {"family": "mixtral", "micro_batches": 4, "optimizer": "sgd"},
    "tied": {"family": "qwen3", "micro_batches": 4, "config": {"tie_word_embeddings": True}, "canonical": True},
}


def own_layers():
    """A list of modules of one's own, pipelined, against the same list in one process."""
    torch.manual_seed(3)
    make = lambda: [("in", torch.nn.Linear(6, 8)), *[(f"middle.{i}", torch.nn.Linear(8, 8)) for i in range(3)], ("out", torch.nn.Linear(8, 2))]  # noqa: E731
    layers = make()
    whole = torch.nn.Sequential(*[torch.nn.Linear(m.in_features, m.out_features) for _, m in layers])
    for (_, module), copy in zip(layers, whole):
        copy.load_state_dict(module.state_dict())
    modules = torch.nn.ModuleList([module for _, module in layers])
    optimizers = [torch.optim.AdamW(part.parameters(), lr=0.01) for part in (modules, whole)]
    rng = random.Random(5)
    pipe = dt.Pipeline(
        layers=layers, optimizer=optimizers[0], loss_fn=torch.nn.functional.mse_loss, micro_batches=2,
        hidden=lambda given: torch.empty(given.shape[0], 8),
    )
    for _ in range(4):
        pipe.move_to(random_plan(rng, 5, pipe.ranks, 2))
        given, target = torch.randn(4, 6), torch.randn(4, 2)
        total = sum((torch.nn.functional.mse_loss(whole(given[i : i + 2]), target[i : i + 2]) / 2 for i in (0, 2)), torch.zeros(()))
        for i in (0, 2):
            (torch.nn.functional.mse_loss(whole(given[i : i + 2]), target[i : i + 2]) / 2).backward()
        assert torch.equal(pipe.step(given, target), total.detach())
        for optimizer in optimizers:
            torch_cases.update(optimizer)
    for mine, theirs in zip(modules.parameters(), whole.parameters()):
        assert mine.device.type == "meta" or torch.equal(mine, theirs)


def check_evaluate(pipe, case):
    batch = torch_cases.batch_of(case, 99)
    before = torch.get_rng_state()
    first, second = pipe.evaluate(**batch), pipe.evaluate(**batch)
    assert torch.equal(first, second) and torch.equal(before, torch.get_rng_state())
    assert pipe.module.training and all(parameter.grad is None for parameter in pipe.module.parameters())
    return first


def check_differences(rank):
    """What ranks are given otherwise in a step is named, on every rank."""
    case = CASES["llama"]
    for text in ("batch", "requires_grad flags", "clip"):
        pipe = make_pipe(case)
        if text == "requires_grad flags" and rank == 1:
            pipe.module.lm_head.weight.requires_grad_(False)
        batch = torch_cases.batch_of(case, rank if text == "batch" else 0)
        if text == "clip":
            pipe.step(**batch)
            torch.nn.utils.clip_grad_norm_([p for p in pipe.module.parameters() if p.grad is not None], 1e-3)
            refused("pipe.clip_grad_norm_()", pipe.optimizer.step)
        else:
            refused(f"rank 1 has another {text}", lambda pipe=pipe, batch=batch: pipe.step(**batch))


def fail(_):
    raise ValueError("no room")


def check_unreadable(folder):
    """Every rank has the line of the one that cannot read a checkpoint, or whose layers are not in it, and trains on."""
    checkpoint = f"{folder}/llama-checkpoint"
    pipe = make_pipe(CASES["llama"])
    train_step(pipe, torch_cases.batch_of(CASES["llama"], 0))
    refused("rank 1: absent: no checkpoint", lambda: pipe.load("absent" if dist.get_rank() == 1 else checkpoint))
    pipe.load(checkpoint)
    cases = (
        ({"num_hidden_layers": 5}, [5, 1, 1], f"rank 1: {checkpoint}: it has no model.layers.4."),
        ({"intermediate_size": 40}, [5, 1], f"rank 0: {checkpoint}: it has model.layers.0.mlp.gate_proj.weight of shape (48, 32), here (40, 32)"),
    )
    for changed, counts, line in cases:
        other = make_pipe({**CASES["llama"], "config": changed}, plan=plan_of(counts, ranks=3))
        refused(line, lambda other=other: other.load(checkpoint))
        train_step(other, torch_cases.batch_of(CASES["llama"], 0))


def check_unwritable(folder):
    """Every rank has the line of the one that writes, and trains on."""
    file = pathlib.Path(folder) / "file"
    file.touch()
    pipe = make_pipe(CASES["llama"])
    train_step(pipe, torch_cases.batch_of(CASES["llama"], 0))
    refused("rank 0: writing the weights ends with NotADirectoryError", lambda: pipe.save_pretrained(file / "out"))
    refused("rank 0: writing the weights ends with ValueError: no room", lambda: pipe.write_weights(fail))
    train_step(pipe, torch_cases.batch_of(CASES["llama"], 1))
    if dist.get_rank() == 1:
        with unittest.mock.patch.object(saving, "to_host", side_effect=MemoryError("no memory")), contextlib.suppress(MemoryError):
            pipe.save_pretrained(f"{folder}/none")
    else:
        refused("rank 1: MemoryError: no memory", lambda: pipe.save_pretrained(f"{folder}/none"))


def run(folder, name, first, last):
    case = CASES[name]
    pipe = make_pipe(case)
    scheduler = torch_cases.make_scheduler(pipe.optimizer)
    rng = random.Random(pipe.ranks)
    if first:
        pipe.load(f"{folder}/{name}-checkpoint")
        scheduler.load_state_dict(torch.load(f"{folder}/{name}-scheduler.pt"))
        assert pipe.steps == first
    losses = []
    for step in range(first, last):
        if pipe.ranks > 1:
            pipe.move_to(random_plan(rng, len(pipe.layers), pipe.ranks, 4))
        losses.append(pipe.step(**torch_cases.batch_of(case, step)).item())
        if "clip" in case:
            losses.append(pipe.clip_grad_norm_(case["clip"]).item())
        torch_cases.update(pipe.optimizer, scheduler)
    losses.append(check_evaluate(pipe, case).item())
    if not first:
        pipe.save(f"{folder}/{name}-checkpoint")
        if pipe.rank == 0:
            torch.save(scheduler.state_dict(), f"{folder}/{name}-scheduler.pt")
    pipe.save_pretrained(f"{folder}/{name}-{pipe.ranks}-{last}")
    torch.save(losses, f"{folder}/{name}-losses-{pipe.ranks}-{last}-{pipe.rank}.pt")


def main(folder, task, first, last):
    for name in CASES:
        run(folder, name, int(first), int(last))
    if task == "more":
        own_layers()
        check_differences(dist.get_rank())
        check_unwritable(folder)
        check_unreadable(folder)


if __name__ == "__main__":
    run_rank(main)
