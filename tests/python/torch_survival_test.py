# SPDX-License-Identifier: Apache-2.0
"""Ranks are killed, and the others go on: losses, weights and optimizer state are those of the plain loop."""
import json
import pathlib
import signal
import subprocess
import sys
import unittest

import torch

import dynmo
import dynmo.torch as dt
from drawn import drawn
from dynmo.torch import snapshots
from torch_support import HERE, RankCase, environment

PLACES = ("step", "forward", "backward", "exchange", "snapshot")
BASE = {"family": "llama", "micro_batches": 4, "ranks": 3, "steps": 7, "clip": 1.0}


def run(folder, cases):
    """Trains the cases in forked ranks; the codes of each."""
    (folder / "cases.json").write_text(json.dumps(cases), encoding="utf-8")
    subprocess.run(
        [sys.executable, HERE / "torch_survival_rank.py", folder], cwd=HERE, env=environment(), check=True, timeout=300
    )
    return json.loads((folder / "codes.json").read_text(encoding="utf-8"))


class Survival(RankCase):
    def test_the_others_go_on_with_the_same_bits(self):
        places = drawn(PLACES, 3, "the places of losses")
        second, third = drawn((2, 3), 1, "the step of the first loss")[0], drawn((5, 6), 1, "the step of the second")[0]
        cases = [
            {**BASE, "name": "middle and last", "plain": True, "kills": [[1, second, places[0]], [2, third, places[1]]]},
            {**BASE, "name": "first", "schedule": "zb-h1", "every": 2, "kills": [[0, third, places[2]]]},
            {**BASE, "name": "neighbours", "every": 1, "save_at": 3, "kills": [[1, 5, "pair"]]},
            {**BASE, "name": "resumed", "ranks": 2, "kills": [], "resume": str(self.folder / "neighbours" / "checkpoint")},
        ]
        codes = run(self.folder, cases)
        wanted = torch.load(self.folder / "middle and last" / "plain.pt")
        for case, ended in zip(cases[:2], codes):
            with self.subTest(**case):
                victims = {victim for victim, _, _ in case["kills"]}
                folder = self.folder / case["name"]
                said = "\n".join(path.read_text(encoding="utf-8") for path in folder.glob("*.txt"))
                self.assertEqual(ended[:3], [-signal.SIGKILL if rank in victims else 0 for rank in range(3)], said)
                self.assert_same(wanted, [torch.load(folder / f"rank-{rank}.pt") for rank in range(3) if rank not in victims])
        self.assert_end_of_neighbours(codes[2])
        self.assertEqual(codes[3], [0, 0])
        parts = [torch.load(self.folder / "resumed" / f"rank-{rank}.pt") for rank in range(2)]
        done = 2 * (cases[2]["save_at"] + 1)  # a norm and a loss each step
        self.assert_same({**wanted, "losses": wanted["losses"][done:]}, parts)

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
        old, new = (0, 4), (0, 8)
        owners = [0, 1, 2]
        # Rank 1 is lost. Rank 0 has heard the vote on the newer snapshot, and rank 2 has not.
        told = [{new: (owners, [0, 2])}, {old: (owners, [1, 2]), new: (owners, [1, 2])}]
        self.assertEqual(snapshots.choose(told, [0, 2]), (new, [0, 2, 2]))
        # Rank 2 lacks the newer one.
        told = [{old: (owners, [0, 2]), new: (owners, [0, 2])}, {old: (owners, [1, 2])}]
        self.assertEqual(snapshots.choose(told, [0, 2]), (old, [0, 2, 2]))
        # Neighbours are lost.
        self.assertIsNone(snapshots.choose([{old: (owners, [0, 2])}], [0]))
        self.assertIsNone(snapshots.choose([{}, {}], [0, 2]))

    def test_settings_that_it_refuses(self):
        model = torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.Linear(2, 2))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        layers = {"layers": [("a", model[0]), ("b", model[1])], "loss_fn": torch.nn.functional.mse_loss, "hidden": lambda given: given}
        pipe = dt.Pipeline(optimizer=optimizer, micro_batches=1, **layers)
        for options, line in (
            ({"every": -1}, "every=-1, wanted a number of steps"),
            ({"silence_s": 0}, "silence_s=0, wanted more than 0"),
            ({"keep": [optimizer]}, "keep: a SGD, wanted objects with load_state_dict"),
        ):
            with self.subTest(line), self.assertRaisesRegex(dynmo.BadInputError, line):
                dt.Survivor(pipe, **options)
        recorded = dt.Pipeline(optimizer=None, micro_batches=1, run=pathlib.Path(self.folder) / "run", **layers)
        with self.assertRaisesRegex(dynmo.BadInputError, "wanted one without: the files of a run"):
            dt.Survivor(recorded)
        recorded.close()
        with self.assertRaisesRegex(dynmo.BadInputError, "train_step: 0 calls of pipe.step"):
            dt.Survivor(pipe).train(lambda number: None, 1)


if __name__ == "__main__":
    unittest.main()
