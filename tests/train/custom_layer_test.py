# SPDX-License-Identifier: Apache-2.0
"""The example of a layer of one's own, and the page that shows it."""
import os
import pathlib
import re

from run_case import RunCase, losses


class CustomLayer(RunCase):
    REPOSITORY = pathlib.Path(__file__).resolve().parents[2]

    def test_the_example_trains(self):
        run = self.folder / "primer"
        result = self.run_command([os.environ["CUSTOM_LAYER"], str(self.data), str(run)])
        self.assertEqual(result.returncode, 0, result.stdout + result.stderr)
        values = list(losses(run).values())
        self.assertEqual(len(values), 30)
        self.assertLess(sum(values[-5:]) / 5, 0.8 * values[0])

    def test_the_page_shows_the_code_that_runs(self):
        source = (self.REPOSITORY / "examples" / "custom_layer.cpp").read_text()
        page = (self.REPOSITORY / "docs" / "custom-layer.md").read_text()
        blocks = re.findall(r"```cpp\n(.*?)```", page, re.DOTALL)
        self.assertEqual(len(blocks), 3)
        for block in blocks:
            flat = re.sub(r"\s+", " ", source)
            self.assertIn(re.sub(r"\s+", " ", block).strip(), flat)
