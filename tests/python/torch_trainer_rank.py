# SPDX-License-Identifier: Apache-2.0
"""A rank of a Trainer: the example as it stands, and a run with a move, which is resumed in the middle.

Before the ranks meet, rank 0 does this run with transformers' own class.
"""
import copy
import os
import pathlib
import runpy
import shutil
import sys
from unittest import mock

import torch
import transformers
from transformers import LlamaConfig, LlamaForCausalLM, TrainerCallback, TrainingArguments

import dynmo
import dynmo.torch as dt
from dynmo.torch import ranks
from plans import plan_of
from torch_ranks import refused

EXAMPLE = pathlib.Path(__file__).resolve().parents[2] / "examples" / "torch" / "trainer.py"
STEPS, RESUMED = 10, 8
LAUNCHED = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")


class Rows(torch.utils.data.Dataset):
    """Rows of unlike lengths. After 21 of them the last step, and its last batch, are shorter than the others."""

    def __init__(self, count, seed):
        draw = torch.Generator().manual_seed(seed)
        self.rows = [torch.randint(3, 90, (int(torch.randint(5, 12, (), generator=draw)),), generator=draw) for _ in range(count)]

    def __len__(self):
        return len(self.rows)

    def __getitem__(self, index):
        return {"input_ids": self.rows[index], "labels": self.rows[index]}


class Torn(Rows):
    """Rows that one rank cannot read to the end."""

    reads = 0

    def __getitem__(self, index):
        self.reads += 1
        if self.reads > 10 and os.environ["RANK"] == "1":
            raise OSError("a torn file")
        return super().__getitem__(index)


def padded(rows):
    """Pads to the longest of a batch."""
    pad = torch.nn.utils.rnn.pad_sequence
    ids = pad([row["input_ids"] for row in rows], batch_first=True)
    labels = pad([row["labels"] for row in rows], batch_first=True, padding_value=-100)
    return {"input_ids": ids, "labels": labels, "attention_mask": (labels != -100).long()}


class Moves(TrainerCallback):
    """Moves layers behind a step, as a decision may."""

    trainer = None

    def on_step_end(self, args, state, control, **others):
        if state.global_step == 3 and self.trainer.pipe.ranks > 1:
            assert self.trainer.pipe.move_to(plan_of([2, 4], owners=[1, 0])).done


class Fails(TrainerCallback):
    """Calls `fail` behind the second step, on one rank or on all."""

    def __init__(self, fail, ranks=("1",)):
        self.fail, self.ranks = fail, ranks

    def on_step_end(self, args, state, control, **others):
        if state.global_step == 2 and os.environ["RANK"] in self.ranks:
            self.fail(others["model"])


def full_disk(model):
    raise OSError("a full disk")


class Keeps(TrainerCallback):
    """Keeps what a trainer has before the step from which a run is resumed."""

    trainer = result = None

    def on_step_begin(self, args, state, control, **others):
        if state.global_step == RESUMED:
            self.result = copy.deepcopy(result_of(self.trainer))


def make_trainer(kind, out, more={}, tied=False, **changed):
    """Takes arguments of TrainingArguments, and `more` of the Trainer."""
    torch.manual_seed(3)
    model = LlamaForCausalLM(LlamaConfig(
        hidden_size=32, intermediate_size=48, num_hidden_layers=4, num_attention_heads=4, num_key_value_heads=2, vocab_size=96,
        tie_word_embeddings=tied))
    arguments = TrainingArguments(**{
        "output_dir": str(out), "max_steps": STEPS, "per_device_train_batch_size": 2, "gradient_accumulation_steps": 4, "logging_steps": 4,
        "save_steps": 4, "eval_strategy": "steps", "eval_steps": 4, "weight_decay": 0.1, "warmup_steps": 3, "learning_rate": 1e-2,
        "max_grad_norm": 0.5, "report_to": "none", "use_cpu": True, "disable_tqdm": True, "prediction_loss_only": True, **changed,
    })
    return kind(**{"model": model, "args": arguments, "train_dataset": Rows(21, 1), "eval_dataset": Rows(7, 2), "data_collator": padded, **more})


