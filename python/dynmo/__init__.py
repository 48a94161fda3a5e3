# SPDX-License-Identifier: Apache-2.0
"""DynMo's planner, schedules and simulator (docs/python.md).

The command line and this package are two ways to the same code: the same question has the same answer.
"""
from ._core import Schedule, balancers, devices, schedule_kinds, version as __version__
from ._plan import Comparison, Emitted, Plan, compare, model_costs, plan
from ._simulate import Simulation, simulate
from .errors import BadInputError, DynmoError, InfeasibleError, RankLostError

__all__ = [
    "BadInputError",
    "Comparison",
    "DynmoError",
    "Emitted",
    "InfeasibleError",
    "Plan",
    "RankLostError",
    "Schedule",
    "Simulation",
    "__version__",
    "balancers",
    "compare",
    "devices",
    "model_costs",
    "plan",
    "schedule_kinds",
    "simulate",
]
