# SPDX-License-Identifier: Apache-2.0
"""`dynmo plan` as a user meets it: every flag error, infeasible problems, what it prints and writes.

Searches run with few evaluations: these tests are of the command, not of the search.
"""
import json
import pathlib
import re
import unittest

from program import FreshFolderCase

FIELDS = {
    "format", "stages", "step_time_s", "ideal_step_time_s", "bottleneck_s", "peak_activation_bytes", "bubble", "imbalance",
    "balancer", "schedule", "ranks", "generation", "migration",
}
STAGE_FIELDS = {"stage", "rank", "first_layer", "layers", "time_s", "memory_bytes", "in_flight"}
LLAMA = {
    "model_type": "llama", "hidden_size": 1024, "num_hidden_layers": 8, "num_attention_heads": 16, "num_key_value_heads": 8,
    "intermediate_size": 2816, "vocab_size": 32000, "max_position_embeddings": 4096, "tie_word_embeddings": False,
}
MIXTRAL = {**LLAMA, "model_type": "mixtral", "num_local_experts": 8, "num_experts_per_tok": 2}
GPT2 = {"model_type": "gpt2", "n_embd": 768, "n_layer": 12, "n_head": 12, "n_positions": 1024, "vocab_size": 50257}


def profile(times, state=1 << 20, stash=1 << 16):
    layers = [{"name": f"block{i}", "forward_s": t, "backward_input_s": t, "backward_weight_s": t, "parameter_bytes": state,
               "activation_bytes": stash, "boundary_bytes": 4096} for i, t in enumerate(times)]
    return {"format": "dynmo-profile-1", "layers": layers}


class Case(FreshFolderCase):
    def setUp(self):
        super().setUp()
        self.write("even.json", profile([1e-3] * 8))
        self.write("uneven.json", profile([1e-3, 1e-3, 1e-3, 1e-3, 1e-3, 2e-3, 3e-3, 4e-3]))

    def write(self, name, content):
        text = content if isinstance(content, str) else json.dumps(content)
        (self.folder / name).write_text(text)

    def run_plan(self, *words):
        return self.run_program("plan", *words)

    def plan(self, *words):
        """The JSON that a plan with `words` prints, checked for what every plan must hold."""
        result = self.succeeded(self.run_plan(*words, "--json"))
        self.assertEqual(result.stderr, "")
        plan = json.loads(result.stdout)
        self.assertLessEqual(FIELDS, set(plan))
        first = 0
        for number, stage in enumerate(plan["stages"]):
            self.assertLessEqual(STAGE_FIELDS, set(stage))
            self.assertEqual((stage["stage"], stage["first_layer"]), (number, first))
            self.assertLess(stage["rank"], plan["ranks"])
            first += stage["layers"]
        plan["all_layers"] = first
        self.assertGreaterEqual(plan["step_time_s"], plan["ideal_step_time_s"] * (1 - 1e-6))
        self.assertGreaterEqual(plan["step_time_s"], plan["bottleneck_s"])
        self.assertGreaterEqual(plan["imbalance"], 0)
        self.assertTrue(0 <= plan["bubble"] < 1)
        return plan

    def used(self, plan):
        return {stage["rank"] for stage in plan["stages"]}


def effort(balancer):
    """Flags of a short search, for the balancer that searches."""
    return ["--evaluations", 20] if balancer == "search" else []