def result_of(trainer):
    """Logs without times, and this rank's weights and optimizer state."""
    logs = [{key: value for key, value in log.items() if "runtime" not in key and "per_second" not in key} for log in trainer.state.log_history]
    named = {name: parameter for name, parameter in trainer.model.named_parameters() if parameter.device.type != "meta"}
    state = {name: dict(trainer.optimizer.state[parameter]) for name, parameter in named.items()}
    return {"losses": logs, "weights": {name: parameter.detach() for name, parameter in named.items()}, "state": state}


def refusals(folder, trainer, rank):
    """Settings in which ranks differ, and what no pipeline does."""
    unlike = make_trainer(dt.PipelineTrainer, folder / "refused", save_steps=5 + rank)
    for _ in range(2):  # the first refusal leaves nothing with which the ranks would go on
        refused("rank 1 has another TrainingArguments.save_steps than rank 0: 6, on rank 0 5", unlike.train)
    saved, part = folder / "piped" / f"checkpoint-{RESUMED}", folder / f"part-{rank}"
    shutil.copytree(saved, part, ignore=shutil.ignore_patterns("pipeline") if rank == 1 else None)
    for line, checkpoint in {
        "list of files in the checkpoint than rank 0: ['scheduler.pt'], on rank 0 ['pipeline', 'scheduler.pt']": part,
        f"step to begin with than rank 0: {RESUMED}, on rank 0 0": saved if rank == 1 else None,
    }.items():
        resumed = make_trainer(dt.PipelineTrainer, folder / "refused")
        refused(f"rank 1 has another {line}", lambda: resumed.train(resume_from_checkpoint=checkpoint and str(checkpoint)))
    for name, value in {"label_smoothing_factor": 0.1, "load_best_model_at_end": True, "neftune_noise_alpha": 5.0, "auto_find_batch_size": True}.items():
        changed = {name: value, "save_steps": 4, "metric_for_best_model": "loss"}
        refused(f"TrainingArguments: {name}=", lambda changed=changed: make_trainer(dt.PipelineTrainer, folder / "refused", **changed))
    refused("TrainingArguments: fp16", lambda: make_trainer(dt.PipelineTrainer, folder / "refused", fp16=True))
    for line, more in {
        "Trainer: compute_metrics": {"compute_metrics": print}, "pipeline: replicas, wanted plan": {"pipeline": {"replicas": 2}},
        "since an earlier Trainer ran it": {"model": trainer.model},
    }.items():
        refused(line, lambda more=more: make_trainer(dt.PipelineTrainer, folder / "refused", more))
    trainer.args.prediction_loss_only = False
    refused("predict() wants the logits", lambda: trainer.predict(Rows(2, 1)))
    refused("wanted trainer.pipe.evaluate", lambda: trainer.model_wrapped(**padded([Rows(1, 1)[0]])))


def unwritable(folder):
    """Every rank has the line of the one that writes checkpoints."""
    for name, what in {"scheduler.pt": "the scheduler", "rng_state.pth": "the state of random numbers", "model.safetensors": "the weights"}.items():
        out = folder / f"unwritable-{name}"
        (out / "checkpoint-1" / name).mkdir(parents=True, exist_ok=True)
        trainer = make_trainer(dt.PipelineTrainer, out, save_steps=1, max_steps=2, eval_strategy="no")
        refused(f"rank 0: writing {what} ends with ", trainer.train)


def failures_of_one_rank(folder, trainer):
    """Its own line is the reason with which the other one ends, long before the pipeline's timeout."""

    def make(name, more, **changed):
        changed = {"max_steps": 3, "eval_strategy": "no", "save_strategy": "no", **changed}
        return make_trainer(dt.PipelineTrainer, folder / name, {"pipeline": {"timeout_s": 60}, **more}, **changed)

    torn, full = make("torn", {"train_dataset": Torn(21, 1)}), make("full", {"callbacks": [Fails(full_disk)]})
    asks = make("asks", {"callbacks": [Fails(lambda model: model.state_dict())]})
    early = make("early", {"eval_dataset": Torn(21, 2)}, eval_strategy="steps", eval_steps=1)
    absent = make("absent", {})
    checkpoint = folder / "plain" / f"checkpoint-{RESUMED}" if os.environ["RANK"] == "0" else folder / "nowhere"
    for own, line, call in (
        (OSError, "OSError: a torn file", torn.train),
        (OSError, "OSError: a full disk", full.train),
        (dynmo.BadInputError, "state_dict: ", asks.train),  # all ranks could have refused it, but one alone has asked
        (OSError, "OSError: a torn file", early.train),
        (OSError, "OSError: a torn file", lambda: trainer.evaluate(Torn(21, 2))),
        (ValueError, "ValueError: ", lambda: absent.train(resume_from_checkpoint=str(checkpoint))),  # before there is a pipeline
    ):
        with mock.patch.object(ranks, "ALONE_S", 0.1):
            if os.environ["RANK"] == "0":
                refused(f"rank 1: {line}", call, str.startswith)
                continue
            try:
                call()
            except own as error:
                assert line.endswith(": ") or line.endswith(str(error)), error
            else:
                raise AssertionError(f"no {line}")


