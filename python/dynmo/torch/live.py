# SPDX-License-Identifier: Apache-2.0
"""Balances while training runs: gives the core's controller the measurements of all ranks, and asks it at each boundary.

No decision is taken here. Every rank has its own controller. All get the same measurements, so they decide the same.
"""
from __future__ import annotations

from dataclasses import dataclass
from time import perf_counter
from typing import Any, Optional

from .._core import Decisions
from ..errors import BadInputError
from .clocks import Clock, Stamp
from .exchange import Told
from .layers import Context, Split, frozen_prefix
from .marks import Marks
from .move import Moved
from .program import Plan
from .start import profile_of

BALANCERS = ("optimal", "uniform", "parameters", "time", "diffusion-parameters", "diffusion-time", "search")


def check_balancer(name: str) -> None:
    """Raises BadInputError for an unknown balancer, also if there is nothing to balance until ranks join."""
    if name not in BALANCERS:
        raise BadInputError(f"balancer: {name}, wanted {', '.join(BALANCERS)}")


@dataclass(frozen=True)
class Move:
    """A move that `balance` made: cuts, predicted step times, bytes and seconds."""

    before: str
    after: str
    current_step_s: float
    planned_step_s: float
    bytes: int
    seconds: float
    reason: str

    def __str__(self) -> str:
        return (
            f"{self.before} -> {self.after}, {self.current_step_s * 1e3:.1f} -> {self.planned_step_s * 1e3:.1f} ms a step, "
            f"{self.bytes / 2**20:.1f} MiB in {self.seconds * 1e3:.0f} ms"
        )


