# SPDX-License-Identifier: Apache-2.0
"""scripts/package: one version in all places, files with the same bytes for the same commit, and what it refuses."""
import gzip
import hashlib
import importlib.machinery
import importlib.util
import io
import json
import os
import pathlib
import re
import shutil
import subprocess
import sys
import tarfile
import tempfile
import unittest
import zipfile
from unittest import mock

from text_test import ROOT

loader = importlib.machinery.SourceFileLoader("package", str(ROOT / "scripts/package"))
package = importlib.util.module_from_spec(importlib.util.spec_from_loader("package", loader))
loader.exec_module(package)

VERSION = package.version_of_cmake((ROOT / "CMakeLists.txt").read_text())
FILES = (".gitattributes", ".gitignore", "CHANGELOG.md", "CITATION.cff", "CMakeLists.txt", "README.md", "cmake/DynmoDebian.cmake", "cmake/commit.txt", "docs/third-party.md",
         "pyproject.toml", "scripts/package")


def builder_is_here():
    try:
        package.builder()
        return True
    except package.Refusal:
        return False


class Places(unittest.TestCase):
    def test_have_the_version_of_cmake(self):
        package.check_places(ROOT, VERSION)
        package.check_changelog((ROOT / "CHANGELOG.md").read_text(), VERSION, tagged=False)


class Archives(unittest.TestCase):
    def test_have_the_same_bytes_in_whatever_order_they_were_packed(self):
        def packed(names):
            made = io.BytesIO()
            with tarfile.open(fileobj=made, mode="w") as to:
                for number, name in enumerate(names):
                    member = tarfile.TarInfo(name)
                    member.size, member.mode, member.mtime, member.uid = len(name), 0o755, number, number
                    to.addfile(member, io.BytesIO(name.encode()))
            return gzip.compress(made.getvalue(), mtime=len(names))

        one, other = (package.sorted_archive(packed(names), 7) for names in (("a/b", "a/a"), ("a/a", "a/b")))
        self.assertEqual(one, other)
        with tarfile.open(fileobj=io.BytesIO(gzip.decompress(one))) as archive:
            found = [(member.name, member.mode, member.mtime, archive.extractfile(member).read().decode()) for member in archive.getmembers()]
        self.assertEqual(found, [("a/a", 0o755, 7, "a/a"), ("a/b", 0o755, 7, "a/b")])


@unittest.skipUnless(shutil.which("readelf"), "no readelf here")
class Programs(unittest.TestCase):
    """What an archive of programs may hold. The shell stands for one: it asks for libtinfo and libc."""

    def setUp(self):
        temporary = tempfile.TemporaryDirectory()
        self.addCleanup(temporary.cleanup)
        self.folder = pathlib.Path(temporary.name)
        self.shell = pathlib.Path(shutil.which("bash")).resolve()

    def check(self, table, text="", folders=("/home/builder",)):
        archive = self.folder / "some.tar.gz"
        with tarfile.open(archive, "w:gz") as to:
            to.add(self.shell, "some/bin/shell")
            member = tarfile.TarInfo("some/lib/some.cmake")
            member.size = len(text)
            to.addfile(member, io.BytesIO(text.encode()))
        package.check_programs(archive, table, folders)

    def test_ask_for_what_the_table_lists(self):
        listed = "".join(f"`{re.sub(r'[.]so.*', '.so', name)}`" for name in package.needed(self.shell))
        self.check(listed)
        with self.assertRaisesRegex(package.Refusal, r"\Ashell asks for libtinfo\.so\S*, which docs/third-party.md does not list"):
            self.check(listed.replace("libtinfo", "libother"))

    def test_name_no_folder_of_this_machine(self):
        with self.assertRaisesRegex(package.Refusal, r"\Asome.cmake names /home/builder, a folder of this machine"):
            self.check("`libc.so` `libtinfo.so`", "set(x /home/builder/torch)\n")
        self.check("`libc.so` `libtinfo.so`", "set(x /home/builders)\n")

    @unittest.skipUnless(shutil.which("cc"), "no C compiler here")
    def test_have_no_folder_to_search(self):
        program = self.folder / "program"
        subprocess.run(["cc", "-x", "c", "-", "-o", program, "-Wl,-rpath,/somewhere"], input="int main(void) { return 0; }", text=True, check=True)
        self.shell = program
        with self.assertRaisesRegex(package.Refusal, r"\Ashell has a RUNPATH"):
            self.check("`libc.so`")


