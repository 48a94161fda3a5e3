# SPDX-License-Identifier: Apache-2.0
"""Sparse attention as a user meets it: other ranks, a restart, records, generated text, what is refused."""
import json
import shutil

from program import DYNMO
from run_case import RunCase, digests, losses, newest_manifest, settings


def figures(run):
    """Of sparse attention, by step."""
    lines = (run / "records" / "rank-0.jsonl").read_text().splitlines()
    return {record["step"]: record["sources"]["sparse_attention"] for record in map(json.loads, lines)}


class SparseAttention(RunCase):
    SETTINGS = ("train.steps=12", "train.validation_every=6", "checkpoint.every=4", "checkpoint.keep=3", "sparse_attention.enabled=true",
                "sparse_attention.buckets=4")

    def train(self, run, ranks, *extra, words=()):
        result = self.run_command(self.command("-n", str(ranks), *words, run=run, extra=(*self.SETTINGS, *extra)))
        self.assertEqual(result.returncode, 0, result.stdout + result.stderr)
        return result

    def test_the_same_numbers_on_any_ranks_and_after_a_restart(self):
        shown = self.train("two", 2)
        self.assertIn("pairs ", shown.stdout + shown.stderr)
        self.train("one", 1, "pipeline.recompute=whole")
        reference = self.folder / "two"
        self.assertEqual(losses(self.folder / "one"), losses(reference))
        self.assertEqual(digests(newest_manifest(self.folder / "one")), digests(newest_manifest(reference)))
        found = figures(reference)
        self.assertEqual(figures(self.folder / "one"), found)
        for step, own in found.items():
            self.assertEqual(len(own["pairs"]), 3, step)
            # 4 micro-batches of 2 sequences of 16 tokens, 4 heads.
            self.assertAlmostEqual(own["share"], sum(own["pairs"]) / 3 / (4 * 2 * 4 * 16 * 17 / 2))
            self.assertTrue(0 < own["share"] < 1)
        self.assertGreater(len({tuple(own["pairs"]) for own in found.values()}), 6)

        shutil.copytree(reference, self.folder / "three")
        shutil.rmtree(self.folder / "three" / "checkpoints" / "step-00000012")
        self.train("three", 3, words=("--resume",))
        self.assertEqual(losses(self.folder / "three"), losses(reference))
        self.assertEqual(digests(newest_manifest(self.folder / "three")), digests(newest_manifest(reference)))

    def test_killed_at_random_moments(self):
        run = self.hunt((*self.SETTINGS, "train.steps=60", "checkpoint.every=5", "train.validation_every=0", "balance.minimum_gain=0"))
        found = figures(self.folder / "steady")
        self.assertEqual(figures(run)[59], found[59])

    def test_generates_and_is_not_exported(self):
        for run, extra in (("hash", ()), ("drop", ("sparse_attention.rule=drop",)),
                           ("gpt2", ("model.family=gpt2", "model.kv_heads=0"))):
            self.train(run, 1, *extra)
            text = self.run_command([DYNMO, "generate", str(self.folder / run), "--prompt", "line 1", "--tokens", "24"])
            self.assertEqual(text.returncode, 0, text.stdout + text.stderr)
            refused = self.run_command([DYNMO, "checkpoint", "export-hf", str(self.folder / run), "--out", str(self.folder / (run + "-hf"))])
            self.assert_error(refused, 2, "sparse_attention.enabled", "dense model")

    def test_goes_on_from_weights_of_its_own_rule_and_from_dense_ones_that_have_all_it_needs(self):
        self.train("own", 1)
        dense = self.run_command(self.command("-n", "1", run="dense", extra=("train.steps=4", "checkpoint.every=4")))
        self.assertEqual(dense.returncode, 0, dense.stderr)
        self.train("from-own", 1, f"train.init={self.folder / 'own'}")
        self.train("from-dense", 1, f"train.init={self.folder / 'dense'}")
        refused = self.run_command(self.command("-n", "1", run="not", extra=(f"train.init={self.folder / 'own'}", "train.steps=4")))
        self.assert_error(refused, 2, "train.init", "k_proj", "sparse_attention.rule")

    def test_what_is_refused(self):
        for extra, words in ((("sparse_attention.buckets=3",), ("sparse_attention.buckets", "even", "4")),
                             (("sparse_attention.buckets=0",), ("sparse_attention.buckets", "1 to")),
                             (("sparse_attention.dropped=1",), ("sparse_attention.dropped", "below 1")),
                             (("sparse_attention.rule=random",), ("sparse_attention.rule", "hash")),
                             (("sparse_attention.max_skew=0.3",), ("sparse_attention.max_skew",)),
                             (("run.device=cuda",), ("run.device",))):
            result = self.run_command([*self.command("-n", "2", run="refused", extra=self.SETTINGS), *settings(extra)])
            self.assert_error(result, 2, *words)
