# SPDX-License-Identifier: Apache-2.0
"""scripts/wheels, scripts/debs, scripts/ways and scripts/image: what they refuse before they make a bare system. What they try takes a network and half an hour."""
import os
import pathlib
import shutil
import subprocess
import sys
import tempfile
import unittest

from text_test import ROOT


class Refusals(unittest.TestCase):
    def setUp(self):
        temporary = tempfile.TemporaryDirectory()
        self.addCleanup(temporary.cleanup)
        self.root = pathlib.Path(temporary.name) / "repository"
        for name in (".dockerignore", "CMakeLists.txt", "Dockerfile", "README.md", "tests/docs/blocks.py",
                     *(f"scripts/{script}" for script in ("bare-systems", "debs", "dockerfile_steps.py", "image", "ways", "wheels"))):
            (self.root / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(ROOT / name, self.root / name)
        (self.root / ".gitignore").write_text("/out/\n/roots/\n__pycache__/\n")
        names = ("-c", "user.name=Test", "-c", "user.email=test@example.org", "-c", "commit.gpgsign=false")
        for words in (("init", "--quiet"), ("add", "--all"), ("commit", "--quiet", "--message", "A change")):
            subprocess.run(["git", "-C", self.root, *names, *words], check=True)
        self.out = self.root / "out"

    def refused(self, script, text, *arguments, **variables):
        before = sorted(self.root.rglob("*"))
        done = subprocess.run([self.root / "scripts" / script, *arguments], capture_output=True, text=True, check=False, env={**os.environ, "PYTHONDONTWRITEBYTECODE": "1", **variables})
        self.assertEqual((done.returncode, done.stdout), (2, ""), done.stderr)
        self.assertRegex(done.stderr, rf"\A{script}: [^\n]*\n\Z")
        self.assertIn(text, done.stderr)
        self.assertEqual(sorted(self.root.rglob("*")), before)

    def files(self):
        self.out.mkdir()
        for name in ("some-cp311-cp311-manylinux_2_34_x86_64.whl", "dynmo_0.1.0_amd64.deb", "libdynmo-dev_0.1.0_amd64.deb", "dynmo-0.1.0-linux-x86_64.tar.gz"):
            (self.out / name).touch()
        (self.out / "SHA256SUMS").write_text("sums\n")
        self.torch = self.out / "torch"
        (self.torch / "lib").mkdir(parents=True)
        (self.torch / "lib/libtorch_cpu.so").touch()

    def test_unknown_word(self):
        self.refused("wheels", "'sid' is not known here, wanted one of --test, --roots DIR, --out DIR, bookworm, trixie", "sid")
        self.refused("debs", "'trixie' is not known here, wanted --roots DIR or --out DIR", "trixie")
        self.refused("ways", "'rpm' is not known here, wanted one of --roots DIR, --out DIR, pip, deb, source", "rpm")
        self.refused("image", "'core' is not known here, wanted --no-builder, --roots DIR or --out DIR", "core")
        for script in ("wheels", "debs", "ways", "image"):
            self.refused(script, "--out has no folder: wanted one", "--out")

    def test_nothing_to_try(self):
        self.refused("wheels", f"no wheel in {self.out}: build them first, without --test", "--test", "--out", self.out)
        self.refused("debs", f"no dynmo_*.deb in {self.out}: wanted what `scripts/package --binary` writes", "--out", self.out)
        self.files()
        (self.out / "libdynmo-dev_0.1.0_amd64.deb").unlink()
        self.refused("debs", f"no libdynmo-dev_*.deb in {self.out}", "--out", self.out)

    def test_no_release(self):
        self.refused("ways", f"no release in {self.root}/build/release-")
        self.refused("ways", f"no release in {self.out}: wanted what `make release` writes", "--out", self.out)

    def test_readme_with_another_number_of_ways(self):
        self.files()
        readme = self.root / "README.md"
        readme.write_text(readme.read_text().replace("## Three ways in\n", "## Three ways in\n```sh\ntrue\n```\n"))
        self.refused("ways", "README.md has 4 blocks under 'Three ways in', wanted one for each of pip, deb, source", "--out", self.out)

    @unittest.skipUnless(os.geteuid() == 0, "not root")
    def test_no_libtorch_to_lend(self):
        self.files()
        wanted = "no libtorch here, which a training is tried with: run scripts/setup runtime, or set DYNMO_TORCH_DIR"
        self.refused("debs", wanted, "--out", self.out, DYNMO_TORCH_DIR=str(self.root))
        self.refused("debs", wanted, "--out", self.out, DYNMO_TORCH_DIR="", DYNMO_CACHE=str(self.root))

    def test_what_is_not_carried_out_without_a_builder(self):
        dockerfile = self.root / "Dockerfile"
        dockerfile.write_text(dockerfile.read_text() + "HEALTHCHECK NONE\n")
        line = len(dockerfile.read_text().splitlines())
        self.refused("image", f"Dockerfile:{line}: HEALTHCHECK is not carried out here, wanted one of ARG, COPY", "--no-builder", "--out", self.out)
        shutil.copy2(ROOT / "Dockerfile", dockerfile)
        (self.root / ".dockerignore").write_text("/build/\n/README.md\n")
        self.refused("image", ".dockerignore leaves out README.md: without a builder, wanted all that is committed", "--no-builder", "--out", self.out)

    def test_changes_that_are_not_committed(self):
        self.files()
        (self.root / "new").touch()
        for script, words in (("wheels", ["--test"]), ("debs", []), ("ways", []), ("image", []), ("image", ["--no-builder"])):
            self.refused(script, "uncommitted changes: only commits are tried", *words, "--out", self.out)

    @unittest.skipUnless(os.geteuid() == 0, "not root")
    def test_no_debootstrap(self):
        self.files()
        tools = self.root.parent / "tools"
        tools.mkdir()
        for name in ("bash", "env", "git", "dirname", "sed", "mkdir", "realpath", "rm", "grep", "apt-get", "python3", "tail"):
            if shutil.which(name):
                (tools / name).symlink_to(shutil.which(name))
        (self.root / "roots").mkdir()
        for script, words in (("wheels", ["--test"]), ("debs", []), ("ways", []), ("image", []), ("image", ["--no-builder"])):
            self.refused(script, "no debootstrap here", *words, "--out", self.out, "--roots", self.root / "roots", PATH=str(tools), DYNMO_TORCH_DIR=str(self.torch))

    @unittest.skipIf(os.geteuid() == 0, "root may")
    def test_users_that_may_not_mount(self):
        self.files()
        for script, words in (("wheels", ["--test"]), ("debs", []), ("ways", []), ("image", []), ("image", ["--no-builder"])):
            self.refused(script, "wanted root, to make and enter bare systems", *words, "--out", self.out)


if __name__ == "__main__":
    sys.exit(unittest.main())
