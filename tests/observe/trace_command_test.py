# SPDX-License-Identifier: Apache-2.0
"""`dynmo trace import` as users meet it. Usage: trace_command_test.py PATH_OF_DYNMO"""
import json
import pathlib
import subprocess
import sys
import tempfile
import unittest

DYNMO = sys.argv.pop(1)
TRACE = pathlib.Path(__file__).parent / "data" / "pytorch_trace.json"


class TraceImport(unittest.TestCase):
    def setUp(self):
        folder = tempfile.TemporaryDirectory()
        self.addCleanup(folder.cleanup)
        self.out = pathlib.Path(folder.name) / "profile.json"

    def run_import(self, *arguments):
        return subprocess.run([DYNMO, "trace", "import", *map(str, arguments)], capture_output=True, text=True, timeout=60)

    def test_writes_a_profile(self):
        done = self.run_import(TRACE, "--out", self.out, "--boundary-bytes", 4096)
        self.assertEqual((done.returncode, done.stderr), (0, ""))
        self.assertIn("medians of 3 micro-batches, of the CPU's operations", done.stdout)
        profile = json.loads(self.out.read_text())
        self.assertEqual(profile["format"], "dynmo-profile-1")
        self.assertEqual([layer["name"] for layer in profile["layers"]], ["embedding", "block0.mlp", "block1.mlp", "head"])
        self.assertEqual([layer["boundary_bytes"] for layer in profile["layers"]], [4096, 4096, 4096, 0])

    def test_bad_input_is_one_line_and_leaves_no_file(self):
        for arguments, said in [
            ((self.out.with_name("no.json"), "--out", self.out), "no.json"),
            ((__file__, "--out", self.out), "wanted JSON"),
            ((TRACE, "--out", self.out, "--boundary-bytes", -1), "--boundary-bytes is -1"),
            ((TRACE,), "--out is required"),
            ((TRACE, "--out", self.out, "--boundary-byte", 1), "did you mean '--boundary-bytes'?"),
        ]:
            done = self.run_import(*arguments)
            self.assertEqual((done.returncode, done.stdout), (2, ""), arguments)
            self.assertEqual(done.stderr.count("\n"), 1, done.stderr)
            self.assertIn(said, done.stderr)
            self.assertFalse(self.out.exists())


unittest.main()
