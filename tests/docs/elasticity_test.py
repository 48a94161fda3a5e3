# SPDX-License-Identifier: Apache-2.0
"""README.md: the commands of "A run that changes its size", as they stand there.

DYNMO is the program. They run in a folder of their own that has the repository's examples/ and a data/python made of its docs/.
"""
import json
import os
import pathlib
import re
import subprocess
import tempfile
import unittest

ROOT = pathlib.Path(__file__).resolve().parents[2]
DYNMO = pathlib.Path(os.environ["DYNMO"])


class Elasticity(unittest.TestCase):
    def test_the_first_try(self):
        page = (ROOT / "README.md").read_text()
        section = page[page.index("## A run that changes its size"):]
        block = re.search(r"^```sh\n(.*?)^```$", section, re.DOTALL | re.MULTILINE).group(1)
        with tempfile.TemporaryDirectory(prefix="dynmo-elasticity-") as name:
            folder = pathlib.Path(name)
            (folder / "examples").symlink_to(ROOT / "examples")
            environment = {**os.environ, "PATH": f"{DYNMO.parent}:{os.environ['PATH']}"}
            subprocess.run(["dynmo", "data", "prepare", str(ROOT / "docs"), "--out", "data/python"], cwd=folder, env=environment,
                           check=True, capture_output=True, timeout=60)
            done = subprocess.run(["bash", "-uo", "pipefail", "-c", block], cwd=folder, env=environment, text=True, capture_output=True,
                                  stdin=subprocess.DEVNULL, timeout=240, check=False)
            told = done.stdout + done.stderr + (folder / "elastic.log").read_text() + (folder / "joined.log").read_text()
            self.assertEqual(done.returncode, 0, told)
            self.assertRegex(done.stdout, r"before step \d+: 4 ranks -> 2 ranks: packed onto 2 ranks, in ", told)
            self.assertIn("the checkpoint is written", done.stdout, told)
            self.assertIn("after a checkpoint", done.stdout, told)
            self.assertIn("joined as rank 4", (folder / "joined.log").read_text(), told)
            lines = (folder / "runs/elastic/events.jsonl").read_text().splitlines()
            sizes = [event["ranks"] for event in map(json.loads, lines) if event["event"] == "size"]
            self.assertEqual(sizes, [[0, 1], [0, 1, 4]])


if __name__ == "__main__":
    unittest.main()
