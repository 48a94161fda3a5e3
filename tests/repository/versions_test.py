# SPDX-License-Identifier: Apache-2.0
"""docs/versions.md has the table of the logs that scripts/versions wrote, and what scripts/versions refuses before it makes a system."""
import os
import pathlib
import re
import shutil
import subprocess
import sys
import tempfile
import unittest

from text_test import ROOT

sys.path.insert(0, str(ROOT / "scripts"))
import versions_table  # noqa: E402

PASSED = """row: debian13-gcc-core
commit: 0123abcd
system: Debian GNU/Linux 13 (trixie)
compiler: g++ (Debian 14.2.0-19) 14.2.0
python: 3.13.5
pytorch: none
build: passed
unit: 3 passed, 1 failed, 2 skipped
failed: plan_test.A: B
failed: plan_test.C|D
"""
BROKEN = """row: debian12-clang-core
commit: 0123abcd
compiler: Debian clang version 16.0.6 (15~deb12u1)
build: failed
reason: a.cpp:1:2: error: no
"""


def series(name):
    text = (ROOT / "cmake" / "TorchVersions.cmake").read_text()
    return re.search(rf"^set\(DYNMO_TORCH_{name} ([0-9. ]+)\)$", text, re.MULTILINE).group(1).split()


class Table(unittest.TestCase):
    def setUp(self):
        temporary = tempfile.TemporaryDirectory()
        self.addCleanup(temporary.cleanup)
        self.results = pathlib.Path(temporary.name)

    def add(self, date, name, text):
        folder = self.results / f"{date}-versions"
        folder.mkdir(exist_ok=True)
        (folder / f"{name}.log").write_text(text)

    def lines(self):
        return versions_table.table(self.results).splitlines()

    def test_of_the_page_is_that_of_the_logs(self):
        page = versions_table.PAGE.read_text()
        self.assertEqual(versions_table.page_with(page, versions_table.table()), page, "run scripts/versions_table.py")

    def test_has_what_a_log_says(self):
        self.add("2026-01-02", "debian13-gcc-core", PASSED)
        self.add("2026-01-02", "debian12-clang-core", BROKEN)
        self.assertIn("|Debian 13|g++ 14|3.13||passed|3/1/2|||0123abcd|plan_test.A: B; plan_test.C/D|", self.lines())
        self.assertIn("|Debian 12|clang++ 16|||failed||||0123abcd|a.cpp:1:2: error: no|", self.lines())

    def test_has_the_newest_log(self):
        self.add("2026-01-10", "debian13-gcc-core", PASSED.replace("0123abcd", "newer"))
        self.add("2026-01-02", "debian13-gcc-core", PASSED)
        self.assertEqual([line for line in self.lines() if "0123abcd" in line], [])
        self.assertEqual(len([line for line in self.lines() if "|newer|" in line]), 1)

    def test_marks_what_was_not_tried(self):
        untried = [line for line in self.lines()[2:] if line.endswith(("|not tried|", "|by CI only|"))]
        self.assertEqual(len(untried), len(versions_table.ROWS))

    def test_has_rows_for_both_ends_and_each_tested_series(self):
        self.assertLessEqual({*series("OLDEST"), *series("NEWEST"), *series("TESTED")}, {row.pytorch for row in versions_table.ROWS})

    def test_stands_beside_the_range_that_is_accepted(self):
        said = f"{series('OLDEST')[0]} to {series('NEWEST')[0]}"
        for name in ("versions", "torch", "clusters"):
            self.assertIn(said, (ROOT / "docs" / f"{name}.md").read_text(), name)

    def test_has_no_log_of_another_row(self):
        names = {row.name for row in versions_table.ROWS}
        for path in (ROOT / "bench" / "results").glob("*-versions/*"):
            self.assertIn(path.stem, names, path)
            self.assertEqual(versions_table.fields(path.read_text())["row"], path.stem)


class Tries(unittest.TestCase):
    def setUp(self):
        temporary = tempfile.TemporaryDirectory()
        self.addCleanup(temporary.cleanup)
        self.root = pathlib.Path(temporary.name) / "repository"
        for folder in ("scripts", "docs", "bench/results"):
            (self.root / folder).mkdir(parents=True)
        for name in ("versions", "versions_table.py", "bare-systems"):
            shutil.copy2(ROOT / "scripts" / name, self.root / "scripts")
        shutil.copy2(ROOT / "docs" / "versions.md", self.root / "docs")
        names = ("-c", "user.name=Test", "-c", "user.email=test@example.org", "-c", "commit.gpgsign=false")
        for words in (("init", "--quiet"), ("add", "--all"), ("commit", "--quiet", "--message", "A change")):
            subprocess.run(["git", "-C", self.root, *names, *words], check=True)

    def refused(self, text, *arguments, path=os.environ["PATH"]):
        environment = {**os.environ, "PATH": path, "PYTHONDONTWRITEBYTECODE": "1"}
        done = subprocess.run([self.root / "scripts" / "versions", *arguments], capture_output=True, text=True, check=False, env=environment)
        self.assertEqual((done.returncode, done.stdout), (2, ""), done.stderr)
        self.assertRegex(done.stderr, r"\Aversions: [^\n]*\n\Z")
        self.assertIn(text, done.stderr)

    def test_rows_that_it_knows(self):
        self.refused("'debian11' is no row that can be tried here, wanted one of debian12-gcc-core, ", "debian11")
        self.refused("'ubuntu24.04-gcc-torch2.11' is no row that can be tried here", "ubuntu24.04-gcc-torch2.11")
        self.refused("'--all' is not known here, wanted --roots DIR, --out DIR or rows", "--all")
        self.refused("--out has no folder: wanted one", "--out")

    def test_what_is_committed(self):
        (self.root / "new").touch()
        self.refused("uncommitted changes: only commits are tried", "debian13-gcc-core")

    @unittest.skipUnless(os.geteuid() == 0, "not root")
    def test_beside_results_that_are_not_committed(self):
        (self.root / "bench/results/new").touch()
        tools = self.root.parent / "tools"
        tools.mkdir()
        for name in ("bash", "env", "git", "dirname", "sed", "mkdir", "realpath", "rm", "grep", "apt-get", "python3"):
            if shutil.which(name):
                (tools / name).symlink_to(os.path.realpath(shutil.which(name)) if name != "python3" else sys.executable)
        self.refused("no debootstrap here", "--roots", self.root.parent / "roots", "--out", self.root.parent / "out", "debian13-gcc-core",
                     path=str(tools))


if __name__ == "__main__":
    sys.exit(unittest.main())
