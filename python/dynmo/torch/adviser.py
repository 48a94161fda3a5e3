# SPDX-License-Identifier: Apache-2.0
"""Advice for pipelines whose stages another library runs: torch.distributed.pipelining, or libraries built on it such as torchtitan."""
from __future__ import annotations

import json
import os
import pathlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Optional, Union

import torch.distributed as dist
from torch import Tensor

from .. import Plan, Schedule, plan as make_plan
from ..errors import BadInputError
from .clocks import HostClock
from .device import device_of
from .stages import StageLike, StageTimes

SCHEDULES = {"gpipe": "GPipe", "1f1b": "1F1B", "interleaved": "Interleaved1F1B"}  # DynMo's name: PyTorch's


@dataclass(frozen=True)
class Advice:
    """The current cut and the best one with the same schedule, for the measured times of the layers."""

    schedule: str
    ranks: int
    micro_batches: int
    before: list[list[str]]  # names of layers, by stage
    after: list[list[str]]
    current_step_s: float
    planned_step_s: float
    profile: dict[str, Any]  # the measured costs, a "dynmo-profile-1"
    plan: Plan

    @property
    def gain_s(self) -> float:
        """Returns the seconds that the best cut saves in a step; 0 if the current cut is the best."""
        return max(0.0, self.current_step_s - self.planned_step_s)

    def pays(self, restart_s: float, steps: int) -> bool:
        """Returns whether the best cut saves more in `steps` steps than a restart of `restart_s` seconds costs."""
        return self.gain_s * steps > restart_s

    def write(self, folder: Union[str, "os.PathLike[str]"]) -> None:
        """Writes the files of `Plan.emit("torchtitan")`, plan.json and profile.json."""
        path = pathlib.Path(folder)
        self.plan.emit("torchtitan", path, module_names=True)
        self.plan.save(path / "plan.json")
        (path / "profile.json").write_text(json.dumps(self.profile, indent=1) + "\n", encoding="utf-8")

    def __str__(self) -> str:
        before, after = ("|".join(str(len(names)) for names in cut) for cut in (self.before, self.after))
        if self.gain_s <= 0:
            return f"keep {before}: no cut is faster than its {self.current_step_s * 1e3:.1f} ms a step"
        return f"{before} -> {after}, {self.current_step_s * 1e3:.1f} -> {self.planned_step_s * 1e3:.1f} ms a step"


