# SPDX-License-Identifier: Apache-2.0
"""Comments of C++ name what there is: a source file that exists, and a member that its type has."""
import collections
import pathlib
import re
import sys
import tempfile
import unittest

ROOT = pathlib.Path(__file__).resolve().parents[2]
TOPS = ("apps", "bench", "dynmo", "examples", "python", "tests")
FILE = re.compile(r"\b\w+\.(?:h|cpp|cu|def)\b")
MEMBER = re.compile(r"(?<!::)\b([A-Z]\w*)::(\w+)")
TYPE = re.compile(r"\b(?:struct|class|enum)(?: class)? (\w+)")
FOREIGN = {"mkl_spblas.h", "sysexits.h"}


def split(text):
    """([(line number, comment)], code) of a C++ text."""
    lines = [line.partition("//") for line in text.split("\n")]
    return [(number, comment) for number, (_, _, comment) in enumerate(lines, 1) if comment], "\n".join(code for code, _, _ in lines)


def strangers(root):
    """A line for each name in a comment that nothing has."""
    texts = {path: split(path.read_text()) for top in TOPS for path in sorted((root / top).rglob("*")) if path.suffix in (".h", ".cpp", ".cu")}
    files = {path.name for top in TOPS for path in (root / top).rglob("*.*")}
    homes = collections.defaultdict(list)  # by type, the code of the files that declare it
    for _, code in texts.values():
        for name in set(TYPE.findall(code)):
            homes[name].append(code)
    found = []
    for path, (comments, _) in texts.items():
        for number, comment in comments:
            place = f"{path.relative_to(root)}:{number}"
            found += [f"{place}: {name}: no such file" for name in FILE.findall(comment) if name not in files | FOREIGN]
            found += [f"{place}: {owner}::{name}: {owner} has no such member" for owner, name in MEMBER.findall(comment)
                      if owner in homes and not any(re.search(rf"\b{name}\b", code) for code in homes[owner])]
    return found


class Comments(unittest.TestCase):
    def test_name_files_and_members_that_exist(self):
        self.assertEqual(strangers(ROOT), [])

    def test_that_name_others_are_found(self):
        with tempfile.TemporaryDirectory() as name:
            root = pathlib.Path(name)
            (root / "dynmo").mkdir()
            (root / "dynmo/a.h").write_text("struct A {\n  int size;  // as B::count, A::size and A::lost (a.h)\n};\n// In lost.cpp.\n")
            (root / "dynmo/b.h").write_text("class B {\n  int number;  // count, of at::Tensor::count\n};\n")
            self.assertEqual(strangers(root), ["dynmo/a.h:2: B::count: B has no such member", "dynmo/a.h:2: A::lost: A has no such member",
                                               "dynmo/a.h:4: lost.cpp: no such file"])


if __name__ == "__main__":
    sys.exit(unittest.main())
