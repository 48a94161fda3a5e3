# SPDX-License-Identifier: Apache-2.0
"""Early exit as a user meets it: other ranks, a restart, records, generated text, what is refused."""
import json
import math

from program import DYNMO
from run_case import SourceCase, losses


def boundaries(trace):
    """By step: boundary_bytes of every layer."""
    header, *lines = map(json.loads, trace.read_text().splitlines())
    now = [layer["boundary_bytes"] for layer in header["layers"]]
    found = {}
    for line in lines:
        now = line.get("boundary_bytes", now)
        found[line["step"]] = now
    return found


# Of a schedule of survivors, which a threshold does without.
NO_SCHEDULE = ("early_exit.survivors=0.1", "early_exit.ramp_steps=2000")


class EarlyExit(SourceCase):
    TABLE = "early_exit"
    STEPS = 24
    SETTINGS = ("train.steps=24", "train.validation_every=12", "checkpoint.every=8", "checkpoint.keep=3", "early_exit.enabled=true",
                "early_exit.exit_every=1", "early_exit.warm_up=4", "early_exit.ramp_steps=4", "early_exit.survivors=0.3")

    def test_the_same_numbers_on_any_ranks_and_after_a_restart(self):
        said, found = self.assert_same_on_any_ranks()
        self.assertIn("left ", said)
        for step, own in found.items():
            self.assertEqual(sum(own["left"]), 4 * 2 * 16, step)
            self.assertEqual(own["tokens"], 4 * 2 * 16)
            self.assertEqual(own["survivors"], own["left"][-1] / own["tokens"])
            if step < 4:
                self.assertEqual(own["survivors"], 1)
        self.assertTrue(any(0 < own["survivors"] < 0.7 for own in found.values()))

    def test_all_tokens_leave_at_the_first_exit(self):
        self.train("all", 2, "early_exit.threshold=1e-9", *NO_SCHEDULE)
        found = self.figures("all")
        self.assertEqual(found[23]["left"], [128, 0, 0])
        self.assertTrue(all(loss == loss and loss < 10 for loss in losses(self.folder / "all").values()))
        self.assert_resumes("all", "all-resumed", 3, "early_exit.threshold=1e-9", *NO_SCHEDULE)

    def test_a_threshold_of_one_is_the_plain_model(self):
        self.train("never", 2, "early_exit.threshold=1", "early_exit.exit_loss=0", "early_exit.warm_up=500", *NO_SCHEDULE)
        self.succeed(self.command("-n", "2", run="plain", extra=("train.steps=24", "train.validation_every=12")))
        self.assertEqual(losses(self.folder / "never"), losses(self.folder / "plain"))

    def test_compares(self):
        self.succeed(self.command("-n", "2", "--compare", "static,balanced", run="compare", extra=self.SETTINGS))

    def test_emulated_ranks_replay_its_messages(self):
        self.train("real", 2, "run.load_trace=1", "balance.enabled=false")
        trace = self.folder / "real" / "load-trace.jsonl"
        recorded = boundaries(trace)
        rows = self.figures("real")
        whole = 2 * 16 * 32 * 4
        for step in range(1, 24):
            # Room for as many rows as in the step before, each of 32 floats and its number, and a header.
            stay = (sum(rows[step - 1]["left"]) - rows[step - 1]["left"][0]) / 4
            self.assertEqual(recorded[step][1], whole, "before the first exit")
            self.assertGreaterEqual(recorded[step][2], 8 + math.floor(stay) * (4 + 32 * 4), step)
        self.assertLess(recorded[23][4], recorded[3][4])
        self.succeed(self.command("-n", "2", run="emulated", extra=(
            "run.device=emulated", f"emulated.trace={trace}", "train.steps=24", "run.load_trace=1", "balance.enabled=false")))
        again = boundaries(self.folder / "emulated" / "load-trace.jsonl")
        for step, layers in again.items():
            self.assertEqual(layers[:-1], [max(4, own // 4 * 4) for own in recorded[step][:-1]], step)
        scenario = self.folder / "replayed.toml"
        scenario.write_text(f"""
[cluster]
pipeline_ranks = 2
[dynamism]
trace = "{trace}"
[training]
steps = 24
micro_batches = 4
[policy]
compare = ["uniform", "optimal"]
""")
        self.succeed([DYNMO, "simulate", str(scenario)])

    def test_generates_and_is_not_exported(self):
        classifier = ("early_exit.confidence=classifier", "model.family=gpt2")
        self.assert_generates_and_is_not_exported(gap=(), similarity=("early_exit.confidence=similarity",), classifier=classifier)

    def test_heads_in_slices(self):
        sliced = ("model.head_slices=2",)
        shown = self.train("sliced-two", 2, *sliced)
        self.assertIn("head.1 of 2", shown.stdout + shown.stderr)
        self.train("sliced-one", 1, *sliced)
        self.assert_same_run("sliced-one", "sliced-two")
        self.assertEqual(self.figures("sliced-one"), self.figures("sliced-two"))
        self.train("sliced-whole", 1)
        for step, loss in losses(self.folder / "sliced-whole").items():
            self.assertAlmostEqual(loss, losses(self.folder / "sliced-two")[step], delta=0.05)
        self.assert_generates("sliced-two", "sliced-one")
        self.assert_resumes("sliced-two", "sliced-three", 3, *sliced)
        # A checkpoint of two slices goes on in one, and the other way round.
        for run, reference, slices in (("joined", "sliced-two", 1), ("cut", "sliced-whole", 2)):
            self.go_back(reference, run)
            shown = self.train(run, 2, f"model.head_slices={slices}", words=("--resume",))
            self.assertIn("the numbers may differ", shown.stdout + shown.stderr)
            self.assertAlmostEqual(losses(self.folder / run)[23], losses(self.folder / reference)[23], delta=0.05)

    def test_what_is_refused(self):
        self.assert_all_refused(
            ("early_exit.row_room=0", "early_exit.row_room", "above 0"),
            ("early_exit.exit_every=0", "early_exit.exit_every", "1 to"),
            ("early_exit.exit_every=3", "early_exit.exit_every is 3", "no token would leave"),
            ("early_exit.threshold=1.5", "early_exit.threshold", "0 to 1"),
            ("early_exit.threshold=-1", "early_exit.threshold", "0 to 1"),
            ("early_exit.survivors=0", "early_exit.survivors"),
            ("early_exit.exited=propagated", "early_exit.exited", "removed"),
            ("early_exit.exit_spread=0.1", "early_exit.exit_spread"),
            ("early_exit.confidence=luck", "early_exit.confidence", "gap"),
            ("sparse_attention.enabled=true", "sparse_attention.enabled", "early_exit.enabled"))


class EarlyExitOfExperts(SourceCase):
    TABLE = "moe"
    STEPS = 24
    SETTINGS = (*EarlyExit.SETTINGS, "moe.enabled=true", "moe.experts=4", "moe.capacity_factor=1.25")

    def test_experts_have_the_tokens_that_came_on_any_ranks_and_after_a_restart(self):
        said, found = self.assert_same_on_any_ranks("moe.router=bias", "moe.bias_rate=0.01")
        self.assertIn("fullest expert +", said)
        self.assertIn("left ", said)
        exits = self.figures("two", "early_exit")
        for step, own in found.items():
            came = 4 * 2 * 16
            for counts, left in zip(own["counts"], exits[step]["left"]):
                self.assertEqual(sum(counts), 2 * came, step)
                came -= left
        self.assertLess(sum(own["counts"][2]), 4 * 2 * 16)

    def test_generates_by_routers_that_do_not_look_ahead(self):
        for router, capacity in (("top_k", 1.25), ("sinkhorn", 1.25), ("balanced", 0.75)):
            self.train(router, 1, f"moe.router={router}", f"moe.capacity_factor={capacity}")
            self.assert_generates(router)
        self.train("choice", 2, "moe.router=expert_choice")
        self.assert_error(self.generate("choice"), 2, "moe.router", "expert_choice")
        self.assert_error(self.run_command(self.export("top_k")), 2, "early_exit.enabled", "dense model")

    def test_a_plan_without_a_run(self):
        self.succeed(self.command("-n", "2", "--dry-run", run="dry", extra=self.SETTINGS))

    def test_all_tokens_leave_at_the_first_exit(self):
        self.train("all", 2, "early_exit.threshold=1e-9", *NO_SCHEDULE)
        own = self.figures("all")[23]
        self.assertEqual([sum(counts) for counts in own["counts"]], [256, 0, 0])
        self.assertEqual(own["straggler_factor"]["4"][1:], [1, 1])
        self.assertTrue(all(loss == loss and loss < 10 for loss in losses(self.folder / "all").values()))
