# SPDX-License-Identifier: Apache-2.0
"""Elastic runs on a device whose ranks send from device to device: sizes change, ranks join and are killed, and all losses and
checkpoints are those of an undisturbed run that sends through host memory.

DYNMO is a dynmo that has the strict device. It makes channels as DYNMO_STRICT_CHANNELS says (strict_kind.cpp). A rank that waits on
one for a rank that was killed waits until the channel is aborted.
"""
import os
import unittest
from unittest import mock

from device_case import DeviceCase
from elastic_case import events


def channels(how="1", **more):
    return mock.patch.dict(os.environ, {"DYNMO_STRICT_CHANNELS": how, **more})


class ChannelsOnDevice(DeviceCase):
    # A rank that hangs ends after timeout_s, and with it the test.
    SETTINGS = (*DeviceCase.SETTINGS, "run.device=strict", "pipeline.timeout_s=20")
    BY_CHANNELS = "activations and gradients pass by NCCL: "

    def test_each_generation_has_its_own(self):
        with channels():
            process = self.start("sizes", 3, *self.ENDLESS)
            self.assertIn("drained", self.done("sizes", "drain", "1"))
            joiner = self.join("sizes")
            self.until(process, lambda: self.ranks("sizes") == [0, 2, 3])
            output = self.stopped("sizes", process)
            self.assertIn("joined as rank 3", self.ended(joiner, code=130))
        self.assertIn(self.BY_CHANNELS + "NCCL, a device for each rank", output)
        self.assertEqual([len(event["ranks"]) for event in events(self.folder / "sizes", "size")], [2, 3])
        self.assert_as_endless_twin("sizes")

    def test_a_killed_rank_is_not_waited_for(self):
        for number in range(3):
            with self.subTest(number), channels():
                run = f"killed-{number}"
                output = self.hunted(run, 3, [number], first=5)
                self.assertEqual(output.count(self.BY_CHANNELS), 2, output)  # before and after the loss
                self.assertEqual(self.recoveries(run, "from"), ["snapshot"])
                self.assert_as_twin(run, "twin")

    def test_one_of_two_that_is_killed_leaves_one_alone(self):
        with channels():
            output = self.hunted("alone", 2, [1], first=5)
        self.assertIn("through host memory: there is one rank", output)
        self.assert_as_twin("alone", "twin")

    def test_a_rank_that_hangs_on_its_device_is_lost_too(self):
        """No channel hears the abort. So a rank that waits on one hangs, if there is such a rank, and ends; the others go on."""
        with channels("deaf"):
            self.hunted("deaf", 3, [2], "pipeline.timeout_s=3", first=5)
        self.assert_as_twin("deaf", "twin")

    def test_the_first_lines_say_why(self):
        for how, more, wanted in (
                ("shared", {}, "through host memory: 2 ranks share 1 device: NCCL refuses that, NCCL 2.30 and newer allow it"),
                ("shared", {"DYNMO_STRICT_NCCL": "23003"},
                 "through host memory: 2 ranks share 1 device: NCCL 2.30.3 allows it where NCCL_MULTI_RANK_GPU_ENABLE=1, which rank 0 lacks"),
                ("shared", {"DYNMO_STRICT_NCCL": "23003", "NCCL_MULTI_RANK_GPU_ENABLE": "1"},
                 "by NCCL: NCCL 2.30.3, 2 ranks share 1 device")):
            with self.subTest(wanted), channels(how, **more):
                done = self.succeed(self.command("-n", "2", "--overwrite", run="said", extra=(*self.SETTINGS, "train.steps=3")))
                self.assertIn("activations and gradients pass " + wanted, done.stdout + done.stderr)
                self.assertEqual(sorted(self.losses_of("said")), [0, 1, 2])

    def test_early_exit_sends_through_host_memory(self):
        with channels():
            done = self.run_command(self.command("-n", "2", run="exits", extra=("run.device=strict", "train.steps=3", "early_exit.enabled=true",
                                                                                 "early_exit.exit_every=1", "early_exit.warm_up=1")))
        self.assertEqual(done.returncode, 0, done.stderr)
        self.assertIn("pass through host memory: the number of rows changes", done.stdout + done.stderr)


if __name__ == "__main__":
    unittest.main()
