# SPDX-License-Identifier: Apache-2.0
"""Clocks of a rank. A stamp of a device is an event in its stream. Its time can be read after a wait for the device."""
from __future__ import annotations

from collections.abc import Callable, Iterable
from time import perf_counter
from typing import Any, Optional, Protocol

import torch

Stamp = Any  # seconds of a host clock, or an event


class Clock(Protocol):
    def stamp(self) -> Stamp:
        """Returns the present time in the stream of the calling thread."""

    def wait(self) -> None:
        """Waits until the times of all stamps so far can be read."""

    def seconds(self, start: Stamp, end: Stamp) -> float: ...

    def free(self, stamps: Iterable[Stamp]) -> None:
        """Takes back stamps that are no longer needed."""


class HostClock:
    def __init__(self, now: Optional[Callable[[], float]] = None) -> None:
        self._now = now

    def stamp(self) -> Stamp:
        return perf_counter() if self._now is None else self._now()

    def wait(self) -> None:
        pass

    def seconds(self, start: Stamp, end: Stamp) -> float:
        return float(end - start)

    def free(self, stamps: Iterable[Stamp]) -> None:
        pass


class EventClock:
    """A clock of a device. Reuses events, because making one takes longer than recording it. Hooks may stamp in autograd's thread while
    the caller waits for it.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._free: list[torch.Event] = []

    def stamp(self) -> Stamp:
        event = self._free.pop() if self._free else torch.Event(self._device, enable_timing=True)
        event.record(torch.accelerator.current_stream(self._device))  # which need not be the thread's current device
        return event

    def wait(self) -> None:
        now = self.stamp()
        now.synchronize()
        self.free([now])

    def seconds(self, start: Stamp, end: Stamp) -> float:
        return float(start.elapsed_time(end)) * 1e-3

    def free(self, stamps: Iterable[Stamp]) -> None:
        self._free += stamps
