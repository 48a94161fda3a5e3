# SPDX-License-Identifier: Apache-2.0
"""A Trainer on two ranks has the logs, weights and optimizer state of transformers' own on one process, bit for bit."""
import importlib.util
import json
import os
import subprocess
import unittest

import torch

from torch_support import RankCase

MISSING = "accelerate is not installed, which transformers' Trainer wants; scripts/setup torch installs it"


@unittest.skipUnless(importlib.util.find_spec("accelerate"), MISSING)
class Trainers(RankCase):
    def test_equal_the_plain_one(self):
        self.run_ranks(2, "torch_trainer_rank.py", self.folder)
        wanted = torch.load(self.folder / "plain.pt")
        parts = [torch.load(self.folder / f"rank-{rank}.pt") for rank in range(2)]
        self.assertEqual([part["cut"] for part in parts], ["4|2"] * 2)
        self.assert_same(wanted, [part["whole"] for part in parts])
        self.check_records(wanted["losses"])
        # The last line has the mean loss since the start, or since the resume.
        wanted["losses"].pop()
        for kind in ("piped", "plain"):
            for part in parts:
                part[kind]["losses"].pop()
            with self.subTest(resumed=kind):
                self.assert_same(wanted, [part[kind] for part in parts])
        self.check_tied([part["tied"] for part in parts])

        for step in (4, 8):
            files = [self.folder / kind / f"checkpoint-{step}" / "model.safetensors" for kind in ("plain", "piped")]
            self.assertEqual(*(file.read_bytes() for file in files))
        self.assertTrue((self.folder / "example" / "model.safetensors").exists())
        state = json.loads((self.folder / "example" / "checkpoint-10" / "trainer_state.json").read_text())
        self.assertEqual([log["step"] for log in state["log_history"]], list(range(1, 11)))

    def check_tied(self, parts):
        """A checkpoint of the plain Trainer has one parameter for embedding and head, and each rank two. They stay equal."""
        self.run_ranks(1, "torch_trainer_rank.py", self.folder, "twice")
        wanted, _ = torch.load(self.folder / "plain-tied.pt")
        embedding, head = "model.embed_tokens.weight", "lm_head.weight"
        for key in ("weights", "state"):
            wanted[key][head] = wanted[key][embedding]
        for begun in [*(begun for begun, _ in parts), torch.load(self.folder / "twice.pt")]:  # each rank still has all layers
            self.assert_same({**wanted, "losses": begun["losses"]}, [begun])
        ended = {name: weight for _, end in parts for name, weight in end["weights"].items()}
        self.assertTrue(torch.equal(ended[head], ended[embedding]))
        self.assertFalse(torch.equal(ended[head], wanted["weights"][head]))

    def check_records(self, logs):
        """Of each rank, with the losses of the logs, each the mean over four steps."""
        for rank in range(2):
            lines = (self.folder / "run" / "records" / f"rank-{rank}.jsonl").read_text(encoding="utf-8").splitlines()
            records = [json.loads(line) for line in lines]
            self.assertEqual([record["step"] for record in records], list(range(10)))
            for log in (log for log in logs if "loss" in log and log["step"] % 4 == 0):
                losses = [record["loss"] for record in records[log["step"] - 4 : log["step"]]]
                self.assertAlmostEqual(sum(losses) / 4, float(log["loss"]), places=3)
            shorter = [record["step"] for record in records if record["step_s"] is None]
            self.assertEqual(shorter, [2, 5, 8])  # of the end of the data, whose times say nothing
        done = subprocess.run([os.environ["DYNMO"], "report", self.folder / "run"], capture_output=True, text=True, check=False)
        self.assertEqual((done.returncode, done.stderr), (0, ""))


if __name__ == "__main__":
    unittest.main()
