# SPDX-License-Identifier: Apache-2.0
"""Carries the logits of expert routers to the last stage, for models whose loss reads them from all blocks.

transformers computes the load-balancing loss (Fedus et al., arXiv 2101.03961, equation 4) after the blocks. Boundaries carry the logits
of each router there, and the model's own code computes the loss. A sum of the ranks' parts would have other bits.
"""
from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any, Optional

import torch
from torch import Tensor, nn

from ..errors import BadInputError
from .layers import MicroBatch, Spec, Values

FLAG, LOGITS = "output_router_logits", "router_logits"
Mode = tuple[bool, torch.dtype]  # of autocast; types depend on it


@dataclass(frozen=True)
class _Router:
    """A router: the module inside a block that computes logits."""

    block: int
    module: nn.Module
    index: Optional[int]  # index of the logits in the module's output; None if they are the output
    flat: bool  # whether the logits have one dimension for all tokens
    shape: tuple[int, ...]  # of a token's logits


class Routers:
    """The routers of a decoder. Boundaries carry no logits while output_router_logits is off, or if the loss does not read them."""

    def __init__(self, model: nn.Module, blocks: list[nn.Module], config: Any) -> None:
        self._model, self._blocks, self._config = model, blocks, config
        self._routers: dict[str, _Router] = {}  # by the name of their tensor, in the order of the calls
        self._tuple: list[Optional[str]] = []  # router by block as the loss reads them; None: the block has none
        self._holders: list[nn.Module] = []  # modules that return that tuple
        self._types: dict[Mode, list[torch.dtype]] = {}

    def __len__(self) -> int:
        return len(self._routers)

    def are_wanted(self, batch: MicroBatch) -> bool:
        flag = batch.get(FLAG)
        return bool(getattr(self._config, FLAG, False) if flag is None else flag)

    # --- Finding them. ---

    def learn(self, run: Callable[[], Any], hidden: tuple[int, ...], mode: Mode) -> None:
        """Finds the modules whose logits the loss reads. `run` runs the whole model. `hidden` is the shape of the blocks' hidden tensor."""
        made: dict[int, tuple[Tensor, _Router]] = {}  # by id; the tensors live here, so that no id is reused
        given: list[tuple[nn.Module, tuple[Any, ...]]] = []

        def note(block: int, module: nn.Module, _: Any, output: Any) -> None:
            for index, part in enumerate(output) if isinstance(output, (tuple, list)) else [(None, output)]:
                if isinstance(part, Tensor) and id(part) not in made:
                    made[id(part)] = (part, _router_of(part, hidden, block, module, index))

        def note_tuple(module: nn.Module, _: Any, output: Any) -> None:
            if isinstance(output, Mapping) and isinstance(output.get(LOGITS), tuple):
                given.append((module, output[LOGITS]))

        inside = {id(part): block for block, module in enumerate(self._blocks) for part in module.modules()}
        with contextlib.ExitStack() as hooks:
            for module in self._model.modules():
                if id(module) in inside:
                    hooks.callback(module.register_forward_hook(partial(note, inside[id(module)])).remove)
                elif module is not self._model:
                    hooks.callback(module.register_forward_hook(note_tuple).remove)
            run()
        logits = given[0][1] if given else ()
        for one in logits:
            if one is not None and id(one) not in made:
                raise BadInputError(f"model: the {LOGITS} that it gives are not those of modules in its blocks; set {FLAG} to False")
        distinct = {id(one): one for one in logits if one is not None}
        names = {key: f"{LOGITS}.{number}" for number, key in enumerate(distinct)}
        self._routers = {names[key]: made[key][1] for key in distinct}
        self._tuple = [None if one is None else names[id(one)] for one in logits]
        self._holders = [module for module, other in given if list(map(id, other)) == list(map(id, logits))]
        self._types[mode] = [one.dtype for one in distinct.values()]

    def forget(self) -> None:
        """Forgets all routers, because the loss does not depend on them."""
        self._routers, self._tuple, self._holders = {}, [], []

    @property
    def learned(self) -> dict[str, Any]:
        """Returns what learn() has found, with the names of modules, for a process that has not seen the batch."""
        names = {id(module): name for name, module in self._model.named_modules()}
        return {
            "routers": {
                name: (router.block, names[id(router.module)], router.index, router.flat, router.shape) for name, router in self._routers.items()
            },
            "tuple": self._tuple, "holders": [names[id(module)] for module in self._holders], "types": self._types,
        }

    def adopt(self, learned: Mapping[str, Any]) -> None:
        """Takes what another process has learned with the same model."""
        self._routers = {
            name: _Router(block, self._model.get_submodule(module), *rest) for name, (block, module, *rest) in learned["routers"].items()
        }
        self._tuple, self._types = learned["tuple"], learned["types"]
        self._holders = [self._model.get_submodule(name) for name in learned["holders"]]

    # --- Carrying them. ---

    def specs(self, batch: MicroBatch, layer: int, hidden: tuple[int, ...], mode: Mode) -> list[Spec]:
        """Returns the logits that pass from a layer to the next one. `hidden` is the shape of the hidden tensor."""
        if not self.are_wanted(batch):
            return []
        if not self._types:
            raise BadInputError(f"model: config.{FLAG} has been switched on since the split was checked, wanted it on from the start")
        types = self._types.get(mode, next(iter(self._types.values())))
        tokens = hidden[:2]
        return [
            Spec(name, ((math.prod(tokens),) if router.flat else tokens) + router.shape, dtype)
            for (name, router), dtype in zip(self._routers.items(), types) if router.block < layer
        ]

    @contextlib.contextmanager
    def noted(self, block: int, values: Values) -> Iterator[None]:
        """Adds the logits of a block's routers to `values`, while it is active."""
        waiting = [(name, router) for name, router in self._routers.items() if router.block == block]

        def note(module: nn.Module, _: Any, output: Any) -> None:
            for name, router in waiting:
                if router.module is module and name not in values:
                    values[name] = output if router.index is None else output[router.index]
                    return

        with contextlib.ExitStack() as hooks:
            for module in {router.module for _, router in waiting}:
                hooks.callback(module.register_forward_hook(note).remove)
            yield

    @contextlib.contextmanager
    def replayed(self, values: Values) -> Iterator[None]:
        """Makes the loss read the logits in `values`, while it is active."""
        if not self._routers or next(iter(self._routers)) not in values:
            yield
            return
        logits = tuple(None if name is None else values[name] for name in self._tuple)

        def replace(_: nn.Module, __: Any, output: Any) -> Any:
            output[LOGITS] = logits
            return output

        with contextlib.ExitStack() as hooks:
            for module in self._holders:
                hooks.callback(module.register_forward_hook(replace).remove)
            yield


def _router_of(logits: Tensor, hidden: tuple[int, ...], block: int, module: nn.Module, index: Optional[int]) -> _Router:
    tokens, shape = hidden[:2], tuple(logits.shape)
    flat = shape[:1] == (math.prod(tokens),)
    return _Router(block, module, index, flat, shape[1 if flat else len(tokens) :])
