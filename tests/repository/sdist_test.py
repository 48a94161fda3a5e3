# SPDX-License-Identifier: Apache-2.0
"""The files of a source distribution, as pyproject.toml chooses them, are enough for CMake to make the package of Python."""
import pathlib
import shutil
import subprocess
import sys
import tempfile
import tomllib
import unittest

ROOT = pathlib.Path(__file__).resolve().parents[2]
PYPROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())
PROJECT, SETTINGS = PYPROJECT["project"], PYPROJECT["tool"]["scikit-build"]


def files():
    names = subprocess.run(["git", "-C", ROOT, "ls-files", "-co", "--exclude-standard"], capture_output=True, text=True, check=True).stdout
    excluded = SETTINGS["sdist"]["exclude"]
    return [name for name in names.splitlines() if name.split("/")[0] not in excluded and (ROOT / name).is_file()]


@unittest.skipUnless((ROOT / ".git").exists(), "not a git checkout")
class SourceDistribution(unittest.TestCase):
    def test_is_configured_with_the_settings_of_the_wheel(self):
        # pip makes the environment that has nanobind.
        settings = {name: value for name, value in SETTINGS["cmake"]["define"].items() if name != "DYNMO_PYTHON"}
        self.assertEqual(settings["DYNMO_RUNTIME"], "OFF")
        with tempfile.TemporaryDirectory() as folder:
            source = pathlib.Path(folder) / "source"
            for name in files():
                (source / name).parent.mkdir(parents=True, exist_ok=True)
                shutil.copy2(ROOT / name, source / name)
            command = ["cmake", "-G", "Ninja", "-S", source, "-B", pathlib.Path(folder) / "build"]
            command += [f"-D{name}={value}" for name, value in settings.items()]
            done = subprocess.run(command, capture_output=True, text=True, check=False)
            self.assertEqual(done.returncode, 0, done.stdout + done.stderr)
            if "Python module: for" not in done.stdout:
                self.skipTest("no Python here has nanobind (scripts/setup python)")
            # Without a checkout the module has its version and no commit.
            built = subprocess.run(["cmake", "--build", command[6], "--target", "dynmo_version_source"], capture_output=True, text=True, check=False)
            self.assertEqual(built.returncode, 0, built.stdout + built.stderr)
            self.assertIn(f'kVersion = "{PROJECT["version"]}"', (pathlib.Path(folder) / "build/version/version.cpp").read_text())


if __name__ == "__main__":
    sys.exit(unittest.main())
