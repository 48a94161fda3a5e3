# SPDX-License-Identifier: Apache-2.0
"""Sends tensors between two ranks through host memory. Ranks uses Gloo's group directly for everything else."""
from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Optional

import torch.distributed as dist
from torch import Tensor

from .device import empty_on_host, to_host

Group = Optional[dist.ProcessGroup]


class HostLane:
    """Sends and receives tensors by Gloo. A tensor on a device is first copied to host memory. The copy waits for the device. A received
    tensor is copied to its device.

    DeviceLane (channels.py) has the same calls. This lane tells messages between two ranks apart by `tag`, and DeviceLane by `purpose`.
    """

    def ready(self, tensors: Sequence[Tensor]) -> list[Tensor]:
        """Returns the tensors in host memory, where `send` takes them without a wait. Waits once for all of them."""
        return to_host(tensors)

    def send(self, group: Group, tensor: Tensor, to: int, tag: int, purpose: str) -> Any:
        """Begins to send to rank `to`. Returns an object with `wait`, which keeps the memory until the message is sent."""
        [carried] = to_host([tensor])
        return _Sending(dist.isend(carried, to, group=group, tag=tag), carried)

    def receive(self, group: Group, tensor: Tensor, source: int, tag: int, purpose: str) -> Any:
        """Begins to receive from rank `source`. Returns an object whose `wait` fills `tensor`."""
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
