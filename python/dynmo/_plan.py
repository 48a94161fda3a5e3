# SPDX-License-Identifier: Apache-2.0
"""Plans and comparisons of plans. The core makes them, and this module shows them."""
from __future__ import annotations

import json
import os
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Optional, Union

from . import _core, _show
from ._costs import question_of, read_json
from .errors import BadInputError, InfeasibleError

Path = Union[str, "os.PathLike[str]"]


def _document(value: Any) -> Any:
    """Returns a documented format as a dict, from a dict, a file or a Plan."""
    if isinstance(value, Plan):
        return value.document
    return read_json(value) if isinstance(value, (str, os.PathLike)) else value


@dataclass(frozen=True)
class Emitted:
    """A plan in another program's format: texts by name of file, and the settings to use with them."""

    files: dict[str, str]
    note: str


class Plan:
    """The layers of each rank, their order, and the resulting time of a step."""

    def __init__(self, planned: _core.Planned) -> None:
        self._planned = planned
        #: "dynmo-plan-1" as a dict, what `dynmo plan --json` prints (docs/formats.md)
        self.document: dict[str, Any] = planned.document

    @property
    def ranks(self) -> int:
        return int(self.document["ranks"])

    @property
    def stages(self) -> list[dict[str, Any]]:
        return list(self.document["stages"])

    @property
    def step_time_s(self) -> float:
        return float(self.document["step_time_s"])

    @property
    def ideal_step_time_s(self) -> float:
        return float(self.document["ideal_step_time_s"])

    @property
    def bubble(self) -> float:
        return float(self.document["bubble"])

    @property
    def costs(self) -> dict[str, Any]:
        """Returns the layers' costs that the plan is made for, a "dynmo-profile-1"."""
        return self._planned.costs

    @property
    def slices(self) -> list[_show.Slice]:
        """Returns the actions of a step: (rank, kind, stage, micro-batch, start, end), times in nanoseconds."""
        return self._planned.slices()

    @property
    def timeline(self) -> Any:
        """Returns the slices as a structured array of numpy."""
        import numpy

        fields = [("rank", "i4"), ("kind", "U6"), ("stage", "i4"), ("micro_batch", "i4"), ("start_ns", "i8"), ("end_ns", "i8")]
        return numpy.array(self.slices, dtype=fields)

    @property
    def trace(self) -> str:
        """Returns the step as JSON for Perfetto."""
        return self._planned.trace()

    def report(self, width: int = 100, ascii: bool = False) -> str:
        """Returns the text that `dynmo plan` prints."""
        return self._planned.report(width, ascii)

    def emit(self, form: str, folder: Optional[Path] = None, *, module_names: bool = False) -> Emitted:
        """Writes the plan for others, as `dynmo plan --emit` does, and returns the files.

        `form`: "torchtitan" (its keys and the order of the step), "megatron" (its layout) or "csv" (the order of the step, for
        torch.distributed.pipelining). `folder`: where the files go; without it none is written. `module_names`: the layers are
        called like the model's modules, so that no name is translated. A BadInputError says what the form cannot say; plan with
        `form=` to get a plan that it can.
        """
        files, note = self._planned.emit(form, str(folder or "."), module_names, folder is not None)
        return Emitted(dict(files), note)

    def save(self, path: Path) -> None:
        """Writes the plan, for `dynmo plan --from` or `current=`."""
        with open(path, "w", encoding="utf-8") as file:
            file.write(json.dumps(self.document, indent=1) + "\n")

    def plot(self, ax: Any = None) -> Any:
        """Draws the step with matplotlib, and returns the axes."""
        return _show.figure(self, ax)

    def __str__(self) -> str:
        return self.report()

    def __repr__(self) -> str:
        counts = "|".join(str(stage["layers"]) for stage in self.stages)
        return f"<dynmo.Plan {self.document['schedule']} {counts} on {self.ranks} ranks, {self.step_time_s * 1e3:.3f} ms a step>"

    def _repr_html_(self) -> str:
        rows = [
            (
                stage["stage"],
                stage["rank"],
                f"{stage['first_layer']} to {stage['first_layer'] + stage['layers'] - 1}",
                f"{stage['time_s'] * 1e3:.3f}",
                f"{stage['memory_bytes'] / 2**20:.1f}",
            )
            for stage in self.stages
        ]
        header = ("stage", "rank", "layers", "ms a micro-batch", "MiB")
        line = (
            f"<p>{self.document['schedule']}: {self.step_time_s * 1e3:.3f} ms a step, "
            f"{self.step_time_s / self.ideal_step_time_s:.3f} x ideal, bubble {100 * self.bubble:.1f} %</p>"
        )
        return line + _show.table(header, rows) + _show.svg(self.slices, self.ranks, self.step_time_s)


def _question(costs: Any, options: dict[str, Any]) -> dict[str, Any]:
    given = {name: value for name, value in options.items() if value is not None}
    for name in ("cluster", "current"):
        if name in given:
            given[name] = _document(given[name])
    question = {**question_of(costs), **given}
    if "config" in question and "device" in question and "sequence" in question:
        question = _counted(question)
    return question


