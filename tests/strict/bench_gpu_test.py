# SPDX-License-Identifier: Apache-2.0
"""bench/gpu/all as it runs on a machine with a GPU, on the strict device: every part ends well and says what it found.

PROGRAMS is a build with tests; the Python that runs this has PyTorch.
"""
import json
import os
import pathlib
import runpy
import subprocess
import sys
import tempfile
import unittest

from drawn import drawn

ALL = pathlib.Path(__file__).resolve().parents[2] / "bench/gpu/all"
FACTS, *PARTS = runpy.run_path(str(ALL))["PARTS"]
PROGRAMS = os.environ["PROGRAMS"]


def run_all(*words):
    return subprocess.run([sys.executable, ALL, *map(str, words)], capture_output=True, text=True, timeout=600, check=False)


class BenchGpu(unittest.TestCase):
    def test_every_part_runs_and_its_results_are_kept(self):
        with tempfile.TemporaryDirectory(prefix="dynmo-bench-gpu-") as folder:
            out = pathlib.Path(folder) / "out"
            parts = [FACTS, *drawn(PARTS, 3, "the parts of bench/gpu/all")]
            done = run_all(out, "--dry", "--only", ",".join(parts), "--programs", PROGRAMS, "--python", sys.executable)
            logs = "".join(path.read_text()[-2000:] for path in sorted(out.glob("*.log")))
            self.assertEqual(done.returncode, 0, done.stdout + done.stderr + logs)
            results = json.loads((out / "results.json").read_text())
            again = run_all(out, "--dry", "--programs", PROGRAMS)
            self.assertEqual((again.returncode, again.stderr), (1, f"all: '{out.resolve()}' has results: give another folder\n"))
        self.assertEqual(results["not_run"], [name for name in PARTS if name not in parts])
        rows = {name: part["rows"] for name, part in results["parts"].items()}
        self.assertEqual({name: results["parts"][name]["ran"][0]["ended"] for name in parts}, dict.fromkeys(parts, "ok"))
        for name in parts:
            getattr(self, f"check_{name}")(rows[name])
        runs = {name: {(row["technique"], row["status"] == "runs") for row in rows[name]} for name in ("table", "gains") if name in parts}
        if len(runs) == 2:
            self.assertEqual(runs["table"], runs["gains"])

    def check_facts(self, rows):
        self.assertTrue(next(row for row in rows if row["what"] == "opens")["ok"])

    def check_tests(self, rows):
        self.assertTrue(rows[-1]["ok"])

    check_commands = check_tests

    def check_table(self, rows):
        for row in rows:
            self.assertIn(row["status"], ("runs", "refused"), row)
            self.assertLess(row.get("loss_apart", 0), 1e-5, row)

    def check_speed(self, rows):
        self.assertEqual({row.get("run") for row in rows} - {None},
                         {"dynmo 1f1b", "dynmo 1f1b-fastest", "peer eager", "peer compile", "peer eager-deterministic", "products"})

    def check_profile(self, rows):
        for side in ("dynmo", "dynmo-composed", "dynmo-fastest", "eager"):
            self.assertGreater(sum(row["ms"] for row in rows if row["side"] == side and "name" in row), 0)

    def check_moves(self, rows):
        self.assertTrue(next(row for row in rows if row["what"] == "moves")["losses_equal"])

    def check_gains(self, rows):
        self.assertIn("runs", [row["status"] for row in rows])

    def test_what_it_packs_runs_elsewhere(self):
        with tempfile.TemporaryDirectory(prefix="dynmo-bench-gpu-") as folder:
            packed = pathlib.Path(folder) / "packed"
            done = run_all("--pack", packed, "--programs", PROGRAMS)
            self.assertEqual(done.returncode, 0, done.stderr)
            self.assertTrue(list((packed / "lib").glob("libfmt*")), "a library that other systems have in another version")
            self.assertFalse(list((packed / "lib").glob("libtorch*")), "that machine has its own, for its GPU")
            out = pathlib.Path(folder) / "out"
            variables = {**os.environ, "LD_LIBRARY_PATH": f"{packed}/lib:{os.environ.get('LD_LIBRARY_PATH', '')}"}
            done = subprocess.run([sys.executable, ALL, out, "--only", "facts", "--programs", packed], env=variables, check=False)
            self.assertEqual(done.returncode, 0)
            rows = json.loads((out / "results.json").read_text())["parts"]["facts"]["rows"]
            self.assertIn("commit", next(row for row in rows if row["what"] == "dynmo")["version"])

    def test_refuses_what_it_does_not_know(self):
        done = run_all("out", "--only", "sped", "--programs", PROGRAMS)
        self.assertEqual(done.returncode, 2)
        self.assertIn("--only has 'sped', wanted some of facts, tests,", done.stderr)
        done = run_all("out", "--programs", "nowhere")
        self.assertEqual(done.returncode, 2)
        self.assertIn("nowhere' has no dynmo: build it, or give a build by --programs", done.stderr)


if __name__ == "__main__":
    unittest.main()
