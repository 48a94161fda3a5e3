# SPDX-License-Identifier: Apache-2.0
"""Writes and reads Hugging Face's folder from all ranks, and the state by name for torch.distributed.checkpoint."""
from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Iterator
from typing import Any, Optional, Union

import torch
from torch import Tensor, nn

from ..errors import BadInputError
from . import state
from .device import Device, to_host
from .layers import Layer, Split
from .ranks import Ranks

SAVE_TAG = 1 << 26
OPTIMIZER = "optimizer.state."
GROUPS = "optimizer.param_groups."
STEPS = "dynmo.steps"
READING = "_dynmo_reads"  # attribute of the model while reading_everything() is active
Path = Union[str, "os.PathLike[str]"]


def refuse_reading(module: nn.Module) -> None:
    """Makes state_dict() of the module raise if parameters are on other ranks, because it would lack their values."""

    def check(part: nn.Module, prefix: str, *_: Any) -> None:
        if getattr(module, READING, False):
            return
        absent = next((name for name, parameter in part.named_parameters() if parameter.device.type == "meta"), None)
        if absent is not None:
            raise BadInputError(
                f"state_dict: {prefix}{absent} lies on another rank, wanted pipe.save_pretrained(), pipe.state_dict() or pipe.save(), which "
                "know all ranks"
            )

    for part in module.modules():
        part.register_state_dict_pre_hook(check)  # type: ignore[no-untyped-call]


@contextlib.contextmanager
def reading_everything(module: nn.Module) -> Iterator[None]:
    """Allows state_dict() inside, for the names of its entries."""
    setattr(module, READING, True)
    try:
        yield
    finally:
        delattr(module, READING)


def gather_weights(split: Split, ranks: Ranks, owners: list[int]) -> Optional[dict[str, Tensor]]:
    """Returns all parameters and buffers on rank 0 of the first replica, and None elsewhere. Sends them layer by layer."""
    if ranks.replica != 0:
        return None
    weights: dict[str, Tensor] = {}
    for index, layer in enumerate(split.layers):
        tensors = {**layer.parameters, **layer.buffers}
        for offset, (name, tensor) in enumerate(tensors.items()):
            tag = SAVE_TAG + index * 4096 + offset
            if owners[index] == 0 and ranks.rank == 0:
                weights[name] = tensor.detach().cpu()
            elif ranks.rank == 0:
                weights[name] = ranks.receive(torch.empty(tensor.shape, dtype=tensor.dtype), owners[index], tag).wait()
            elif owners[index] == ranks.rank:
                ranks.send(to_host([tensor.detach().contiguous()])[0], 0, tag).wait()
    if ranks.rank != 0:
        return None
    for tie in split.ties:
        weights[tie.second] = weights[tie.first]
    return weights


def pretrained_writer(module: Any, folder: Path, options: dict[str, Any]) -> Callable[[dict[str, Tensor]], None]:
    """Returns a function that writes a state dict as the model's save_pretrained does."""
    if not hasattr(module, "save_pretrained"):
        raise BadInputError("save_pretrained: the layers are your own, not a model of transformers; use state_dict()")

    def write(weights: dict[str, Tensor]) -> None:
        module.save_pretrained(folder, state_dict=weights, **options)

    return write


def write_weights(split: Split, ranks: Ranks, owners: list[int], write: Callable[[dict[str, Tensor]], None]) -> None:
    """Gathers the model's state dict on rank 0, and calls `write` there. If it fails, all ranks raise the same error."""
    try:
        weights = gather_weights(split, ranks, owners)
    except Exception as error:  # such as one of memory, which rank 0 needs for all weights
        ranks.tell(error)
        raise

    def written() -> tuple[None, dict[str, Any]]:
        if weights is not None:
            module: Any = split.module
            with reading_everything(module):
                kept = dict(module.state_dict())  # gives the order, and persistent buffers outside of layers
            kept.update({name: tensor for name, tensor in weights.items() if name in kept})
            write(kept)
        return None, {}

    ranks.attempt("writing the weights", written)  # no rank continues before it is written


def _owned(split: Split, ranks: Ranks, owners: list[int]) -> list[Layer]:
    return [layer for layer, owner in zip(split.layers, owners) if owner == ranks.rank]


def state_dict(
    split: Split, ranks: Ranks, owners: list[int], optimizer: Optional[torch.optim.Optimizer], steps: int
) -> dict[str, Any]:
    """Returns this rank's part by name: weights, `optimizer.state.NAME.KEY`, and the values that are equal on all ranks."""
    copies = {tie.second for tie in split.ties}
    found: dict[str, Any] = {STEPS: steps}
    for layer in _owned(split, ranks, owners):
        content = state.content_of(layer, optimizer)
        for (name, key), value in [*content.tensors.items(), *content.values.items()]:
            if name not in copies:
                found[f"{OPTIMIZER}{name}.{key}" if key else name] = value
    for number, group in enumerate(optimizer.param_groups if optimizer is not None else []):
        for key, value in group.items():
            if key != "params":
                found[f"{GROUPS}{number}.{key}"] = value
    return found


