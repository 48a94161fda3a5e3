# SPDX-License-Identifier: Apache-2.0
"""`dynmo report --html`: its numbers are those of the records, whoever draws them."""
import json
import os
import re
import shutil
import subprocess
import unittest

from browser import VEGA
from plans import plan_of
from program import DYNMO
from run_case import TINY, RunCase, settings

DRAW = """
import collections, json, re, sys, vl_convert
given = json.load(sys.stdin)
vl_convert.javascript_bundle(given["script"])  # fails where it is no JavaScript
for spec in given["specs"]:
    svg = vl_convert.vegalite_to_svg(spec)
    print(json.dumps(collections.Counter(re.findall('aria-roledescription="([a-z]+) mark"', svg))))
"""
STEPS, RANKS = 12, 2
HOSTILE = '<!--<script>&"\u2028'  # a name


def tables_of(run):
    """With the tables that the page makes of the seconds of layers and of the tracks of ranks."""
    columns = run["tables"]["steps"]
    layers = [{"layer": layer, "seconds": seconds, "step": column["step"], "to_step": column["to_step"]}
              for layer, row in enumerate(run["seconds"]) for seconds, column in zip(row, columns, strict=True)]
    spans = [{"plan": track["plan"], "rank": track["rank"], "action": action, "kind": re.sub("[0-9]", "", action), "start_s": start,
              "end_s": end}
             for track in run["tracks"] for action, start, end in zip(track["actions"], track["start_s"], track["end_s"], strict=True)]
    return {**run["tables"], "layers": layers, "spans": spans}


def record(step, rank=0, **facts):
    return {"format": "dynmo-step-1", "step": step, "rank": rank, "generation": 0, "tokens": 100, "first_layer": rank, "layers": 1,
            "loss": step, "step_s": 0.5, "predicted_s": 0.4, "busy_s": 0.25, "idle_s": 0.25, "frozen_layers": 0, "imbalance": 0.1,
            "bubble": 0.5, "memory_bytes": 1 << 20, **facts}


def write_lines(path, lines):
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))


def moves(micro_batches, first, *planned):
    """Events of a run: (step, gain, cut, whether layers moved) of each decision that was taken."""
    plan = plan_of(first)
    events = [{"event": "start", "step": 0, "plan": plan, "micro_batches": micro_batches}]
    for generation, (step, gain_s, cut, moved) in enumerate(planned, 1):
        plan = plan_of(cut, generation=generation)
        events.append({"event": "decision", "step": step, "taken": True, "gain_s": gain_s, "plan": plan})
        if moved:
            events.append({"event": "move", "step": step, "plan": plan})
    return events


def replayed(forward, backward, micro_batches):
    """When the actions of 1F1B begin and end, whose messages take no time: {(rank, action): (start, end)}."""
    ranks, times = len(forward), {}
    orders = []
    for rank in range(ranks):
        ahead = min(ranks - 1 - rank, micro_batches)
        order = [("F", m) for m in range(ahead)]
        for m in range(micro_batches):
            order += [("F", m + ahead)] if m + ahead < micro_batches else []
            order.append(("B", m))
        orders.append(order)
    free, left = [0.0] * ranks, [list(order) for order in orders]
    while any(left):
        for rank, order in enumerate(left):
            while order:
                kind, m = order[0]
                needs = (rank - 1, f"{rank - 1}F{m}") if kind == "F" else (rank + 1, f"{rank + 1}B{m}")
                if needs[0] in range(ranks) and needs not in times:
                    break
                start = max(free[rank], times[needs][1] if needs[0] in range(ranks) else 0.0)
                free[rank] = start + (forward if kind == "F" else backward)[rank]
                times[rank, f"{rank}{kind}{m}"] = (start, free[rank])
                order.pop(0)
    return times


