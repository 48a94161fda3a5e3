# SPDX-License-Identifier: Apache-2.0
"""mypy --strict has nothing to say of the package as it is installed, nor of the examples."""
import os
import pathlib
import subprocess
import sys
import tempfile
import unittest

from support import ROOT


class Typing(unittest.TestCase):
    def check(self, *words):
        package = pathlib.Path(os.environ["PYTHONPATH"])
        with tempfile.TemporaryDirectory() as cache:
            command = [sys.executable, "-m", "mypy", "--config-file", ROOT / "pyproject.toml", "--cache-dir", cache, *words]
            done = subprocess.run(command, capture_output=True, text=True, env={**os.environ, "MYPYPATH": str(package)}, cwd=cache,
                                  check=False)
        self.assertEqual(done.returncode, 0, done.stdout + done.stderr)

    def test_of_the_package_is_strict(self):
        self.check("-p", "dynmo")

    def test_of_the_examples_is_strict(self):
        scripts = sorted((ROOT / "examples").rglob("*.py"))
        if not scripts:
            self.skipTest("no example is in Python")
        for script in scripts:
            with self.subTest(script=script.name):
                self.check(script)


if __name__ == "__main__":
    unittest.main()
