# SPDX-License-Identifier: Apache-2.0
"""Which libtorch `dynmo` gives to `dynmo-runtime`, and what it says without one. Compiled stand-ins take the places of both."""
import json
import os
import pathlib
import shutil
import subprocess

from program import DYNMO, FreshFolderCase

BUILT_WITH = json.loads(subprocess.run([DYNMO, "--version", "--json"], capture_output=True, text=True, check=True).stdout)["libtorch"]


def compile_c(text, *arguments):
    subprocess.run(["cc", "-x", "c", "-", "-x", "none", *map(str, arguments)], input=text, text=True, check=True)


class Case(FreshFolderCase):
    def setUp(self):
        if BUILT_WITH is None:
            self.skipTest("this build has no runtime")
        if not shutil.which("cc"):
            self.skipTest("no C compiler here")
        super().setUp()
        self.series = ".".join(BUILT_WITH.split(".")[:2])
        self.bin, self.tools, self.home = (self.folder / name for name in ("bin", "tools", "home"))
        for folder in (self.bin, self.tools, self.home):
            folder.mkdir()
        shutil.copy2(DYNMO, self.bin / "dynmo")
        self.built = self.torch("built")
        self.make_runtime()
        self.python_has("")

    def torch(self, name, version=BUILT_WITH, library=True):
        """A folder `torch` whose library answers with `name`."""
        folder = self.folder / name / "torch"
        (folder / "lib").mkdir(parents=True)
        (folder / "version.py").write_text(f"from typing import Optional\n\n__version__ = '{version}+cu130'\ndebug = False\n")
        if library:
            compile_c(f'const char* torch_name(void) {{ return "{name}"; }}', "-shared", "-fPIC", "-Wl,-soname,libtorch_cpu.so",
                      "-o", folder / "lib/libtorch_cpu.so")
        return folder

    def private_torch(self, version=BUILT_WITH):
        return self.torch(f"home/.cache/dynmo/torch-{version}/lib/python3.11/site-packages", version)

    def make_runtime(self, *arguments):
        text = '#include <stdio.h>\nconst char* torch_name(void);\nint main(int n, char** a) { printf("%s: %s\\n", torch_name(), a[n - 1]); }'
        compile_c(text, self.built / "lib/libtorch_cpu.so", "-o", self.bin / "dynmo-runtime", *arguments)

    def python_has(self, folder):
        python = self.tools / "python3"
        python.write_text(f"#!/bin/sh\necho '{folder}'\n")
        python.chmod(0o755)

    def train(self, **variables):
        environment = {"PATH": f"{self.tools}:{os.environ['PATH']}", "HOME": str(self.home), "LC_ALL": "C", **variables}
        return subprocess.run([self.bin / "dynmo", "train", "--x"], capture_output=True, text=True, timeout=100, check=False, cwd=self.folder,
                              env=environment)

    def assert_loads(self, name, **variables):
        result = self.train(**variables)
        self.assertEqual((result.returncode, result.stdout, result.stderr), (0, f"{name}: --x\n", ""))


