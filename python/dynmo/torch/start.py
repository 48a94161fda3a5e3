# SPDX-License-Identifier: Apache-2.0
"""The start of a pipeline: splitting, comparing ranks, the first plan, ties in the optimizer."""
from __future__ import annotations

import contextlib
import json
import sys
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any, Optional

import torch
from torch import Tensor, nn

from .. import Plan as CorePlan, __version__ as dynmo_version, plan as make_plan
from ..errors import BadInputError
from . import checks, selfcheck
from .channels import channels_of
from .decoder import Decoder
from .layers import LOSS, Layer, Split, Values
from .marks import Marks, Stamps
from .optimizers import check_optimizer
from .program import KINDS, Plan, read_plan
from .ranks import Ranks
from .sequence import Between, Sequential


def split_of(
    model: Optional[nn.Module],
    layers: Optional[Sequence[tuple[str, nn.Module]]],
    loss_fn: Optional[Callable[[Any, Any], Tensor]],
    hidden: Optional[Callable[[Any], Between]],
    limits: bool,
    optimizer: Optional[torch.optim.Optimizer],
) -> Split:
    """Returns the layers of a decoder, or of a list of modules, after checks."""
    if (model is None) == (layers is None):
        raise BadInputError("Pipeline: wanted either a model or layers=[(name, module), ...]")
    split: Split
    if layers is not None:
        if loss_fn is None or hidden is None:
            raise BadInputError("Pipeline: layers= goes with loss_fn=(output, target) and hidden=(input), which gives a tensor of "
                                "the shape and type between two layers, or a dictionary of them")
        for _, module in layers:
            checks.check_model(module)
        split = Sequential(layers, loss_fn, hidden, limits)
        model = split.module
    else:
        assert model is not None
        checks.check_model(model)
    if optimizer is not None:
        check_optimizer(optimizer, model)
    _check_versions()
    if layers is None:
        split = selfcheck.split_decoder(model)
    return split


def versions() -> dict[str, str]:
    """Returns the versions of programs that must be equal on all ranks."""
    found = {"version of dynmo": dynmo_version, "version of torch": str(torch.__version__)}
    transformers = sys.modules.get("transformers")
    return found if transformers is None else {**found, "version of transformers": transformers.__version__}


def _check_versions() -> None:
    found = versions()
    for name, tested in (("torch", checks.TESTED_TORCH), ("transformers", checks.TESTED_TRANSFORMERS)):
        version = found.get(f"version of {name}")
        if version is not None and not version.startswith(tuple(series + "." for series in tested)):
            warnings.warn(f"dynmo.torch is tested with {name} {', '.join(tested)}, here is {version}; the split is checked, so it goes on")


def agreed_split(ranks: Ranks, make: Callable[[], Split]) -> tuple[Split, bool]:
    """Returns the split, and whether training draws random numbers. All ranks raise the same error if one cannot split, or if splits
    differ.
    """

    def split_and_check() -> tuple[tuple[Split, bool], dict[str, Any]]:
        split = make()
        draws = selfcheck.draws_random_numbers(split) if isinstance(split, Decoder) else _has_dropout(split.module)
        if ranks.size > 1 and (trouble := checks.check_free(pair for layer in split.layers for pair in layer.parameters.items())):
            raise BadInputError(f"model: {trouble}")
        return (split, draws), {"model": [layer.name for layer in split.layers], "dropout": draws, "kind of device": split.device.type, **_fingerprint(split)}

    return ranks.attempt("model: its split", split_and_check)


def _fingerprint(split: Split) -> dict[str, str]:
    """Returns a digest of each layer's weights and requires_grad flags."""
    return {
        f"initial value or requires_grad flag in layer {layer.name}":
            f"{checks.digest({name: (p.detach(), p.requires_grad) for name, p in layer.parameters.items()}):012x}"
        for layer in split.layers
    }


