# SPDX-License-Identifier: Apache-2.0
"""Times of the layers of a stage that another runtime runs, by hooks on modules and tensors."""
from __future__ import annotations

import statistics
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Optional, Protocol

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from .clocks import Clock, Stamp

SAMPLES = 512  # newest calls of a layer that are kept
UNREAD = 4096  # maximum number of stamps before a wait for the device


class StageLike(Protocol):
    """The members of torch.distributed.pipelining's PipelineStage that are used here."""

    submod: nn.Module
    stage_index: int
    num_stages: int


def _median(calls: deque[float]) -> float:
    return statistics.median(calls) if calls else 0.0


@dataclass
class Times:
    """The times of one layer's calls, in seconds."""

    place: int  # index among the layers of its stage
    forward: deque[float] = field(default_factory=lambda: deque(maxlen=SAMPLES))
    backward: deque[float] = field(default_factory=lambda: deque(maxlen=SAMPLES))
    boundary_bytes: int = 0

    def medians(self) -> tuple[float, float]:
        return _median(self.forward), _median(self.backward)


def layers_of(module: nn.Module) -> Iterator[tuple[str, Optional[str], nn.Module]]:
    """Yields name, list and module of each layer: the children, and the entries of a ModuleList or ModuleDict.

    The list is the name of the ModuleList that numbers the layer, "" in a Sequential, or None. Modules without parameters are no layers,
    because every stage has them.
    """
    for name, child in module.named_children():
        parts: list[tuple[str, Optional[str], nn.Module]] = [(name, "" if isinstance(module, nn.Sequential) else None, child)]
        if isinstance(child, (nn.ModuleList, nn.ModuleDict)):
            numbered = name if isinstance(child, nn.ModuleList) else None
            parts = [(f"{name}.{key}", numbered, part) for key, part in child.named_children()]
        yield from (part for part in parts if next(part[2].parameters(), None) is not None)


def _first_tensor(values: Any) -> Optional[Tensor]:
    if isinstance(values, Tensor):
        return values
    items = values.values() if isinstance(values, dict) else values if isinstance(values, (tuple, list)) else ()
    return next((value for value in items if isinstance(value, Tensor) and value.is_floating_point()), None)


