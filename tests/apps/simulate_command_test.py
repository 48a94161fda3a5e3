# SPDX-License-Identifier: Apache-2.0
"""`dynmo simulate` as a user meets it: its table, its JSON, its trace, and every kind of error."""
import json
import unittest

from program import FreshFolderCase

SCENARIO = """
[model]
blocks = 8
[cluster]
pipeline_ranks = 4
[dynamism]
source = "freezing"
[training]
steps = 200
micro_batches = 8
[policy]
plan = "1ms"
move_fixed = "1ms"
"""


class Case(FreshFolderCase):
    def setUp(self):
        super().setUp()
        self.write("s.toml", SCENARIO)

    def write(self, name, text):
        (self.folder / name).write_text(text)

    def simulate(self, *words):
        return self.run_program("simulate", *words)

    def answer(self, *words):
        result = self.succeeded(self.simulate(*words))
        for line in result.stderr.splitlines():
            self.assertRegex(line, r"^dynmo: [a-z:-]+ took [0-9.]+ m?u?s$")
        return result.stdout

    def assert_refused(self, code, words, *said):
        result = self.simulate(*words)
        self.assert_error(result, code, *said)
        return result.stdout


class Advice(Case):
    """A change that the last lines name is made, and the step is what they say."""
    SCENARIO = ("[model]\nblocks = 8\nhidden = 512\nvocabulary = 512\nsequence = 512\n"
                "[cluster]\npipeline_ranks = 4\n[training]\nsteps = 4\nmicro_batches = 16\n[policy]\ncompare = [\"optimal\"]\n")

    def setUp(self):
        super().setUp()
        self.write("advice.toml", self.SCENARIO)

    def advice(self, settings):
        words = ["advice.toml", *(word for setting in settings for word in ("--set", setting))]
        return self.answer(*words), json.loads(self.answer(*words, "--json"))["advice"]

    def test_names_a_key_whose_change_does_what_it_says(self):
        for limit, key, settings in [
            ("messages", "inside_latency", ["training.micro_batches=15", "cluster.inside_latency=1ms"]),
            ("messages", "inside_bandwidth", ["cluster.inside_bandwidth=100MB/s"]),
            ("messages", "between_latency", ["training.micro_batches=15", "cluster.ranks_per_node=1", "cluster.between_latency=1ms"]),
            ("messages", "between_bandwidth", ["cluster.ranks_per_node=1", "cluster.between_bandwidth=100MB/s"]),
            ("messages", "micro_batch_size", ["cluster.inside_latency=300us", "training.micro_batches=64"]),
            ("slow-rank", "speed", ["model.blocks=1", "cluster.slow_ranks=[2]", "cluster.slow_speed=0.5"]),
            ("head", "head_slices", ["model.vocabulary=30000"]),
            ("layer", "ranks", ["model.blocks=1", "training.micro_batches=200"]),
            ("cut", "ranks", ["model.blocks=4", "cluster.pipeline_ranks=7", "training.micro_batches=400", "cluster.inside_latency=1ns"]),
            ("fill", "schedule", ["training.micro_batches=4"]),
            ("fill", "micro_batches", ["training.micro_batches=4", "training.schedule=zb-v", "cluster.inside_latency=1ns"]),
        ]:
            with self.subTest(key=key, settings=settings):
                text, advice = self.advice(settings)
                self.assertEqual((advice["limit"], advice["remedy"]["key"]), (limit, key), text)
                sentence = next(line for line in text.splitlines() if "; " in line and " would take " in line)
                changes = sentence[sentence.index("; ") + 2:sentence.index(" would take ")].split(" with ")
                changes = [change.replace(" = ", "=") for change in changes]
                given = {setting.split("=")[0]: setting for setting in [*settings, *changes]}
                after = self.advice(given.values())[1]["all"]["step_time_s"]
                for_the_same_tokens = 2 if key == "micro_batches" else 1
                self.assertAlmostEqual(after / for_the_same_tokens / advice["remedy"]["step_time_s"], 1, places=6)
                if key != "ranks":
                    self.assertLess(after / for_the_same_tokens, 0.98 * advice["all"]["step_time_s"])


