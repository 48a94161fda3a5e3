# SPDX-License-Identifier: Apache-2.0
"""How tensors travel between two ranks through host memory. Ranks takes everything else from the group of Gloo itself."""
from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Optional

import torch.distributed as dist
from torch import Tensor

from .device import empty_on_host, to_host

Group = Optional[dist.ProcessGroup]


class HostLane:
    """Through host memory and Gloo. A tensor of a device is copied there first, which waits for it; one that arrives is copied on its device.

    Another lane with these calls is that from device to device (channels.py). Tags tell messages of two ranks apart here, purposes there.
    """

    def ready(self, tensors: Sequence[Tensor]) -> list[Tensor]:
        """Tensors that `send` takes without a wait; one wait for all of them."""
        return to_host(tensors)

    def send(self, group: Group, tensor: Tensor, to: int, tag: int, purpose: str) -> Any:
        """Begins to send; what it returns has a `wait`, and keeps the memory that is read."""
        [carried] = to_host([tensor])
        return _Sending(dist.isend(carried, to, group=group, tag=tag), carried)

    def receive(self, group: Group, tensor: Tensor, source: int, tag: int, purpose: str) -> Any:
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
