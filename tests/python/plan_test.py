# SPDX-License-Identifier: Apache-2.0
"""dynmo.plan gives the answer of `dynmo plan`, byte for byte, and shows it."""
import doctest
import inspect
import itertools
import json
import random
import re
import threading
import unittest
import xml.etree.ElementTree

import dynmo
from support import COLUMNS, LLAMA, UNEVEN, Case, profile

QUICK = {"evaluations": 300}


def printed(plan):
    """The document as the program prints it."""
    return json.dumps(plan.document, indent=1, ensure_ascii=False)


def slowest_share(times, counts):
    """The time of the slowest stage of a cut."""
    edges = list(itertools.accumulate(counts, initial=0))
    return max(sum(times[a:b]) for a, b in zip(edges, edges[1:]))


class Plan(Case):
    def assert_same(self, plan, *words):
        self.assertEqual(json.loads(printed(plan)), json.loads(self.program("plan", *words, "--json")))
        self.assertEqual(list(plan.document), list(json.loads(self.program("plan", *words, "--json"))))

    def test_is_that_of_the_program(self):
        self.write("p.json", UNEVEN)
        for balancer, schedule in itertools.product(dynmo.balancers(), ["auto", "1f1b", "zb-v"]):
            if balancer == "v-pair" and schedule == "1f1b" or balancer == "blocks":  # no layer is named blocks.N
                continue
            with self.subTest(balancer=balancer, schedule=schedule):
                searches = balancer == "search"
                plan = dynmo.plan(UNEVEN, ranks=3, micro_batches=6, balancer=balancer, schedule=schedule, **(QUICK if searches else {}))
                self.assert_same(plan, "p.json", "--ranks", 3, "--micro-batches", 6, "--balancer", balancer, "--schedule",
                                 schedule, *(["--evaluations", 300] if searches else []))

    def test_prints_what_the_program_prints(self):
        self.write("p.json", UNEVEN)
        plan = dynmo.plan(UNEVEN, ranks=3, **QUICK)
        text = self.program("plan", "p.json", "--ranks", 3, "--evaluations", 300)
        self.assertIn(str(plan), (plan.report(100, False), text))
        self.assertIn(plan.report(80, True).splitlines()[0], text)

    def test_of_a_config_has_the_devices_memory_links_and_head_room(self):
        self.write("config.json", LLAMA)
        plan = dynmo.plan(LLAMA, ranks=2, device="h100", sequence=2048, micro_batch_size=2, head_slices=2, **QUICK)
        self.assert_same(plan, "--model", "config.json", "--device", "h100", "--sequence", 2048, "--micro-batch-size", 2,
                         "--head-slices", 2, "--ranks", 2, "--evaluations", 300)
        self.assertEqual(sum(stage["layers"] for stage in plan.stages), len(plan.costs["layers"]))

    def test_of_a_cluster_a_memory_recomputation_and_packing(self):
        cluster = {"format": "dynmo-cluster-1", "ranks": [{"speed": 1.0}, {"speed": 0.5, "node": 1}],
                   "links": {"between_nodes": {"latency_s": 1e-4, "bandwidth_bytes_per_s": 1e9}}}
        self.write("p.json", UNEVEN), self.write("c.json", cluster)
        self.assert_same(dynmo.plan(UNEVEN, cluster=cluster, **QUICK), "p.json", "--cluster", "c.json", "--evaluations", 300)
        self.assert_same(dynmo.plan(UNEVEN, ranks=2, memory="5500KB", head_room=0.1, recompute="auto", **QUICK), "p.json",
                         "--ranks", 2, "--memory", "5500KB", "--head-room", 0.1, "--recompute", "auto", "--evaluations", 300)
        self.assert_same(dynmo.plan(UNEVEN, ranks=4, pack=True, slack=0.9, balancer="time"), "p.json", "--ranks", 4, "--pack",
                         "--slack", 0.9, "--balancer", "time")

    def test_from_the_one_in_force_says_what_moves(self):
        before = dynmo.plan(UNEVEN, ranks=3, balancer="uniform", schedule="1f1b")
        before.save(self.folder / "before.json")
        self.write("p.json", UNEVEN)
        after = dynmo.plan(UNEVEN, ranks=3, balancer="time", schedule="1f1b", current=before)
        self.assert_same(after, "p.json", "--ranks", 3, "--balancer", "time", "--schedule", "1f1b", "--from", "before.json")
        self.assertGreater(after.document["migration"]["layers"], 0)
        again = dynmo.plan(UNEVEN, ranks=3, balancer="time", schedule="1f1b", current=self.folder / "before.json")
        self.assertEqual(again.document, after.document)

    def test_has_no_slower_stage_than_the_best_of_all_cuts(self):
        random_numbers = random.Random(24)
        for case in range(60):
            times = [random_numbers.randint(1, 9) * 1e-3 for _ in range(random_numbers.randint(3, 8))]
            ranks = random_numbers.randint(1, min(4, len(times)))
            plan = dynmo.plan(profile(times), ranks=ranks, balancer="time", schedule="1f1b", micro_batches=4)
            cuts = (counts for counts in itertools.product(range(1, len(times) + 1), repeat=ranks) if sum(counts) == len(times))
            best = min(slowest_share(times, counts) for counts in cuts)
            found = slowest_share(times, [stage["layers"] for stage in plan.stages])
            self.assertAlmostEqual(found, best, delta=1e-12, msg=f"case {case}: {times} on {ranks}")

    def test_times_of_slices_fill_the_step_and_keep_order(self):
        plan = dynmo.plan(UNEVEN, ranks=3, micro_batches=5, schedule="1f1b", balancer="time")
        timeline = plan.timeline
        compute = timeline[[kind in ("F", "B") for kind in timeline["kind"]]]
        self.assertEqual(len(compute), 2 * 3 * 5)
        self.assertAlmostEqual(timeline["end_ns"].max() * 1e-9, plan.step_time_s, delta=1e-9)
        for rank in range(3):
            own = compute[compute["rank"] == rank]
            self.assertTrue((own["start_ns"][1:] >= own["end_ns"][:-1]).all())

    def test_of_ranks_of_several_devices_is_that_of_the_program(self):
        self.write("config.json", LLAMA)
        plan = dynmo.plan(LLAMA, ranks=2, device="h100", sequence=1024, tensor_parallel=4, optimizer_shards=3, **QUICK)
        self.assert_same(plan, "--model", "config.json", "--ranks", 2, "--device", "h100", "--sequence", 1024, "--tensor-parallel", 4,
                         "--optimizer-shards", 3, "--evaluations", 300)
        with self.assertRaisesRegex(dynmo.BadInputError, "tensor_parallel goes with a Hugging Face config"):
            dynmo.plan(UNEVEN, ranks=2, tensor_parallel=2, **QUICK)

    def test_emits_the_files_of_the_program(self):
        self.write("config.json", LLAMA)
        sizes = {"ranks": 2, "device": "h100", "sequence": 1024, "micro_batches": 8, **QUICK}
        for form, count in [("torchtitan", 3), ("megatron", 1), ("csv", 1)]:
            with self.subTest(form=form):
                self.program("plan", "--model", "config.json", "--ranks", 2, "--device", "h100", "--sequence", 1024, "--micro-batches", 8,
                             "--evaluations", 300, "--emit", form, "--emit-to", form)
                emitted = dynmo.plan(LLAMA, form=form, **sizes).emit(form, self.folder / "again" / form)
                self.assertEqual(len(emitted.files), count)
                for name, text in emitted.files.items():
                    self.assertEqual(text, (self.folder / "again" / form / name).read_bytes().decode())
                    self.assertEqual(text.replace(f"{self.folder}/again/", "").encode(), (self.folder / form / name).read_bytes())
        with self.assertRaisesRegex(dynmo.BadInputError, "share a block .*, and torchtitan places whole blocks: plan with granularity block"):
            dynmo.plan(LLAMA, balancer="time", schedule="1f1b", **{**sizes, "evaluations": None}).emit("torchtitan")
        with self.assertRaisesRegex(dynmo.BadInputError, "form 'torch' is not known"):
            dynmo.plan(LLAMA, form="torch", **sizes)
        self.assertEqual(len(dynmo.plan(LLAMA, granularity="block", head_slices=2, **sizes).costs["layers"]), LLAMA["num_hidden_layers"] + 2)

    def test_order_and_trace_are_the_files_of_the_program(self):
        self.write("p.json", UNEVEN)
        plan = dynmo.plan(UNEVEN, ranks=3, **QUICK)
        self.program("plan", "p.json", "--ranks", 3, "--evaluations", 300, "--trace", "t.json")
        self.assertEqual(plan.trace.encode(), (self.folder / "t.json").read_bytes())

    def test_in_a_notebook_is_a_table_and_a_picture(self):
        plan = dynmo.plan(UNEVEN, ranks=3, micro_batches=4, balancer="time", schedule="1f1b")
        page = plan._repr_html_()
        self.assertEqual(page.count("<tr>"), 1 + 3)
        root = xml.etree.ElementTree.fromstring(re.search(r"<svg.*</svg>", page)[0])
        titles = [element.text for element in root.iter() if element.tag.endswith("title")]
        self.assertEqual(len(titles), 2 * 3 * 4)
        self.assertIn("0F0, ", titles[0])
        for element in root.iter("{http://www.w3.org/2000/svg}rect"):
            self.assertLessEqual(float(element.get("x")) + float(element.get("width")), 900.01)

    def test_plots_a_bar_for_each_action(self):
        class Axes:
            def __init__(self):
                self.bars = 0

            def barh(self, rows, widths, left, **_):
                self.bars += len(rows)
                assert len(rows) == len(widths) == len(left)

            def __getattr__(self, name):
                return lambda *_, **__: None

        axes = Axes()
        plan = dynmo.plan(UNEVEN, ranks=3, micro_batches=4, balancer="time", schedule="1f1b")
        self.assertIs(plan.plot(axes), axes)
        self.assertEqual(axes.bars, 2 * 3 * 4)

    def test_leaves_other_threads_running(self):
        # Were the interpreter's lock held during the search, this thread would count a few times at its ends alone.
        costs = profile([1e-3 * (i % 5 + 1) for i in range(48)])
        options = {"ranks": 8, "micro_batches": 32, "evaluations": 5000}
        thread = threading.Thread(target=dynmo.plan, args=(costs,), kwargs=options)
        counted = 0
        thread.start()
        while thread.is_alive():
            counted += 1
        thread.join()
        self.assertGreater(counted, 10000)


    def test_of_sizes_that_megatron_cannot_divide_is_not_emitted(self):
        sizes = {"ranks": 2, "device": "h100", "sequence": 1024, "tensor_parallel": 3, **QUICK}
        costs = {**LLAMA, "num_attention_heads": 24, "num_key_value_heads": 4, "hidden_size": 1536}
        wanted = "tensor_parallel is 3, and Megatron-Core cannot divide 4 key-value heads evenly by it: plan with tensor_parallel 2"
        self.assert_refused(dynmo.BadInputError, wanted, dynmo.plan, costs, form="megatron", **sizes)
        self.assert_refused(dynmo.BadInputError, wanted, dynmo.plan(costs, granularity="block", **sizes).emit, "megatron")

    def test_has_the_options_of_the_program(self):
        flags = set(re.findall(r"^ +--([a-z-]+)", self.program("plan", "--help"), re.MULTILINE))
        own = {"help", "config", "out", "trace", "emit-to", "json"}  # of the program alone
        names = {"model": "costs", "from": "current", "emit": "form"}
        self.assertEqual({names.get(flag, flag.replace("-", "_")) for flag in flags - own}, set(inspect.signature(dynmo.plan).parameters))


