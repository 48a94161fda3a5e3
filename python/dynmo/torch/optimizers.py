# SPDX-License-Identifier: Apache-2.0
"""Checks that an optimizer gives the same bits on a rank that has only a part of the parameters.

Torch's own elementwise optimizers are known to. Any other is tried on small copies: parameters are updated together and each alone. When
one is updated alone, the others are on meta without a gradient, as on a rank.
"""
from __future__ import annotations

import copy
from collections import defaultdict
from typing import Any

import torch
from torch import Tensor, nn

from ..errors import BadInputError
from .device import Device
from .ranks import one_line

ELEMENTWISE = (
    torch.optim.SGD, torch.optim.Adam, torch.optim.AdamW, torch.optim.NAdam, torch.optim.RAdam, torch.optim.Adamax, torch.optim.Adagrad,
    torch.optim.Adadelta, torch.optim.RMSprop, torch.optim.Rprop, torch.optim.ASGD,
)
STEPS = 5
EXTENTS = (6, 4, 2, 2, 2)  # shape of a small parameter
NOT_COPIED = ("state", "step")  # "step" is a scheduler's wrapper
HOOKS = ("_optimizer_step_pre_hooks", "_optimizer_step_post_hooks")


def check_optimizer(optimizer: torch.optim.Optimizer, model: nn.Module) -> None:
    """Refuses optimizers that belong to another model, or whose update of a parameter depends on others."""
    name = type(optimizer).__name__
    if isinstance(optimizer, torch.optim.LBFGS):
        raise BadInputError("optimizer: LBFGS evaluates the loss in a closure, wanted one that steps once, such as AdamW")
    own = {id(parameter) for parameter in model.parameters()}
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            if id(parameter) not in own:
                raise BadInputError(
                    f"optimizer: a parameter of shape {tuple(parameter.shape)} is not one of the model, wanted optimizer and "
                    "model to belong together"
                )
    if type(optimizer) in ELEMENTWISE:
        return
    try:
        problem = _Trial(optimizer).difference()
    except Exception as error:
        problem = f"a trial on small parameters ended with {one_line(error)}"
    if problem:
        raise BadInputError(
            f"optimizer: {name} cannot run on ranks that have a part of the parameters each ({problem}), wanted one that updates each "
            "parameter by itself, such as AdamW"
        )


class _Trial:
    """Tries copies of an optimizer, with its settings, on small parameters."""

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        self._optimizer = optimizer
        self._all = [parameter for group in optimizer.param_groups for parameter in group["params"]]
        self._chosen = _two_of_each_kind(optimizer)
        self._device = Device(self._all[0].device) if self._all else Device()

    def difference(self) -> str:
        together = self._run(self._chosen)
        for one in self._chosen:
            apart = self._run([one])
            what = _differs(together, apart, one)
            if what:
                return f"{what} depends on the gradients of other parameters"
        return ""

    def _run(self, trained: list[int]) -> dict[str, Any]:
        """Makes a few updates of the parameters `trained`. Returns their values, their state and the groups' settings."""
        with self._device.forked_random():
            torch.manual_seed(0)
            small = {number: _small(self._all[number], number in trained, number) for number in range(len(self._all))}
            optimizer = self._copy(small)
            for group in optimizer.param_groups:
                if group.get("lr") == 0:  # at the start of a warm-up
                    group["lr"] = 0.01
            for step in range(STEPS):
                for number in trained:
                    small[number].grad = _gradient(small[number], number, step)
                optimizer.step()
                optimizer.zero_grad()
        state = {number: dict(optimizer.state.get(small[number], {})) for number in trained}
        groups = [{key: value for key, value in group.items() if key != "params"} for group in optimizer.param_groups]
        return {"parameters": {number: small[number].detach() for number in trained}, "state": state, "groups": groups}

    def _copy(self, small: dict[int, nn.Parameter]) -> Any:
        memo: dict[int, Any] = {id(self._all[number]): parameter for number, parameter in small.items()}
        made: Any = object.__new__(type(self._optimizer))
        given = {key: value for key, value in self._optimizer.__dict__.items() if key not in (*NOT_COPIED, *HOOKS)}
        made.__dict__.update(copy.deepcopy(given, memo))
        made.__dict__.update({name: type(getattr(self._optimizer, name))() for name in HOOKS if hasattr(self._optimizer, name)})
        made.state = defaultdict(dict)
        for number, parameter in small.items():
            kept = self._optimizer.state.get(self._all[number], {})
            if kept:  # some optimizers create it when they are made
                made.state[parameter] = {key: _small_state(value, self._all[number], parameter) for key, value in kept.items()}
        return made


def _two_of_each_kind(optimizer: torch.optim.Optimizer) -> list[int]:
    """Returns the indices of up to two trained parameters for each group and number of dimensions."""
    chosen: list[int] = []
    place = 0
    for group in optimizer.param_groups:
        counts: dict[int, int] = {}
        for parameter in group["params"]:
            counts[parameter.dim()] = counts.get(parameter.dim(), 0) + 1
            if counts[parameter.dim()] <= 2 and parameter.requires_grad:
                chosen.append(place)
            place += 1
    return chosen


def _small(like: Tensor, trained: bool, number: int) -> nn.Parameter:
    """Returns a small parameter with as many dimensions as `like`. It is on meta unless `trained`."""
    shape = EXTENTS[: like.dim()]
    if not trained:
        return nn.Parameter(torch.empty(shape, dtype=like.dtype, device="meta"), requires_grad=like.requires_grad)
    generator = torch.Generator().manual_seed(number)
    return nn.Parameter(torch.randn(shape, generator=generator).to(like))


def _small_state(value: Any, like: Tensor, parameter: Tensor) -> Any:
    """Returns a copy of a state for the small parameter. A state of the parameter's shape gets the small shape, filled with its first
    number.
    """
    if not isinstance(value, Tensor) or value.shape != like.shape or value.dim() == 0:
        return copy.deepcopy(value)
    first = value.detach().reshape(-1)[0].item()
    return torch.full(parameter.shape, first, dtype=value.dtype, device=parameter.device)


def _gradient(parameter: Tensor, number: int, step: int) -> Tensor:
    """Returns a gradient of mostly one direction, large enough for clipping and for growing step sizes."""
    generator = torch.Generator().manual_seed(1000 + number)
    common = torch.randn(parameter.shape, generator=generator)
    generator.manual_seed(1000 * (step + 2) + number)
    return (3 * common + 0.3 * torch.randn(parameter.shape, generator=generator)).to(parameter)


def _differs(together: dict[str, Any], apart: dict[str, Any], one: int) -> str:
    if not torch.equal(together["parameters"][one], apart["parameters"][one]):
        return "the update of a parameter"
    for key in together["state"][one].keys() | apart["state"][one].keys():
        if not _same(together["state"][one].get(key), apart["state"][one].get(key)):
            return f"its state {key}"
    for first, second in zip(together["groups"], apart["groups"]):
        for key in first:
            if not _same(first[key], second.get(key)):
                return f"its setting {key}"
    return ""


def _same(one: Any, other: Any) -> bool:
    if isinstance(one, Tensor) and isinstance(other, Tensor):
        return one.device == other.device and (one.device.type == "meta" or bool(torch.equal(one, other)))
    if isinstance(one, (tuple, list)) and isinstance(other, (tuple, list)):
        return len(one) == len(other) and all(map(_same, one, other))
    if isinstance(one, dict) and isinstance(other, dict):
        return one.keys() == other.keys() and all(_same(one[key], other[key]) for key in one)
    return type(one) is type(other) and (one == other or repr(one) == repr(other))
