#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""The systems, compilers and versions of PyTorch that scripts/versions tries, and the table of docs/versions.md from its logs.

usage: scripts/versions_table.py [--rows | --row NAME | --check]

Writes the table. --rows prints those that can be tried here, --row prints suite, compiler, PyTorch and parts of a row; --check writes nothing and fails if the table is another one.
The newest log of a row counts, bench/results/DATE-versions/ROW.log.
"""
import dataclasses
import pathlib
import re
import sys

ROOT = pathlib.Path(__file__).resolve().parent.parent
RESULTS = ROOT / "bench" / "results"
PAGE = ROOT / "docs" / "versions.md"
PARTS = ("build", "unit", "dynmo.torch", "rest")
COUNTS = re.compile(r"(\d+) passed, (\d+) failed, (\d+) skipped")
HEAD = ("system", "compiler", "Python", "PyTorch", *PARTS, "commit", "remark")


@dataclasses.dataclass(frozen=True)
class Row:
    """`suite` is a Debian that can be made here, or ""; `parts` are the first of PARTS that are tried."""
    name: str
    system: str
    suite: str
    compiler: str
    pytorch: str
    parts: int
    untried: str = "not tried"


ROWS = tuple(Row(*row) for row in (
    ("debian12-gcc-core", "Debian 12", "bookworm", "g++", "", 2),
    ("debian12-gcc-torch2.11", "Debian 12", "bookworm", "g++", "2.11", 4),
    ("debian12-gcc-torch2.15", "Debian 12", "bookworm", "g++", "2.15", 4),
    ("debian12-gcc-torch2.10", "Debian 12", "bookworm", "g++", "2.10", 1),
    ("debian12-clang-core", "Debian 12", "bookworm", "clang++-16", "", 2),
    ("debian12-clang-torch2.11", "Debian 12", "bookworm", "clang++-16", "2.11", 4),
    ("debian13-gcc-core", "Debian 13", "trixie", "g++", "", 2),
    ("debian13-clang-core", "Debian 13", "trixie", "clang++", "", 2),
    ("debian13-gcc-torch2.11", "Debian 13", "trixie", "g++", "2.11", 4),
    ("debian13-gcc-torch2.15", "Debian 13", "trixie", "g++", "2.15", 4),
    ("ubuntu24.04-gcc-torch2.11", "Ubuntu 24.04", "", "g++", "2.11", 4, "by CI only"),
))


def fields(log):
    """What a log says, by name; what failed has a line for each test."""
    found = {}
    for name, said in (line.split(": ", 1) for line in log.splitlines() if ": " in line):
        found[name] = f"{found[name]}; {said}" if name in found else said
    return found


def newest_log(row, results):
    logs = sorted(results.glob(f"*-versions/{row.name}.log"))
    return fields(logs[-1].read_text()) if logs else None


def cell(said):
    """"3/1/2" of "3 passed, 1 failed, 2 skipped"."""
    counts = COUNTS.fullmatch(said)
    return "/".join(counts.groups()) if counts else said


def cells(row, results):
    log = newest_log(row, results)
    if log is None:
        return (row.system, row.compiler.replace("-", " "), "", row.pytorch, *("" for _ in PARTS), "", row.untried)
    version = re.search(r"(\d+)\.\d+\.\d", log.get("compiler", ""))
    name = row.compiler.partition("-")[0]
    compiler = f"{name} {version.group(1)}" if version else name
    python = ".".join(log.get("python", "").split(".")[:2])
    parts = [cell(log.get(part, "")) for part in PARTS]
    return (row.system, compiler, python, row.pytorch, *parts, log["commit"], log.get("reason") or log.get("failed", ""))


def table(results=RESULTS):
    lines = [HEAD, ("---",) * len(HEAD), *(cells(row, results) for row in ROWS)]
    return "".join("|" + "".join(f"{text.replace('|', '/')}|" for text in line) + "\n" for line in lines)  # no blanks: wc counts words


def page_with(text, new):
    """The page with its only table replaced."""
    found = re.findall(r"(?:^\|.*\n)+", text, re.MULTILINE)
    if len(found) != 1:
        sys.exit(f"versions: {PAGE} has {len(found)} tables, wanted one")
    return text.replace(found[0], new)


def main(arguments):
    if arguments[:1] == ["--row"] and len(arguments) == 2:
        row = next((row for row in ROWS if row.name == arguments[1]), None)
        if row is None or not row.suite:
            tried = ", ".join(row.name for row in ROWS if row.suite)
            sys.exit(f"versions: '{arguments[1]}' is no row that can be tried here, wanted one of {tried}")
        print(row.suite, row.compiler, row.pytorch or "-", row.parts)
        return
    if arguments == ["--rows"]:
        print("\n".join(row.name for row in ROWS if row.suite))
        return
    if arguments not in ([], ["--check"]):
        sys.exit(__doc__)
    text = PAGE.read_text()
    new = page_with(text, table())
    if arguments and new != text:
        sys.exit(f"versions: the table of {PAGE} is not that of the logs in {RESULTS}: run scripts/versions_table.py")
    PAGE.write_text(new)


if __name__ == "__main__":
    main(sys.argv[1:])
