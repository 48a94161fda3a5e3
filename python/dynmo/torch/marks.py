# SPDX-License-Identifier: Apache-2.0
"""Measures the times of layers. The hook on a layer's output is called when that layer's backward begins."""
from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Optional

from torch import Tensor

from .clocks import Clock, HostClock, Stamp
from .layers import Values

Stamps = list[tuple[int, Stamp]]


class Marks:
    """Sums of times over a step's micro-batches, by layer, on one rank. `settle` updates the sums, after a wait for the device."""

    def __init__(self, layers: int, clock: Optional[Clock] = None) -> None:
        self._layers = layers
        self._clock = clock if clock is not None else HostClock()
        self._noted: list[tuple[list[float], int, Stamp, Stamp]] = []
        self.reset()

    def reset(self) -> None:
        self.forward_s = [0.0] * self._layers
        self.backward_s = [0.0] * self._layers  # only of I if W is apart
        self.weights_s = [0.0] * self._layers
        self.forwards = [0] * self._layers
        self.backwards = [0] * self._layers
        self.apart = [0] * self._layers  # number of W actions
        self._waits_s = [0.0]
        self.wait_s = 0.0
        self._noted.clear()

    def settle(self) -> None:
        """Adds the times of the stamps so far. Call it after a wait for the clock."""
        for sums, place, start, end in self._noted:
            sums[place] += self._clock.seconds(start, end)
        self.wait_s = self._waits_s[0]
        self._clock.free({id(stamp): stamp for *_, start, end in self._noted for stamp in (start, end)}.values())
        self._noted.clear()

    @contextlib.contextmanager
    def waiting(self) -> Iterator[None]:
        start = self._clock.stamp()
        try:
            yield
        finally:
            self._noted.append((self._waits_s, 0, start, self._clock.stamp()))

    @contextlib.contextmanager
    def forward(self, layer: int) -> Iterator[None]:
        start = self._clock.stamp()
        yield
        self._noted.append((self.forward_s, layer, start, self._clock.stamp()))
        self.forwards[layer] += 1

    def watch(self, outputs: Values, stamps: Stamps, layer: int) -> None:
        """Stamps the time at which the gradient of a layer's output is complete."""

        def note(_: Tensor) -> None:
            stamps.append((layer, self._clock.stamp()))

        output = next((value for value in outputs.values() if value.grad_fn is not None), None)
        if output is not None:
            output.register_hook(note)  # type: ignore[no-untyped-call]

    @contextlib.contextmanager
    def backward(self, last: int, stamps: Stamps) -> Iterator[None]:
        stamps.clear()
        stamps.append((last, self._clock.stamp()))
        yield
        ends = [start for _, start in stamps[1:]] + [self._clock.stamp()]
        for (layer, start), end in zip(stamps, ends):
            self._noted.append((self.backward_s, layer, start, end))
            self.backwards[layer] += 1

    @contextlib.contextmanager
    def weights(self, layer: int) -> Iterator[None]:
        start = self._clock.stamp()
        yield
        self._noted.append((self.weights_s, layer, start, self._clock.stamp()))
        self.apart[layer] += 1
