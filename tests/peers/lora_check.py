#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""PEFT's LoRA on a frozen Llama and Qwen3 on 3 ranks, without and with both kinds of gradient checkpointing.

Losses, adapters and their moments must be those of the plain loop, bit for bit, after two moves to random cuts, under 1f1b and zb-h1.
"""
import argparse
import itertools
import json
import os
import pathlib
import random
import subprocess
import sys
import tempfile
import warnings

import gloo_ranks
from families_check import RANKS, random_plan
from tiny_configs import batch_of, class_and_config

CASES = list(itertools.product(("llama", "qwen3"), ("no", "plain", "reentrant"), ("1f1b", "zb-h1")))
EXAMPLE = pathlib.Path(__file__).resolve().parents[2] / "examples" / "torch" / "lora.py"
PIPED = ("from dynmo.torch import PipelineTrainer as Trainer  # dynmo: instead of `from transformers import Trainer`", "from transformers import Trainer")
OPTION = ', pipeline={"run": f"{out}/run"})  # for `dynmo report OUT/run`'
STEPS, MICRO_BATCHES, LIMIT_S = 6, 2, 1800


def make(kind, checkpointing):
    import torch
    from peft import LoraConfig, get_peft_model

    torch.manual_seed(0)
    adapters = LoraConfig(r=4, lora_alpha=8, lora_dropout=0.0, target_modules=["q_proj", "v_proj"], task_type="CAUSAL_LM")
    model_class, config = class_and_config(kind)
    model = get_peft_model(model_class._from_config(config), adapters)
    if checkpointing != "no":
        model.gradient_checkpointing_enable({"use_reentrant": checkpointing == "reentrant"})
        model.enable_input_require_grads()
    return model.train(), torch.optim.AdamW([parameter for parameter in model.parameters() if parameter.requires_grad], lr=1e-2)


def loop(kind, checkpointing):
    model, optimizer = make(kind, checkpointing)
    losses = []
    for step in range(STEPS):
        total = 0
        for part in range(MICRO_BATCHES):
            loss = model(**{name: value[part : part + 1] for name, value in batch_of(step).items()}).loss / MICRO_BATCHES
            loss.backward()
            total = total + loss.detach()
        losses.append(total.item())
        optimizer.step()
        optimizer.zero_grad()
    return losses, model, optimizer


def pipeline(kind, checkpointing, schedule):
    import dynmo.torch as dt

    model, optimizer = make(kind, checkpointing)
    draw, losses = random.Random(kind), []
    pipe = dt.Pipeline(model, optimizer, micro_batches=MICRO_BATCHES, balance=False, schedule=schedule, timeout_s=100)
    for step in range(STEPS):
        losses.append(pipe.step(**batch_of(step)).item())
        optimizer.step()
        optimizer.zero_grad()
        if step in (1, 3):
            pipe.move_to({**random_plan(draw, len(pipe.layers)), "schedule": schedule})
    return losses, model, optimizer


def state_of(model, optimizer):
    """Adapters and moments that are on this rank."""
    return {
        f"{name} {key}": value
        for name, parameter in model.named_parameters() if parameter.requires_grad and parameter.device.type != "meta"
        for key, value in {"": parameter.detach(), **optimizer.state[parameter]}.items()
    }


def rank_main(path):
    """Writes a line for each case; returns the exit code."""
    import torch
    import torch.distributed as dist

    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    code = 0
    for kind, checkpointing, schedule in CASES:
        wanted_losses, *wanted = loop(kind, checkpointing)
        try:
            losses, *found = pipeline(kind, checkpointing, schedule)
            mine, all_of = state_of(*found), state_of(*wanted)
            wrong = [name for name in mine if not torch.equal(torch.as_tensor(mine[name]), torch.as_tensor(all_of[name]))]
            why = f"losses {losses}, wanted {wanted_losses}" if losses != wanted_losses else f"{len(wrong)} such as {wrong[0]}" if wrong else ""
            names = [None] * RANKS
            dist.all_gather_object(names, list(mine))
            why = why or ("" if sorted(itertools.chain(*names)) == sorted(all_of) else "not every adapter is on one rank")
        except Exception as error:
            why = f"{type(error).__name__}: {error}"
        code = 1 if why else code
        if dist.get_rank() == 0 or why:
            with open(path, "a", encoding="utf-8") as file:
                file.write(f"{'FAIL' if why else 'PASS'} {kind} {checkpointing} {schedule}: {why or 'equal'}\n")
    return code


def check_example(folder):
    """The Trainer's example under torchrun, compared with transformers' own Trainer on one process."""
    text = EXAMPLE.read_text(encoding="utf-8").replace(*PIPED).replace(OPTION, ")")
    assert "dynmo.torch" not in text and "pipeline" not in text.partition('"""')[2].partition('"""')[2], text
    (folder / "plain.py").write_text(text, encoding="utf-8")
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
    launcher = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
    for words in ([folder / "plain.py", folder / "plain"], [*launcher, EXAMPLE, folder / "piped"]):
        done = subprocess.run([sys.executable, *map(str, words)], env=environment, capture_output=True, text=True, timeout=600, check=False)
        if done.returncode != 0:
            return done.stderr[-500:]
    weights = [(folder / kind / "adapter_model.safetensors").read_bytes() for kind in ("plain", "piped")]
    logs = [json.loads((folder / kind / "checkpoint-10" / "trainer_state.json").read_text())["log_history"] for kind in ("plain", "piped")]
    records = [json.loads(line) for line in (folder / "piped" / "run" / "records" / "rank-1.jsonl").read_text().splitlines()]
    if weights[0] != weights[1] or [(log["loss"], log["grad_norm"]) for log in logs[0]] != [(log["loss"], log["grad_norm"]) for log in logs[1]]:
        return f"other adapters or logs: {logs}"
    losses = [abs(record["loss"] - log["loss"]) < 1e-5 for record, log in zip(records, logs[0])]
    return "" if losses == [True] * 10 else f"records have other losses: {records}"


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--dynmo", help="the program; its build folder has the package")
    parser.add_argument("--rank", help="the file of verdicts; this process is one rank")
    arguments = parser.parse_args()
    if arguments.rank:
        return rank_main(arguments.rank)
    if subprocess.run([sys.executable, "-c", "import peft"], check=False, stderr=subprocess.DEVNULL).returncode != 0:
        print("SKIP lora: no peft, which scripts/setup peers installs")
        return 0
    gloo_ranks.use_package(arguments.dynmo)
    with tempfile.NamedTemporaryFile("r", encoding="utf-8") as said:
        failed = gloo_ranks.run([sys.executable, __file__, "--rank", said.name], RANKS, LIMIT_S)
        print(said.read(), end="")
    if failed:
        print(f"FAIL lora: {failed.splitlines()[-1]}\n{failed}")
    with tempfile.TemporaryDirectory() as place:
        why = check_example(pathlib.Path(place))
    print(f"FAIL example: {why}" if why else "PASS example: equal to transformers' Trainer")
    return 1 if failed or why else 0


if __name__ == "__main__":
    sys.exit(main())
