# SPDX-License-Identifier: Apache-2.0
"""The files of a run with run="folder": records, events, load trace, summary and profile, in the formats of `dynmo train`."""
from __future__ import annotations

import logging
import math
import os
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Optional, Union

from .._core import Decisions, RunLog, program
from ..errors import BadInputError
from .exchange import Told
from .live import Balancer
from .program import Plan
from .ranks import Ranks

Path = Union[str, "os.PathLike[str]"]


@dataclass(frozen=True)
class Outputs:
    """The outputs of a step's numbers in addition to the records, and the peak FLOP/s for MFU."""

    run: Optional[Path]
    metrics: Sequence[str] = ()
    port: int = 0  # of rank 0 on 127.0.0.1; 0: none
    peak_flops: float = 0.0  # FLOP/s of a rank's device; 0: not given

    def __post_init__(self) -> None:
        path = None if self.run is None else os.fspath(self.run)
        if path is not None and (not isinstance(path, str) or not path or "\0" in path):
            raise BadInputError(f"run={self.run!r}, wanted the path of a folder")
        if isinstance(self.metrics, str):
            raise BadInputError(f"metrics={self.metrics!r}, wanted a list of names: [{self.metrics!r}]")
        given = {"metrics": self.metrics, "metrics_port": self.port, "peak_flops": self.peak_flops}
        for name, value in given.items():
            if value and self.run is None:
                raise BadInputError(f"{name}={value!r} without run, wanted run=FOLDER, where they are written")
        if self.peak_flops and not self.metrics and not self.port:
            raise BadInputError(f"peak_flops={self.peak_flops!r} without metrics, wanted metrics or metrics_port with it")


@dataclass(frozen=True)
class Recovery:
    """A survived loss of ranks, or ranks that joined. Ranks have the numbers that they had at the start."""

    lost: tuple[int, ...]
    ranks: tuple[int, ...]
    step: int  # the first step that is repeated
    again: int
    seconds: float
    joined: tuple[int, ...] = ()

    def __str__(self) -> str:
        came = [f"joined: {joined(self.joined)}"] if self.joined else []
        gone = [f"lost ranks: {joined(self.lost)}"] if self.lost or not came else []
        return (
            f"{'; '.join(gone + came)}; on with ranks {joined(self.ranks)} from step {self.step} ({self.again} steps again), "
            f"in {self.seconds * 1e3:.0f} ms"
        )


def _measured(value: float) -> Optional[float]:
    """Returns None for NaN and Inf, which JSON does not have."""
    return value if math.isfinite(value) else None


def joined(numbers: Sequence[int]) -> str:
    return ", ".join(map(str, numbers))


