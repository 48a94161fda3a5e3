# SPDX-License-Identifier: Apache-2.0
"""Mixture of depths as a user meets it: other ranks, a restart, records, generated text, what is refused."""
import json

from program import DYNMO
from run_case import SourceCase, losses, settings


def validations(run):
    """Losses of a validation, and with the predictor's choice, by step."""
    events = map(json.loads, (run / "events.jsonl").read_text().splitlines())
    return {event["step"]: (event["loss"], event["generation_loss"]) for event in events if event["event"] == "validation"}


class MixtureOfDepths(SourceCase):
    TABLE = "mixture_of_depths"
    SETTINGS = ("train.steps=12", "train.validation_every=6", "checkpoint.every=4", "checkpoint.keep=3", "mixture_of_depths.enabled=true",
                "mixture_of_depths.capacity=0.25")

    def test_the_same_numbers_on_any_ranks_and_after_a_restart(self):
        shown = self.train("two", 2)
        self.assertIn("routed 25.0 %, predicted ", shown.stdout + shown.stderr)
        self.assertIn("mixture_of_depths, last step: ", shown.stdout + shown.stderr)
        self.assertIn(" as it generates)", shown.stdout + shown.stderr)
        self.train("one", 1, "pipeline.recompute=whole")
        reference = self.folder / "two"
        self.assert_same_run("one", "two")
        found = self.figures("two")
        self.assertEqual(self.figures("one"), found)
        self.assertEqual(validations(self.folder / "one"), validations(reference))
        self.assertEqual(set(validations(reference)), {6, 12})
        for step, own in found.items():
            # One of three blocks; 4 micro-batches of 2 sequences of 16 tokens.
            self.assertEqual(own["rows"], [4 * 2 * 4], step)
            self.assertEqual(own["share"], 0.25)
            self.assertEqual(len(own["accuracy"]), 1)
            self.assertTrue(0 <= own["accuracy"][0] <= 1)
        # It begins as one that knows the share alone, whose cross entropy is 0.5623.
        self.assertAlmostEqual(found[0]["predictor_loss"][0], 0.5623, places=3)
        self.assertTrue(0 < found[11]["predictor_loss"][0] < 0.6)
        self.assertNotEqual(found[11]["predictor_loss"], found[0]["predictor_loss"])

        report = self.run_command([DYNMO, "report", str(reference)])
        self.assertEqual(report.returncode, 0, report.stderr)
        self.assertIn("mixture_of_depths, last step: ", report.stdout)

        self.assert_resumes("two", "three", 3)

    def test_compares_cuts(self):
        result = self.run_command(self.command("-n", "2", "--compare", "static,balanced", run="compared", extra=self.SETTINGS))
        self.assertEqual(result.returncode, 0, result.stdout + result.stderr)
        self.assertIn("the same numbers, bit for bit", result.stdout + result.stderr)

    def test_killed_at_random_moments(self):
        self.hunt((*self.SETTINGS, "train.steps=60", "checkpoint.every=5", "train.validation_every=0", "balance.minimum_gain=0"))
        found = self.figures("steady")
        self.assertEqual(self.figures("hunted")[59], found[59])

    def test_generates_and_is_not_exported(self):
        for run, extra in (("llama", ()), ("gpt2", ("model.family=gpt2",)), ("tied", ("model.tied_embeddings=true",))):
            self.train(run, 2, *extra)
            text = self.generate(run)
            self.assertEqual(text.returncode, 0, text.stdout + text.stderr)
            refused = self.run_command([DYNMO, "checkpoint", "export-hf", str(self.folder / run), "--out", str(self.folder / (run + "-hf"))])
            self.assert_error(refused, 2, "mixture_of_depths.enabled", "dense model")

    def test_goes_on_from_weights_of_its_own_alone(self):
        self.train("own", 1)
        self.train("from-own", 2, f"train.init={self.folder / 'own'}")
        self.assertLess(losses(self.folder / "from-own")[0], losses(self.folder / "own")[0])
        dense = self.run_command(self.command("-n", "1", run="dense", extra=("train.steps=4", "checkpoint.every=4")))
        self.assertEqual(dense.returncode, 0, dense.stderr)
        refused = self.run_command(self.command("-n", "1", run="not", extra=(*self.SETTINGS, f"train.init={self.folder / 'dense'}")))
        self.assert_error(refused, 2, "train.init", "predictor", "mixture_of_depths")

    def test_what_is_refused(self):
        for extra, words in ((("mixture_of_depths.capacity=0",), ("mixture_of_depths.capacity", "above 0 and at most 1")),
                             (("mixture_of_depths.capacity=1.5",), ("mixture_of_depths.capacity", "above 0 and at most 1")),
                             (("mixture_of_depths.every=0",), ("mixture_of_depths.every", "1 to")),
                             (("mixture_of_depths.every=4",), ("mixture_of_depths.every", "3 blocks", "no block would choose tokens")),
                             (("mixture_of_depths.noise=0.1",), ("mixture_of_depths.noise",)),
                             (("sparse_attention.enabled=true",), ("sparse_attention.enabled", "mixture_of_depths.enabled", "routed block"))):
            result = self.run_command([*self.command("-n", "2", run="refused", extra=self.SETTINGS), *settings(extra)])
            self.assert_error(result, 2, *words)


class MixtureOfDepthsOfExperts(SourceCase):
    TABLE = "moe"
    SETTINGS = (*MixtureOfDepths.SETTINGS, "moe.enabled=true", "moe.experts=4", "moe.router=bias", "moe.bias_rate=0.01")

    def test_experts_have_the_chosen_rows_on_any_ranks_and_after_a_restart(self):
        shown = self.train("two", 2)
        self.assertIn("fullest expert +", shown.stdout + shown.stderr)
        self.assertIn("routed 25.0 %, predicted ", shown.stdout + shown.stderr)
        self.train("one", 1, "pipeline.recompute=whole")
        self.assert_same_run("one", "two")
        self.assertEqual(self.figures("one"), self.figures("two"))
        for step, own in self.figures("two").items():
            # The second of three blocks is routed; 2 experts a row.
            self.assertEqual([sum(counts) for counts in own["counts"]], [2 * 128, 2 * 32, 2 * 128], step)
        self.assert_resumes("two", "three", 3)
        text = self.generate("two")
        self.assertEqual(text.returncode, 0, text.stdout + text.stderr)
        self.assertEqual(self.generate("two").stdout, text.stdout)

    def test_a_router_that_looks_ahead_trains_and_does_not_generate(self):
        self.train("choice", 2, "moe.router=expert_choice")
        self.assert_error(self.generate("choice"), 2, "moe.router", "expert_choice")
