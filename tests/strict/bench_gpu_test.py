# SPDX-License-Identifier: Apache-2.0
"""bench/gpu/all as it runs on a machine with a GPU, on the strict device: every part ends well and says what it found.

PROGRAMS is a build with tests; the Python that runs this has PyTorch.
"""
import json
import os
import pathlib
import subprocess
import sys
import tempfile
import unittest

ALL = pathlib.Path(__file__).resolve().parents[2] / "bench/gpu/all"
PROGRAMS = os.environ["PROGRAMS"]


def run_all(*words):
    return subprocess.run([sys.executable, ALL, *map(str, words)], capture_output=True, text=True, timeout=600, check=False)


class BenchGpu(unittest.TestCase):
    def test_every_part_runs_and_its_results_are_kept(self):
        with tempfile.TemporaryDirectory(prefix="dynmo-bench-gpu-") as folder:
            out = pathlib.Path(folder) / "out"
            done = run_all(out, "--dry", "--programs", PROGRAMS, "--python", sys.executable)
            logs = "".join(path.read_text()[-2000:] for path in sorted(out.glob("*.log")))
            self.assertEqual(done.returncode, 0, done.stdout + done.stderr + logs)
            results = json.loads((out / "results.json").read_text())
            again = run_all(out, "--dry", "--programs", PROGRAMS)
            self.assertEqual((again.returncode, again.stderr), (1, f"all: '{out.resolve()}' has results: give another folder\n"))
        self.assertEqual(results["not_run"], [])
        rows = {name: part["rows"] for name, part in results["parts"].items()}
        self.assertEqual({name: part["ran"][0]["ended"] for name, part in results["parts"].items()}, dict.fromkeys(rows, "ok"))
        self.assertTrue(next(row for row in rows["facts"] if row["what"] == "opens")["ok"])
        self.assertTrue(rows["tests"][-1]["ok"])
        for row in rows["table"]:
            self.assertIn(row["status"], ("runs", "refused"), row)
            self.assertLess(row.get("loss_apart", 0), 1e-5, row)
        self.assertEqual({row["technique"] for row in rows["table"]}, {row["technique"] for row in rows["gains"]})
        self.assertEqual({row["technique"] for row in rows["table"] if row["status"] == "runs"},
                         {row["technique"] for row in rows["gains"] if row["status"] == "runs"})
        self.assertEqual({row.get("run") for row in rows["speed"]} - {None},
                         {"dynmo 1f1b", "dynmo 1f1b-fastest", "peer eager", "peer compile", "peer eager-deterministic", "products"})
        for side in ("dynmo", "dynmo-composed", "dynmo-fastest", "eager"):
            self.assertGreater(sum(row["ms"] for row in rows["profile"] if row["side"] == side and "name" in row), 0)
        self.assertTrue(next(row for row in rows["moves"] if row["what"] == "moves")["losses_equal"])
        self.assertTrue(rows["commands"][-1]["ok"])

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
