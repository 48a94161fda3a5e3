# SPDX-License-Identifier: Apache-2.0
"""A parameter of which something else holds a view, a graph or a weak reference is named before a layer is given away."""
import unittest

from torch_support import RankCase


class Owners(RankCase):
    def test_are_named_at_the_start_and_in_balance(self):
        self.run_ranks(2, "torch_owners_rank.py")


if __name__ == "__main__":
    unittest.main()
