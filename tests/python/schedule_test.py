# SPDX-License-Identifier: Apache-2.0
"""Schedules from their closed forms, their CSV, the checker and the replay."""
import unittest

import dynmo
from support import Case

EQUAL = {"forward_s": 1e-3, "backward_input_s": 1e-3, "backward_weight_s": 1e-3}


def one_forward_one_backward(ranks, micro_batches, rank):
    """PipeDream-Flush as its paper has it."""
    warm_up = min(micro_batches, ranks - rank)
    row = [f"{rank}F{m}" for m in range(warm_up)]
    for m in range(micro_batches):
        row.append(f"{rank}B{m}")
        if warm_up + m < micro_batches:
            row.append(f"{rank}F{warm_up + m}")
    return row


class Schedule(Case):
    def test_orders_are_those_of_the_papers(self):
        for ranks, micro_batches in [(1, 1), (2, 5), (4, 8), (4, 2)]:
            with self.subTest(ranks=ranks, micro_batches=micro_batches):
                schedule = dynmo.Schedule("1f1b", list(range(ranks)), micro_batches)
                rows = [one_forward_one_backward(ranks, micro_batches, rank) for rank in range(ranks)]
                self.assertEqual(schedule.rows, rows)
                self.assertEqual((schedule.ranks, schedule.micro_batches), (ranks, micro_batches))

    def test_step_time_is_the_closed_form(self):
        for ranks, micro_batches in [(1, 3), (3, 3), (4, 9)]:
            for kind in ("gpipe", "1f1b"):
                with self.subTest(kind=kind, ranks=ranks):
                    result = dynmo.Schedule(kind, list(range(ranks)), micro_batches).replay([EQUAL] * ranks)
                    self.assertAlmostEqual(result["step_time_s"], (micro_batches + ranks - 1) * 3e-3, delta=1e-12)
                    self.assertAlmostEqual(result["bubble"], (ranks - 1) / (micro_batches + ranks - 1), delta=1e-9)
                    for rank in result["ranks"]:
                        parts = ("fill_drain_s", "imbalance_s", "communication_s", "straggler_s")
                        self.assertAlmostEqual(sum(rank[part] for part in parts), rank["idle_s"], delta=1e-12)

    def test_a_slower_rank_takes_its_share(self):
        cluster = {"format": "dynmo-cluster-1", "ranks": [{"speed": 0.5}]}
        self.assertAlmostEqual(dynmo.Schedule("gpipe", [0], 4).replay([EQUAL], cluster)["step_time_s"], 24e-3, delta=1e-12)

    def test_csv_gives_the_schedule_back(self):
        for kind, stages in [("1f1b", [0, 1, 2]), ("zb-h1", [0, 1, 2]), ("interleaved", [0, 1, 0, 1]), ("zb-v", [0, 1, 1, 0])]:
            with self.subTest(kind=kind):
                schedule = dynmo.Schedule(kind, stages, 4)
                self.assertEqual(dynmo.Schedule.from_csv(schedule.csv()), schedule)
                lowered = schedule.lower()
                self.assertTrue(lowered.is_lowered and not schedule.is_lowered)
                self.assertEqual(dynmo.Schedule.from_csv(lowered.csv()), lowered)
                self.assertEqual(lowered.check(), schedule.check())
                self.assertEqual(str(schedule).count("\n"), schedule.ranks)
        self.assertEqual(set(dynmo.schedule_kinds()), {"gpipe", "1f1b", "interleaved", "zb-h1", "zb-v", "adaptive"})

    def test_frozen_stages_run_forward_only(self):
        schedule = dynmo.Schedule("1f1b", [0, 1], 3, ranks=3, frozen_stages=1)
        self.assertEqual(schedule.rows, [["0F0", "0F1", "0F2"], one_forward_one_backward(2, 3, 1), []])
        self.assertEqual(schedule.check()["in_flight"], [0, 1])

    def test_bad_ones_are_refused(self):
        make = dynmo.Schedule
        for text, call, arguments in [
            ("1f1b", make, ("1f2b", [0, 1], 4)),
            ("micro", make, ("1f1b", [0, 1], 0)),
            ("rank", make, ("1f1b", [0, -1], 4)),
            ("stage", make, ("1f1b", [0, 0], 4)),
            ("", make, ("adaptive", [0, 1], 4)),
            ("row 1", make.from_csv, ("0F0,0X0\n",)),
            ("forward_s", make("1f1b", [0], 1).replay, ([{"forward_s": -1.0}],)),
            ("froward_s", make("1f1b", [0], 1).replay, ([{"froward_s": 1.0}],)),
            ("", make("1f1b", [0, 1], 1).replay, ([EQUAL],)),
            ("", make.from_csv("0F0,0B0\n1B0,1F0\n").check, ()),
        ]:
            with self.subTest(text=text, arguments=arguments):
                self.assert_refused(dynmo.BadInputError, text, call, *arguments)


if __name__ == "__main__":
    unittest.main()
