# SPDX-License-Identifier: Apache-2.0
"""The runner of the peer tests counts what passed, failed and was skipped, whatever a program does."""
import pathlib
import subprocess
import sys
import tempfile
import unittest

RUN = pathlib.Path(__file__).resolve().parents[1] / "peers" / "run.py"
sys.path.append(str(RUN.parent))
import families_check
import gloo_ranks


class Ranks(unittest.TestCase):
    """The starter that the programs share."""

    def test_a_rank_that_fails_ends_the_others(self):
        code = "import os, sys, time; print('rank', os.environ['RANK']); sys.exit(3) if os.environ['RANK'] == '1' else time.sleep(1000)"
        gloo_ranks.GRACE_S, now = 0.1, gloo_ranks.GRACE_S
        self.addCleanup(setattr, gloo_ranks, "GRACE_S", now)
        self.assertEqual(gloo_ranks.run([sys.executable, "-c", code], 3), "rank 0 was not done\nrank 2 was not done\nrank 1\n")

    def test_ranks_that_are_not_done(self):
        code = "import os, time; time.sleep(1000 if os.environ['RANK'] == '1' else 0)"
        self.assertEqual(gloo_ranks.run([sys.executable, "-c", code], 2, 0.5).splitlines()[-1], "rank 1 was not done after 0.5 s")
        self.assertEqual(gloo_ranks.run([sys.executable, "-c", ""], 2), "")

    def test_a_package_that_ranks_cannot_import_is_a_line(self):
        code = f"import sys; sys.path.append({str(RUN.parent)!r}); import gloo_ranks; gloo_ranks.use_package('/none/a/b/dynmo')"
        done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=100)
        self.assertEqual((done.returncode, done.stderr), (2, ""))
        self.assertRegex(done.stdout, r"^FAIL .*: its ranks cannot import dynmo.torch \(.*\), wanted --dynmo PROGRAM of a build folder, .*\n$")


class Families(unittest.TestCase):
    """The table of kinds of transformers, which runs of some kinds make together."""

    def setUp(self):
        scratch = tempfile.TemporaryDirectory()
        self.addCleanup(scratch.cleanup)
        self.path, self.page = pathlib.Path(scratch.name, "build", "families.json"), pathlib.Path(scratch.name, "page.md")

    def test_a_table_of_two_runs(self):
        first = families_check.Results(self.path, "5.1.0")
        first.keep("llama", ("differs", "loss of step 3"))
        first.keep("git", ("no loop", "ValueError: Expected input batch_size (0) to match"))
        first.keep("odd", ("no loop", "KeyError: 'odd'"))
        families_check.Results(self.path, "5.2.0").keep("llama", ("fails", "with another version"))
        second = families_check.Results(self.path, "5.1.0")
        for kind in ("llama", "bloom"):
            second.keep(kind, ("equal", "1 carried"))
        second.keep("dory", ("refused", "model: block 1 runs where block 3 was expected"))
        self.page.write_text("\n".join(["# Page", *families_check.MARKS, "behind"]))
        results, known = families_check.Results(self.path, "5.1.0"), ["bloom", "dory", "git", "llama", "odd"]
        self.assertEqual(families_check.write_table(self.page, results, known), "")
        rows = ["| bloom llama | equal bit for bit |", "| dory | refused: blocks run more than once |",
                "| odd | no loop: for a reason of its own |", "| git | no loop: its loss wants pictures |", families_check.MARKS[1], "behind"]
        self.assertEqual(self.page.read_text().splitlines(), [
            "# Page", families_check.MARKS[0],
            "Of 5 kinds of transformers 5.1.0, 3 have a loop with a tiny config here, and 2 of them are equal bit for bit. The check prints "
            "the line of each refusal.", "", "| kinds | |", "| --- | --- |", *rows])

        # Another machine runs one kind; the others stay where the page has them.
        self.path.unlink()
        third = families_check.Results(self.path, "5.1.0")
        third.keep("git", ("equal", ""))
        self.assertEqual(families_check.write_table(self.page, third, known), "")
        self.assertEqual(self.page.read_text().splitlines()[6:], ["| bloom git llama | equal bit for bit |", *rows[1:3], *rows[4:]])
        self.assertIn(" 4 have a loop with a tiny config here, and 3 of them", self.page.read_text())
        other = families_check.Results(self.path, "5.2.0")
        self.assertIn("has a result of 5 kinds of transformers 5.2.0 such as bloom,", families_check.write_table(self.page, other, known))

    def test_a_table_without_some_results_is_refused(self):
        results = families_check.Results(self.path, "5.1.0")
        results.keep("llama", ("equal", ""))
        text = "\n".join(families_check.MARKS)
        self.page.write_text(text)
        self.assertEqual(families_check.write_table(self.page, results, ["gpt2", "llama", "mamba"]),
                         f"--table: neither {self.path} nor {self.page} has a result of 2 kinds of transformers 5.1.0 such as gpt2, wanted all; "
                         "add --rest to run them")
        self.assertEqual(self.page.read_text(), text)


