# SPDX-License-Identifier: Apache-2.0
"""A Trainer on two ranks has the logs, weights and optimizer state of transformers' own on one process, bit for bit."""
import importlib.util
import json
import unittest

import torch

from torch_support import RankCase

MISSING = "accelerate is not installed, which transformers' Trainer wants; scripts/setup torch installs it"


@unittest.skipUnless(importlib.util.find_spec("accelerate"), MISSING)
class Trainers(RankCase):
    def test_equal_the_plain_one(self):
        self.run_ranks(2, "torch_trainer_rank.py", self.folder, torchrun=True)
        wanted = torch.load(self.folder / "plain.pt")
        parts = [torch.load(self.folder / f"rank-{rank}.pt") for rank in range(2)]
        self.assertEqual([part["cut"] for part in parts], ["4|2"] * 2)
        self.assert_same(wanted, [part["whole"] for part in parts])
        # The last line has the mean loss since the start, or since the resume.
        wanted["losses"].pop()
        for kind in ("piped", "plain"):
            for part in parts:
                part[kind]["losses"].pop()
            with self.subTest(resumed=kind):
                self.assert_same(wanted, [part[kind] for part in parts])

        for step in (4, 8):
            files = [self.folder / kind / f"checkpoint-{step}" / "model.safetensors" for kind in ("plain", "piped")]
            self.assertEqual(*(file.read_bytes() for file in files))
        self.assertTrue((self.folder / "example" / "model.safetensors").exists())
        state = json.loads((self.folder / "example" / "checkpoint-10" / "trainer_state.json").read_text())
        self.assertEqual([log["step"] for log in state["log_history"]], list(range(1, 11)))


if __name__ == "__main__":
    unittest.main()
