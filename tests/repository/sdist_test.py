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
    def setUp(self):
        # pip makes the environment that has nanobind.
        settings = {name: value for name, value in SETTINGS["cmake"]["define"].items() if name != "DYNMO_PYTHON"}
        self.assertEqual(settings["DYNMO_RUNTIME"], "OFF")
        folder = tempfile.TemporaryDirectory()
        self.addCleanup(folder.cleanup)
        source, self.build = (pathlib.Path(folder.name) / name for name in ("source", "build"))
        for name in files():
            (source / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(ROOT / name, source / name)
        self.command = ["cmake", "-G", "Ninja", "-S", source, "-B", self.build, *(f"-D{name}={value}" for name, value in settings.items())]

    def configure(self, *settings):
        return subprocess.run([*self.command, *settings], capture_output=True, text=True, check=False)

    def test_is_configured_with_the_settings_of_the_wheel(self):
        done = self.configure()
        self.assertEqual(done.returncode, 0, done.stdout + done.stderr)
        if "Python module: for" not in done.stdout:
            self.skipTest("no Python here has nanobind (scripts/setup python)")
        # Without a checkout the module has its version and no commit.
        built = subprocess.run(["cmake", "--build", self.build, "--target", "dynmo_version_source"], capture_output=True, text=True, check=False)
        self.assertEqual(built.returncode, 0, built.stdout + built.stderr)
        self.assertIn(f'kVersion = "{PROJECT["version"]}"', (self.build / "version/version.cpp").read_text())

    def test_names_all_libraries_that_are_missing(self):
        done = self.configure("-DCMAKE_DISABLE_FIND_PACKAGE_fmt=ON", "-DCMAKE_DISABLE_FIND_PACKAGE_tomlplusplus=ON",
                              "-DDYNMO_FOUND_libxxhash-dev=")
        self.assertNotEqual(done.returncode, 0)
        said = " ".join(done.stderr.split())
        self.assertRegex(said, r"lacks libraries: apt-get install libfmt-dev libtomlplusplus-dev libxxhash-dev \(Debian's names\)")
        self.assertEqual(done.stderr.count("CMake Error"), 1, done.stderr)


if __name__ == "__main__":
    sys.exit(unittest.main())
