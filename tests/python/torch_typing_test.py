# SPDX-License-Identifier: Apache-2.0
"""mypy --strict has nothing to say of the package as it is installed, nor of the examples and benches."""
import os
import pathlib
import subprocess
import sys
import tempfile
import unittest

from support import ROOT


class Typing(unittest.TestCase):
    @classmethod
    def setUpClass(cls):
        # PyTorch's own types take half a minute to read: once for all.
        folder = tempfile.TemporaryDirectory()
        cls.addClassCleanup(folder.cleanup)
        cls.cache = folder.name

    def check(self, *words):
        package = pathlib.Path(os.environ["PYTHONPATH"].split(os.pathsep)[0])
        command = [sys.executable, "-m", "mypy", "--config-file", ROOT / "pyproject.toml", "--cache-dir", self.cache, *words]
        done = subprocess.run(command, capture_output=True, text=True, env={**os.environ, "MYPYPATH": str(package)}, cwd=self.cache,
                              check=False)
        self.assertEqual(done.returncode, 0, done.stdout + done.stderr)

    def test_of_the_package_is_strict(self):
        self.check("-p", "dynmo")

    def test_of_the_scripts_is_strict(self):
        """Of the examples and benches, which use what no other test may."""
        scripts = sorted(path for folder in ("examples", "bench/torch") for path in (ROOT / folder).rglob("*.py"))
        if not scripts:
            self.skipTest("no example is in Python")
        for script in scripts:
            with self.subTest(script=script.name):
                self.check(script)


if __name__ == "__main__":
    unittest.main()
