# SPDX-License-Identifier: Apache-2.0
"""Splits any decoder of transformers by its own forward.

The model's forward runs with stand-ins for its blocks. Up to the blocks this gives the embedding's output and what every
block is given (masks, rotary tables); with a stand-in for the last block that returns what has arrived, the model's own code
runs norm, head and loss. So no code here knows a family of models.
"""
from __future__ import annotations

import contextlib
from collections import OrderedDict
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Callable, Optional

import torch
from torch import Tensor, nn

from ..errors import BadInputError
from . import checks
from .layers import Context, Layer, MicroBatch, Tie

MAX_NOTES = 64

Given = tuple[tuple[Any, ...], dict[str, Any]]


@dataclass
class Notes:
    """What the blocks are given beside the hidden tensor."""

    arguments: list[Given]


class _Enough(Exception):
    """The blocks have been given their arguments; the rest of the forward is not wanted."""


class _BlockStandIn(nn.Module):
    """Stands where a block is; it has the block's other attributes, such as the type of its attention."""

    def __init__(self, block: nn.Module, call: Callable[..., Tensor], outputs: int) -> None:
        super().__init__()
        object.__setattr__(self, "_block", block)
        self._call = call
        self._outputs = outputs

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            return getattr(self._block, name)

    def forward(self, *arguments: Any, **named: Any) -> Any:
        hidden = self._call(*arguments, **named)
        return hidden if self._outputs == 0 else (hidden, *[None] * (self._outputs - 1))


class _FrontStandIn(nn.Module):
    """Zeros where a layer in front of the blocks would give its output; it needs no weights."""

    def __init__(self, module: nn.Module, width: int, dtype: torch.dtype) -> None:
        super().__init__()
        object.__setattr__(self, "_module", module)
        self._width = width
        self._dtype = dtype

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            return getattr(self._module, name)

    def forward(self, given: Tensor, *_: Any, **__: Any) -> Tensor:
        shape = given.shape[:-1] if given.is_floating_point() else given.shape
        return torch.zeros(*shape, self._width, dtype=self._dtype, device=given.device)


@contextlib.contextmanager
def _replaced(places: list[tuple[nn.Module, str]], by: list[nn.Module]) -> Iterator[None]:
    before = [parent._modules[name] for parent, name in places]
    for (parent, name), module in zip(places, by):
        parent._modules[name] = module
    try:
        yield
    finally:
        for (parent, name), old in zip(places, before):
            parent._modules[name] = old


def _hidden_of(arguments: tuple[Any, ...], named: dict[str, Any]) -> Tensor:
    hidden = arguments[0] if arguments else named["hidden_states"]
    assert isinstance(hidden, Tensor)
    return hidden


def _given(arguments: tuple[Any, ...], named: dict[str, Any], hidden: Any) -> Given:
    """The same arguments with another hidden tensor."""
    if arguments:
        return (hidden, *arguments[1:]), named
    return (), {**named, "hidden_states": hidden}


def _check_shape(index: int, hidden: Tensor, result: Tensor) -> None:
    if result.shape != hidden.shape or result.dtype != hidden.dtype:
        raise BadInputError(
            f"block {index} takes {tuple(hidden.shape)} in {hidden.dtype} and gives {tuple(result.shape)} in {result.dtype}, "
            "wanted blocks that keep shape and type"
        )


def find_blocks(model: nn.Module) -> tuple[str, nn.ModuleList]:
    """The list of blocks, and its name."""
    config = getattr(model, "config", None)
    wanted = getattr(config, "num_hidden_layers", None)
    found = [
        (name, module)
        for name, module in model.named_modules()
        if isinstance(module, nn.ModuleList) and len(module) == wanted and len(module) > 0
    ]
    found = [pair for pair in found if not any(other is not pair and pair[0].startswith(other[0] + ".") for other in found)]
    if wanted is None or len(found) != 1:
        raise BadInputError(
            f"model: {type(model).__name__} has {len(found)} lists of config.num_hidden_layers ({wanted}) blocks, wanted a decoder "
            "with one; split it yourself with layers=[(name, module), ...]"
        )
    return found[0]