class Adviser:
    """Measures the layers of a pipeline of torch.distributed.pipelining, and says whether another cut pays its restart.

    `stages`: this rank's PipelineStage objects. `schedule`: "1F1B", "GPipe" or "Interleaved1F1B". Layers are the children of a stage that
    have parameters; those of a ModuleList or ModuleDict are single layers. If the schedule calls `timed_loss(loss_fn)` instead of
    `loss_fn`, the loss counts as part of the last layer. Times are medians over the newest 512 calls: wall time, or on a device the time of
    its stream.
    """

    def __init__(
        self, stages: Sequence[StageLike], schedule: str, *, micro_batches: int, group: Optional[dist.ProcessGroup] = None,
        clock: Optional[Callable[[], float]] = None,
    ) -> None:
        names = {name.lower(): kind for kind, torchs in SCHEDULES.items() for name in (kind, torchs)}
        if str(schedule).lower() not in names:
            raise BadInputError(f"schedule: {schedule}, wanted {', '.join(SCHEDULES.values())} (others run input and weight gradients apart)")
        for stage in stages:
            if not all(hasattr(stage, name) for name in ("submod", "stage_index", "num_stages")):
                raise BadInputError(f"stages: one is a {type(stage).__name__}, wanted PipelineStage objects of torch.distributed.pipelining")
        if not stages or micro_batches < 1:
            raise BadInputError(f"Adviser: {len(stages)} stages, {micro_batches} micro-batches, wanted at least one of each")
        self._schedule = names[str(schedule).lower()]
        self._micro_batches = micro_batches
        self._group = group
        self._count = stages[0].num_stages
        devices = {stage.stage_index: device_of(f"stages: stage {stage.stage_index}", [stage.submod]) for stage in stages}
        self._stages = {
            stage.stage_index: StageTimes(stage, devices[stage.stage_index].clock if clock is None else HostClock(clock)) for stage in stages
        }

    def timed_loss(self, loss_fn: Callable[..., Tensor]) -> Callable[..., Tensor]:
        """Returns `loss_fn` for the schedule, with its time counted as part of the last layer's. Call it on every rank."""
        last = self._stages.get(self._count - 1)
        return loss_fn if last is None else last.timed_loss(loss_fn)

    def close(self) -> None:
        """Removes the hooks."""
        for stage in self._stages.values():
            stage.close()

    def advise(self) -> Advice:
        """Returns the best cut for the times that the layers took since the start. All ranks call it and get the same result."""
        ranks = dist.get_world_size(self._group)
        told: list[Any] = [None] * ranks
        dist.all_gather_object(told, {"count": self._count, "stages": {i: self._own(stage) for i, stage in self._stages.items()}}, self._group)
        _check_once(told)
        owners = {index: rank for rank, one in enumerate(told) for index in one["stages"]}
        self._check(told, owners, ranks)
        stages = [told[owners[index]]["stages"][index] for index in range(self._count)]
        _number_on(stages)
        layers = [layer for stage in stages for layer in stage]
        names = [layer["name"] for layer in layers]
        profile = {"format": "dynmo-profile-1", "layers": [{k: v for k, v in layer.items() if k != "list"} for layer in layers]}
        planned = make_plan(profile, ranks=ranks, micro_batches=self._micro_batches, balancer="optimal", schedule=self._schedule)
        before = [[layer["name"] for layer in stage] for stage in stages]
        after = [names[stage["first_layer"] : stage["first_layer"] + stage["layers"]] for stage in planned.stages]
        current_s = self._step_s(before, layers, [owners[index] for index in range(self._count)])
        planned_s = self._step_s(after, layers, [stage["rank"] for stage in planned.stages])
        return Advice(self._schedule, ranks, self._micro_batches, before, after, current_s, planned_s, profile, planned)

    def _own(self, stage: StageTimes) -> list[dict[str, Any]]:
        """Returns the layers of a stage, in the order in which they run."""
        stage.read()
        layers = []
        loss_s = stage.times[stage.LOSS].medians() if stage.LOSS in stage.times else (0.0, 0.0)
        names = [name for name in stage.times if name != stage.LOSS]
        for name in names:
            forward_s, backward_s = (time + (loss if name == names[-1] else 0.0) for time, loss in zip(stage.times[name].medians(), loss_s))
            size = sum(p.numel() * p.element_size() for p in stage.modules[name].parameters())
            layers.append({
                "name": name, "list": stage.lists[name], "forward_s": forward_s, "backward_input_s": backward_s / 2,
                "backward_weight_s": backward_s / 2, "parameter_bytes": size, "gradient_bytes": size,
                "boundary_bytes": stage.times[name].boundary_bytes,
            })
        return layers

    def _check(self, told: list[Any], owners: dict[int, int], ranks: int) -> None:
        """Raises the same error on all ranks if the stages are incomplete or on the wrong ranks."""
        for rank, one in enumerate(told):
            if one["count"] != told[0]["count"]:
                raise BadInputError(f"rank {rank}: {one['count']} stages, rank 0 has {told[0]['count']}, wanted the same pipeline on all ranks")
        missing = [index for index in range(self._count) if index not in owners]
        if missing:
            raise BadInputError(f"no rank of the group has given stage {missing[0]} of {self._count}, wanted all stages of a pipeline")
        for index in range(self._count):
            if owners[index] != index % ranks:
                raise BadInputError(f"stage {index} is on rank {owners[index]}, wanted rank {index % ranks}: stages in loops over the ranks")
            if not told[owners[index]]["stages"][index]:
                raise BadInputError(f"stage {index}: no layer has run in training, wanted advise() after a step")

    def _step_s(self, cut: list[list[str]], layers: list[dict[str, Any]], owners: list[int]) -> float:
        """Returns the seconds of a step with this cut, by replay."""
        rest = iter(layers)
        parts = ("forward_s", "backward_input_s", "backward_weight_s")
        stages = [[next(rest) for _ in names] for names in cut]
        costs = [{part: sum(layer[part] for layer in stage) for part in parts} for stage in stages]
        return float(Schedule(self._schedule, owners, self._micro_batches).replay(costs)["step_time_s"])


def _check_once(told: list[Any]) -> None:
    seen: dict[int, int] = {}
    for rank, one in enumerate(told):
        for index in one["stages"]:
            if index in seen:
                raise BadInputError(
                    f"stage {index} is on ranks {seen[index]} and {rank}, wanted each stage once; of replicas give group= the ranks of one"
                )
            seen[index] = rank


def _number_on(stages: list[list[dict[str, Any]]]) -> None:
    """Renumbers the layers of a list that several stages share: each stage counts from 0, the result through all stages."""
    seen: dict[str, int] = {}
    for stage in stages:
        begun = dict(seen)
        for layer in stage:
            name = layer["list"]
            if name is None:
                continue
            number = int(layer["name"].rpartition(".")[2]) + begun.get(name, 0)
            layer["name"] = f"{name}.{number}" if name else str(number)
            seen[name] = seen.get(name, 0) + 1
