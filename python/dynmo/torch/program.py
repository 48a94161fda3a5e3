# SPDX-License-Identifier: Apache-2.0
"""A rank's actions of one step, from a plan. The core makes their order, so nothing here depends on a schedule such as 1F1B."""
from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from .. import Schedule
from ..errors import BadInputError

ACTION = re.compile(r"(\d+)(F|B|I|W|SEND_F|RECV_F|SEND_B|RECV_B)(\d+)")
APART = ("zb-h1", "zb-v", "adaptive")  # schedules with I and W
KINDS = ("gpipe", "1f1b", "interleaved", *APART)
Order = tuple[tuple[str, ...], ...]


@dataclass(frozen=True)
class Stage:
    rank: int
    first: int
    count: int

    @property
    def layers(self) -> range:
        return range(self.first, self.first + self.count)


@dataclass(frozen=True)
class Plan:
    """A cut into stages and the rank of each."""

    stages: tuple[Stage, ...]
    ranks: int
    schedule: str
    generation: int = 0
    order: Order = ()  # compute actions of each rank; only for an adaptive plan

    @property
    def cut(self) -> str:
        """Returns the layers of each rank as text, such as "9|9". Stages of one rank are joined by "+"."""
        counts = [[str(stage.count) for stage in self.stages if stage.rank == rank] for rank in range(self.ranks)]
        return "|".join("+".join(count) or "0" for count in counts)

    @property
    def owners(self) -> list[int]:
        return [stage.rank for stage in self.stages for _ in stage.layers]

    def document(self) -> dict[str, Any]:
        """Returns the plan as "dynmo-plan-1"."""
        stages = [
            {"stage": index, "rank": stage.rank, "first_layer": stage.first, "layers": stage.count}
            for index, stage in enumerate(self.stages)
        ]
        document = {
            "format": "dynmo-plan-1", "ranks": self.ranks, "generation": self.generation, "schedule": self.schedule, "stages": stages,
        }
        return {**document, "order": [list(row) for row in self.order]} if self.order else document


def read_plan(document: Mapping[str, Any], ranks: int, layers: int) -> Plan:
    """Parses a "dynmo-plan-1". Raises BadInputError unless it is for this number of ranks and layers."""
    try:
        stages = tuple(
            Stage(int(stage["rank"]), int(stage["first_layer"]), int(stage["layers"]))
            for stage in sorted(document["stages"], key=lambda stage: int(stage["first_layer"]))
        )
        order = tuple(tuple(map(str, row)) for row in document.get("order") or ())
        plan = Plan(stages, int(document["ranks"]), str(document["schedule"]), int(document.get("generation", 0)), order)
    except (KeyError, TypeError, ValueError) as error:
        raise BadInputError(f"plan: {error!r}, wanted a dynmo.Plan or its document") from error
    if plan.schedule not in KINDS:
        raise BadInputError(f"plan: schedule {plan.schedule}, wanted {', '.join(KINDS)}")
    if (plan.schedule == "adaptive") != bool(plan.order):
        raise BadInputError(f"plan: schedule {plan.schedule} {'has an' if plan.order else 'without'} order, wanted one with adaptive alone")
    if plan.ranks != ranks:
        raise BadInputError(f"plan: it is for {plan.ranks} ranks, here are {ranks}")
    covered = [layer for stage in stages for layer in stage.layers]
    if covered != list(range(layers)) or any(stage.count < 1 or not 0 <= stage.rank < ranks for stage in stages):
        raise BadInputError(f"plan: its stages cover {len(covered)} layers on {plan.ranks} ranks, wanted each of {layers} layers once")
    return plan


@dataclass(frozen=True)
class Action:
    kind: str
    stage: int
    micro_batch: int


@dataclass(frozen=True)
class Program:
    """The actions of one rank in a step."""

    stages: tuple[Stage, ...]
    frozen_stages: int
    micro_batches: int
    actions: tuple[Action, ...]

    @property
    def apart(self) -> bool:
        """Returns whether I and W are two actions."""
        return any(action.kind == "I" for action in self.actions)


def make_program(plan: Plan, rank: int, micro_batches: int, frozen_layers: int) -> Program:
    """Makes the program of a rank by lowering the plan's schedule. Stages inside the frozen prefix run forward only."""
    frozen = sum(1 for stage in plan.stages if stage.first + stage.count <= frozen_layers)
    owners = [stage.rank for stage in plan.stages]
    if plan.schedule == "adaptive":
        schedule = Schedule.from_csv(_csv(plan, micro_batches, frozen))
    else:
        schedule = Schedule(plan.schedule, owners, micro_batches, ranks=plan.ranks, frozen_stages=frozen)
    schedule = schedule.lower()
    schedule.check()
    rows = [[_read_action(text) for text in row] for row in schedule.rows]
    if plan.order:
        _check_sums(rows)
    return Program(plan.stages, frozen, micro_batches, tuple(rows[rank]) if rank < plan.ranks else ())  # a spare rank has none


def _read_action(text: str) -> Action:
    match = ACTION.fullmatch(text)
    assert match is not None, text
    return Action(match[2], int(match[1]), int(match[3]))


def _check_sums(rows: list[list[Action]]) -> None:
    """Checks that every stage's backward actions are in the order of the micro-batches, in which gradients are summed."""
    last: dict[tuple[str, int], int] = {}
    for action in (action for row in rows for action in row if action.kind in ("B", "I", "W")):
        if action.micro_batch < last.get((action.kind, action.stage), 0):
            raise BadInputError(
                f"plan: its order has {action.stage}{action.kind}{action.micro_batch} behind a later micro-batch, wanted them in order, in "
                "which gradients are summed"
            )
        last[(action.kind, action.stage)] = action.micro_batch


def _csv(plan: Plan, micro_batches: int, frozen: int) -> str:
    """Returns an adaptive order as CSV, without backward actions of frozen stages. Stages that train again get theirs at the end."""
    rows = []
    for rank, row in enumerate(plan.order):
        matches = [match for match in map(ACTION.fullmatch, row) if match is not None]
        kept = [match[0] for match in matches if match[2] == "F" or int(match[1]) >= frozen]
        backward = {int(match[1]) for match in matches if match[2] != "F"}
        counts = {int(match[3]) for match in matches}
        if counts and counts != set(range(micro_batches)) or len(matches) != len(row):
            raise BadInputError(f"plan: its order is for {len(counts)} micro-batches, wanted F, I, W and B of {micro_batches}")
        for stage in reversed(range(frozen, len(plan.stages))):
            if plan.stages[stage].rank == rank and stage not in backward:
                kept += [f"{stage}{kind}{number}" for number in range(micro_batches) for kind in "IW"]
        rows.append(",".join(kept))
    return "\n".join(rows) + "\n"
