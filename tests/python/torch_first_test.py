# SPDX-License-Identifier: Apache-2.0
"""The first batch runs as in the loop, or every rank refuses it in one line; so does every rank where one alone fails."""
import unittest

from torch_support import RankCase


class First(RankCase):
    def run_part(self, part):
        self.run_ranks(2, "torch_first_rank.py", part)

    def test_batches_of_the_first_step(self):
        self.run_part("batches")

    def test_failures_of_one_rank(self):
        self.run_part("failures")


if __name__ == "__main__":
    unittest.main()
