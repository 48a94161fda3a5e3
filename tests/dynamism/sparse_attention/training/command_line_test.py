# SPDX-License-Identifier: Apache-2.0
"""Sparse attention as a user meets it: other ranks, a restart, records, generated text, what is refused."""
from run_case import SourceCase


class SparseAttention(SourceCase):
    TABLE = "sparse_attention"
    SETTINGS = ("train.steps=12", "train.validation_every=6", "checkpoint.every=4", "checkpoint.keep=3", "sparse_attention.enabled=true",
                "sparse_attention.buckets=4")

    def test_the_same_numbers_on_any_ranks_and_after_a_restart(self):
        said, found = self.assert_same_on_any_ranks()
        self.assertIn("pairs ", said)
        for step, own in found.items():
            self.assertEqual(len(own["pairs"]), 3, step)
            # 4 micro-batches of 2 sequences of 16 tokens, 4 heads.
            self.assertAlmostEqual(own["share"], sum(own["pairs"]) / 3 / (4 * 2 * 4 * 16 * 17 / 2))
            self.assertTrue(0 < own["share"] < 1)
        self.assertGreater(len({tuple(own["pairs"]) for own in found.values()}), 6)

    def test_killed_at_random_moments(self):
        self.assert_survives_kills("train.steps=60", "checkpoint.every=5", "train.validation_every=0", "balance.minimum_gain=0", step=59)

    def test_generates_and_is_not_exported(self):
        drop = ("sparse_attention.rule=drop", "sparse_attention.buckets=16")
        self.assert_generates_and_is_not_exported(hash=(), drop=drop, gpt2=("model.family=gpt2",))

    def test_goes_on_from_weights_of_its_own_rule_and_from_dense_ones_that_have_all_it_needs(self):
        self.train("own", 1)
        self.succeed(self.command("-n", "1", run="dense", extra=("train.steps=4", "checkpoint.every=4")))
        self.train("from-own", 1, f"train.init={self.folder / 'own'}")
        self.train("from-dense", 1, f"train.init={self.folder / 'dense'}")
        refused = self.run_command(self.command("-n", "1", run="not", extra=(f"train.init={self.folder / 'own'}", "train.steps=4")))
        self.assert_error(refused, 2, "train.init", "k_proj", "sparse_attention.rule")

    def test_what_is_refused(self):
        self.assert_all_refused(
            ("sparse_attention.buckets=3", "sparse_attention.buckets", "even", "4"),
            ("sparse_attention.buckets=0", "sparse_attention.buckets", "1 to"),
            ("sparse_attention.dropped=1", "sparse_attention.dropped", "below 1"),
            ("sparse_attention.rule=random", "sparse_attention.rule", "hash"),
            ("sparse_attention.max_skew=0.3", "sparse_attention.max_skew"),
            ("sparse_attention.rule=drop sparse_attention.buckets=16 run.device=cuda", "sparse_attention.rule is drop", "run.device = cuda"))