class Compare(Case):
    def test_has_the_plan_of_each_balancer(self):
        compared = dynmo.compare(UNEVEN, 3, balancers=["uniform", "time"], schedule="1f1b")
        for balancer in compared:
            alone = dynmo.plan(UNEVEN, 3, balancer=balancer, schedule="1f1b")
            self.assertEqual(compared[balancer].document, alone.document)
        self.assertLess(compared["time"].step_time_s, compared["uniform"].step_time_s)
        self.assertEqual(compared._repr_html_().count("<tr>"), 3)
        self.assertEqual(len(str(compared).splitlines()), 3)

    def test_says_which_does_not_fit(self):
        heavy = profile([1e-3] * 6, state=1 << 20)
        heavy["layers"][0]["parameter_bytes"] = 4 << 20
        compared = dynmo.compare(heavy, 2, balancers=["uniform", "optimal"], schedule="1f1b", memory=6 << 20)
        self.assertIsNone(compared["uniform"])
        self.assertIsNotNone(compared["optimal"])
        self.assertIn("does not fit", str(compared))

    def test_gives_the_effort_to_the_search_alone(self):
        compared = dynmo.compare(UNEVEN, 2, balancers=["uniform", "search"], evaluations=50, schedule="1f1b")
        alone = dynmo.plan(UNEVEN, 2, balancer="search", evaluations=50, schedule="1f1b")
        self.assertEqual(compared["search"].document, alone.document)
        text = "evaluations does nothing here: wanted balancer='search'"
        self.assert_refused(dynmo.BadInputError, text, dynmo.compare, UNEVEN, 2, balancers=["uniform"], evaluations=50)


