# SPDX-License-Identifier: Apache-2.0
"""`dynmo trace stats` and `gen` as users meet them. Usage: features_command_test.py PATH_OF_DYNMO"""
import json
import math
import pathlib
import random
import subprocess
import sys
import tempfile
import unittest

DYNMO = pathlib.Path(sys.argv.pop(1)).resolve()
ROOT = pathlib.Path(__file__).resolve().parents[2]


class Features(unittest.TestCase):
    def setUp(self):
        folder = tempfile.TemporaryDirectory()
        self.addCleanup(folder.cleanup)
        self.folder = pathlib.Path(folder.name)

    def run_program(self, *words):
        done = subprocess.run([DYNMO, *map(str, words)], cwd=self.folder, capture_output=True, text=True, timeout=100)
        self.assertEqual(done.returncode, 0, (words, done.stderr))
        return done.stdout

    def stats(self, *words):
        return json.loads(self.run_program("trace", "stats", *words, "--json"))

    def test_of_coordinates_count_entries(self):
        (self.folder / "t.tns").write_text("# three entries\n1 1 1 0.5\n1 2 1 1\n2 2 3 -1\n")
        features = self.stats("t.tns")
        self.assertEqual((features["sizes"], features["entries"], features["density"]), ([2, 2, 3], 3, 0.25))
        along_first = features["fibers"][0]["entries"]
        self.assertEqual((along_first["groups"], along_first["nonempty"], along_first["max"]), (6, 3, 1))
        self.assertIn("3 entries, density 0.25", self.run_program("trace", "stats", "t.tns"))

    def test_the_spread_says_how_many_have_two_where_the_densities_cannot(self):
        # The densities say 300,010 fibers and 300,013 entries, and CV 0.0063246 that 12 of 300,000 slices have two fibers.
        said = self.run_program("trace", "gen", "--out", "a.tns", "--sizes", 300000, 100, 5, "--slice-density", 1, "--fiber-density",
                                0.01000033, "--density", 0.002000087, "--fibers-cv", 0.0063246, "--fibers-imbalance", 1, "--entries-cv", 0,
                                "--entries-imbalance", 0)
        self.assertIn("300012 entries in 300012 fibers of 300000 slices", said)

    def test_of_what_was_generated_are_what_was_asked(self):
        said = self.run_program("trace", "gen", "--out", "a.tns", "--sizes", 50, 60, 70, "--density", 0.01, "--fiber-density", 0.2,
                                "--fibers-cv", 0.5, "--entries-cv", 0.8)
        self.assertIn("2100 entries in 600 fibers of 50 slices", said)
        features = self.stats("a.tns")
        self.assertEqual(features["entries"], 2100)
        fibers, slices = features["fibers"][-1]["entries"], features["slices"][-1]
        self.assertEqual((fibers["nonempty"], slices["entries"]["nonempty"]), (600, 50))
        self.assertAlmostEqual(fibers["of_nonempty"]["cv"], 0.8, delta=0.016)
        (self.folder / "f.json").write_text(json.dumps(features))
        self.run_program("trace", "gen", "--out", "b.tns", "--like", "f.json", "--seed", 2)
        like = self.stats("b.tns")
        self.assertEqual(like["entries"], 2100)
        self.assertEqual(like["fibers"][-1]["entries"]["max"], fibers["max"])
        self.assertAlmostEqual(like["fibers"][-1]["entries"]["of_nonempty"]["cv"], fibers["of_nonempty"]["cv"], delta=0.02)

    def test_counts_are_taken_by_a_scenario_and_scaled(self):
        self.run_program("trace", "gen", "--out", "c.jsonl", "--counts", "--sizes", 200, 24, 8, "--tokens", 4096, "--cv", 0.8,
                         "--autocorrelation", 0.95)
        features = self.stats("c.jsonl")
        self.assertEqual((features["names"], features["sizes"]), (["step", "block", "expert"], [200, 24, 8]))
        self.assertAlmostEqual(features["values"]["all"]["cv"], 0.8, delta=0.016)
        self.assertAlmostEqual(features["along"]["autocorrelation"], 0.95, delta=0.03)
        (self.folder / "f.json").write_text(json.dumps(features))
        self.run_program("trace", "gen", "--out", "d.jsonl", "--counts", "--like", "f.json", "--scale", "steps=100", "blocks=48")
        scaled = self.stats("d.jsonl")
        self.assertEqual(scaled["sizes"], [100, 48, 8])
        self.assertAlmostEqual(scaled["values"]["all"]["cv"], features["values"]["all"]["cv"], delta=0.02)
        scenario = ROOT / "examples" / "scenarios" / "moe.toml"
        said = self.run_program("simulate", scenario, "--set", "training.steps=50", "--set", f"moe.counts={self.folder / 'c.jsonl'}")
        self.assertIn("uniform", said)

    def test_balancing_gains_as_much_on_counts_like_those_recorded(self):
        """Counts of tokens that each choose two experts, later blocks more of one mind, all less so as time goes on.

        Gains of one kind of load spread by about 2 points; means of several are compared.
        """
        steps, blocks, experts, tokens = 400, 8, 8, 128
        scenario = ROOT / "examples" / "scenarios" / "moe.toml"

        def record(name, draw):
            tastes = [[draw.gauss(0, 1) for _ in range(experts)] for _ in range(blocks)]
            with (self.folder / name).open("w") as file:
                for step in range(steps):
                    counts = [[0] * experts for _ in range(blocks)]
                    for block, taste in enumerate(tastes):
                        taste[:] = [0.8 * value + 0.6 * draw.gauss(0, 1) for value in taste]
                        sharp = (0.3 + block / blocks) * (1.2 - 0.6 * step / steps)
                        for _ in range(tokens):
                            liked = sorted((sharp * value - math.log(-math.log(draw.random())), e) for e, value in enumerate(taste))
                            for _, expert in liked[-2:]:
                                counts[block][expert] += 1
                    file.write(json.dumps({"step": step, "sources": {"moe": {"counts": counts}}}) + "\n")

        def gain(name):
            said = self.run_program("simulate", scenario, "--json", "--compare", "uniform,optimal", "--set", f"training.steps={steps}",
                                    "--set", f"moe.counts={self.folder / name}")
            speed = {run["name"]: run["tokens_per_s"] for run in json.loads(said)["runs"]}
            return speed["optimal"] / speed["uniform"]

        recorded, generated = [], []
        for seed in range(3):
            record("recorded.jsonl", random.Random(seed))
            recorded.append(gain("recorded.jsonl"))
            features = self.stats("recorded.jsonl")
            (self.folder / "f.json").write_text(json.dumps(features))
            for own in range(3):
                self.run_program("trace", "gen", "--out", "like.jsonl", "--counts", "--like", "f.json", "--seed", own)
                like = self.stats("like.jsonl")
                for key in ("mean", "cv"):
                    wanted = features["values"]["all"][key]
                    self.assertAlmostEqual(like["values"]["all"][key], wanted, delta=0.02 * wanted, msg=(seed, own, key))
                self.assertAlmostEqual(like["along"]["autocorrelation"], features["along"]["autocorrelation"], delta=0.03)
                for ours, wanted in zip(like["uneven"]["rows"], features["uneven"]["rows"], strict=True):
                    self.assertAlmostEqual(ours, wanted, delta=0.08 * wanted, msg=(seed, own))
                generated.append(gain("like.jsonl"))
        self.assertAlmostEqual(sum(generated) / len(generated), sum(recorded) / len(recorded), delta=0.02, msg=(recorded, generated))

    def test_a_load_trace_is_made_like_another(self):
        self.run_program("trace", "gen", "--out", "c.jsonl", "--costs", "--sizes", 60, 24, "--step-s", 0.2, "--cv", 0.5, "--autocorrelation", 0.8)
        features = self.stats("c.jsonl")
        self.assertEqual((features["names"], features["sizes"]), (["step", "layer"], [60, 24]))
        self.assertAlmostEqual(features["values"]["sum"], 60 * 0.2, places=6)
        self.assertAlmostEqual(features["values"]["all"]["cv"], 0.5, delta=0.01)
        (self.folder / "f.json").write_text(json.dumps(features))
        said = self.run_program("trace", "gen", "--out", "d.jsonl", "--costs", "--like", "f.json", "--scale", "steps=80", "layers=48")
        self.assertIn("80 steps, 48 layers, 200.00 ms of a micro-batch in a step", said)
        self.assertEqual(self.stats("d.jsonl")["sizes"], [80, 48])

    def test_of_traffic_say_who_sends_how_much(self):
        rows = [{"from": a, "to": b, "purpose": "activation", "messages": 1, "bytes": 10 + a} for a, b in ((0, 1), (1, 2))]
        (self.folder / "traffic.jsonl").write_text(json.dumps({
            "format": "dynmo-traffic-1", "generation": 0, "first_step": 0, "steps": 1,
            "ranks": [{"rank": rank, "node": 0} for rank in range(3)], "measured": rows, "predicted": rows}) + "\n")
        features = self.stats(".")
        self.assertEqual((features["names"], features["sizes"], features["entries"]), (["interval", "from", "to"], [1, 3, 3], 2))
        self.assertEqual(features["values"]["sum"], 21)

    def test_of_a_recorded_load_say_how_long_it_lasts(self):
        scenario = ROOT / "examples" / "scenarios" / "freezing.toml"
        self.run_program("simulate", scenario, "--set", "training.steps=400", "--load-trace", "t.jsonl")
        features = self.stats("t.jsonl")
        self.assertEqual(features["names"], ["step", "layer"])
        self.assertIn("along", features)
        self.assertIn("autocorrelation with the next step", self.run_program("trace", "stats", "t.jsonl"))


if __name__ == "__main__":
    unittest.main()
