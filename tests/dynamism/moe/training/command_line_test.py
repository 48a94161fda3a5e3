# SPDX-License-Identifier: Apache-2.0
"""Mixtures of experts as a user meets them: other ranks, a restart, records, generated text, what is refused, counts replayed."""
import json

from program import DYNMO
from run_case import SourceCase


class Moe(SourceCase):
    TABLE = "moe"
    SETTINGS = ("train.steps=12", "train.validation_every=6", "checkpoint.every=4", "checkpoint.keep=3", "moe.enabled=true", "moe.experts=4",
                "moe.router=bias", "moe.bias_rate=0.01", "moe.capacity_factor=1.25")

    def test_the_same_numbers_on_any_ranks_and_after_a_restart(self):
        said, found = self.assert_same_on_any_ranks()
        self.assertIn("fullest expert +", said)
        for step, own in found.items():
            self.assertEqual(len(own["counts"]), 3, step)
            for counts, violation, factor in zip(own["counts"], own["max_violation"], own["straggler_factor"]["4"]):
                # 4 micro-batches of 2 sequences of 16 tokens, 2 experts a token.
                self.assertEqual(sum(counts), 4 * 2 * 16 * 2)
                self.assertAlmostEqual(violation, 4 * max(counts) / sum(counts) - 1)
                self.assertAlmostEqual(factor, 1 + violation)

    def test_generates_where_tokens_choose_and_is_exported_where_others_have_the_router(self):
        for router, capacity in (("top_k", 1.25), ("bias", 1.25), ("sinkhorn", 1.25), ("balanced", 0.75)):
            self.train(router, 1, f"moe.router={router}", "moe.bias_rate=0.001", f"moe.capacity_factor={capacity}")
            self.assert_generates(router)
        for router, words in (("bias", ("moe.router = 'bias'", "wanted 'top_k'")), ("top_k", ("moe.capacity_factor = 1.25", "wanted 0"))):
            self.assert_error(self.run_command(self.export(router)), 2, *words)
            self.assertFalse((self.folder / "hf").exists())
        self.train("choice", 1, "moe.router=expert_choice", "moe.bias_rate=0.001")
        self.assert_error(self.generate("choice"), 2, "moe.router", "expert_choice")

    def test_goes_on_from_weights_of_as_many_experts_alone(self):
        self.train("own", 1)
        self.train("from-own", 1, f"train.init={self.folder / 'own'}")
        for run, extra in (("dense", "moe.enabled=false"), ("more", "moe.experts=6"), ("wider", "moe.expert_hidden=9")):
            settings = () if run == "dense" else self.SETTINGS
            refused = self.run_command(self.command("-n", "1", run=run, extra=(*settings, extra, f"train.init={self.folder / 'own'}")))
            self.assert_error(refused, 2, "train.init", f"wanted the same; set {extra.split('=')[0]}=")

    def test_counts_are_replayed_for_devices_that_share_the_experts(self):
        self.train("run", 1)
        scenario = self.folder / "scenario.toml"
        records = self.folder / "run" / "records" / "rank-0.jsonl"
        scenario.write_text(f"""
[model]
blocks = 6
hidden = 256
sequence = 512
experts = 4
[cluster]
pipeline_ranks = 2
[dynamism]
source = "moe"
[moe]
expert_ranks = 4
counts = "{records}"
[training]
steps = 12
micro_batches = 8
[policy]
compare = ["uniform", "optimal"]
""")
        trace = self.folder / "loads.jsonl"
        self.succeed([DYNMO, "simulate", str(scenario), "--load-trace", str(trace)])
        # A block whose fullest expert was fuller costs more, in the trace, too.
        lines = [json.loads(line) for line in trace.read_text().splitlines()]
        self.assertEqual(lines[1]["step"], 0)
        factors = self.figures("run")[0]["straggler_factor"]["4"]
        blocks = [lines[0]["layers"][2 + 2 * block]["forward_s"] for block in range(6)]
        for one, other in ((0, 2), (2, 4)):
            self.assertEqual(blocks[one], blocks[one + 1])
            same_order = (factors[one // 2] - factors[other // 2]) * (blocks[one] - blocks[other])
            self.assertGreaterEqual(same_order, 0)
        self.succeed(self.command("-n", "2", run="emulated", extra=(
            "run.device=emulated", f"emulated.trace={trace}", "train.steps=6", "train.validation_every=0")))
        for change, words in (("model.experts=8", ("moe.counts", "4 experts")), (f"moe.counts={scenario}", ("scenario.toml:",)),
                              ("moe.counts=gone.jsonl", ("gone.jsonl",)), ("moe.router=bias", ("moe.router",))):
            refused = self.run_command([DYNMO, "simulate", str(scenario), "--set", change])
            self.assert_error(refused, 2, *words)

    def test_what_is_refused(self):
        self.assert_all_refused(
            ("moe.top_k=5", "moe.top_k is 5", "moe.experts, 4"),
            ("moe.top_k=0", "moe.top_k", "1 to"),
            ("moe.experts=0", "moe.experts", "1 to"),
            ("moe.capacity_factor=-1", "moe.capacity_factor", "0 to"),
            ("moe.router=random", "moe.router", "top_k"),
            ("moe.drop=none", "moe.drop", "position"),
            ("moe.aux_loss=0.1", "moe.aux_loss", "moe.router = bias"),
            ("moe.expert_ranks=2", "moe.expert_ranks"),
            ("model.family=gpt2", "moe.enabled", "model.family = gpt2"))
