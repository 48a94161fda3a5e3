# SPDX-License-Identifier: Apache-2.0
"""Batches and their micro-batches: cutting them by sample, moving them between host and device, and checking the kinds of their values."""
from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, TypeVar, Union

import torch
from torch import Tensor

from ..errors import BadInputError
from .device import to_device, to_host

ITEMS = "num_items_in_batch"
INPUT, TARGET = "input", "target"  # keys of a batch for the user's own layers
IGNORED = -100  # a label without a loss
CUT = ("input_ids", "labels", "inputs_embeds", INPUT, TARGET)  # always have one row for each sample
FLAGS = {
    "use_cache": "keys and values lie on several ranks",
    "output_hidden_states": "the hidden tensors lie on several ranks", "output_attentions": "the attentions lie on several ranks",
}
Leaves = dict[str, Any]
Batch = Union[dict[str, Any], Sequence[dict[str, Any]]]  # or its micro-batches, which may differ in size
Given = TypeVar("Given", bound=Batch)


def of_call(pair: tuple[Any, ...], named: dict[str, Any], of_layers: bool) -> Batch:
    """Returns the batch that a call was given: input and target of layers, or the arguments of a model."""
    if of_layers:
        if len(pair) != 2 or named:
            raise BadInputError(f"batch: {len(pair)} values and the names {sorted(named)}, wanted input and target of your layers")
        return {INPUT: pair[0], TARGET: pair[1]}
    if len(pair) == 1 and not named and isinstance(pair[0], (list, tuple)) and all(isinstance(part, dict) for part in pair[0]):
        return pair[0]
    if pair:
        raise BadInputError("batch: values without names, wanted the model's arguments by name, such as **batch, or a list of dictionaries")
    return named


def leaves_of(value: Any, path: str) -> Iterator[tuple[str, Any]]:
    """Yields tensors and plain values with their paths, such as attention_mask.full_attention."""
    if isinstance(value, Mapping):
        for key, element in value.items():
            yield from leaves_of(element, f"{path}.{key}" if path else str(key))
    elif isinstance(value, (tuple, list)):
        for number, element in enumerate(value):
            yield from leaves_of(element, f"{path}.{number}")
    else:
        yield path, value


def mapped(value: Any, path: str, change: Callable[[str, Any], Any]) -> Any:
    """Returns the same nest of values, with change(path, value) for each tensor and plain value."""
    if isinstance(value, Mapping):
        return {key: mapped(element, f"{path}.{key}" if path else str(key), change) for key, element in value.items()}
    if isinstance(value, (tuple, list)):
        elements = [mapped(element, f"{path}.{number}", change) for number, element in enumerate(value)]
        made: Any = type(value)
        return made(*elements) if hasattr(value, "_fields") else made(elements)
    return change(path, value)


def _is_there(value: Any) -> bool:
    return isinstance(value, Tensor) and value.device.type != "cpu"


def on_host(batch: Given) -> Given:
    """Returns the batch in host memory. Waits once if a part of it is on a device."""
    there = {path: value for path, value in leaves_of(batch, "") if _is_there(value) and value.device.type != "meta"}
    if not there:
        return batch
    found = dict(zip(there, to_host([value.detach() for value in there.values()])))
    copied: Given = mapped(batch, "", lambda path, value: found.get(path, value))
    return copied


def on_device(batch: Given, device: torch.device) -> Given:
    """Returns the batch on the model's device. Does not wait."""
    if device.type == "cpu":
        return batch
    copied: Given = mapped(batch, "", lambda _, value: to_device(value, device) if isinstance(value, Tensor) and not _is_there(value) else value)
    return copied


def check_places(batch: Batch, device: torch.device) -> None:
    for path, value in leaves_of(batch, ""):
        if _is_there(value) and value.device != device:
            here = "on the CPU, where the model is" if device.type == "cpu" else f"on the CPU, or on {device}, where the model is"
            raise BadInputError(f"batch: {path.lstrip('.')} is on {value.device}, wanted it {here}")


def _axis(path: str, tensor: Tensor) -> int:
    """Returns the dimension of the samples. position_ids of three dimensions have it second."""
    return 1 if path == "position_ids" and tensor.dim() == 3 else 0


def _sizes(leaves: Leaves) -> dict[str, int]:
    return {path: tensor.shape[_axis(path, tensor)] for path, tensor in leaves.items() if isinstance(tensor, Tensor) and tensor.dim() > 0}


def _shared(path: str, size: int) -> bool:
    """Returns whether one row serves all samples, as in masks and positions."""
    return size == 1 and path not in CUT


def batch_size(batch: Mapping[str, Any], micro_batches: int) -> int:
    """Returns the number of samples. Raises BadInputError if the batch cannot be cut into the micro-batches."""
    leaves = dict(leaves_of(batch, ""))
    for flag, why in FLAGS.items():
        if batch.get(flag):
            raise BadInputError(f"batch: {flag} is on, but {why}; leave it out")
    for path, value in leaves.items():
        if isinstance(value, Tensor) and value.requires_grad:
            raise BadInputError(f"batch: {path} requires grad, wanted data; train it as a parameter of the model")
        if not isinstance(value, (Tensor, bool, int, float, str, type(None))):
            raise BadInputError(
                f"batch: {path} is a {type(value).__name__}, wanted tensors, numbers and strings, or lists and dictionaries of them"
            )
    sizes = _sizes(leaves)
    if not sizes:
        raise BadInputError("batch: it has no tensor, wanted input_ids and labels")
    counted = {path: size for path, size in sizes.items() if not _shared(path, size)} or sizes
    if len(set(counted.values())) != 1:
        raise BadInputError(f"batch: samples differ in number, {counted}, wanted as many in each tensor")
    size = next(iter(counted.values()))
    if size == 0 or size % micro_batches != 0:
        raise BadInputError(f"batch: {size} samples in {micro_batches} micro-batches, wanted a multiple of {micro_batches}")
    if micro_batches > 1:
        _check_lists(batch, "", size)
    return int(size)


