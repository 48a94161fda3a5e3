#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Models that DynMo exports, opened by the real `transformers`: the same scores and the same greedy tokens.

For every golden, imported and exported again; and for a small model of each family, tied and not, trained here for a few
steps, exported with `dynmo checkpoint export-hf`. Prints PASS or FAIL a line, exit code 1 if one fails.

  check_export.py --dynmo PATH_TO_BINARY [--goldens FOLDER]
"""
import argparse
import pathlib
import subprocess
import sys
import tempfile

import torch
import transformers
from safetensors.torch import load_file

TOKENS = 20
TINY = {"model.hidden": 32, "model.blocks": 2, "model.heads": 4, "model.kv_heads": 2, "model.intermediate": 48,
        "model.sequence": 40, "batch.micro_batches": 2, "batch.micro_batch_size": 2, "train.steps": 12,
        "train.validation_every": 0, "optimizer.learning_rate": 1e-2, "checkpoint.every": 12, "pipeline.pin": "false"}
TRAINED = {
    "llama": {},
    "llama tied": {"model.tied_embeddings": "true", "model.rope_theta": 50000},
    "llama3's positions": {"model.rope_scaling": "llama3", "model.rope_theta": 500, "model.rope_original_positions": 16},
    "qwen2, linear positions": {"model.qkv_bias": "true", "model.rope_scaling": "linear", "model.rope_factor": 2.5},
    "gpt2": {"model.family": "gpt2", "model.positions": 50},
    "mixtral": {"moe.enabled": "true", "moe.experts": 4},
    "mixtral tied, of wider experts": {"moe.enabled": "true", "moe.experts": 6, "moe.top_k": 3, "moe.expert_hidden": 64,
                                       "model.tied_embeddings": "true"},
    "gpt2 untied": {"model.family": "gpt2", "model.tied_embeddings": "false", "model.norm_epsilon": 1e-4},
    "llama, head in 8 slices": {"model.vocabulary": 1100, "model.head_slices": 8},
    "gpt2, tied head in 3 slices": {"model.family": "gpt2", "model.vocabulary": 515, "model.head_slices": 3},
    "mixtral, head in 2 slices": {"moe.enabled": "true", "moe.experts": 4, "model.head_slices": 2},
}


class Dynmo:
    def __init__(self, binary):
        self.binary = binary

    def __call__(self, *words):
        done = subprocess.run([self.binary, *map(str, words)], capture_output=True, text=True, timeout=600, check=False)
        if done.returncode != 0:
            raise RuntimeError(f"dynmo {words[0]} {words[1]}: exit code {done.returncode}, {done.stderr.strip()}")
        return done.stdout


def greedy(model, prompt):
    ids = torch.tensor(prompt)
    with torch.no_grad():
        for _ in range(TOKENS):
            ids = torch.cat([ids, model(ids[None]).logits[0, -1].argmax()[None]])
    return ids


def difference(dynmo, ours, exported, prompt, scratch):
    """Between what dynmo computes of `ours` and transformers of `exported`; None if nothing differs."""
    scores = scratch / "scores.safetensors"
    made = dynmo("generate", ours, "--prompt-tokens", ",".join(map(str, prompt)), "--tokens", TOKENS, "--scores", scores)
    tokens = [int(word) for word in made.split()]
    heads = [name for name in load_file(exported / "model.safetensors") if name.startswith("lm_head")]
    if heads not in ([], ["lm_head.weight"]):  # none: tied
        return f"the head is in {', '.join(heads)}, wanted one lm_head.weight"
    model, info = transformers.AutoModelForCausalLM.from_pretrained(exported, dtype=torch.float32, output_loading_info=True)
    for kind in ("missing_keys", "unexpected_keys", "mismatched_keys"):
        if info.get(kind):
            return f"transformers says {kind}: {sorted(info[kind])}"
    model.eval()
    ids = greedy(model, prompt)
    theirs = ids[len(prompt):].tolist()
    if tokens != theirs:
        return f"greedy tokens are {tokens} here, {theirs} in transformers"
    with torch.no_grad():
        distance = float((model(ids[None]).logits[0] - load_file(scores)["logits"]).abs().max())
    if not distance <= 1e-4:
        return f"logits differ by {distance:.2g}, wanted at most 1e-4"
    return None


def check_golden(dynmo, golden, scratch):
    dynmo("checkpoint", "import-hf", golden, scratch / "run")
    dynmo("checkpoint", "export-hf", scratch / "run", "--out", scratch / "out")
    prompt = load_file(golden / "expected.safetensors")["prompt"].tolist()
    return difference(dynmo, scratch / "run", scratch / "out", prompt, scratch)


def check_trained(dynmo, settings, scratch):
    text = scratch / "text.txt"
    text.write_text("".join(f"line {i} of a text that says little\n" for i in range(400)))
    dynmo("data", "prepare", text, "--out", scratch / "data")
    words = [word for key, value in (TINY | settings).items() for word in ("--set", f"{key}={value}")]
    dynmo("train", "--data", scratch / "data", "--out", scratch / "run", "-n", 2, *words)
    dynmo("checkpoint", "export-hf", scratch / "run", "--out", scratch / "out")
    return difference(dynmo, scratch / "run", scratch / "out", list(b"line 7"), scratch)


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--dynmo", type=pathlib.Path, required=True)
    parser.add_argument("--goldens", type=pathlib.Path, default=pathlib.Path(__file__).parents[1] / "weights" / "goldens")
    options = parser.parse_args()
    transformers.utils.logging.disable_progress_bar()
    dynmo = Dynmo(options.dynmo.resolve())
    checks = [(f"export of {golden.name}", lambda scratch, golden=golden: check_golden(dynmo, golden, scratch))
              for golden in sorted(options.goldens.iterdir())]
    checks += [(f"export of a trained {name}", lambda scratch, changes=changes: check_trained(dynmo, changes, scratch))
               for name, changes in TRAINED.items()]
    failed = False
    for name, check in checks:
        with tempfile.TemporaryDirectory() as scratch:
            try:
                why = check(pathlib.Path(scratch))
            except (RuntimeError, OSError, ValueError) as fault:
                why = str(fault)
        print(f"PASS {name}" if why is None else f"FAIL {name}: {why}", flush=True)
        failed = failed or why is not None
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