class BadInput(Case):
    def test_of_flags_is_one_line(self):
        """Beside those of mistakes_test.py."""
        self.write("config.json", LLAMA)
        self.write("cluster.json", {"format": "dynmo-cluster-1", "ranks": [{}, {}]})
        model = ["--model", "config.json", "--device", "h100", "--sequence", 128]
        for words, wanted in [
            (["even.json", "--micro-batch-size", 2, "--ranks", 2], "--micro-batch-size goes with --model"),
            (["even.json", "--head-slices", 2, "--ranks", 2], "--head-slices goes with --model"),
            ([*model, "--head-slices", 0, "--ranks", 2], "--head-slices is 0"),
            (["even.json", "--tensor-parallel", 2, "--ranks", 2], "--tensor-parallel goes with --model, not with a profile"),
            (["even.json", "--optimizer-shards", 2, "--ranks", 2], "--optimizer-shards goes with --model, not with a profile"),
            ([*model, "--tensor-parallel", 0, "--ranks", 2], "tensor_parallel is 0, wanted a whole number from 1 to 8, the devices of a node of h100"),
            ([*model, "--tensor-parallel", 16, "--ranks", 2], "tensor_parallel is 16, wanted a whole number from 1 to 8, the devices of a node of h100"),
            ([*model, "--tensor-parallel", 3, "--ranks", 2], "tensor_parallel is 3, wanted a divisor of the model's 16 attention heads"),
            ([*model, "--optimizer-shards", 1 << 20, "--ranks", 2], "--optimizer-shards is 1048576"),
            ([*model, "--head-slices", 1 << 20, "--ranks", 2], "model.head_slices is 1048576"),
            (["even.json", "--memory", "1GiB", "--cluster", "cluster.json"], "--memory goes with --ranks"),
            (["even.json", "--ranks", 2, "--pack", "--slack", "nan"], "--slack is nan"),
            (["even.json", "--ranks", -3], "--ranks is -3"),
            (["even.json", "--ranks", 1 << 40], "--ranks is"),
            (["even.json", "--ranks", 2, "--evaluations", 0], "--evaluations is 0"),
            (["even.json", "--ranks", 2, "--memory", "80GBs"], "80GBs"),
            (["even.json", "--ranks", 2, "--memory", "-3GiB"], "-3GiB"),
            (["even.json", "--ranks", 2, "--memory", "99999999999TiB"], "99999999999TiB"),
            (["even.json", "--ranks", 2, "--granularity", "quarter"], "granularity is 'quarter', wanted half or block"),
            (["even.json", "--ranks", 2, "--emit", "deepspeed"], "form 'deepspeed' is not known"),
            (["even.json", "--ranks", 2, "--emit-to", "there"], "--emit-to goes with --emit"),
            (["even.json", "--ranks", 2, "--emit", "csv", "--out", "schedule.csv"], "--out and --emit are both 'schedule.csv'"),
            (["even.json", "--ranks", 2, "--emit", "csv", "--emit-to", "even.json"], "cannot make folder 'even.json'"),
            (["even.json", "--ranks", 2, "--schedule-csv", "s.csv"], "--schedule-csv"),
        ]:
            with self.subTest(words=words):
                self.assert_error(self.run_plan(*words), 2, wanted)

    def test_in_files_names_file_and_pointer(self):
        content = profile([1e-3] * 3)
        content["layers"][1]["forwards_s"] = 1
        self.write("key.json", content)
        self.write("value.json", profile([1e-3, -1e-3]))
        self.write("text.json", "{\"format\": ")
        self.write("rank.json", {"format": "dynmo-cluster-1", "ranks": [{}, {"speed": 0}]})
        self.assert_error(self.run_plan("key.json", "--ranks", 2), 2, "key.json", "/layers/1/forwards_s", "'forward_s'")
        self.assert_error(self.run_plan("value.json", "--ranks", 2), 2, "value.json", "/layers/1/forward_s")
        self.assert_error(self.run_plan("text.json", "--ranks", 2), 2, "text.json")
        self.assert_error(self.run_plan("even.json", "--cluster", "rank.json"), 2, "rank.json", "/ranks/1/speed")

    def test_of_a_plan_in_force_says_what_does_not_fit(self):
        (self.folder / "plan.json").write_text(
            self.run_plan("even.json", "--ranks", 4, "--balancer", "optimal", "--json").stdout)
        self.write("three.json", profile([1e-3] * 3))
        self.assert_error(self.run_plan("three.json", "--ranks", 4, "--from", "plan.json"), 2, "8 layers", "3")

    def test_with_json_is_an_object_too(self):
        result = self.run_plan("absent.json", "--ranks", 2, "--json")
        self.assert_error(result, 2, "absent.json")
        self.assertIn("absent.json", json.loads(result.stdout)["error"])


