#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""What scripts/tidy, scripts/tsan and tests/repository/headers_test.py have found clean, so that they do not look at it again.

usage: scripts/marks.py

A mark is a digest of files, without their comments, with every header of ours that they include, and of all that decides what is found
in them: compiler, tool, options. Marks lie in the cache folder of scripts/setup, and in .ci/clean, which a commit brings: a fresh
machine looks only at what has changed since. The command writes to .ci/clean what has passed in this checkout: run it once .ci/run has passed.
DYNMO_MARKS=none ignores all marks, as `make nightly` does.
"""
import hashlib
import json
import os
import pathlib
import re
import shlex
import subprocess
import sys
import time

ROOT = pathlib.Path(__file__).resolve().parent.parent
COMMITTED = ROOT / ".ci" / "clean"
PASSED = ROOT / "build" / "marks"
INCLUDE = re.compile(rb'^\s*#\s*include\s+"([^"]+)"', re.MULTILINE)
# A comment that tells no tool anything, as a line and behind code.
COMMENT = re.compile(rb'^[ \t]*//(?!.*NOLINT).*\n|[ \t]+//(?!.*(?:NOLINT|namespace))[^"\n]*$', re.MULTILINE)
KEEP_DAYS = 30


def includes(file):
    """What the file includes and is ours, each once: an absolute name is the same from ROOT and from the file's folder."""
    names = [name.decode() for name in INCLUDE.findall(file.read_bytes())]
    return list(dict.fromkeys(path for name in names for path in (ROOT / name, file.parent / name) if path.is_file()))


def closure(*files):
    """The files and every header of ours that they include, directly or not."""
    seen, waiting = set(), list(files)
    while waiting:
        current = waiting.pop()
        if current not in seen:
            seen.add(current)
            waiting += includes(current)
    return sorted(seen)


def version(tool):
    """What a tool says of itself. A compiler stands for the system, whose headers have no part in a digest."""
    return subprocess.run([tool, "--version"], capture_output=True, check=True).stdout


def compiler(build):
    """The compiler of a build folder."""
    return shlex.split(json.loads((build / "compile_commands.json").read_text())[0]["command"])[0]


def digest(files, *rules):
    """Of the files and of the texts of what decides what is found in them. The same in each checkout."""
    found = hashlib.sha256()
    for rule in rules:
        found.update(rule.replace(bytes(ROOT), b"") + b"\0")
    for path in files:
        text = path.read_bytes().replace(bytes(ROOT), b"")
        if path.suffix in (".cpp", ".h"):
            text = COMMENT.sub(b"", text)
        found.update(str(path.relative_to(ROOT)).encode() + b"\0" + text + b"\0")
    return found.hexdigest()[:16]


class Marks:
    """Those of a tool: `tidy`, `tsan` or `headers`."""

    def __init__(self, tool):
        base = os.environ.get("XDG_CACHE_HOME") or os.path.join(os.environ.get("HOME", "/"), ".cache")
        self.tool = tool
        self.cache = pathlib.Path(os.environ.get("DYNMO_CACHE") or os.path.join(base, "dynmo")) / tool
        self.cache.mkdir(parents=True, exist_ok=True)
        for mark in self.cache.iterdir():
            if mark.stat().st_mtime < time.time() - KEEP_DAYS * 86400:
                mark.unlink(missing_ok=True)
        lines = COMMITTED.read_text().splitlines() if COMMITTED.exists() else []
        self.committed = {line.split()[1] for line in lines if line.startswith(f"{tool} ")}
        self.ignored = os.environ.get("DYNMO_MARKS") == "none"

    def has(self, key):
        if self.ignored:
            return False
        if (self.cache / key).exists():
            os.utime(self.cache / key)
            return True
        return key in self.committed

    def add(self, key):
        (self.cache / key).touch()

    def passed(self, keys):
        """Notes that these are all marks of the checkout, and clean, for main()."""
        PASSED.mkdir(parents=True, exist_ok=True)
        (PASSED / self.tool).write_text("".join(f"{self.tool} {key}\n" for key in keys))


def main():
    if len(sys.argv) > 1:
        sys.exit(__doc__)
    noted = sorted(PASSED.iterdir()) if PASSED.exists() else []
    if not noted:
        sys.exit(f"marks: nothing has passed in {ROOT}: run scripts/check, or .ci/run, first")
    tools = tuple(f"{path.name} " for path in noted)
    lines = COMMITTED.read_text().splitlines() if COMMITTED.exists() else []
    kept = [line for line in lines if not line.startswith(tools)]
    new = {*kept, *(line for path in noted for line in path.read_text().splitlines())}
    COMMITTED.write_text("".join(f"{line}\n" for line in sorted(new)))
    print(f"marks: .ci/clean has {len(new)}, of {', '.join(path.name for path in noted)} as they have passed here")


if __name__ == "__main__":
    main()