class Decoder:
    """A causal language model of transformers as layers: embedding, blocks, head."""

    def __init__(self, model: nn.Module) -> None:
        self.module = model
        self.blocks_name, self._blocks = find_blocks(model)
        self._real = list(self._blocks)
        self._places = [(self._blocks, str(index)) for index in range(len(self._real))]
        self._outputs = [0] * len(self._real)
        self._front: list[nn.Module] = []
        self._front_places: list[tuple[nn.Module, str]] = []
        self._zeros: list[nn.Module] = []
        self._behind: list[nn.Module] = []
        self.layers: list[Layer] = []
        self.ties: list[Tie] = []
        self.notes_follow_shapes = False  # not the ids, so notes of equal shapes and masks are alike
        self._cache: OrderedDict[Any, tuple[Notes, tuple[int, ...], torch.dtype]] = OrderedDict()

    # --- What lies in front of the blocks and what behind, found by running the model once. ---

    def probe(self, batch: MicroBatch) -> None:
        """Runs the whole model once to see which modules run in front of the blocks, and what blocks give."""
        owners = {id(module): name for name, module in self.module.named_modules() if module._parameters}
        inside = {id(module) for block in self._real for module in block.modules()}
        called: dict[str, list[nn.Module]] = {"front": [], "behind": []}
        phase = ["front"]
        widths: dict[int, tuple[int, torch.dtype]] = {}
        handles = []

        def enter(module: nn.Module, _: Any) -> None:
            if module not in called[phase[0]]:
                called[phase[0]].append(module)

        def leave(module: nn.Module, _: Any, output: Any) -> None:
            if isinstance(output, Tensor):
                widths[id(module)] = (output.shape[-1], output.dtype)

        def block_leaves(index: int) -> Callable[..., None]:
            def note(_: nn.Module, arguments: tuple[Any, ...], named: dict[str, Any], output: Any) -> None:
                phase[0] = "behind"
                self._outputs[index] = len(output) if isinstance(output, tuple) else 0
                _check_shape(index, _hidden_of(arguments, named), output[0] if isinstance(output, tuple) else output)

            return note

        for module in self.module.modules():
            if id(module) in owners and id(module) not in inside:
                handles.append(module.register_forward_pre_hook(enter))
                handles.append(module.register_forward_hook(leave))
        for index, block in enumerate(self._real):
            handles.append(block.register_forward_hook(block_leaves(index), with_kwargs=True))
        try:
            with torch.no_grad():
                self.module(**self._arguments(batch))
        finally:
            for handle in handles:
                handle.remove()
        both = [owners[id(module)] for module in called["front"] if module in called["behind"]]
        if both:
            raise BadInputError(f"model: {both[0]} runs in front of the blocks and behind them, wanted modules with one place")
        places = {id(child): (parent, name) for parent in self.module.modules() for name, child in parent._modules.items()}
        self._front = called["front"]
        self._front_places = [places[id(module)] for module in self._front]
        self._zeros = [_FrontStandIn(module, *widths[id(module)]) for module in self._front]
        self._behind = [module for module in self.module.modules() if id(module) in owners and id(module) not in inside]
        self._behind = [module for module in self._behind if module not in self._front]

    def collect(self) -> None:
        """Makes the layers of what `probe` has found; ties become two parameters."""
        self._untie()
        self._collect()

    def _owned(self) -> list[tuple[int, nn.Module]]:
        """Modules with parameters of their own, with the layer that they belong to."""
        owned: list[tuple[int, nn.Module]] = [(0, module) for module in self._front]
        for index, block in enumerate(self._real):
            owned += [(index + 1, module) for module in block.modules()]
        owned += [(len(self._real) + 1, module) for module in self._behind]
        return owned

    def _untie(self) -> None:
        """Gives the head a parameter of its own where it shares that of the embedding."""
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

    def _arguments(self, batch: MicroBatch) -> dict[str, Any]:
        return {"use_cache": False, **batch}

    def _call(self, batch: MicroBatch, calls: list[Callable[..., Tensor]], zeros: bool) -> Any:
        stand_ins: list[nn.Module] = [
            _BlockStandIn(block, call, outputs) for block, call, outputs in zip(self._real, calls, self._outputs)
        ]
        places = self._places + (self._front_places if zeros else [])
        with _replaced(places, stand_ins + (self._zeros if zeros else [])):
            return self.module(**self._arguments(batch))

    def begin(self, batch: MicroBatch, step: int) -> Context:
        return Context(batch)

    def _front_run(self, context: Context, zeros: bool) -> Tensor:
        """The embedding's output; notes what the blocks are given."""
        notes = Notes([])
        first: list[Tensor] = []

        def note(*arguments: Any, **named: Any) -> Tensor:
            hidden = _hidden_of(arguments, named)
            first.append(hidden)
            notes.arguments.append(_given(arguments, named, None))
            if len(notes.arguments) == len(self._real):
                raise _Enough
            return hidden

        with contextlib.suppress(_Enough):
            self._call(context.batch, [note] * len(self._real), zeros)
        context.notes, context.shape, context.dtype = notes, tuple(first[0].shape), first[0].dtype
        return first[0]

    def _key(self, batch: MicroBatch) -> Any:
        key: list[Any] = [self.module.training, torch.is_autocast_enabled("cpu"), torch.get_autocast_dtype("cpu")]
        for name, value in batch.items():
            if not isinstance(value, Tensor):
                key.append((name, repr(value)))
            elif name in ("input_ids", "labels") and self.notes_follow_shapes:
                key.append((name, tuple(value.shape), value.dtype))
            else:
                key.append((name, tuple(value.shape), value.dtype, checks.digest(value)))
        return tuple(key)

    def describe(self, context: Context) -> None:
        if context.notes is not None:
            return
        key = self._key(context.batch)
        if key not in self._cache:
            with torch.no_grad():
                self._front_run(context, zeros=True)
            self._cache[key] = self._noted(context)
            if len(self._cache) > MAX_NOTES:
                self._cache.popitem(last=False)
        self._cache.move_to_end(key)
        context.notes, context.shape, context.dtype = self._cache[key]

    def _noted(self, context: Context) -> tuple[Notes, tuple[int, ...], torch.dtype]:
        return context.notes, context.shape, context.dtype

    def run(self, layer: int, hidden: Optional[Tensor], context: Context) -> Tensor:
        if layer == 0:
            return self._front_run(context, zeros=False)
        assert hidden is not None
        if layer <= len(self._real):
            return self._run_block(layer - 1, hidden, context)
        return self._run_behind(hidden, context)

    def _run_block(self, index: int, hidden: Tensor, context: Context) -> Tensor:
        self.describe(context)
        noted: Given = context.notes.arguments[index]
        arguments, named = _given(noted[0], noted[1], hidden)
        output = self._real[index](*arguments, **named)
        result = output[0] if isinstance(output, tuple) else output
        assert isinstance(result, Tensor)
        _check_shape(index, hidden, result)
        return result

    def _run_behind(self, hidden: Tensor, context: Context) -> Tensor:
        def pass_on(*arguments: Any, **named: Any) -> Tensor:
            return _hidden_of(arguments, named)

        def arrived(*_: Any, **__: Any) -> Tensor:
            return hidden

        output = self._call(context.batch, [pass_on] * (len(self._real) - 1) + [arrived], zeros=True)
        loss = output.get("loss") if isinstance(output, dict) else output[0]
        if loss is None:
            raise BadInputError("batch: the model gave no loss, wanted labels in the batch")
        assert isinstance(loss, Tensor)
        return loss
