# SPDX-License-Identifier: Apache-2.0
"""The shell blocks of docs/scenarios.md, docs/features.md and docs/elasticity.md, as they stand there. DYNMO is the program."""
import json
import os
import pathlib
import tempfile
import unittest

from blocks import ROOT, environment, run_block, shell_blocks

DYNMO = pathlib.Path(os.environ["DYNMO"])


class ShellCase(unittest.TestCase):
    def setUp(self):
        temporary = tempfile.TemporaryDirectory(prefix="dynmo-shell-")
        self.addCleanup(temporary.cleanup)
        self.folder = pathlib.Path(temporary.name)
        (self.folder / "examples").symlink_to(ROOT / "examples")

    def run_blocks(self, page, **more):
        env = environment(self.folder / "tools", DYNMO, **more)
        blocks = [block for block in shell_blocks(page) if "dynmo ctl" not in block]  # readme_test.py runs those
        outputs = [run_block(block, self.folder, env, 200) for block in blocks]
        self.assertEqual([code for code, _ in outputs], [0] * len(outputs), outputs)
        return [output for _, output in outputs]


class Scenarios(ShellCase):
    def test_are_simulated(self):
        output, = self.run_blocks("docs/scenarios.md")
        self.assertIn("static:optimal", output)
        self.assertIn("1 x 16 ranks", output)
        self.assertIn('"format": "dynmo-simulation-1"', output)
        self.assertTrue(json.loads((self.folder / "run.json").read_text())["traceEvents"])


class Features(ShellCase):
    def test_are_found_and_generated(self):
        stats, made = self.run_blocks("docs/features.md")
        self.assertIn("autocorrelation with the next step", stats)
        self.assertIn("400 steps, 48 blocks, 16 experts, 4096 tokens a block in a step", made)


class Hook(ShellCase):
    def test_writes_down_what_was_released(self):
        self.run_blocks("docs/elasticity.md", DYNMO_RELEASE="3", DYNMO_RELEASED_HOSTS="a,b", DYNMO_RUN=str(self.folder))
        self.assertRegex((self.folder / "released.txt").read_text(), r"release 3: a,b\n$")


if __name__ == "__main__":
    unittest.main()
