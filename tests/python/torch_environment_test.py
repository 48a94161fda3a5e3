# SPDX-License-Identifier: Apache-2.0
"""The environment of the tests of dynmo.torch: a model of transformers trains, and ranks of torchrun reach each other."""
import pathlib
import subprocess
import sys
import tempfile
import unittest

import torch
import transformers

RANK = """
import torch, torch.distributed as dist
dist.init_process_group("gloo")
cells = torch.full((3,), float(dist.get_rank() + 1))
dist.all_reduce(cells)
assert cells.tolist() == [3, 3, 3], cells
dist.destroy_process_group()
"""


class Environment(unittest.TestCase):
    def test_trains_a_model_of_transformers(self):
        torch.manual_seed(1)
        config = transformers.LlamaConfig(
            vocab_size=64, hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=2, num_key_value_heads=2)
        model = transformers.AutoModelForCausalLM.from_config(config)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, fused=True)
        tokens = torch.randint(64, (2, 16))
        losses = []
        for _ in range(4):
            loss = model(input_ids=tokens, labels=tokens).loss
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.item())
        self.assertEqual(losses, sorted(losses, reverse=True))

    def test_runs_ranks(self):
        with tempfile.TemporaryDirectory() as folder:
            script = pathlib.Path(folder, "rank.py")
            script.write_text(RANK)
            command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2", script]
            done = subprocess.run(command, capture_output=True, text=True, timeout=100, check=False)
        self.assertEqual(done.returncode, 0, done.stderr)


if __name__ == "__main__":
    unittest.main()
