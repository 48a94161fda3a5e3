# SPDX-License-Identifier: Apache-2.0
"""docs/training.md: every command block of it, as it stands there, and what it promises.

DYNMO is the program. The blocks are run in order in a folder of their own that has the repository's docs/.
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
PAGE = (ROOT / "docs" / "training.md").read_text()


def blocks():
    return re.findall(r"^```sh\n(.*?)^```$", PAGE, re.DOTALL | re.MULTILINE)


class Tutorial(unittest.TestCase):
    @classmethod
    def setUpClass(cls):
        cls.temporary = tempfile.TemporaryDirectory(prefix="dynmo-tutorial-")
        cls.folder = pathlib.Path(cls.temporary.name)
        (cls.folder / "docs").symlink_to(ROOT / "docs")
        cls.seen = []  # (block, standard output, losses of runs/docs by step after it)
        environment = {**os.environ, "PATH": f"{DYNMO.parent}:{os.environ['PATH']}"}
        for block in blocks():
            done = subprocess.run(["bash", "-euo", "pipefail", "-c", block], cwd=cls.folder, env=environment, text=True,
                                  capture_output=True, stdin=subprocess.DEVNULL, timeout=300, check=False)
            if done.returncode != 0:
                cls.temporary.cleanup()
                raise AssertionError(f"exit code {done.returncode} of\n{block}{done.stdout}{done.stderr}")
            cls.seen.append((block, done.stdout, cls.losses()))

    @classmethod
    def tearDownClass(cls):
        cls.temporary.cleanup()

    @classmethod
    def losses(cls):
        found = {}
        for path in (cls.folder / "runs/docs/records").glob("*.jsonl"):
            for line in path.read_text().splitlines():
                record = json.loads(line)
                if record.get("loss") is not None:
                    found[record["step"]] = record["loss"]
        return found

    def output(self, words):
        outputs = [(out, losses) for block, out, losses in self.seen if words in block]
        self.assertEqual(len(outputs), 1, words)
        return outputs[0]

    def test_has_no_other_commands(self):
        self.assertEqual(PAGE.count("```"), 2 * len(blocks()))
        commands = {"data prepare", "data inspect", "train", "plan", "generate", "checkpoint verify", "checkpoint export-hf"}
        self.assertEqual({name for name in commands if any(f"dynmo {name} " in block for block in blocks())}, commands)

    def test_shards_are_of_the_trained_tokenizer(self):
        out, _ = self.output("data prepare")
        self.assertIn("sentencepiece, vocabulary 1000", out)
        self.assertIn("end of document 2", out)
        description = json.loads((self.folder / "data/docs/dataset.json").read_text())
        self.assertGreater(description["validation"]["documents"], 0)
        self.assertLess(description["train"]["tokens"], 100000)  # of more than 100 kB

    def test_comparison_has_the_same_losses(self):
        out, _ = self.output("--compare")
        self.assertIn("the same numbers, bit for bit", out)
        self.assertIn("speed-up", out)
        self.assertTrue((self.folder / "runs/compare/balanced/trace.json").exists())

    def test_training_learns_and_validates(self):
        out, losses = self.output("train --config training.toml --out runs/docs\n")
        self.assertEqual(len(losses), 60)
        self.assertLess(losses[max(losses)], 0.87 * losses[min(losses)])
        self.assertIn("validation loss", out)

    def test_resumed_on_one_rank_equals_undisturbed(self):
        _, before = self.output("train --config training.toml --out runs/docs\n")
        out, after = self.output("--resume")
        self.assertIn("step 30", out)
        self.assertEqual(after, before)

    def test_model_speaks_and_is_handed_on(self):
        out, _ = self.output("dynmo generate")
        said = out.split("The layers of")[1:]
        self.assertEqual(len(said), 2, out)
        self.assertTrue(any(text.strip() for text in said), out)  # how much depends on the pages that it was trained on
        self.output("export-hf")
        config = json.loads((self.folder / "exported/config.json").read_text())
        self.assertEqual((config["model_type"], config["vocab_size"]), ("llama", 1000))
        data = (self.folder / "exported/model.safetensors").read_bytes()
        header = json.loads(data[8:8 + int.from_bytes(data[:8], "little")])
        self.assertEqual(header["model.embed_tokens.weight"]["shape"], [1000, 96])
        self.assertGreater((self.folder / "exported/tokenizer.model").stat().st_size, 1000)


if __name__ == "__main__":
    unittest.main()
