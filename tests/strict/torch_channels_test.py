# SPDX-License-Identifier: Apache-2.0
"""dynmo.torch whose tensors go from device to device, by a stand-in of NCCL: the bits of the plain loop and of Gloo's path, and mistakes found."""
import contextlib
import json
import os
import pathlib
import signal
import subprocess
import sys
import tempfile
import unittest

import torch
from safetensors.torch import load_file

from torch_support import RankCase, environment

HERE = pathlib.Path(__file__).resolve().parent


class Channels(RankCase):
    @classmethod
    def setUpClass(cls):
        """All ranks are forked from one process, since imports take longer than the training."""
        cls.place = pathlib.Path(cls.enterClassContext(tempfile.TemporaryDirectory()))
        words = [sys.executable, HERE / "torch_channels_rank.py", cls.place]
        parent = subprocess.Popen(words, cwd=HERE, env=environment(), start_new_session=True)
        try:
            assert parent.wait(timeout=250) == 0
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(parent.pid, signal.SIGKILL)
        cls.codes = json.loads((cls.place / "codes.json").read_text(encoding="utf-8"))
        cls.cases = torch.load(cls.place / "cases.pt")

    def said(self, name):
        paths = [*self.place.glob(f"{name}-*.txt"), *(self.place / name).glob("*.txt")]
        return "\n".join(path.read_text(encoding="utf-8")[-2000:] for path in sorted(paths))

    def load(self, name):
        return torch.load(self.place / name)

    def test_bits_are_those_of_the_plain_loop_and_losses_near_the_cpus(self):
        """Layers move every third step. One of the tasks has one device for all ranks, and so Gloo."""
        for name, (ranks, cases) in self.cases["tasks"].items():
            alone = "three" if name == "through host memory" else name
            for index, case in enumerate(cases):
                with self.subTest(**case):
                    parts = [self.load(f"{name}-{rank}-{index}.pt") for rank in range(ranks)]
                    self.assertGreaterEqual(len(set(parts[0]["cuts"])), 2)
                    size = len(parts) // case.get("replicas", 1)
                    for first in range(0, len(parts), size):
                        self.assert_same(self.load(f"plain-{alone}-{index}.pt"), parts[first : first + size])
                    share = 3e-3 if "autocast" in case else 1e-5
                    for found, of_cpu in zip(parts[0]["losses"][1::2], self.load(f"cpu-{alone}-{index}.pt")[1::2], strict=True):
                        self.assertLess(abs(found - of_cpu), share * of_cpu, case)

    def test_ranks_do_what_they_should(self):
        for name, (ranks, _) in self.cases["tasks"].items():
            with self.subTest(name):
                self.assertEqual(self.codes[name], [9, 0] if name == "loses" else [0] * ranks, self.said(name))

    def test_checkpoints_go_to_the_cpu_and_back(self):
        wanted = self.load("cpu-checkpoints.pt")
        for rank in range(2):
            found = json.loads((self.place / "checkpoints" / f"losses-{rank}.json").read_text())
            for loss, of_cpu in zip(found, wanted["losses"], strict=True):
                self.assertLess(abs(loss - of_cpu), 1e-5 * of_cpu)
        weights = load_file(self.place / "checkpoints" / "weights" / "model.safetensors")
        for name, parameter in wanted["weights"].items():
            torch.testing.assert_close(weights[name], parameter, rtol=1e-3, atol=1e-4)

    def test_others_go_on_after_a_loss_and_new_ones_join(self):
        for case in self.cases["losses"]:
            with self.subTest(case["name"]):
                victims = [victim for victim, _, _ in case["kills"]]
                count = case["ranks"] + len(case.get("joins", ()))
                codes = [-signal.SIGKILL if rank in victims else 0 for rank in range(count)]
                self.assertEqual(self.codes[case["name"]][:count], codes, self.said(case["name"]))
                wanted = self.load(f"{'replicas lost' if 'replicas' in case else 'lost'}/plain.pt")
                parts = [self.load(f"{case['name']}/rank-{rank}.pt") for rank in range(count) if rank not in victims]
                for part in parts:  # one that has joined has no losses of the steps before
                    self.assertEqual(part["losses"], wanted["losses"][-len(part["losses"]) :])
                    part["losses"] = wanted["losses"]
                    some = {name: wanted["weights"][name] for name in part["weights"]}
                    self.assert_same({**wanted, "weights": some, "state": {name: wanted["state"][name] for name in some}}, [part])
                self.assertEqual(sum(len(part["weights"]) for part in parts), len(wanted["weights"]) * case.get("replicas", 1))


if __name__ == "__main__":
    unittest.main()
