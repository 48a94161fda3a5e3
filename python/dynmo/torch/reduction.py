# SPDX-License-Identifier: Apache-2.0
"""Sums gradients over replicas at the end of a step, in the order of the replicas, as dynmo/runtime/reduction.h does.

A direct reduce-scatter, then an all-gather: replica i of D sums the i-th part of a layer's gradients and sends the sum to the others.
Every element is ((g0 + g1) + g2) + ... on any replica. A ring would add each part in an order of its own.
"""
from __future__ import annotations

from dataclasses import dataclass, field
from time import perf_counter
from typing import Optional

import torch
from torch import Tensor, nn

from .layers import Split
from .ranks import Message, Ranks

REDUCTION_TAG = 1 << 27


@dataclass(frozen=True)
class Reduced:
    """The sums of a step on this rank: the number of parameters, the bytes sent, and the seconds that compute did not hide."""

    parameters: int = 0
    bytes: int = 0
    seconds: float = 0.0


@dataclass
class _Bucket:
    """Gradients of a layer that have one type, and that the same replicas have."""

    tag: int
    parameters: list[nn.Parameter]
    givers: list[int]  # replicas that have these gradients
    flat: Tensor
    parts: list[Tensor] = field(default_factory=list)  # views of `flat`, by the replica that sums them
    total: Optional[Tensor] = None  # sum of this replica's part, apart from `flat`, which is still being sent
    arriving: dict[int, Message] = field(default_factory=dict)  # by replica
    sent: list[Message] = field(default_factory=list)


class Reduction:
    """Sums gradients over the replicas, once a step, on all their ranks together. Ranks of one position hold the same layers."""

    def __init__(self, split: Split, ranks: Ranks) -> None:
        self._split, self._ranks = split, ranks
        self._bytes = 0

    def __call__(self, owners: list[int]) -> Reduced:
        """Replaces the gradients of this rank's layers by their sums. At most two layers' gradients are held twice."""
        start = perf_counter()
        self._bytes, count = 0, 0
        layers = [layer.parameters for layer, owner in zip(self._split.layers, owners) if owner == self._ranks.rank]
        givers = self._givers([parameter for parameters in layers for parameter in parameters.values()])
        scattered: list[_Bucket] = []
        gathered: list[_Bucket] = []
        tag = REDUCTION_TAG + 1
        for parameters in layers:
            for bucket in _buckets(list(parameters.values()), givers, self._ranks.replica, tag):
                tag += 2
                count += len(bucket.parameters)
                self._scatter(bucket)
                scattered.append(bucket)
            while len(scattered) > 1:
                gathered.append(self._sum(scattered.pop(0)))
            while len(gathered) > 1:
                self._finish(gathered.pop(0))
        for bucket in [*gathered, *map(self._sum, scattered)]:
            self._finish(bucket)
        self._ranks.settle()  # before the optimizer's update
        return Reduced(count, self._bytes, perf_counter() - start)

    def _others(self) -> list[int]:
        return [replica for replica in range(self._ranks.replicas) if replica != self._ranks.replica]

    def _send(self, tensor: Tensor, replica: int, tag: int) -> list[Message]:
        self._bytes += tensor.numel() * tensor.element_size()
        return [self._ranks.send(tensor, self._ranks.rank, tag, replica, "sum")] if tensor.numel() > 0 else []

    def _receive(self, like: Tensor, replica: int, tag: int) -> dict[int, Message]:
        if like.numel() == 0:
            return {}
        return {replica: self._ranks.receive(torch.empty_like(like), self._ranks.rank, tag, replica, "sum")}

    def _givers(self, parameters: list[nn.Parameter]) -> dict[int, list[int]]:
        """Returns, by id of each parameter, the replicas that have its gradient. An unused expert, for example, has none."""
        own = torch.tensor([parameter.grad is not None for parameter in parameters], dtype=torch.uint8)
        arriving: dict[int, Message] = {}
        sent: list[Message] = []
        for replica in self._others():
            arriving.update(self._receive(own, replica, REDUCTION_TAG))
            sent += self._send(own, replica, REDUCTION_TAG)
        flags = {replica: message.wait().tolist() for replica, message in arriving.items()}
        flags[self._ranks.replica] = own.tolist()
        for message in sent:
            message.wait()
        return {
            id(parameter): [replica for replica in sorted(flags) if flags[replica][number]] for number, parameter in enumerate(parameters)
        }

    def _scatter(self, bucket: _Bucket) -> None:
        """Sends this replica's gradients to the replicas that sum them."""
        count, replicas = bucket.flat.numel(), self._ranks.replicas
        ends = [count * replica // replicas for replica in range(replicas + 1)]
        bucket.parts = [bucket.flat[first:end] for first, end in zip(ends, ends[1:])]
        for replica in self._others():
            if replica in bucket.givers:
                bucket.arriving.update(self._receive(bucket.parts[self._ranks.replica], replica, bucket.tag))
            if self._ranks.replica in bucket.givers:
                bucket.sent += self._send(bucket.parts[replica], replica, bucket.tag)

    def _sum(self, bucket: _Bucket) -> _Bucket:
        """Sums this replica's part, and sends the sum to the others."""
        own = bucket.parts[self._ranks.replica]
        if own.numel() > 0:
            first, *others = (own if giver == self._ranks.replica else bucket.arriving[giver].wait() for giver in bucket.givers)
            for other in others:
                first = first + other
            own = bucket.total = first
        bucket.arriving.clear()
        for replica in self._others():
            bucket.arriving.update(self._receive(bucket.parts[replica], replica, bucket.tag + 1))
            bucket.sent += self._send(own, replica, bucket.tag + 1)
        return bucket

    def _finish(self, bucket: _Bucket) -> None:
        for sent in bucket.sent:  # their memory is written next
            sent.wait()
        if bucket.total is not None:
            bucket.parts[self._ranks.replica].copy_(bucket.total)
        for replica, message in bucket.arriving.items():
            bucket.parts[replica].copy_(message.wait())
        offset = 0
        for parameter in bucket.parameters:
            if parameter.grad is None:
                parameter.grad = torch.empty_like(parameter)
            parameter.grad.copy_(bucket.flat[offset : offset + parameter.numel()].view(parameter.shape))
            offset += parameter.numel()


def _buckets(parameters: list[nn.Parameter], givers: dict[int, list[int]], replica: int, tag: int) -> list[_Bucket]:
    """Returns a layer's gradients as one tensor for each type and set of replicas. The order is the same in all replicas."""
    kinds: dict[tuple[torch.dtype, tuple[int, ...]], list[nn.Parameter]] = {}
    for parameter in parameters:
        if givers[id(parameter)]:
            kinds.setdefault((parameter.dtype, tuple(givers[id(parameter)])), []).append(parameter)
    buckets = []
    for number, ((dtype, those), chosen) in enumerate(kinds.items()):
        if replica in those:
            flat = torch.cat([parameter.grad.reshape(-1) for parameter in chosen if parameter.grad is not None])
        else:
            flat = torch.empty(sum(parameter.numel() for parameter in chosen), dtype=dtype, device=chosen[0].device)
        buckets.append(_Bucket(tag + 2 * number, chosen, list(those), flat))
    return buckets