class BadInput(Case):
    def test_is_one_line_that_names_it(self):
        bad = {**UNEVEN, "layers": [{**UNEVEN["layers"][0], "forward_s": -1}]}
        for text, costs, options in [
            ("wanted ranks=N or cluster=", UNEVEN, {}),
            ("both ranks and cluster were given", UNEVEN, {"ranks": 2, "cluster": {}}),
            ("ranks is 0", UNEVEN, {"ranks": 0}),
            ("micro_batches is 0", UNEVEN, {"ranks": 2, "micro_batches": 0}),
            ("/layers/0/forward_s", bad, {"ranks": 1}),
            ("speed", UNEVEN, {"cluster": {"format": "dynmo-cluster-1", "ranks": [{"speed": 0}]}}),
            ("optimal", UNEVEN, {"ranks": 2, "balancer": "optimum"}),
            ("1f1b", UNEVEN, {"ranks": 2, "schedule": "1f2b"}),
            ("device", LLAMA, {"ranks": 2}),
            ("device goes with", UNEVEN, {"ranks": 2, "device": "h100"}),
            ("slack goes with pack", UNEVEN, {"ranks": 2, "slack": 0.5}),
            ("evaluations does nothing here: wanted balancer='search'", UNEVEN, {"ranks": 2, "balancer": "optimal", "evaluations": 9}),
            ("place does nothing here: wanted a cluster of unlike ranks", UNEVEN, {"ranks": 2, "place": True}),
            ("pack does nothing here: wanted more than one rank", UNEVEN, {"ranks": 1, "pack": True}),
            ("head_room does nothing here: wanted memory, device or a cluster whose ranks", UNEVEN, {"ranks": 2, "head_room": 0.5}),
            ("recompute='auto' does nothing here: wanted memory", UNEVEN, {"ranks": 2, "recompute": "auto"}),
            ("head_room is 1", UNEVEN, {"ranks": 2, "head_room": 1.0}),
            ("memory", UNEVEN, {"ranks": 2, "memory": "80 apples"}),
            ("current", UNEVEN, {"ranks": 1, "current": dynmo.plan(profile([1e-3]), 1)}),
            ("no-such.json", "no-such.json", {"ranks": 2}),
        ]:
            with self.subTest(text=text):
                self.assert_refused(dynmo.BadInputError, text, dynmo.plan, costs, **options)
        self.assert_refused(dynmo.InfeasibleError, "", dynmo.plan, UNEVEN, ranks=2, memory=1 << 20)


def load_tests(_loader, tests, _pattern):
    tests.addTests(doctest.DocTestSuite("dynmo._plan"))
    return tests


if __name__ == "__main__":
    unittest.main()
