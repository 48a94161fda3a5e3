# SPDX-License-Identifier: Apache-2.0
"""README.md: every shell block but those of scripts/ways, in order, on a fresh clone, as it stands there, with a limit of time.
Then the first try of docs/elasticity.md.

DYNMO is the program; `make demo` trains a few steps with it instead of building it.
"""
import json
import os
import pathlib
import shutil
import tempfile
import unittest

from blocks import ROOT, clone, commented_commands, environment, run_block, shell_blocks, ways_in, words_of

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
        cls.tools = pathlib.Path(temporary.name) / "tools"
        clone(cls.folder)
        shutil.copy(ROOT / "tests/docs/llama3-8b.json", cls.folder / "config.json")  # a reader's own
        env = environment(cls.tools, DYNMO)
        cls.outputs = []
        for block in [*(block for block in shell_blocks("README.md") if block not in ways_in()), first_try()]:
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

    def second_command(self, program):
        command, = [command for command in commented_commands("README.md") if program in command]
        return words_of(command, self.folder, self.tools)

    def test_of_a_config_lead_to_a_plan_for_torchtitan(self):
        self.assertIn("torchtitan      torchtitan.json, torchtitan.args, schedule.csv: for 32 micro-batches a step", self.output("--emit torchtitan"))
        keys = json.loads((self.folder / "torchtitan.json").read_text())["parallelism"]
        layers = json.loads((self.folder / "config.json").read_text())["num_hidden_layers"]
        self.assertEqual(sum(keys["module_fqns_per_model_part"], []),
                         ["tok_embeddings", *(f"layers.{layer}" for layer in range(layers)), "norm", "lm_head"])
        rows = [row.split(",") for row in (self.folder / keys["pipeline_parallel_schedule_csv"]).read_text().splitlines()]
        self.assertEqual(len(rows), keys["pipeline_parallel_degree"])
        # The second command, as the shell reads it: torchtitan's flags are its keys, and the batch is that of the order.
        words = self.second_command("torchtitan.train")
        flags = words[words.index("--parallelism.module_fqns_per_model_part") + 1:]
        self.assertEqual([part.split(",") for part in flags], keys["module_fqns_per_model_part"])
        given = dict(zip(words, words[1:]))
        for key, value in keys.items():
            if not isinstance(value, list):
                self.assertEqual(given[f"--parallelism.{key}"], str(value))
        self.assertEqual(given["--nproc-per-node"], str(len(rows)))
        self.assertEqual(int(given["--training.local_batch_size"]), 1 + max(int(cell.split("F")[1]) for row in rows for cell in row if "F" in cell))

    def test_of_a_config_lead_to_a_plan_for_megatron(self):
        self.output("--emit megatron")
        words = self.second_command("pretrain_gpt.py")
        given = dict(zip(words, words[1:]))
        stages = given["--pipeline-model-parallel-layout"].split("|")
        self.assertEqual("".join(stages), "E" + "t" * 32 + "L")
        self.assertEqual(len(stages) % int(given["--pipeline-model-parallel-size"]), 0)
        self.assertEqual(given["--nproc-per-node"], given["--pipeline-model-parallel-size"])

    def test_of_a_scenario_are_simulated(self):
        self.assertRegex(self.output("dynmo simulate"), r"\noptimal +[0-9.]+ k ")


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
