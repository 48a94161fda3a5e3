# SPDX-License-Identifier: Apache-2.0
"""torch_device_rank.py TASK FOLDER: one rank on the strict device (tests/support/strict_device)."""
import functools
import json
import os
import pathlib
import types
from unittest import mock

import torch
import torch.distributed as dist

import dynmo.torch as dt
import strict_torch
import torch_cases
import torch_rank
from dynmo.torch import clocks, stages
from torch_cases import LLAMA
from torch_ranks import is_whole, kill_here, make_pipe, refused, run_rank, train_step

DIED = 3  # the step before which a rank ends


def counted_step(pipe, clips=False, device=None):
    """The messages that this rank sends in a step, and its waits. `device` is where the batch lies, if not on the host."""
    batch = torch_cases.batch_of(LLAMA, 0)
    del batch["attention_mask"]  # whose rows the model asks for padding
    if device is not None:
        batch = {name: value.to(device) for name, value in batch.items()}
    strict_torch.take_waits()
    loss = pipe.step(**batch)
    if clips:
        pipe.clip_grad_norm_(1.0)
    pipe.optimizer.step()
    found = strict_torch.take_waits()
    pipe.optimizer.zero_grad()
    assert loss.item() > 0
    [program] = pipe._programs.values()
    return sum(action.kind.startswith("SEND") for action in program.actions), found


def waits(folder):
    """Of each step, beside those for the messages that this rank sends: one, two with clipping, three with a batch on the device."""
    device = strict_torch.open_device()
    for schedule in ("1f1b", "zb-h1"):
        pipe = make_pipe({**LLAMA, "device": "strict"}, schedule=schedule, balance=True)
        for number in range(6):
            sent, found = counted_step(pipe, clips=number % 2 == 1, device=device if number > 3 else None)
            others = 1 + number % 2 + (number > 3)
            if number > 0:  # the first step checks the split
                assert found == {"synchronize stream": sent + others}, (schedule, number, sent, found)
        costs = pipe.profile()["layers"]
        assert all(layer["forward_s"] > 0 and layer["backward_input_s"] > 0 for layer in costs), costs
        assert pipe.predicted_step_s() > 0
    (folder / f"waits-{pipe.rank}").write_text(f"{sent} messages", encoding="utf-8")


def waits_of_routers(folder):
    """Those of other models, though a boundary has several tensors. PyTorch's grouped product of experts reads its sizes on the host."""
    strict_torch.open_device()
    pipe = make_pipe({**LLAMA, "family": "mixtral", "device": "strict", "config": {"output_router_logits": True}}, balance=False)
    for number in range(4):
        sent, found = counted_step(pipe)
        products = 6 * LLAMA["micro_batches"] * pipe.plan.owners[1:-1].count(pipe.rank)  # two of a block, and their gradients
        wanted = {"synchronize stream": sent + 1, **({"aten::copy_": products} if products else {})}
        if number > 0:  # the first step checks the split
            assert found == wanted, (number, found, wanted)
    (folder / f"waits-{pipe.rank}").write_text(f"{sent} messages", encoding="utf-8")


def checkpoints(folder):
    """A checkpoint of the device goes on on the CPU, and back; so does a folder of save_pretrained.

    A rank has a device of its own, which is not the thread's current one.
    """
    strict_torch.open_device()
    losses = []
    order = ("strict", "cpu", "strict")
    for part, place in enumerate(order):
        own = f"strict:{os.environ['RANK']}" if place == "strict" else place
        case = {**LLAMA, "device": own, "seed": LLAMA["seed"] if part == 0 else 90 + part, "optimizer": ("fused", "foreach", "fused")[part]}
        pipe = make_pipe(case, balance=False)
        if part > 0:
            train_step(pipe, torch_cases.batch_of(LLAMA, 0))  # drops layers of other ranks
            pipe.load(folder / f"checkpoint-{part - 1}")
            assert pipe.steps == 2 * part
            states = [state for parameter, state in pipe.optimizer.state.items() if parameter.device.type != "meta"]
            assert {state["step"].device.type for state in states} == {place if case["optimizer"] == "fused" else "cpu"}
            assert {state["exp_avg"].device.type for state in states} == {place}
        for number in range(2 * part, 2 * part + 2):
            losses.append(train_step(pipe, torch_cases.batch_of(LLAMA, number)).item())
        pipe.save(folder / f"checkpoint-{part}")
    pipe.save_pretrained(folder / "weights")
    (folder / f"losses-{pipe.rank}.json").write_text(json.dumps(losses), encoding="utf-8")


