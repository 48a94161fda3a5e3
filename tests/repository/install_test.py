# SPDX-License-Identifier: Apache-2.0
"""A project elsewhere builds against the install tree of the build in DYNMO_BUILD_DIR."""
import os
import pathlib
import re
import shutil
import subprocess
import sys
import tempfile
import unittest

sys.path.append(str(pathlib.Path(__file__).resolve().parents[1] / "docs"))
from blocks import ROOT, environment, run_block, shell_blocks  # noqa: E402

BUILD = pathlib.Path(os.environ["DYNMO_BUILD_DIR"])
CONSUMER = pathlib.Path(__file__).resolve().parent / "consumer"
PLAN = ROOT / "examples/plan.cpp"


def cached(name):
    """Value of a variable in the build's cache."""
    for line in (BUILD / "CMakeCache.txt").read_text().splitlines():
        if line.startswith(name + ":"):
            return line.split("=", 1)[1]
    return ""


def torch_of_build():
    """The folder `torch` that the runtime was built with."""
    linked = subprocess.run(["ldd", BUILD / "apps/dynmo/dynmo-runtime"], capture_output=True, text=True, check=True).stdout
    return pathlib.Path(re.search(r"libtorch_cpu\.so => (.*)/lib/libtorch_cpu\.so", linked).group(1))


RUNTIME = cached("DYNMO_RUNTIME").upper() in ("ON", "1", "TRUE", "YES")
TORCH = torch_of_build() if RUNTIME else None


def call(*command):
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode != 0:
        raise AssertionError(f"{' '.join(map(str, command))}\n{done.stdout}{done.stderr}")
    return done.stdout


