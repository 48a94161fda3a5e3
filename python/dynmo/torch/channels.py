# SPDX-License-Identifier: Apache-2.0
"""Sends tensors from device to device, by the backend that torch.distributed has for the device, such as NCCL.

NCCL has no tags, and orders all operations of a group. So each channel (source, destination, purpose) has a group of two ranks. Both create
it together, so all ranks open the channels of a plan in one order before a schedule runs. Channels stay open, so a plan that returns finds
its own. A wait makes the stream wait, not the host. A device would wait for a lost rank forever. So a thread watches the connections of
Gloo's group, and aborts the channels if one ends.
"""
from __future__ import annotations

import contextlib
import itertools
import os
import threading
import time
from collections import deque
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, Optional

import torch
import torch.distributed as dist
from torch import Tensor

from .device import to_device
from .lanes import Group, HostLane
from .layers import Tie
from .lost import boot_id
from .program import Plan
from .sockets import Sockets

LOOK_S = 0.1  # between two looks at the connections
OPEN_S = 60.0  # until the other rank of a channel has come
EVENTS = 256  # maximum number of newest waits that are observed on the device
# Environment of NCCL's groups: the ranks here handle a lost one, so PyTorch must not end the process.
OF_NCCL = {"TORCH_NCCL_ASYNC_ERROR_HANDLING": "0", "TORCH_NCCL_ENABLE_MONITORING": "0"}

_C10D: Any = dist  # whose stores and NCCL's groups have no types
Connect = Callable[[Any, int, torch.device, timedelta], Any]  # store, rank of two, device, timeout


@dataclass(frozen=True)
class Channel:
    """A channel from rank `source` to rank `target`, by their numbers in torch.distributed."""

    source: int
    target: int
    purpose: str

    def __str__(self) -> str:
        return f"{self.purpose} {self.source}>{self.target}"


def channels_of(plan: Plan, ties: Sequence[Tie], rows: Sequence[Sequence[int]]) -> list[Channel]:
    """Returns the channels that steps of this plan use. `rows` has the ranks by replica and position. The order is the same on all
    ranks.
    """
    found = []
    owners = plan.owners
    for row in rows:
        for boundary, (before, after) in enumerate(itertools.pairwise(plan.stages)):
            if before.rank != after.rank:
                found += [Channel(row[before.rank], row[after.rank], f"F{boundary}"), Channel(row[after.rank], row[before.rank], f"B{boundary}")]
        for first, second in (tuple(row[owners[layer]] for layer in tie.layers) for tie in ties):
            if first != second:
                found += [Channel(first, second, "tie"), Channel(second, first, "tie")]
    for position in range(plan.ranks):
        found += [Channel(one[position], other[position], "sum") for one, other in itertools.permutations(rows, 2)]
    return list(dict.fromkeys(found))


# --- Which way. ---


def identity_of(device: torch.device) -> str:
    """Returns a name of this device that is unique in the job, or "" if it is unknown."""
    try:
        properties = torch.get_device_module(device).get_device_properties(device)
    except (AttributeError, RuntimeError):
        return ""
    host, name = boot_id(), str(getattr(properties, "uuid", ""))
    return f"{host} {name}" if host and name else ""


def backend_of(device: torch.device) -> str:
    """Returns the backend of torch.distributed for the device, or "" if this PyTorch has none that can be opened."""
    name = str(dist.Backend.default_device_backend_map.get(device.type, ""))
    return name if _connect_by(name) is not None else ""


def reason_for_host(told: Sequence[tuple[str, str]], device: torch.device) -> str:
    """Returns why tensors cannot go from device to device, or "" if they can. `told` has each rank's device identity and backend."""
    for rank, (identity, backend) in enumerate(told):
        if not backend:
            return f"rank {rank} has no backend of torch.distributed for {device.type}"
        if backend != told[0][1]:
            return f"rank {rank} has the backend {backend}, rank 0 {told[0][1]}"
        if not identity:
            return f"the {device.type} device of rank {rank} does not say which one it is"
    devices = len({identity for identity, _ in told})
    return f"{len(told)} ranks share {devices} device{'s' if devices > 1 else ''}" if devices < len(told) else ""


def _connect_by(backend: str) -> Optional[Connect]:
    """Returns the function that makes a group of two ranks, or None if the backend has none."""
    if backend == "nccl":
        return _connect_nccl if dist.is_nccl_available() else None
    plugin: Any = dist.Backend._plugins.get(backend.upper())
    if plugin is None or plugin.extended_api:
        return None
    return lambda store, rank, device, timeout: plugin.creator_fn(store, rank, 2, timeout)


def _connect_nccl(store: Any, rank: int, device: torch.device, timeout: timedelta) -> Any:
    options = _C10D.ProcessGroupNCCL.Options()
    options._timeout = timeout
    before = {name: os.environ.get(name) for name in OF_NCCL}
    os.environ.update(OF_NCCL)
    try:
        group = _C10D.ProcessGroupNCCL(store, rank, 2, options)
    finally:
        for name, value in before.items():
            if value is None:
                del os.environ[name]
            else:
                os.environ[name] = value
    # Connects now. At the first message each rank would connect in the order of its own schedule.
    group.eager_connect_single_device(device)
    return group


# --- The lane. ---


