# SPDX-License-Identifier: Apache-2.0
"""Moves layers between ranks: copy, compare digests, vote, commit. Until the vote the old plan is complete."""
from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from time import perf_counter
from typing import Any, Optional

import torch

from ..errors import BadInputError
from . import checks, state
from .channels import Channel, channels_of
from .device import to_host
from .layers import Layer, Split
from .program import Plan
from .ranks import Message, Ranks

MOVE_TAG = 1 << 25  # ... + layer x MESSAGES + message
MESSAGES = 1 << 12
DIGEST_BYTES = 16


@dataclass(frozen=True)
class Moved:
    """The result of a move: bytes of the layers, total seconds, and the layers that changed ranks. `done` is false if it was refused."""

    bytes: int
    seconds: float
    layers: tuple[int, ...]
    done: bool

    def __str__(self) -> str:
        return f"{len(self.layers)} layers, {self.bytes} bytes in {self.seconds:.6f} s{'' if self.done else ', not accepted'}"


@dataclass(frozen=True)
class Transfer:
    """A copy of a layer from rank `source` to rank `target`, by their numbers in torch.distributed."""

    layer: int
    source: int
    target: int


@dataclass
class _Arriving:
    """A layer that this rank receives, and its messages."""

    layer: int
    content: state.Content
    messages: list[Message]
    flat: Optional[Message]  # the message from device to device, if any


