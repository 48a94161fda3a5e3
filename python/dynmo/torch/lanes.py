# SPDX-License-Identifier: Apache-2.0
"""How tensors travel between two ranks. Ranks takes everything else from the group of Gloo itself."""
from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Optional

import torch.distributed as dist
from torch import Tensor

from .device import empty_on_host, to_host

Group = Optional[dist.ProcessGroup]


class HostLane:
    """Through host memory and Gloo. A tensor of a device is copied there first, which waits for it; one that arrives is copied on its device.

    A lane from device to device would be another class with these calls. Tags tell messages of two ranks apart.
    """

    def ready(self, tensors: Sequence[Tensor]) -> list[Tensor]:
        """Tensors that `send` takes without a wait; one wait for all of them."""
        there = [tensor for tensor in tensors if tensor.device.type != "cpu"]
        copies = iter(to_host(there))
        return [tensor if tensor.device.type == "cpu" else next(copies) for tensor in tensors]

    def send(self, group: Group, tensor: Tensor, to: int, tag: int) -> Any:
        """Begins to send; what it returns has a `wait`, and keeps the memory that is read."""
        [carried] = self.ready([tensor])
        return _Sending(dist.isend(carried, to, group=group, tag=tag), carried)

    def receive(self, group: Group, tensor: Tensor, source: int, tag: int) -> Any:
        """Begins to receive into `tensor`, which is filled after `wait`."""
        if tensor.device.type == "cpu":
            return dist.irecv(tensor, source, group=group, tag=tag)
        room = empty_on_host(tensor.shape, tensor.dtype)
        return _Receiving(dist.irecv(room, source, group=group, tag=tag), room, tensor)


class _Sending:
    def __init__(self, work: Any, carried: Tensor) -> None:
        self._work, self._carried = work, carried

    def wait(self) -> None:
        self._work.wait()


class _Receiving:
    def __init__(self, work: Any, room: Tensor, tensor: Tensor) -> None:
        self._work, self._room, self._tensor = work, room, tensor

    def wait(self) -> None:
        self._work.wait()
        self._tensor.copy_(self._room, non_blocking=True)
