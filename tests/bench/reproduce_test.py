# SPDX-License-Identifier: Apache-2.0
"""bench/reproduce: the simulated figures of 24 blocks are those recorded; one that differs is named, and what ran is not run again.

DYNMO is the program; the ids of the rows to check have DYNMO_REPRODUCE_ONLY in them.
"""
import json
import os
import pathlib
import subprocess
import sys
import tempfile
import unittest

from browser import MISSING, browse, inked

ROOT = pathlib.Path(__file__).resolve().parents[2]
FOLDER = ROOT / "bench/reproduce"
sys.path.insert(0, str(FOLDER))
import page
import reproduce

ONLY = os.environ.get("DYNMO_REPRODUCE_ONLY", "/24/")
ROW = "end/mixture-of-depths/24/A-search"


class Reproduce(unittest.TestCase):
    @classmethod
    def setUpClass(cls):
        temporary = tempfile.TemporaryDirectory(prefix="dynmo-test-")
        cls.addClassCleanup(temporary.cleanup)
        cls.folder = pathlib.Path(temporary.name)

    def reproduce(self, *words, only=ONLY):
        return subprocess.run([sys.executable, FOLDER / "reproduce.py", "--dynmo", os.environ["DYNMO"], "--part", "simulated", "--only", only,
                               "--out", self.folder / "out", "--check", *words], capture_output=True, text=True, check=False)

    @staticmethod
    def told(done):
        """The lines of its output, but for the one that says that there is nothing to draw with here."""
        return [line for line in done.stdout.splitlines() if not line.startswith("no page: ")]

    def test_checks_every_figure(self):
        done = self.reproduce()
        self.assertEqual(done.returncode, 0, done.stdout + done.stderr)
        document = json.loads((self.folder / "out/results.json").read_text())
        self.assertEqual(document["format"], "dynmo-reproduce-1")
        rows = document["parts"]["simulated"]
        self.assertEqual([row["id"] for row in rows if "value" not in row], [])
        self.assertTrue(all(row["value"] <= row["bound"] * (1 + 1e-9) for row in rows if "bound" in row))
        for row in rows:
            self.assertEqual((row["spread"], row["seeds"]), ([row["value"]] * 2, [1]), row["id"])
            self.assertTrue(all(command.endswith("--set training.seed=1") for command in row["commands"]))
        self.assertEqual({"commit", "dirty", "machine", "load", "parts"} - document.keys(), set())
        self.assertEqual(len(document["load"]), 2)
        self.check_page(rows)
        kept = {path: path.stat().st_mtime_ns for path in (self.folder / "out/commands").iterdir()}

        # One value is another now: a line names it, and nothing has run again.
        recorded = json.loads((FOLDER / "recorded.json").read_text())
        recorded[ROW] *= 1 + 1e-8
        (self.folder / "changed.json").write_text(json.dumps(recorded))
        done = self.reproduce("--recorded", self.folder / "changed.json")
        self.assertEqual(done.returncode, 1)
        self.assertEqual([line.split(":")[0] for line in self.told(done)[1:]], [ROW], done.stdout + done.stderr)
        self.assertEqual({path: path.stat().st_mtime_ns for path in (self.folder / "out/commands").iterdir()}, kept)

    def check_page(self, rows):
        """A figure beside the paper's number for each row."""
        report = json.loads((self.folder / "out/report.json").read_text())
        drawn = {row["id"]: row for table in report["runs"][0]["tables"].values() for row in table}
        self.assertEqual(drawn.keys(), {row["id"] for row in rows})
        for row in rows:
            one = drawn[row["id"]]
            self.assertEqual((one["value"], one["bound"], one["goal"]), (row["value"], row.get("bound"), row.get("goal")))
            self.assertEqual(one["paper"], float(row["paper"].split()[-1]) if "paper" in row else None)
        if MISSING:
            print(f"the page is not looked at: {MISSING}")
            return
        shown, console = browse(self.folder / "out/report.html", "--dump-dom", f"--screenshot={self.folder}/page.png")
        self.assertEqual(console, [])
        self.assertGreater(inked(self.folder / "page.png"), 0.01)
        self.assertEqual(shown.count("<svg "), len(report["charts"]))
        def count(key):
            return sum(one[key] is not None for one in drawn.values())

        marks = {"bar": len(rows), "tick": count("bound") + count("goal"), "point": count("paper")}
        for kind, wanted in marks.items():
            self.assertEqual(shown.count(f'aria-roledescription="{kind}"'), wanted, kind)

    def test_rows_of_a_figure_have_labels_of_their_own(self):
        for name, part in reproduce.read_rows(FOLDER / "rows.json").items():
            for title, _, rows in page.figures_of(part, part["rows"]):
                labels = [page.label(row["id"]) for row in rows]
                self.assertEqual(len(labels), len(set(labels)), f"{name}: {title}: {labels}")
        rows = [{"id": f"scale/{ranks}/moe/{row}", "value": 1, "spread": [1, 1]} for row in ("C-search", "D-search") for ranks in (1024, 128)]
        self.assertEqual([row["row"] for row in page.table_of(rows)], [
            "128 ranks: C to search", "128 ranks: D to search", "1024 ranks: C to search", "1024 ranks: D to search"])

    def test_measured_rows_have_their_spread(self):
        """Each repetition runs; a row is the median, judged on a quiet machine alone, and what no clock decides always."""
        count = self.folder / "count"
        count.write_text("0")
        program = self.folder / "program"
        program.write_text(f"""#!{sys.executable}
import json, pathlib
count = pathlib.Path({str(count)!r})
n = int(count.read_text()) + 1
count.write_text(str(n))
runs = [{{"name": name, "speed": n * speed, "digest": digest}} for name, speed, digest in (("a", 2.0, "x"), ("b", 3.0 + n, "y"))]
print(json.dumps({{"runs": runs, "speedup": 1 + 0.25 * n, "best": 2.0, "overhead": {{"plan": 0.25, "move": 0.5}}, "unknown": None}}))
""")
        program.chmod(0o755)
        def row(name, value, **more):
            return {"id": name, "value": [["it", *place] for place in value], **more}

        rows = [row("ratio", [("b", "speed"), ("a", "speed")], floor=100), row("share", [("", "speedup"), ("", "best")], **{"is": "share"}),
                row("sum", [("", "overhead.plan+overhead.move")]), row("unknown", [("", "unknown")]),
                row("same", [("a", "digest"), ("b", "digest")], floor=1, **{"is": "same"})]
        (self.folder / "rows.json").write_text(json.dumps({"parts": {"simulated": {
            "title": "", "kind": "measured", "seeds": [7], "commands": [{"id": "it", "command": str(program), "repeat": 3}],
            "rows": rows}}}))
        done = self.reproduce("--rows", self.folder / "rows.json", only="")
        self.assertEqual(done.returncode, 1, done.stdout + done.stderr)
        given = {one["id"]: one for one in json.loads((self.folder / "out/results.json").read_text())["parts"]["simulated"]}
        self.assertEqual(count.read_text(), "3")
        for name, value, spread in (("ratio", 2.5, [2.0, 3.0]), ("share", 0.5, [0.25, 0.75]), ("sum", 0.75, [0.75, 0.75]),
                                    ("same", 0, [0, 0])):
            self.assertEqual((given[name]["value"], given[name]["spread"]), (value, spread), name)
            self.assertEqual((given[name]["runs"], len(given[name]["seconds"]), given[name]["seeds"]), (3, 3, [7]))
        self.assertEqual(given["unknown"]["failed"], "unknown is not known")
        self.assertIn("same: 0, below 1", done.stdout)

    def test_what_was_measured_is_judged_if_others_were_quiet(self):
        measured, row = {"kind": "measured"}, {"id": "speed", "value": 1.0, "floor": 2}
        self.assertEqual(list(reproduce.complaints(measured, [{**row, "others": 0.1}], {})), ["speed: 1, below 2"])
        self.assertEqual(list(reproduce.complaints(measured, [{**row, "others": 1.0}], {})), [])
        before = reproduce.processor_seconds()
        subprocess.run([sys.executable, "-c", "import time\nwhile time.process_time() < 0.5: pass"], check=True)
        machine, own = (end - begin for begin, end in zip(before, reproduce.processor_seconds()))
        self.assertGreater(own, 0.49)  # sums of clocks
        self.assertGreater(machine, 0.9 * own)

    def test_what_is_kept_fits_the_programs_and_a_quiet_machine(self):
        folder = self.folder / "kept"
        programs = {"dynmo": folder / "build/apps/dynmo/dynmo", "it": folder / "it"}
        programs["dynmo"].parent.mkdir(parents=True)
        for program in programs.values():
            program.write_text(f"#!/bin/sh\necho >> {folder}/count\n")
            program.chmod(0o755)

        def runs(measured, others=None):
            """How often it has run once a result was asked for; what is kept says that others used so many processors."""
            for path in (folder / "commands").glob("*.json") if others is not None else []:
                path.write_text(json.dumps({**json.loads(path.read_text()), "others": others}))
            reproduce.Commands(programs, folder / "commands").results({"command": "it", "measured": measured})
            return len((folder / "count").read_text())

        self.assertEqual([runs(True), runs(True, 0.0), runs(True, 1.0), runs(False, 1.0)], [1, 1, 2, 2])
        for number, part in enumerate((programs["dynmo"].with_name("dynmo-runtime"), folder / "build/libdynmo_nccl.so"), 3):
            part.write_text("another")
            self.assertEqual([runs(False), runs(False)], [number, number], part)

    def test_a_command_may_need_another_one_before(self):
        """Its files are named by the command's own."""
        rows = {"parts": {"simulated": {"title": "", "kind": "exact", "commands": [
            {"id": "steps", "before": "dynmo simulate examples/demo-load.toml --load-trace RUN.jsonl --json", "command": "dynmo trace stats RUN.jsonl"}],
            "rows": [{"id": "steps", "value": [["steps", "step ([0-9]+), layer"]]}]}}}
        (self.folder / "rows.json").write_text(json.dumps(rows))
        (self.folder / "values.json").write_text(json.dumps({"steps": 40}))
        done = self.reproduce("--rows", self.folder / "rows.json", "--recorded", self.folder / "values.json", only="")
        self.assertEqual(done.returncode, 0, done.stdout + done.stderr)

    def test_names_what_failed_and_goes_on(self):
        rows = {"parts": {"simulated": {"title": "", "kind": "exact", "commands": [
            {"id": "bad", "command": "dynmo simulate missing.toml --json"}, {"id": "good", "command": "dynmo --version"},
            {"id": "no file", "command": "dynmo --help", "file": "summary.json"}, {"id": "no program", "command": str(FOLDER / "page.py")}],
            "rows": [{"id": "one", "value": [["bad", "dense", "step_time_s"]]}, {"id": "two", "value": [["good", "([0-9]+)[.]"]]},
                     {"id": "three", "value": [["no file", ""]]}, {"id": "four", "value": [["no program", ""]]}]}}}
        (self.folder / "rows.json").write_text(json.dumps(rows))
        (self.folder / "values.json").write_text(json.dumps({"two": 0}))
        done = self.reproduce("--rows", self.folder / "rows.json", "--recorded", self.folder / "values.json", only="")
        self.assertEqual(done.returncode, 1)
        lines = self.told(done)
        self.assertTrue(lines[0].startswith("one: failed: exit code 2: dynmo: error: cannot open 'missing.toml'"), done.stdout + done.stderr)
        self.assertIn("three: failed: [Errno 2] No such file", lines[1])
        self.assertIn("four: failed: [Errno 13] Permission denied", lines[2])
        self.assertEqual(len(lines), 7)
        self.assertEqual(lines[:3], lines[4:])
        self.assertEqual(len(json.loads((self.folder / "out/results.json").read_text())["parts"]["simulated"]), 4)


if __name__ == "__main__":
    unittest.main()
