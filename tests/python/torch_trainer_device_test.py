# SPDX-License-Identifier: Apache-2.0
"""A Trainer on the strict device: the bits of transformers' own there, the CPU's losses, and each wait counted."""
import importlib.util
import os
import unittest

import torch

from torch_support import RankCase
from torch_trainer_test import MISSING

NO_DEVICE = "STRICT_DEVICE names no library of a strict device; ctest -L strict sets it"


@unittest.skipUnless(os.environ.get("STRICT_DEVICE"), NO_DEVICE)
@unittest.skipUnless(importlib.util.find_spec("accelerate"), MISSING)
class TrainersOnADevice(RankCase):
    def run_task(self, ranks, task):
        self.run_ranks(ranks, "torch_trainer_device_rank.py", task, self.folder)

    def read(self, name):
        return torch.load(self.folder / f"{name}.pt")

    def assert_near(self, logs, of_cpu, share):
        self.assertEqual([log.keys() for log in logs], [log.keys() for log in of_cpu])
        for log, other in zip(logs, of_cpu, strict=True):
            for key, value in log.items():
                room = share if "loss" in key else 10 * share if key == "grad_norm" else 0.0
                self.assertLessEqual(abs(value - other[key]), room * abs(other[key]), (key, log, other))

    def assert_alike(self, wanted, parts):
        """The last line of a resumed run has the mean loss since then."""
        shortened = {**wanted, "losses": wanted["losses"][:-1]}
        self.assert_same(shortened, [{**part, "losses": part["losses"][:-1]} for part in parts])

    def test_each_rank_has_a_device(self):
        self.run_task(2, "owns")
        plain, of_cpu = self.read("plain"), self.read("cpu")
        parts = [self.read(f"rank-{rank}") for rank in range(2)]
        self.assertEqual([part["cut"] for part in parts], ["4|2"] * 2)
        self.assert_same(plain, [part["whole"] for part in parts])
        self.assert_near(plain["losses"], of_cpu["losses"], 1e-5)
        for written in ("piped on strict", "plain on strict"):
            with self.subTest(resumed=written):
                self.assert_alike(plain, [part[written] for part in parts])
        for written in ("cpu on strict", "piped on cpu"):
            for part in parts:
                with self.subTest(resumed=written):
                    self.assert_near(part[written]["losses"][:-1], of_cpu["losses"][:-1], 1e-5)

    def test_ranks_share_a_device_and_draw_alike_under_each_cut(self):
        for ranks in (2, 3):
            self.run_task(ranks, "shares")
        wanted = {}
        for ranks in (2, 3):
            parts = [self.read(f"shared-{ranks}-{rank}") for rank in range(ranks)]
            whole = [part["whole"] for part in parts]
            wanted = wanted or {key: whole[0][key] if key == "losses" else {**whole[0][key], **whole[1][key]} for key in whole[0]}
            self.assert_same(wanted, whole)
            self.assert_alike(wanted, [part["resumed"] for part in parts])
        self.assertGreater(parts[0]["cut"].count("|"), 1)

    def test_waits_are_those_for_messages_and_two_a_step(self):
        self.run_task(2, "waits")
        self.assertEqual([(self.folder / f"waits-{rank}").read_text() for rank in range(2)], ["4 messages"] * 2)

    def test_autocast(self):
        self.run_task(2, "autocasts")
        plain, parts = self.read("plain"), [self.read(f"rank-{rank}") for rank in range(2)]
        self.assert_same(plain, [part["whole"] for part in parts])
        self.assert_near(plain["losses"], self.read("cpu")["losses"], 3e-3)


if __name__ == "__main__":
    torch.set_num_threads(1)
    unittest.main()