def describe_optimizer(optimizer: Optional[torch.optim.Optimizer]) -> dict[str, Any]:
    if optimizer is None:
        return {"optimizer": "None"}
    found: dict[str, Any] = {"optimizer": type(optimizer).__name__, "number of optimizer groups": len(optimizer.param_groups)}
    for number, group in enumerate(optimizer.param_groups):
        found[f"number of parameters in optimizer group {number}"] = len(group["params"])
        found.update({f"{key} of optimizer group {number}": repr(value) for key, value in group.items() if key != "params"})
    return found


def describe_plan(given: Any) -> Any:
    """Returns a plan as text, which ranks compare."""
    return json.dumps(document_of(given), sort_keys=True, default=repr)


def document_of(given: Any) -> Any:
    """Returns the document of a plan, which may be a dynmo.Plan."""
    return given.document if isinstance(given, CorePlan) else given


def seed_of(draws: bool, seed: Optional[int], ranks: Ranks) -> Optional[int]:
    """Returns the seed of keyed random numbers: the given one, or if training draws some, PyTorch's of rank 0."""
    if not draws:
        return seed
    chosen = int(ranks.gather(torch.initial_seed())[0]) if seed is None else seed
    if ranks.number == 0:
        warnings.warn(
            f"the model draws random numbers (dropout): they follow from seed {chosen}, layer, step and micro-batch, so that no cut "
            "changes them; one rank of dynmo.torch draws the same, a plain loop others"
        )
    return chosen


def _has_dropout(module: nn.Module) -> bool:
    """Returns whether a module of torch has dropout. Calls of torch.nn.functional.dropout are not known before a batch runs."""
    kinds: tuple[tuple[Any, str], ...] = ((nn.modules.dropout._DropoutNd, "p"), (nn.MultiheadAttention, "dropout"), (nn.RNNBase, "dropout"))
    return any(isinstance(part, kind) and getattr(part, rate) > 0 for part in module.modules() for kind, rate in kinds)


def untie_optimizer(split: Split, optimizer: Optional[torch.optim.Optimizer]) -> None:
    """Adds the second parameter of each tie to the optimizer's group of the first, with a copy of its state."""
    if optimizer is None:
        return
    for tie in split.ties:
        first, second = split.layers[tie.layers[0]].parameters[tie.first], split.layers[tie.layers[1]].parameters[tie.second]
        for group in optimizer.param_groups:
            if any(parameter is first for parameter in group["params"]):
                group["params"].append(second)
        if first in optimizer.state:
            optimizer.state[second] = {
                key: value.clone() if isinstance(value, Tensor) else value for key, value in optimizer.state[first].items()
            }


def copy_ties(split: Split) -> None:
    """Gives the second parameter of each tie the value of the first, after weights of the model before the split were loaded."""
    with torch.no_grad():
        for tie in split.ties:
            split.layers[tie.layers[1]].parameters[tie.second].copy_(split.layers[tie.layers[0]].parameters[tie.first])


@contextlib.contextmanager
def tied_optimizer(split: Split, optimizer: torch.optim.Optimizer) -> Iterator[None]:
    """Takes the second parameter of each tie out of the optimizer while it is active, to load a state that was saved before the split."""
    copies = {id(split.layers[tie.layers[1]].parameters[tie.second]) for tie in split.ties}
    for group in optimizer.param_groups:
        group["params"][:] = [parameter for parameter in group["params"] if id(parameter) not in copies]
    try:
        yield
    finally:
        untie_optimizer(split, optimizer)


# --- The first plan. ---


def _bytes(layer: Layer) -> int:
    return sum(parameter.numel() * parameter.element_size() for parameter in layer.parameters.values())


def _times(split: Split) -> list[tuple[float, float]]:
    """Returns the forward and backward seconds of each layer: measured on a few tokens, or for the user's own layers by parameters."""
    if not isinstance(split, Decoder):
        return _by_parameters(split)
    batch = selfcheck.sample_batch(split.module)
    best: list[tuple[float, float]] = []
    for _ in range(3):
        marks = Marks(len(split.layers), split.device.clock)
        forward_backward(split, batch, marks)
        split.device.clock.wait()
        marks.settle()
        now = list(zip(marks.forward_s, marks.backward_s))
        best = now if not best else [(min(f, g), min(b, c)) for (f, b), (g, c) in zip(best, now)]
    return best