def numbers_behind(case, device, dropout):
    """Those that the part behind the blocks draws in a step, where the part in front has this share of dropout."""
    model, optimizer = torch_cases.make({**case, "config": {**case["config"], "embd_pdrop": dropout}})
    pipe = dt.Pipeline(model, optimizer, micro_batches=4)
    drawn = []
    model.transformer.ln_f.register_forward_pre_hook(lambda *_: drawn.extend(torch.rand(2, device=one).tolist() for one in ("cpu", device)))
    train_step(pipe, torch_cases.batch_of(LLAMA, 0))
    return drawn


def dropped_out(folder):
    """Random numbers of the device follow from layer, step and micro-batch, and leave its generator as it was."""
    device = strict_torch.open_device()
    config = {name: 0.1 for name in ("attn_pdrop", "embd_pdrop", "resid_pdrop")}
    case = {**LLAMA, "family": "gpt2", "config": config, "device": "strict", "clip": 1.0}
    result = torch_rank.train(case)
    model, optimizer = torch_cases.make(case)
    before = [torch.get_rng_state(), torch.strict.get_rng_state(device)]
    pipe = dt.Pipeline(model, optimizer, micro_batches=4)
    train_step(pipe, torch_cases.batch_of(LLAMA, 0))
    assert all(map(torch.equal, before, [torch.get_rng_state(), torch.strict.get_rng_state(device)]))
    assert not torch.are_deterministic_algorithms_enabled()
    drawn = [numbers_behind(case, device, share) for share in (0.0, 0.1)]  # the part behind the blocks runs the part in front again
    assert drawn[0] == drawn[1], drawn
    torch.rand(3, device=device)  # is drawn by the device's generator, which is not the host's
    assert torch.equal(before[0], torch.get_rng_state()) and not torch.equal(before[1], torch.strict.get_rng_state(device))
    (folder / f"dropout-{os.environ['WORLD_SIZE']}.json").write_text(json.dumps(result["losses"]), encoding="utf-8")


def survives(folder):
    """Rank 2 ends; the others go on with the bits of the plain loop."""
    strict_torch.open_device()
    pipe = make_pipe({**LLAMA, "device": "strict"}, balance=False)

    def step(number):
        if number == DIED and pipe.ranks == 3 and pipe.rank == 2:
            kill_here()
        return train_step(pipe, torch_cases.batch_of(LLAMA, number)).item()

    survivor = dt.Survivor(pipe, every=1)
    losses = survivor.train(step, LLAMA["steps"])
    assert pipe.ranks == 2
    (folder / f"survived-{pipe.rank}.json").write_text(json.dumps(losses), encoding="utf-8")


def plain(folder):
    strict_torch.open_device()
    (folder / "plain.json").write_text(json.dumps(torch_cases.train_plainly({**LLAMA, "device": "strict", "scheduled": False})[2]), encoding="utf-8")