class InstallTree(unittest.TestCase):
    @classmethod
    def setUpClass(cls):
        folder = tempfile.TemporaryDirectory()
        cls.addClassCleanup(folder.cleanup)
        cls.root = pathlib.Path(folder.name)
        cls.prefix = cls.root / "prefix"
        call("cmake", "--install", BUILD, "--prefix", cls.prefix)

    def consume(self, component, *settings):
        build = self.root / component
        call("cmake", "-G", "Ninja", "-S", CONSUMER, "-B", build, f"-DCMAKE_PREFIX_PATH={self.prefix}", f"-DCOMPONENT={component}",
             f"-DCMAKE_CXX_FLAGS={cached('CMAKE_CXX_FLAGS')}", f"-DDYNMO_TORCH_DIR={cached('DYNMO_TORCH_DIR')}", *settings)
        call("cmake", "--build", build)
        return call(build / "consumer")

    def test_holds_a_command_that_runs(self):
        self.assertIn("Usage:", call(self.prefix / "bin" / "dynmo", "--help"))
        if RUNTIME:
            self.assertIn("--dry-run", call(self.prefix / "bin" / "dynmo", "train", "--help"))

    def test_holds_the_hooks_of_clusters(self):
        for name in ("slurm", "kubernetes"):
            self.assertIn(f"usage: {name}", call(self.prefix / "share" / "dynmo" / "release" / name, "--help"))

    def test_holds_every_public_header_and_no_private_one(self):
        installed = {str(path.relative_to(self.prefix / "include")) for path in (self.prefix / "include").rglob("*.h")}
        self.assertIn("dynmo/core/expected.h", installed)
        self.assertEqual([name for name in installed if name.endswith("_impl.h")], [])

    def test_says_nothing_of_this_checkout(self):
        for file in (self.prefix / "lib").rglob("*.cmake"):
            self.assertNotIn(str(BUILD.parent.parent), file.read_text(), file)

    def test_serves_a_consumer_of_the_core(self):
        self.assertEqual(self.consume("core", f"-DPLAN={PLAN}"), "1.0 KiB\n")
        self.check_plan(call(self.root / "core/plan"))

    def check_plan(self, said):
        steps = {line.split()[0]: float(line.split()[3]) for line in said.splitlines()}
        self.assertEqual(list(steps), ["uniform", "optimal"])
        self.assertLess(steps["optimal"], 0.8 * steps["uniform"])

    def test_serves_a_consumer_by_pkg_config_wherever_it_lies(self):
        if not shutil.which("pkg-config"):
            self.skipTest("no pkg-config here")
        moved = self.root / "moved"
        shutil.copytree(self.prefix, moved, symlinks=True)
        path = ":".join(str(folder) for folder in moved.rglob("pkgconfig"))
        asked = subprocess.run(["pkg-config", "--cflags", "--libs", "dynmo-core"], capture_output=True, text=True, check=False,
                               env={**os.environ, "PKG_CONFIG_PATH": path})
        self.assertEqual(asked.returncode, 0, asked.stderr)
        self.assertNotIn(str(self.prefix), asked.stdout)
        compilers = [compiler for compiler in (cached("CMAKE_CXX_COMPILER"), shutil.which("clang++")) if compiler]
        for compiler in compilers:
            program = self.root / f"plan-{pathlib.Path(compiler).name}"
            call(compiler, "-std=c++20", *cached("CMAKE_CXX_FLAGS").split(), PLAN, "-o", program, *asked.stdout.split())
            self.check_plan(call(program))

    def test_serves_a_consumer_of_the_runtime(self):
        if not RUNTIME:
            self.skipTest("this build has no runtime")
        self.assertEqual(self.consume("runtime"), "frozen 1.0 KiB\n")
        # The library leaves the system's names alone; a program that wants Gloo's loop patient asks for it.
        for program, defined in (("consumer", False), ("patient", True)):
            names = call("nm", "--defined-only", self.root / "runtime" / program).split()
            self.assertEqual("epoll_wait" in names, defined, program)

    def test_serves_a_source_of_ones_own_as_its_page_says(self):
        if not RUNTIME:
            self.skipTest("this build has no runtime")
        for name in ("docs", "examples"):
            (self.root / name).symlink_to(ROOT / name)
        torch = {"DYNMO_TORCH_DIR": cached("DYNMO_TORCH_DIR")} if cached("DYNMO_TORCH_DIR") else {}
        cache = os.environ.get("DYNMO_CACHE", os.path.join(os.environ.get("XDG_CACHE_HOME", os.path.expanduser("~/.cache")), "dynmo"))
        env = environment(self.root / "home", DYNMO_BUILD_DIR=str(BUILD), DYNMO_CACHE=cache, **torch)
        for block in shell_blocks("docs/own-source.md"):
            code, output = run_block(block, self.root, env, 300)
            self.assertEqual(code, 0, output)
        self.assertEqual(len((self.root / "my-source/run/records/rank-0.jsonl").read_text().splitlines()), 10)

    def test_holds_the_license(self):
        self.assertEqual((self.prefix / "share/doc/dynmo/LICENSE").read_text(), (ROOT / "LICENSE").read_text())

    def test_is_an_archive_that_runs_wherever_it_is_unpacked(self):
        packed = self.root / "packages"
        call("cpack", "--config", BUILD / "CPackConfig.cmake", "-B", packed)
        archives = list(packed.glob("*.tar.gz"))
        self.assertEqual([re.sub(r"-[\w]+\.tar", ".tar", path.name) for path in archives], [f"dynmo-{cached('CMAKE_PROJECT_VERSION')}-linux.tar.gz"])
        for place in ("one", "another place"):
            (self.root / place).mkdir()
            call("tar", "-xf", archives[0], "-C", self.root / place, "--strip-components=1")
            self.assertIn("Usage:", call(self.root / place / "bin/dynmo", "plan", "--help"))
            self.assertTrue((self.root / place / "lib/pkgconfig/dynmo-core.pc").exists())
            self.assertTrue((self.root / place / "share/doc/dynmo/LICENSE").exists())
            if RUNTIME:
                self.check_runtime(self.root / place)

    def check_runtime(self, place):
        """The archive knows nothing of the libtorch that it was built with."""
        self.assertNotIn("RUNPATH", call("readelf", "-d", place / "libexec/dynmo/dynmo-runtime"))
        environment = {"PATH": os.defpath, "HOME": str(self.root), "DYNMO_TORCH_DIR": str(TORCH)}
        train = [place / "bin/dynmo", "train", "--help"]
        done = subprocess.run(train, capture_output=True, text=True, check=False, env=environment)
        self.assertEqual((done.returncode, done.stderr), (0, ""))
        self.assertIn("--dry-run", done.stdout)
        environment["DYNMO_TORCH_DIR"] = str(place)
        done = subprocess.run(train, capture_output=True, text=True, check=False, env=environment)
        self.assertEqual((done.returncode, done.stderr.count("\n")), (2, 1), done.stderr)
        self.assertIn(f"DYNMO_TORCH_DIR is '{place}' (no version.py of PyTorch), wanted ", done.stderr)

    @unittest.skipUnless(shutil.which("dpkg-shlibdeps"), "no dpkg-dev here")
    def test_is_packages_of_debian(self):
        packed = self.root / "debs"
        call("cpack", "-G", "DEB", "--config", BUILD / "CPackConfig.cmake", "-B", packed)
        commands, development = sorted(packed.glob("*.deb"))
        version, system = cached("CMAKE_PROJECT_VERSION"), call("dpkg", "--print-architecture").strip()
        self.assertEqual([commands.name, development.name], [f"dynmo_{version}_{system}.deb", f"libdynmo-dev_{version}_{system}.deb"])
        self.assertIn("libfmt", call("dpkg-deb", "--field", commands, "Depends"))
        self.assertEqual("libgomp1" in call("dpkg-deb", "--field", commands, "Depends"), RUNTIME)
        self.assertIn("libfmt-dev", call("dpkg-deb", "--field", development, "Depends"))
        held = {}
        for package in (commands, development):
            call("dpkg-deb", "--extract", package, self.root / package.stem)
            held[package] = {str(path.relative_to(self.root / package.stem)) for path in (self.root / package.stem).rglob("*") if path.is_file()}
            name = package.name.split("_")[0]
            self.assertLessEqual({f"usr/share/doc/{name}/copyright", f"usr/share/doc/{name}/changelog.gz"}, held[package])
        self.assertEqual(held[commands] & held[development], set())
        self.assertIn("usr/include/dynmo/core/expected.h", held[development])
        self.assertIn("usr/share/dynmo/release/slurm", held[commands])
        program = self.root / commands.stem / "usr/bin/dynmo"
        self.assertIn("Usage:", call(program, "plan", "--help"))
        if RUNTIME:
            self.check_runtime(self.root / commands.stem / "usr")
            return
        done = subprocess.run([program, "train"], capture_output=True, text=True, check=False)
        self.assertEqual((done.returncode, done.stderr.count("\n")), (2, 1), done.stderr)
        self.assertIn("dynmo train needs dynmo-runtime", done.stderr)

    def test_says_so_when_it_has_no_runtime(self):
        if RUNTIME:
            self.skipTest("this build has the runtime")
        with self.assertRaisesRegex(AssertionError, "runtime"):
            self.consume("runtime")


if __name__ == "__main__":
    sys.exit(unittest.main())
