# SPDX-License-Identifier: Apache-2.0
"""Runs transformers' Trainer on a pipeline: torchrun --nproc-per-node=2 examples/torch/trainer.py [OUT]. One line says so."""
import sys

import torch
from transformers import LlamaConfig, LlamaForCausalLM, TrainingArguments

from dynmo.torch import PipelineTrainer as Trainer  # dynmo: instead of `from transformers import Trainer`

torch.manual_seed(0)
model = LlamaForCausalLM(LlamaConfig(
    hidden_size=64, intermediate_size=128, num_hidden_layers=4, num_attention_heads=4, num_key_value_heads=4, vocab_size=128))
data = [{"input_ids": row, "labels": row} for row in torch.randint(0, 128, (64, 32))]
arguments = TrainingArguments(
    output_dir=sys.argv[1] if len(sys.argv) > 1 else "trainer", max_steps=10, per_device_train_batch_size=2,
    gradient_accumulation_steps=4, logging_steps=1, save_steps=5, report_to="none", use_cpu=True)
trainer = Trainer(model=model, args=arguments, train_dataset=data)
trainer.train()
trainer.save_model()