class Record:
    """The files of one rank. Rank p of replica r has number r x P + p. The lowest rank that is left also has the events and the load
    trace.
    """

    def __init__(self, outputs: Outputs, ranks: Ranks, settings: Mapping[str, int], logger: logging.Logger,
                 rows: "Sequence[Sequence[int]] | None" = None, member: int = -1) -> None:
        """Makes the files of a rank. `rows` are the ranks at the start, and `member` the number of this one if it has joined since.
        `settings` are steps, micro_batches and accumulation.
        """
        assert outputs.run is not None
        start = ranks.layout if rows is None else rows
        self._numbers = {number: replica * len(row) + rank for replica, row in enumerate(start) for rank, number in enumerate(row)}
        self._number = self._number_of(ranks.number if rows is None else member)
        self._log = RunLog(os.fspath(outputs.run), self._number, ranks=ranks.world, replicas=ranks.replicas, metrics=list(outputs.metrics),
                           metrics_port=outputs.port, peak_flops=outputs.peak_flops)
        self._logger, self._step_flops = logger, 0.0
        self._ranks, self._settings = ranks, settings
        self._begun = False

    def begin(self, step: int, plan: Plan) -> None:
        """Opens the files before this rank's first step. All ranks call it together."""
        def opened() -> tuple[None, dict[str, str]]:
            self.open(step, plan)
            return None, {}

        if not self._begun:
            self._ranks.attempt("run", opened)

    def open(self, step: int, plan: Plan) -> None:
        self._log.begin(step, plan.document(), self._settings["accumulation"])
        self._begun = True
        self._log.event("start", step, {"plan": plan.document(), "ranks": self._ranks.world, "steps": self._settings["steps"],
                                        "micro_batches": self._settings["micro_batches"], "program": program})

    def go_back(self, step: int) -> None:
        """Goes back to the step of a checkpoint that was loaded."""
        if self._begun:
            self._log.go_on(step, False, [], self._ranks.world)

    def step(self, step: int, plan: Plan, frozen: int, facts: dict[str, Any], told: Told, balancer: Optional[Balancer],
             flops_per_token: float) -> None:
        """Records a completed step of this rank. Without `balancer` only its loss and its tokens are known.

        `flops_per_token`: FLOPs of the products of a forward pass; 0: unknown.
        """
        rank, ranks = self._ranks.rank, self._ranks.size
        facts |= {"loss": _measured(facts["loss"]), "tokens": int(told.tokens)}
        if balancer is None:
            facts = {"loss": facts["loss"], "tokens": facts["tokens"], "step_s": None, "busy_s": None, "imbalance": None, "bubble": None}
        else:
            own = told.ranks[self._ranks.replica * ranks + rank] if rank < ranks else {"busy_s": 0.0}
            facts |= {**balancer.facts, "busy_s": own["busy_s"]}
        step_flops = 3 * flops_per_token * facts["tokens"]  # F, I and W
        if step_flops != self._step_flops:
            self._step_flops = step_flops
            self._log.set_step_flops(step_flops)
        stages = [stage for stage in plan.stages if stage.rank == rank]
        self._log.record({
            "format": "dynmo-step-1", "step": step, "rank": self._number, "generation": plan.generation, **facts,
            "first_layer": stages[0].first if stages else 0, "layers": sum(stage.count for stage in stages), "frozen_layers": frozen,
        })
        if balancer is not None:
            self._log.load(step, frozen, balancer.decisions)
        self._tell(self._log.failures())

    def _tell(self, failures: Sequence[str]) -> None:
        for failure in failures:
            self._logger.warning("%s; training goes on", failure)
            warnings.warn(f"{failure}; training goes on", RuntimeWarning)

    def decision(self, step: int, decisions: Decisions) -> None:
        self._log.decision(step, decisions)

    def moved(self, step: int, layers: int, bytes: int, seconds: float, plan: Plan) -> None:
        self._log.moved(step, layers, bytes, seconds, plan.document())

    def go_on(self, recovery: Recovery, why: dict[int, str], source: str, plan: Plan) -> None:
        """Goes back to the step of a recovery. `why` has the reason for each lost rank. `source` says where the layers come from."""
        if not self._begun:
            self.open(recovery.step, plan)
        step, ranks = recovery.step, sorted(map(self._number_of, recovery.ranks))
        lost = {self._number_of(rank): f"rank {self._number_of(rank)} {why[rank]}" for rank in recovery.lost}
        self._log.go_on(step, self._number == ranks[0], sorted(lost), len(ranks))
        if not lost:
            before = [number for number in ranks if number not in map(self._number_of, recovery.joined)]
            self._log.event("size", step, {
                "why": "joined", "ranks_before": before, "ranks": ranks, "seconds": recovery.seconds, "plan": plan.document(),
            })
            return
        self._log.event("loss", step + recovery.again, {"lost": sorted(lost), "why": "; ".join(lost[number] for number in sorted(lost))})
        self._log.event("recovery", step, {
            "ranks": ranks, "from": source, "steps_again": recovery.again, "ms": {"all": recovery.seconds * 1e3}, "plan": plan.document(),
        })

    def _number_of(self, member: int) -> int:
        """Returns the number of a member in the files. A member that has joined keeps its own."""
        return self._numbers.get(member, member)

    def close(self, step: int, profile: Any) -> None:
        """Closes the files. The leader writes the summary and the profile if a step was done. Logs what cannot be written."""
        if self._begun:
            self._log.event("end", step)
            if profile is not None:
                self._end(lambda: self._log.finish(step, profile))
        self._end(self._log.close)
        self._tell(self._log.failures())

    def _end(self, write: Callable[[], None]) -> None:
        try:
            write()
        except BadInputError as error:
            self._tell([str(error)])
