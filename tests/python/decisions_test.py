# SPDX-License-Identifier: Apache-2.0
"""The controller of a live pipeline, and the files that a run leaves: `dynmo simulate` and `dynmo report` read them."""
import json
import pathlib
import random
import unittest

import dynmo
import numpy
from dynmo import _core
from plans import plan_of
from support import Case, profile

LAYERS, STEPS, MICRO_BATCHES, FROZEN = 12, 40, 4, 6
OPTIONS = {"micro_batches": MICRO_BATCHES, "steps": STEPS, "balancer": "optimal"}


def known(frozen=0):
    document = profile([0.0] * LAYERS)
    for index, layer in enumerate(document["layers"]):
        layer["frozen"] = index < frozen
    return document


class Training:
    """Steps whose layers take given times with noise; half of them freeze at step 20."""

    def __init__(self, log=None):
        self.decisions = _core.Decisions(known(), 2, OPTIONS)
        self.plan, self.log, self.said = plan_of([6, 6]), log, []
        draw = random.Random(7)
        if log:
            log.begin(0, self.plan)
            log.event("start", 0, {"plan": self.plan, "ranks": 2, "steps": STEPS})
        for step in range(STEPS):
            frozen = FROZEN if step >= 20 else 0
            if step > 0:
                self.decide(step, frozen)
            self.observe(step, frozen, draw)

    def decide(self, step, frozen):
        self.decisions.announce("known" if step == 20 else "nothing", step)
        decision = self.decisions.decide(self.plan, step, frozen)
        if decision is None:
            return
        self.said.append(decision)
        if self.log:
            self.log.decision(step, self.decisions)
        if decision["migrate"]:
            self.plan = decision["plan"]
            self.decisions.moved(decision["moved_bytes"])
            if self.log:
                self.log.moved(step, len(decision["moves"]), decision["moved_bytes"], 0.01, self.plan)

    def observe(self, step, frozen, draw):
        times = [1e-3 * draw.uniform(0.98, 1.02) for _ in range(LAYERS)]
        layers = [{"forward_s": t, "input_gradient_s": t * (i >= frozen), "weight_gradient_s": t * (i >= frozen), "update_s": 1e-5,
                   "stash_bytes": 65536.0} for i, t in enumerate(times)]
        self.decisions.observe({"layers": layers, "ranks": [{"overhead_s": 1e-4, "plan_s": 1e-4}] * 2, "step_s": 0.02}, self.plan, frozen)
        if self.log:
            self.log.load(step, frozen, self.decisions)
            for rank in range(2):
                self.log.record({"format": "dynmo-step-1", "step": step, "rank": rank, "loss": 1.0, "step_s": 0.02})


