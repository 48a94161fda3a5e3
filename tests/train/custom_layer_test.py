# SPDX-License-Identifier: Apache-2.0
"""The examples of a layer and of a source of one's own, and the pages that show them."""
import os
import pathlib
import re

from run_case import TINY, RunCase, digests, losses, newest_manifest

REPOSITORY = pathlib.Path(__file__).resolve().parents[2]


class ExampleCase(RunCase):
    def expect_page_shows(self, example, page, count):
        source = (REPOSITORY / "examples" / example).read_text()
        blocks = re.findall(r"```cpp\n(.*?)```", (REPOSITORY / "docs" / page).read_text(), re.DOTALL)
        self.assertEqual(len(blocks), count)
        for block in blocks:
            self.assertIn(re.sub(r"\s+", " ", block).strip(), re.sub(r"\s+", " ", source))


class CustomLayer(ExampleCase):

    def test_the_example_trains(self):
        run = self.folder / "primer"
        self.succeed([os.environ["CUSTOM_LAYER"], str(self.data), str(run)])
        values = list(losses(run).values())
        self.assertEqual(len(values), 30)
        self.assertLess(sum(values[-5:]) / 5, 0.8 * values[0])

    def test_the_page_shows_the_code_that_runs(self):
        self.expect_page_shows("custom_layer.cpp", "models.md", 1)


class CustomSource(ExampleCase):
    STEPS = 24

    def train(self, name, ranks, *extra):
        run = self.folder / name
        settings = [*TINY, f"data.path={self.data}", f"run.directory={run}", f"train.steps={self.STEPS}", "balance.window=3",
                    "checkpoint.every=8", *extra]
        self.succeed([os.environ["CUSTOM_SOURCE"], str(ranks), *settings])
        return run

    def test_any_number_of_ranks_trains_the_same_numbers(self):
        one = self.train("one", 1)
        for ranks in (2, 3):
            run = self.train(f"of-{ranks}", ranks)
            self.assertEqual(losses(run), losses(one))
            self.assertEqual(digests(newest_manifest(run)), digests(newest_manifest(one)))

    def test_a_run_goes_on_from_its_checkpoint_on_other_ranks(self):
        whole = self.train("whole", 2)
        run = self.train("half", 3)
        newest = sorted((run / "checkpoints").glob("step-*[0-9]"))[-1]
        for path in sorted(newest.glob("*")):
            path.unlink()
        newest.rmdir()
        self.train("half", 2)
        self.assertEqual(losses(run), losses(whole))
        self.assertEqual(digests(newest_manifest(run)), digests(newest_manifest(whole)))

    def test_wrong_arguments_are_answered_with_a_line(self):
        for words, wanted in (([], "wanted RANKS KEY=VALUE..."), (["none"], "wanted RANKS"), (["1", "model.hiden=8"], "model.hiden")):
            result = self.run_command([os.environ["CUSTOM_SOURCE"], *words])
            self.assertEqual((result.returncode, result.stdout), (2, ""), result.stderr)
            self.assertIn(wanted, result.stderr)
            self.assertEqual(len(result.stderr.splitlines()), 1)

    def test_the_page_shows_the_code_that_runs(self):
        self.expect_page_shows("custom_source.cpp", "own-source.md", 1)

    def test_it_is_short_and_the_library_does_not_know_it(self):
        source = (REPOSITORY / "examples" / "custom_source.cpp").read_text()
        self.assertLessEqual(len(source.splitlines()), 100)
        for path in (REPOSITORY / "dynmo").rglob("*.[ch]*"):
            self.assertNotRegex(path.read_text().lower(), "layer_?drop", path)
