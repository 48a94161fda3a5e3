# SPDX-License-Identifier: Apache-2.0
"""torch_trainer_device_rank.py TASK FOLDER: a rank of a Trainer on the strict device, which accelerate takes from its variable."""
import os
import pathlib
import sys
from unittest import mock

import torch
import torch.distributed as dist
import transformers
import transformers.training_args
from torch.utils._pytree import tree_map
from transformers import TrainerCallback

import dynmo.torch as dt
import strict_torch
import torch_cases
import torch_trainer_rank
from torch_trainer_rank import LAUNCHED, RESUMED, Moves

RANK, RANKS = int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 1))
DROPOUT = {name: 0.1 for name in ("attn_pdrop", "embd_pdrop", "resid_pdrop")}
BF16 = {
    "bf16": True, "eval_on_start": True, "skip_memory_metrics": False, "torch_empty_cache_steps": 3, "include_num_input_tokens_seen": "non_padding",
}
SEEN = 3  # devices of a process, over which transformers divides batches, where accelerate knows no group for them


def make_trainer(kind, out, device=None, more={}, **changed):
    """On a device, or on the CPU, where it is None."""
    place = {"use_cpu": device is None, "seed": 7, **({"ddp_backend": "gloo"} if RANKS == 2 else {})}
    with mock.patch.dict(os.environ):
        os.environ.pop("ACCELERATE_TORCH_DEVICE", None)
        if device is not None:
            os.environ["ACCELERATE_TORCH_DEVICE"] = str(device)
        return torch_trainer_rank.make_trainer(kind, out, more, **{**place, **changed})


def run(kind, out, device=None, more={}, resume=None, moves=True, **changed):
    """Trains; layers move before step 3, where there are two ranks."""
    callback = Moves()
    more = {**more, "callbacks": [*([callback] if moves and RANKS == 2 else []), *more.get("callbacks", [])]}
    callback.trainer = trainer = make_trainer(kind, out, device, more, **changed)
    trainer.train(resume_from_checkpoint=str(resume) if resume else None)
    return trainer


def on_host(nest):
    """torch.save copies storages, which PyTorch does not for a device that it does not know."""
    return tree_map(lambda value: value.detach().cpu() if isinstance(value, torch.Tensor) else value, nest)


def result_of(trainer):
    """Without the memory that the process took; tensors in host memory."""
    result = on_host(torch_trainer_rank.result_of(trainer))
    result["losses"] = [{key: value for key, value in log.items() if "_mem_" not in key} for log in result["losses"]]
    return result


def run_plain(folder, **changed):
    """As one process without a launcher, on the device and on the CPU."""
    with mock.patch.dict(os.environ):
        for name in LAUNCHED:
            os.environ.pop(name, None)
        for name, device in {"plain": "strict:0", "cpu": None}.items():
            with mock.patch.object(torch, "save", lambda nest, *place, save=torch.save: save(on_host(nest), *place)):
                trainer = run(transformers.Trainer, folder / name, device, moves=False, **{"ddp_backend": None, **changed})
            torch.save(result_of(trainer), folder / f"{name}.pt")


def owns(folder):
    """Each rank has a device of its own. Checkpoints go to the device, the plain Trainer's, and to and from the CPU."""
    own = f"strict:{RANK}"
    if RANK == 0:
        run_plain(folder)
    trainer = run(dt.PipelineTrainer, folder / "piped", own, {"pipeline": {"balance": False}})
    places = {str(parameter.device) for parameter in trainer.model.parameters()}
    assert (str(trainer.args.device), places) == (own, {own, "meta"}), places
    found = {"whole": result_of(trainer), "cut": trainer.pipe.plan.cut}
    for written, device in (("piped", own), ("plain", "strict:0"), ("cpu", own), ("piped", None)):
        way = f"{written} on {'cpu' if device is None else 'strict'}"
        found[way] = result_of(run(dt.PipelineTrainer, folder / way, device, resume=folder / written / f"checkpoint-{RESUMED}", moves=False))
    torch.save(found, folder / f"rank-{RANK}.pt")


