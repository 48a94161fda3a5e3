# SPDX-License-Identifier: Apache-2.0
"""Waiting for other ranks is no work: a clock of the test's own goes on in layers and in waits, and only the layers' part is booked."""
import unittest

import torch
from torch import nn

from dynmo.torch import clocks, live, marks, program, sequence, step
from torch_adviser_rank import Clock, Tick

FORWARD_S, BACKWARD_S, WAIT_S, AGREE_S = 1.0, 2.0, 50.0, 300.0
MICRO_BATCHES = 4


class Timed(nn.Module):
    def __init__(self, clock):
        super().__init__()
        self.clock, self.weight = clock, nn.Parameter(torch.ones(2))

    def forward(self, given):
        return Tick.apply(given * self.weight, self.clock, FORWARD_S, BACKWARD_S)


class Late:
    """A message that makes its rank wait."""

    def __init__(self, tensor, clock):
        self.tensor, self.clock = tensor, clock

    def wait(self):
        self.clock.now += WAIT_S
        return self.tensor


class LateRanks:
    """The other ranks of one whose messages all come late."""

    def __init__(self, clock):
        self.clock = clock

    def ready(self, tensors):
        return tensors

    def send(self, tensor, to, tag, purpose):
        return Late(tensor, self.clock)

    def receive(self, tensor, source, tag, purpose):
        return Late(tensor.zero_(), self.clock)


class Waiting(unittest.TestCase):
    def book(self, rank, kind):
        """What the rank would tell of one step, and the step's time."""
        clock = Clock()
        layers = [(f"layer{index}", Timed(clock)) for index in range(4)]
        split = sequence.Sequential(layers, lambda output, _: output.sum(), lambda given: torch.empty(given.shape))
        plan = program.Plan((program.Stage(0, 0, 2), program.Stage(1, 2, 2)), 2, kind)
        agreed = []

        def agree():
            if not agreed:
                clock.now += AGREE_S
                agreed.append(True)

        batch = {sequence.INPUT: torch.ones(1, 2), sequence.TARGET: torch.zeros(1, 2)}
        noted = marks.Marks(4, clocks.HostClock(clock))
        step.Step(
            split, LateRanks(clock), program.make_program(plan, rank, MICRO_BATCHES, 0),
            [split.begin(batch, 0) for _ in range(MICRO_BATCHES)], noted, lambda loss: loss, 0, None, agree,
        ).run()
        noted.settle()
        balancer = live.Balancer(split, 2, {"micro_batches": MICRO_BATCHES, "accumulation": 1, "steps": 0, "balancer": "optimal"})
        context = split.begin(batch, 0)
        split.describe(context)
        return balancer.own_part(plan, rank, noted, {}, clock.now, context), clock.now

    def test_is_booked_neither_to_layers_nor_to_actions(self):
        for rank in range(2):
            for kind in ("1f1b", "gpipe"):
                with self.subTest(rank=rank, kind=kind):
                    told, taken_s = self.book(rank, kind)
                    self.assertEqual(sorted(told.layers), [2 * rank, 2 * rank + 1])
                    for times in told.layers.values():
                        self.assertEqual(times["forward_s"], FORWARD_S)
                        self.assertEqual(times["input_gradient_s"] + times["weight_gradient_s"], BACKWARD_S)
                    self.assertEqual(told.ranks[rank]["action_overhead_s"], 0)
                    self.assertEqual(told.ranks[rank]["busy_s"], MICRO_BATCHES * 2 * (FORWARD_S + BACKWARD_S))
                    self.assertEqual(taken_s, told.ranks[rank]["busy_s"] + 2 * MICRO_BATCHES * WAIT_S + AGREE_S)


if __name__ == "__main__":
    unittest.main()
