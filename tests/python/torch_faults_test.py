# SPDX-License-Identifier: Apache-2.0
"""A killed rank is named by the others, which end; a damaged byte leaves the old plan."""
import itertools
import signal
import time
import unittest
from unittest import mock

import torch.distributed as dist

import torch_cases
from dynmo.torch import lost
from drawn import drawn
from torch_support import ALL, RankCase

PLACES = ("forward", "backward", "exchange", "vote", "move")
FEW = tuple(zip(PLACES, (0, 2, 1, 0, 1)))  # of three ranks; `make soak` has all of four


class Faults(RankCase):
    def test_a_killed_rank_is_named_by_all_others(self):
        ranks = 4 if ALL else 3
        slowest = 0.0
        for place, victim in itertools.product(PLACES, range(ranks)) if ALL else drawn(FEW, 2, "the places of a loss"):
            with self.subTest(place=place, victim=victim):
                processes = self.start(ranks, "torch_fault_rank.py", place, victim)
                self.assertEqual(processes[victim].wait(timeout=200), -signal.SIGKILL)
                killed = time.monotonic()
                for rank, process in enumerate(processes):
                    said = process.communicate(timeout=100)[0]
                    if rank != victim:
                        self.assertEqual(process.returncode, 1, said)
                        self.assertIn(f"RankLostError: rank {rank}: rank {victim} is lost", said)
                slowest = max(slowest, time.monotonic() - killed)
                print(f"{place}: the others ended {time.monotonic() - killed:.2f} s after rank {victim}")
        print(f"the slowest of all took {slowest:.2f} s")

    def test_a_process_of_another_machine_has_not_ended_here(self):
        """Machines and containers with one host name have processes of their own."""
        absent = 2**30  # more than any process number
        places = [("host", 1, lost.process_space()), ("host", absent, "another machine"), ("host", absent, lost.process_space())]
        with mock.patch.object(dist.distributed_c10d, "_get_default_store", dist.HashStore), mock.patch.object(lost, "LOOK_S", 0.1):
            self.assertEqual(lost.find_lost(places, 0, 1), 2)
            self.assertEqual(lost.find_lost(places[:2], 0, None), None)

    def test_an_error_that_a_rank_tells_ends_the_others(self):
        """Its process goes on until they have noticed, which is long before the group's timeout."""
        for place, line in {"told": "BadInputError: rank 1: OSError: one rank's own", "told without a store": "RankLostError: rank 0: "}.items():
            with self.subTest(place=place):
                processes = self.start(2, "torch_fault_rank.py", place, 1)
                said = [process.communicate(timeout=200)[0] for process in processes]
                self.assertEqual([process.returncode for process in processes], [0, 0], said)
                self.assertIn(line, said[0])

    def test_a_damaged_byte_leaves_the_old_plan(self):
        processes = self.start(2, "torch_fault_rank.py", "damage", 0)
        said = [process.communicate(timeout=200)[0] for process in processes]
        self.assertEqual([process.returncode for process in processes], [0, 0], said)
        lines = [[line for line in text.splitlines() if line.startswith("step ")] for text in said]
        self.assertEqual(lines[0], lines[1])
        case = {"family": "llama", "micro_batches": 4}
        model, optimizer = torch_cases.make(case)
        for number, line in enumerate(lines[0]):
            losses = []
            for part in torch_cases.micro_batches_of(case, torch_cases.batch_of(case, number)):
                loss = model(**part).loss
                (loss / 4).backward()
                losses.append(loss.item())
            torch_cases.update(optimizer)
            self.assertTrue(line.endswith(f"loss {sum(losses)}"), (line, losses))
        self.assertEqual([line.split()[2] for line in lines[0]], ["2|4,", "3|3,", "3|3,", "2|4,", "3|3,"])


if __name__ == "__main__":
    unittest.main()
