# SPDX-License-Identifier: Apache-2.0
"""Splits any decoder of transformers by its own forward.

The model's forward runs with stand-ins for its blocks. Up to the blocks this gives the embedding's output and the arguments of every block
(masks, rotary tables). Behind the blocks, the stand-in of the last one returns the hidden tensor that has arrived. Then the model's own
code runs norm, head and loss. So no code here depends on a family of models.
"""
from __future__ import annotations

import contextlib
import enum
import inspect
import math
from collections import OrderedDict
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any, Optional

import torch
from torch import Tensor, nn

from ..errors import BadInputError
from . import checks
from .device import device_of
from .layers import HIDDEN, LOSS, Context, Layer, MicroBatch, Spec, Tie, Values
from .routers import Mode, Routers
from .stand_ins import (
    BlockStandIn, FrontStandIn, Given, Path, at, hidden_path, replaced, shape_before_width, tensors_of, with_fresh_caches, with_tensors,
    without_caches,
)

MAX_NOTES = 64


@dataclass
class Notes:
    """The arguments of each block without the hidden tensor, and that tensor's place in them and its shape and type."""

    arguments: list[Given]
    places: list[Path]
    first: Spec


class Caches(enum.Enum):
    """The values that blocks get in place of the model's cache of keys and values."""

    DROPPED = "nothing; the model makes a cache, since its masks may depend on one"
    OFF = "nothing; the model is given use_cache=False"
    FRESH = "an empty cache each, since keys out of a cache may have another layout in memory, hence other bits"


class _Enough(Exception):
    """Ends a forward once all blocks have their arguments, because the rest is not needed."""


def _check_shape(index: int, hidden: Tensor, result: Tensor) -> None:
    if result.shape != hidden.shape or result.dtype != hidden.dtype:
        raise BadInputError(
            f"block {index} takes {tuple(hidden.shape)} in {hidden.dtype} and gives {tuple(result.shape)} in {result.dtype}, "
            "wanted blocks that keep shape and type"
        )


def _hidden_of(index: int, output: Any) -> Tensor:
    result = output[0] if isinstance(output, (tuple, list)) and output else output
    if not isinstance(result, Tensor):
        raise BadInputError(f"block {index} gives a {type(result).__name__}, wanted the hidden tensor")
    return result


def text_config(model: nn.Module) -> Any:
    """Returns the config of the decoder, which is a part of the config in a model of pictures and text."""
    config: Any = getattr(model, "config", None)
    return config.get_text_config() if hasattr(config, "get_text_config") else config


def find_blocks(model: nn.Module) -> tuple[str, nn.ModuleList]:
    """Returns the list of blocks and its name. Raises BadInputError unless there is exactly one."""
    config = text_config(model)
    counts = {name: getattr(config, name, None) for name in ("num_hidden_layers", "num_layers")}
    for count in counts.values():
        found = _lists_of(model, count)
        if len(found) == 1:
            return found[0]
    wanted = counts["num_hidden_layers"]
    raise BadInputError(
        f"model: {type(model).__name__} has {len(_lists_of(model, wanted))} lists of config.num_hidden_layers ({wanted}) blocks, wanted a "
        "decoder with one; split it yourself with layers=[(name, module), ...]"
    )


def _lists_of(model: nn.Module, count: Any) -> list[tuple[str, nn.ModuleList]]:
    """Returns the outermost ModuleLists with `count` modules."""
    found = [
        (name, module) for name, module in model.named_modules() if isinstance(module, nn.ModuleList) and len(module) == count and count > 0
    ]
    return [pair for pair in found if not any(other is not pair and pair[0].startswith(other[0] + ".") for other in found)]