class Decisions(Case):
    def test_move_when_half_the_layers_freeze(self):
        training = Training()
        taken = [decision for decision in training.said if decision["migrate"]]
        self.assertEqual([decision["cause"].split(":")[0] for decision in taken], [taken[0]["cause"]], taken)
        counts = [stage["layers"] for stage in training.plan["stages"]]
        self.assertGreater(counts[0], 6)
        self.assertEqual({(move["from"], move["to"]) for move in taken[0]["moves"]}, {(1, 0)})
        self.assertEqual(len(taken[0]["moves"]), counts[0] - 6)
        self.assertLess(taken[0]["planned_step_s"], taken[0]["current_step_s"])
        predicted = training.decisions.predicted_step_s(training.plan, STEPS, FROZEN)
        self.assertAlmostEqual(predicted, taken[0]["planned_step_s"], delta=0.05 * predicted)

    def test_are_the_same_on_every_rank(self):
        self.assertEqual(Training().said, Training().said)

    def test_have_the_costs_as_a_profile(self):
        decisions = _core.Decisions(known(), 2, OPTIONS)
        self.assertIsNone(decisions.costs(0))
        costs = Training().decisions.costs(FROZEN)
        self.assertEqual([layer.get("frozen", False) for layer in costs["layers"]], [True] * FROZEN + [False] * (LAYERS - FROZEN))
        self.assertEqual(dynmo.plan(costs, 2, micro_batches=4, balancer="optimal", schedule="1f1b").ranks, 2)

    def test_are_made_again_by_the_simulator(self):
        log = _core.RunLog(str(self.folder), 0)
        training = Training(log)
        log.close()
        policy = {"window": 5, "minimum_gain": 0.01, "noise_factor": 5}
        scenario = {
            "cluster": {"pipeline_ranks": 2, "data_parallel": 1}, "policy": policy,
            "dynamism": {"trace": str(self.folder / "load-trace.jsonl")},
            "training": {"steps": STEPS, "micro_batches": MICRO_BATCHES, "schedule": "1f1b"}}
        simulated = dynmo.simulate(scenario, compare=["optimal"]).runs["optimal"]["decisions"]
        events = [json.loads(line) for line in (self.folder / "events.jsonl").read_text().splitlines()]
        made = [event for event in events if event["event"] == "decision"]
        self.assertTrue(any(event["taken"] for event in made))
        self.assertEqual(
            [(event["step"], event["taken"], event["cause"], event["reason"]) for event in made],
            [(decision["step"], decision["moved"], decision["why"], decision["reason"]) for decision in simulated])
        self.assertEqual(len(made), len(training.said))

    def test_tell_the_figures_that_a_training_tells(self):
        """tests/control/step_stats_test.cpp feeds the same steps to what `dynmo train` calls."""
        lines = (pathlib.Path(__file__).parents[1] / "control/steps.jsonl").read_text().splitlines()
        for each in map(json.loads, lines):
            with self.subTest(**each):
                counts = each["layers_of_ranks"]
                self.assertEqual(len(each["busy_s"]), each["replicas"] * len(counts))
                ranks = [{"busy_s": busy_s, "migrate_s": migrate_s} for busy_s, migrate_s in zip(each["busy_s"], each["migrate_s"])]
                step = {"layers": [{"forward_s": 1e-3}] * LAYERS, "step_s": each["step_s"], "ranks": ranks}
                facts = _core.Decisions(known(), len(counts), OPTIONS).observe(step, plan_of(counts), 0)
                for figure in ("imbalance", "bubble"):
                    self.assertAlmostEqual(facts[figure], each[figure], delta=1e-12)
                self.assertEqual(facts["migrate_s"], max(each["migrate_s"]))
        self.assertEqual(len(lines), 4)

    def test_refuse_what_does_not_fit(self):
        decisions = _core.Decisions(known(), 2, OPTIONS)
        layers = [dict.fromkeys(("forward_s",), 1e-3)] * LAYERS
        step = {"layers": layers, "ranks": [{}] * 2, "step_s": 0.1}
        self.assert_refused(dynmo.BadInputError, "wanted nothing, work, predicted or known", decisions.announce, "news", 1)
        self.assert_refused(dynmo.BadInputError, "1 layers and 2 ranks, wanted 12 and 2 for each replica", decisions.observe,
                            {**step, "layers": layers[:1]}, plan_of([6, 6]), 0)
        self.assert_refused(dynmo.BadInputError, "12 layers and 3 ranks, wanted 12 and 2 for each replica", decisions.observe,
                            {**step, "ranks": [{}] * 3}, plan_of([6, 6]), 0)
        self.assert_refused(dynmo.BadInputError, "/step_s is 0, wanted the seconds of the step", decisions.observe,
                            {**step, "step_s": 0.0}, plan_of([6, 6]), 0)
        self.assert_refused(dynmo.BadInputError, "/layers/0/forward_s", decisions.observe,
                            {**step, "layers": [{"forward_s": -1.0}, *layers[1:]]}, plan_of([6, 6]), 0)
        self.assert_refused(dynmo.BadInputError, "plan", decisions.decide, plan_of([6, 5]), 1, 0)
        self.assert_refused(dynmo.BadInputError, "balancer", _core.Decisions, known(), 2, {"balancer": "best"})
        for options, text in (
                ({"window": 0}, "options: /window is 0, wanted a whole number from 1 to 1048576"),
                ({"micro_batches": 1 << 40}, "options: /micro_batches is 1099511627776, wanted a whole number from 1 to 1048576"),
                ({"minimum_gain": -0.5}, "options: /minimum_gain is -0.5, wanted 0 or more"),
                ({"steps": -1}, "options: /steps is -1, wanted 0 or more"),
                ({"memory_bytes": -1}, "options: /memory_bytes is -1, wanted bytes, 0 or more"),
                ({"balancer": 7}, "options: /balancer is 7, wanted a string"),
                ({"windows": 5}, "options: /windows is not a known key")):
            self.assert_refused(dynmo.BadInputError, text, _core.Decisions, known(), 2, options)
        for rank, text in (
                ({"busy_s": 2e6}, "step: /ranks/1/busy_s is 2000000, wanted seconds from 0 to 1000000"),
                ({"actions": -1.0}, "step: /ranks/1/actions is -1, wanted 0 or more"),
                ({"idle_s": 1.0}, "step: /ranks/1/idle_s is not a known key")):
            self.assert_refused(dynmo.BadInputError, text, decisions.observe, {**step, "ranks": [{}, rank]}, plan_of([6, 6]), 0)
        self.assert_refused(dynmo.BadInputError, "step: /layers/0/stash_bytes is -1, wanted bytes from 0 to 2^50", decisions.observe,
                            {**step, "layers": [{"stash_bytes": -1.0}, *layers[1:]]}, plan_of([6, 6]), 0)
        self.assert_refused(dynmo.BadInputError, "ranks=0", _core.Decisions, known(), 0, OPTIONS)


