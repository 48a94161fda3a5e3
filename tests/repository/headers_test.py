# SPDX-License-Identifier: Apache-2.0
"""Each public header of dynmo::runtime compiles on its own; those of dynmo::core do in `make check`."""
import concurrent.futures
import json
import os
import pathlib
import re
import shlex
import subprocess
import sys
import tempfile
import unittest

ROOT = pathlib.Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "scripts"))
from marks import Marks, closure, digest, version  # noqa: E402

INCLUDE = re.compile(r'^\s*#\s*include\s+[<"]([^>"]+)[>"]', re.MULTILINE)
# What takes seconds to parse is precompiled, for those headers that include all of it.
HEAVY = ("ATen/core/Tensor.h", "nlohmann/json.hpp", "fmt/format.h")


def includes(header, seen):
    """Adds to `seen` what the header includes, directly or by way of our own headers."""
    for name in INCLUDE.findall(header.read_text()):
        if name not in seen:
            seen.add(name)
            if (ROOT / name).is_file():
                includes(ROOT / name, seen)
    return seen


def without_result(entry):
    """The compiler's words for an entry of compile_commands.json, less its source and its result."""
    words = shlex.split(entry["command"])
    return words[: words.index("-o")]


def header_of(entry):
    return ROOT / re.search(r"_verify_interface_header_sets/(.*)\.cxx$", entry["file"])[1]


class Headers(unittest.TestCase):
    def setUp(self):
        commands = json.loads(pathlib.Path(os.environ["DYNMO_BUILD_DIR"], "compile_commands.json").read_text())
        self.alone = [entry for entry in commands if "/dynmo_runtime_verify_interface_header_sets/" in entry["file"]]
        folder = tempfile.TemporaryDirectory()
        self.addCleanup(folder.cleanup)
        self.folder = pathlib.Path(folder.name)

    def precompiled(self, entry):
        """A file that includes what the entry's header does of HEAVY; None: nothing."""
        found = includes(header_of(entry), set())
        names = [name for name in HEAVY if name in found]
        file = self.folder / "-".join(name.replace("/", "-") for name in names)
        if names and not file.exists():
            file.write_text("".join(f"#include <{name}>\n" for name in names))
            words = without_result(entry)
            words[words.index("-x") + 1] = "c++-header"
            subprocess.run([*words, "-o", f"{file}.gch", str(file)], check=True)
        return file if names else None

    @staticmethod
    def compile(entry, first):
        """What the compiler says of a header; empty: nothing."""
        command = [*without_result(entry), *(["-include", str(first)] if first else []), "-fsyntax-only", entry["file"]]
        done = subprocess.run(command, cwd=entry["directory"], capture_output=True, text=True, check=False)
        return done.stderr if done.returncode else ""

    @staticmethod
    def key(entry, marks):
        """Of a header and all that decides whether it compiles; where the cache with libtorch lies does not."""
        words = "\0".join(without_result(entry)).replace(str(marks.cache.parent), "")
        return digest(closure(header_of(entry)), version(without_result(entry)[0]), words.encode())

    def test_each_compiles_alone(self):
        self.assertGreater(len(self.alone), 50)
        marks = Marks("headers")
        keys = [self.key(entry, marks) for entry in self.alone]
        left = [(entry, key) for entry, key in zip(self.alone, keys) if not marks.has(key)]
        print(f"headers: {len(keys)}, of which {len(keys) - len(left)} have not changed since they were clean")
        first = [self.precompiled(entry) for entry, _ in left]

        def look(task, precompiled):
            text = self.compile(task[0], precompiled)
            if not text:
                marks.add(task[1])
            return text

        with concurrent.futures.ThreadPoolExecutor(len(os.sched_getaffinity(0))) as pool:
            said = list(pool.map(look, left, first))
        self.assertEqual([text for text in said if text], [])
        marks.passed(keys)


if __name__ == "__main__":
    unittest.main()
