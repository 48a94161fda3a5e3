# SPDX-License-Identifier: Apache-2.0
"""Sends the named tensors of a boundary between two ranks, one message each.

If shapes are limits, a message with the actual shapes is sent first, and the receiver allocates these.
"""
from __future__ import annotations

from collections.abc import Sequence
from typing import Optional

import torch
from torch import Tensor

from ..errors import BadInputError
from .layers import Spec, Values
from .ranks import Message, Ranks


def post(ranks: Ranks, specs: Sequence[Spec], values: Values, to: int, tag: int, purpose: str, limits: bool) -> list[Message]:
    """Begins to send the tensors of `specs` to rank `to`. Waits at most once for a device. Uses tags from `tag` to `tag + len(specs)`.

    With `limits` the shapes of `specs` are the largest ones, so the shapes of the values are sent first.
    """
    sent = []
    if limits:
        sizes = [extent for spec in specs for extent in values[spec.name].shape]
        sent.append(ranks.send(torch.tensor(sizes, dtype=torch.int64), to, tag + len(specs)))
    full = [number for number, spec in enumerate(specs) if values[spec.name].numel() > 0]
    tensors = ranks.ready([values[specs[number].name].detach().contiguous() for number in full])
    return sent + [ranks.send(tensor, to, tag + number, purpose=purpose) for number, tensor in zip(full, tensors)]


class Arriving:
    """Tensors that this rank receives. Their shapes are those of `specs`, or with `limits` at most those."""

    def __init__(
        self, ranks: Ranks, specs: Sequence[Spec], source: int, tag: int, purpose: str, limits: bool, device: torch.device
    ) -> None:
        self._ranks, self._specs, self._source, self._tag, self._purpose, self._device = ranks, specs, source, tag, purpose, device
        self._sizes: Optional[Message] = None
        self._messages: list[Optional[Message]] = []
        self._values: Values = {}
        if limits:
            sizes = torch.empty(sum(len(spec.shape) for spec in specs), dtype=torch.int64)
            self._sizes = ranks.receive(sizes, source, tag + len(specs))
        else:
            self._post([spec.shape for spec in specs])

    def _post(self, shapes: Sequence[tuple[int, ...]]) -> None:
        for number, (spec, shape) in enumerate(zip(self._specs, shapes)):
            buffer = torch.empty(shape, dtype=spec.dtype, device=self._device)
            self._values[spec.name] = buffer
            self._messages.append(
                self._ranks.receive(buffer, self._source, self._tag + number, purpose=self._purpose) if buffer.numel() > 0 else None
            )

    def wait(self) -> Values:
        if self._sizes is not None:
            self._post(_shapes(self._specs, self._sizes.wait()))
        for message in self._messages:
            if message is not None:
                message.wait()
        return self._values


def _shapes(specs: Sequence[Spec], sizes: Tensor) -> list[tuple[int, ...]]:
    rest, shapes = sizes.tolist(), []
    for spec in specs:
        shape, rest = tuple(rest[: len(spec.shape)]), rest[len(spec.shape) :]
        if any(extent < 0 or extent > most for extent, most in zip(shape, spec.shape)):
            raise BadInputError(f"a tensor {spec.name} of {shape} has arrived, wanted at most {spec.shape} as `hidden` says")
        shapes.append(shape)
    return shapes