class Mover:
    """Moves layers at step boundaries. All ranks call it together."""

    def __init__(self, split: Split, ranks: Ranks, optimizer: Optional[torch.optim.Optimizer]) -> None:
        self._split, self._ranks, self._optimizer = split, ranks, optimizer

    def move(self, old: Plan, new: Plan, keep: bool = False) -> Moved:
        """Moves the layers from their ranks under `old` to those under `new`. With `keep` the sources keep them, too. Moves nothing if a
        digest differs on any rank.
        """
        start = perf_counter()
        before, after = old.owners, new.owners
        arrived, heads = self.copy(before, after, new)
        changed = tuple(heads)
        if not self.vote(arrived is not None):
            return Moved(0, perf_counter() - start, changed, False)
        assert arrived is not None
        for layer in changed:
            if before[layer] == self._ranks.rank:
                if not keep:
                    state.give_away(self._split.layers[layer], self._optimizer)
            elif after[layer] == self._ranks.rank:
                state.take_in(self._split.layers[layer], self._optimizer, arrived.pop(layer), self._split.device.device)
        self._ranks.open(channels_of(new, self._split.ties, self._ranks.layout))
        size = sum(heads[layer].payload for layer in changed)
        return Moved(size, perf_counter() - start, changed, True)

    def copy(
        self, before: list[int], after: list[int], plan: Plan, on_host: bool = False
    ) -> tuple[Optional[dict[int, state.Content]], dict[int, state.Head]]:
        """Copies layers from the ranks `before` to the ranks `after`. Returns the same as `carry`."""
        transfers = [
            Transfer(layer, row[first], row[then])
            for row in self._ranks.layout for layer, (first, then) in enumerate(zip(before, after)) if first != then
        ]
        contents = {
            transfer.layer: state.content_of(self._split.layers[transfer.layer], self._optimizer)
            for transfer in transfers if transfer.source == self._ranks.number
        }
        return self.carry(transfers, contents, plan, on_host)

    def carry(
        self, transfers: Sequence[Transfer], contents: dict[int, state.Content], plan: Plan, on_host: bool = False
    ) -> tuple[Optional[dict[int, state.Content]], dict[int, state.Head]]:
        """Sends the layers `contents` as `transfers` say, a list that has the transfers of all ranks.

        Returns the layers that arrived here, or None if a digest differs; and the heads of all layers that moved. With `on_host` layers
        arrive in host memory, and a device holds at most one extra layer.
        """
        changed = sorted({transfer.layer for transfer in transfers})
        heads = self._agree(plan, {layer: state.head_of(content) for layer, content in contents.items()}, changed)
        if not on_host:
            self._ranks.open(list(dict.fromkeys(Channel(transfer.source, transfer.target, "move") for transfer in transfers)))
        return self._exchange(transfers, contents, heads, on_host), {layer: heads[layer] for layer in changed}

    def _agree(self, new: Plan, own: dict[int, state.Head], changed: list[int]) -> dict[int, state.Head]:
        """Returns the heads of all layers that move. Raises BadInputError if the ranks' plans differ or a layer cannot be moved."""
        plan = (new.stages, new.schedule)
        problem = checks.check_free(
            pair for layer in changed if layer in own for pair in self._split.layers[layer].parameters.items()
        )
        told: list[Any] = self._ranks.gather((plan, problem, own))
        heads: dict[int, state.Head] = {}
        for rank, (other, trouble, owned) in enumerate(told):
            if other != told[0][0]:
                raise BadInputError(f"rank {rank} plans another cut than rank 0, wanted the same program and processors on all ranks")
            if trouble:
                raise BadInputError(f"rank {rank}: {trouble}")
            heads.update(owned)
        return heads

    def _exchange(
        self, transfers: Sequence[Transfer], contents: dict[int, state.Content], heads: dict[int, state.Head], on_host: bool
    ) -> Optional[dict[int, state.Content]]:
        """Returns the layers that arrived here, or None if a digest differs."""
        incoming = []
        device = None if on_host else self._ranks.channel_device
        through_host = {layer: head if device is None else head.on_host for layer, head in heads.items()}
        targets: dict[int, list[tuple[int, int]]] = {}  # (replica, position) of the receivers, for layers that this rank sends
        for transfer in transfers:
            layer = transfer.layer
            if transfer.target == self._ranks.number:
                content, tensors = state.room_for(through_host[layer], DIGEST_BYTES)
                replica, rank = self._ranks.place_of(transfer.source)
                flat = None
                if device is not None and heads[layer].there:
                    flat = self._ranks.receive(state.flat_room(heads[layer], device), rank, 0, replica, "move")
                messages = [self._ranks.receive(tensor, rank, _tag(layer, number), replica) for number, tensor in enumerate(tensors)]
                incoming.append(_Arriving(layer, content, messages, flat))
            if transfer.source == self._ranks.number:
                targets.setdefault(layer, []).append(self._ranks.place_of(transfer.target))
        outgoing = []
        flats = {layer: state.flat_of(contents[layer], heads[layer], device) for layer in targets if device is not None and heads[layer].there}
        for layer, flat_sent in flats.items():
            outgoing += [self._ranks.send(flat_sent, rank, 0, replica, "move") for replica, rank in targets[layer]]
        digests_of = dict(zip(flats, map(checks.content_digest, to_host(list(flats.values())))))
        for layer, places in targets.items():
            digests = [digests_of[layer]] if layer in flats else []
            *large, packed = state.messages_of(contents[layer], through_host[layer], DIGEST_BYTES)
            for number, tensor in enumerate(large):
                outgoing += [self._ranks.send(tensor, rank, _tag(layer, number), replica) for replica, rank in places]
                digests.append(checks.content_digest(tensor))
            digests.append(checks.content_digest(packed[:-DIGEST_BYTES]))
            packed[-DIGEST_BYTES:] = checks.content_digest(torch.cat(digests))
            self._damage(layer, packed)
            outgoing += [self._ranks.send(packed, rank, _tag(layer, len(large)), replica) for replica, rank in places]
        arrived: Optional[dict[int, state.Content]] = {}
        there = {part.layer: part.flat.wait() for part in incoming if part.flat is not None}
        copies = dict(zip(there, to_host(list(there.values()))))
        for part in incoming:
            digests = [checks.content_digest(copies[part.layer])] if part.layer in copies else []
            digests += [checks.content_digest(message.wait()) for message in part.messages[:-1]]
            packed = part.messages[-1].wait()
            digests.append(checks.content_digest(packed[:-DIGEST_BYTES]))
            if not torch.equal(checks.content_digest(torch.cat(digests)), packed[-DIGEST_BYTES:]):
                arrived = None
            elif arrived is not None:
                state.unpack(packed, through_host[part.layer], part.content)
                if part.layer in copies:
                    part.content.tensors.update(state.cut(there[part.layer], heads[part.layer].there))
                    part.content.of_device = {entry[:2] for entry in heads[part.layer].there}
                arrived[part.layer] = part.content
        for message in outgoing:
            message.wait()
        return arrived

    def _damage(self, layer: int, packed: torch.Tensor) -> None:
        """Does nothing. Tests override it to damage bytes."""

    def vote(self, yes: bool) -> bool:
        return bool(self._ranks.sum(torch.tensor([0.0 if yes else 1.0], dtype=torch.float64))[0] == 0)


def _tag(layer: int, message: int) -> int:
    return MOVE_TAG + layer * MESSAGES + message


def release_others(layers: list[Layer], owners: list[int], rank: int, optimizer: Optional[torch.optim.Optimizer]) -> None:
    """Drops the layers of other ranks at the start, when every rank has all of them."""
    for layer, owner in zip(layers, owners):
        if owner != rank:
            state.give_away(layer, optimizer)
