# SPDX-License-Identifier: Apache-2.0
"""Modules that replace blocks or an embedding while the model's own forward runs, and the arguments of blocks."""
from __future__ import annotations

import contextlib
import copy
import inspect
import itertools
from collections.abc import Callable, Iterator, Mapping
from typing import Any, Optional

import torch
from torch import Tensor, nn

from ..errors import BadInputError

# A block's positional and named arguments.
Given = tuple[tuple[Any, ...], dict[str, Any]]
# The place of a tensor in them: 0 (positional) or 1 (named), then positions and keys.
Path = tuple[Any, ...]


class _StandIn(nn.Module):
    """Has the attributes and the class of a module, but not its parameters."""

    def __init__(self, module: nn.Module, device: torch.device) -> None:
        super().__init__()
        object.__setattr__(self, "_module", module)
        object.__setattr__(self, "_device", device)

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            found = getattr(self._module, name)
        if isinstance(found, Tensor) and found.device.type == "meta":
            # Models ask weights for their device and type. This tensor takes no memory.
            return torch.zeros(1 if found.dim() > 0 else (), dtype=found.dtype, device=self._device).expand(found.shape)
        return found


class BlockStandIn(_StandIn):
    """Replaces a block, also for isinstance. Returns the result of `call`, as a tuple if the block returns one."""

    def __init__(self, block: nn.Module, device: torch.device, call: Callable[..., Tensor], outputs: int) -> None:
        super().__init__(block, device)
        self._call = call
        self._outputs = outputs

    @property
    def __class__(self) -> Any:
        return type(object.__getattribute__(self, "_module"))

    @__class__.setter
    def __class__(self, _: Any) -> None:
        raise TypeError("a stand-in keeps its class")

    def forward(self, *arguments: Any, **named: Any) -> Any:
        hidden = self._call(*arguments, **named)
        return hidden if self._outputs == 0 else (hidden, *[None] * (self._outputs - 1))


class FrontStandIn(_StandIn):
    """Replaces a layer in front of the blocks. Returns zeros like its output, and needs no weights.

    With a width, the output has the shape of the ids (or of a hidden tensor) and this width. Otherwise the layer's own forward runs on
    meta.
    """

    def __init__(self, module: nn.Module, device: torch.device, width: Optional[int], dtype: torch.dtype) -> None:
        super().__init__(module, device)
        self._width = width
        self._dtype = dtype
        first = next(module.parameters())
        # A model takes its device and type from its first parameter.
        self.place = nn.Parameter(torch.zeros(1, dtype=first.dtype, device=device), requires_grad=False)

    def forward(self, *arguments: Any, **named: Any) -> Any:
        if self._width is None:
            return self._on_meta(arguments, named)
        shape = shape_before_width((arguments, named))
        assert shape is not None
        return torch.zeros(*shape, self._width, dtype=self._dtype, device=self.place.device)

    def _on_meta(self, *given: Any) -> Any:
        moved = with_tensors(given, {path: tensor.to("meta") for path, tensor in tensors_of(given)})
        tensors = itertools.chain(self._module.named_parameters(), self._module.named_buffers())
        twins = {name: torch.empty_like(tensor, device="meta") for name, tensor in tensors}
        with torch.no_grad():
            output = torch.func.functional_call(self._module, twins, *moved)
        zeros = {path: torch.zeros_like(tensor, device=self.place.device) for path, tensor in tensors_of(output)}
        return with_tensors(output, zeros)


def shape_before_width(given: Given) -> Optional[tuple[int, ...]]:
    """Returns the shape of a layer's ids, or of its hidden tensor without the last dimension. Returns None without a tensor."""
    arguments, named = given
    tensor = next((value for value in (*arguments, *named.values()) if isinstance(value, Tensor)), None)
    if tensor is None:
        return None
    return tuple(tensor.shape[:-1] if tensor.is_floating_point() else tensor.shape)


@contextlib.contextmanager
def replaced(places: list[tuple[nn.Module, str]], by: list[nn.Module]) -> Iterator[None]:
    before = [parent._modules[name] for parent, name in places]
    for (parent, name), module in zip(places, by):
        parent._modules[name] = module
    try:
        yield
    finally:
        for (parent, name), old in zip(places, before):
            parent._modules[name] = old


def hidden_path(given: Given) -> Path:
    """Returns the place of the hidden tensor in a block's arguments: the first one, or "hidden_states"."""
    arguments, named = given
    if arguments and isinstance(arguments[0], Tensor):
        return (0, 0)
    if isinstance(named.get("hidden_states"), Tensor):
        return (1, "hidden_states")
    found = next((path for path, tensor in tensors_of(given) if tensor.is_floating_point()), None)
    if found is None:
        raise BadInputError("model: a block is given no tensor, wanted the hidden tensor first or as hidden_states")
    return found


def tensors_of(value: Any, path: Path = ()) -> Iterator[tuple[Path, Tensor]]:
    """Yields the tensors in nested tuples, lists and dictionaries, with their places."""
    if isinstance(value, Tensor):
        yield path, value
    elif isinstance(value, (tuple, list)):
        for number, element in enumerate(value):
            yield from tensors_of(element, (*path, number))
    elif isinstance(value, Mapping):
        for key, element in value.items():
            yield from tensors_of(element, (*path, key))


def at(value: Any, path: Path) -> Any:
    for key in path:
        value = value[key]
    return value


def with_tensors(value: Any, by: Mapping[Path, Optional[Tensor]], path: Path = ()) -> Any:
    """Returns the same nest of values, with the tensors of `by` at their places."""
    if path in by:
        return by[path]
    if not any(place[: len(path)] == path for place in by):
        return value
    if isinstance(value, (tuple, list)):
        elements = [with_tensors(element, by, (*path, number)) for number, element in enumerate(value)]
        made: Any = type(value)
        return made(*elements) if hasattr(value, "_fields") else made(elements)
    return {key: with_tensors(element, by, (*path, key)) for key, element in value.items()}


def without_caches(block: nn.Module, given: Given) -> Given:
    """Returns the arguments without caches of keys and values, which are empty in training."""
    names = list(inspect.signature(block.forward).parameters)

    def kept(name: str, value: Any) -> Any:
        return None if _is_cache(value) else False if name == "use_cache" and value else value

    arguments, named = given
    # Arguments after the named ones belong to *args.
    positional = tuple(kept(name, value) for name, value in itertools.zip_longest(names[: len(arguments)], arguments, fillvalue=""))
    return positional, {name: kept(name, value) for name, value in named.items()}


def with_fresh_caches(given: Given) -> Given:
    """Returns the arguments with copies of their caches, which are empty."""
    arguments, named = given
    fresh = {name: copy.deepcopy(value) if _is_cache(value) else value for name, value in named.items()}
    return tuple(copy.deepcopy(value) if _is_cache(value) else value for value in arguments), fresh


def _is_cache(value: Any) -> bool:
    return hasattr(value, "get_seq_length")