def load_state_dict(
    split: Split, ranks: Ranks, owners: list[int], optimizer: Optional[torch.optim.Optimizer], loaded: dict[str, Any]
) -> int:
    """Loads this rank's part from `loaded`. Returns the number of steps."""
    first_of = {tie.second: tie.first for tie in split.ties}
    with torch.no_grad():
        for layer in _owned(split, ranks, owners):
            for name, tensor in {**layer.parameters, **layer.buffers}.items():
                source = first_of.get(name, name)
                if source not in loaded:
                    raise BadInputError(f"state: it has no {source}, wanted the state of the same model")
                tensor.copy_(loaded[source])
                if name in layer.parameters and optimizer is not None:
                    _load_optimizer(optimizer, layer.parameters[name], f"{OPTIMIZER}{source}.", loaded)
    for number, group in enumerate(optimizer.param_groups if optimizer is not None else []):
        for key in group:
            if key != "params" and f"{GROUPS}{number}.{key}" in loaded:
                group[key] = loaded[f"{GROUPS}{number}.{key}"]
    return int(loaded.get(STEPS, 0))


def _load_optimizer(optimizer: torch.optim.Optimizer, parameter: Tensor, prefix: str, loaded: dict[str, Any]) -> None:
    values = {name[len(prefix) :]: value for name, value in loaded.items() if name.startswith(prefix)}
    optimizer.state.pop(parameter, None)
    group = next((group for group in optimizer.param_groups if any(one is parameter for one in group["params"])), {})
    for key, value in values.items():
        on_host = key == "step" and not (group.get("fused") or group.get("capturable"))  # like torch's load_state_dict
        place = torch.device("cpu") if on_host else parameter.device
        optimizer.state[parameter][key] = value.to(place, copy=True) if isinstance(value, Tensor) else value


def save(folder: Path, found: dict[str, Any], ranks: Ranks, device: Device) -> None:
    """Writes a checkpoint of torch.distributed.checkpoint. That waits only for copies from the thread's current device."""
    from torch.distributed.checkpoint.state_dict_saver import save as write

    with device.as_current():
        write(found, checkpoint_id=folder, process_group=ranks.group, no_dist=ranks.world == 1)


def load(folder: Path, split: Split, ranks: Ranks, owners: list[int], optimizer: Optional[torch.optim.Optimizer]) -> dict[str, Any]:
    """Reads this rank's part of a checkpoint, which may have been written by any number of ranks. If one rank cannot, all raise the same
    error.
    """
    from torch.distributed.checkpoint.state_dict_loader import load as read

    target = ranks.attempt("reading the checkpoint", lambda: (_room_for(folder, split, _owned(split, ranks, owners)), {}))
    read(target, checkpoint_id=folder, process_group=ranks.group, no_dist=ranks.world == 1)
    return target


def _room_for(folder: Path, split: Split, layers: list[Layer]) -> dict[str, Any]:
    """Returns tensors for the parts of a checkpoint that belong to the layers, and None for other values."""
    from torch.distributed.checkpoint.filesystem import FileSystemReader
    from torch.distributed.checkpoint.metadata import TensorStorageMetadata

    try:
        stored = FileSystemReader(folder).read_metadata().state_dict_metadata
    except (OSError, RuntimeError) as error:
        raise BadInputError(f"{os.fspath(folder)}: no checkpoint ({error}), wanted a folder that Pipeline.save wrote") from error
    first_of = {tie.second: tie.first for tie in split.ties}
    wanted = {
        first_of.get(name, name): tuple(tensor.shape) for layer in layers for name, tensor in {**layer.parameters, **layer.buffers}.items()
    }
    for name, shape in wanted.items():
        found = tuple(getattr(stored.get(name), "size", ()))
        if name not in stored or found != shape:
            has = f"no {name}" if name not in stored else f"{name} of shape {found}, here {shape}"
            raise BadInputError(f"{os.fspath(folder)}: it has {has}, wanted a checkpoint of the same model")
    target: dict[str, Any] = {}
    for name, entry in stored.items():
        owner = name[len(OPTIMIZER) :].rpartition(".")[0] if name.startswith(OPTIMIZER) else name
        shared = name == STEPS or name.startswith(GROUPS)
        if owner not in wanted and not shared:
            continue
        if isinstance(entry, TensorStorageMetadata):
            target[name] = torch.empty(entry.size, dtype=entry.properties.dtype)
        else:
            target[name] = None
    return target
