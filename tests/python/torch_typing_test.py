# SPDX-License-Identifier: Apache-2.0
"""mypy --strict has nothing to say of the package as it is installed, nor of the examples and benches."""
import os
import pathlib
import subprocess
import sys
import tempfile
import unittest

from support import ROOT

# PyTorch's own types take half a minute to read: once for the environment.
CACHE = pathlib.Path(sys.prefix) / "mypy-cache"


class Typing(unittest.TestCase):
    def test_of_the_package_and_the_scripts_is_strict(self):
        """The examples and benches use what no other test may."""
        package = pathlib.Path(os.environ["PYTHONPATH"].split(os.pathsep)[0])
        scripts = sorted(path for folder in ("examples", "bench/torch") for path in (ROOT / folder).rglob("*.py"))
        command = [sys.executable, "-m", "mypy", "--config-file", ROOT / "pyproject.toml", "--cache-dir", CACHE, package / "dynmo", *scripts]
        with tempfile.TemporaryDirectory() as folder:  # has no module that the scripts could mean
            done = subprocess.run(command, capture_output=True, text=True, env={**os.environ, "MYPYPATH": str(package)}, cwd=folder, check=False)
        self.assertEqual(done.returncode, 0, done.stdout + done.stderr)
        self.assertIn("no issues found", done.stdout)


if __name__ == "__main__":
    unittest.main()
