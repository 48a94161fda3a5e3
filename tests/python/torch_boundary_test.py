# SPDX-License-Identifier: Apache-2.0
"""Several tensors between two layers, with shapes that change within their limits, train as in the loop."""
import unittest

from torch_support import RankCase


class Boundary(RankCase):
    def test_tensors_by_name_and_shapes_that_change(self):
        self.run_ranks(3, "torch_boundary_rank.py")


if __name__ == "__main__":
    unittest.main()