class DeviceLane:
    """Sends tensors of the device by channels, and those of the host by Gloo. A tensor is on the same kind of device on both ranks.

    Used by the rank's thread. Any thread may call `fail`. All ranks open channels alike.
    """

    def __init__(self, device: torch.device, backend: str, number: int, store: Any, timeout_s: float, sockets: Sockets) -> None:
        connect = _connect_by(backend)
        assert connect is not None
        self.device, self.backend = device, backend
        self._connect, self._number, self._store, self._timeout_s = connect, number, store, timeout_s
        self._host = HostLane()
        self._groups: dict[Channel, Any] = {}  # None for channels of other ranks
        self._lock = threading.Lock()
        self._why = ""  # why the channels have failed; "": they have not
        self._blocked = False  # whether the thread is in a wait
        self._events: deque[torch.Event] = deque(maxlen=EVENTS)  # recorded after waits
        self._moved = time.monotonic()  # when host or device last made progress
        self._stopped = threading.Event()
        self._watcher = threading.Thread(target=self._watch, args=(sockets.watched(),), name="dynmo channels", daemon=True)
        self._watcher.start()

    def __contains__(self, channel: Channel) -> bool:
        return channel in self._groups

    def open(self, channels: Sequence[Channel]) -> None:
        """Opens channels that are not open. All ranks call it with the same ones in the same order."""
        for channel in channels:
            group = None
            if self._number in (channel.source, channel.target):
                self.check()
                store = _C10D.PrefixStore(str(channel).replace(" ", "/"), self._store)
                try:
                    with _limited(self._store):
                        group = self._connect(store, int(channel.target == self._number), self.device, timedelta(seconds=self._timeout_s))
                except Exception as error:
                    said = " ".join(str(error).split())[:200]
                    raise RuntimeError(f"no channel {channel} by {self.backend}: {said}") from error
            with self._lock:
                self._groups[channel] = group
                failed = self._why
            if failed and group is not None:
                _abort(group)
                self.check()

    def ready(self, tensors: Sequence[Tensor]) -> list[Tensor]:
        """Returns the tensors on the device, where `send` takes them without a wait."""
        return [to_device(tensor, self.device) for tensor in tensors]

    def send(self, group: Group, tensor: Tensor, to: int, tag: int, purpose: str) -> Any:
        if tensor.device.type == "cpu":
            return self._host.send(group, tensor, to, tag, purpose)
        return self._post(Channel(self._number, to, purpose), lambda channel: channel.send([tensor], 1, 0))

    def receive(self, group: Group, tensor: Tensor, source: int, tag: int, purpose: str) -> Any:
        if tensor.device.type == "cpu":
            return self._host.receive(group, tensor, source, tag, purpose)
        return self._post(Channel(source, self._number, purpose), lambda channel: channel.recv([tensor], 0, 0))

    def settle(self) -> None:
        """Waits until the stream has done its work so far. Raises if a channel was aborted before."""
        self._note()
        torch.accelerator.current_stream(self.device).synchronize()
        self.check()

    def check(self) -> None:
        if self._why:
            raise RuntimeError(self._why)

    def fail(self, why: str) -> None:
        """Aborts the channels, so that a device that waits for a rank continues. The bytes that it then gets are invalid."""
        with self._lock:
            if self._why:
                return
            self._why = why
            groups = [group for group in self._groups.values() if group is not None]
        for group in groups:
            _abort(group)

    def give_up(self) -> None:
        """Aborts the channels, and waits until the device no longer uses the memory of messages."""
        self.fail("the group is given up")
        torch.accelerator.synchronize(self.device)

    def close(self) -> None:
        """Closes the channels. No message may be in flight."""
        self._stopped.set()
        self._watcher.join()
        if not self._why:
            self._why = "the channels are closed"
            for group in self._groups.values():
                if group is not None:
                    with contextlib.suppress(Exception):
                        group.shutdown()
        self._groups.clear()

    # --- Inside. ---

    def _post(self, channel: Channel, call: Callable[[Any], Any]) -> _Posted:
        self.check()
        group = self._groups.get(channel)
        assert group is not None, f"channel {channel} is not open"
        return _Posted(self, call(group))

    def _wait(self, work: Any) -> None:
        self._moved, self._blocked = time.monotonic(), True
        try:
            work.wait()
        finally:
            self._blocked = False
        self._note()
        self.check()

    def _note(self) -> None:
        event = torch.Event(self.device)
        event.record(torch.accelerator.current_stream(self.device))
        self._events.append(event)
        self._moved = time.monotonic()

    def _watch(self, watched: Callable[[float], bool]) -> None:
        while not self._stopped.is_set():
            if watched(LOOK_S):
                self.fail("a connection to another rank has ended")
            elif self._is_stuck():
                self.fail(f"nothing has arrived on the device for {self._timeout_s:g} s")
            if self._why:
                return

    def _is_stuck(self) -> bool:
        if time.monotonic() - self._moved < self._timeout_s:
            return False
        passed = 0
        with contextlib.suppress(IndexError):  # the rank's thread changes the list meanwhile
            while self._events[0].query():
                self._events.popleft()
                passed += 1
        if passed > 0 or not (self._blocked or self._events):
            self._moved = time.monotonic()
            return False
        return True


class _Posted:
    """A posted message of a channel."""

    def __init__(self, lane: DeviceLane, work: Any) -> None:
        self._lane, self._work = lane, work

    def wait(self) -> None:
        self._lane._wait(self._work)


def _abort(group: Any) -> None:
    with contextlib.suppress(Exception):  # the other channels are aborted, too
        group.abort()


@contextlib.contextmanager
def _limited(store: Any) -> Iterator[None]:
    """Shortens the store's timeout inside, because a lost rank never comes."""
    before = store.timeout
    store.set_timeout(min(before, timedelta(seconds=OPEN_S)))
    try:
        yield
    finally:
        store.set_timeout(before)


def describe(channels: Collection[Channel]) -> str:
    """Returns the channels as text, which ranks compare."""
    return ", ".join(map(str, channels))
