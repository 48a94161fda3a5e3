# SPDX-License-Identifier: Apache-2.0
"""`dynmo report --html`: its numbers are those of the records, whoever draws them."""
import json
import os
import pathlib
import re
import subprocess
import unittest

from program import DYNMO
from run_case import TINY, RunCase, settings

CACHE = pathlib.Path(os.environ.get("DYNMO_CACHE") or pathlib.Path(os.environ.get("XDG_CACHE_HOME") or pathlib.Path.home() / ".cache") / "dynmo")
VEGA = CACHE / "report"
DRAW = """
import collections, json, re, sys, vl_convert
given = json.load(sys.stdin)
vl_convert.javascript_bundle(given["script"])  # fails where it is no JavaScript
for spec in given["specs"]:
    svg = vl_convert.vegalite_to_svg(spec)
    print(json.dumps(collections.Counter(re.findall('aria-roledescription="([a-z]+) mark"', svg))))
"""
STEPS, RANKS = 12, 2


def tables_of(run):
    """With the table that the page makes of the seconds of layers."""
    columns = run["tables"]["steps"]
    layers = [{"layer": layer, "seconds": seconds, "step": column["step"], "to_step": column["to_step"]}
              for layer, row in enumerate(run["seconds"]) for seconds, column in zip(row, columns, strict=True)]
    return {**run["tables"], "layers": layers}


