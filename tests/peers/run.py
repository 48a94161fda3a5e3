#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Runs what needs the full PyTorch, transformers, Open MPI and the like: `make test-peers`.

A peer test is a program in tests/peers/ named *_test.py or *_check.py, or one of EXTRA, which is passed over where the checkout
has none. It is run with `--dynmo PROGRAM` by an interpreter that has the packages of `scripts/setup peers`, and prints lines

    PASS name
    FAIL name: why
    SKIP name: why

and whatever else it likes. A name may have spaces; it ends at the first colon with a space behind it. A program without such lines counts as one test: passed where it ends with 0, skipped with 77 (its
last line says why), else failed. So does one that ends with another code than 0 and 77 and has no line FAIL.
"""
import argparse
import pathlib
import re
import subprocess
import sys

ROOT = pathlib.Path(__file__).resolve().parents[2]
# Path and further arguments.
EXTRA = [("tests/peers/make_goldens.py", []), ("tests/peers/check_export.py", []),
         ("bench/peers/compare.py", ["--models", "small", "--rounds", "3"])]
LINE = re.compile(r"^(PASS|FAIL|SKIP) (\S.*?)(?::(?:\s+(.*))?)?\s*$")
SKIPPED = 77


def programs(root):
    """Path and further arguments of every peer test, in order."""
    folder = root / "tests" / "peers"
    found = [(path, []) for pattern in ("*_test.py", "*_check.py") for path in sorted(folder.glob(pattern))]
    return found + [(root / path, words) for path, words in EXTRA if (root / path).exists()]


def results_of(name, code, output):
    """What a program said, as (verdict, name, why); its code is None where it was not done in time."""
    lines = [line for line in output.splitlines() if line.strip()]
    results = [(found[1], f"{name}:{found[2]}", found[3] or "") for found in map(LINE.match, lines) if found]
    # A line of a check that passed is not why the program failed behind it.
    rest = [line for line in lines if not LINE.match(line)]
    last = rest[-1].strip() if rest else "it said nothing" + (" but its checks" if results else "")
    if code not in (0, SKIPPED) and all(verdict != "FAIL" for verdict, _, _ in results):
        ended = "" if code is None else f"killed by signal {-code}: " if code < 0 else f"exit code {code}: "
        results.append(("FAIL", name, ended + last))
    if not results:
        results.append(("PASS", name, "") if code == 0 else ("SKIP", name, last))
    return results


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--dynmo", required=True)
    parser.add_argument("--python", required=True)
    parser.add_argument("--timeout", type=float, default=3600, help="seconds a program")
    parser.add_argument("--root", type=pathlib.Path, default=ROOT, help="checkout whose peer tests are run")
    arguments = parser.parse_args()
    counts = {"PASS": 0, "FAIL": 0, "SKIP": 0}
    for path, words in programs(arguments.root):
        name = str(path.relative_to(arguments.root))
        command = [arguments.python, str(path), "--dynmo", arguments.dynmo, *words]
        try:
            done = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, errors="replace",
                                  stdin=subprocess.DEVNULL, timeout=arguments.timeout, cwd=arguments.root)
            code, output = done.returncode, done.stdout
        except subprocess.TimeoutExpired as fault:
            said = fault.stdout or ""  # bytes in some versions of Python, whatever `text` says
            said = said if isinstance(said, str) else said.decode(errors="replace")
            code, output = None, f"{said}\nnot done after {arguments.timeout:g} s"
        results = results_of(name, code, output)
        for verdict, what, why in results:
            counts[verdict] += 1
            print(f"{verdict} {what}{': ' + why if why else ''}", flush=True)
        if any(verdict == "FAIL" for verdict, _, _ in results):
            print("\n".join("  | " + line for line in output.splitlines()[-30:]), flush=True)
    print(f"{counts['PASS']} passed, {counts['FAIL']} failed, {counts['SKIP']} skipped")
    return 1 if counts["FAIL"] else 0


if __name__ == "__main__":
    sys.exit(main())
