# SPDX-License-Identifier: Apache-2.0
"""Documents of plans."""


def plan_of(counts, kind="1f1b", ranks=None, owners=None, generation=0):
    """A "dynmo-plan-1" of stages with `counts` layers, in their order; a stage of none is left out.

    A stage is on the rank that `owners` names, or on its number modulo `ranks`, as torch places them. There is a rank a stage if `ranks`
    is not given.
    """
    ranks = ranks or len(counts)
    stages = [
        {"stage": index, "rank": owners[index] if owners else index % ranks, "first_layer": sum(counts[:index]), "layers": count}
        for index, count in enumerate(counts) if count > 0
    ]
    return {"format": "dynmo-plan-1", "ranks": ranks, "generation": generation, "schedule": kind, "stages": stages}
