# SPDX-License-Identifier: Apache-2.0
"""`dynmo plan --emit` as a user meets it."""
import json
import unittest

from plan_command_test import LLAMA, Case


class Emitted(Case):
    words = ["--model", "config.json", "--device", "h100", "--sequence", 1024, "--ranks", 4, "--micro-batches", 8]
    search = ["--evaluations", 300]

    def setUp(self):
        super().setUp()
        self.write("config.json", LLAMA)

    def emit(self, form, *more):
        result = self.run_plan(*self.words, *self.search, "--emit", form, "--emit-to", "plan", *more)
        self.assertEqual((result.returncode, result.stderr), (0, ""))
        return result.stdout

    def test_for_torchtitan_needs_a_config_and_no_more(self):
        said = self.emit("torchtitan")
        self.assertIn("torchtitan      plan/torchtitan.json, plan/torchtitan.args, plan/schedule.csv: for 8 micro-batches a step\n", said)
        keys = json.loads((self.folder / "plan/torchtitan.json").read_text())["parallelism"]
        self.assertEqual(sum(keys["module_fqns_per_model_part"], []),
                         ["tok_embeddings", *(f"layers.{block}" for block in range(8)), "norm", "lm_head"])
        self.assertEqual((keys["pipeline_parallel_degree"], keys["pipeline_parallel_schedule_csv"]), (4, "plan/schedule.csv"))
        rows = (self.folder / "plan/schedule.csv").read_text().splitlines()
        self.assertEqual(len(rows), 4)
        self.assertEqual((self.folder / "plan/torchtitan.args").read_text().split()[-1], ",".join(keys["module_fqns_per_model_part"][-1]))

    def test_for_torchtitan_in_a_folder_with_a_blank_is_refused(self):
        words = [*self.words, *self.search, "--emit", "torchtitan", "--emit-to", "my plan"]
        self.assert_error(self.run_plan(*words), 2, "'my plan', wanted a folder without blanks", "`$(cat torchtitan.args)`")

    def test_for_megatron_is_a_layout(self):
        said = self.emit("megatron")
        words = (self.folder / "plan/megatron.args").read_text().split()
        self.assertEqual(words[:3], ["--pipeline-model-parallel-size", "4", "--pipeline-model-parallel-layout"])
        self.assertRegex(words[3], r"^E[t|]*L$")
        self.assertEqual((words[3].count("t"), (words[3].count("|") + 1) % 4), (8, 0))
        self.assertRegex(said, r"schedule (1f1b|interleaved);")

    def test_of_ranks_of_several_devices_says_how_many(self):
        several = ["--tensor-parallel", 4, "--optimizer-shards", 2]
        said = self.emit("megatron", *several)
        self.assertIn("a rank is 4 devices, bytes are of one; 2 replicas share the optimizer's state", said)
        words = (self.folder / "plan/megatron.args").read_text().split()
        self.assertEqual(words[4:], ["--tensor-model-parallel-size", "4", "--sequence-parallel", "--use-distributed-optimizer"])
        self.emit("torchtitan", *several)
        self.assertEqual(json.loads((self.folder / "plan/torchtitan.json").read_text())["parallelism"]["tensor_parallel_degree"], 4)

    def test_for_megatron_of_sizes_that_it_cannot_divide_is_refused(self):
        self.write("config.json", {**LLAMA, "num_attention_heads": 24, "num_key_value_heads": 4, "hidden_size": 1536})
        emit = ["--emit", "megatron", "--emit-to", "plan", *self.search]
        self.assert_error(self.run_plan(*self.words, *emit, "--tensor-parallel", 3), 2, "tensor_parallel is 3", "cannot divide 4 key-value heads",
                          "plan with tensor_parallel 2")
        self.assertFalse((self.folder / "plan/megatron.args").exists())
        self.assertEqual(self.run_plan(*self.words, *emit, "--tensor-parallel", 8).returncode, 0)  # two devices share a head
        odd = [1001 if word == 1024 else word for word in self.words]
        self.assert_error(self.run_plan(*odd, *emit, "--tensor-parallel", 2), 2, "cannot divide 1001 tokens of a sequence")
        self.write("config.json", {**LLAMA, "intermediate_size": 2818})
        self.assert_error(self.run_plan(*self.words, *emit, "--tensor-parallel", 4), 2, "cannot divide 2818 columns of an MLP")
        self.assertEqual(self.run_plan(*self.words, "--tensor-parallel", 4, *self.search).returncode, 0)

    def test_of_halves_is_refused_in_a_line(self):
        for form in ["torchtitan", "megatron"]:
            self.assert_error(self.run_plan(*self.words, "--emit", form, "--granularity", "half", "--balancer", "time", "--schedule", "1f1b"),
                              2, "share a block", "granularity block")
        self.assert_error(self.run_plan(*self.words, *self.search, "--emit", "megatron", "--schedule", "adaptive"), 2, "no schedule adaptive", "1f1b or interleaved")
        self.assertFalse((self.folder / "megatron.args").exists())

    def test_of_blocks_says_what_a_joined_head_costs(self):
        words = [*self.words, "--granularity", "block", "--head-slices", 4, "--balancer", "optimal", "--schedule", "1f1b"]
        self.assertRegex(self.run_plan(*words).stdout,
                         r"head            4 slices of the head are joined, which costs [0-9.]+ %: a step would take [0-9.]+ m?s with slices apart")
        self.assertEqual(self.plan(*words)["all_layers"], 10)
        self.succeeded(self.run_plan(*words, "--out", "joined.json"))
        self.assertEqual(self.plan(*words, "--from", "joined.json")["migration"]["layers"], 0)

    def test_advice_names_no_schedule_that_the_form_lacks(self):
        words = [*self.words, "--balancer", "optimal", "--schedule", "1f1b"]
        self.assertIn("; --schedule ", self.succeeded(self.run_plan(*words)).stdout)
        said = self.succeeded(self.run_plan(*words, "--emit", "megatron", "--emit-to", "plan")).stdout
        self.assertNotIn("; --schedule ", said)


if __name__ == "__main__":
    unittest.main()
