# SPDX-License-Identifier: Apache-2.0
"""Times of layers. The hook on a layer's output is called when that layer's backward begins."""
from __future__ import annotations

import contextlib
from collections.abc import Iterator
from time import perf_counter

from torch import Tensor

from .layers import Values

Stamps = list[tuple[int, float]]


class Marks:
    """Sums over the micro-batches of a step, by layer; all of one rank."""

    def __init__(self, layers: int) -> None:
        self._layers = layers
        self.reset()

    def reset(self) -> None:
        self.forward_s = [0.0] * self._layers
        self.backward_s = [0.0] * self._layers  # of I alone where W is apart
        self.weights_s = [0.0] * self._layers
        self.forwards = [0] * self._layers
        self.backwards = [0] * self._layers
        self.apart = [0] * self._layers  # how often W ran by itself
        self.wait_s = 0.0

    @contextlib.contextmanager
    def waiting(self) -> Iterator[None]:
        start = perf_counter()
        try:
            yield
        finally:
            self.wait_s += perf_counter() - start

    @contextlib.contextmanager
    def forward(self, layer: int) -> Iterator[None]:
        start = perf_counter()
        yield
        self.forward_s[layer] += perf_counter() - start
        self.forwards[layer] += 1

    def watch(self, outputs: Values, stamps: Stamps, layer: int) -> None:
        """Notes when the gradient of a layer's output is there."""

        def note(_: Tensor) -> None:
            stamps.append((layer, perf_counter()))

        output = next((value for value in outputs.values() if value.grad_fn is not None), None)
        if output is not None:
            output.register_hook(note)  # type: ignore[no-untyped-call]

    @contextlib.contextmanager
    def backward(self, last: int, stamps: Stamps) -> Iterator[None]:
        stamps.clear()
        stamps.append((last, perf_counter()))
        yield
        ends = [start for _, start in stamps[1:]] + [perf_counter()]
        for (layer, start), end in zip(stamps, ends):
            self.backward_s[layer] += end - start
            self.backwards[layer] += 1

    @contextlib.contextmanager
    def weights(self, layer: int) -> Iterator[None]:
        start = perf_counter()
        yield
        self.weights_s[layer] += perf_counter() - start
        self.apart[layer] += 1