def train(case, name):
    """A comparison of two runs of 12 steps while layers freeze."""
    words = [DYNMO, "train", "-n", str(RANKS), "--steps", str(STEPS), "--compare", "static,balanced", "--data", str(case.data),
             "--out", str(case.folder / name)]
    words += settings([*TINY, "freezing.enabled=true", "freezing.start=0.1", "freezing.end=0.6", "run.load_trace=1"])
    return subprocess.run(words, capture_output=True, text=True, timeout=120, stdin=subprocess.DEVNULL, cwd=case.folder, check=False)


def moved_run(run):
    """Four layers on two ranks, the second of half the speed. The largest gain is promised by a move that is not made."""
    write_lines(run / "records/rank-0.jsonl", map(record, range(12)))
    layer = {"forward_s": 0.01, "backward_input_s": 0.01, "backward_weight_s": 0.01}
    write_lines(run / "load-trace.jsonl", [
        {"format": "dynmo-load-trace-1", "layers": [layer] * 4}, {"step": 0}, {"step": 5, "forward_s": [0.01, 0.02, 0.03, 0.04]},
        {"step": 7, "forward_s": [1, 1, 1, 1]}])
    write_lines(run / "events.jsonl", moves(5, [1, 3], (2, 0.1, [2, 2], True), (6, 0.5, [3, 1], True), (8, 0.9, [1, 3], False),
                                            (9, 0.2, [2, 2], True)))
    (run / "cluster.json").write_text(json.dumps({"format": "dynmo-cluster-1", "ranks": [{}, {"speed": 0.5}],
                                                  "links": {"inside_node": {}, "between_nodes": {}}}))
    return run


EXITS_LEFT = [[0, 0, 64], [16, 8, 40], [32, 16, 16]]  # of 64 tokens, at two exits and the head, by step


def survivor_run(run):
    """A run of early exit that loses two ranks, then a third."""
    write_lines(run / "records/rank-0.jsonl", (
        record(step, sources={"early_exit": {"left": left, "tokens": 64}} if left else {}) for step, left in enumerate([*EXITS_LEFT, None])))
    write_lines(run / "events.jsonl", [
        {"event": "start", "step": 0, "ranks": 5, "plan": plan_of([1, 1])},
        {"event": "move", "step": 1, "layers": 3, "plan": plan_of([1, 1], generation=1)},
        {"event": "loss", "step": 2, "lost": [3, 4], "why": "rank 3 was lost"},
        {"event": "loss", "step": 3, "lost": [2], "why": "rank 2 was lost"}])
    return run