class HtmlReport(RunCase):
    @classmethod
    def setUpClass(cls):
        super().setUpClass()
        cls.script = cls.folder / "vega.js"
        cls.script.write_text("window.vegaEmbed = null; // </script>")
        cls.run_name = '<!--<script>&"\u2028'
        done = cls.train(cls.run_name)
        if done.returncode != 0:
            raise AssertionError(done.stdout + done.stderr)

    @classmethod
    def train(cls, name):
        words = [DYNMO, "train", "-n", str(RANKS), "--steps", str(STEPS), "--compare", "static,balanced", "--data", str(cls.data), "--out",
                 str(cls.folder / name)]
        words += settings([*TINY, "freezing.enabled=true", "freezing.start=0.1", "freezing.end=0.6", "run.load_trace=1"])
        return subprocess.run(words, capture_output=True, text=True, timeout=120, stdin=subprocess.DEVNULL, cwd=cls.folder, check=False)

    def report(self, *words, script=None):
        return self.run_command([DYNMO, "report", *words], env={**os.environ, "DYNMO_VEGA": str(script or self.script)})

    def document(self, *runs):
        out = self.folder / "out.html"
        result = self.report(*runs, "--html", str(out))
        self.assertEqual(result.returncode, 0, result.stderr)
        page = out.read_text()
        found = re.findall(r'<script type="application/json" id="document">(.*?)</script>', page, re.DOTALL)
        self.assertEqual(len(found), 1)
        self.assertEqual(page.count("</script>"), 3, "neither names nor the script end an element")
        self.assertNotIn("<", found[0])
        self.assertNotIn("= >", page, "what a formatter makes of an arrow")
        self.assertNotRegex(re.sub(r"<script.*?</script>", "", page, flags=re.DOTALL), "https?://")
        return json.loads(found[0]), page

    def records(self, name, rank):
        path = self.folder / self.run_name / name / "records" / f"rank-{rank}.jsonl"
        return [json.loads(line) for line in path.read_text().splitlines()]

    def test_numbers_are_those_of_the_records(self):
        document, _ = self.document(str(self.folder / self.run_name))
        self.assertEqual(document["format"], "dynmo-html-report-1")
        self.assertEqual([run["name"] for run in document["runs"]], [f"{self.run_name}: static", f"{self.run_name}: balanced"])
        self.assertEqual(len(document["all"]["steps"]), 2 * STEPS)
        for run, name in zip(document["runs"], ("static", "balanced")):
            tables, first = tables_of(run), self.records(name, 0)
            for row, record in zip(tables["steps"], first, strict=True):
                for key in ("step", "loss", "step_s", "imbalance", "bubble", "predicted_s"):
                    self.assertEqual(row[key], record[key], key)
                self.assertAlmostEqual(row["tokens_per_s"], record["tokens"] / record["step_s"], places=6)
            for rank in range(RANKS):
                rows = [row for row in tables["ranks"] if row["rank"] == rank]
                for row, record in zip(rows, self.records(name, rank), strict=True):
                    self.assertAlmostEqual(row["idle"], 1 - record["busy_s"] / record["step_s"], places=9)
                    self.assertEqual(row["memory_bytes"], record["memory_bytes"])
            self.assertEqual(len(tables["layers"]), STEPS * len(run["layers"]))
            self.assertEqual(run["layers"][0], "embedding")
            # At every step the cuts are those of the owners of layers in the records.
            for step in range(STEPS):
                cuts = sorted(row["layer"] for row in tables["cuts"] if row["step"] <= step < row["to_step"])
                begins = sorted(self.records(name, rank)[step]["first_layer"] for rank in range(1, RANKS))
                self.assertEqual(cuts, begins, (name, step))
            events = [json.loads(line) for line in (self.folder / self.run_name / name / "events.jsonl").read_text().splitlines()]
            self.assertEqual([row["reason"] for row in tables["decisions"]], [event["reason"] for event in events if event["event"] == "decision"])
            self.assertGreater(sum(row["bytes"] for row in tables["traffic"]), 0)
        tables_named = {name for chart in document["charts"] for name in chart["tables"]}
        self.assertLessEqual(tables_named, set(tables_of(document["runs"][0])))

    def test_a_long_run_is_drawn_from_means(self):
        """10,000 steps of 98 layers: as many columns as a screen shows, and a page that can be sent."""
        run = self.folder / "long"
        (run / "records").mkdir(parents=True)
        with (run / "records/rank-0.jsonl").open("w") as file:
            for step in range(10_000):
                file.write(json.dumps({"format": "dynmo-step-1", "step": step, "rank": 0, "generation": 0, "tokens": 100, "first_layer": 0,
                                       "layers": 98, "loss": step, "step_s": 0.5, "predicted_s": 0.4, "busy_s": 0.25, "idle_s": 0.25,
                                       "frozen_layers": 0, "imbalance": 0.1, "bubble": 0.5, "memory_bytes": 1 << 20}) + "\n")
        layer = {"forward_s": 0.00123456, "backward_input_s": 0.001, "backward_weight_s": 0.001, "parameter_bytes": 4}
        with (run / "load-trace.jsonl").open("w") as file:
            file.write(json.dumps({"format": "dynmo-load-trace-1", "layers": [{"name": f"layer.{i}", **layer} for i in range(98)]}) + "\n")
            file.write('{"step":0}\n')
        document, page = self.document(str(run))
        tables = tables_of(document["runs"][0])
        self.assertEqual(len(tables["steps"]), 400)
        self.assertEqual(len(tables["layers"]), 400 * 98)
        for row in tables["steps"]:
            self.assertEqual(row["to_step"] - row["step"], 25)
            self.assertEqual(row["loss"], sum(range(row["step"], row["to_step"])) / 25)
        self.assertLessEqual(len(page.encode()) + 900_000, 2_500_000, "with Vega's script")

    def test_many_ranks_are_drawn_from_means_of_more_steps(self):
        run, ranks, steps = self.folder / "wide", 200, 300
        (run / "records").mkdir(parents=True)
        for rank in range(ranks):
            with (run / f"records/rank-{rank}.jsonl").open("w") as file:
                for step in range(steps):
                    file.write(json.dumps({"format": "dynmo-step-1", "step": step, "rank": rank, "generation": 0, "tokens": 100,
                                           "first_layer": rank, "layers": 1, "loss": step, "step_s": 1, "predicted_s": 0.4,
                                           "busy_s": (rank + step % 4) / 256, "idle_s": 0.25, "frozen_layers": 0, "imbalance": 0.1,
                                           "bubble": 0.5, "memory_bytes": 1 << 20}) + "\n")
        document, page = self.document(str(run))
        tables = tables_of(document["runs"][0])
        self.assertEqual(len(tables["steps"]), steps)
        self.assertLessEqual(len(tables["ranks"]), 16_000)
        self.assertEqual(len(tables["ranks"]), ranks * steps / 4)
        for row in tables["ranks"]:
            self.assertEqual(row["to_step"] - row["step"], 4)
            self.assertAlmostEqual(row["idle"], 1 - (row["rank"] + 1.5) / 256, places=9)
        self.assertLessEqual(len(page.encode()) + 900_000, 2_500_000, "with Vega's script")

    def test_what_is_missing_or_wrong(self):
        run = str(self.folder / self.run_name)
        self.assert_error(self.report(run, "--html", "out.html", script=self.folder / "nowhere.js"), 2, "scripts/setup report", "nowhere.js")
        self.assert_error(self.report(str(self.folder / "nowhere"), "--html", str(self.folder / "out.html")), 2, "has no records")
        self.assert_error(self.report(run, run), 2, "2 runs, wanted one without --html")
        self.assert_error(self.report(run, "--html", "out.html", "--traffic"), 2, "--html with --traffic")

    @unittest.skipUnless((VEGA / "complete").exists(), "Vega is not here: scripts/setup report")
    def test_every_chart_can_be_drawn(self):
        document, page = self.document(str(self.folder / self.run_name))
        tables = tables_of(document["runs"][1])
        charts = [(chart, tables) for chart in document["charts"] if tables[chart["tables"][0]]]
        charts += [(chart, document["all"]) for chart in document["together"]]
        specs = [{"width": 600, **chart["spec"], "datasets": {name: own[name] for name in chart["tables"]}} for chart, own in charts]
        given = {"specs": specs, "script": re.findall(r"<script>(.*?)</script>", page, re.DOTALL)[-1]}
        done = subprocess.run([VEGA / "bin/python", "-c", DRAW], input=json.dumps(given), capture_output=True, text=True, timeout=120, check=False)
        self.assertEqual(done.returncode, 0, done.stderr)
        for (chart, own), line in zip(charts, done.stdout.splitlines(), strict=True):
            marks = json.loads(line)
            spec = json.dumps(chart["spec"])
            if '"rect"' in spec:  # a rectangle a row, a line a rule
                self.assertEqual(marks["rect"], len(own[chart["tables"][0]]), chart["title"])
            if '"rule"' in spec:
                self.assertEqual(marks.get("rule", 0), len(own[chart["tables"][1]]), chart["title"])
            if '"line"' in spec:
                self.assertGreaterEqual(marks["line"], 1, chart["title"])


if __name__ == "__main__":
    unittest.main()