def _by_parameters(split: Split) -> list[tuple[float, float]]:
    return [(1e-9 * (_bytes(layer) + 1), 2e-9 * (_bytes(layer) + 1)) for layer in split.layers]


def forward_backward(split: Split, batch: Mapping[str, Any], marks: Marks) -> None:
    """Runs all layers forward and backward once. Drops the gradients."""
    context = split.begin(batch, 0)
    stamps: Stamps = []
    values: Values = {}
    with selfcheck.unnoticed(split.module, split.device):
        for layer in range(len(split.layers)):
            with marks.forward(layer):
                values = split.run(layer, values, context)
            if layer + 1 < len(split.layers):
                marks.watch(values, stamps, layer)
        if values[LOSS].requires_grad:
            with marks.backward(len(split.layers) - 1, stamps):
                values[LOSS].backward()  # type: ignore[no-untyped-call]


def profile_of(split: Split, times: Sequence[tuple[float, float]]) -> dict[str, Any]:
    """Returns the costs of the layers, a "dynmo-profile-1"."""
    layers = [
        {
            "name": layer.name, "forward_s": forward, "backward_input_s": backward / 2, "backward_weight_s": backward / 2,
            "parameter_bytes": _bytes(layer), "gradient_bytes": _bytes(layer), "optimizer_bytes": 2 * _bytes(layer), "frozen": layer.frozen,
        }
        for layer, (forward, backward) in zip(split.layers, times)
    ]
    return {"format": "dynmo-profile-1", "layers": layers}


def first_plan(
    split: Split, ranks: Ranks, micro_batches: int, schedule: str, given: Any, lane: str
) -> Plan:
    """Returns the user's plan, or the planner's for times that rank 0 measures. Opens the channels that the plan needs."""
    ranks.use_device(split.device.device, lane)
    plan = _first_plan(split, ranks, micro_batches, schedule, given)
    ranks.open(channels_of(plan, split.ties, ranks.layout))
    return plan


def _first_plan(split: Split, ranks: Ranks, micro_batches: int, schedule: str, given: Any) -> Plan:
    if given is not None:
        return read_plan(document_of(given), ranks.size, len(split.layers))
    if schedule not in KINDS:
        raise BadInputError(f"schedule: {schedule}, wanted {', '.join(KINDS)}")
    times = ranks.attempt("model: its first measurement", lambda: (_times(split) if ranks.number == 0 else [], {}))
    costs = profile_of(split, ranks.gather(times)[0])
    plan = _planned(costs, ranks.size, micro_batches, schedule)
    ranks.agree({"first plan": plan.cut})  # processors may round differently
    return plan


def next_plan(split: Split, ranks: Ranks, micro_batches: int, old: Plan, measured: Optional[dict[str, Any]]) -> Plan:
    """Returns the planner's plan for the ranks that are left. Costs are those that rank 0 has measured, else by parameters."""
    told = ranks.gather((measured, old.schedule, old.generation))
    costs, schedule, _ = told[0]
    costs = costs or profile_of(split, _by_parameters(split))
    try:
        plan = _planned(costs, ranks.size, micro_batches, schedule)
    except BadInputError:
        plan = _planned(costs, ranks.size, micro_batches, "1f1b")  # the schedule does not fit this number of ranks
    ranks.agree({"plan after a loss": plan.cut})
    ranks.open(channels_of(plan, split.ties, ranks.layout))
    return replace(plan, generation=max(generation for _, _, generation in told) + 1)


def _planned(costs: Mapping[str, Any], size: int, micro_batches: int, schedule: str) -> Plan:
    balancer = "search" if schedule == "adaptive" else "optimal"
    layers = len(costs["layers"])
    planned = make_plan(costs, ranks=min(size, layers), micro_batches=micro_batches, balancer=balancer, schedule=schedule)
    return read_plan({**planned.document, "ranks": size}, size, layers)