class Times:
    """This rank's times outside of the schedule: the optimizer's update, and the rest of a step."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._begun: Optional[Stamp] = None
        self._schedule_s = 0.0
        self._updating: Optional[Stamp] = None
        self._updated: Optional[tuple[Stamp, Stamp]] = None
        self._before: Optional[tuple[Stamp, Stamp, float, bool]] = None  # the previous step: begin, end, schedule, excluded
        self._excluded = False
        self.update_s = 0.0
        self.overhead_s = 0.0
        self.plan_s = 0.0
        self.migrate_s = 0.0

    def begin_step(self) -> None:
        now = self._clock.stamp()
        if self._begun is not None:
            self._before = (self._begun, now, self._schedule_s, self._excluded)
        self._begun, self._schedule_s, self._excluded = now, 0.0, False

    def add_schedule(self, seconds: float) -> None:
        self._schedule_s += seconds

    def begin_update(self) -> None:
        self._updating = self._clock.stamp()

    def end_update(self) -> None:
        if self._updating is not None:
            self._updated = (self._updating, self._clock.stamp())
            self._updating = None

    def exclude(self) -> None:
        """Excludes this step from measurement, because layers move in it."""
        self._excluded = True

    def settle(self) -> None:
        """Reads the times of the previous step. Call it after a wait for the clock."""
        if self._updated is not None:
            self.update_s = self._clock.seconds(*self._updated)
            self._clock.free(self._updated)
        if self._before is not None:
            begun, end, schedule_s, excluded = self._before
            rest = self._clock.seconds(begun, end) - schedule_s - self.update_s
            self.overhead_s = 0.0 if excluded else max(rest, 1e-9)
            self._clock.free([begun])
        self._updated = self._before = None


class Balancer:
    """The controller of one rank."""

    def __init__(self, split: Split, ranks: int, options: dict[str, Any]) -> None:
        self._split = split
        self.decisions = Decisions(profile_of(split, [(0.0, 0.0)] * len(split.layers)), ranks, options)
        self._frozen = frozen_prefix(split.layers)
        self._flags = flags_of(split)
        self._changed = ""
        self.times = Times(split.device.clock)
        self._observed_at = perf_counter()
        self._plan_s = 0.0  # since the previous step
        self.facts: dict[str, float] = {}

    def not_timed(self) -> None:
        """Excludes the time so far in this step, which is not training."""
        self._observed_at = perf_counter()
        self.times.exclude()

    def changed(self, why: str) -> None:
        self._changed = why

    @property
    def work_changed(self) -> bool:
        return self._changed != ""

    def own_part(self, plan: Plan, rank: int, marks: Marks, losses: dict[int, float], schedule_s: float, context: Context) -> Told:
        """Returns what this rank sends at the end of a step."""
        told = Told(losses)
        owned = [index for index, owner in enumerate(plan.owners) if owner == rank]
        layers = [self._split.layers[index] for index in owned]
        trained = [sum(p.numel() for p in layer.parameters.values() if p.requires_grad) for layer in layers]
        for index, count in zip(owned, trained):
            backward = marks.backward_s[index] / max(1, marks.backwards[index])
            apart = marks.apart[index] > 0
            told.layers[index] = {
                "forward_s": marks.forward_s[index] / max(1, marks.forwards[index]),
                "input_gradient_s": backward if apart else backward / 2,
                "weight_gradient_s": marks.weights_s[index] / marks.apart[index] if apart else backward / 2,
                "update_s": self.times.update_s * count / max(1, sum(trained)),
                "boundary_bytes": float(context.bytes(index)),
            }
        stages = [stage for stage in plan.stages if stage.rank == rank]
        counts = [marks.forwards[stage.first] + marks.backwards[stage.layers[-1]] + marks.apart[stage.first] for stage in stages]
        computed_s = sum(marks.forward_s) + sum(marks.backward_s) + sum(marks.weights_s)
        told.ranks[rank] = {
            "overhead_s": self.times.overhead_s,
            "action_overhead_s": max(0.0, schedule_s - marks.wait_s - computed_s),
            "actions": float(sum(counts)),
            "plan_s": self.times.plan_s,
            "migrate_s": self.times.migrate_s,
            "busy_s": computed_s + self.times.update_s,
        }
        self.times.migrate_s = 0.0
        return told

    def observe(self, told: Told, plan: Plan, frozen: int) -> None:
        """Gives the controller the measurements of one more step."""
        ranks = [told.ranks[rank] for rank in sorted(told.ranks)]
        now = perf_counter()
        moving_s = max(rank["migrate_s"] for rank in ranks)
        step_s = max(now - self._observed_at - self._plan_s - moving_s, max(rank["busy_s"] for rank in ranks), 1e-9)
        self._observed_at = now
        step = {
            "layers": [{**told.layers[index], "boundary_bytes": int(told.layers[index]["boundary_bytes"])} for index in sorted(told.layers)],
            "ranks": ranks,
            "step_s": step_s,
        }
        facts = self.decisions.observe(step, plan.document(), frozen)
        self.facts = {**facts, "step_s": step_s + self._plan_s + moving_s, "plan_s": self._plan_s, "update_s": self.times.update_s}
        self._plan_s = 0.0

    def decide(self, plan: Plan, step: int) -> Optional[dict[str, Any]]:
        """Returns the controller's decision before this step, or None if there is no cause for a plan."""
        flags, frozen = flags_of(self._split), frozen_prefix(self._split.layers)
        what = "nothing"
        if frozen != self._frozen:
            what = "known"  # a frozen prefix runs forward only
        elif flags != self._flags:
            what = "work"
        if self._changed:
            what, self._changed = "work", ""
        self._flags, self._frozen = flags, frozen
        self.decisions.announce(what, step)
        decision = self.decisions.decide(plan.document(), step, frozen)
        if decision is not None:
            self.times.plan_s = self._plan_s = self.decisions.plan_s
        return decision

    def predicted_step_s(self, plan: Plan, step: int) -> float:
        return self.decisions.predicted_step_s(plan.document(), step, self._frozen)

    def profile(self) -> Optional[dict[str, Any]]:
        """Returns the measured costs, a "dynmo-profile-1", or None before the first step."""
        return self.decisions.costs(self._frozen)

    def moved(self, moved: Moved) -> None:
        if moved.done:
            self.decisions.moved(moved.bytes)
            self.times.migrate_s = moved.seconds
            self.times.exclude()
        else:
            self.decisions.not_moved()


def flags_of(split: Split) -> list[list[bool]]:
    """Returns which parameters are trained, by layer."""
    return [[parameter.requires_grad for parameter in layer.parameters.values()] for layer in split.layers]
