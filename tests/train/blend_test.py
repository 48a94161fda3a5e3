# SPDX-License-Identifier: Apache-2.0
"""Training on several prepared folders in given shares."""
import json
import unittest

from program import DYNMO
from run_case import RunCase, digests, losses, newest_manifest

EVERY = ("checkpoint.every=4", "train.steps=8", "train.validation_every=4", "train.validation_steps=1", "balance.enabled=false")


class Blend(RunCase):
    @classmethod
    def setUpClass(cls):
        super().setUpClass()
        other = cls.folder / "other corpus"
        other.mkdir()
        for number in range(30):
            (other / f"{number}.txt").write_text("".join(f"{i} x {number} = {i * number}\n" for i in range(80)))

    def train(self, run, ranks, blend, *words):
        command = self.command("-n", str(ranks), *words, run=run, extra=(*EVERY, f"data.blend={json.dumps(blend)}"))
        place = command.index("--data")
        return self.run_command(command[:place] + command[place + 2:])

    def prepare(self, corpus, out, *words):
        self.succeed([DYNMO, "data", "prepare", corpus, "--out", out, "--validation", "0.2", *words])

    def test_any_ranks_and_a_resumed_run_have_the_same_samples(self):
        self.prepare("other corpus", "other")
        blend = ["0.3 data", "0.7 other"]
        for run, ranks in (("whole", 2), ("three", 3)):
            self.succeeded(self.train(run, ranks, blend))
        self.assertEqual(losses(self.folder / "whole"), losses(self.folder / "three"))
        self.succeeded(self.train("half", 2, blend))
        for path in (self.folder / "half/checkpoints").glob("step-00000008"):
            path.rename(self.folder / "away")
        resumed = self.succeeded(self.train("half", 3, blend, "--resume"))
        self.assertEqual(digests(newest_manifest(self.folder / "half")), digests(newest_manifest(self.folder / "whole")))
        self.assertNotIn("other tokens", resumed.stdout)
        self.succeed([DYNMO, "generate", "whole", "--prompt", "line", "--tokens", "4"])
        # Other shares are other data.
        (self.folder / "half/checkpoints/step-00000008").rename(self.folder / "again")
        other = self.train("half", 2, ["0.4 data", "0.6 other"], "--resume")
        self.assertIn("'data.blend' holds other tokens", other.stdout + other.stderr)

    def test_a_set_alone_is_that_set(self):
        self.succeeded(self.train("alone", 2, ["2.5 data"]))
        self.succeed(self.command("-n", "2", run="plain", extra=EVERY))
        self.assertEqual(digests(newest_manifest(self.folder / "alone")), digests(newest_manifest(self.folder / "plain")))

    def test_what_is_no_blend_is_refused(self):
        self.prepare("corpus", "pieces", "--tokenizer", "sentencepiece", "--vocabulary", "290")
        for blend, word in ((["0 data"], "'0 data', wanted a share above 0"), (["1 data", "1 nowhere"], "data.blend: "),
                            (["1 data", "1 pieces"], "'pieces' has the tokenizer")):
            self.assert_error(self.train("refused", 2, blend), 2, word)
        both = self.command("-n", "2", run="refused", extra=('data.blend=["1 data"]',))
        self.assert_error(self.run_command(both), 2, "data.path is", "wanted one of them")


if __name__ == "__main__":
    unittest.main()
