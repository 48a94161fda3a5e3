# SPDX-License-Identifier: Apache-2.0
"""Mixture of depths as a user meets it: other ranks, a restart, records, generated text, what is refused."""
import json

from program import DYNMO
from run_case import SourceCase, losses


def validations(run):
    """Losses of a validation, and with the predictor's choice, by step."""
    events = map(json.loads, (run / "events.jsonl").read_text().splitlines())
    return {event["step"]: (event["loss"], event["generation_loss"]) for event in events if event["event"] == "validation"}


class MixtureOfDepths(SourceCase):
    TABLE = "mixture_of_depths"
    SETTINGS = ("train.steps=12", "train.validation_every=6", "checkpoint.every=4", "checkpoint.keep=3", "mixture_of_depths.enabled=true",
                "mixture_of_depths.capacity=0.25")

    def test_the_same_numbers_on_any_ranks_and_after_a_restart(self):
        said, found = self.assert_same_on_any_ranks()
        for words in ("routed 25.0 %, predicted ", "mixture_of_depths, last step: ", " as it generates)"):
            self.assertIn(words, said)
        reference = self.folder / "two"
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
        self.assertIn("mixture_of_depths, last step: ", self.succeed([DYNMO, "report", str(reference)]).stdout)

    def test_compares_cuts(self):
        shown = self.succeed(self.command("-n", "2", "--compare", "static,balanced", run="compared", extra=self.SETTINGS))
        self.assertIn("the same numbers, bit for bit", shown.stdout + shown.stderr)

    def test_killed_at_random_moments(self):
        self.assert_survives_kills("train.steps=60", "checkpoint.every=5", "train.validation_every=0", "balance.minimum_gain=0", step=59)

    def test_generates_and_is_not_exported(self):
        self.assert_generates_and_is_not_exported(llama=(), gpt2=("model.family=gpt2",), tied=("model.tied_embeddings=true",))

    def test_goes_on_from_weights_of_its_own_alone(self):
        self.train("own", 1)
        self.train("from-own", 2, f"train.init={self.folder / 'own'}")
        self.assertLess(losses(self.folder / "from-own")[0], losses(self.folder / "own")[0])
        self.succeed(self.command("-n", "1", run="dense", extra=("train.steps=4", "checkpoint.every=4")))
        refused = self.run_command(self.command("-n", "1", run="not", extra=(*self.SETTINGS, f"train.init={self.folder / 'dense'}")))
        self.assert_error(refused, 2, "train.init", "predictor", "mixture_of_depths")

    def test_what_is_refused(self):
        self.assert_all_refused(
            ("mixture_of_depths.capacity=0", "mixture_of_depths.capacity", "above 0 and at most 1"),
            ("mixture_of_depths.capacity=1.5", "mixture_of_depths.capacity", "above 0 and at most 1"),
            ("mixture_of_depths.every=0", "mixture_of_depths.every", "1 to"),
            ("mixture_of_depths.every=4", "mixture_of_depths.every", "3 blocks", "no block would choose tokens"),
            ("mixture_of_depths.noise=0.1", "mixture_of_depths.noise"),
            ("sparse_attention.enabled=true", "sparse_attention.enabled", "mixture_of_depths.enabled", "routed block"))


class MixtureOfDepthsOfExperts(SourceCase):
    TABLE = "moe"
    EXPERTS = (*MixtureOfDepths.SETTINGS, "moe.enabled=true", "moe.experts=4")
    SETTINGS = (*EXPERTS, "moe.router=bias", "moe.bias_rate=0.01")

    def test_experts_have_the_chosen_rows_on_any_ranks_and_after_a_restart(self):
        said, found = self.assert_same_on_any_ranks()
        self.assertIn("fullest expert +", said)
        self.assertIn("routed 25.0 %, predicted ", said)
        for step, own in found.items():
            # The second of three blocks is routed; 2 experts a row.
            self.assertEqual([sum(counts) for counts in own["counts"]], [2 * 128, 2 * 32, 2 * 128], step)
        self.assert_generates("two")

    def test_a_router_that_looks_ahead_trains_and_does_not_generate(self):
        self.succeed(self.command("-n", "2", run="choice", extra=(*self.EXPERTS, "moe.router=expert_choice")))
        self.assert_error(self.generate("choice"), 2, "moe.router", "expert_choice")
