#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Small random models of every family as the real `transformers` saves them, with what it computes from them.

Each folder of tests/weights/goldens holds config.json and the weights (one file, or shards with an index) as save_pretrained
writes them, and expected.safetensors: `ids` [2, T], `logits` [2, T, V] in fp32 of the saved weights, `prompt` [P] and its
greedy continuation `greedy` [20].

  make_goldens.py [--goldens FOLDER]           makes them again elsewhere and compares: PASS or FAIL a line, exit code 1
  make_goldens.py [--goldens FOLDER] --write   writes them
"""
import argparse
import json
import pathlib
import shutil
import sys
import tempfile

import torch
import transformers
from safetensors.torch import load_file, save_file

GPT2 = dict(vocab_size=67, n_positions=37, n_embd=24, n_layer=2, n_head=3, bos_token_id=0, eos_token_id=0)
LLAMA = dict(vocab_size=71, max_position_embeddings=48, hidden_size=32, num_hidden_layers=2, num_attention_heads=4,
             num_key_value_heads=2, intermediate_size=44, bos_token_id=0, eos_token_id=0)
MIXTRAL = LLAMA | dict(intermediate_size=20, num_local_experts=4, num_experts_per_tok=2)

# name: configuration, number type of the file, largest shard
MODELS = {
    "gpt2-tied": (transformers.GPT2Config(**GPT2), torch.float32, "1GB"),
    "gpt2-untied-f16": (transformers.GPT2Config(**GPT2 | dict(n_inner=41, layer_norm_epsilon=1e-4, tie_word_embeddings=False)),
                        torch.float16, "1GB"),
    "llama-tied": (transformers.LlamaConfig(**LLAMA, tie_word_embeddings=True, rope_theta=500000.0), torch.float32, "1GB"),
    "llama-untied-shards": (transformers.LlamaConfig(**LLAMA | dict(hidden_size=30, num_attention_heads=3, num_key_value_heads=1,
                                                                    rms_norm_eps=1e-4)), torch.float32, "20KB"),
    "llama-bf16": (transformers.LlamaConfig(**LLAMA | dict(num_key_value_heads=4)), torch.bfloat16, "1GB"),
    "llama3-scaled": (transformers.LlamaConfig(**LLAMA | dict(max_position_embeddings=64), rope_parameters=dict(
        rope_type="llama3", rope_theta=500.0, factor=4.0, low_freq_factor=1.0, high_freq_factor=4.0, original_max_position_embeddings=16)),
                      torch.float32, "1GB"),
    "llama-linear": (transformers.LlamaConfig(**LLAMA, rope_parameters=dict(rope_type="linear", rope_theta=10000.0, factor=2.0)),
                     torch.float32, "1GB"),
    "qwen2": (transformers.Qwen2Config(**LLAMA, tie_word_embeddings=True, rope_theta=1000000.0), torch.bfloat16, "1GB"),
    "mistral": (transformers.MistralConfig(**LLAMA, sliding_window=None), torch.float32, "1GB"),
    "mixtral-shards": (transformers.MixtralConfig(**MIXTRAL), torch.float32, "24KB"),
    "mixtral-fused-bf16": (transformers.MixtralConfig(**MIXTRAL | dict(hidden_size=36, num_attention_heads=3, num_key_value_heads=3,
                                                                       num_local_experts=5, num_experts_per_tok=3,
                                                                       tie_word_embeddings=True, rope_theta=20000.0)),
                           torch.bfloat16, "1GB"),
}
AS_THE_MODEL_IS = {"mixtral-fused-bf16"}  # written with all experts of a block in one tensor, as in the model
GREEDY = 20


def randomize(model, generator):
    """Every parameter far from its initial value: a mixed-up one shows, and no two scores are close to each other."""
    with torch.no_grad():
        for name, parameter in sorted(model.named_parameters()):
            noise = torch.randn(parameter.shape, generator=generator)
            if parameter.dim() == 1 and name.endswith("weight"):
                parameter.copy_(1 + 0.2 * noise)
            else:
                parameter.copy_(0.2 * noise)


def greedy(model, prompt):
    """The continuation, and the least distance between the two highest scores on the way."""
    ids, margin = prompt.clone(), float("inf")
    with torch.no_grad():
        for _ in range(GREEDY):
            best = model(ids[None]).logits[0, -1].topk(2)
            margin = min(margin, float(best.values[0] - best.values[1]))
            ids = torch.cat([ids, best.indices[:1]])
    return ids[len(prompt):], margin


def routing_margin(model, ids):
    """The least distance between the last expert that a token takes and the first that it does not; inf without experts."""
    chosen = getattr(model.config, "num_experts_per_tok", None)
    if chosen is None:
        return float("inf")
    with torch.no_grad():
        layers = model(ids, output_router_logits=True).router_logits
    margins = []
    for scores_NE in layers:
        best = scores_NE.float().topk(chosen + 1).values
        margins.append(float((best[:, chosen - 1] - best[:, chosen]).min()))
    return min(margins)


def make(name, folder):
    config, dtype, shard = MODELS[name]
    for seed in range(100):  # until no token is chosen by a hair
        generator = torch.Generator().manual_seed(seed)
        model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()
        randomize(model, generator)
        model.to(dtype).save_pretrained(folder, max_shard_size=shard, save_original_format=name not in AS_THE_MODEL_IS)
        # (Not model.float(): the angles of rotary positions would keep the short type's rounding.)
        model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
        ids = torch.randint(config.vocab_size, (2, 16), generator=generator)
        prompt = torch.randint(config.vocab_size, (7,), generator=generator)
        continuation, margin = greedy(model, prompt)
        # (Tokens that go to other experts by a hair have other scores.)
        routing = min(routing_margin(model, ids), routing_margin(model, torch.cat([prompt, continuation])[None]))
        if margin > 1e-2 and routing > 1e-4:
            break
    else:
        raise SystemExit(f"{name}: no seed below 100 gives a clear continuation")
    with torch.no_grad():
        logits = model(ids).logits
    save_file({"ids": ids, "logits": logits.contiguous(), "prompt": prompt, "greedy": continuation},
              folder / "expected.safetensors")
    (folder / "generation_config.json").unlink(missing_ok=True)


def difference(made, kept):
    """What differs between a golden made now and the one kept; None if nothing does."""
    if not kept.is_dir():
        return f"{kept} is not there"
    names = {path.name for path in made.iterdir()}
    if names != {path.name for path in kept.iterdir()}:
        return f"the files differ: {sorted(names)} here, {sorted(path.name for path in kept.iterdir())} there"
    configs = [json.loads((folder / "config.json").read_text()) for folder in (made, kept)]
    for config in configs:
        config.pop("transformers_version", None)
    if configs[0] != configs[1]:
        return f"config.json differs: {configs[0]} here, {configs[1]} there"
    for path in sorted(made.glob("*.safetensors")):
        here, there = load_file(path), load_file(kept / path.name)
        if here.keys() != there.keys():
            return f"{path.name}: the tensors differ"
        for tensor in here:
            bound = 1e-4 if tensor == "logits" else 0  # products may round differently on another processor
            if here[tensor].shape != there[tensor].shape or (here[tensor].double() - there[tensor].double()).abs().max() > bound:
                return f"{path.name}: {tensor} differs"
    return None


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--goldens", type=pathlib.Path, default=pathlib.Path(__file__).parents[1] / "weights" / "goldens")
    parser.add_argument("--write", action="store_true")
    parser.add_argument("--dynmo", help="not needed here; taken so that all scripts of this folder can be called alike")
    options = parser.parse_args()
    transformers.utils.logging.disable_progress_bar()
    failed = False
    for name in MODELS:
        with tempfile.TemporaryDirectory() as scratch:
            folder = pathlib.Path(scratch) / name
            folder.mkdir()
            make(name, folder)
            if options.write:
                shutil.rmtree(options.goldens / name, ignore_errors=True)
                shutil.copytree(folder, options.goldens / name)
                print(f"wrote {options.goldens / name}")
                continue
            why = difference(folder, options.goldens / name)
            print(f"PASS golden {name}" if why is None else f"FAIL golden {name}: {why}", flush=True)
            failed = failed or why is not None
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
