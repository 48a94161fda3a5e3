# SPDX-License-Identifier: Apache-2.0
"""Compares the layers, run one by one, with the whole model: loss and every gradient, bit for bit.

A split with a small error would train another model without a message. So it is checked before any weight is dropped: at the start on a few
tokens, and with the first batch, whose keys may reach other code.
"""
from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any, Optional

import torch
from torch import Tensor, nn

from ..errors import BadInputError
from .batches import ITEMS
from .decoder import Caches, Decoder, find_blocks, text_config
from .device import Device
from .layers import Context, MicroBatch, Split, Values, frozen_prefix
from .marks import Marks
from .program import Action, Program, Stage
from .ranks import Ranks, one_line
from .step import Step, seed_for

TOKENS = 8
NEEDED = ("input_ids", "labels")
Gradients = dict[str, Tensor]


def sample_batch(model: nn.Module, seed: int = 0) -> dict[str, Tensor]:
    """Returns two samples of 8 tokens, the second padded on the left."""
    vocabulary = int(text_config(model).vocab_size)
    generator = torch.Generator().manual_seed(seed)
    ids = torch.randint(0, vocabulary, (2, TOKENS), generator=generator)
    mask = torch.ones_like(ids)
    mask[1, :3] = 0
    device = next(model.parameters()).device
    return {"input_ids": ids.to(device), "attention_mask": mask.to(device), "labels": ids.masked_fill(mask == 0, -100).to(device)}


@contextlib.contextmanager
def unnoticed(module: nn.Module, device: Device) -> Iterator[None]:
    """Restores gradients, buffers, random numbers and the hooks of gradients at the end. Uses deterministic kernels inside."""
    buffers = [(part, name, buffer, buffer.clone()) for part in module.modules() for name, buffer in part._buffers.items() if buffer is not None]
    parameters: list[Any] = list(module.parameters())
    hooks = [parameter._post_accumulate_grad_hooks for parameter in parameters]
    before = [parameter.grad for parameter in parameters]
    for parameter in parameters:
        parameter.grad = parameter._post_accumulate_grad_hooks = None
    try:
        with device.forked_random(), device.repeating_bits():
            yield
    finally:
        for parameter, hook, gradient in zip(parameters, hooks, before):
            parameter._post_accumulate_grad_hooks, parameter.grad = hook, gradient
        with torch.no_grad():
            for part, name, buffer, copy in buffers:
                if part._buffers.get(name) is buffer:
                    buffer.copy_(copy)


def taken_gradients(module: nn.Module) -> Gradients:
    """Removes the gradients of the parameters, and returns them."""
    found = {name: parameter.grad for name, parameter in module.named_parameters() if parameter.grad is not None}
    for parameter in module.parameters():
        parameter.grad = None
    return found


def whole(module: nn.Module, loss: Tensor) -> tuple[Tensor, Gradients]:
    if loss.requires_grad:
        with torch.autocast(loss.device.type, enabled=False):
            loss.backward()  # type: ignore[no-untyped-call]
    return loss.detach(), taken_gradients(module)


class _Apart:
    """A split of which only one layer at a time has weights, as on ranks that own one layer each."""

    def __init__(self, split: Split) -> None:
        self._split = split
        self._twins: dict[int, nn.Parameter] = {}
        self._places: list[tuple[nn.Module, str, int]] = []
        owner = {id(p): index for index, layer in enumerate(split.layers) for p in layer.parameters.values()}
        for part in split.module.modules():
            for name, parameter in part._parameters.items():
                if parameter is not None:
                    self._places.append((part, name, owner[id(parameter)]))
                    if id(parameter) not in self._twins:
                        twin = nn.Parameter(torch.empty_like(parameter, device="meta"), requires_grad=parameter.requires_grad)
                        self._twins[id(parameter)] = twin

    def __getattr__(self, name: str) -> Any:
        return getattr(self._split, name)

    def run(self, layer: int, values: Values, context: Context) -> Values:
        others = [(part, name, part._parameters[name]) for part, name, owner in self._places if owner != layer]
        for part, name, parameter in others:
            part._parameters[name] = self._twins[id(parameter)]
        try:
            return self._split.run(layer, values, context)
        finally:
            for part, name, parameter in others:
                part._parameters[name] = parameter


