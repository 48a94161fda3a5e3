# SPDX-License-Identifier: Apache-2.0
"""The summary of a run of dynmo.torch has the figures that the summary of `dynmo train` has for the same steps."""
import json
import logging
import os
import pathlib
import random
import statistics
import subprocess
import types
import unittest
import warnings

import dynmo.torch as dt
import torch_cases
from dynmo import _core
from dynmo.torch.exchange import Told
from dynmo.torch.live import Balancer
from dynmo.torch.program import read_plan
from dynmo.torch.record import Outputs, Record, Recovery
from plans import plan_of
from torch_support import RankCase

LAYERS, RANKS, STEPS = 8, 2, 24
UNKNOWN = {"validation_step", "validation_loss", "checkpoints_written", "checkpoints_failed", "checkpoint_s"}
FACTS = ("step_s", "imbalance", "bubble", "plan_s", "migrate_s", "profile_s", "update_s")
SETTINGS = (
    "model.hidden=32", "model.blocks=3", "model.heads=4", "model.kv_heads=2", "model.intermediate=48", "model.sequence=16",
    "batch.micro_batches=4", "batch.micro_batch_size=2", "train.validation_every=0", "optimizer.warmup_steps=3", "pipeline.pin=false",
    "pipeline.cut=[7,1]",
)


def records_of(run, rank):
    return [json.loads(line) for line in (run / "records" / f"rank-{rank}.jsonl").read_text().splitlines()]


class Training:
    """A rank that records steps whose figures are given."""

    def __init__(self, run, rank=0, replicas=1):
        rows = [[replica * RANKS + rank for rank in range(RANKS)] for replica in range(replicas)]
        ranks = types.SimpleNamespace(layout=rows, number=rank, world=RANKS * replicas, replicas=replicas, replica=rank // RANKS, rank=rank % RANKS,
                                      size=RANKS)
        self.plan = read_plan(plan_of([4, 4]), RANKS, LAYERS)
        settings = {"steps": STEPS, "micro_batches": 4, "accumulation": 1}
        self.record = Record(Outputs(run), ranks, settings, logging.getLogger("summary"))
        self.record.open(0, self.plan)
        known = {"format": "dynmo-profile-1", "layers": [
            {"name": f"block{i}", "forward_s": 0.0, "backward_input_s": 0.0, "backward_weight_s": 0.0, "parameter_bytes": 1024,
             "activation_bytes": 1024, "boundary_bytes": 1024} for i in range(LAYERS)]}
        self.decisions = _core.Decisions(known, RANKS, {"micro_batches": 4, "steps": STEPS, "balancer": "optimal"})
        times = {"forward_s": 1e-3, "input_gradient_s": 1e-3, "weight_gradient_s": 1e-3, "update_s": 1e-5}
        self.decisions.observe({"layers": [times] * LAYERS, "ranks": [{}] * RANKS, "step_s": 0.02}, self.plan.document(), 0)

    def step(self, record):
        """A step as `record` has it; one without times was shorter than others."""
        if record.get("moved_layers"):
            self.record.moved(record["step"], record["moved_layers"], record["moved_bytes"], record["migrate_s"], self.plan)
        measured = None
        if record["step_s"] is not None:
            measured = types.SimpleNamespace(facts={name: record[name] for name in FACTS}, decisions=self.decisions)
        facts = {name: record[name] for name in ("loss", "tokens", "predicted_s", "reduction_s")}
        told = Told(tokens=float(record["tokens"]), ranks={rank: {"busy_s": record["busy_s"]} for rank in range(RANKS)})
        self.record.step(record["step"], self.plan, 0, facts, told, measured, 0.0)

    def close(self, steps):
        self.record.close(steps, self.decisions.costs(0))


def drawn_steps(seed, count=STEPS):
    """Records of steps, two of them behind moves and some of them shorter than others."""
    draw = random.Random(seed)
    steps = []
    for step in range(count):
        moves = step in (5, 11)
        record = {"step": step, "loss": 3 * draw.random(), "tokens": draw.randrange(100, 200), "reduction_s": draw.random(), "busy_s": 0.5}
        record |= {name: draw.random() for name in FACTS} | {"step_s": 4 + draw.random(), "predicted_s": 3 + draw.random()}
        record |= {"moved_layers": 2 * moves, "moved_bytes": 4096 * moves, "migrate_s": 0.25 * moves, "profile_s": 0.0}
        if step in (7, count - 2):
            record |= {"step_s": None, "busy_s": None, "predicted_s": 0.0}
        steps.append(record)
    return steps


