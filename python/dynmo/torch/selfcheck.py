# SPDX-License-Identifier: Apache-2.0
"""The parts of a decoder, run one after another, against the whole model: loss and every gradient, bit for bit.

A split that is almost right trains something else without an error, so it is checked before any weight is dropped.
"""
from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from ..errors import BadInputError
from .decoder import Decoder, find_blocks

TOKENS = 8


def sample_batch(model: nn.Module, seed: int = 0) -> dict[str, Tensor]:
    """Two samples of 8 tokens, the second padded on the left."""
    vocabulary = int(getattr(model.config, "vocab_size"))
    generator = torch.Generator().manual_seed(seed)
    ids = torch.randint(0, vocabulary, (2, TOKENS), generator=generator)
    mask = torch.ones_like(ids)
    mask[1, :3] = 0
    device = next(model.parameters()).device
    return {"input_ids": ids.to(device), "attention_mask": mask.to(device), "labels": ids.masked_fill(mask == 0, -100).to(device)}


def _gradients(model: nn.Module, loss: Tensor) -> dict[str, Tensor]:
    named = [(name, parameter) for name, parameter in model.named_parameters() if parameter.requires_grad]
    found = torch.autograd.grad(loss, [parameter for _, parameter in named], allow_unused=True)
    return {name: gradient for (name, _), gradient in zip(named, found) if gradient is not None}


def _run_parts(decoder: Decoder, batch: dict[str, Tensor], apart: bool) -> Tensor:
    """Runs the layers; `apart` gives blocks and head the notes that ranks without the embedding make."""
    context = decoder.begin(batch, 0)
    hidden = decoder.run(0, None, context)
    if apart:
        shape, dtype = context.shape, context.dtype
        context = decoder.begin(batch, 0)
        decoder.describe(context)
        if (context.shape, context.dtype) != (shape, dtype):
            raise BadInputError(
                f"model: the embedding gives {shape} in {dtype}, its stand-in {context.shape} in {context.dtype}; "
                "split the model yourself with layers=[(name, module), ...]"
            )
    for _, named in context.notes.arguments:
        for name, value in named.items():
            if isinstance(value, Tensor) and value.requires_grad:
                raise BadInputError(f"model: blocks are given {name}, which is trained, wanted the hidden tensor alone to be")
    for layer in range(1, len(decoder.layers)):
        hidden = decoder.run(layer, hidden, context)
    return hidden


def _same_notes(one: Any, other: Any) -> bool:
    if isinstance(one, Tensor) and isinstance(other, Tensor):
        return one.shape == other.shape and one.dtype == other.dtype and bool(torch.equal(one, other))
    if isinstance(one, (tuple, list)) and isinstance(other, (tuple, list)):
        return len(one) == len(other) and all(map(_same_notes, one, other))
    if isinstance(one, dict) and isinstance(other, dict):
        return one.keys() == other.keys() and all(_same_notes(one[key], other[key]) for key in one)
    return type(one) is type(other) and (one == other if isinstance(one, (str, int, float, bool, type(None))) else True)


def split_decoder(model: nn.Module) -> Decoder:
    """A checked split; the model's own ties become two parameters."""
    find_blocks(model)  # says what is missing before the model runs
    batch = sample_batch(model)
    training = model.training
    model.eval()
    try:
        decoder = Decoder(model)
        decoder.probe(batch)
        whole_loss = model(**batch, use_cache=False)["loss"]
        whole = _gradients(model, whole_loss)
        decoder.collect()
        _compare(decoder, batch, whole_loss, whole)
        contexts = []
        for seed in (0, 1):
            contexts.append(decoder.begin({**batch, "input_ids": sample_batch(model, seed)["input_ids"]}, 0))
            decoder.describe(contexts[-1])
        decoder.notes_follow_shapes = _same_notes(contexts[0].notes.arguments, contexts[1].notes.arguments)
        decoder._cache.clear()
        return decoder
    finally:
        model.train(training)


def _compare(decoder: Decoder, batch: dict[str, Tensor], whole_loss: Tensor, whole: dict[str, Tensor]) -> None:
    for apart in (False, True):
        loss = _run_parts(decoder, batch, apart)
        parts = _gradients(decoder.module, loss)
        for tie in decoder.ties:
            if tie.first in parts or tie.second in parts:
                # The whole model adds head first, then embedding.
                parts[tie.first] = parts.pop(tie.second) + parts[tie.first]
        if not torch.equal(loss, whole_loss):
            raise BadInputError(
                f"model: its layers one by one give loss {loss.item():.9g}, the whole {whole_loss.item():.9g}; it cannot be split so, "
                "use layers=[(name, module), ...]"
            )
        wrong = [name for name in whole if name not in parts or not torch.equal(whole[name], parts[name])]
        if wrong:
            raise BadInputError(
                f"model: run layer by layer, the gradient of {wrong[0]} is not that of the whole model; it cannot be split so, "
                "use layers=[(name, module), ...]"
            )


def draws_random_numbers(decoder: Decoder) -> bool:
    """Whether training draws from PyTorch's global generator (dropout and the like)."""
    batch = sample_batch(decoder.module)
    with torch.random.fork_rng(devices=[]), torch.no_grad():
        before = torch.get_rng_state()
        training = decoder.module.training
        decoder.module.train()
        try:
            decoder.module(**batch, use_cache=False)
        finally:
            decoder.module.train(training)
        return not torch.equal(before, torch.get_rng_state())
