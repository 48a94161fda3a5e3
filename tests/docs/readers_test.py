# SPDX-License-Identifier: Apache-2.0
"""The pages for users of torchtitan, Megatron-LM and Hugging Face: their blocks run as they stand there, and print what they show.

DYNMO is the program. A reader has `config.json`, that of Llama 3 8B, a folder `text` and a folder `model`.
"""
import json
import os
import pathlib
import random
import shutil
import subprocess
import tempfile
import unittest

from blocks import ROOT, environment, missing_lines, run_block, shell_blocks, shown_blocks

DYNMO = pathlib.Path(os.environ["DYNMO"])
BLOCKS = 32  # of the model in config.json


def write_text(folder):
    draw = random.Random(7)
    words = ["".join(draw.choices("abcdefghijklmnopqrst", k=draw.randint(2, 9))) for _ in range(400)]
    folder.mkdir()
    for number in range(20):
        text = "\n".join(" ".join(draw.choices(words, k=9)) + "." for _ in range(20))
        (folder / f"{number:02}.txt").write_text(text)


def write_model(folder):
    """A folder such as save_pretrained writes, with its tokenizer: an export of a run of one step."""
    run = folder / "run"
    for words in (["data", "prepare", "text", "--out", "tokens", "--tokenizer", "sentencepiece", "--vocabulary", "500"],
                  ["train", "--data", "tokens", "--out", run, "-n", "1", "--model.blocks=4", "--model.hidden=64", "--model.intermediate=128",
                   "--model.sequence=64", "--train.steps=1", "--checkpoint.every=1", "--train.validation_every=0"],
                  ["checkpoint", "export-hf", run, "--out", "model"]):
        subprocess.run([DYNMO, *map(str, words)], cwd=folder, check=True, capture_output=True)
    shutil.rmtree(run)


class Pages(unittest.TestCase):
    def setUp(self):
        temporary = tempfile.TemporaryDirectory(prefix="dynmo-readers-")
        self.addCleanup(temporary.cleanup)
        self.folder = pathlib.Path(temporary.name)
        shutil.copy(ROOT / "tests/docs/llama3-8b.json", self.folder / "config.json")
        write_text(self.folder / "text")

    def run_page(self, page):
        env = environment(self.folder / "tools", DYNMO)
        shown = shown_blocks(page)
        self.assertEqual([block for block, _ in shown], shell_blocks(page), "each block has its output behind it")
        for block, lines in shown:
            code, output = run_block(block, self.folder, env, 200)
            self.assertEqual(code, 0, block + output)
            self.assertEqual(missing_lines(lines, output), [], output)

    def test_for_torchtitan_lead_to_its_keys(self):
        self.run_page("docs/from-torchtitan.md")
        keys = json.loads((self.folder / "plan/torchtitan.json").read_text())["parallelism"]
        self.assertEqual(sum(keys["module_fqns_per_model_part"], []),
                         ["tok_embeddings", *(f"layers.{layer}" for layer in range(BLOCKS)), "norm", "lm_head"])

    def test_for_megatron_lead_to_a_layout_and_shards(self):
        self.run_page("docs/from-megatron.md")
        flags = (self.folder / "plan/megatron.args").read_text().split()
        self.assertEqual(flags[3].replace("|", ""), "E" + "t" * BLOCKS + "L")
        self.assertEqual(len(flags[3].split("|")) % int(flags[1]), 0)
        self.assertTrue((self.folder / "shards/train.idx").exists())

    def test_for_hugging_face_lead_to_a_model(self):
        write_model(self.folder)
        self.run_page("docs/from-hugging-face.md")
        config = json.loads((self.folder / "tuned-model/config.json").read_text())
        self.assertEqual((config["architectures"], config["num_hidden_layers"]), (["LlamaForCausalLM"], 4))
        self.assertTrue((self.folder / "tuned-model/tokenizer.model").exists())


class Shown(unittest.TestCase):
    def test_lines_that_are_missing_are_found(self):
        self.assertEqual(missing_lines(["a", "...", "b ..."], "a\nc\nb 1\n"), [])
        self.assertEqual(missing_lines(["a", "b", "d"], "b\na\nb 1\n"), ["b", "d"])
        self.assertEqual(missing_lines(["b", "a"], "a\nb\n"), ["a"])


if __name__ == "__main__":
    unittest.main()
