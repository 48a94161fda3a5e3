# SPDX-License-Identifier: Apache-2.0
"""dynmo.torch on a device, which is the strict one: the bits of the plain loop on it, the CPU's losses, and each wait counted."""
import json
import os
import pathlib
import unittest

import torch
from safetensors.torch import load_file

from drawn import drawn
from torch_cases import LLAMA
from torch_support import RankCase

COMMON = {"device": "strict", "micro_batches": 4, "steps": 7, "clip": 1.0}  # layers move before steps 0, 3 and 6


class DeviceCase(RankCase):
    def compare(self, cases, ranks, share=1e-5, **options):
        """Also with the CPU's losses, beside which each step has a norm."""
        super().compare(cases, ranks, **options)
        of_cpu = self.train_plainly([{**case, "device": "cpu"} for case in cases])
        for index, (case, wanted) in enumerate(zip(cases, of_cpu, strict=True)):
            part = torch.load(self.folder / f"rank-0-{index}.pt")
            self.assertGreaterEqual(len(set(part["cuts"])), 2)
            for found, loss in zip(part["losses"][1::2], wanted["losses"][1::2], strict=True):
                self.assertLess(abs(found - loss), share * loss, case)

    def run_task(self, ranks, task):
        self.run_ranks(ranks, "torch_device_rank.py", task, self.folder)


class Steps(DeviceCase):
    """Also in the late mode, in which operators run when somebody waits for them."""

    def test_families_have_the_bits_of_the_plain_loop_under_any_cut(self):
        kinds = zip(("llama", "gpt2", "qwen3", "gemma2"), ("fused", "foreach", "sgd", "loop"))
        cases = [{**COMMON, "family": family, "optimizer": kind, "seed": index} for index, (family, kind) in enumerate(kinds)]
        for ranks in (3, 2):
            self.compare(cases if ranks == 3 else cases[:1], ranks)

    def test_waits_are_those_for_messages_and_one_a_step(self):
        self.run_task(2, "waits")
        print([(self.folder / f"waits-{rank}").read_text() for rank in range(2)])


class Ways(DeviceCase):
    def test_ways_to_train(self):
        llama = {**COMMON, "family": "llama", "seed": 5}
        cases = [
            {**llama, "freeze": True, "freeze_at": 3, "thaw_at": 6},
            {**llama, "items": True, "accumulation": 2},
            {**llama, "checkpointing": "plain"},
            {**llama, "apart": True},
            {**llama, "adapters": True},
            {**llama, "family": "gpt2", "config": {"tie_word_embeddings": True}, "canonical": True},
        ]
        self.compare([*cases[:1], *drawn(cases[1:], 2, "the ways to train on a device")], 2)

    def test_a_loss_of_the_routers_of_all_blocks(self):
        self.compare([{**COMMON, "family": "mixtral", "config": {"output_router_logits": True}, "seed": 9}], 2)
        self.run_task(2, "waits of routers")

    def test_autocast(self):
        self.compare([{**COMMON, "family": "llama", "seed": 6, "autocast": True}], 2, share=3e-3)

    def test_replicas(self):
        self.compare([{**COMMON, "family": "llama", "seed": 8, "replicas": 2}], 4)

    def test_checkpoints_go_to_the_cpu_and_back(self):
        self.run_task(2, "checkpoints")
        [plain] = self.train_plainly([{**LLAMA, "scheduled": False}])
        for rank in range(2):
            found = json.loads((self.folder / f"losses-{rank}.json").read_text())
            for loss, of_cpu in zip(found, plain["losses"], strict=True):
                self.assertLess(abs(loss - of_cpu), 1e-5 * of_cpu)
        weights = load_file(self.folder / "weights" / "model.safetensors")
        for name, value in plain["weights"].items():
            torch.testing.assert_close(weights[name], value, rtol=1e-3, atol=1e-4)

    def test_dropout_does_not_depend_on_the_cut(self):
        for ranks in (2, 3):
            self.run_task(ranks, "dropout")
        two, three = (json.loads((self.folder / f"dropout-{ranks}.json").read_text()) for ranks in (2, 3))
        self.assertEqual(two, three)

    def test_others_go_on_after_a_loss(self):
        processes = self.start(3, "torch_device_rank.py", "survives", self.folder)
        said = [process.communicate(timeout=200)[0] for process in processes]
        self.assertEqual([process.returncode for process in processes], [0, 0, -9], said)
        wanted = json.loads((self.folder / "survived-0.json").read_text())
        self.assertEqual(json.loads((self.folder / "survived-1.json").read_text()), wanted)
        self.run_ranks(1, "torch_device_rank.py", "plain", self.folder)
        self.assertEqual(json.loads((self.folder / "plain.json").read_text()), wanted)

    def test_what_cannot_work_is_refused_in_one_line(self):
        self.run_task(2, "refuses")

    def test_the_adviser_waits_when_it_is_asked(self):
        self.run_task(1, "adviser")


if __name__ == "__main__":
    assert pathlib.Path(os.environ["STRICT_DEVICE"]).exists()
    torch.set_num_threads(1)
    unittest.main()
