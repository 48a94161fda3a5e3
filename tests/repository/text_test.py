# SPDX-License-Identifier: Apache-2.0
"""Every source says its license, and no tracked file holds what is true on one machine only."""
import pathlib
import re
import subprocess
import sys
import unittest

ROOT = pathlib.Path(__file__).resolve().parents[2]
LICENSE = "SPDX-License-Identifier: Apache-2.0"
SOURCES = {".h", ".cpp", ".cu", ".py", ".cmake", ".in", ".sh", ".yml", ".yaml"}
IGNORED = {".git", "build", "data", "runs"}  # at the top only: dynmo/data has sources
# Written so that this file does not hold them itself.
MACHINE_PATH = re.compile("(?<![A-Za-z0-9_.}~-])/(" + "|".join(["work", "farm", "root", "home/[a-z]", "Users/[A-Za-z]"]) + ")/")
REGISTRY = re.compile(r"https?://[a-z0-9.-]*(" + "|".join(["py" + "pi", "python" + "hosted", "download\\.py" + "torch",
                                                          "deb\\.deb" + "ian", "archive\\.ubun" + "tu"]) + ")")


def files():
    """Paths of what is tracked, or would be."""
    done = subprocess.run(["git", "-C", ROOT, "ls-files", "-co", "--exclude-standard"], capture_output=True, text=True, check=False)
    if done.returncode == 0:
        names = [pathlib.Path(name) for name in done.stdout.splitlines()]
    else:  # unpacked from an archive
        names = [path.relative_to(ROOT) for path in ROOT.rglob("*")]
    return sorted(name for name in names if (ROOT / name).is_file() and name.parts[0] not in IGNORED and "__pycache__" not in name.parts)


def text_of(name):
    try:
        return (ROOT / name).read_text()
    except UnicodeDecodeError:
        return ""  # binary


def is_source(name, text):
    return name.suffix in SOURCES or name.name in ("CMakeLists.txt", "Makefile") or text.startswith("#!")


def complaints(name, text):
    """What is wrong with the text of a file."""
    found = []
    if is_source(name, text) and LICENSE not in "\n".join(text.splitlines()[:2]):
        found.append(f"{name}: wanted '{LICENSE}' in the first two lines")
    for number, line in enumerate(text.splitlines(), 1):
        if MACHINE_PATH.search(line):
            found.append(f"{name}:{number}: a path of one machine")
        if REGISTRY.search(line):
            found.append(f"{name}:{number}: the address of a package registry")
    return found


class Text(unittest.TestCase):
    def test_of_every_file_is_free_of_complaints(self):
        names = files()
        self.assertLessEqual({pathlib.Path("CMakeLists.txt"), pathlib.Path("dynmo/data/blend.h"), pathlib.Path("tests/data/blend_test.cpp")}, set(names))
        self.assertEqual([line for name in names for line in complaints(name, text_of(name))], [])

    def test_that_breaks_a_rule_is_found(self):
        registry = "https://" + "py" + "pi.org/simple"
        path = "/wo" + "rk/main/x"
        for name, text in [("a.h", "#pragma once\n"), ("CMakeLists.txt", "project(x)\n"), ("tool", "#!/bin/sh\nexit\n"),
                           ("a.md", f"see {path}"), ("a.md", f"'{path}'"), ("a.md", f"pip install -i {registry} x")]:
            self.assertEqual(len(complaints(pathlib.Path(name), text)), 1, text)
        for name, text in [("a.h", f"// {LICENSE}\n"), ("tool", f"#!/bin/sh\n# {LICENSE}\n"), ("a.md", "build/work/x ~/work/x"),
                           ("a.md", "${" + "HOME}" + path)]:
            self.assertEqual(complaints(pathlib.Path(name), text), [], text)


if __name__ == "__main__":
    sys.exit(unittest.main())
