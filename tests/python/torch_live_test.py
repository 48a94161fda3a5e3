# SPDX-License-Identifier: Apache-2.0
"""The controller moves layers after a freeze, every rank alike, and no number changes."""
import json
import os
import subprocess
import unittest

import torch

import dynmo
import torch_cases
import event_files
import torch_live_rank
from torch_support import RankCase


class Live(RankCase):
    def test_layers_move_when_half_of_the_model_freezes(self):
        self.run_ranks(2, "torch_live_rank.py", self.folder)
        real, torch_cases.freeze = torch_cases.freeze, torch_live_rank.freeze
        self.addCleanup(setattr, torch_cases, "freeze", real)
        wanted = torch_cases.result_of(*torch_cases.train_plainly(torch_live_rank.CASE))
        self.assert_same(wanted, [torch.load(self.folder / f"rank-{rank}-0.pt") for rank in range(2)])
        told = [json.loads((self.folder / f"moves-{rank}.json").read_text()) for rank in range(2)]
        self.assertEqual([(step, cut) for step, _, cut in told[0]["moves"]], [(step, cut) for step, _, cut in told[1]["moves"]])
        # The frozen layers are cheap, so the first rank takes three more; once, after the first frozen step.
        self.assertEqual([(step, cut) for step, _, cut in told[0]["moves"]], [(torch_cases.FREEZE_AT, "9|3")])
        self.assertRegex(told[0]["moves"][0][1], r"^6\|6 -> 9\|3, [\d.]+ -> [\d.]+ ms a step, [\d.]+ MiB in \d+ ms$")
        self.assertEqual([one["frozen_backwards"] for one in told], [0, 0])
        profile = told[0]["profile"]
        self.assertEqual([layer["name"] for layer in profile["layers"]], told[0]["layers"])
        self.assertEqual([layer["frozen"] for layer in profile["layers"]], [True] * 7 + [False] * 5)
        self.assertLess(dynmo.plan(profile, ranks=2, micro_batches=4, balancer="optimal", schedule="1f1b").step_time_s, 10)
        self.check_files(told[0]["moves"])

    def check_files(self, moves):
        """The files of the run are those of the formats, and the simulator makes its decisions again."""
        events = [json.loads(line) for line in (self.folder / "events.jsonl").read_text().splitlines()]
        made = [event for event in events if event["event"] == "decision"]
        self.assertEqual([event["event"] for event in events if event["event"] != "decision"], ["start", "move", "end"])
        self.assertEqual([event["step"] - 1 for event in made if event["taken"]], [step for step, _, _ in moves])
        steps = torch_live_rank.CASE["steps"]
        for rank in range(2):
            records = [json.loads(line) for line in (self.folder / "records" / f"rank-{rank}.jsonl").read_text().splitlines()]
            self.assertEqual([record["step"] for record in records], list(range(steps)))
            self.assertEqual((records[0]["layers"], records[-1]["layers"]), (6, [9, 3][rank]))
            busy = event_files.scalars(self.folder / "tensorboard" / f"rank-{rank}")["dynmo/busy_s"]
            self.assertEqual(sorted(busy), list(range(steps)))
            self.assertIn(f'rank="{rank}"', (self.folder / "metrics" / f"rank-{rank}.prom").read_text())
        self.assertEqual(sorted(event_files.scalars(self.folder / "tensorboard")["dynmo/imbalance"]), list(range(steps)))
        scenario = {
            "cluster": {"pipeline_ranks": 2, "data_parallel": 1}, "policy": {"window": 5, "minimum_gain": 0.01, "noise_factor": 5},
            "dynamism": {"trace": str(self.folder / "load-trace.jsonl")},
            "training": {"steps": steps, "micro_batches": torch_live_rank.CASE["micro_batches"], "schedule": "1f1b"},
        }
        simulated = dynmo.simulate(scenario, compare=["optimal"]).runs["optimal"]["decisions"]
        self.assertEqual(
            [(event["step"], event["taken"], event["cause"], event["reason"]) for event in made],
            [(decision["step"], decision["moved"], decision["why"], decision["reason"]) for decision in simulated],
        )
        program = os.environ.get("DYNMO")
        report = subprocess.run([program, "report", self.folder], capture_output=True, text=True, timeout=100, check=False)
        self.assertEqual(report.returncode, 0, report.stdout + report.stderr)
        self.assertIn("layers of dynmo.torch", report.stdout)


if __name__ == "__main__":
    torch.set_num_threads(1)
    unittest.main()
