# SPDX-License-Identifier: Apache-2.0
"""README.md: every shell block, in order, on a fresh clone, as it stands there, with a limit of time. Then the first try of
docs/elasticity.md.

DYNMO is the program; `make demo` trains a few steps with it instead of building it.
"""
import json
import os
import pathlib
import tempfile
import unittest

from blocks import clone, environment, run_block, shell_blocks

DYNMO = pathlib.Path(os.environ["DYNMO"])
LIMIT_S = 240


def first_try():
    return next(block for block in shell_blocks("docs/elasticity.md") if "dynmo ctl" in block)


class Blocks(unittest.TestCase):
    @classmethod
    def setUpClass(cls):
        temporary = tempfile.TemporaryDirectory(prefix="dynmo-readme-")
        cls.addClassCleanup(temporary.cleanup)
        cls.folder = pathlib.Path(temporary.name) / "clone"
        clone(cls.folder)
        env = environment(pathlib.Path(temporary.name) / "tools", DYNMO)
        cls.outputs = []
        for block in [*shell_blocks("README.md"), first_try()]:
            code, output = run_block(block, cls.folder, env, LIMIT_S)
            if code != 0:
                raise AssertionError(f"exit code {code} of\n{block}{output}")
            cls.outputs.append((block, output))

    def output(self, words):
        found = [output for block, output in self.outputs if words in block]
        self.assertEqual(len(found), 1, words)
        return found[0]

    def test_of_two_commands_show_the_demo(self):
        output = self.output("make demo   ")
        self.assertEqual(output.count("the same numbers, bit for bit"), 2)
        self.assertRegex(output, r"\nover dense [0-9.]+ x: the work that is saved")

    def test_of_a_run_that_changes_its_size(self):
        output = self.output("dynmo ctl")
        told = output + (self.folder / "elastic.log").read_text() + (self.folder / "joined.log").read_text()
        self.assertRegex(output, r"before step \d+: 4 ranks -> 2 ranks: packed onto 2 ranks, in ", told)
        self.assertIn("the checkpoint is written", output, told)
        self.assertIn("after a checkpoint", output, told)
        self.assertIn("joined as rank 4", (self.folder / "joined.log").read_text(), told)
        lines = (self.folder / "runs/elastic/events.jsonl").read_text().splitlines()
        sizes = [event["ranks"] for event in map(json.loads, lines) if event["event"] == "size"]
        self.assertEqual(sizes, [[0, 1], [0, 1, 4]])
        self.assertEqual([event["ranks"] for event in map(json.loads, lines) if event["event"] == "recovery"], [[1, 4]], told)

    def test_of_ones_own_text_lead_to_an_exported_model(self):
        self.assertIn("memory", self.output("--dry-run"))
        self.assertTrue((self.folder / "my-model/model.safetensors").exists())
        self.assertTrue((self.folder / "runs/mine/checkpoints/step-00000040").exists())

    def test_of_a_config_lead_to_a_plan_for_torchtitan(self):
        self.assertIn("torchtitan      plan/torchtitan.json, plan/torchtitan.args, plan/schedule.csv", self.output("--emit torchtitan"))
        layers = json.loads((self.folder / "my-model/config.json").read_text())["num_hidden_layers"]
        keys = json.loads((self.folder / "plan/torchtitan.json").read_text())["parallelism"]
        self.assertEqual(sum(keys["module_fqns_per_model_part"], []),
                         ["tok_embeddings", *(f"layers.{layer}" for layer in range(layers)), "norm", "lm_head"])
        self.assertEqual(len((self.folder / keys["pipeline_parallel_schedule_csv"]).read_text().splitlines()), 2)
        # The second command, as the shell reads it.
        readme = (self.folder / "README.md").read_text()
        self.assertRegex(readme, r"\n# torchrun -m torchtitan.train .* \$\(cat plan/torchtitan.args\)\n")
        flags = (self.folder / "plan/torchtitan.args").read_text().split()
        parts = flags[flags.index("--parallelism.module_fqns_per_model_part") + 1:]
        self.assertEqual([part.split(",") for part in parts], keys["module_fqns_per_model_part"])


class ElasticBlock(unittest.TestCase):
    def test_ends_where_the_training_cannot_start(self):
        block = first_try()
        with tempfile.TemporaryDirectory(prefix="dynmo-readme-") as name:
            folder = pathlib.Path(name)
            (folder / "docs").mkdir()  # no text in it, no examples beside it, and a shell that goes on after an error
            _, output = run_block(block, folder, environment(folder / "tools", DYNMO), 60, "-o")
        self.assertIn("dynmo: error: ", output)
        self.assertNotIn("kill", output)


if __name__ == "__main__":
    unittest.main()
