# SPDX-License-Identifier: Apache-2.0
"""The device of a rank's parameters: copies between it and host memory, its random numbers, its clock."""
from __future__ import annotations

import contextlib
import functools
from collections.abc import Iterable, Iterator, Sequence

import torch
from torch import Tensor, nn

from ..errors import BadInputError
from .clocks import Clock, EventClock, HostClock

CPU = torch.device("cpu")


@functools.cache
def _pins() -> bool:
    """Returns whether host memory can be pinned, so that a device accesses it directly."""
    try:
        return torch.empty(1, device=CPU, pin_memory=True).is_pinned()
    except RuntimeError:
        return False


def empty_on_host(shape: Sequence[int], dtype: torch.dtype) -> Tensor:
    """Returns host memory for copies from and to a device, pinned if possible. PyTorch keeps such memory for reuse."""
    return torch.empty(shape, dtype=dtype, device=CPU, pin_memory=_pins())


def to_host(tensors: Sequence[Tensor]) -> list[Tensor]:
    """Returns the tensors in host memory: copies, or the tensors themselves if they are there. Waits once for each device."""
    there = [tensor for tensor in tensors if tensor.device.type != "cpu"]
    copies = iter(_copied(there))
    return [tensor if tensor.device.type == "cpu" else next(copies) for tensor in tensors]


def _copied(tensors: Sequence[Tensor]) -> list[Tensor]:
    copies = [empty_on_host(tensor.shape, tensor.dtype) for tensor in tensors]
    for copy, tensor in zip(copies, tensors):
        copy.copy_(tensor, non_blocking=True)
    for device in {tensor.device for tensor in tensors}:
        torch.accelerator.current_stream(device).synchronize()
    return copies


def to_device(tensor: Tensor, device: torch.device) -> Tensor:
    """Returns the tensor on the device: a copy, or itself. Later work of the stream can use it. Does not wait if memory can be pinned."""
    if device.type == "cpu" or tensor.device == device:
        return tensor
    if _pins() and not tensor.is_pinned():
        tensor = empty_on_host(tensor.shape, tensor.dtype).copy_(tensor)
    return tensor.to(device, non_blocking=True)


class Device:
    """The device of a rank's parameters. Used by the rank's thread."""

    def __init__(self, device: torch.device = CPU) -> None:
        self.device, self.type = device, device.type
        self.is_host = device.type == "cpu"
        self.clock: Clock = HostClock() if self.is_host else EventClock(device)

    def read(self, numbers: Sequence[Tensor]) -> list[float]:
        """Returns the values of tensors of one number each. Waits once for the device, even without tensors."""
        if self.is_host:
            return [float(number) for number in numbers]
        none = [torch.empty(0, dtype=torch.float64, device=self.device)]
        found: list[float] = to_host([torch.cat([*none, *(number.reshape(1).double() for number in numbers)])])[0].tolist()
        return found

    @contextlib.contextmanager
    def forked_random(self) -> Iterator[None]:
        """Restores the random generators of the host and of this device at the end."""
        if self.is_host:
            with torch.random.fork_rng(devices=[]):
                yield
        else:
            with torch.random.fork_rng(devices=[self.device.index], device_type=self.type):
                yield

    def random_state(self) -> list[Tensor]:
        state = [torch.get_rng_state()]
        return state if self.is_host else [*state, torch.get_device_module(self.device).get_rng_state(self.device)]

    def set_random_state(self, state: list[Tensor]) -> None:
        torch.set_rng_state(state[0])
        for own in state[1:]:
            torch.get_device_module(self.device).set_rng_state(own, self.device)

    @contextlib.contextmanager
    def as_current(self) -> Iterator[None]:
        """Makes this device the current one of the thread inside."""
        if self.is_host:
            yield
        else:
            with torch.accelerator.device_index(self.device.index):
                yield

    @contextlib.contextmanager
    def repeating_bits(self) -> Iterator[None]:
        """Uses deterministic kernels of the device inside, if there are any, so that bits can be compared."""
        if self.is_host:
            yield
            return
        before, warns = torch.are_deterministic_algorithms_enabled(), torch.is_deterministic_algorithms_warn_only_enabled()
        torch.use_deterministic_algorithms(True, warn_only=warns or not before)
        try:
            yield
        finally:
            torch.use_deterministic_algorithms(before, warn_only=warns)


def device_of(what: str, modules: Iterable[nn.Module]) -> Device:
    """Returns the one device of all parameters. Raises BadInputError if there are several, or if it cannot measure times."""
    first, device = "", CPU
    for module in modules:
        for name, parameter in module.named_parameters():
            if first and parameter.device != device:
                raise BadInputError(f"{what}: {first} is on {device}, {name} on {parameter.device}, wanted all parameters of a rank on one device")
            first, device = first or name, parameter.device
    if (default := torch.get_default_device()).type != "cpu":
        raise BadInputError(f"{what}: torch.set_default_device({str(default)!r}) is in force, wanted none; move the model by .to({str(default)!r})")
    found = Device(device)
    if not found.is_host:
        try:
            start = found.clock.stamp()
            found.clock.wait()
            found.clock.seconds(start, start)
            found.random_state()
        except Exception as error:
            said = " ".join(str(error).split())
            raise BadInputError(f"{what}: {first} is on {device}, whose work cannot be timed ({said[:120]}), wanted cpu or cuda") from error
    return found