class Files(Case):
    def test_are_those_of_the_formats(self):
        log = _core.RunLog(str(self.folder), 0)
        Training(log)
        self.assertEqual(log.failures(), [])
        log.close()
        events = [json.loads(line) for line in (self.folder / "events.jsonl").read_text().splitlines()]
        self.assertEqual({event["format"] for event in events}, {"dynmo-event-1"})
        self.assertEqual([event["event"] for event in events if event["event"] != "decision"], ["start", "move"])
        records = (self.folder / "records" / "rank-0.jsonl").read_text().splitlines()
        self.assertEqual(len(records), 2 * STEPS)
        other = _core.RunLog(str(self.folder), 1)
        other.begin(0, plan_of([6, 6]))
        self.assert_refused(dynmo.BadInputError, "record", other.record, {"format": "dynmo-step-1"})

    def test_are_reported(self):
        log = _core.RunLog(str(self.folder), 0)
        training = Training(log)
        self.assert_refused(dynmo.BadInputError, "profile: /layers", log.finish, STEPS, {"format": "dynmo-profile-1", "layers": None})
        log.finish(STEPS, training.decisions.costs(FROZEN))
        log.close()
        self.assertIn("layers of dynmo.torch", self.program("report", self.folder))

    def test_of_a_rank_beside_the_first_are_its_records(self):
        log = _core.RunLog(str(self.folder), 1)
        log.begin(0, plan_of([6, 6]))
        log.event("start", 0)
        log.close()
        self.assertEqual({path.name for path in self.folder.iterdir()}, {"records"})

    def test_of_an_earlier_run_stay(self):
        log = _core.RunLog(str(self.folder), 0)
        self.assert_refused(dynmo.BadInputError, "in use by another run", _core.RunLog, str(self.folder), 0)
        Training(log)
        log.close()
        records = self.folder / "records" / "rank-0.jsonl"
        before = {path: path.read_bytes() for path in (records, self.folder / "events.jsonl", self.folder / "load-trace.jsonl")}
        again = _core.RunLog(str(self.folder), 0)
        self.assert_refused(dynmo.BadInputError, "holds an earlier run", again.begin, 0, plan_of([6, 6]))
        self.assertEqual({path: path.read_bytes() for path in before}, before)
        again.begin(20, plan_of([6, 6]))
        again.event("start", 20)
        again.close()
        steps = [json.loads(line)["step"] for line in records.read_text().splitlines()]
        self.assertEqual(steps, [step for step in range(20) for _ in range(2)])
        events = (self.folder / "events.jsonl").read_text()
        self.assertTrue(events.startswith(before[self.folder / "events.jsonl"].decode()))
        self.assertTrue((self.folder / "load-trace-00000020.jsonl").exists())

    def test_that_cannot_be_made_are_named(self):
        self.assert_refused(dynmo.BadInputError, "ranks=1, replicas=2, wanted", _core.RunLog, str(self.folder), 0, replicas=2)
        self.assert_refused(dynmo.BadInputError, "file/records", _core.RunLog, str(self.write("file", "x")), 0)

    def test_a_trace_shows_measured_steps(self):
        rows = [[("0F0", 0, 1000), ("0B0", 3000, 5000)], [("1F0", 1000, 2000), ("1B0", 2000, 3000)]]
        events = json.loads(_core.trace("measured", [(3, rows)]))["traceEvents"]
        self.assertEqual({event["name"] for event in events if event["ph"] == "X"}, {"step 3", "0F0", "0B0", "1F0", "1B0"})
        self.assert_refused(dynmo.BadInputError, "0Q0", _core.trace, "measured", [(0, [[("0Q0", 0, 1)]])])


class Digest(Case):
    def test_of_an_array_is_that_of_its_bytes(self):
        array = numpy.arange(1000, dtype=numpy.float32)
        self.assertEqual(_core.digest(array), _core.digest(array.tobytes()))
        self.assertNotEqual(_core.digest(array), _core.digest(array[1:]))
        self.assertEqual(_core.digest(b""), "99aa06d3014798d86001c324468d497f")

    def test_of_a_plan_knows_its_generation(self):
        self.assertEqual(_core.digest_of_plan(plan_of([6, 6])), _core.digest_of_plan(plan_of([6, 6])))
        self.assertNotEqual(_core.digest_of_plan(plan_of([6, 6])), _core.digest_of_plan(plan_of([6, 6], generation=1)))


if __name__ == "__main__":
    unittest.main()