class HtmlReport(RunCase):
    @classmethod
    def setUpClass(cls):
        super().setUpClass()
        cls.script = cls.folder / "vega.js"
        cls.script.write_text("window.vegaEmbed = null; // </script>")
        cls.run_name = HOSTILE
        done = train(cls, cls.run_name)
        if done.returncode != 0:
            raise AssertionError(done.stdout + done.stderr)

    def report(self, *words, script=None):
        return self.run_command([DYNMO, "report", *words], env={**os.environ, "DYNMO_VEGA": str(script or self.script)})

    def document(self, *runs):
        out = self.folder / "out.html"
        self.succeeded(self.report(*runs, "--html", str(out)))
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
            head = dict(run["head"])
            self.assertEqual(head["model"], "llama of 3 blocks, hidden 32, sequence 16, with freezing")
            self.assertEqual((head["ranks"], head["steps"]), (str(RANKS), f"0 to {STEPS - 1}"))
            self.assertEqual("gain" in head, name == "balanced")
            self.assertEqual(head["program"], subprocess.run([DYNMO, "--version"], capture_output=True, text=True, check=True).stdout.strip())
            moved = [event for event in events if event["event"] == "move"]
            self.assertEqual(head["moves"].split(",")[0], str(len(moved)))
        tables_named = {name for chart in document["charts"] for name in chart["tables"]}
        self.assertLessEqual(tables_named, set(tables_of(document["runs"][0])))

    def test_the_error_of_several_clocks_is_in_the_head(self):
        run = self.folder / "clocks"
        shutil.copytree(self.folder / self.run_name, run)
        summary = json.loads((run / "summary.json").read_text())
        summary["runs"][1]["clock_error_s"] = 5.25e-3
        (run / "summary.json").write_text(json.dumps(summary))
        heads = [dict(told["head"]) for told in self.document(str(run))[0]["runs"]]
        self.assertEqual([head.get("clocks") for head in heads], [None, "of several hosts; times in the trace are right within 5.25 ms"])

    def test_lost_ranks_and_exits_are_tables_and_in_the_head(self):
        document, page = self.document(str(survivor_run(self.folder / "survivor")))
        told = document["runs"][0]
        self.assertEqual(told["head"], [["ranks", "5"], ["steps", "0 to 3"], ["speed", "200 tokens/s, 500.00 ms a step"],
                                        ["moves", "1, 3 layers in all"], ["lost ranks", "3 of them, at 2 steps"]])
        self.assertEqual([(row["step"], row["ranks"]) for row in told["tables"]["losses"]], [(2, 2), (3, 1)])
        exits = told["tables"]["exits"]
        self.assertEqual([(row["step"], row["exit"], row["order"], row["share"]) for row in exits],
                         [(step, name, i, row[i] / 64) for step, row in enumerate(EXITS_LEFT) for i, name in enumerate(("exit 0", "exit 1", "head"))])
        self.assertNotIn("{{", page.split("</script>")[0], "the places of document and script are filled")

    def test_the_programs_that_wrote_a_run_are_named_in_their_order(self):
        run = self.folder / "resumed"
        write_lines(run / "records/rank-0.jsonl", (record(step) for step in range(4)))
        start = {"event": "start", "plan": plan_of([2]), "micro_batches": 4}
        write_lines(run / "events.jsonl", [{**start, "step": 0, "program": "dynmo 0.1.0 (a)"}, {**start, "step": 1, "program": "dynmo 0.1.0 (a)"},
                                           {**start, "step": 2, "program": "dynmo 0.1.0 (b)"}, {**start, "step": 3}])
        self.assertEqual(dict(self.document(str(run))[0]["runs"][0]["head"])["program"], "dynmo 0.1.0 (a), then dynmo 0.1.0 (b)")

    def test_a_long_run_is_drawn_from_means(self):
        """10,000 steps of 98 layers: as many columns as a screen shows, and a page that can be sent."""
        run, ranks = self.folder / "long", 16
        write_lines(run / "records/rank-0.jsonl", (record(step, layers=98) for step in range(10_000)))
        layer = {"forward_s": 0.00123456, "backward_input_s": 0.001, "backward_weight_s": 0.001, "parameter_bytes": 4}
        write_lines(run / "load-trace.jsonl", [
            {"format": "dynmo-load-trace-1", "layers": [{"name": f"layer.{i}", **layer} for i in range(98)]}, {"step": 0}])
        write_lines(run / "events.jsonl", moves(32, [8, *[6] * (ranks - 1)], (5000, 1, [6] * (ranks - 1) + [8], True)))
        document, page = self.document(str(run))
        tables = tables_of(document["runs"][0])
        self.assertEqual(len(tables["steps"]), 400)
        self.assertEqual(len(tables["layers"]), 400 * 98)
        for row in tables["steps"]:
            self.assertEqual(row["to_step"] - row["step"], 25)
            self.assertEqual(row["loss"], sum(range(row["step"], row["to_step"])) / 25)
        self.assertEqual(len(tables["spans"]), 2 * ranks * 32 * 2)  # F and B of each micro-batch under both plans
        self.assertLessEqual(len(page.encode()) + 900_000, 2_500_000, "with Vega's script")

    def test_many_ranks_are_drawn_from_means_of_more_steps(self):
        run, ranks, steps = self.folder / "wide", 200, 300
        for rank in range(ranks):
            write_lines(run / f"records/rank-{rank}.jsonl", (
                record(step, rank, step_s=1, busy_s=(rank + step % 4) / 256) for step in range(steps)))
        layer = {"forward_s": 0.001, "backward_input_s": 0.001, "backward_weight_s": 0.001}
        write_lines(run / "load-trace.jsonl", [{"format": "dynmo-load-trace-1", "layers": [layer] * (ranks + 1)}, {"step": 0}])
        write_lines(run / "events.jsonl", moves(400, [2, *[1] * (ranks - 1)], (5, 1, [1] * (ranks - 1) + [2], True)))
        document, page = self.document(str(run))
        tables = tables_of(document["runs"][0])
        self.assertEqual(len(tables["steps"]), steps)
        self.assertLessEqual(len(tables["ranks"]), 16_000)
        self.assertEqual(len(tables["ranks"]), ranks * steps / 4)
        for row in tables["ranks"]:
            self.assertEqual(row["to_step"] - row["step"], 4)
            self.assertAlmostEqual(row["idle"], 1 - (row["rank"] + 1.5) / 256, places=9)
        # ... and a step of the first and the last ones, as far as it can be seen.
        for plan in dict.fromkeys(row["plan"] for row in tables["spans"]):
            spans = [row for row in tables["spans"] if row["plan"] == plan]
            self.assertEqual(len(spans), 3200)
            self.assertLessEqual({row["rank"] for row in spans}, {*range(16), *range(ranks - 16, ranks)})
            self.assertEqual(min(row["start_s"] for row in spans), 0)
        self.assertLessEqual(len(page.encode()) + 900_000, 3_000_000, "with Vega's script")

    def test_a_step_before_and_after_the_move_of_the_largest_gain(self):
        document, _ = self.document(str(moved_run(self.folder / "moved")))
        spans = tables_of(document["runs"][0])["spans"]
        before, after = dict.fromkeys(row["plan"] for row in spans)
        wanted = {before: replayed([0.03, 0.07 / 0.5], [0.04, 0.04 / 0.5], 5),  # 2|2 with the costs of steps 5 and 6
                  after: replayed([0.06, 0.04 / 0.5], [0.06, 0.02 / 0.5], 5)}
        for plan, times in wanted.items():
            given = {(row["rank"], row["action"]): (row["start_s"], row["end_s"]) for row in spans if row["plan"] == plan}
            self.assertEqual(given.keys(), times.keys())
            for key, both in times.items():
                for one, other in zip(given[key], both, strict=True):
                    self.assertAlmostEqual(one, other, places=8, msg=(plan, key))
        ends = [max(end for _, end in times.values()) for times in wanted.values()]
        self.assertEqual([before, after], [f"before step 6: {ends[0]:.2f} s a step", f"from step 6 on: {1000 * ends[1]:.2f} ms a step"])
        self.assertTrue(all(row["kind"] in row["action"] for row in spans))

    def test_no_step_is_drawn_where_costs_or_plans_do_not_say_how_long_it_takes(self):
        run = moved_run(self.folder / "moved")
        for change in "no costs", "other layers", "no micro-batches", "nothing moved":
            events = moves(5, [1, 3], (2, 0.1, [2, 2], change != "nothing moved"))
            if change == "no micro-batches":
                del events[0]["micro_batches"]
            write_lines(run / "events.jsonl", events)
            layers = [{"forward_s": 1, "backward_input_s": 1, "backward_weight_s": 1}] * (3 if change == "other layers" else 4)
            write_lines(run / "load-trace.jsonl", [{"format": "dynmo-load-trace-1", "layers": layers}, {"step": 0}])
            if change == "no costs":
                (run / "load-trace.jsonl").unlink()
            document, _ = self.document(str(run))
            self.assertEqual(tables_of(document["runs"][0])["spans"], [], change)

    def test_a_run_that_moves_layers_shows_how(self):
        layers = [{"name": f"layer{i}", "forward_s": 0.002, "backward_input_s": 0.002, "backward_weight_s": 0.002, "parameter_bytes": 64}
                  for i in range(6)]
        profile = self.folder / "profile.json"
        profile.write_text(json.dumps({"format": "dynmo-profile-1", "layers": layers}))
        done = self.succeed([DYNMO, "train", "-n", "2", "--steps", "12", "--out", str(self.folder / "emulated"), *settings(
            ["run.device=emulated", "train.validation_every=0", "pipeline.pin=false", f"emulated.profile={profile}", "pipeline.cut=[5,1]",
             "batch.micro_batches=4"])])
        document, _ = self.document(str(self.folder / "emulated"))
        spans = tables_of(document["runs"][0])["spans"]
        plans = list(dict.fromkeys(row["plan"] for row in spans))
        self.assertEqual(len(plans), 2, done.stdout)
        # With costs that were written down for that, whatever the step.
        lines = [[json.loads(line) for line in (self.folder / "emulated" / name).read_text().splitlines()]
                 for name in ("events.jsonl", "load-trace.jsonl")]
        moved = {event["step"] for event in lines[0] if event["event"] == "move"}
        self.assertTrue(moved)
        self.assertLessEqual(moved, {line["step"] for line in lines[1] if "step" in line})
        for plan in plans:
            for rank in range(2):
                forward = [row["action"] for row in spans if (row["plan"], row["rank"], row["kind"]) == (plan, rank, "F")]
                self.assertEqual(forward, [f"{rank}F{m}" for m in range(4)])

    def test_what_is_missing_or_wrong(self):
        run = str(self.folder / self.run_name)
        self.assert_error(self.report(run, "--html", "out.html", script=self.folder / "nowhere.js"), 2, "scripts/setup report", "nowhere.js")
        self.assert_error(self.report(str(self.folder / "nowhere"), "--html", str(self.folder / "out.html")), 2, "has no records")
        self.assert_error(self.report(run, run), 2, "2 runs, wanted one without --html")
        self.assert_error(self.report(run, "--html", "out.html", "--traffic"), 2, "--html with --traffic")
        wanted = 'wanted the folder of a run, or a document of format "dynmo-html-report-1"'
        none = json.dumps({"format": "dynmo-html-report-1", "charts": [], "runs": 1, "together": []})
        for text, said in ("{", "parse"), (none, wanted), ("[]", wanted):
            (self.folder / "document.json").write_text(text)
            self.assert_error(self.report("document.json", "--html", "out.html"), 2, "document.json", said)

    def test_a_document_of_the_format_is_a_page_too(self):
        given, page = self.document(str(moved_run(self.folder / "moved")))
        (self.folder / "document.json").write_text(json.dumps(given))
        again, same = self.document(str(self.folder / "document.json"))
        self.assertEqual((again, same), (given, page))

    @unittest.skipUnless((VEGA / "complete").exists(), "Vega is not here: scripts/setup report")
    def test_every_chart_can_be_drawn(self):
        document, page = self.document(str(self.folder / self.run_name), str(moved_run(self.folder / "moved")),
                                        str(survivor_run(self.folder / "survivor")))
        charts = []
        for run in document["runs"][1:]:
            tables = tables_of(run)
            charts += [(chart, tables) for chart in document["charts"] if tables[chart["tables"][0]]]
        self.assertIn("spans", {chart["tables"][0] for chart, _ in charts})
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
                self.assertEqual(marks.get("rule", 0), sum(len(own[name]) for name in chart["tables"][1:]), chart["title"])
            if '"area"' in spec:
                self.assertEqual(marks["area"], len(EXITS_LEFT[0]), chart["title"])
            if '"line"' in spec:
                self.assertGreaterEqual(marks["line"], 1, chart["title"])


if __name__ == "__main__":
    unittest.main()
