# SPDX-License-Identifier: Apache-2.0
"""The settings that a joining process shares with the ranks, and the facts that they send it (endpoint.py, survival.py)."""
from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from . import checks
from .decoder import Decoder
from .log import open_log
from .pipeline import Pipeline
from .record import Record


def settings_of(pipe: Pipeline, keep: Sequence[Any], terms: Mapping[str, int]) -> dict[str, Any]:
    """Returns the settings that must be equal, as JSON values. `keep` and `terms` are those of a Survivor. Weights are not among them: the
    ranks send theirs.
    """
    shapes = {
        f"list of parameters of layer {layer.name}": checks.digest([(name, tuple(p.shape), p.dtype) for name, p in layer.parameters.items()])
        for layer in pipe._split.layers
    }
    found: dict[str, Any] = json.loads(json.dumps({**pipe._settings, **terms, "keep": [type(kept).__name__ for kept in keep], **shapes}))
    return found


def refusal(own: dict[str, Any], asked: dict[str, Any]) -> str:
    """Returns why a process with the settings `asked` cannot join, or "" if it can."""
    for name in [*own, *asked]:
        if own.get(name) != asked.get(name):
            return f"this process has another {name} than the pipeline: {asked.get(name)}, wanted {own.get(name)}"
    return ""


def facts_of(pipe: Pipeline) -> dict[str, Any]:
    """Returns the facts that a joining process gets in addition to a snapshot. It has not seen the first batch."""
    return {
        "seed": pipe._seed, "kinds": pipe._kinds, "apart": pipe._checked_apart, "flops": pipe._flops_per_token, "saved": pipe._saved,
        "learned": pipe._split.learned if isinstance(pipe._split, Decoder) else None,
    }


def learn(pipe: Pipeline, facts: dict[str, Any]) -> None:
    pipe._seed, pipe._kinds, pipe._checked_apart, pipe._flops_per_token = (facts[name] for name in ("seed", "kinds", "apart", "flops"))
    pipe._saved = facts["saved"]
    if isinstance(pipe._split, Decoder):
        pipe._split.adopt(facts["learned"])


def begin_files(pipe: Pipeline, rows: Sequence[Sequence[int]], member: int) -> None:
    """Opens the log of a process that has joined, and its run files if the run has files."""
    pipe._log = open_log(*pipe._log_at, pipe._ranks, pipe.plan, member)
    if pipe._outputs.run is not None:
        pipe._record = Record(pipe._outputs, pipe._ranks, pipe._counts, pipe._log, rows, member)
        pipe._record.open(pipe.steps, pipe.plan)
