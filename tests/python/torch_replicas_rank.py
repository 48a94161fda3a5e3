# SPDX-License-Identifier: Apache-2.0
"""torch_replicas_rank.py FOLDER: trains cases.pt in replicas that move layers, counts what their sums send, then asks for what is refused."""
import json
import os
import pathlib
import types

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from transformers import AutoModelForCausalLM

import dynmo
import dynmo.torch as dt
import torch_cases
import torch_ranks
from dynmo.torch import live, ranks, reduction
from dynmo.torch.decoder import Decoder
from dynmo.torch.step import seed_for
from torch_live_rank import even_clock
from torch_rank import train
from torch_ranks import make_pipe, run_rank, train_step

CASE = {"family": "llama", "micro_batches": 2}
sent = {}  # bytes by tag of sums over replicas, of one step


def count_sums():
    real = ranks.Ranks.send

    def send(self, tensor, to, tag, replica=None, purpose=""):
        if tag >= reduction.REDUCTION_TAG:
            sent[tag] = sent.get(tag, 0) + tensor.numel() * tensor.element_size()
        return real(self, tensor, to, tag, replica, purpose)

    ranks.Ranks.send = send


def skewed_clock():
    """In the second replica of three ranks some layers are slow: alone, it would plan another cut."""
    real = live.Balancer.own_part

    def own_part(self, plan, rank, marks, *rest):
        if dist.get_rank() > 2:
            marks.forward_s = [seconds * (4 if layer < 4 else 1) for layer, seconds in enumerate(marks.forward_s)]
        return real(self, plan, rank, marks, *rest)

    live.Balancer.own_part = own_part
    even_clock()


def check_bytes(trained):
    """Of a step: each parameter that is trained once, 2 (D - 1) / D of its bytes from each replica, and who has its gradient."""

    def check(pipe, step):
        own = [layer for layer, owner in zip(pipe._split.layers, pipe.plan.owners) if owner == pipe.rank]
        layers = [[p for p in layer.parameters.values() if p.requires_grad] for layer in own]
        assert pipe.reduced.parameters == sum(map(len, layers)) and pipe.reduced.seconds > 0, pipe.reduced
        assert pipe.reduced.bytes == sum(sent.values()), (pipe.reduced, sent)
        others, wanted = pipe.replicas - 1, 0
        for layer in layers:
            count = sum(parameter.numel() for parameter in layer)
            part = count * (pipe.replica + 1) // pipe.replicas - count * pipe.replica // pipe.replicas
            wanted += 4 * (count - part + others * part)
        assert pipe.reduced.bytes == wanted + others * sum(len(layer.parameters) for layer in own), (pipe.reduced, wanted, sent)
        assert len(sent) == (1 + 2 * sum(map(bool, layers)) if own else 0), sent
        trained.append(pipe.reduced.parameters)
        sent.clear()

    return check


def make(case=CASE, **options):
    return make_pipe(case, **{"timeout_s": 60, "balance": False, "replicas": 2, **options})


def refused(line, call):
    assert "wanted" in torch_ranks.refused(line, call, str.startswith), line


def settings(rank):
    refused("replicas=3 of 4 ranks", lambda: make(replicas=3))
    refused("replicas=0 of 4 ranks", lambda: make(replicas=0))
    refused("replicas='2', wanted a number or a DeviceMesh", lambda: make(replicas="2"))
    refused("replicas: a mesh of [0, 1, 2, 3]", lambda: make(replicas=init_device_mesh("cpu", (4,))))
    refused("rank 1 has another replicas than rank 0: 1, on rank 0 2", lambda: make(replicas=1 if rank == 1 else 2))
    stage = types.SimpleNamespace(submod=torch.nn.Sequential(torch.nn.Linear(2, 2)), stage_index=rank % 2, num_stages=2)
    refused("stage 0 is on ranks 0 and 2", lambda: dt.Adviser([stage], "1F1B", micro_batches=2).advise())


def first_steps(rank):
    """Before any layer is dropped; the group is as it was."""
    pipe = make()
    batches = torch_cases.batches_of({**CASE, "replicas": 4}, 0)
    refused("rank 3 has another batch than rank 2", lambda: pipe.step(**batches[rank if rank > 1 else 0]))
    odd = {name: value[:1] for name, value in batches[pipe.replica].items()} if pipe.replica == 1 else batches[0]
    refused("rank 2: batch: 1 samples in 2 micro-batches", lambda: pipe.step(**odd))
    items = {**batches[pipe.replica], "num_items_in_batch": 5 + pipe.replica}
    refused("rank 2 has another num_items_in_batch than rank 0", lambda: pipe.step(**items))
    pipe.step(**batches[pipe.replica])
    refused("the gradient of ", lambda: pipe.step(**batches[pipe.replica]))
    pipe.optimizer.zero_grad(set_to_none=False)
    pipe.step(**batches[pipe.replica])
    pipe.optimizer.zero_grad()
    line = "batch: 1 samples in 2" if pipe.replica == 1 else "rank 2: batch: 1 samples in 2"
    refused(line, lambda: pipe.step(**odd))