class _Alone(Ranks):
    """Stands for Ranks in checks: one rank, and no messages."""

    def __init__(self) -> None:
        self.rank, self.size = 0, 1


def parts(split: Split, batch: MicroBatch, seed: Optional[int], apart: bool, weights_apart: bool = False) -> tuple[Tensor, Gradients]:
    """Runs each layer as a stage. Returns the loss and the gradients.

    With `apart` each layer sees only the notes and weights of a rank that owns this layer alone. With `weights_apart` the backward pass is
    I of all layers, and then W of all layers.
    """
    count = len(split.layers)
    frozen = frozen_prefix(split.layers)
    forward = [Action("F", layer, 0) for layer in range(count)]
    kinds = "IW" if weights_apart else "B"
    backward = [Action(kind, layer, 0) for kind in kinds for layer in reversed(range(frozen, count))]
    program = Program(tuple(Stage(0, layer, 1) for layer in range(count)), frozen, 1, (*forward, *backward))
    context = split.begin(batch, 0)
    used: Any = split
    if apart:
        split.describe(context)
        used = _Apart(split)
    step = Step(used, _Alone(), program, [context], Marks(count), lambda loss: loss, 0, seed, lambda: None)
    step.run()
    return step.losses[0], taken_gradients(split.module)


def split_decoder(model: nn.Module) -> Decoder:
    """Returns a checked split. Its ties become two parameters."""
    find_blocks(model)  # raises before the model runs
    batch = sample_batch(model)
    training = model.training
    model.eval()
    try:
        decoder = Decoder(model)
        with unnoticed(model, decoder.device):
            decoder.probe(batch)
            found = whole(model, decoder.whole(batch, lambda _: None))
        decoder.collect()
        with unnoticed(model, decoder.device):
            if problem := _problem(decoder, batch, None, *found):
                raise BadInputError(f"model: {problem}; it cannot be split so, use layers=[(name, module), ...]")
            decoder.learn_what_notes_follow([{**batch, "input_ids": sample_batch(model, seed)["input_ids"]} for seed in (0, 1)])
        return decoder
    finally:
        model.train(training)


def difference(
    split: Split, batch: MicroBatch, seed: Optional[int], whole_loss: Tensor, gradients: Gradients, weights_apart: bool = False
) -> str:
    """Returns the first difference between the layers and the whole model, or ""."""
    # The last way is run twice, because blocks may keep something of the previous batch.
    for apart, deferred in ((False, False), (True, False), (True, weights_apart)):
        loss, found = parts(split, batch, seed, apart, deferred)
        for tie in split.ties:
            if tie.second not in gradients and tie.second in found:
  # the order in which the whole model adds a tie's gradients: head, then embedding
                second = found.pop(tie.second)
                found[tie.first] = second + found[tie.first] if tie.first in found else second
        if not torch.equal(loss, whole_loss):
            return f"its layers one by one give loss {loss.item():.9g}, the whole {whole_loss.item():.9g}"
        for name in [*gradients, *found]:
            if name not in gradients or name not in found or not torch.equal(gradients[name], found[name]):
                how = "with I and W apart" if deferred else "run layer by layer"
                return f"{how}, the gradient of {name} is not that of the whole model"
    return ""


def check_batch(split: Split, batch: MicroBatch, seed: Optional[int], weights_apart: bool = False) -> float:
    """Compares the layers with the whole model on a user's batch, in the model's present mode. Returns the loss."""
    with unnoticed(split.module, split.device):
        loss = _checked(split, batch, seed, weights_apart)
        if ITEMS in batch:
            _check_items(split, batch, seed, loss)
    return loss.item()


def flops_of(split: Split, batch: MicroBatch, seed: Optional[int]) -> float:
    """Returns the FLOPs of a forward pass's products. Like torch.utils.flop_counter, counts unfused attention and ignores the causal
    mask.
    """
    from torch.nn.attention import SDPBackend, sdpa_kernel
    from torch.utils.flop_counter import FlopCounterMode

    unfused = sdpa_kernel(SDPBackend.MATH)
    with unnoticed(split.module, split.device), torch.no_grad(), unfused, FlopCounterMode(display=False) as counter:
        split.whole(batch, _seeding(seed))
    return float(counter.get_total_flops())


