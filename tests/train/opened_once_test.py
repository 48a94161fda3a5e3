# SPDX-License-Identifier: Apache-2.0
"""A training opens its data and its weights once in each process, and checks its config in one place."""
import collections
import os
import pathlib
import re
import unittest

from elastic_case import ElasticCase
from program import DYNMO

HOOK = os.environ.get("KILL_AT_WRITE_LIBRARY", "")
ROOT = pathlib.Path(__file__).resolve().parents[2]
# A call of the check of a whole config: not a member's, of no other type's, and no declaration.
CHECK = re.compile(r"(?<![\w:.>])(?:config::)?validate\((?!lane|Lane|model::Pass)")


class OpenedOnce(ElasticCase):
    def watch(self, name, pattern):
        """The environment of a process that notes what it opens."""
        return {"LD_PRELOAD": HOOK, "OPENS": str(self.folder / f"{name}.opens"), "OPENS_OF": pattern}

    def assert_once(self, name, processes, files):
        """So many processes have opened files with these names, and none of them twice."""
        opened = collections.Counter((self.folder / f"{name}.opens").read_text().splitlines())
        self.assertEqual(set(opened.values()), {1}, opened)
        of = collections.defaultdict(set)
        for line in opened:
            process, path = line.split(" ", 1)
            of[process].add(pathlib.Path(path).name)
        self.assertEqual([sorted(names) for names in of.values()], [sorted(files)] * processes, opened)

    def train(self, run, *extra, words=(), pattern="*/data/*.bin"):
        return self.succeed(self.command("-n", "3", *words, run=run, extra=("train.steps=4", *extra)), env=self.watch(run, pattern))

    def test_by_the_launcher_and_each_rank(self):
        self.train("validated", "train.validation_every=2", "train.validation_steps=1")
        self.assert_once("validated", 4, ["train.bin", "validation.bin"])

    def test_by_a_rank_that_measures_keys_and_trains_several_models(self):
        self.train("compared", "pruning.enabled=true", "pruning.start=1", "pruning.end=3", "pruning.every=1",
                   "pruning.sparse_above=auto", words=("--compare", "dense,static,balanced"))
        self.assert_once("compared", 4, ["train.bin", "validation.bin"])

    def test_by_a_resumed_rank_that_takes_over_measured_keys(self):
        keys = ("pruning.enabled=true", "pruning.start=1", "pruning.end=3", "pruning.every=1", "pruning.sparse_above=auto",
                "checkpoint.every=2")
        self.train("resumed", *keys)
        (self.folder / "resumed.opens").unlink()
        result = self.train("resumed", *keys, "train.steps=6", words=("--resume",))
        self.assertNotIn("auto     pruning", result.stdout)  # measured once in the run
        self.assert_once("resumed", 4, ["train.bin", "validation.bin"])

    def test_by_a_dry_run(self):
        self.train("dry", words=("--dry-run",))
        self.assert_once("dry", 1, ["train.bin", "validation.bin"])

    def test_by_a_newcomer(self):
        process = self.start("grown", 1)
        joiner = self.spawn([DYNMO, "train", "--join", str(self.folder / "grown")],
                            env={**os.environ, **self.watch("grown", "*/data/*.bin")})
        self.until(process, lambda: len(self.ranks("grown")) == 2)
        self.done("grown", "stop")
        for each in (process, joiner):
            self.ended(each, code=130)
        self.assert_once("grown", 1, ["train.bin", "validation.bin"])

    def test_the_weights_too(self):
        self.train("before", "checkpoint.every=4")
        self.succeed([DYNMO, "checkpoint", "export-hf", "before", "--out", "exported"])
        self.train("after", "train.init=exported", "pruning.enabled=true", "pruning.start=1", "pruning.end=3", "pruning.every=1",
                   "pruning.sparse_above=auto", pattern="*.safetensors")
        self.assert_once("after", 4, ["model.safetensors"])


class Checked(unittest.TestCase):
    def test_in_one_place(self):
        """The other two read a file for a command that trains nothing."""
        found = [str(path.relative_to(ROOT)) for folder in ("dynmo/train", "apps/dynmo") for path in sorted((ROOT / folder).rglob("*.cpp"))
                 for line in path.read_text().splitlines() if CHECK.search(line)]
        self.assertEqual(found, ["dynmo/train/setup/resolved_run.cpp", "apps/dynmo/config_command.cpp", "apps/dynmo/plan_command.cpp"])


if __name__ == "__main__":
    unittest.main()
