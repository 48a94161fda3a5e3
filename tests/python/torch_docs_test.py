# SPDX-License-Identifier: Apache-2.0
"""The blocks of README.md and docs/torch.md run as they stand, and so does the example."""
import doctest
import importlib
import json
import os
import pathlib
import pkgutil
import re
import unittest

import torch

import dynmo.torch
import torch_cases
from support import ROOT, Case
from torch_support import RankCase

CASE = {"family": "llama", "micro_batches": 8}


class Blocks(Case):
    def test_run(self):
        os.chdir(self.folder)
        self.addCleanup(os.chdir, pathlib.Path(__file__).parent)
        for page in ("README.md", "docs/torch.md"):
            text = (ROOT / page).read_text()
            blocks = [block for block in re.findall(r"^```python\n(.*?)^```$", text, re.DOTALL | re.MULTILINE) if ">>>" not in block]
            self.assertTrue(blocks, page)
            for block in blocks:
                model, optimizer = torch_cases.make(CASE)
                names = {"model": model, "optimizer": optimizer, "scheduler": torch_cases.make_scheduler(optimizer)}
                names["batches"] = [torch_cases.batch_of(CASE, step) for step in range(2)]
                before = [parameter.detach().clone() for parameter in model.parameters()]
                exec(compile(block, page, "exec"), names)
                self.assertFalse(all(map(torch.equal, before, model.parameters())), page)

    def test_examples_of_the_modules(self):
        for module in pkgutil.iter_modules(dynmo.torch.__path__, "dynmo.torch."):
            self.assertEqual(doctest.testmod(importlib.import_module(module.name)).failed, 0, module.name)


class Examples(RankCase):
    def run_example(self, ranks, name, *words):
        self.run_ranks(ranks, f"../../examples/torch/{name}.py", "--steps", 3, *words, torchrun=True)

    def test_run_under_torchrun(self):
        out = self.folder / "out"
        self.run_example(2, "train", "--freeze-at", 1, "--out", out)
        self.assertTrue((out / "model.safetensors").exists())
        self.run_example(2, "layers", "--save", self.folder / "saved")
        self.run_example(3, "layers", "--load", self.folder / "saved")
        self.run_example(2, "adviser", "--out", self.folder / "advice")
        keys = json.loads((self.folder / "advice" / "torchtitan.json").read_text())["parallelism"]
        self.assertEqual(sum(keys["module_fqns_per_model_part"], []), [str(i) for i in range(8)])


if __name__ == "__main__":
    unittest.main()