def failures_of_all_ranks(folder):
    """None waits for another, so that the pipeline goes on."""
    fails = Fails(full_disk, ("0", "1"))
    trainer = make_trainer(dt.PipelineTrainer, folder / "all", {"callbacks": [fails]}, eval_strategy="no", save_strategy="no")
    with mock.patch.object(ranks, "ALONE_S", 60):
        for _ in range(2):
            try:
                trainer.train()
            except OSError as error:
                assert str(error) == "a full disk", error
            else:
                raise AssertionError("no error")
    trainer.evaluate()
    trainer.save_model()


def run_tied(kind, out, **resumed):
    """Runs a tied model. Returns what it has before the step from which it is resumed, and at the end."""
    keeps = Keeps()
    keeps.trainer = make_trainer(kind, out, {"callbacks": [keeps]}, tied=True, eval_strategy="no", seed=7)
    keeps.trainer.train(**resumed)
    return keeps.result, result_of(keeps.trainer)


def resume_twice(folder):
    """On one rank a Trainer has all layers after a run, and can resume again."""
    torch.set_num_threads(1)
    keeps = Keeps()
    keeps.trainer = make_trainer(dt.PipelineTrainer, folder / "twice", {"callbacks": [keeps]}, tied=True, eval_strategy="no", save_steps=99, seed=7)
    for step in (4, RESUMED):
        keeps.trainer.train(resume_from_checkpoint=str(folder / "tied" / f"checkpoint-{step}"))
    torch.save(keeps.result, folder / "twice.pt")


def run_plain(folder):
    """Runs what is compared, as one process without a launcher."""
    with mock.patch.dict(os.environ):
        for name in LAUNCHED:
            os.environ.pop(name, None)
        plain = make_trainer(transformers.Trainer, folder / "plain", seed=7)
        plain.train()
        torch.save(run_tied(transformers.Trainer, folder / "tied"), folder / "plain-tied.pt")
    torch.save(result_of(plain), folder / "plain.pt")


def main(folder):
    torch.set_num_threads(1)
    rank = int(os.environ["RANK"])
    if rank == 0:
        run_plain(folder)
    with mock.patch.object(sys, "argv", ["trainer.py", str(folder / "example")]):
        runpy.run_path(str(EXAMPLE), run_name="__main__")
    moves = Moves()
    moves.trainer = make_trainer(dt.PipelineTrainer, folder / "piped", {"callbacks": [moves], "pipeline": {"run": folder / "run"}}, seed=7)
    moves.trainer.train()
    result = {"whole": result_of(moves.trainer), "cut": moves.trainer.pipe.plan.cut}
    for kind in ("piped", "plain"):  # a checkpoint of ranks, and one of the plain Trainer
        again = make_trainer(dt.PipelineTrainer, folder / f"again-{kind}", seed=7)
        again.train(resume_from_checkpoint=str(folder / kind / f"checkpoint-{RESUMED}"))
        result[kind] = result_of(again)
    result["tied"] = run_tied(dt.PipelineTrainer, folder / "again-tied", resume_from_checkpoint=str(folder / "tied" / f"checkpoint-{RESUMED}"))
    torch.save(result, folder / f"rank-{rank}.pt")
    refusals(folder, again, rank)
    unwritable(folder)
    failures_of_all_ranks(folder)
    failures_of_one_rank(folder, again)


if __name__ == "__main__":
    (resume_twice if "twice" in sys.argv else main)(pathlib.Path(sys.argv[1]))
