# SPDX-License-Identifier: Apache-2.0
"""The environment of the tests of dynmo.torch: a model of transformers trains, and ranks that have reached each other end."""
import subprocess
import sys
import unittest

import torch
import transformers

from torch_support import environment, free_port

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

    def test_groups_end_before_the_interpreter(self):
        for group in ("own", "ours"):
            place = environment(WORLD_SIZE="2", MASTER_PORT=str(free_port()))
            ranks = [subprocess.Popen([sys.executable, "-c", EXIT, group], stderr=subprocess.PIPE, text=True, env={**place, "RANK": str(rank)})
                     for rank in range(2)]
            said = [rank.communicate(timeout=100)[1] for rank in ranks]
            self.assertEqual([rank.returncode for rank in ranks], [0, 0], (group, said))


if __name__ == "__main__":
    unittest.main()
