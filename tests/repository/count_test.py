# SPDX-License-Identifier: Apache-2.0
"""scripts/count: every test of a report counts once, and one that failed is named; scripts/marks.py: what a mark covers."""
import contextlib
import io
import os
import pathlib
import subprocess
import sys
import tempfile
import unittest
import unittest.mock as mock

from text_test import ROOT

sys.path.insert(0, str(ROOT / "scripts"))
import marks  # noqa: E402

GTEST = """[==========] Running 4 tests from 1 test suite.
[ RUN      ] Plan.Works
[       OK ] Plan.Works (3 ms)
[ RUN      ] Plan.Waits
[  SKIPPED ] Plan.Waits (0 ms)
[ RUN      ] In/Plan.Breaks/0
a.cpp:3: Failure
[  FAILED  ] In/Plan.Breaks/0, where GetParam() = (1, 2) (1 ms)
[ RUN      ] Plan.Crashes
"""
SUMMED = """[  FAILED  ] 1 test, listed below:
[  FAILED  ] In/Plan.Breaks/0, where GetParam() = (1, 2)
"""
PYTHON = """drawn by 0123456789ab: 2 of 9 of a.B: test_c, test_d
FAIL: test_c (a.B.test_c)
----------------------------------------------------------------------
Ran 3 tests in 0.012s

FAILED (failures=1, skipped=1)
"""


def report(*cases):
    """A JUnit file of (name, output, what it ended with)."""
    entries = "".join(f'<testcase name="{name}" time="1">{end}<system-out><![CDATA[{output}]]></system-out></testcase>' for name, output, end in cases)
    return f'<?xml version="1.0"?><testsuite>{entries}</testsuite>'


def counted(*cases):
    with tempfile.TemporaryDirectory() as folder:
        path = pathlib.Path(folder) / "ctest.xml"
        path.write_text(report(*cases))
        done = subprocess.run([ROOT / "scripts/count", path], capture_output=True, text=True, check=True)
    return done.stdout.splitlines()


class Count(unittest.TestCase):
    def test_of_a_suite_is_that_of_its_tests(self):
        lines = counted(("plan_test.Plan", GTEST, "<failure/>"))
        self.assertEqual(lines[-1], "1 passed, 2 failed, 1 skipped")
        self.assertIn("failed: plan_test.Plan: In/Plan.Breaks/0, Plan.Crashes", lines)

    def test_of_a_suite_has_no_test_twice(self):
        ended = GTEST.replace("[ RUN      ] Plan.Crashes\n", "") + SUMMED
        self.assertEqual(counted(("plan_test.Plan", ended, "<failure/>"))[-1], "1 passed, 1 failed, 1 skipped")

    def test_of_a_python_case_is_that_of_its_tests(self):
        lines = counted(("CommandLine.B", PYTHON, "<failure/>"))
        self.assertEqual(lines[-1], "1 passed, 1 failed, 1 skipped")
        self.assertIn("CommandLine.B: drawn by 0123456789ab: 2 of 9 of a.B: test_c, test_d", lines)
        self.assertIn("failed: CommandLine.B: test_c", lines)

    def test_of_other_entries_is_one(self):
        lines = counted(("a", "", ""), ("b", "said", "<failure/>"), ("c", "", '<skipped message="SKIP_RETURN_CODE=77"/>'),
                        ("d", "", '<skipped message="Unable to find executable"/>'))
        self.assertEqual(lines[-1], "1 passed, 2 failed, 1 skipped")

    def test_of_a_program_that_fails_behind_its_tests_has_a_failure(self):
        passed = "[ RUN      ] Plan.Works\n[       OK ] Plan.Works (3 ms)\n"
        self.assertEqual(counted(("plan_test.Plan", passed + "LeakSanitizer: detected memory leaks", "<failure/>"))[-1], "1 passed, 1 failed, 0 skipped")

    def test_of_an_entry_that_passed_has_no_failure(self):
        lines = counted(("a", "FAIL: test_c (a.B.test_c)\nRan 3 tests in 0.012s\n\nFAILED (failures=1)\n", ""))
        self.assertEqual([line for line in lines if not line.startswith("slowest")], ["3 passed, 0 failed, 0 skipped"])


class Mark(unittest.TestCase):
    def setUp(self):
        temporary = tempfile.TemporaryDirectory()
        self.addCleanup(temporary.cleanup)
        self.root = pathlib.Path(temporary.name)
        for what in (mock.patch.multiple(marks, ROOT=self.root, COMMITTED=self.root / "clean", PASSED=self.root / "passed"),
                     mock.patch.dict(os.environ, {"DYNMO_CACHE": str(self.root / "cache"), "DYNMO_MARKS": ""})):
            what.start()
            self.addCleanup(what.stop)
        (self.root / "a.cpp").write_text('#include "a.h"\n')
        (self.root / "a.h").write_text('#pragma once\n  #  include "b.h"\n')
        (self.root / "b.h").write_text("int b();\n")

    @staticmethod
    def write():
        with mock.patch.object(sys, "argv", ["marks.py"]), contextlib.redirect_stdout(io.StringIO()):
            marks.main()

    def key(self, *rules):
        return marks.digest(marks.closure(self.root / "a.cpp"), *rules)

    def test_covers_headers_that_headers_include_and_the_rules(self):
        before = self.key(b"-O2")
        self.assertEqual(self.key(b"-O2"), before)
        self.assertNotEqual(self.key(b"-O3"), before)
        (self.root / "b.h").write_text("long b();\n")
        self.assertNotEqual(self.key(b"-O2"), before)

    def test_leaves_out_comments_that_tell_no_tool_anything(self):
        source, before = self.root / "a.cpp", self.key()
        source.write_text('// A comment.\n#include "a.h"  // Another one.\n  // And one.\n')
        self.assertEqual(self.key(), before)
        for tells in ("  // NOLINT", "\n// NOLINTNEXTLINE(a)", "\n}  // namespace a", '\nauto a = " // b";'):
            source.write_text(f'#include "a.h"{tells}\n')
            self.assertNotEqual(self.key(), before, tells)

    def test_reads_a_file_once_that_is_named_by_its_whole_path(self):
        unity = self.root / "unity.cxx"
        unity.write_text(f'#include "{self.root}/a.cpp"\n#include "a.cpp"\n')
        self.assertEqual(marks.includes(unity), [self.root / "a.cpp"])

    def test_of_the_commit_counts_on_a_machine_without_a_cache(self):
        tidy, tsan = marks.Marks("tidy"), marks.Marks("tsan")
        marks.COMMITTED.write_text(f"headers {'4' * 16}\n")
        tidy.passed(["2" * 16, "1" * 16])
        tsan.passed(["3" * 16])
        self.write()
        tidy.passed(["1" * 16])
        self.write()
        self.assertEqual(marks.COMMITTED.read_text(), f"headers {'4' * 16}\ntidy {'1' * 16}\ntsan {'3' * 16}\n")
        self.assertEqual([marks.Marks("tidy").has(digit * 16) for digit in "123"], [True, False, False])
        tidy.add("2" * 16)
        self.assertTrue(marks.Marks("tidy").has("2" * 16))
        os.environ["DYNMO_MARKS"] = "none"
        self.assertEqual([marks.Marks("tidy").has(digit * 16) for digit in "12"], [False, False])


if __name__ == "__main__":
    sys.exit(unittest.main())
