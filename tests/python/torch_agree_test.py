# SPDX-License-Identifier: Apache-2.0
"""What a rank is given otherwise than rank 0 is named on every rank, before a layer is dropped."""
import unittest

from torch_support import RankCase


class Agree(RankCase):
    def test_every_rank_names_what_differs(self):
        self.run_ranks(3, "torch_agree_rank.py")


if __name__ == "__main__":
    unittest.main()