class Images(unittest.TestCase):
    def test_have_a_bill_of_what_is_installed(self):
        table = (ROOT / "docs/third-party.md").read_text()
        bill = json.loads(package.bill_of_image("1.2.3", "abc", 0, table, "dynmo 1.2.3\nlibc6 2.36-9+deb12u10\nzlib1g 1:1.2.13\n"))
        found = {each["name"]: each for each in bill["components"]}
        self.assertEqual(bill["metadata"]["component"]["version"], "1.2.3")
        self.assertEqual(found["libc6"]["purl"], "pkg:deb/debian/libc6@2.36-9+deb12u10")
        self.assertEqual({each["scope"] for each in found.values()}, {"required"})
        self.assertLessEqual({"libc6", "zlib1g", "PyTorch", "CUDA runtime", "CLI11"}, set(found))
        self.assertEqual({"dynmo", "GoogleTest", "fmt"} & set(found), set())
        self.assertNotEqual(bill["serialNumber"], json.loads(package.bill_of_materials("1.2.3", "abc", 0, table))["serialNumber"])


class Wheels(unittest.TestCase):
    def setUp(self):
        temporary = tempfile.TemporaryDirectory()
        self.addCleanup(temporary.cleanup)
        self.folder = pathlib.Path(temporary.name)

    def test_may_ask_for_what_every_system_has(self):
        package.check_needed("_core.so", {"libc.so.6", "libm.so.6", "libstdc++.so.6", "libgcc_s.so.1", "ld-linux-x86-64.so.2",
                                          "ld-linux-aarch64.so.1"})
        for library in ("libfmt.so.9", "libxxhash.so.0", "libcrypto.so.3", "libc.so", "libstdc++.so.6.1"):
            with self.assertRaisesRegex(package.Refusal, rf"_core.so asks for {re.escape(library)}: a wheel may ask for "):
                package.check_needed("_core.so", {"libc.so.6", library})

    @unittest.skipUnless(shutil.which("readelf"), "no readelf here")
    def test_are_read_for_what_they_ask_for(self):
        shell = pathlib.Path(shutil.which("bash")).resolve()
        self.assertIn("libc.so.6", package.needed(shell))
        wheel = self.folder / "some.whl"
        with zipfile.ZipFile(wheel, "w") as archive:
            archive.writestr("some/__init__.py", "")
            archive.write(shell, "some/_core.abi3.so")  # asks for libtinfo
        with self.assertRaisesRegex(package.Refusal, r"\Asome/_core.abi3.so asks for libtinfo"):
            package.check_wheel(wheel)

    def test_are_the_same_from_source_distribution_and_checkout(self):
        def wheel(name, *members):
            path = self.folder / name / "some.whl"
            path.parent.mkdir()
            with zipfile.ZipFile(path, "w") as archive:
                for member, text, year in members:
                    archive.writestr(zipfile.ZipInfo(member, (year, 1, 1, 0, 0, 0)), text)
            return path

        members = [("a.py", "1", 2000), ("b.py", "2", 2000)]
        one = wheel("one", *members)
        package.check_same_wheel(one, wheel("other", *members))
        for name, changed, said in (("text", [("a.py", "2", 2000), members[1]], "a.py"), ("time", [members[0], ("b.py", "2", 2001)], "b.py"),
                                    ("more", [*members, ("c.py", "3", 2000)], "c.py"), ("order", members[::-1], "the order of its members")):
            with self.assertRaisesRegex(package.Refusal, rf"\Asome.whl differs between source distribution and checkout: {said}\Z"):
                package.check_same_wheel(one, wheel(name, *changed))

    def test_carry_a_notice_of_each_library_in_them(self):
        table = (ROOT / "docs/third-party.md").read_text()
        rows = {row[0]: row for row in package.dependencies(table)}
        self.assertEqual([name for name in package.BY_HEADER if name not in rows or not rows[name][5].startswith(("headers", "linked"))], [])
        nanobind = self.folder / "nanobind"
        paths = package.notice_paths(table, nanobind)
        self.assertEqual(set(paths), {*package.BY_HEADER, "nanobind", "robin-map"})
        self.assertEqual(paths["toml++"], pathlib.Path("/usr/share/doc/libtomlplusplus-dev/copyright"))
        paths = {"a/b": nanobind / "copyright", "robin-map": paths["robin-map"]}
        with self.assertRaisesRegex(package.Refusal, r"\Ano /\S+/copyright, the notice of a/b "):
            package.notices(paths)
        paths["robin-map"].parent.mkdir(parents=True)
        paths["robin-map"].write_text("/**\n * MIT License\n *\n * Copyright\n */\n#include <map>\n")
        paths["a/b"].write_text("Copyright\n")
        self.assertEqual(package.notices(paths), {"NOTICE.a-b": "Copyright\n", "NOTICE.robin-map": "MIT License\n\nCopyright\n"})

    def test_want_auditwheel(self):
        with mock.patch.object(package, "CACHE", self.folder):
            with self.assertRaisesRegex(package.Refusal, r"\Ano auditwheel here: run scripts/setup wheel\Z"):
                package.auditor()


