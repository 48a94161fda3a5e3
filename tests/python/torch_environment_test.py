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

# Nobody frees what is in a circle: the group is to end all the same, before the interpreter does.
EXIT = """
import atexit, os, sys, weakref
kept = []
atexit.register(lambda: kept[0]() is None or os._exit(3))
import torch.distributed as dist
from dynmo.torch.ranks import Ranks
if sys.argv[1] == "own":
    dist.init_process_group("gloo")
ranks = Ranks(60)
ranks.circle = ranks
kept.append(weakref.ref(ranks._group))
assert ranks.gather(ranks.rank) == [0, 1]
if sys.argv[1] == "own":
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

    def run_ranks(self, text, *words):
        with tempfile.TemporaryDirectory() as folder:
            script = pathlib.Path(folder, "rank.py")
            script.write_text(text)
            command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2", script, *words]
            done = subprocess.run(command, capture_output=True, text=True, timeout=100, check=False)
        self.assertEqual(done.returncode, 0, done.stderr)

    def test_runs_ranks(self):
        self.run_ranks(RANK)

    def test_groups_end_before_the_interpreter(self):
        for group in ("own", "ours"):
            with self.subTest(group=group):
                self.run_ranks(EXIT, group)


if __name__ == "__main__":
    unittest.main()