class Answers(Case):
    def test_the_table_has_a_row_a_policy_and_is_the_same_twice(self):
        words = ("s.toml", "--compare", "uniform,static:optimal,time,optimal")
        text = self.answer(*words)
        rows = [line.split()[0] for line in text.splitlines()]
        self.assertEqual(rows[1:7], ["policy", "dense", "uniform", "static:optimal", "time", "optimal"])
        self.assertRegex("".join(text.splitlines(keepends=True)[7:]), r"^With balancer optimal \d+ of 4 ranks are enough: .*\nThe head bounds the step: .*"
                         r"; model.head_slices = \d+ would take .*\n[\d.]+ (m|b)illion tokens a GPU-hour, .*\.\n$")
        self.assertEqual(text, self.answer(*words))

    def test_json_has_the_summary_and_its_shares_add_up(self):
        summary = json.loads(self.answer("s.toml", "--json", "--compare", "optimal"))
        self.assertEqual(summary["format"], "dynmo-simulation-1")
        self.assertEqual([run["name"] for run in summary["runs"]], ["dense", "uniform", "optimal"])
        for run in summary["runs"]:
            self.assertGreater(run["tokens_per_s"], 0)
            time = dict(run["time_s"])
            total = time.pop("total")
            self.assertAlmostEqual(sum(time.values()), total, delta=1e-9 * total)
        self.assertEqual(summary["runs"][1]["speedup"], 1)
        self.assertEqual(summary["runs"][0]["dense_speedup"], 1)
        self.assertGreater(summary["runs"][2]["speedup"], 1.05)

    def test_costs_alone_say_nothing_of_tokens(self):
        layers = [{"name": f"layer {i}", "forward_s": 1e-3, "backward_input_s": 1e-3, "backward_weight_s": 1e-3} for i in range(4)]
        self.write("load.jsonl", json.dumps({"format": "dynmo-load-trace-1", "layers": layers}) + '\n{"step": 0}\n')
        self.write("costs.json", json.dumps({"format": "dynmo-profile-1", "layers": layers}))
        none = ("--set", "dynamism.source=none")
        for costs in (("dynamism.trace=load.jsonl",), ("model.profile=costs.json",)):
            words = ("s.toml", *none, "--set", *costs, "--set", "model.micro_batch_size=2")
            text = self.answer(*words)
            self.assertIn("micro-batches/s", text)
            self.assertNotIn("gpt of 8 blocks", text)
            self.assertEqual(json.loads(self.answer(*words, "--json"))["runs"][0]["tokens_per_s"], 0)
            run = json.loads(self.answer(*words, "--json", "--set", "model.sequence=100"))["runs"][0]
            self.assertAlmostEqual(run["tokens_per_s"], run["micro_batches_per_s"] * 200, delta=1e-9 * run["tokens_per_s"])

    def test_each_policy_says_how_long_it_took(self):
        said = self.simulate("s.toml", "--compare", "uniform,static:optimal,optimal").stderr.splitlines()
        self.assertEqual([line.split()[1] for line in said], ["dense", "uniform", "static:optimal", "optimal"])

    def test_settings_change_keys(self):
        summary = json.loads(self.answer("s.toml", "--json", "--set", "training.steps=7", "--set", "cluster.pipeline_ranks=2"))
        self.assertEqual((summary["steps"], summary["pipeline_ranks"]), (7, 2))

    def test_trace_holds_the_last_steps_of_every_run(self):
        self.answer("s.toml", "--trace", "out.json", "--compare", "optimal")
        events = json.loads((self.folder / "out.json").read_text())["traceEvents"]
        names = {event["args"]["name"] for event in events if event.get("name") == "process_name"}
        self.assertEqual(names, {"dense", "uniform", "optimal"})


class BadInput(Case):
    def test_wrong_units_name_line_and_unit(self):
        self.write("bad.toml", "[cluster]\n\nmemory = \"80 parsec\"\n")
        self.assert_refused(2, ["bad.toml"], "bad.toml:3: cluster.memory is '80 parsec'", "80GiB")

    def test_missing_files(self):
        self.assert_refused(2, ["s.toml", "--set", "dynamism.source=none", "--set", "dynamism.trace=none.jsonl"], "none.jsonl")
        self.assert_refused(2, ["s.toml", "--trace", "no/such/folder.json"], "no/such/folder.json")

    def test_infeasible_memory_says_so_in_json_too(self):
        out = self.assert_refused(3, ["s.toml", "--set", "cluster.memory=1MiB", "--json", "--compare", "optimal"], "memory")
        self.assertIn("memory", json.loads(out)["error"])


if __name__ == "__main__":
    unittest.main()
