# SPDX-License-Identifier: Apache-2.0
"""What a run leaves in its folder: records, events, load trace, profile, in the formats of `dynmo train`."""
from __future__ import annotations

import os
from typing import Any, Sequence, Union

from .._core import Decisions, RunLog, program
from .program import Plan
from .ranks import Ranks

Path = Union[str, "os.PathLike[str]"]


class Record:
    """One rank's files, those of rank p of replica r under r x P + p. The first rank has the events and the load trace, too."""

    def __init__(self, folder: Path, ranks: Ranks, plan: Plan, micro_batches: int, accumulation: int, steps: int,
                 metrics: Sequence[str] = ()) -> None:
        self._number = ranks.replica * ranks.size + ranks.rank
        self._log = RunLog(os.fspath(folder), self._number, ranks=ranks.world, metrics=list(metrics))
        self._rank, self._ranks, self._replicas = ranks.rank, ranks.world, ranks.replicas
        self._facts: list[dict[str, float]] = []
        self._moved = 0
        self._log.start(plan.document(), accumulation)
        self._log.event("start", 0, {"plan": plan.document(), "ranks": ranks.world, "steps": steps, "micro_batches": micro_batches,
                                     "program": program})

    def step(self, step: int, plan: Plan, frozen: int, facts: dict[str, float], decisions: Decisions) -> None:
        """One step that is done, as this rank has seen it."""
        stages = [stage for stage in plan.stages if stage.rank == self._rank]
        self._facts.append(facts)
        self._log.record({
            "format": "dynmo-step-1", "step": step, "rank": self._number, "generation": plan.generation, **facts,
            "first_layer": stages[0].first if stages else 0, "layers": sum(stage.count for stage in stages), "frozen_layers": frozen,
        })
        self._log.load(step, frozen, decisions)

    def decision(self, step: int, decisions: Decisions) -> None:
        self._log.decision(step, decisions)

    def moved(self, step: int, layers: int, bytes: int, seconds: float, plan: Plan) -> None:
        self._moved += layers
        self._log.moved(step, layers, bytes, seconds, plan.document())

    def close(self, step: int, profile: Any) -> None:
        """Ends the files; the summary and the profile of rank 0 are written where a step was done."""
        self._log.event("end", step)
        if self._number == 0 and profile is not None and self._facts:
            self._log.finish(self._summary(), profile)
        self._log.close()

    def _summary(self) -> dict[str, Any]:
        def mean(name: str) -> float:
            return sum(facts[name] for facts in self._facts) / len(self._facts)

        run = {
            "name": "dynmo.torch", "tokens_per_s": mean("tokens") / mean("step_s"), "step_time_s": mean("step_s"),
            "loss_first": self._facts[0]["loss"], "loss_last": self._facts[-1]["loss"], "loss_digest": "", "bubble": mean("bubble"),
            "imbalance": mean("imbalance"), "ranks": self._ranks, "replicas": self._replicas, "steps": len(self._facts),
            "seconds": mean("step_s") * len(self._facts),
        }
        return {
            "format": "dynmo-summary-1", "runs": [run], "speedup": 1, "best_speedup": None, "layers_moved": self._moved,
            "overhead": {"profile": 0, "plan": mean("plan_s") / mean("step_s"), "migrate": mean("migrate_s") / mean("step_s")},
            "predicted_step_time_s": self._facts[-1]["predicted_s"], "measured_step_time_s": mean("step_s"),
        }
