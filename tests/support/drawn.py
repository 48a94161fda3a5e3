# SPDX-License-Identifier: Apache-2.0
"""usage: python3 -m drawn COUNT MODULE.CASE

Runs the tests of an expensive case. With DYNMO_DRAW, which CI sets to its commit, only COUNT of them run: the commit draws which, so
that another commit draws others. Without it all of them run, as in `make test`, `make nightly` and `make soak`.
"""
import os
import random
import sys
import unittest


def drawn(items, count, what):
    """`count` of the items, in their order, and a line for the log that says which; all items without DYNMO_DRAW."""
    items, commit = list(items), os.environ.get("DYNMO_DRAW", "")
    if not commit or count >= len(items):
        return items
    places = sorted(random.Random(f"{commit} {what}").sample(range(len(items)), count))
    chosen = [items[place] for place in places]
    print(f"drawn by {commit[:12]}: {count} of {len(items)} of {what}: {', '.join(map(str, chosen))}", flush=True)
    return chosen


def run_drawn(count, name):
    """Runs `count` tests of a module or class and returns the exit code."""
    tests = list(of_suite(unittest.defaultTestLoader.loadTestsFromName(name)))
    names = {test.id() for test in tests}
    names = set(drawn(sorted(names), count, name))
    result = unittest.TextTestRunner(verbosity=2).run(unittest.TestSuite(test for test in tests if test.id() in names))
    return 0 if result.wasSuccessful() and result.testsRun > 0 else 1


def of_suite(suite):
    for test in suite:
        if isinstance(test, unittest.TestSuite):
            yield from of_suite(test)
        else:
            yield test


if __name__ == "__main__":
    sys.path.insert(0, os.getcwd())
    sys.exit(run_drawn(int(sys.argv[1]), sys.argv[2]))