class Infeasible(Case):
    def test_is_exit_3_and_says_what_would_do(self):
        for balancer in ["optimal", "search", "uniform"]:
            with self.subTest(balancer=balancer):
                words = ["even.json", "--ranks", 2, "--memory", "3MiB", "--balancer", balancer, *effort(balancer)]
                self.assert_error(self.run_plan(*words), 3, "rank")
                result = self.run_plan(*words, "--json")
                self.assertEqual(result.returncode, 3)
                self.assertEqual(list(json.loads(result.stdout)), ["error"])


class Answers(Case):
    def test_a_plan_is_a_table_and_a_picture(self):
        result = self.succeeded(self.run_plan("uneven.json", "--ranks", 4, "--micro-batches", 8, "--evaluations", 50))
        self.assertEqual(result.stderr, "")
        for words in ["8 layers on 4 ranks, 8 micro-batches", "in flight", "block0", "step time", "x ideal", "uniform 1f1b",
                      "fill and drain", "communication", " -> ", "rank 3 |", "F forward"]:
            self.assertIn(words, result.stdout)
        self.assertTrue(result.stdout.isascii())
        self.assertLessEqual(max(map(len, result.stdout.splitlines())), 120)

    def test_every_balancer_plans_every_layer(self):
        for balancer in ["uniform", "parameters", "time", "diffusion-parameters", "diffusion-time", "optimal", "v-pair", "search"]:
            with self.subTest(balancer=balancer):
                plan = self.plan("uneven.json", "--ranks", 4, "--balancer", balancer, *effort(balancer))
                self.assertEqual(plan["all_layers"], 8)
                self.assertEqual(plan["balancer"], balancer)

    def test_every_schedule_plans_every_layer(self):
        for schedule in ["gpipe", "1f1b", "interleaved", "zb-h1", "zb-v", "adaptive"]:
            with self.subTest(schedule=schedule):
                plan = self.plan("uneven.json", "--ranks", 4, "--schedule", schedule, "--evaluations", 20)
                self.assertEqual((plan["all_layers"], plan["schedule"]), (8, schedule))

    def test_the_optimal_cut_of_uneven_layers(self):
        plan = self.plan("uneven.json", "--ranks", 4, "--balancer", "optimal", "--schedule", "1f1b", "--micro-batches", 8)
        times = [stage["time_s"] for stage in plan["stages"]]
        self.assertAlmostEqual(max(times), 12e-3, places=9)  # 4 or 5 of 1 ms, 2 + ..., 3, 4: the last layer alone is 12 ms
        self.assertAlmostEqual(plan["bottleneck_s"], 12e-3, places=9)
        self.assertAlmostEqual(plan["ideal_step_time_s"], 8 * 42e-3 / 4, places=9)

    def test_search_is_not_worse_than_a_balancer(self):
        best = min(self.plan("uneven.json", "--ranks", 4, "--balancer", name, "--schedule", "1f1b")["step_time_s"]
                   for name in ["uniform", "time", "optimal"])
        self.assertLessEqual(self.plan("uneven.json", "--ranks", 4, "--evaluations", 50)["step_time_s"], best)

    def test_memory_is_a_limit(self):
        plan = self.plan("uneven.json", "--ranks", 4, "--memory", "4MiB", "--evaluations", 50)
        state = {}
        for stage in plan["stages"]:
            state[stage["rank"]] = state.get(stage["rank"], 0) + stage["layers"] * (1 << 20)
        self.assertLessEqual(max(state.values()) + plan["peak_activation_bytes"], (4 << 20) + max(state.values()))
        for rank, held in state.items():
            self.assertLessEqual(held, 4 << 20, rank)

    def test_a_remedy_is_one_that_the_command_takes(self):
        heavy = profile([1e-3] * 16, state=0, stash=0)
        for layer in heavy["layers"][:8]:
            layer["parameter_bytes"] = 100 << 20
        self.write("heavy.json", heavy)
        self.write("cluster.json", {"format": "dynmo-cluster-1", "ranks": [{"memory_bytes": 250 << 20}] * 4})
        words = ["heavy.json", "--balancer", "optimal", "--schedule", "1f1b", "--micro-batches", 100]
        for ranks, remedy in [(["--cluster", "cluster.json"], "--cluster with memory_bytes of 400MiB would take"),
                              (["--ranks", 4, "--memory", "250MiB"], "--memory 400MiB would take")]:
            self.assertIn(remedy, self.succeeded(self.run_plan(*words, *ranks)).stdout)

    def test_the_plan_in_force_is_compared_with(self):
        for balancer in ["optimal", "search"]:
            with self.subTest(balancer=balancer):
                words = ["uneven.json", "--ranks", 4, "--balancer", balancer, *effort(balancer)]
                self.plan(*words, "--out", "plan.json")
                again = self.plan(*words, "--from", "plan.json")
                self.assertEqual(again["migration"], {"layers": 0, "bytes": 0})
                self.assertEqual(again["generation"], 0)
        self.plan("uneven.json", "--ranks", 4, "--balancer", "uniform", "--schedule", "1f1b", "--out", "even_plan.json")
        words = ["uneven.json", "--ranks", 4, "--balancer", "optimal", "--schedule", "1f1b", "--from", "even_plan.json"]
        moved = self.plan(*words)
        self.assertGreater(moved["migration"]["layers"], 0)
        self.assertEqual(moved["migration"]["bytes"], moved["migration"]["layers"] << 20)
        self.assertEqual(moved["generation"], 1)
        text = self.run_plan(*words).stdout
        self.assertIn("plan in force", text)
        self.assertIn(f"moves           {moved['migration']['layers']} of 8 layers", text)

    def test_traffic_is_told_and_places_are_found(self):
        ranks = [{"node": node} for node in (0, 1, 0, 1)]
        links = {"between_nodes": {"latency_s": 1e-3, "bandwidth_bytes_per_s": 1e7}}
        self.write("mixed.json", {"format": "dynmo-cluster-1", "ranks": ranks, "links": links})
        words = ["even.json", "--cluster", "mixed.json", "--balancer", "optimal", "--schedule", "1f1b", "--micro-batches", 8]
        given, placed = self.plan(*words), self.plan(*words, "--place")
        self.assertEqual(len(given["traffic"]), 6)
        self.assertEqual(given["traffic"][0], {"from": 0, "to": 1, "purpose": "activation", "messages": 8, "bytes": 8 * 4096})
        self.assertLess(placed["step_time_s"], 0.9 * given["step_time_s"])
        self.assertEqual([stage["rank"] % 2 for stage in placed["stages"]], [0, 0, 1, 1])
        self.assertIn("traffic         192.0 KiB a step between stages, 192.0 KiB of them in 48 messages between nodes\n",
                      self.run_plan(*words).stdout)
        self.assertIn("64.0 KiB of them in 16 messages between nodes\n", self.run_plan(*words, "--place").stdout)
        self.plan(*words, "--out", "plan.json")
        moved = self.run_plan(*words, "--place", "--from", "plan.json")
        self.assertIn("of the moves between nodes\n", moved.stdout)

    def test_out_is_what_json_prints(self):
        result = self.run_plan("uneven.json", "--ranks", 4, "--balancer", "time", "--out", "plan.json", "--json")
        self.assertEqual((self.folder / "plan.json").read_text(), result.stdout)

    def test_trace_has_every_action(self):
        self.plan("even.json", "--ranks", 2, "--balancer", "optimal", "--schedule", "1f1b", "--micro-batches", 4, "--trace", "t.json")
        events = json.loads((self.folder / "t.json").read_text())["traceEvents"]
        names = [event["name"] for event in events if event.get("ph") == "X"]
        for name in [f"{stage}{kind}{micro}" for stage in range(2) for kind in "FB" for micro in range(4)]:
            self.assertEqual(names.count(name), 1, name)

    def test_the_schedule_is_written_for_pytorch(self):
        self.plan("even.json", "--ranks", 2, "--balancer", "optimal", "--schedule", "1f1b", "--micro-batches", 3, "--emit", "csv")
        self.assertEqual((self.folder / "schedule.csv").read_bytes(), b"0F0,0F1,0B0,0F2,0B1,0B2\r\n1F0,1B0,1F1,1B1,1F2,1B2\r\n")

    def test_an_order_that_stops_is_shown(self):
        words = ["even.json", "--ranks", 2, "--micro-batches", 2, "--schedule", "adaptive", "--balancer", "search", "--evaluations", 20]
        plan = self.plan(*words)
        del plan["all_layers"]  # of plan(), no key of a plan
        plan["order"] = [list(reversed(actions)) for actions in plan["order"]]
        self.write("stuck.json", plan)
        result = self.run_plan(*words, "--from", "stuck.json")
        self.assertEqual((result.returncode, result.stdout), (2, ""))
        lines = result.stderr.splitlines()
        self.assertRegex(lines[-1], r"^dynmo: error: stuck.json: /order cannot run: ")
        self.assertTrue(any(line.startswith("rank 0 |") for line in lines), result.stderr)

    def test_cluster_has_speeds_and_links(self):
        ranks = [{"speed": 1.0}, {"speed": 3.0}]
        self.write("cluster.json", {"format": "dynmo-cluster-1", "ranks": ranks,
                                    "links": {"inside_node": {"latency_s": 0.5}}})
        plan = self.plan("even.json", "--cluster", "cluster.json", "--balancer", "optimal", "--schedule", "1f1b", "--micro-batches", 1)
        self.assertEqual([stage["layers"] for stage in plan["stages"]], [1, 7])
        self.assertAlmostEqual(plan["step_time_s"], 1.0 + 3e-3 + 7e-3, places=6)  # there and back; one micro-batch waits for both ranks
        self.assertAlmostEqual(plan["ideal_step_time_s"], 24e-3 / 4, places=9)

    def test_the_version_is_the_cited_one(self):
        lines = (pathlib.Path(__file__).parents[2] / "CITATION.cff").read_text().splitlines()
        cited = next(line.split()[1] for line in lines if line.startswith("version:"))
        result = self.run_program("--version")
        self.assertEqual((result.returncode, result.stderr), (0, ""))
        self.assertRegex(result.stdout, rf"^dynmo {re.escape(cited)}( \([0-9a-f]{{10}}(-dirty)?\))?\n$")  # a checkout has its commit

    def test_same_question_same_answer(self):
        words = ["uneven.json", "--ranks", 4, "--evaluations", 50, "--json"]
        self.assertEqual(self.run_plan(*words).stdout, self.run_plan(*words).stdout)