def _check_lists(value: Any, path: str, size: int) -> None:
    """Refuses lists with a value for each sample, because lists are not cut."""
    if isinstance(value, Mapping):
        for key, element in value.items():
            _check_lists(element, f"{path}.{key}" if path else str(key), size)
    elif isinstance(value, (tuple, list)) and not any(isinstance(leaf, Tensor) for _, leaf in leaves_of(value, path)):
        if len(value) == size and size > 1:
            raise BadInputError(f"batch: {path} is a list of {size} values, as many as samples, wanted a tensor, which can be cut")


def micro_batches_of(batch: Batch, micro_batches: int, fewer: bool = False) -> list[dict[str, Any]]:
    """Returns the micro-batches, each with its samples of every tensor. If `fewer`, a given list may have less than `micro_batches`."""
    if isinstance(batch, Mapping):
        return rows_of(batch, batch_size(batch, micro_batches) // micro_batches, micro_batches)
    if not 0 < len(batch) <= micro_batches or len(batch) < micro_batches and not fewer:
        raise BadInputError(f"batch: a list of {len(batch)} micro-batches, wanted {micro_batches}{' at most' if fewer else ''}")
    for number, part in enumerate(batch):
        batch_size(part, 1)
        if (kinds := kinds_of(part)) != kinds_of(batch[0]):
            other = min(set(kinds.items()) ^ set(kinds_of(batch[0]).items()))[0]
            raise BadInputError(f"batch: micro-batch {number} has another {other} than micro-batch 0, wanted keys and types alike")
    return list(batch)


def first_of(batch: Batch) -> Mapping[str, Any]:
    """Returns the batch, or the first micro-batch of a list. The others have the same keys."""
    return batch if isinstance(batch, Mapping) else batch[0] if batch else {}


def sample_of(batch: Batch, micro_batches: int) -> dict[str, Any]:
    """Returns one or two samples as a micro-batch could have them, among them the one with most padding."""
    if not isinstance(batch, Mapping):
        batch, micro_batches = max(batch, key=_padding_of), 1
    size = batch_size(batch, micro_batches)
    labels = batch.get("labels")
    padded = int((labels.reshape(size, -1) == IGNORED).sum(1).argmax()) if isinstance(labels, Tensor) and labels.shape[:1] == (size,) else 0
    rows = torch.tensor(sorted({0, padded}) if size > micro_batches and padded > 0 else [padded])
    if size > micro_batches and len(rows) == 1:
        rows = torch.tensor([0, 1])

    def chosen(path: str, value: Any) -> Any:
        if not isinstance(value, Tensor) or value.dim() == 0:
            return value
        axis = _axis(path, value)
        return value if size > 1 and _shared(path, value.shape[axis]) else value.index_select(axis, rows.to(value.device))

    changed: dict[str, Any] = mapped(batch, "", chosen)
    return changed


def _padding_of(batch: Mapping[str, Any]) -> int:
    labels = batch.get("labels")
    return int((labels == IGNORED).sum()) if isinstance(labels, Tensor) else 0


def rows_of(batch: Mapping[str, Any], size: int, parts: int) -> list[dict[str, Any]]:
    total = max(size * parts, 1)

    def cut(index: int) -> Callable[[str, Any], Any]:
        def change(path: str, value: Any) -> Any:
            if not isinstance(value, Tensor) or value.dim() == 0:
                return value
            axis = _axis(path, value)
            if total > 1 and _shared(path, value.shape[axis]):
                return value
            return value.narrow(axis, index * size, size)

        return change

    return [mapped(batch, "", cut(index)) for index in range(parts)]


def kinds_of(batch: Mapping[str, Any]) -> dict[str, str]:
    """Returns the kind of each value by path, such as "torch.int64 of 2 dimensions". Omits None."""
    kinds = {}
    for path, value in leaves_of(batch, ""):
        if isinstance(value, Tensor) and value.dim() > 0:
            kinds[path] = f"{value.dtype} of {value.dim()} dimensions"
        elif isinstance(value, bool):
            kinds[path] = "on" if value else "off"
        elif value is not None:
            kinds[path] = "a string" if isinstance(value, str) else "a number"
    return kinds


def check_kinds(batch: Mapping[str, Any], checked: Mapping[str, set[str]]) -> None:
    """Refuses kinds of values with which the split was not checked. It cannot be checked any more, because no rank has the whole model."""
    for path, kind in kinds_of(batch).items():
        if path not in checked:
            raise BadInputError(f"batch: {path} was not in the first batch, with which the split was checked; wanted it there, too")
        if kind not in checked[path]:
            raise BadInputError(
                f"batch: {path} is {kind}, in the first batch, with which the split was checked, {' or '.join(sorted(checked[path]))}; wanted "
                "the same"
            )


def are_known(batch: Mapping[str, Any], checked: Mapping[str, set[str]]) -> bool:
    """Returns whether the split was checked with these kinds of values."""
    return all(kind in checked.get(path, ()) for path, kind in kinds_of(batch).items())


def count_tokens(batch: Batch) -> int:
    """Returns the number of tokens: the elements of input_ids, or the samples of a batch without them."""
    if not isinstance(batch, Mapping):
        return sum(map(count_tokens, batch))
    if isinstance(ids := batch.get("input_ids"), Tensor):
        return int(ids.numel())
    return next(iter(_sizes(dict(leaves_of(batch, ""))).values()))
