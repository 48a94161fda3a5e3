# SPDX-License-Identifier: Apache-2.0
"""Trains PEFT's LoRA adapters by transformers' Trainer on a pipeline: torchrun --nproc-per-node=2 examples/torch/lora.py [OUT]."""
import sys

import torch
from peft import LoraConfig, get_peft_model
from transformers import LlamaConfig, LlamaForCausalLM, TrainingArguments

from dynmo.torch import PipelineTrainer as Trainer  # dynmo: instead of `from transformers import Trainer`

out = sys.argv[1] if len(sys.argv) > 1 else "lora"
torch.manual_seed(0)
model = get_peft_model(LlamaForCausalLM(LlamaConfig(
    hidden_size=64, intermediate_size=128, num_hidden_layers=4, num_attention_heads=4, num_key_value_heads=4, vocab_size=128)),
    LoraConfig(r=4, lora_alpha=8, lora_dropout=0.0, target_modules=["q_proj", "v_proj"], task_type="CAUSAL_LM"))
data = [{"input_ids": row, "labels": row} for row in torch.randint(0, 128, (64, 32))]
arguments = TrainingArguments(
    output_dir=out, max_steps=10, per_device_train_batch_size=2, gradient_accumulation_steps=4, learning_rate=1e-2, logging_steps=1,
    save_steps=5, gradient_checkpointing=True, report_to="none", use_cpu=True)
trainer = Trainer(model=model, args=arguments, train_dataset=data, pipeline={"run": f"{out}/run"})  # for `dynmo report OUT/run`
trainer.train()
trainer.save_model()
