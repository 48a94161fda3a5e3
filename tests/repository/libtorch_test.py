# SPDX-License-Identifier: Apache-2.0
"""cmake/FindLibTorch.cmake: which PyTorch it takes, and what it says when it takes none."""
import os
import pathlib
import subprocess
import sys
import tempfile
import unittest

MODULES = pathlib.Path(__file__).resolve().parents[2] / "cmake"
PROJECT = f"""cmake_minimum_required(VERSION 3.25)
project(consumer LANGUAGES NONE)
set_property(GLOBAL PROPERTY TARGET_SUPPORTS_SHARED_LIBS TRUE)
list(APPEND CMAKE_MODULE_PATH "{MODULES.as_posix()}")
find_package(LibTorch REQUIRED)
get_target_property(location LibTorch::LibTorch IMPORTED_LOCATION)
message(STATUS "took ${{LibTorch_VERSION}} at ${{location}}")
"""


class FindLibTorch(unittest.TestCase):
    def setUp(self):
        folder = tempfile.TemporaryDirectory()
        self.addCleanup(folder.cleanup)
        self.root = pathlib.Path(folder.name)
        (self.root / "bin").mkdir()
        (self.root / "CMakeLists.txt").write_text(PROJECT)
        self.python_has("")

    def torch(self, version, site="site-packages", library=True):
        folder = self.root / site / "torch"
        (folder / "lib").mkdir(parents=True)
        (folder / "version.py").write_text(f"from typing import Optional\n\n__version__ = '{version}+cu130'\ndebug = False\n")
        if library:
            (folder / "lib" / "libtorch_cpu.so").touch()
        return str(folder)

    def private_torch(self, version):
        return self.torch(version, f"cache/torch-{version}/lib/python3.11/site-packages")

    def python_has(self, folder):
        python = self.root / "bin" / "python3"
        python.write_text(f"#!/bin/sh\necho '{folder}'\n")
        python.chmod(0o755)

    def configure(self, *arguments, **variables):
        """(configured?, everything said in one line)."""
        environment = {"PATH": f"{self.root / 'bin'}:{os.environ['PATH']}", "HOME": str(self.root),
                       "DYNMO_CACHE": str(self.root / "cache"), **variables}
        done = subprocess.run(["cmake", "-G", "Ninja", "-S", self.root, "-B", self.root / "build", *arguments], env=environment,
                              capture_output=True, text=True, check=False)
        return done.returncode == 0, " ".join((done.stdout + done.stderr).split())

    def assert_takes(self, folder, *arguments, **variables):
        configured, said = self.configure(*arguments, **variables)
        self.assertTrue(configured, said)
        self.assertIn(f"at {folder}/lib/libtorch_cpu.so", said)

    def assert_refuses(self, found, *arguments, **variables):
        configured, said = self.configure(*arguments, **variables)
        self.assertFalse(configured, said)
        self.assertIn(f"wanted PyTorch 2.11 to 2.15, found {found}: run `make setup`, or give -DDYNMO_TORCH_DIR=", said)

    def test_says_that_there_is_none(self):
        self.assert_refuses("no PyTorch at all")

    def test_says_what_is_wrong_with_the_folder_that_the_user_named(self):
        self.private_torch("2.11.0")  # not looked at: the user named another
        rubbish = str(self.root / "nothing")
        self.assert_refuses(f"{rubbish} (no version.py of PyTorch)", f"-DDYNMO_TORCH_DIR={rubbish}")
        old = self.torch("2.8.0")
        self.assert_refuses(f"{old} (2.8.0)", f"-DDYNMO_TORCH_DIR={old}")
        bare = self.torch("2.11.0", "bare", library=False)
        self.assert_refuses(f"{bare} (2.11.0 without lib/libtorch_cpu.so)", f"-DDYNMO_TORCH_DIR={bare}")

    def test_follows_the_environment_when_it_changes(self):
        first, second = self.torch("2.11.0", "first"), self.torch("2.11.2", "second")
        self.assert_takes(first, DYNMO_TORCH_DIR=first)
        self.assert_takes(second, DYNMO_TORCH_DIR=second)
        self.assert_refuses("no PyTorch at all")

    def test_takes_that_of_python3_before_the_private_one(self):
        private, python = self.private_torch("2.11.0"), self.torch("2.11.1")
        self.python_has(python)
        self.assert_takes(python)
        self.python_has(self.torch("2.9.1", "old"))
        self.assert_takes(private)

    def test_takes_the_range_and_says_what_is_not_tested(self):
        for version, is_tested in (("2.11.1", True), ("2.13.0", False), ("2.15.0", True)):
            configured, said = self.configure(f"-DDYNMO_TORCH_DIR={self.torch(version, version)}")
            self.assertTrue(configured and f"took {version} " in said, said)
            self.assertEqual(f"PyTorch {version[:4]} is not tested, take one of 2.11, 2.15 if it fails" in said, not is_tested, said)
        newer = self.torch("2.16.0", "2.16.0")
        self.assert_refuses(f"{newer} (2.16.0)", f"-DDYNMO_TORCH_DIR={newer}")

    def test_takes_one_series_alone_where_it_is_named(self):
        newer = self.torch("2.16.0", "2.16.0")
        self.assert_takes(newer, f"-DDYNMO_TORCH_DIR={newer}", "-DDYNMO_TORCH_VERSION=2.16")
        older = self.torch("2.11.0", "2.11.0")
        configured, said = self.configure(f"-DDYNMO_TORCH_DIR={older}")  # the cache has it
        self.assertFalse(configured, said)
        self.assertIn(f"wanted PyTorch 2.16, found {older} (2.11.0)", said)

    def test_takes_the_series_that_setup_was_told(self):
        self.private_torch("2.11.0")
        self.assert_takes(self.private_torch("2.15.1"), DYNMO_TORCH_VERSION="2.15")

    def test_lists_all_that_it_has_refused(self):
        old, future = self.torch("2.9.1", "old"), self.private_torch("2.111.0")
        self.python_has(old)
        self.assert_refuses(f"{old} (2.9.1), {future} (2.111.0)")

    def test_does_not_take_what_setup_has_not_finished(self):
        self.torch("2.11.0", "cache/.torch-2.11.0.partial/lib/python3.11/site-packages")
        self.assert_refuses("no PyTorch at all")


if __name__ == "__main__":
    sys.exit(unittest.main())
