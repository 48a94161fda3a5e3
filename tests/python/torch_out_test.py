# SPDX-License-Identifier: Apache-2.0
"""Checkpoints and Hugging Face's folders that ranks write, of any layout; lists of modules; ranks that differ."""
import unittest

import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

import torch_cases
from drawn import drawn
from torch_out_rank import CASES
from torch_support import RankCase


def plain(case, steps):
    """The user's loop; the loss of a batch for evaluation is the last."""
    model, _, losses = torch_cases.train_plainly({**case, "steps": steps})
    model.eval()
    total = torch.zeros(())
    with torch.no_grad():
        for part in torch_cases.micro_batches_of(case, torch_cases.batch_of(case, 99)):
            total = total + model(**part).loss / 4
    ordered = [value for pair in zip(losses[1::2], losses[::2]) for value in pair] if "clip" in case else losses
    return model, [*ordered, total.item()]


class Out(RankCase):
    def check(self, name, ranks, steps, first):
        model, losses = plain(CASES[name], steps)
        if name == "tied":
            model.lm_head.weight = model.model.embed_tokens.weight
        skipped = first * (2 if "clip" in CASES[name] else 1)
        for rank in range(ranks):
            self.assertEqual(torch.load(self.folder / f"{name}-losses-{ranks}-{steps}-{rank}.pt"), losses[skipped:])
        model.save_pretrained(self.folder / f"{name}-plain")
        wanted = load_file(self.folder / f"{name}-plain" / "model.safetensors")
        folder = self.folder / f"{name}-{ranks}-{steps}"
        found = load_file(folder / "model.safetensors")
        self.assertEqual(found.keys(), wanted.keys())
        self.assertEqual([key for key in wanted if not torch.equal(found[key], wanted[key])], [])
        read = AutoModelForCausalLM.from_pretrained(folder)
        for key, parameter in read.named_parameters():
            self.assertTrue(torch.equal(parameter, model.get_parameter(key)), key)

    def test_a_checkpoint_of_three_ranks_goes_on_anywhere(self):
        self.run_ranks(3, "torch_out_rank.py", self.folder, "more", 0, 4)
        for name in CASES:
            self.check(name, 3, 4, 0)
        for ranks in drawn((1, 2, 4), 1, "the ranks that go on"):
            with self.subTest(ranks=ranks):
                self.run_ranks(ranks, "torch_out_rank.py", self.folder, "run", 4, 7)
                for name in CASES:
                    self.check(name, ranks, 7, 4)


if __name__ == "__main__":
    torch.set_num_threads(1)
    unittest.main()
