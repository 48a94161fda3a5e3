# SPDX-License-Identifier: Apache-2.0
"""Gradients and losses are those of torch's own GPipe, 1F1B and interleaved 1F1B, and its runtime runs an order of ours."""
import unittest

from torch_support import RankCase


class Peers(RankCase):
    def test_gradients_are_those_of_torch(self):
        for ranks in (2, 3):
            with self.subTest(ranks=ranks):
                self.run_ranks(ranks, "torch_peers_rank.py")


if __name__ == "__main__":
    unittest.main()