class Summary(RankCase):
    def program(self, *words):
        command = [os.environ["DYNMO"], *map(str, words)]
        done = subprocess.run(command, cwd=self.folder, capture_output=True, text=True, timeout=200, check=False)
        self.assertEqual(done.returncode, 0, done.stdout + done.stderr)
        return done.stdout

    def summary(self, run):
        whole = json.loads((self.folder / run / "summary.json").read_text())
        (of_run,) = whole.pop("runs")
        return whole, of_run

    def test_is_that_of_dynmo_train_for_the_same_steps(self):
        text = "".join(f"line {i}: {i * i % 97}\n" for i in range(4000))
        (self.folder / "text").mkdir()
        (self.folder / "text" / "a.txt").write_text(text)
        settings = [word for value in SETTINGS for word in ("--set", value)]
        for words in (["data", "prepare", "text", "--out", "data"],
                      ["train", "--data", "data", "--out", "engine", "-n", RANKS, "--steps", STEPS, *settings]):
            self.program(*words)
        training = Training(self.folder / "torch")
        for record in records_of(self.folder / "engine", 0):
            training.step(record)
        training.close(STEPS)
        (wanted, of_engine), (found, of_torch) = self.summary("engine"), self.summary("torch")
        self.assertEqual(found, wanted)
        # Figures of what dynmo.torch does not record: its messages.
        for name in ("name", "traffic_steps", "clock_error_s", "size", *UNKNOWN):
            of_engine.pop(name, None)
        self.assertNotEqual(of_engine.pop("traffic"), [])
        self.assertEqual((of_torch.pop("name"), of_torch.pop("traffic")), ("dynmo.torch", []))
        self.assertEqual(of_torch, of_engine)

    def test_has_the_figures_of_the_formats(self):
        steps = drawn_steps(3)
        training = Training(self.folder / "run", replicas=3)
        for record in steps:
            training.step(record)
        training.close(STEPS)
        whole, run = self.summary("run")
        measured = [record for record in steps if record["step_s"] is not None]
        seconds = sum(record["step_s"] for record in measured)
        newest = [record for record in measured if record["step"] >= STEPS - 10]
        wanted = {
            "ranks": 6, "replicas": 3, "steps": STEPS, "migrations": 2, "moved_layers": 4, "moved_bytes": 8192, "seconds": seconds,
            "tokens_per_s": sum(record["tokens"] for record in measured) / seconds,
            "end_tokens_per_s": sum(record["tokens"] for record in newest) / sum(record["step_s"] for record in newest),
            "step_time_s": statistics.median(record["step_s"] for record in measured),
            "loss_first": steps[0]["loss"], "loss_last": statistics.mean(record["loss"] for record in steps[-10:]),
            "imbalance": statistics.mean(record["imbalance"] for record in measured),
            "bubble": statistics.mean(record["bubble"] for record in measured),
            "predicted_steps": len([record for record in measured if record["step"] >= 5]),
        }
        for name, value in wanted.items():
            self.assertAlmostEqual(run[name], value, places=9, msg=name)
        self.assertFalse(UNKNOWN & set(run))
        self.assertRegex(run["loss_digest"], "^[0-9a-f]{32}$")
        self.assertEqual(whole["measured_step_time_s"], run["step_time_s"])
        self.assertAlmostEqual(whole["predicted_step_time_s"], statistics.median(record["predicted_s"] for record in measured), places=9)
        self.assertAlmostEqual(whole["overhead"]["plan"], sum(record["plan_s"] for record in measured) / seconds, places=9)
        self.assertEqual((whole["speedup"], whole["layers_moved"]), (0, 4))
        self.assertIn("layers of dynmo.torch", self.program("report", "run"))

    def test_of_a_run_that_lost_a_rank_is_that_of_an_undisturbed_one(self):
        steps = drawn_steps(4)
        undisturbed = Training(self.folder / "whole")
        for record in steps:
            undisturbed.step(record)
        undisturbed.close(STEPS)
        ranks = [Training(self.folder / "run", rank) for rank in range(RANKS)]
        for record in steps[:15]:
            for rank in ranks:
                rank.step(record)
        # Rank 0 is lost in step 15; rank 1 goes on from step 12.
        ranks[0].record._log.close()
        recovery = Recovery(lost=(0,), ranks=(1,), step=12, again=3, seconds=0.1)
        ranks[1].record.go_on(recovery, {0: "was killed"}, "snapshot", ranks[1].plan)
        for record in steps[12:]:
            ranks[1].step(record)
        ranks[1].close(STEPS)
        self.assertEqual(self.summary("run"), self.summary("whole"))

    def test_that_cannot_be_made_is_said(self):
        training = Training(self.folder / "run")
        for record in drawn_steps(5):
            training.step(record)
        recovery = Recovery(lost=(1,), ranks=(0,), step=STEPS, again=0, seconds=0.1)
        training.record.go_on(recovery, {1: "was killed"}, "snapshot", training.plan)
        with (self.folder / "run" / "events.jsonl").open("a") as events:
            events.write('{"format": "dynmo-event-1", "event": "loss", "step": 3, "time_s": 1, "lost": "all"}\n')
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            training.close(STEPS)
        (said,) = [str(each.message) for each in caught if "no summary" in str(each.message)]
        self.assertRegex(said, r"^no summary of the run: .*events\.jsonl:\d+: ")
        self.assertFalse(pathlib.Path(self.folder / "run" / "summary.json").exists())

    def test_counts_the_time_of_balancing_as_time_of_the_step(self):
        model = torch_cases.make_model({"family": "llama"})
        pipe = dt.Pipeline(model, torch_cases.make_optimizer({}, model.parameters()), micro_batches=2)
        balancer = Balancer(pipe._split, 1, {"micro_batches": 2, "steps": STEPS, "balancer": "optimal"})
        balancer._plan_s = 1e6  # longer than this test, so the rest of the step is what ranks were busy
        times = {index: {"forward_s": 1e-3, "boundary_bytes": 0.0} for index in range(len(pipe._split.layers))}
        told = Told(layers=times, ranks={0: {"busy_s": 2.0, "migrate_s": 0.5}})
        balancer.observe(told, pipe.plan, 0)
        self.assertEqual(balancer.facts["step_s"], 1e6 + 2.5)
        self.assertEqual(balancer.facts["plan_s"] + balancer.facts["migrate_s"], 1e6 + 0.5)

    def test_is_absent_where_no_step_was_measured(self):
        training = Training(self.folder / "run")
        for record in drawn_steps(6, 3):
            training.step({**record, "step_s": None, "busy_s": None})
        training.close(3)
        self.assertEqual({path.name for path in (self.folder / "run").iterdir()}, {"records", "events.jsonl", "load-trace.jsonl"})


if __name__ == "__main__":
    unittest.main()
