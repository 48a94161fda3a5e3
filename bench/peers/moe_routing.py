#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""How evenly the routers of transformers' Mixtral use their experts in a small training from scratch, beside which ours is held.

A Mixtral of 8 blocks of 96 with 8 experts of 128, 2 a token, on 8 x 4 sequences of 128 tokens a step, with our initial stds, learning
rate, clipping, weight decay and auxiliary loss of each block. A line a step: loss, norm of the gradient, MaxVio by block (the fullest
expert / the mean - 1), entropy by block, and the share of the auxiliary loss in the norm of each router's gradient.

    bench/peers/moe_routing.py --data data/python --seed 1 --steps 100 > peer-1.jsonl

The data are those of `dynmo data`. Needs a Python with PyTorch 2.11 and transformers: $DYNMO_CACHE/peers/bin/python (`scripts/setup peers`).
"""
import argparse
import json
import math
from pathlib import Path

import numpy
import torch
import transformers

BLOCKS, HIDDEN, EXPERTS, CHOSEN, WIDTH, TOKENS = 8, 96, 8, 2, 128, 128
MICRO_BATCHES, SEQUENCES, VOCABULARY = 8, 4, 257


def mixtral():
    config = transformers.MixtralConfig(
        vocab_size=VOCABULARY, hidden_size=HIDDEN, intermediate_size=WIDTH, num_hidden_layers=BLOCKS, num_attention_heads=4,
        num_key_value_heads=2, num_local_experts=EXPERTS, num_experts_per_tok=CHOSEN, max_position_embeddings=TOKENS,
        rms_norm_eps=1e-5, sliding_window=None, tie_word_embeddings=False, attention_dropout=0.0)
    config._experts_implementation = "grouped_mm"
    model = transformers.MixtralForCausalLM(config)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            into_residual = name.endswith(("o_proj.weight", "down_proj"))
            if "norm" in name:
                parameter.fill_(1)
            else:
                parameter.normal_(std=0.02 / (math.sqrt(2 * BLOCKS) if into_residual else 1))
    return model


def learning_rate(options, step):
    if step < options.warmup:
        return options.rate * (step + 1) / options.warmup
    left = 0.5 * (1 + math.cos(math.pi * (step - options.warmup) / (options.schedule - options.warmup)))
    return options.rate * (0.1 + 0.9 * left)


def shares_of(scores):
    """Of each expert: assignments, probabilities; and the mean entropy of a token."""
    p = scores.float().softmax(-1)
    chosen = torch.zeros_like(p).scatter_(1, p.topk(CHOSEN, -1).indices, 1.0)
    return chosen, p, -(p * p.log()).sum(-1).mean().item()


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, required=True, help="the folder of train.bin")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--schedule", type=int, default=256, help="steps until the rate is a tenth of its peak")
    parser.add_argument("--rate", type=float, default=4e-3)
    parser.add_argument("--warmup", type=int, default=20)
    parser.add_argument("--aux", type=float, default=0.01, help="alpha of each block")
    options = parser.parse_args()
    torch.set_num_threads(1)
    torch.manual_seed(options.seed)
    model = mixtral()
    scores = []
    for layer in model.model.layers:
        layer.mlp.gate.register_forward_hook(lambda module, inputs, outputs: scores.append(outputs[0]))
    routers = [layer.mlp.gate.weight for layer in model.model.layers]
    matrices = [p for p in model.parameters() if p.dim() > 1]
    norms = [p for p in model.parameters() if p.dim() == 1]
    adam = torch.optim.AdamW([{"params": matrices, "weight_decay": 0.1}, {"params": norms, "weight_decay": 0.0}], lr=options.rate,
                             betas=(0.9, 0.95), eps=1e-8)
    data = numpy.memmap(options.data / "train.bin", dtype=numpy.uint16, mode="r")
    windows = iter(numpy.random.default_rng(options.seed).permutation((len(data) - 1) // TOKENS))
    for step in range(options.steps):
        for group in adam.param_groups:
            group["lr"] = learning_rate(options, step)
        counts, entropy, loss = torch.zeros(BLOCKS, EXPERTS), [0.0] * BLOCKS, 0.0
        by_aux = [torch.zeros_like(router) for router in routers]
        for _ in range(MICRO_BATCHES):
            texts = [data[w * TOKENS:(w + 1) * TOKENS + 1].astype(numpy.int64) for w in (next(windows) for _ in range(SEQUENCES))]
            tokens = torch.from_numpy(numpy.stack(texts))
            scores.clear()
            logits = model(tokens[:, :-1], use_cache=False).logits
            cross_entropy = torch.nn.functional.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten())
            aux = 0.0
            for block, z in enumerate(scores):
                chosen, p, of_token = shares_of(z)
                counts[block] += chosen.sum(0)
                entropy[block] += of_token / MICRO_BATCHES
                aux = aux + options.aux * EXPERTS * (chosen.mean(0) / CHOSEN * p.mean(0)).sum()
            for sum_, gradient in zip(by_aux, torch.autograd.grad(aux / MICRO_BATCHES, routers, retain_graph=True)):
                sum_ += gradient
            ((cross_entropy + aux) / MICRO_BATCHES).backward()
            loss += cross_entropy.item() / MICRO_BATCHES
        share = [(sum_.norm() / router.grad.norm()).item() for sum_, router in zip(by_aux, routers)]
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0).item()
        adam.step()
        adam.zero_grad()
        violation = (counts.max(1).values / counts.sum(1) * EXPERTS - 1).tolist()
        print(json.dumps({"step": step, "loss": loss, "gradient_norm": norm, "max_violation": violation, "entropy": entropy,
                          "aux_share": share}), flush=True)


if __name__ == "__main__":
    main()