class Decoder:
    """A causal language model of transformers as layers: embedding, blocks, head."""

    def __init__(self, model: nn.Module) -> None:
        self.module, self.device = model, device_of("model", [model])
        self.blocks_name, self._blocks = find_blocks(model)
        self._real = list(self._blocks)
        self._places = [(self._blocks, str(index)) for index in range(len(self._real))]
        self._outputs = [0] * len(self._real)
        self._front: list[nn.Module] = []
        self._front_places: list[tuple[nn.Module, str]] = []
        self._zeros: list[nn.Module] = []
        self._behind: list[nn.Module] = []
        self._around: list[nn.Module] = []
        self.layers: list[Layer] = []
        self.ties: list[Tie] = []
        self.notes_follow_shapes = False  # whether notes are equal for equal shapes and masks, whatever the ids
        self._cache: OrderedDict[Any, Notes] = OrderedDict()
        self.limits, self.forces_gradients = False, False
        # Arguments of blocks that depend on the embedding's weights, by block and place. Boundaries carry them.
        self.carried: dict[tuple[int, Path], str] = {}
        self.routers = Routers(model, self._real, text_config(model))
        self._takes_cache = _takes(model, "use_cache")
        self.caches = Caches.DROPPED

    @property
    def width(self) -> int:
        return 1 + len(set(self.carried.values())) + len(self.routers)

    # --- What runs in front of the blocks and behind them, found by running the model once. ---

    def probe(self, batch: MicroBatch) -> None:
        """Runs the whole model once to find the modules in front of the blocks and behind them, and the outputs of the blocks."""
        owners = {id(module): name for name, module in self.module.named_modules() if module._parameters}
        inside = {id(module) for block in self._real for module in block.modules()}
        called: dict[str, list[nn.Module]] = {"front": [], "behind": []}
        phase = ["front"]
        widths: dict[int, tuple[Optional[int], torch.dtype]] = {}
        handles = []

        def enter(module: nn.Module, _: Any) -> None:
            if module not in called[phase[0]]:
                called[phase[0]].append(module)

        def leave(module: nn.Module, arguments: tuple[Any, ...], named: dict[str, Any], output: Any) -> None:
            before = shape_before_width((arguments, named))
            usual = isinstance(output, Tensor) and before is not None and tuple(output.shape[:-1]) == before
            if usual and widths.get(id(module), (0,))[0] is not None:
                widths[id(module)] = (output.shape[-1], output.dtype)
            else:
                widths[id(module)] = (None, torch.float32)

        def block_leaves(index: int) -> Callable[..., None]:
            def note(_: nn.Module, arguments: tuple[Any, ...], named: dict[str, Any], output: Any) -> None:
                phase[0] = "behind"
                self._outputs[index] = len(output) if isinstance(output, (tuple, list)) else 0
                given = (arguments, named)
                _check_shape(index, at(given, hidden_path(given)), _hidden_of(index, output))

            return note

        for module in self.module.modules():
            if id(module) in owners and id(module) not in inside and not _holds(module, self._blocks):
                handles.append(module.register_forward_pre_hook(enter))
                handles.append(module.register_forward_hook(leave, with_kwargs=True))
        for index, block in enumerate(self._real):
            handles.append(block.register_forward_hook(block_leaves(index), with_kwargs=True))
        try:
            with torch.no_grad():
                self.module(**self.arguments(batch))
        finally:
            for handle in handles:
                handle.remove()
        both = [owners[id(module)] for module in called["front"] if module in called["behind"]]
        if both:
            raise BadInputError(f"model: {both[0]} runs in front of the blocks and behind them, wanted modules with one place")
        places = {id(child): (parent, name) for parent in self.module.modules() for name, child in parent._modules.items()}
        self._front = called["front"]
        self._front_places = [places[id(module)] for module in self._front]
        self._zeros = [FrontStandIn(module, self.device.device, *widths[id(module)]) for module in self._front]
        self._behind = [module for module in self.module.modules() if id(module) in owners and id(module) not in inside]
        self._behind = [module for module in self._behind if module not in self._front]
        # A module around the blocks has no stand-in. Its own parameters belong to the embedding, and the head cannot use them.
        self._around = [module for module in self._behind if _holds(module, self._blocks)]
        self._behind = [module for module in self._behind if module not in self._around]

    def collect(self) -> None:
        """Makes the layers from the result of `probe`. A tied parameter becomes two."""
        self._untie()
        self._collect()

    def _owned(self) -> list[tuple[int, nn.Module]]:
        """Returns (layer, module) for all modules that may have parameters of their own."""
        owned: list[tuple[int, nn.Module]] = [(0, module) for module in self._front + self._around]
        for index, block in enumerate(self._real):
            owned += [(index + 1, module) for module in block.modules()]
        owned += [(len(self._real) + 1, module) for module in self._behind]
        return owned

    def _untie(self) -> None:
        """Gives the head its own copy of a parameter that it shares with the embedding."""
        last = len(self._real) + 1
        names = {id(module): name for name, module in self.module.named_modules()}
        seen: dict[int, tuple[int, str]] = {}
        for layer, module in self._owned():
            for name, parameter in list(module._parameters.items()):
                if parameter is None:
                    continue
                full = f"{names[id(module)]}.{name}"
                if id(parameter) not in seen:
                    seen[id(parameter)] = (layer, full)
                    continue
                first_layer, first = seen[id(parameter)]
                if (first_layer, layer) != (0, last):
                    raise BadInputError(f"model: {first} and {full} are one parameter, wanted none shared but embedding and head")
                copy = nn.Parameter(parameter.detach().clone(), requires_grad=parameter.requires_grad)
                module._parameters[name] = copy
                seen[id(copy)] = (layer, full)
                self.ties.append(Tie(first, full, (0, last)))

    def _collect(self) -> None:
        self.layers = [Layer("embedding"), *[Layer(f"blocks.{index}") for index in range(len(self._real))], Layer("head")]
        names = {id(module): name for name, module in self.module.named_modules()}
        for index, module in self._owned():
            prefix = names[id(module)] + "."
            for name, parameter in module._parameters.items():
                if parameter is not None:
                    self.layers[index].parameters[prefix + name] = parameter
            for name, buffer in module._buffers.items():
                if buffer is not None and 0 < index <= len(self._real):
                    self.layers[index].buffers[prefix + name] = buffer
        found = {id(parameter) for layer in self.layers for parameter in layer.parameters.values()}
        for name, parameter in self.module.named_parameters():
            if id(parameter) not in found:
                raise BadInputError(f"model: parameter {name} lies in no layer, wanted all in embedding, blocks or head")

    # --- Running parts. ---

    def arguments(self, batch: MicroBatch) -> dict[str, Any]:
        return {"use_cache": False, **batch} if self._takes_cache and self.caches is Caches.OFF else dict(batch)

    def _call(self, batch: MicroBatch, calls: list[Callable[..., Tensor]], zeros: bool) -> Any:
        stand_ins: list[nn.Module] = [
            BlockStandIn(block, self.device.device, call, outputs) for block, call, outputs in zip(self._real, calls, self._outputs)
        ]
        places = self._places + (self._front_places if zeros else [])
        with replaced(places, stand_ins + (self._zeros if zeros else [])):
            return self.module(**self.arguments(batch))

    def begin(self, batch: MicroBatch, step: int, host: Optional[MicroBatch] = None) -> Context:
        return Context(batch, host or batch)

    def front(self, batch: MicroBatch, zeros: bool) -> tuple[Tensor, Notes]:
        """Runs the model up to the blocks. Returns the embedding's output, or zeros of its shape, and the notes of the blocks."""
        arguments: list[Given] = []
        hidden_places: list[Path] = []
        first: list[Tensor] = []

        def note(index: int) -> Callable[..., Tensor]:
            def call(*positional: Any, **named: Any) -> Tensor:
                given = (positional, named)
                path = hidden_path(given)
                hidden: Tensor = at(given, path)
                if index != len(arguments):
                    raise BadInputError(f"model: block {index} runs where block {len(arguments)} was expected, wanted each once, in order")
                first.append(hidden)
                hidden_places.append(path)
                given = with_tensors(given, {path: None})
                arguments.append(without_caches(self._real[index], given) if self.caches is Caches.DROPPED else given)
                if len(arguments) == len(self._real):
                    raise _Enough
                return hidden

            return call

        with contextlib.suppress(_Enough):
            self._call(batch, [note(index) for index in range(len(self._real))], zeros)
        if len(arguments) < len(self._real):
            raise BadInputError(f"model: block {len(arguments)} was not run, wanted each once, in order (layerdrop?)")
        return first[0], Notes(arguments, hidden_places, Spec(HIDDEN, tuple(first[0].shape), first[0].dtype))

    def _mode(self) -> Mode:
        return torch.is_autocast_enabled(self.device.type), torch.get_autocast_dtype(self.device.type)

    def _key(self, batch: MicroBatch) -> Any:
        key: list[Any] = [self.module.training, *self._mode()]
        for name, value in batch.items():
            if isinstance(value, Tensor) and name in ("input_ids", "labels") and self.notes_follow_shapes:
                key.append((name, tuple(value.shape), value.dtype))
            else:
                key.append((name, checks.digest(value)))
        return tuple(key)

    def describe(self, context: Context) -> None:
        if context.notes is not None:
            return
        key = self._key(context.host)
        if key not in self._cache:
            with torch.no_grad():
                self._cache[key] = self.front(context.batch, zeros=True)[1]
            if len(self._cache) > MAX_NOTES:
                self._cache.popitem(last=False)
        self._cache.move_to_end(key)
        self._note(context, self._cache[key])

    def _note(self, context: Context, notes: Notes) -> None:
        specs: dict[str, Spec] = {}
        for (block, path), name in self.carried.items():
            tensor = at(notes.arguments[block], path)
            specs.setdefault(name, Spec(name, tuple(tensor.shape), tensor.dtype))
        context.notes = notes
        context.boundaries = [
            [
                notes.first, *[spec for name, spec in specs.items() if self._wanted_behind(layer, name)],
                *self.routers.specs(context.batch, layer, notes.first.shape, self._mode()),
            ]
            for layer in range(len(self._real) + 1)
        ]

    def _wanted_behind(self, layer: int, name: str) -> bool:
        return any(block >= layer and other == name for (block, _), other in self.carried.items())

    def run(self, layer: int, values: Values, context: Context) -> Values:
        if layer == 0:
            return self._run_front(context)
        if layer <= len(self._real):
            return self._run_block(layer - 1, values, context)
        return {LOSS: self._run_behind(values, context)}

    def _run_front(self, context: Context) -> Values:
        hidden, notes = self.front(context.batch, zeros=False)
        found = {name: at(notes.arguments[block], path) for (block, path), name in self.carried.items()}
        if context.notes is None:
            self._note(context, notes)
        return {HIDDEN: hidden, **found}

    def _run_block(self, index: int, values: Values, context: Context) -> Values:
        self.describe(context)
        hidden = values[HIDDEN]
        notes: Notes = context.notes
        by = {path: values[name] for (block, path), name in self.carried.items() if block == index}
        arguments, named = with_tensors(notes.arguments[index], {notes.places[index]: hidden, **by})
        if self.caches is Caches.FRESH:
            arguments, named = with_fresh_caches((arguments, named))
        found = dict(values)
        with self.routers.noted(index, found):
            output = self._real[index](*arguments, **named)
        found[HIDDEN] = _hidden_of(index, output)
        _check_shape(index, hidden, found[HIDDEN])
        for spec in context.boundaries[index + 1][1:]:
            spec.check(f"block {index}", found.get(spec.name))
        return {spec.name: found[spec.name] for spec in context.boundaries[index + 1]}

    def _run_behind(self, values: Values, context: Context) -> Tensor:
        state, hidden = self.device.random_state(), values[HIDDEN]

        def pass_on(*arguments: Any, **named: Any) -> Tensor:
            given = (arguments, named)
            passed: Tensor = at(given, hidden_path(given))
            return passed

        def arrived(*_: Any, **__: Any) -> Tensor:
            self.device.set_random_state(state)  # because the part in front of the blocks has drawn numbers, too
            return hidden

        with self.routers.replayed(values):
            return self._loss_of(self._call(context.batch, [pass_on] * (len(self._real) - 1) + [arrived], zeros=True))

    def _loss_of(self, output: Any) -> Tensor:
        loss = output.get("loss") if isinstance(output, dict) else output[0] if isinstance(output, tuple) else output
        if not isinstance(loss, Tensor) or loss.numel() != 1:
            raise BadInputError("batch: the model gave no loss, wanted labels in the batch")
        return loss

    def whole(self, batch: MicroBatch, before: Callable[[int], None]) -> Tensor:
        def reach(layer: int, *_: Any) -> None:  # returns None, because a hook's result would replace the block's arguments
            before(layer)

        handles = [block.register_forward_pre_hook(partial(reach, index + 1)) for index, block in enumerate(self._real)]
        handles.append(self._real[-1].register_forward_hook(partial(reach, len(self._real) + 1)))
        before(0)
        try:
            return self._loss_of(self.module(**batch))
        finally:
            for handle in handles:
                handle.remove()

    # --- Arguments of blocks that need the embedding's weights. ---

    def learn(self, batch: MicroBatch) -> None:
        """Finds the arguments of blocks that need the embedding: they are trained, or differ if it gives zeros. Boundaries will carry
        them.
        """
        with torch.enable_grad():
            hidden, real = self.front(batch, zeros=False)
        with torch.no_grad():
            zeros = self.front(batch, zeros=True)[1]
        if real.first != zeros.first:
            raise BadInputError(
                f"model: the embedding gives {real.first.shape} in {real.first.dtype}, its stand-in {zeros.first.shape} in "
                f"{zeros.first.dtype}; split the model yourself with layers=[(name, module), ...]"
            )
        frozen = self.layers[0].frozen if self.layers else False
        self.forces_gradients = frozen and hidden.requires_grad
        names = {id(at(real.arguments[block], path)): name for (block, path), name in self.carried.items()}
        for block, (given, other) in enumerate(zip(real.arguments, zeros.arguments)):
            others = dict(tensors_of(other))
            for path, tensor in tensors_of(given):
                if path not in others or others[path].shape != tensor.shape or others[path].dtype != tensor.dtype:
                    raise BadInputError(f"model: what block {block} is given depends on weights in its shape, wanted only in values")
                trained = tensor.requires_grad and not frozen
                if (block, path) not in self.carried and (trained or not torch.equal(tensor, others[path])):
                    name = names.setdefault(id(tensor), f"carried.{len(set(self.carried.values()))}")
                    self.carried[(block, path)] = name
        self.take(self.caches, self.carried)
        if self.routers.are_wanted(batch):
            self._learn_routers(batch, real.first)

    def _learn_routers(self, batch: MicroBatch, hidden: Spec) -> None:
        with torch.no_grad():
            self.routers.learn(lambda: self.module(**self.arguments(batch)), hidden.shape, self._mode())
            given = {HIDDEN: torch.zeros(hidden.shape, dtype=hidden.dtype, device=self.device.device)}
            losses = []
            for value in (0.0, math.nan):
                specs = self.routers.specs(batch, len(self._real), hidden.shape, self._mode())
                logits = {spec.name: torch.full(spec.shape, value, dtype=spec.dtype, device=self.device.device) for spec in specs}
                losses.append(self._run_behind({**given, **logits}, Context(batch, batch)))
            if torch.equal(*losses):
                self.routers.forget()

    def take(self, caches: Caches, carried: dict[tuple[int, Path], str]) -> None:
        """Changes what blocks get as caches and from boundaries. Drops earlier notes."""
        self.caches, self.carried = caches, carried
        self._cache.clear()

    @property
    def learned(self) -> dict[str, Any]:
        """Returns what batches have shown so far, for a process that has not seen them."""
        return {
            "caches": self.caches, "carried": self.carried, "forces_gradients": self.forces_gradients, "routers": self.routers.learned,
        }

    def adopt(self, learned: Mapping[str, Any]) -> None:
        """Takes what another process has learned with the same model."""
        self.take(learned["caches"], learned["carried"])
        self.forces_gradients = learned["forces_gradients"]
        self.routers.adopt(learned["routers"])

    def learn_what_notes_follow(self, batches: list[MicroBatch]) -> None:
        """Sets notes_follow_shapes, by the notes of batches that differ only in their ids."""
        with torch.no_grad():
            notes = [self.front(batch, zeros=True)[1].arguments for batch in batches]
        self.notes_follow_shapes = all(_same_notes(notes[0], other) for other in notes[1:])


def _holds(module: nn.Module, inner: nn.Module) -> bool:
    return any(part is inner for part in module.modules())


def _takes(module: nn.Module, name: str) -> bool:
    parameters = inspect.signature(module.forward).parameters
    return name in parameters or any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters.values())


def _same_notes(one: Any, other: Any) -> bool:
    if isinstance(one, Tensor) and isinstance(other, Tensor):
        return one.shape == other.shape and one.dtype == other.dtype and bool(torch.equal(one, other))
    if isinstance(one, (tuple, list)) and isinstance(other, (tuple, list)):
        return len(one) == len(other) and all(map(_same_notes, one, other))
    if isinstance(one, dict) and isinstance(other, dict):
        return one.keys() == other.keys() and all(_same_notes(one[key], other[key]) for key in one)
    return type(one) is type(other) and (one == other if isinstance(one, (str, int, float, bool, type(None))) else True)