def shares(folder):
    """Ranks share a device. Dropout draws by step and layer, so its losses depend neither on cuts nor on an end in the middle."""
    dist.init_process_group("gloo")
    case = {"config": DROPOUT, "family": "gpt2", "seed": 3}
    more = {"model": None, "model_init": lambda: torch_cases.make_model(case)}
    with mock.patch.object(torch.cuda, "device_count", return_value=SEEN):
        trainer = make_trainer(dt.PipelineTrainer, folder / f"shared-{RANKS}", "strict:0", more)
        assert (trainer.args.process_index, trainer.args.should_save, trainer._train_batch_size) == (RANK, RANK == 0, 2)
    before = torch.strict.get_rng_state("strict:0")
    trainer.train()
    assert torch.equal(before, torch.strict.get_rng_state("strict:0"))
    found = {"whole": result_of(trainer), "cut": trainer.pipe.plan.cut}
    written = folder / f"shared-{RANKS}" / "checkpoint-4"
    found["resumed"] = result_of(run(dt.PipelineTrainer, folder / "again", "strict:0", more, resume=written, moves=False))
    torch.save(found, folder / f"shared-{RANKS}-{RANK}.pt")


class Waits(TrainerCallback):
    """The host's waits of each step, beside those of the log."""

    def __init__(self):
        self.found = []

    def on_step_begin(self, args, state, control, **others):
        strict_torch.take_waits()

    def on_step_end(self, args, state, control, **others):
        self.found.append(strict_torch.take_waits())


def unpadded(rows):
    """Rows of one length without a mask, whose padding the model would ask for."""
    ids = torch.stack([row["input_ids"][:5] for row in rows])
    return {"input_ids": ids, "labels": ids}


def waits(folder):
    """Of a step: those for messages, one for the losses, one for clipping. None for each batch or loss of the Trainer.

    The model asks each micro-batch without a mask if it is packed, since the Trainer switches `use_cache` off.
    """
    counted = Waits()
    more = {"data_collator": unpadded, "callbacks": [counted], "pipeline": {"schedule": "zb-h1"}}
    changed = {"eval_strategy": "no", "save_strategy": "no", "max_steps": 6}
    trainer = run(dt.PipelineTrainer, folder / "waits", f"strict:{RANK}", more, moves=False, **changed)
    program = max(trainer.pipe._programs.values(), key=lambda one: one.micro_batches)
    sent = sum(action.kind.startswith("SEND") for action in program.actions)
    for step in (2, 4, 5):  # the first one checks the split, the third one ends the data, and has a message less
        wanted = {"synchronize stream": sent + 2, "aten::_local_scalar_dense": program.micro_batches}
        assert counted.found[step - 1] == wanted, (step, sent, counted.found)
    (folder / f"waits-{RANK}").write_text(f"{sent} messages", encoding="utf-8")


def autocasts(folder):
    """bf16, with what else of TrainingArguments concerns a device."""
    with mock.patch.object(transformers.training_args, "is_torch_bf16_gpu_available", return_value=True):
        if RANK == 0:
            run_plain(folder, **BF16)
        with mock.patch("accelerate.utils.memory.clear_device_cache") as cleared:
            trainer = run(dt.PipelineTrainer, folder / "piped", f"strict:{RANK}", **BF16)
    assert cleared.call_args_list.count(mock.call()) == 4  # in steps 0, 3, 6 and 9; accelerate itself collects garbage, too
    memory = {key for log in trainer.state.log_history for key in log if "_mem_" in key}
    assert "train_mem_cpu_peaked_delta" in memory, memory
    torch.save({"whole": result_of(trainer), "cut": trainer.pipe.plan.cut}, folder / f"rank-{RANK}.pt")


if __name__ == "__main__":
    torch.set_num_threads(1)
    strict_torch.open_device()
    {"owns": owns, "shares": shares, "waits": waits, "autocasts": autocasts}[sys.argv[1]](pathlib.Path(sys.argv[2]))
    dist.destroy_process_group()