class Models(Case):
    def test_of_three_families_are_planned(self):
        for config, layers in [(LLAMA, 18), (MIXTRAL, 18), (GPT2, 26)]:
            with self.subTest(model=config["model_type"]):
                self.write("config.json", config)
                plan = self.plan("--model", "config.json", "--device", "h100", "--sequence", 1024, "--ranks", 4,
                                 "--micro-batches", 8, "--balancer", "optimal", "--schedule", "1f1b")
                self.assertEqual(plan["all_layers"], layers)
                self.assertGreater(plan["peak_activation_bytes"], 0)

    def test_micro_batch_size_scales_time(self):
        self.write("config.json", LLAMA)
        words = ["--model", "config.json", "--device", "h100", "--sequence", 1024, "--ranks", 4, "--balancer", "uniform",
                 "--schedule", "1f1b"]
        one, four = (self.plan(*words, "--micro-batch-size", size)["bottleneck_s"] for size in (1, 4))
        self.assertTrue(3 < four / one <= 4.001, four / one)

    def test_formulas_are_named_and_speed_is_told(self):
        self.write("config.json", LLAMA)
        words = ["--model", "config.json", "--device", "h100", "--sequence", 1024, "--ranks", 4, "--micro-batches", 8, "--balancer", "optimal",
                 "--schedule", "1f1b"]
        said = self.run_plan(*words).stdout
        self.assertIn("costs           by formulas, not measured: h100 at 0.676 of the speed of its kernels", said)
        plan = self.plan(*words)
        self.assertAlmostEqual(plan["tokens_per_s"] * plan["step_time_s"], 8 * 1024, delta=1)
        self.assertIn(f"speed           {plan['tokens_per_s']:.0f} tokens/s, {plan['tokens_per_s'] / 4:.0f} of each of 4 ranks\n", said)
        measured = self.run_plan("even.json", "--ranks", 2, "--balancer", "optimal").stdout
        self.assertNotIn("formulas", measured)
        self.assertNotIn("tokens/s", measured)
        # Its plan is one that --from reads.
        self.succeeded(self.run_plan(*words, "--out", "plan.json"))
        self.succeeded(self.run_plan(*words, "--from", "plan.json"))

    def test_a_head_in_slices_no_longer_bounds_the_step(self):
        self.write("config.json", {**LLAMA, "vocab_size": 128256})
        words = ["--model", "config.json", "--device", "h100", "--sequence", 1024, "--ranks", 8, "--balancer", "optimal",
                 "--schedule", "1f1b"]
        whole, sliced = (self.plan(*words, "--head-slices", slices) for slices in (1, 16))
        self.assertEqual(sliced["all_layers"], whole["all_layers"] + 15)
        self.assertLess(sliced["bottleneck_s"], whole["bottleneck_s"] / 1.5)
        self.assertEqual(whole, self.plan(*words))

    def test_bad_ones_are_one_line(self):
        self.write("config.json", LLAMA)
        self.write("odd.json", {**LLAMA, "model_type": "lama"})
        words = ["--device", "h100", "--sequence", 1024, "--ranks", 2]
        self.assert_error(self.run_plan("--model", "odd.json", *words), 2, "odd.json", "lama")
        self.assert_error(self.run_plan("--model", "config.json", "--device", "h101", *words[2:]), 2, "h101", "h100")
        self.assert_error(self.run_plan("--model", "config.json", "--device", "h100", "--sequence", 8192, "--ranks", 2), 2, "8192")

    CONFIG = ("[model]\nvocabulary = 32000\nhidden = 1024\nblocks = 8\nheads = 16\nkv_heads = 8\nintermediate = 2816\nsequence = 512\n"
              "precision = \"bf16\"\n[batch]\nmicro_batch_size = 2\nmicro_batches = 16\n"
              "[pipeline]\nranks = 4\nschedule = \"zb-h1\"\nbalancer = \"optimal\"\nmemory = \"60GiB\"\n")

    def test_of_a_trainings_config_are_those_of_its_model(self):
        self.write("run.toml", self.CONFIG)
        self.write("config.json", LLAMA)
        same = ["--ranks", 4, "--memory", "60GiB", "--schedule", "zb-h1", "--balancer", "optimal", "--micro-batches", 16]
        same += ["--recompute", "none"]
        theirs = self.plan("--model", "config.json", "--device", "h100", "--sequence", 512, "--micro-batch-size", 2, *same)
        self.assertEqual(self.plan("--config", "run.toml", "--device", "h100"), theirs)
        flags = ["--ranks", 2, "--schedule", "gpipe", "--balancer", "uniform", "--micro-batches", 8]
        plan = self.plan("--config", "run.toml", "--device", "h100", *flags)
        self.assertEqual((plan["ranks"], plan["schedule"], plan["balancer"]), (2, "gpipe", "uniform"))

    def test_of_a_trainings_config_have_its_stages(self):
        interleaved = self.CONFIG.replace("zb-h1\"", "interleaved\"\nstages_per_rank = 4")
        self.write("run.toml", interleaved)
        self.assertEqual(len(self.plan("--config", "run.toml", "--device", "h100")["stages"]), 16)

    def test_of_a_model_recompute_where_memory_asks_for_it(self):
        self.write("config.json", LLAMA)
        words = ["--model", "config.json", "--device", "h100", "--sequence", 4096, "--ranks", 4, "--balancer", "optimal",
                 "--micro-batches", 16]
        self.assertEqual(self.plan(*words)["recomputed_layers"], [])
        all_of_it = self.plan(*words, "--schedule", "1f1b")
        most = max(stage["memory_bytes"] for stage in all_of_it["stages"])
        tight = [*words, "--schedule", "1f1b", "--memory", str(most * 3 // 4)]
        own = self.plan(*tight)
        self.assertNotEqual(own["recomputed_layers"], [])
        self.assertEqual(own, self.plan(*tight, "--recompute", "auto"))

    def test_of_a_config_that_leaves_something_open_say_what(self):
        for change, words, wanted in [
                (("ranks = 4", "ranks = 0"), [], "run.toml: pipeline.ranks is 0"),
                (("vocabulary = 32000", "vocabulary = 0"), [], "model.vocabulary is 0, that of the data, and data.path is not set"),
                (("hidden = 1024", "hiden = 1024"), [], "hiden"),
                (("micro_batches = 16", "micro_batches = 0"), [], "run.toml: batch.micro_batches is 0"),
                (("", ""), ["--sequence", 4], "model.sequence"),
                (("vocabulary = 32000\n", "vocabulary = 0\n"), ["none"], "exclude one another")]:
            self.write("run.toml", self.CONFIG.replace(*change))
            result = self.run_plan("--config", "run.toml", "--device", "h100", *words)
            self.assertEqual((result.returncode, result.stdout), (2, ""), result.stderr)
            self.assertIn(wanted, result.stderr)
            self.assertEqual(len(result.stderr.splitlines()), 1)
        result = self.run_plan("--config", "run.toml")
        self.assertIn("--config wants --device", result.stderr)

    def test_the_memory_of_the_device_is_the_limit(self):
        self.write("config.json", {**LLAMA, "hidden_size": 8192, "num_hidden_layers": 80, "num_attention_heads": 64,
                                   "intermediate_size": 28672})
        words = ["--model", "config.json", "--device", "h100", "--sequence", 4096, "--ranks", 4, "--evaluations", 20]
        self.assert_error(self.run_plan(*words), 3, "the layers' states alone take", "such ranks; --tensor-parallel makes a rank of several devices")
        one = self.run_plan(*words[:3], "cpu", *words[4:], "--memory", "1GiB")
        self.assert_error(one, 3, "such ranks; --optimizer-shards divides the optimizer's state among replicas")
        self.write("run.toml", self.CONFIG)
        training = self.run_plan("--config", "run.toml", "--device", "h100", "--ranks", 2, "--memory", "1MiB")
        self.assert_error(training, 3, "the layers' states alone take")
        self.assertNotIn("--tensor-parallel", training.stderr)  # which --config refuses
        self.plan(*words, "--memory", "10TiB")
        divided = self.plan(*words, "--tensor-parallel", 8, "--optimizer-shards", 2)
        self.assertIn("a rank is 8 devices", divided["costs"])
        self.assertLess(divided["step_time_s"], self.plan(*words, "--memory", "10TiB")["step_time_s"] / 4)
        # A node has one rank.
        self.assertRegex(self.run_plan(*words, "--tensor-parallel", 8, "--optimizer-shards", 2).stdout, "links .*those of h100 in nodes of 8 devices")

    def test_messages_take_time_and_memory_stays_free(self):
        self.write("config.json", LLAMA)
        words = ["--model", "config.json", "--device", "h100", "--sequence", 4096, "--ranks", 2, "--balancer", "uniform",
                 "--schedule", "1f1b", "--micro-batches", 2]
        said = self.run_plan(*words).stdout
        self.assertRegex(said, r"links +those of h100 inside a node: 5\.00 us and 450 GB/s")
        self.assertRegex(said, r"head-room +10 % of the memory")
        self.assertRegex(said, r"memory .* of 67\.1 GiB")
        self.assertRegex(said, r"cut +embedding \.\. blocks\.\d\.\w+ \| blocks\.\d\.\w+ \.\. head .*halves")
        self.assertRegex(self.run_plan(*words, "--head-room", 0.2).stdout, r"memory .* of 59\.6 GiB")
        self.assertNotIn("head-room", self.run_plan(*words, "--memory", "80GiB").stdout)
        # Two micro-batches each way over one boundary of 4096 x 1024 bf16 elements; two of them wait for nothing else.
        self.write("free.json", {"format": "dynmo-cluster-1", "ranks": [{"memory_bytes": 80 << 30}] * 2})
        free = self.plan(*words[:6], "--cluster", "free.json", *words[8:])
        self.assertGreater(self.plan(*words)["step_time_s"], free["step_time_s"] + 2 * 4096 * 1024 * 2 / 450e9)
        self.assert_error(self.run_plan(*words, "--head-room", 1), 2, "--head-room")


class Recompute(Case):
    WORDS = ["big.json", "--ranks", 2, "--micro-batches", 8, "--balancer", "optimal", "--schedule", "1f1b"]

    def setUp(self):
        super().setUp()
        self.write("big.json", profile([1e-3] * 8, stash=1 << 20))

    def test_auto_takes_as_few_layers_as_the_memory_asks_for(self):
        # An even cut's rank 0 holds 4 MiB of parameters and two stashes of four layers of 1 MiB: 12 MiB. Three layers
        # there take 9 MiB and leave five of 10 MiB to rank 1.
        self.assert_error(self.run_plan(*self.WORDS, "--memory", "9.5MiB"), 3)
        self.assertEqual(self.plan(*self.WORDS, "--memory", "12MiB", "--recompute", "auto")["recomputed_layers"], [])
        words = [*self.WORDS, "--memory", "9.5MiB", "--recompute", "auto"]
        plan = self.plan(*words)
        # Two of them keep next to nothing: 4 + 2 x 2 MiB. What comes back for a backward takes the place of what is freed.
        self.assertEqual(len([layer for layer in plan["recomputed_layers"] if layer < 4]), 2, plan)
        self.assertEqual(len(plan["recomputed_layers"]), 2, plan)
        said = self.run_plan(*words).stdout
        self.assertRegex(said, r"recompute +2 of 8 layers run forward again: \d")
        self.assertRegex(said, r"memory +8\.\d MiB at most of 9\.5 MiB on rank 0")
        whole = self.plan(*self.WORDS, "--recompute", "whole")
        self.assertEqual(whole["recomputed_layers"], [1, 2, 3, 4, 5, 6, 7])
        none = self.plan(*self.WORDS)
        self.assertNotIn("recomputed_layers", none)
        self.assertLess(none["step_time_s"], plan["step_time_s"])
        self.assertLess(plan["step_time_s"], whole["step_time_s"])

    def test_its_plan_is_read_back(self):
        self.plan(*self.WORDS, "--recompute", "whole", "--out", "plan.json")
        self.assertEqual(self.plan(*self.WORDS, "--from", "plan.json")["migration"]["layers"], 0)

    def test_wrong_ones(self):
        packed = self.plan(*self.WORDS, "--memory", "20MiB", "--recompute", "auto", "--pack", "--slack", 9)
        self.assertEqual({stage["rank"] for stage in packed["stages"]}, {0})
        result = self.run_plan(*self.WORDS, "--recompute", "auto", "--memory", "1MiB")
        self.assertEqual(result.returncode, 3, result.stderr)


if __name__ == "__main__":
    unittest.main()