class Runner(unittest.TestCase):
    def run_programs(self, programs):
        with tempfile.TemporaryDirectory() as name:
            root = pathlib.Path(name)
            for path, text in programs.items():
                (root / path).parent.mkdir(parents=True, exist_ok=True)
                (root / path).write_text(text)
            return subprocess.run([sys.executable, RUN, "--dynmo", "DYNMO", "--python", sys.executable, "--root", root,
                                   "--timeout", "5"], capture_output=True, text=True, timeout=60)

    def test_counts_lines_and_exit_codes(self):
        done = self.run_programs({
            "tests/peers/a_test.py": "print('PASS one'); print('noise'); print('SKIP two: no such thing')",
            "tests/peers/b_test.py": "import sys; print('why not'); sys.exit(77)",
            "tests/peers/c_check.py": "import sys; assert sys.argv[1:3] == ['--dynmo', 'DYNMO']",
            "tests/peers/helper.py": "raise SystemExit(1)",
            "bench/peers/compare.py": "import sys; assert sys.argv[-1] == '3'; print('PASS ratio: 1.3 x')",
        })
        self.assertEqual(done.returncode, 0, done.stdout)
        self.assertEqual(done.stdout.splitlines(), [
            "PASS tests/peers/a_test.py:one", "SKIP tests/peers/a_test.py:two: no such thing",
            "SKIP tests/peers/b_test.py: why not", "PASS tests/peers/c_check.py", "PASS bench/peers/compare.py:ratio: 1.3 x",
            "3 passed, 0 failed, 2 skipped"])

    def test_a_failure_is_one_however_it_comes(self):
        done = self.run_programs({
            "tests/peers/a_test.py": "print('PASS one'); print('FAIL two: 3 is not 4'); raise SystemExit(1)",
            "tests/peers/b_test.py": "print('PASS one'); raise ValueError('broken')",
            "tests/peers/c_test.py": "print('FAIL said: but ended well')",
            "tests/peers/d_test.py": "import time; time.sleep(60)",
        })
        self.assertEqual(done.returncode, 1)
        self.assertIn("FAIL tests/peers/b_test.py: exit code 1: ValueError: broken", done.stdout)
        self.assertIn("FAIL tests/peers/d_test.py: not done after 5 s", done.stdout)
        self.assertEqual(done.stdout.splitlines()[-1], "2 passed, 4 failed, 0 skipped")

    def test_names_with_spaces_are_counted_each(self):
        lines = ["PASS golden gpt2-tied", "PASS export of a trained llama tied", "SKIP golden of no such model: not here",
                 "PASS torchrun.same_losses", "PASS ratio a: b: 1.3 x", "PASS", "PASSED all", "FAIL golden llama: config.json: differs"]
        done = self.run_programs({"tests/peers/a_test.py": f"print({chr(10).join(lines)!r}); raise SystemExit(1)"})
        self.assertEqual(done.stdout.splitlines()[:6], [
            "PASS tests/peers/a_test.py:golden gpt2-tied", "PASS tests/peers/a_test.py:export of a trained llama tied",
            "SKIP tests/peers/a_test.py:golden of no such model: not here", "PASS tests/peers/a_test.py:torchrun.same_losses",
            "PASS tests/peers/a_test.py:ratio a: b: 1.3 x", "FAIL tests/peers/a_test.py:golden llama: config.json: differs"])
        self.assertEqual(done.stdout.splitlines()[-1], "4 passed, 1 failed, 1 skipped")

    def test_the_reason_of_a_failure_is_not_what_passed(self):
        done = self.run_programs({
            "tests/peers/a_test.py": "print('cannot open x'); print('PASS one two'); raise SystemExit(3)",
            "tests/peers/b_test.py": "import os, signal; print('PASS one', flush=True); os.kill(os.getpid(), signal.SIGKILL)",
        })
        self.assertIn("FAIL tests/peers/a_test.py: exit code 3: cannot open x", done.stdout)
        self.assertIn("FAIL tests/peers/b_test.py: killed by signal 9: it said nothing but its checks", done.stdout)
        self.assertEqual(done.stdout.splitlines()[-1], "2 passed, 2 failed, 0 skipped")


if __name__ == "__main__":
    unittest.main()
