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

ROOT = pathlib.Path(__file__).resolve().parents[2]
FOLDER = ROOT / "bench/reproduce"
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

    def test_checks_every_figure(self):
        done = self.reproduce()
        self.assertEqual(done.returncode, 0, done.stdout + done.stderr)
        document = json.loads((self.folder / "out/results.json").read_text())
        self.assertEqual(document["format"], "dynmo-reproduce-1")
        rows = document["parts"]["simulated"]
        self.assertEqual([row["id"] for row in rows if "value" not in row], [])
        self.assertTrue(all(row["value"] <= row["bound"] * (1 + 1e-9) for row in rows if "bound" in row))
        kept = {path: path.stat().st_mtime_ns for path in (self.folder / "out/commands").iterdir()}

        # One value is another now: a line names it, and nothing has run again.
        recorded = json.loads((FOLDER / "recorded.json").read_text())
        recorded[ROW] *= 1 + 1e-8
        (self.folder / "changed.json").write_text(json.dumps(recorded))
        done = self.reproduce("--recorded", self.folder / "changed.json")
        self.assertEqual(done.returncode, 1)
        self.assertEqual([line.split(":")[0] for line in done.stdout.splitlines()[1:]], [ROW], done.stdout + done.stderr)
        self.assertEqual({path: path.stat().st_mtime_ns for path in (self.folder / "out/commands").iterdir()}, kept)

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
            {"id": "bad", "command": "dynmo simulate missing.toml --json"}, {"id": "good", "command": "dynmo --version"}],
            "rows": [{"id": "one", "value": [["bad", "dense", "step_time_s"]]}, {"id": "two", "value": [["good", "([0-9]+)[.]"]]}]}}}
        (self.folder / "rows.json").write_text(json.dumps(rows))
        (self.folder / "values.json").write_text(json.dumps({"two": 0}))
        done = self.reproduce("--rows", self.folder / "rows.json", "--recorded", self.folder / "values.json", only="")
        self.assertEqual(done.returncode, 1)
        lines = done.stdout.splitlines()
        self.assertTrue(lines[0].startswith("one: failed: exit code 2: dynmo: error: cannot open 'missing.toml'"), done.stdout + done.stderr)
        self.assertEqual(len(lines), 3)
        self.assertEqual(lines[0], lines[2])


if __name__ == "__main__":
    unittest.main()