class Repository(unittest.TestCase):
    """A small repository with the files that a release needs."""

    def setUp(self):
        temporary = tempfile.TemporaryDirectory()
        self.addCleanup(temporary.cleanup)
        self.root = pathlib.Path(temporary.name) / "repository"
        for name in FILES:
            (self.root / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(ROOT / name, self.root / name)
        self.git("init", "--quiet")
        self.commit()

    def git(self, *arguments):
        names = ("-c", "user.name=Test", "-c", "user.email=test@example.org", "-c", "commit.gpgsign=false", "-c", "tag.gpgsign=false")
        return subprocess.run(["git", "-C", self.root, *names, *arguments], capture_output=True, text=True, check=True).stdout.strip()

    def commit(self):
        self.git("add", "--all")
        self.git("commit", "--quiet", "--message", "A change")

    def replace(self, name, old, new):
        path = self.root / name
        self.assertIn(old, path.read_text())
        path.write_text(path.read_text().replace(old, new))

    def run_package(self, *arguments):
        return subprocess.run([sys.executable, self.root / "scripts/package", *arguments], capture_output=True, text=True, check=False)

    def files(self):
        """What the refusals must leave as it is."""
        return {path: path.read_bytes() for path in self.root.rglob("*") if path.is_file() and ".git" not in path.parts}


class Refusals(Repository):
    def refused(self, text, *arguments):
        before = self.files()
        done = self.run_package(*arguments)
        self.assertEqual((done.returncode, done.stdout), (2, ""), done.stderr)
        self.assertRegex(done.stderr, r"\Apackage: [^\n]*\n\Z")
        self.assertIn(text, done.stderr)
        self.assertEqual(self.files(), before)

    def test_changed_file(self):
        self.replace("README.md", "DynMo", "Dynmo")
        self.refused("1 uncommitted changes, the first is 'M README.md'")

    def test_file_that_is_not_added(self):
        (self.root / "new.txt").write_text("new\n")
        self.refused("'?? new.txt'")

    def test_place_with_another_version(self):
        for name, line in (("pyproject.toml", 'version = "{}"'), ("CITATION.cff", "version: {}")):
            self.replace(name, line.format(VERSION), line.format("7.8.9"))
            self.commit()
            self.refused(f"{name} has version 7.8.9, CMakeLists.txt has {VERSION}")
            self.git("reset", "--quiet", "--hard", "HEAD~")

    def test_cmake_with_another_version(self):
        self.replace("CMakeLists.txt", f"VERSION {VERSION} ", "VERSION 7.8.9 ")
        self.commit()
        self.refused(f"pyproject.toml has version {VERSION}, CMakeLists.txt has 7.8.9")

    def test_changelog_without_a_section(self):
        self.replace("CHANGELOG.md", f": {VERSION}", ": 7.8.9")
        self.commit()
        self.refused(f"CHANGELOG.md has no section for {VERSION}")

    def test_tag_with_an_undated_section(self):
        changelog = f"# Changelog\n\n## [Unreleased]: {VERSION}\n"
        (self.root / "CHANGELOG.md").write_text(changelog + "\nFiles of a release.\n")
        self.commit()
        self.git("tag", f"v{VERSION}")
        self.refused(f"wanted a heading `## [{VERSION}] - YYYY-MM-DD`")

    def test_tag_without_a_maintainer(self):
        contact = re.search(r'"([^"]*\.invalid>)"', (self.root / package.MAINTAINER).read_text()).group(1)
        (self.root / "CHANGELOG.md").write_text(f"# Changelog\n\n## [{VERSION}] - 2026-01-02\n")
        self.commit()
        self.git("tag", f"v{VERSION}")
        self.refused("@packages.invalid as the address of the packages' maintainer: wanted one that a person reads")
        self.git("tag", "--delete", f"v{VERSION}")
        self.replace(package.MAINTAINER, contact, "Test <test@example.org>")
        self.commit()
        self.git("tag", f"v{VERSION}")
        package.check_maintainer((self.root / package.MAINTAINER).read_text(), tagged=True)
        self.replace(package.MAINTAINER, "Test <test@example.org>", "Test")
        self.git("tag", "--delete", f"v{VERSION}")
        self.commit()
        self.refused(f"{package.MAINTAINER} has no CPACK_PACKAGE_CONTACT: wanted")

    def test_readme_with_another_version(self):
        self.replace("README.md", f"dynmo-{VERSION}.tar.gz", "dynmo-7.8.9.tar.gz")
        self.commit()
        self.refused(f"README.md has version 7.8.9, CMakeLists.txt has {VERSION}")

    def test_tag_on_another_commit(self):
        self.git("tag", "--annotate", "--message", "A release", f"v{VERSION}")
        self.replace("README.md", "DynMo", "Dynmo")
        self.commit()
        self.refused(f"tag v{VERSION} is on {self.git('rev-parse', 'HEAD~')[:10]}, and {self.git('rev-parse', 'HEAD')[:10]} is checked out")

    def test_folder_of_others(self):
        folder = self.root / "build" / f"release-{VERSION}"
        folder.mkdir(parents=True)
        (folder / "mine").write_text("mine\n")
        self.refused("holds other files than a release")

    def test_paths_that_are_none(self):
        self.refused("No such file or directory: 'nowhere'", "--image", "nowhere")
        (self.root / ".git" / "packages").write_text("dynmo 1.2.3\nlibc6\n")
        self.refused("'libc6' is no package of an image, wanted lines NAME VERSION", "--image", self.root / ".git" / "packages")


@unittest.skipUnless(builder_is_here(), "no Python here has scikit-build-core (scripts/setup python)")
class Files(Repository):
    def release(self, *arguments):
        done = self.run_package(*arguments)
        self.assertEqual(done.returncode, 0, done.stderr)
        out = pathlib.Path(arguments[1]) if arguments else self.root / "build" / f"release-{VERSION}"
        return {path.name: path.read_bytes() for path in sorted(out.iterdir())}

    def test_are_refused_where_no_folder_can_be(self):
        done = self.run_package("--out", self.root / "README.md" / "folder" / "release")
        self.assertEqual((done.returncode, done.stdout), (2, ""), done.stderr)
        self.assertRegex(done.stderr, r"\Apackage: [^\n]*Not a directory: [^\n]*\n\Z")

    def test_are_the_same_for_one_commit(self):
        first = self.release()
        clone = self.root.parent / "clone"
        self.git("clone", "--quiet", self.root, clone)
        self.git("tag", "another")
        self.root = clone
        os.utime(clone / "README.md", (1, 1))
        (clone / "README.md").chmod(0o600)
        second = self.release("--out", str(self.root.parent / "second"))
        self.assertEqual([name for name in first if first[name] != second.get(name)], [])
        self.assertEqual(list(first), ["SHA256SUMS", f"dynmo-{VERSION}.cdx.json", f"dynmo-{VERSION}.tar.gz", f"dynmo_pipelines-{VERSION}.tar.gz"])
        self.assertEqual(self.release("--out", str(self.root.parent / "second")), second)  # an older release is replaced

    def test_differ_for_another_commit(self):
        first = self.release()
        self.replace("README.md", "DynMo", "Dynmo")
        self.commit()
        self.assertNotEqual(self.release()["SHA256SUMS"], first["SHA256SUMS"])

    def test_are_listed_with_their_sums(self):
        made = self.release()
        lines = [f"{hashlib.sha256(data).hexdigest()}  {name}" for name, data in made.items() if name != "SHA256SUMS"]
        self.assertEqual(made["SHA256SUMS"].decode().splitlines(), lines)

    def test_hold_what_is_committed(self):
        made = self.release()
        commit = self.git("rev-parse", "HEAD")
        for name, top, left_out in ((f"dynmo-{VERSION}.tar.gz", f"dynmo-{VERSION}", set()),
                                    (f"dynmo_pipelines-{VERSION}.tar.gz", f"dynmo_pipelines-{VERSION}", {"docs/third-party.md"})):
            with tarfile.open(fileobj=io.BytesIO(gzip.decompress(made[name]))) as archive:
                held = {member.name.removeprefix(f"{top}/") for member in archive.getmembers() if member.isfile()} - {"PKG-INFO"}
                self.assertEqual(held, set(FILES) - left_out, name)
                self.assertEqual(archive.extractfile(f"{top}/cmake/commit.txt").read().decode(), f"{commit}\n")
                seconds = {member.mtime for member in archive.getmembers()}
            self.assertEqual(seconds, {int(self.git("show", "-s", "--format=%ct"))}, name)

    def test_have_the_site(self):
        script = self.root / "scripts/site"
        script.write_text("#!/bin/sh\numask 077\nmkdir -p \"$4/inner\" && echo \"$1 $2 $3\" | tee \"$4/index.html\" > \"$4/inner/page.html\"\n")
        script.chmod(0o755)
        self.commit()
        name = f"dynmo-{VERSION}-site"
        words = ("--out", str(self.root.parent / "out"), "--site", "https://example.org/a/b")
        made = self.release(*words)
        with tarfile.open(fileobj=io.BytesIO(made[f"{name}.tar.gz"])) as archive:
            self.assertEqual([(member.name, member.mode) for member in archive.getmembers()],
                             [(name, 0o755), (f"{name}/index.html", 0o644), (f"{name}/inner", 0o755), (f"{name}/inner/page.html", 0o644)])
            self.assertEqual(archive.extractfile(f"{name}/index.html").read(), b"--repository https://example.org/a/b --out\n")
        self.assertEqual(self.release(*words), made)
        script.write_text("#!/bin/sh\necho 'site: no Sphinx here' >&2; exit 2\n")
        self.commit()
        done = self.run_package(*words)
        self.assertEqual((done.returncode, done.stderr), (2, "package: site failed: site: no Sphinx here\n"))

    def test_give_a_program_its_commit_without_a_checkout(self):
        with tarfile.open(fileobj=io.BytesIO(self.release()[f"dynmo-{VERSION}.tar.gz"])) as archive:
            archive.extractall(self.root.parent)
        source = self.root.parent / f"dynmo-{VERSION}"
        shutil.copy2(ROOT / "cmake/write_version.cmake", source / "cmake/write_version.cmake")
        out = self.root.parent / "version.cpp"
        settings = (f"-DSOURCE={source}", f"-DVERSION={VERSION}", f"-DOUT={out}")
        subprocess.run(["cmake", *settings, "-P", source / "cmake/write_version.cmake"], check=True)
        self.assertIn(f'kVersion = "{VERSION} ({self.git("rev-parse", "HEAD")[:10]})"', out.read_text())

    def test_list_every_row_of_the_table(self):
        bill = json.loads(self.release()[f"dynmo-{VERSION}.cdx.json"])
        self.assertEqual((bill["bomFormat"], bill["metadata"]["component"]["version"]), ("CycloneDX", VERSION))
        rows = package.dependencies((ROOT / "docs/third-party.md").read_text())
        self.assertEqual({(each["name"], each["version"], each["licenses"][0]["expression"]) for each in bill["components"]},
                         {row[:3] for row in rows})
        scopes = {each["name"]: each["scope"] for each in bill["components"]}
        self.assertEqual([scopes[name] for name in ("fmt", "CLI11", "NumPy", "CMake")], ["required", "required", "optional", "excluded"])
        self.assertEqual(len({each["bom-ref"] for each in bill["components"]}), len(rows))


if __name__ == "__main__":
    sys.exit(unittest.main())