class Found(Case):
    def test_that_the_user_named_is_the_first(self):
        self.python_has(self.torch("python"))
        self.make_runtime(f"-Wl,-rpath,{self.built / 'lib'}")
        self.assert_loads("named", DYNMO_TORCH_DIR=str(self.torch("named")))

    def test_that_it_was_built_with_is_the_next(self):
        (self.tools / "python3").unlink()
        self.make_runtime(f"-Wl,-rpath,{self.built / 'lib'}")
        self.assert_loads("built")

    def test_that_the_loader_finds_is_left_to_it(self):
        self.python_has(self.torch("python"))
        self.assert_loads("built", LD_LIBRARY_PATH=str(self.built / "lib"))

    def test_that_python3_has_is_before_the_private_one(self):
        self.private_torch()
        self.python_has(self.torch("python"))
        self.assert_loads("python")

    def test_that_scripts_setup_made_is_the_last(self):
        self.python_has(self.torch("python", "2.8.0"))
        name = f".cache/dynmo/torch-{BUILT_WITH}/lib/python3.11/site-packages"
        self.private_torch()
        self.assert_loads(f"home/{name}")
        (self.home / ".cache").rename(self.home / "other")
        self.assert_loads(f"home/{name}", XDG_CACHE_HOME=str(self.home / "other"))
        self.assert_loads(f"home/{name}", DYNMO_CACHE=str(self.home / "other/dynmo"))

    def test_any_of_the_series_is_taken(self):
        self.assert_loads("named", DYNMO_TORCH_DIR=str(self.torch("named", f"{self.series}.99")))

    def test_it_is_given_to_the_real_python3_as_to_cmake(self):
        # An empty folder `torch` in the working directory is no PyTorch.
        (self.tools / "python3").unlink()
        (self.folder / "torch").mkdir()
        packages = self.torch("packages").parent
        (packages / "torch/__init__.py").write_text("raise SystemExit('imported')\n")
        self.assert_loads("packages", PYTHONPATH=str(packages))

    def test_other_libraries_stay_on_the_path(self):
        compile_c('const char* other(void) { return "other"; }', "-shared", "-fPIC", "-Wl,-soname,libother.so", "-o", self.folder / "libother.so")
        self.make_runtime("-Wl,--no-as-needed", self.folder / "libother.so")
        self.python_has(self.torch("python"))
        self.assert_loads("python", LD_LIBRARY_PATH=str(self.folder))


class Refused(Case):
    def test_none_says_how_to_get_it(self):
        result = self.train()
        self.assert_error(result, 2, f"dynmo train needs libtorch: wanted PyTorch {self.series}, which this build is for, found none: run "
                          f"`pip install torch=={self.series}.*`, set DYNMO_TORCH_DIR", "or build DynMo with another of 2.11 to 2.15")
        (self.tools / "python3").write_text("#!/bin/sh\nexit 1\n")
        self.assertEqual(self.train().stderr, result.stderr)

    def test_all_that_was_seen_is_listed(self):
        future = f"{self.series}1.0"
        python = self.torch("python", "2.8.0")
        self.python_has(python)
        self.private_torch(future)  # of another series, in spite of its name's beginning
        bare = pathlib.Path(self.torch(f"home/.cache/dynmo/torch-{self.series}.7/lib/python3.11/site-packages", f"{self.series}.7", library=False))
        self.assert_error(self.train(), 2, f"found '{python}' (2.8.0), '{bare}' ({self.series}.7 without lib/libtorch_cpu.so): run")

    def test_named_folder_is_what_the_user_must_mend(self):
        self.private_torch()  # not looked at: the user named another
        folder = self.folder / "nothing"
        wanted = f"wanted the folder 'torch' of an installed PyTorch {self.series} (.../site-packages/torch), which this build is for: correct"
        self.assert_error(self.train(DYNMO_TORCH_DIR=str(folder)), 2, f"DYNMO_TORCH_DIR is '{folder}' (no version.py of PyTorch), {wanted}")
        old = self.torch("old", "2.8.0")
        self.assert_error(self.train(DYNMO_TORCH_DIR=str(old)), 2, f"DYNMO_TORCH_DIR is '{old}' (2.8.0), {wanted}")
        rubbish = self.torch("rubbish")
        (rubbish / "version.py").write_text("__version__ = next(iter(()))\n")
        self.assert_error(self.train(DYNMO_TORCH_DIR=str(rubbish)), 2, f"DYNMO_TORCH_DIR is '{rubbish}' (no version.py of PyTorch)")

    def test_another_series_that_dynmo_builds_with_is_not_loaded(self):
        other = "2.15.0" if self.series == "2.11" else "2.11.0"
        folder = self.torch("other", other)
        self.assert_error(self.train(DYNMO_TORCH_DIR=str(folder)), 2, f"'{folder}' ({other}), wanted", "build DynMo with another of 2.11 to 2.15")

    def test_other_libraries_that_are_missing_are_named(self):
        for name in ("libone.so", "libtwo.so"):
            compile_c("int x;", "-shared", "-fPIC", f"-Wl,-soname,{name}", "-o", self.folder / name)
        self.make_runtime("-Wl,--no-as-needed", self.folder / "libone.so", self.folder / "libtwo.so")
        self.python_has(self.torch("python"))
        self.assert_error(self.train(), 2, f"{self.bin / 'dynmo-runtime'} needs libone.so, libtwo.so, which are not found: install them")
