# SPDX-License-Identifier: Apache-2.0
"""The adviser beside torch.distributed.pipelining: what it measures, what it says, what it refuses."""
import re
import types
import unittest

import torch

import dynmo
import dynmo.torch as dt
from torch_support import RankCase


class Adviser(RankCase):
    def test_measures_what_layers_took_and_finds_the_best_cut(self):
        for ranks in (2, 3):
            with self.subTest(ranks=ranks):
                self.run_ranks(ranks, "torch_adviser_rank.py", self.folder)

    def test_refuses_by_name(self):
        stage = types.SimpleNamespace(submod=torch.nn.Linear(2, 2), stage_index=0, num_stages=1)
        on_meta = types.SimpleNamespace(submod=torch.nn.Linear(2, 2, device="meta"), stage_index=3, num_stages=4)
        for stages, schedule, count, line in (
            ([stage], "ZBVZeroBubble", 2, "schedule: ZBVZeroBubble, wanted GPipe, 1F1B, Interleaved1F1B (others run input and weight gradients apart)"),
            ([torch.nn.Linear(2, 2)], "1F1B", 2, "stages: one is a Linear, wanted PipelineStage objects of torch.distributed.pipelining"),
            ([on_meta], "gpipe", 2, "stages: stage 3: weight is on meta, whose work cannot be timed (PyTorch's reason), wanted cpu or cuda"),
            ([], "gpipe", 2, "Adviser: 0 stages, 2 micro-batches, wanted at least one of each"),
            ([stage], "gpipe", 0, "Adviser: 1 stages, 0 micro-batches, wanted at least one of each"),
        ):
            with self.subTest(line), self.assertRaises(dynmo.BadInputError) as raised:
                dt.Adviser(stages, schedule, micro_batches=count)
            self.assertEqual(re.sub(r"timed \(.+\)", "timed (PyTorch's reason)", str(raised.exception)), line)

    def test_refuses_a_pipeline_that_it_has_not_seen_whole(self):
        torch.distributed.init_process_group("gloo", store=torch.distributed.HashStore(), rank=0, world_size=1)
        self.addCleanup(torch.distributed.destroy_process_group)

        def stage(index, count):
            return types.SimpleNamespace(submod=torch.nn.Sequential(torch.nn.Linear(2, 2)), stage_index=index, num_stages=count)

        for stages, line in (
            ([stage(0, 1)], "stage 0: no layer has run in training, wanted advise() after a step"),
            ([stage(0, 2)], "no rank of the group has given stage 1 of 2, wanted all stages of a pipeline"),
        ):
            with self.subTest(line), self.assertRaises(dynmo.BadInputError) as raised:
                dt.Adviser(stages, "gpipe", micro_batches=2).advise()
            self.assertEqual(str(raised.exception), line)


if __name__ == "__main__":
    unittest.main()
