# SPDX-License-Identifier: Apache-2.0
"""Replays the training of a scenario under several policies."""
from __future__ import annotations

import json
import os
from collections.abc import Mapping, Sequence
from typing import Any, Optional, Union

from . import _core, _show


def _toml(value: Any) -> str:
    """Returns a value as TOML. Strings, numbers and arrays of them are as in JSON."""
    if isinstance(value, Mapping):
        return "{" + ", ".join(f"{json.dumps(str(key))} = {_toml(element)}" for key, element in value.items()) + "}"
    if isinstance(value, (list, tuple)):
        return "[" + ", ".join(_toml(element) for element in value) + "]"
    return json.dumps(value)


class Simulation:
    """A scenario's runs."""

    def __init__(self, simulated: _core.Simulated) -> None:
        self._simulated = simulated
        #: "dynmo-simulation-1" as a dict, what `dynmo simulate --json` prints (docs/scenarios.md)
        self.document: dict[str, Any] = simulated.document

    @property
    def runs(self) -> dict[str, dict[str, Any]]:
        """Returns the runs by name."""
        return {run["name"]: run for run in self.document["runs"]}

    @property
    def scenario(self) -> str:
        """Returns the resolved scenario as TOML."""
        return self._simulated.scenario

    @property
    def decisions(self) -> str:
        """Returns a line for each decision, with its reason."""
        return self._simulated.decisions()

    @property
    def trace(self) -> str:
        """Returns the last `trace_steps` of every run as JSON for Perfetto."""
        return self._simulated.trace()

    def __str__(self) -> str:
        return self._simulated.report()

    def __repr__(self) -> str:
        return f"<dynmo.Simulation of {', '.join(self.runs)}>"

    def _repr_html_(self) -> str:
        keys = ("name", "tokens_per_s", "step_time_s", "bubble", "imbalance")
        rows = [[run[key] if key == "name" else f"{run[key]:.4g}" for key in keys] for run in self.document["runs"]]
        return _show.table(keys, rows)


def simulate(
    scenario: Union[str, "os.PathLike[str]", Mapping[str, Any]],
    settings: Optional[Mapping[str, Any]] = None,
    *,
    compare: Sequence[str] = (),
    trace_steps: int = 0,
) -> Simulation:
    """Replays a scenario (a file, or its tables as a dict) under policies, as `dynmo simulate` does.

    `settings` changes keys, such as {"training.steps": 100}; `compare` names the policies.
    """
    if isinstance(scenario, Mapping):
        tables = {name: dict(table) if isinstance(table, Mapping) else table for name, table in scenario.items()}
        for key, value in (settings or {}).items():
            table, _, name = key.partition(".")
            tables.setdefault(table, {})[name] = value
        text = "".join(f"{json.dumps(name)} = {_toml(table)}\n" for name, table in tables.items())
        return Simulation(_core.simulate_text(text, list(compare), trace_steps))
    changes = [f"{key}={value if isinstance(value, str) else _toml(value)}" for key, value in (settings or {}).items()]
    return Simulation(_core.simulate_file(os.fspath(scenario), changes, list(compare), trace_steps))
