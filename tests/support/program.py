# SPDX-License-Identifier: Apache-2.0
"""The built program as its tests meet it: where it is, a folder to run it in, how its errors look.

DYNMO is the program.
"""
import contextlib
import os
import pathlib
import socket
import subprocess
import tempfile
import unittest

DYNMO = os.environ["DYNMO"]
# Ranks have one thread. Several of `dynmo generate` take ten times the time of one where tests run side by side: they wait by spinning.
os.environ.setdefault("OMP_NUM_THREADS", "1")


@contextlib.contextmanager
def held_port():
    """A port where nobody listens, and where a process that is told of it may: the system gives it to no other meanwhile."""
    with socket.socket() as held:
        held.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        held.bind(("127.0.0.1", 0))
        yield held.getsockname()[1]


class ProgramCase(unittest.TestCase):
    """`self.folder` is where the program runs."""

    def run_command(self, command, timeout=120, env=None):
        return subprocess.run(command, capture_output=True, text=True, timeout=timeout, check=False, stdin=subprocess.DEVNULL,
                              cwd=self.folder, env={**os.environ, **(env or {})})

    def run_program(self, *words, env=None, **options):
        return self.run_command([DYNMO, *map(str, words)], env={"LC_ALL": "C", **(env or {})}, **options)

    def succeeded(self, result):
        """The result of a command, whose exit code is 0."""
        self.assertEqual(result.returncode, 0, result.stdout + result.stderr)
        return result

    def succeed(self, command, **options):
        return self.succeeded(self.run_command(command, **options))

    def assert_error(self, result, code, *words):
        """One line on standard error, with all words; `dynmo simulate` also says how long a policy took."""
        self.assertEqual(result.returncode, code, result.stdout + result.stderr)
        lines = [line for line in result.stderr.splitlines() if " took " not in line]
        self.assertEqual(len(lines), 1, result.stderr)
        self.assertTrue(lines[0].startswith("dynmo: error: "), lines[0])
        for word in words:
            self.assertIn(word, lines[0])


class FreshFolderCase(ProgramCase):
    """Each test has an empty folder."""

    def setUp(self):
        temporary = tempfile.TemporaryDirectory(prefix="dynmo-test-")
        self.addCleanup(temporary.cleanup)
        self.folder = pathlib.Path(temporary.name)
