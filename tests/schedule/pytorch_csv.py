#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Writes the schedules in tests/schedule/data with PyTorch's own generators and writers.

Made with PyTorch 2.11: python3 tests/schedule/pytorch_csv.py. Nothing runs: the stages are stand-ins that only know their
place. GPipe and 1F1B know no communication; the others are written compute-only and lowered.
"""
import csv
import logging
import pathlib

import torch.distributed.pipelining.schedules as pipelining
from torch.distributed.pipelining.stage import _PipelineStageBase

FOLDER = pathlib.Path(__file__).parent / "data"


class Stage(_PipelineStageBase):
    def __init__(self, ranks, stages, index):
        self.group_size, self.num_stages, self.group_rank, self.stage_index = ranks, stages, 0, index
        self.stage_index_to_group_rank = {s: s % ranks for s in range(stages)}
        self.submod, self.has_backward = None, True

    def _prepare_forward_infra(self, *_, **__):
        raise NotImplementedError

    def _create_grad_recv_info(self, *_):
        raise NotImplementedError


def loss(*_):
    return None


def write_single(name, kind, ranks, micro_batches):
    schedule = kind(Stage(ranks, ranks, 0), micro_batches, loss_fn=loss)
    with open(FOLDER / f"{name}.csv", "w", newline="") as file:
        writer = csv.writer(file)
        order = schedule._get_pipeline_order()
        writer.writerows(order[rank] for rank in sorted(order))


def write_multi(name, kind, ranks, second_stage, micro_batches):
    stages = [Stage(ranks, 2 * ranks, s) for s in (0, second_stage)]
    schedule = kind(stages, micro_batches, loss_fn=loss)
    schedule._dump_csv(FOLDER / f"{name}.csv", format="compute_only")
    schedule._dump_csv(FOLDER / f"{name}_comms.csv", format="compute_comms")


if __name__ == "__main__":
    logging.disable(logging.WARNING)
    FOLDER.mkdir(exist_ok=True)
    write_single("gpipe", pipelining.ScheduleGPipe, 4, 8)
    write_single("1f1b", pipelining.Schedule1F1B, 4, 8)
    write_multi("interleaved", pipelining.ScheduleInterleaved1F1B, 4, 4, 8)
    write_multi("interleaved_zb", pipelining.ScheduleInterleavedZeroBubble, 4, 4, 8)
    write_multi("zb_v", pipelining.ScheduleZBVZeroBubble, 4, 7, 8)
    write_multi("dual_pipe_v", pipelining.ScheduleDualPipeV, 4, 7, 8)
