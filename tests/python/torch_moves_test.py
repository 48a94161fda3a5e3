# SPDX-License-Identifier: Apache-2.0
"""A thousand moves hold no more memory, descriptors or tensors than two hundred, and every parameter is the object it was."""
import json
import unittest

from torch_support import RankCase

MOVES = 1000


class Moves(RankCase):
    def test_leave_nothing_behind(self):
        self.run_ranks(2, "torch_moves_rank.py", self.folder, MOVES)
        for rank in range(2):
            told = json.loads((self.folder / f"held-{rank}.json").read_text())
            first, last = told["held"]
            print(f"rank {rank}: {told}")
            self.assertTrue(told["same_objects"])
            self.assertEqual(last["descriptors"], first["descriptors"])
            self.assertEqual(last["tensors"], first["tensors"])
            self.assertLess(last["bytes"], first["bytes"] * 1.02)


if __name__ == "__main__":
    unittest.main()
