# SPDX-License-Identifier: Apache-2.0
"""Replicas are, bit for bit, one process that has a buffer of gradients for the batch of each and adds these in order."""
import itertools
import json
import unittest

from drawn import drawn
from torch_cases import batches_of
from torch_support import RankCase

TIED = {"config": {"tie_word_embeddings": True}, "canonical": True}
HALF_FOR_A_WHILE = {"freeze": True, "freeze_at": 2, "thaw_at": 4}


class Replicas(RankCase):
    def compare_replicas(self, ranks, *cases):
        """Each parameter is summed once a step, by one rank of each replica."""
        cases = [{"steps": 6, "micro_batches": 2, "clip": 1.0, "seed": 70 + index, **case} for index, case in enumerate(cases)]
        cases = drawn(cases, 3, "the replicas")
        self.compare(cases, ranks, script="torch_replicas_rank.py")
        for index, case in enumerate(cases):
            told = [json.loads((self.folder / f"trained-{rank}-{index}.json").read_text()) for rank in range(ranks)]
            steps = [sum(counts) for counts in zip(*told)]
            print(f"{case['replicas']} x {ranks // case['replicas']} ranks, parameters summed: {steps}")
            self.assertTrue(all(count % case["replicas"] == 0 for count in steps), steps)

    def test_of_two_ranks(self):
        self.compare_replicas(
            4,
            {"family": "llama", "replicas": 2, "accumulation": 2, **HALF_FOR_A_WHILE},
            {"family": "qwen3", "replicas": 2, "items": True, "optimizer": "sgd", **TIED},
            {"family": "mixtral", "replicas": 2, "apart": True},
            {"family": "llama", "replicas": 2, "clip": 0, "reload": {"replicas": 4, "folder": str(self.folder / "two")}},
            {"family": "llama", "replicas": 4, "clip": 0, "reload": {"replicas": 1, "folder": str(self.folder / "four")}},
        )

        tokens = [sum(batch["input_ids"].numel() for batch in batches_of({"micro_batches": 2, "replicas": 2}, step)) for step in range(2)]
        for rank, name in itertools.product(range(4), ("unbalanced", "run")):
            records = [json.loads(line) for line in (self.folder / name / "records" / f"rank-{rank}.jsonl").read_text().splitlines()]
            self.assertEqual([(record["rank"], record["tokens"]) for record in records], [(rank, count) for count in tokens], name)
            self.assertGreater(records[1]["reduction_s"], 0) if name == "run" else self.assertIsNone(records[1]["step_s"])
        run = json.loads((self.folder / "run" / "summary.json").read_text())["runs"][0]
        self.assertEqual((run["ranks"], run["replicas"]), (4, 2))

    def test_of_three_ranks_and_three_replicas(self):
        self.compare_replicas(
            6,
            {"family": "llama", "replicas": 2, "balance": True, "steps": 8, "config": {"num_hidden_layers": 6}, **HALF_FOR_A_WHILE},
            {"family": "gpt2", "replicas": 3, **TIED},
        )


if __name__ == "__main__":
    unittest.main()