def _checked(split: Split, batch: MicroBatch, seed: Optional[int], weights_apart: bool) -> Tensor:
    before = split.device.random_state()
    try:
        found = whole(split.module, split.whole(batch, _seeding(seed)))
    except BadInputError:
        raise
    except Exception as error:
        raise BadInputError(f"batch: the model cannot run it, {one_line(error)}; wanted a batch that model(**batch) takes") from error
    draws = seed is None and not all(map(torch.equal, before, split.device.random_state()))
    problem = _problem(split, batch, seed, *found, weights_apart)
    if problem and draws:
        wanted = "seed=NUMBER, from which they follow" if split.module.training else "none in eval mode"
        raise BadInputError(f"batch: {problem}, but layers draw random numbers, wanted {wanted}")
    if problem:
        key = _culprit(split, batch, seed)
        raise BadInputError(
            f"batch: {problem}{f' because of its {key}, wanted the batch without it' if key else ''}; it cannot be split so"
            f"{', use layers=[(name, module), ...]' if isinstance(split, Decoder) else ''}"
        )
    return found[0]


def _problem(
    split: Split, batch: MicroBatch, seed: Optional[int], loss: Tensor, gradients: Gradients, weights_apart: bool = False
) -> str:
    """Returns the first difference, or "" if there is none for some replacement of the model's cache."""
    if not isinstance(split, Decoder):
        return _problem_as_is(split, batch, seed, loss, gradients, weights_apart)
    before, chosen = dict(split.carried), split.caches
    found = ""
    for caches in (chosen, *(other for other in Caches if other is not chosen)):
        split.take(caches, dict(before))
        problem = _problem_as_is(split, batch, seed, loss, gradients, weights_apart)
        if not problem:
            return ""
        found = found or problem
    split.take(chosen, before)
    return found


def _problem_as_is(
    split: Split, batch: MicroBatch, seed: Optional[int], loss: Tensor, gradients: Gradients, weights_apart: bool = False
) -> str:
    try:
        if isinstance(split, Decoder):
            split.learn(batch)
        return difference(split, batch, seed, loss, gradients, weights_apart)
    except BadInputError as error:
        return one_line(error)
    except Exception as error:
        return f"its layers one by one end with {one_line(error)}"


def _culprit(split: Split, batch: MicroBatch, seed: Optional[int]) -> str:
    """Returns the key without which the layers agree with the whole model, or ""."""
    for key in batch:
        if key in NEEDED:
            continue
        rest = {name: value for name, value in batch.items() if name != key}
        with contextlib.suppress(Exception):
            if not _problem(split, rest, seed, *whole(split.module, split.whole(rest, _seeding(seed)))):
                return key
    return ""


def _check_items(split: Split, batch: MicroBatch, seed: Optional[int], loss: Tensor) -> None:
    """Refuses a head that takes num_items_in_batch and ignores it: its loss is a mean, which must not be summed."""
    with torch.no_grad():
        other = split.whole({**batch, ITEMS: batch[ITEMS] * 2}, _seeding(seed))
    if torch.equal(loss, other.detach()):
        raise BadInputError(
            f"batch: {type(split.module).__name__} takes {ITEMS}, but its loss does not depend on it, wanted the batch without it; the loss "
            "is then the mean of the micro-batches"
        )


def _seeding(seed: Optional[int]) -> Callable[[int], None]:
    """Returns a function that seeds the random numbers of a layer as a step does."""
    def before(layer: int) -> None:
        if seed is not None:
            torch.manual_seed(seed_for(seed, layer, 0, 0))

    return before


def draws_random_numbers(decoder: Decoder) -> bool:
    """Returns whether training draws from PyTorch's global generator (dropout and the like)."""
    batch = sample_batch(decoder.module)
    training = decoder.module.training
    with unnoticed(decoder.module, decoder.device), torch.no_grad():
        before = decoder.device.random_state()
        decoder.module.train()
        try:
            decoder.module(**decoder.arguments(batch))
        finally:
            decoder.module.train(training)
        return not all(map(torch.equal, before, decoder.device.random_state()))
