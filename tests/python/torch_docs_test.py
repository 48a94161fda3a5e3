# SPDX-License-Identifier: Apache-2.0
"""The blocks of README.md and docs/torch.md run as they stand, and so does the example."""
import doctest
import importlib
import json
import os
import pathlib
import pkgutil
import re
import subprocess
import sys
import unittest

import torch

import dynmo.torch
import torch_cases
from support import ROOT, Case
from torch_support import RankCase, environment

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
        self.run_ranks(ranks, f"../../examples/torch/{name}.py", "--steps", 3, *words)

    def test_runs_under_torchrun(self):
        words = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2", ROOT / "examples/torch/train.py"]
        words += ["--steps", "3", "--freeze-at", "1", "--out", self.folder / "out"]
        done = subprocess.run([sys.executable, *words], capture_output=True, text=True, timeout=400, env=environment(), check=False)
        self.assertEqual(done.returncode, 0, (done.stdout + done.stderr)[-3000:])
        self.assertTrue((self.folder / "out" / "model.safetensors").exists())

    def test_run_as_ranks_of_a_launcher(self):
        self.run_example(2, "layers", "--save", self.folder / "saved")
        self.run_example(3, "layers", "--load", self.folder / "saved")
        self.run_example(2, "adviser", "--out", self.folder / "advice")
        keys = json.loads((self.folder / "advice" / "torchtitan.json").read_text())["parallelism"]
        self.assertEqual(sum(keys["module_fqns_per_model_part"], []), [str(i) for i in range(8)])


if __name__ == "__main__":
    unittest.main()