def mesh(rank):
    """Rows of a mesh need not be consecutive ranks: the loss is that of the same batches."""
    pipes = make(), make(replicas=DeviceMesh("cpu", [[0, 2], [1, 3]]))
    assert (pipes[1].replica, pipes[1].rank) == (rank % 2, rank // 2)
    batches = torch_cases.batches_of({**CASE, "replicas": 2}, 0)
    losses = [pipe.step(**batches[pipe.replica]).item() for pipe in pipes]
    evaluated = pipes[0].evaluate(**batches[pipes[0].replica]).item()
    assert losses[0] == losses[1] and abs(losses[0] - evaluated) < 1e-6, (losses, evaluated)


def records(folder):
    """The files of two runs, of all ranks."""
    for name, balance in (("run", True), ("unbalanced", False)):
        pipe = make(run=f"{folder}/{name}", balance=balance, steps=2)
        for step in range(2):
            train_step(pipe, torch_cases.batches_of({**CASE, "replicas": 2}, step)[pipe.replica])
        pipe.close()


def dropout(folder):
    """Draws follow from seed, layer, step, replica and micro-batch, so a process that does the same has the same; it is what is saved."""
    rates = {"resid_pdrop": 0.1, "embd_pdrop": 0.1, "attn_pdrop": 0.1}
    case = {"family": "gpt2", "micro_batches": 2, "replicas": 2, "config": rates}
    twin = torch_cases.make_model(case)
    pipe, whole, optimizer = make(case, seed=5), Decoder(twin).whole, torch_cases.make_optimizer(case, twin.parameters())
    for step in range(2):
        batches = torch_cases.batches_of(case, step)
        loss = train_step(pipe, batches[pipe.replica])
        total, buffers = torch.zeros(()), []
        for replica, batch in enumerate(batches):
            part_of_total = torch.zeros(())
            for number, part in enumerate(torch_cases.micro_batches_of(case, batch)):
                place = (2 * step + replica, number)
                own = whole(part, lambda layer, place=place: torch.manual_seed(seed_for(5, layer, *place))) / 4
                own.backward()
                part_of_total += own.detach()
            total += part_of_total
            buffers.append([parameter.grad for parameter in twin.parameters()])
            twin.zero_grad()
        for parameter, (first, second) in zip(twin.parameters(), zip(*buffers)):
            parameter.grad = first + second
        torch_cases.update(optimizer)
        assert loss.item() == total.item(), (step, loss, total)
    pipe.save_pretrained(f"{folder}/saved")
    saved = dict(AutoModelForCausalLM.from_pretrained(f"{folder}/saved").named_parameters())
    wrong = [name for name, parameter in twin.named_parameters() if not torch.equal(parameter, saved[name])]
    assert not wrong and len(saved) == len(list(twin.parameters())), wrong


def failure(rank):
    """One rank's own is one line on all."""
    pipe = make()
    batches = torch_cases.batches_of({**CASE, "replicas": 2}, 0)
    pipe.step(**batches[pipe.replica])
    pipe.optimizer.zero_grad()

    def broken(*_):
        raise KeyError("one rank's own")

    if rank == 2:
        pipe.module.model.layers[0].register_forward_pre_hook(broken)
    try:
        pipe.step(**batches[pipe.replica])
        raise AssertionError("rank 2 has failed")
    except (KeyError, dynmo.BadInputError) as error:
        assert "one rank's own" in str(error) and isinstance(error, KeyError) == (rank == 2), error


def main(folder):
    rank = dist.get_rank()
    count_sums()
    skewed_clock()
    for index, case in enumerate(torch.load(os.path.join(folder, "cases.pt"))):
        trained = []
        # An expert may get no token, so that its gradient is missing.
        torch.save(train(case, check_bytes(trained) if case["family"] != "mixtral" else lambda pipe, step: None), f"{folder}/rank-{rank}-{index}.pt")
        sent.clear()
        pathlib.Path(folder, f"trained-{rank}-{index}.json").write_text(json.dumps(trained))
    if dist.get_world_size() == 4:
        records(folder)
        dropout(folder)
        for part in (settings, first_steps, mesh, failure):
            part(rank)


if __name__ == "__main__":
    run_rank(main)
