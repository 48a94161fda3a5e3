# SPDX-License-Identifier: Apache-2.0
"""Ranks are killed, and the others go on: losses, weights and optimizer state are those of the plain loop."""
import json
import os
import pathlib
import signal
import subprocess
import types
import unittest

import torch

import dynmo
import dynmo.torch as dt
from drawn import drawn
from dynmo.torch import snapshots
from dynmo.torch.layers import Layer
from torch_support import RankCase, start

PLACES = ("step", "forward", "backward", "exchange", "snapshot")
BASE = {"family": "llama", "micro_batches": 4, "ranks": 3, "steps": 7, "clip": 1.0}


def run(folder, cases):
    """Trains the cases in forked ranks; the codes of each."""
    (folder / "cases.json").write_text(json.dumps(cases), encoding="utf-8")
    parent = start("torch_survival_rank.py", folder, variables={})
    said, _ = parent.communicate(timeout=300)
    assert parent.returncode == 0, said
    return json.loads((folder / "codes.json").read_text(encoding="utf-8"))


class Survival(RankCase):
    def test_the_others_go_on_with_the_same_bits(self):
        places = drawn(PLACES, 3, "the places of losses")
        second, third = drawn((2, 3), 1, "the step of the first loss")[0], drawn((5, 6), 1, "the step of the second")[0]
        cases = [
            {**BASE, "name": "middle and last", "plain": True, "every": 2, "kills": [[1, second, places[0]], [2, third, places[1]]]},
            {**BASE, "name": "first", "schedule": "zb-h1", "every": 2, "kills": [[0, third, places[2]]]},
            {**BASE, "name": "neighbours", "every": 1, "save_at": 3, "kills": [[1, 5, 2]]},
            {**BASE, "name": "resumed", "ranks": 2, "kills": [], "resume": str(self.folder / "neighbours" / "checkpoint")},
        ]
        codes = run(self.folder, cases)
        wanted = torch.load(self.folder / "middle and last" / "plain.pt")
        for case, ended in zip(cases[:2], codes):
            with self.subTest(**case):
                victims = {victim for victim, _, _ in case["kills"]}
                self.assertEqual(ended[:3], [-signal.SIGKILL if rank in victims else 0 for rank in range(3)], self.said(case))
                self.assert_same(wanted, [self.result(case, rank) for rank in range(3) if rank not in victims])
        self.assert_end_of_neighbours(codes[2])
        self.assertEqual(codes[3], [0, 0])
        parts = [torch.load(self.folder / "resumed" / f"rank-{rank}.pt") for rank in range(2)]
        done = 2 * (cases[2]["save_at"] + 1)  # a norm and a loss each step
        self.assert_same({**wanted, "losses": wanted["losses"][done:]}, parts)

    def said(self, case):
        return "\n".join(path.read_text(encoding="utf-8") for path in sorted((self.folder / case["name"]).glob("*.txt")))

    def result(self, case, rank):
        return torch.load(self.folder / case["name"] / f"rank-{rank}.pt")

    def test_replicas_go_on_from_each_other(self):
        base, places = {**BASE, "ranks": 4, "replicas": 2}, drawn(PLACES, 2, "the places of losses")
        cases = [
            {**base, "name": "one of each", "plain": True, "every": 2, "kills": [[1, 2, places[0]], [2, 4, places[1]]]},
            {**base, "name": "a whole one", "every": 2, "kills": [[0, 3, 1]]},
            {**base, "name": "too few", "every": 1, "kills": [[3, 2, "step"], [0, 3, "step"], [1, 5, "step"]]},
            {**base, "name": "the same layers", "kills": [[1, 3, 3]]},
        ]
        codes = run(self.folder, cases)
        wanted = torch.load(self.folder / "one of each" / "plain.pt")
        for case, ended, left in zip(cases, codes, ([0, 3], [2, 3])):
            with self.subTest(**case):
                self.assertEqual(ended[:4], [0 if rank in left else -signal.SIGKILL for rank in range(4)], self.said(case))
                for rank in left:  # a replica each
                    self.assert_same(wanted, [self.result(case, rank)])
        self.assertEqual(codes[2], [-signal.SIGKILL, -signal.SIGKILL, 1, -signal.SIGKILL], self.said(cases[2]))
        self.assertIn("lost ranks: 0, 1, 3; 1 are left for 2 replicas; start again from the newest checkpoint", self.said(cases[2]))
        self.assertEqual(codes[3], [1, -signal.SIGKILL, 1, -signal.SIGKILL], self.said(cases[3]))
        self.assertIn("lost ranks: 1, 3, and with them all copies of layer", self.said(cases[3]))

    def test_an_error_of_one_rank_ends_all_with_its_line(self):
        cases = [{**BASE, "name": f"{count} replicas", "every": 1, "replicas": count, "kills": [[1, 3, "error"]]} for count in (1, 3)]
        for case, ended in zip(cases, run(self.folder, cases)):
            with self.subTest(**case):
                self.assertEqual(ended, [1, 1, 1], self.said(case))
                for rank in range(3):
                    last = (self.folder / case["name"] / f"rank-{rank}.txt").read_text(encoding="utf-8").splitlines()[-1]
                    self.assertEqual(last, "RuntimeError: one rank's own" if rank == 1 else "BadInputError: rank 1: RuntimeError: one rank's own")

    def test_the_files_of_a_run_go_on(self):
        """Also the leader is lost. No file has a step twice, and together they have every step."""
        place = drawn(PLACES, 1, "the place of the first loss")[0]
        cases = [
            {**BASE, "name": "alone", "plain": True, "every": 2, "kills": [[0, 3, place], [2, 5, "forward"]]},
            {**BASE, "name": "replicas", "plain": True, "ranks": 4, "replicas": 2, "every": 2, "kills": [[0, 4, place], [1, 5, "backward"]]},
        ]
        for case in cases:
            case.update(run=str(self.folder / case["name"] / "run"), metrics=["tensorboard"])
        codes = run(self.folder, cases)
        for case, ended in zip(cases, codes):
            with self.subTest(**case):
                victims = [victim for victim, _, _ in case["kills"]]
                left = [rank for rank in range(case["ranks"]) if rank not in victims]
                self.assertEqual(ended[:-1], [0 if rank in left else -signal.SIGKILL for rank in range(case["ranks"])], self.said(case))
                wanted = torch.load(self.folder / case["name"] / "plain.pt")["losses"][1::2]
                self.check_records(case, victims, left, wanted)
                self.check_events(case, victims, left)
                said = subprocess.run([os.environ["DYNMO"], "report", case["run"]], capture_output=True, text=True, check=False)
                self.assertEqual((said.returncode, said.stderr), (0, ""))
                summary = json.loads((pathlib.Path(case["run"]) / "summary.json").read_text(encoding="utf-8"))
                self.assertEqual(summary["runs"][0]["steps"], case["steps"])

    def test_training_in_two_calls_keeps_the_numbers(self):
        """Ranks have other numbers in torch.distributed after a loss, and files go by those at the start."""
        case = {**BASE, "name": "two calls", "plain": True, "every": 1, "calls": [4], "kills": [[0, 2, "step"], [1, 6, "step"]],
                "run": str(self.folder / "two calls" / "run")}
        codes, = run(self.folder, [case])
        self.assertEqual(codes[:3], [-signal.SIGKILL, -signal.SIGKILL, 0], self.said(case))
        wanted = torch.load(self.folder / case["name"] / "plain.pt")
        self.assert_same(wanted, [self.result(case, 2)])
        self.check_records(case, [0, 1], [2], wanted["losses"][1::2])
        self.check_events(case, [0, 1], [2])

    def check_records(self, case, victims, left, wanted):
        for rank in range(case["ranks"]):
            path = pathlib.Path(case["run"]) / "records" / f"rank-{rank}.jsonl"
            records = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
            steps = [record["step"] for record in records]
            self.assertEqual(steps, sorted(set(steps)), f"rank {rank}")
            for record in records:
                self.assertAlmostEqual(record["loss"], wanted[record["step"]], places=5)  # another order of sums
            self.assertEqual({record["rank"] for record in records}, {rank})
            if rank in left:
                self.assertEqual(steps, list(range(case["steps"])))
                self.assertEqual([record["generation"] for record in records], sorted(record["generation"] for record in records))
                self.assertEqual(records[-1]["generation"], len(victims))
            else:
                self.assertLess(len(steps), case["steps"])

    def check_events(self, case, victims, left):
        folder = pathlib.Path(case["run"])
        events = [json.loads(line) for line in (folder / "events.jsonl").read_text(encoding="utf-8").splitlines()]
        kinds = [event["event"] for event in events if event["event"] not in ("decision", "move")]
        self.assertEqual(kinds, ["start", "loss", "recovery", "loss", "recovery", "end"])
        losses = [event for event in events if event["event"] == "loss"]
        self.assertEqual([(event["lost"], event["why"]) for event in losses], [([rank], f"rank {rank} has ended") for rank in victims])
        recoveries = [event for event in events if event["event"] == "recovery"]
        self.assertEqual(recoveries[-1]["ranks"], left)
        for loss, recovery in zip(losses, recoveries):
            self.assertEqual(loss["step"] - recovery["step"], recovery["steps_again"])
            self.assertIn(recovery["from"], ("live layers", "snapshot"))
        trace = [json.loads(line) for line in (folder / "load-trace.jsonl").read_text(encoding="utf-8").splitlines()]
        steps = [line["step"] for line in trace if "step" in line]
        self.assertEqual(steps, sorted(set(steps)))

    def test_layers_are_a_snapshot_until_they_are_updated(self):
        module = torch.nn.ModuleList([torch.nn.Linear(2, 2), torch.nn.BatchNorm1d(2)])
        layers = [Layer(str(index), dict(part.named_parameters()), dict(part.named_buffers())) for index, part in enumerate(module)]
        ranks = types.SimpleNamespace(replicas=2)
        optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
        begun = [0]
        held = snapshots.Snapshots(types.SimpleNamespace(layers=layers, module=module), ranks, None, optimizer, [], 0, lambda: begun[0])
        changes = (
            lambda: begun.append(begun.pop() + 1),
            lambda: module[1].running_mean.add_(1),
            lambda: module[0].weight.detach().add_(1),
        )
        self.assertEqual(held.holdings(), {})
        for step, change in enumerate(changes):
            held.note("a plan", step)
            self.assertEqual(held.holdings(), {(step, snapshots.LIVE): [0, 1]})
            change()
            self.assertEqual(held.holdings(), {})
        ranks.replicas = 1
        held.clear()
        held.note("a plan", 9)
        self.assertEqual(held.holdings(), {})

    def assert_end_of_neighbours(self, codes):
        folder = self.folder / "neighbours"
        said = (folder / "rank-0.txt").read_text(encoding="utf-8")
        self.assertEqual(codes, [1, -signal.SIGKILL, -signal.SIGKILL], said)
        self.assertRegex(
            said.splitlines()[-1],
            "RankLostError: rank 0: lost ranks: 1, 2, and with them all copies of layer blocks.*; "
            f"start again from the checkpoint {folder}/checkpoint",
        )

    def test_the_newest_snapshot_that_all_hold_is_chosen(self):
        old, new, live = (4, 0), (8, 0), (8, snapshots.LIVE)
        # A rank of three is lost. The first has heard the vote on the newer snapshot, and the second has not.
        told = [{new: [0, 2]}, {old: [1, 2], new: [1, 2]}]
        self.assertEqual(snapshots.choose(told, 3), (new, [[0], [1], [0, 1]]))
        # The second lacks the newer one.
        told = [{old: [0, 2], new: [0, 2]}, {old: [1, 2]}]
        self.assertEqual(snapshots.choose(told, 3), (old, [[0], [1], [0, 1]]))
        # The layers themselves are the newest, but one has begun to update them.
        told = [{old: [0, 1], new: [0, 1], live: [0, 1]}, {new: [2], live: [2]}]
        self.assertEqual(snapshots.choose(told, 3), (live, [[0], [0], [1]]))
        del told[1][live]
        self.assertEqual(snapshots.choose(told, 3), (new, [[0], [0], [1]]))
        # Neighbours are lost.
        self.assertIsNone(snapshots.choose([{old: [0, 2]}], 3))
        self.assertIsNone(snapshots.choose([{}, {}], 3))

    def test_layers_come_from_the_holders_with_the_least_to_send(self):
        transfers = snapshots.transfers_of([[0, 1], [0, 1], [2]], [0, 0, 1], [[0, 2], [1, 3], [4, 5]], [10, 10, 10])
        self.assertEqual([(one.layer, one.source, one.target) for one in transfers], [(0, 0, 4), (1, 1, 4), (2, 2, 3), (2, 2, 5)])

    def test_replicas_that_are_left_have_as_many_ranks(self):
        rows = [[0, 1, 2], [3, 4, 5]]
        self.assertEqual(snapshots.rows_of(rows, [0, 1, 2, 3, 4]), [[0, 1, 2], [3, 4]])  # the first has a spare rank
        self.assertEqual(snapshots.rows_of(rows, [0, 1, 2, 5]), [[0, 1], [3, 2]])
        self.assertEqual(snapshots.rows_of(rows, [3, 4, 5]), [[2], [0, 1]])
        self.assertEqual(snapshots.rows_of(rows, [2, 5]), [[0], [1]])
        self.assertIsNone(snapshots.rows_of(rows, [2]))

    def test_settings_that_it_refuses(self):
        model = torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.Linear(2, 2))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        layers = {"layers": [("a", model[0]), ("b", model[1])], "loss_fn": torch.nn.functional.mse_loss, "hidden": lambda given: given}
        pipe = dt.Pipeline(optimizer=optimizer, micro_batches=1, **layers)
        for options, line in (
            ({"every": -1}, "every=-1, wanted a number of steps"),
            ({"silence_s": 0.9}, "silence_s=0.9, wanted 1 to 1000000 seconds"),
            ({"wait_s": float("inf")}, "wait_s=inf, wanted 1 to 1000000 seconds"),
            ({"wait_s": float("nan")}, "wait_s=nan, wanted 1 to 1000000 seconds"),
            ({"keep": [optimizer]}, "keep: a SGD, wanted objects with load_state_dict"),
        ):
            with self.subTest(line), self.assertRaisesRegex(dynmo.BadInputError, line):
                dt.Survivor(pipe, **options)
        with self.assertRaisesRegex(dynmo.BadInputError, "train_step: 0 calls of pipe.step"):
            dt.Survivor(pipe).train(lambda number: None, 1)


if __name__ == "__main__":
    unittest.main()