def refuses(folder):
    """Each in one line on all ranks, before a layer is dropped."""
    device = strict_torch.open_device()
    rank, ranks = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    exactly = functools.partial(refused, how=str.__eq__)
    apart = torch_cases.make_model({**LLAMA, "device": "strict"})
    apart.lm_head.to("cpu")
    line = "model: model.embed_tokens.weight is on strict:0, lm_head.weight on cpu, wanted all parameters of a rank on one device"
    exactly(line, lambda: dt.Pipeline(apart, micro_batches=4))
    last = ranks - 1
    one = torch_cases.make_model({**LLAMA, "device": "strict" if rank < last else "cpu"})
    line = f"rank {last} has another kind of device than rank 0: cpu, on rank 0 strict, wanted the same on all ranks"
    exactly(line, lambda: dt.Pipeline(one, micro_batches=4))
    untimed = torch_cases.make_model({**LLAMA, "device": "strict"})
    line = "model: model.embed_tokens.weight is on strict:0, whose work cannot be timed (no events), wanted cpu or cuda"
    with mock.patch.object(clocks.EventClock, "stamp", side_effect=RuntimeError("no events")):
        exactly(line, lambda: dt.Pipeline(untimed, micro_batches=4))
    model = torch_cases.make_model({**LLAMA, "device": "strict"})
    torch.set_default_device("strict")
    line = "model: torch.set_default_device('strict:0') is in force, wanted none; move the model by .to('strict:0')"
    exactly(line, lambda: dt.Pipeline(model, micro_batches=4))
    torch.set_default_device(None)
    pipe = dt.Pipeline(model, micro_batches=4)
    batch = torch_cases.batch_of(LLAMA, 0)
    elsewhere = {**batch, "input_ids": batch["input_ids"].to(device), "labels": batch["labels"].to("strict:1")}
    line = "batch: labels is on strict:1, wanted it on the CPU, or on strict:0, where the model is"
    exactly(line, lambda: pipe.step(**elsewhere))
    on_meta = {**batch, "input_ids": batch["input_ids"].to("meta")}
    exactly("batch: input_ids is on meta, wanted it on the CPU, or on strict:0, where the model is", lambda: pipe.step(**on_meta))
    for whole in (apart, one, untimed, model):
        assert is_whole(whole)
    assert pipe.step(**batch).item() > 0
    exactly(line, lambda: pipe.step(**elsewhere))
    assert pipe.step(**{name: value.to(device) for name, value in batch.items()}).item() > 0
    (folder / f"refused-{rank}").write_text("", encoding="utf-8")


def advises(folder):
    """The adviser waits when it is asked, and once for so many stamps."""
    dist.init_process_group("gloo")
    device = strict_torch.open_device()
    module = torch.nn.Sequential(*(torch.nn.Linear(16, 16) for _ in range(3))).to(device)
    adviser = dt.Adviser([types.SimpleNamespace(submod=module, stage_index=0, num_stages=1)], "GPipe", micro_batches=2)
    loss_fn = adviser.timed_loss(torch.nn.functional.mse_loss)
    given, target = torch.randn(4, 16, device=device), torch.randn(4, 16, device=device)
    strict_torch.take_waits()
    for _ in range(4):
        for loss in [loss_fn(module(given), target) for _ in range(2)]:
            loss.backward()
    assert strict_torch.take_waits() == {}
    [before, after] = [adviser.advise(), adviser.advise()]
    assert strict_torch.take_waits() == {"synchronize event": 2}
    for layer in before.profile["layers"]:
        assert layer["forward_s"] > 0 and layer["backward_input_s"] > 0 and layer["boundary_bytes"] == 256, layer
    assert [layer["name"] for layer in before.profile["layers"]] == ["0", "1", "2"] and str(before) == str(after)
    with mock.patch.object(stages, "UNREAD", 20):
        for _ in range(10):
            loss_fn(module(given), target).backward()
    assert strict_torch.take_waits() == {"synchronize event": 3}
    adviser.close()
    (folder / "advised").write_text("", encoding="utf-8")


TASKS = {
    "adviser": advises, "waits": waits, "waits of routers": waits_of_routers, "checkpoints": checkpoints, "plain": plain, "dropout": dropped_out,
    "survives": survives, "refuses": refuses,
}


if __name__ == "__main__":
    run_rank(lambda task, folder: TASKS[task](pathlib.Path(folder)))
