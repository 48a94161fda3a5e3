# SPDX-License-Identifier: Apache-2.0
"""Elastic runs on a device: ranks leave, join and are killed, and losses and checkpoints are those of an undisturbed run there.

DYNMO is a dynmo that has the device in its table, DYNMO_DEVICE its name, strict if it is not set.
"""
import os
import unittest
from unittest import mock

from device_case import DeviceCase
from elastic_case import events


class ElasticOnDevice(DeviceCase):
    WAY = "activations and gradients pass " + ("" if "DYNMO_DEVICE" in os.environ else "through host memory: the device has no channels")

    def test_a_size_that_changes_changes_no_bit(self):
        process = self.start("sizes", 3, *self.ENDLESS)
        self.assertIn("drained", self.done("sizes", "drain", "1"))
        joiner = self.join("sizes")
        self.until(process, lambda: self.ranks("sizes") == [0, 2, 3])
        self.stopped("sizes", process)
        self.assertIn("joined as rank 3", self.ended(joiner, code=130))
        self.assertEqual([len(event["ranks"]) for event in events(self.folder / "sizes", "size")], [2, 3])
        self.assert_as_endless_twin("sizes")

    def test_ranks_without_kernels_of_our_own_make_all_compute_without(self):
        """Bits depend on kernels. So neither some ranks nor a newcomer may compute with others."""
        with mock.patch.dict(os.environ, DYNMO_STRICT_NO_KERNELS="1"):
            output = self.ended(self.spawn(self.command("-n", "2", run="mixed", extra=self.SETTINGS)))
        self.assertIn("kernels  PyTorch's, none of our own: rank 1: the strict device has none", output)
        self.assertIn("fused_kernels = false", (self.folder / "mixed/config.toml").read_text())
        self.twin("without", 2, "run.fused_kernels=false")
        self.assert_as_twin("mixed", "without")

    def test_a_newcomer_without_kernels_of_our_own_is_refused(self):
        process = self.start("joined", 2, *self.ENDLESS)
        with mock.patch.dict(os.environ, DYNMO_STRICT_NO_KERNELS="new"):
            refused = self.join("joined")
        output = self.ended(refused, 2)
        self.assertIn("this one cannot: the strict device has none: wanted", output)
        self.stopped("joined", process)
        self.assert_as_endless_twin("joined")

    def test_a_leader_that_is_killed_changes_no_bit(self):
        output = self.hunted("killed", 3, [0], first=5)
        self.assertIn(self.WAY, output)
        self.assertEqual(self.recoveries("killed", "from"), ["snapshot"])
        self.assert_as_twin("killed", "twin")


if __name__ == "__main__":
    unittest.main()