def _counted(question: dict[str, Any]) -> dict[str, Any]:
    """Returns the question. Counted layers replace a config without formulas in the core."""
    sizes = {name: question[name] for name in ("config", "device")}
    try:
        _core.work_of({**sizes, "sequence": 1})
        return question
    except BadInputError as error:
        refusal = error
    try:
        from . import _meta

        unplanned = re.search(r"/(\w+) is .*, which is not planned in a model of type", str(refusal))
        tokens = (int(question["sequence"]), int(question.get("micro_batch_size", 1)))
        layers = _meta.work_of(question["config"], *tokens, needed=unplanned[1] if unplanned else None)
    except ImportError:
        raise refusal from None
    except Exception as error:  # from transformers: no class for the config, or a model that needs data to run
        raise BadInputError(f"{refusal}; with transformers: {error}".replace("\n", " ")) from error
    return {**{name: value for name, value in question.items() if name != "config"}, "work": layers}


def plan(
    costs: Any,
    ranks: Optional[int] = None,
    *,
    micro_batches: int = 32,
    balancer: str = "search",
    schedule: str = "auto",
    cluster: Any = None,
    memory: Union[int, str, None] = None,
    head_room: Optional[float] = None,
    current: Any = None,
    recompute: Optional[str] = None,
    place: bool = False,
    pack: bool = False,
    slack: Optional[float] = None,
    evaluations: Optional[int] = None,
    device: Optional[str] = None,
    sequence: Optional[int] = None,
    micro_batch_size: Optional[int] = None,
    head_slices: Optional[int] = None,
    tensor_parallel: Optional[int] = None,
    optimizer_shards: Optional[int] = None,
    granularity: Optional[str] = None,
    form: Optional[str] = None,
) -> Plan:
    """Plans the layers of each of `ranks`, as `dynmo plan` does. The arguments are its flags.

    `costs`: a profile (dict or path), a list of layers, a DataFrame or dict of columns, or a Hugging Face config with
    `device` and `sequence`. A config without formulas in the core is counted in the model that transformers builds.
    `cluster` ("dynmo-cluster-1") replaces `ranks`. `current` is the plan in force. `granularity` is "half" or "block", what moves on
    its own. With `form` only plans are made that `Plan.emit(form)` can write; then the default granularity is "block".

    >>> import dynmo
    >>> layers = {"forward_s": [1, 1, 2], "backward_input_s": [1, 1, 2], "backward_weight_s": [1, 1, 2]}
    >>> dynmo.plan(layers, ranks=2, micro_batches=4, balancer="time", schedule="1f1b")
    <dynmo.Plan 1f1b 2|1 on 2 ranks, 30000.000 ms a step>
    """
    options = dict(locals())
    return Plan(_core.make_plan(_question(options.pop("costs"), options)))


class Comparison:
    """Plans of several balancers for the same question, or None if a balancer found none that fits."""

    def __init__(self, plans: dict[str, Optional[Plan]]) -> None:
        self.plans = plans

    def __getitem__(self, balancer: str) -> Optional[Plan]:
        return self.plans[balancer]

    def __iter__(self) -> Iterator[str]:
        return iter(self.plans)

    def __len__(self) -> int:
        return len(self.plans)

    def _rows(self) -> list[tuple[str, ...]]:
        rows: list[tuple[str, ...]] = []
        for balancer, one in self.plans.items():
            if one is None:
                rows.append((balancer, "", "does not fit", "", ""))
                continue
            ratio = one.step_time_s / one.ideal_step_time_s
            rows.append(
                (balancer, one.document["schedule"], f"{one.step_time_s * 1e3:.3f}", f"{ratio:.3f}", f"{100 * one.bubble:.1f}")
            )
        return rows

    _HEADER = ("balancer", "schedule", "ms a step", "x ideal", "bubble %")

    def __str__(self) -> str:
        lines = [self._HEADER, *self._rows()]
        widths = [max(len(line[column]) for line in lines) for column in range(len(self._HEADER))]
        return "\n".join("  ".join(cell.ljust(width) for cell, width in zip(line, widths)).rstrip() for line in lines)

    __repr__ = __str__

    def _repr_html_(self) -> str:
        return _show.table(self._HEADER, self._rows())


def compare(
    costs: Any, ranks: Optional[int] = None, *, balancers: Sequence[str] = ("uniform", "time", "optimal", "search"), **options: Any
) -> Comparison:
    """Makes a plan with each of `balancers`. The other arguments are those of `plan`; `evaluations` goes to the search alone."""
    plans: dict[str, Optional[Plan]] = {}
    for balancer in balancers:
        wanted = dict(options)
        if balancer != "search" and "search" in balancers:
            wanted.pop("evaluations", None)
        try:
            plans[balancer] = plan(costs, ranks, balancer=balancer, **wanted)
        except InfeasibleError:
            plans[balancer] = None
    return Comparison(plans)


def model_costs(
    config: Any,
    *,
    device: str,
    sequence: int,
    micro_batch_size: int = 1,
    head_slices: int = 1,
    tensor_parallel: int = 1,
    optimizer_shards: int = 1,
) -> dict[str, Any]:
    """Returns the costs of a Hugging Face config by formulas, a "dynmo-profile-1" to read or change."""
    options = dict(locals())
    del options["config"]
    return _core.costs_of(_question(config, options))