class StageTimes:
    """Measures the times of the layers of one stage, until `close`.

    A layer's backward begins when the gradient of its output is complete, and ends when the next one's begins. The backward of the first
    layer ends with the gradient of the stage's input, or without one with those of its parameters.
    """

    LOSS = "the loss"

    def __init__(self, stage: StageLike, clock: Clock) -> None:
        self._clock = clock
        self._unread: list[tuple[deque[float], Stamp, Stamp]] = []
        self.modules: dict[str, nn.Module] = {}
        self.lists: dict[str, Optional[str]] = {}  # the list that numbers each layer
        self.times: dict[str, Times] = {}  # in the order in which layers run
        self._handles: list[RemovableHandle] = []
        self._accumulated: tuple[str, list[RemovableHandle]] = ("", [])
        self._start: Stamp = 0.0
        self._current: Optional[str] = None  # the layer whose backward runs
        self._since: Stamp = 0.0
        self._ended: Optional[Stamp] = None
        for name, numbered, module in layers_of(stage.submod):
            self.modules[name], self.lists[name] = module, numbered
            self._handles.append(module.register_forward_pre_hook(partial(self._begin, name), with_kwargs=True))
            self._handles.append(module.register_forward_hook(partial(self._end, name)))

    def close(self) -> None:
        for handle in self._handles + self._accumulated[1]:
            handle.remove()

    def timed_loss(self, loss_fn: Callable[..., Tensor]) -> Callable[..., Tensor]:
        """Returns `loss_fn`, with its time counted as part of the last layer's."""

        def timed(*arguments: Any, **named: Any) -> Tensor:
            start = self._clock.stamp()
            loss = loss_fn(*arguments, **named)
            if loss.requires_grad:
                self._note(self._times_of(self.LOSS).forward, start, self._clock.stamp())
                loss.register_hook(partial(self._backward_begins, self.LOSS))  # type: ignore[no-untyped-call]
            return loss

        return timed

    def read(self) -> None:
        """Adds the times of all stamps so far. Waits for the device."""
        self.finish_backward()
        self._clock.wait()
        for calls, start, end in self._unread:
            calls.append(self._clock.seconds(start, end))
        self._clock.free({id(stamp): stamp for _, start, end in self._unread for stamp in (start, end) if stamp is not self._since}.values())
        self._unread.clear()

    def _note(self, calls: deque[float], start: Stamp, end: Stamp) -> None:
        self._unread.append((calls, start, end))

    def finish_backward(self) -> None:
        """Ends the last backward at the time of its parameters' gradients, if it has not ended otherwise."""
        if self._current is not None and self._ended is not None:
            self._backward_ends(self._ended)

    def _times_of(self, name: str) -> Times:
        return self.times.setdefault(name, Times(len(self.times)))

    # A forward without a graph is not training. A forward during a backward is a part of it (checkpointing).
    def _counts(self) -> bool:
        if self._current is not None and self._ended is not None:
            self.finish_backward()
        return self._current is None and torch.is_grad_enabled()

    def _begin(self, name: str, _: nn.Module, given: tuple[Any, ...], named: dict[str, Any]) -> None:
        if not self._counts():
            return
        if name == next(iter(self.times), name):
            self._watch_end(_first_tensor(given), _first_tensor(named))
        if len(self._unread) > UNREAD:
            self.read()
        self._start = self._clock.stamp()

    def _end(self, name: str, _: nn.Module, __: tuple[Any, ...], output: Any) -> None:
        if not self._counts():
            return
        times = self._times_of(name)
        self._note(times.forward, self._start, self._clock.stamp())
        hidden = _first_tensor(output)
        if hidden is None:
            return
        times.boundary_bytes = hidden.numel() * hidden.element_size()
        if hidden.requires_grad:
            hidden.register_hook(partial(self._backward_begins, name))  # type: ignore[no-untyped-call]

    def _watch_end(self, *given: Optional[Tensor]) -> None:
        """Sets hooks that end the backward of this micro-batch."""
        hidden = next((tensor for tensor in given if tensor is not None and tensor.requires_grad), None)
        if hidden is not None:
            handles: list[RemovableHandle] = []

            def ended(_: Tensor) -> None:
                self._backward_ends(self._clock.stamp())
                for handle in handles:  # because receive buffers are reused
                    handle.remove()

            handles.append(hidden.register_hook(ended))  # type: ignore[no-untyped-call]
            return
        trained = next((name for name in self.times if any(p.requires_grad for p in self._parameters(name))), "")
        if trained != self._accumulated[0]:
            for handle in self._accumulated[1]:
                handle.remove()
            self._accumulated = (trained, [])
            for parameter in self._parameters(trained):
                if parameter.requires_grad:
                    hook = parameter.register_post_accumulate_grad_hook(self._gradient_is_there)  # type: ignore[no-untyped-call]
                    self._accumulated[1].append(hook)

    def _parameters(self, name: str) -> Iterator[nn.Parameter]:
        return self.modules[name].parameters() if name in self.modules else iter(())

    def _gradient_is_there(self, _: Tensor) -> None:
        if self._current == self._accumulated[0]:
            self._clock.free([self._ended] if self._ended is not None else [])
            self._ended = self._clock.stamp()

    def _backward_begins(self, name: str, _: Tensor) -> None:
        now = self._clock.stamp()
        before = self.times.get(self._current or "")
        if before is not None and before.place > self.times[name].place:
            self._backward_ends(now)
        else:
            self.finish_backward()  # the backward of another micro-batch, which may not have ended otherwise
        self._current, self._since, self._ended = name, now, None

    def _backward_ends(self, now: Stamp) -> None:
        if self._current is not None:
            self._note(self.times[self._current].backward, self._since, now)
        self._current = self._ended = None
