# SPDX-License-Identifier: Apache-2.0
"""Trains a model of transformers on a pipeline whose layers move when half of it freezes.

torchrun --nproc-per-node=2 examples/torch/train.py [--steps N] [--model FOLDER] [--out FOLDER]
Without --model a small random Llama. The lines marked with "dynmo" are all that a loop of one process lacks.
"""
import argparse
from typing import Any

import torch
import torch.distributed as dist
from transformers import AutoConfig, AutoModelForCausalLM

import dynmo.torch as dt  # dynmo

LLAMA: dict[str, Any] = {
    "hidden_size": 192, "num_hidden_layers": 12, "num_attention_heads": 6, "num_key_value_heads": 6, "intermediate_size": 512,
    "vocab_size": 512, "max_position_embeddings": 256, "tie_word_embeddings": False,
}


def make_model(path: str) -> Any:
    torch.manual_seed(0)
    models: Any = AutoModelForCausalLM
    if path:
        return models.from_pretrained(path)
    return models.from_config(AutoConfig.for_model("llama", **LLAMA))


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--freeze-at", type=int, default=20)
    parser.add_argument("--model", default="")
    parser.add_argument("--out", default="")
    options = parser.parse_args()
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    model = make_model(options.model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True)
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: min(1.0, (step + 1) / 10))
    pipe = dt.Pipeline(model, optimizer, micro_batches=8, steps=options.steps)  # dynmo
    tokens = torch.Generator().manual_seed(1)
    for step in range(options.steps):
        if step == options.freeze_at:
            model.get_input_embeddings().requires_grad_(False)
            for block in model.model.layers[: len(model.model.layers) // 2]:
                block.requires_grad_(False)
        ids = torch.randint(0, model.config.vocab_size, (16, 64), generator=tokens)
        loss = pipe.step(input_ids=ids, labels=ids)  # dynmo: instead of model(...).loss and backward()
        pipe.clip_grad_norm_(1.0)  # dynmo: instead of torch.nn.utils.clip_grad_norm_
        optimizer.step()
        scheduler.step()
        optimizer.zero_grad()
        move = pipe.balance()  # dynmo
        if dist.get_rank() == 0 and (move or step % 10 == 0):
            print(f"step {step:4}  loss {loss.item():.4f}" + (f"  {move}" if move else ""), flush=True)
    if options.out:
        pipe.save_pretrained(options.out)  # dynmo: instead of model.save_pretrained
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
