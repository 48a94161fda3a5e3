# SPDX-License-Identifier: Apache-2.0
"""The ranks of a pipeline over torch.distributed: messages, sums, agreement, and the detection of lost ranks."""
from __future__ import annotations

import atexit
import contextlib
import itertools
import os
import socket
import time
import traceback
import weakref
from collections.abc import Callable, Collection, Mapping, Sequence
from datetime import timedelta
from typing import Any, Optional, TypeVar, Union

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from ..errors import BadInputError, RankLostError
from . import checks
from .channels import Channel, DeviceLane, backend_of, describe, identity_of, reason_for_host
from .lanes import HostLane
from .lost import Place, find_lost, process_space
from .sockets import Sockets

Result = TypeVar("Result")
Replicas = Union[int, DeviceMesh]
_C10D: Any = dist  # whose stores have no types
REFUSED_KEY = "dynmo/refused"
MAX_GIVEN = 120  # longer values are not printed
TOLD_S = 5  # how long a rank that cannot go on waits until the others have read why
ALONE_S = 3  # how long a rank with an error waits for all others to have one, too
ALL = "all"
TIMEOUT_S = 1800  # longest wait for a message, unless a caller chooses another
ABORT_TAG = 1 << 28  # of messages that are never sent
STORE_S = 0.5  # timeout of the first try to reach a store, doubled for each next one; TCPStore tries twice
MAX_SAID = 300  # characters of an exception that is not ours
LANES = ("auto", "device", "host")


def one_line(error: BaseException) -> str:
    """Returns an exception as one line."""
    said = " ".join(str(error).split())
    if isinstance(error, BadInputError):
        return said
    return f"{type(error).__name__}: {said[:MAX_SAID]}" if said else type(error).__name__


def open_store(address: str, port: int, here: bool, timeout_s: float) -> Any:
    """Opens the store of a group: with `here` a server in this process (port 0: a free port), else a client of another one."""
    return _C10D.TCPStore(address, port, None, is_master=here, wait_for_workers=False, timeout=timedelta(seconds=timeout_s))


def _new_group(timeout: timedelta) -> dist.ProcessGroup:
    made: Any = dist.new_group(backend="gloo", timeout=timeout)  # the type includes the result for ranks outside of the group
    group: dist.ProcessGroup = made
    return group


def describe_replicas(replicas: Replicas) -> Any:
    """Returns the number of replicas, or the rows of a mesh, which ranks compare."""
    if isinstance(replicas, DeviceMesh):
        return replicas.mesh.tolist()
    if isinstance(replicas, bool) or not isinstance(replicas, int):
        raise BadInputError(f"replicas={replicas!r}, wanted a number or a DeviceMesh of two dimensions")
    return replicas


_numbers = itertools.count()
_OPEN: weakref.WeakSet[Ranks] = weakref.WeakSet()


@atexit.register
def _close_all() -> None:
    """Closes all groups at exit. A group's thread that still runs while the interpreter ends would abort the process."""
    for ranks in list(_OPEN):
        ranks.close()


class Ranks:
    """The ranks of a pipeline and their messages. Has a group of its own over all ranks, so that no message meets one of the user's.
    Used by one thread.

    Ranks are named by position in a replica in messages, and by number in torch.distributed, over all replicas, everywhere else.
    """

    number, world = 0, 1  # in torch.distributed
    replica, replicas = 0, 1
    rank, size = 0, 1  # in the replica
    way = ""  # how tensors of a device travel, and why, for the log

    def __init__(self, timeout_s: float) -> None:
        checks.check_seconds("timeout_s", timeout_s)
        self._lane: Union[HostLane, DeviceLane] = HostLane()
        self._device, self._wanted_lane = torch.device("cpu"), LANES[0]
        self._group: Optional[dist.ProcessGroup] = None
        self.places: list[Place] = []
        self._works: weakref.WeakSet[_Work] = weakref.WeakSet()
        self._lost = ""
        self._refused = ""  # refusal of any rank in the middle of a step
        self._agreed: Optional[BaseException] = None  # newest refusal that all ranks know
        self._raised = 0  # how often all ranks have raised errors of their own
        self._key = f"{REFUSED_KEY}/{next(_numbers)}"  # equal on all ranks, which make their groups in one order
        self._began = False  # whether this object has begun torch.distributed
        self._timeout_s = self._limit_s = timeout_s
        self._sockets = Sockets()
        self.store: Any = None  # the group's store, if it runs in this process
        self.asks: Optional[Callable[[], bool]] = None  # on the first rank: whether the ranks are to change
        self.heard: Optional[Callable[[], bool]] = None  # whether a rank is lost, if connections outside the group show it
        _OPEN.add(self)
        if not dist.is_initialized() and int(os.environ.get("WORLD_SIZE", "1")) > 1:
            dist.init_process_group("gloo")
            self._began = True
        if dist.is_initialized() and dist.get_world_size() > 1:
            self.number, self.world = self.rank, self.size = dist.get_rank(), dist.get_world_size()
            with self._sockets.opening():
                self._group = _new_group(timedelta(seconds=timeout_s))
            self.places = self.gather((socket.gethostname(), os.getpid(), process_space()))
        self._lay_out([list(range(self.world))])
        self.members = list(range(self.world))  # the member number of each rank
        self.highest = self.world - 1  # highest member number so far
        self.first_layout = self.layout  # at the start, by member number

    def divide(self, replicas: Replicas) -> None:
        """Divides these ranks into replicas, before the first message. All ranks call it with the same value."""
        rows = describe_replicas(replicas)
        if isinstance(rows, int):
            if rows < 1 or self.world % rows != 0:
                raise BadInputError(f"replicas={rows} of {self.world} ranks, wanted 1 or another divisor of the number of ranks")
            size = self.world // rows
            rows = [list(range(first, first + size)) for first in range(0, self.world, size)]
        if not all(isinstance(row, list) for row in rows) or sorted(number for row in rows for number in row) != list(range(self.world)):
            raise BadInputError(
                f"replicas: a mesh of {rows}, wanted two dimensions, replicas and the ranks of one, over all {self.world} ranks"
            )
        self._lay_out(rows)
        self.first_layout = self.layout

    def _lay_out(self, rows: list[list[int]]) -> None:
        """Sets the layout: rows of numbers, by replica and position. Ranks beyond the length of the shortest row are spare: they hold no
        layers.
        """
        self._layout = rows
        self.replica, self.rank = next((r, row.index(self.number)) for r, row in enumerate(rows) if self.number in row)
        self.replicas, self.size = len(rows), min(map(len, rows))

    @property
    def layout(self) -> list[list[int]]:
        """Returns the ranks by replica and position."""
        return [list(row) for row in self._layout]

    def place_of(self, number: int) -> tuple[int, int]:
        """Returns the replica and position of a rank."""
        return next((replica, row.index(number)) for replica, row in enumerate(self._layout) if number in row)

    def close(self) -> None:
        """Ends the group and its threads, and torch.distributed if this object has begun it."""
        if isinstance(self._lane, DeviceLane):
            self._lane.close()
        group, self._group = self._group, None
        if group is not None and dist.is_initialized():
            with contextlib.suppress(ValueError):  # other code has ended all groups, and begun others
                dist.destroy_process_group(None if self._began else group)

    @property
    def group(self) -> Optional[dist.ProcessGroup]:
        return self._group

    def abort(self) -> None:
        """Ends the connections of the group, so that calls that wait for a rank raise. Any thread may call it."""
        self._sockets.shut_down()
        self._fail_messages()
        self._abort_channels("the group is given up")

    def _fail_messages(self) -> None:
        """Makes all messages of the group fail by a wait that times out, upon which Gloo closes all connections.

        Gloo reads no further if a message arrives whose receive is gone. It then neither notices the end of that connection nor ends a sum
        that goes over it.
        """
        group = self._group
        for peer in range(self.world):
            if group is not None and peer != self.number:
                with contextlib.suppress(RuntimeError):
                    group.recv([torch.empty(1)], peer, ABORT_TAG).wait(timedelta(milliseconds=1))

    def reform(
        self, number: int, rows: list[list[int]], address: str, port: int, name: str, timeout_s: float, store_s: float
    ) -> None:
        """Begins torch.distributed again, with the ranks `rows` by replica, among which this one is `number`. All of them call it alike.

        They meet at the store of that address, which must be reached within `store_s`.
        """
        world = sum(map(len, rows))
        self.drop()
        self._began = True
        self._key = f"{REFUSED_KEY}/{name}"
        self._limit_s = min(timeout_s, self._timeout_s)
        limit = timedelta(seconds=self._limit_s)
        self._lost = self._refused = ""
        self._raised = 0

        def begin() -> None:
            # The store was opened before ranks got its address. If its process has ended since, TCPStore would retry until its timeout.
            socket.create_connection((address, port), store_s).close()
            with self._sockets.opening():
                store = open_store(address, port, here=False, timeout_s=store_s)
                store.set_timeout(limit)
                dist.init_process_group("gloo", store=_C10D.PrefixStore(name, store), rank=number, world_size=world, timeout=limit)
                self._group = _new_group(limit) if world > 1 else None

        self.guard(begin)
        self.number, self.world = number, world
        self._lay_out(rows)
        self._choose_lane()

    def drop(self) -> None:
        """Ends the group, and torch.distributed with all groups of the process."""
        if isinstance(self._lane, DeviceLane):
            self._lane.give_up()
        self._lane = HostLane()
        for work in list(self._works):
            work.drop()
        self._group = None
        if dist.is_initialized():
            dist.destroy_process_group()

    # --- Messages. ---

    def use_device(self, device: torch.device, lane: str) -> None:
        """Chooses how tensors of a device travel, now and in each new group. All ranks call it. Refuses lane="device" if that is
        impossible.
        """
        if lane not in LANES:
            raise self.agreed(f"lane={lane!r}, wanted {', '.join(LANES)}")
        self._device, self._wanted_lane = device, lane
        why = self._choose_lane()
        if lane == "device" and why:
            raise self.agreed(f"lane='device': {why}, wanted a device for each rank with a backend such as NCCL, or lane='auto'")

    def _choose_lane(self) -> str:
        """Returns why tensors do not go from device to device, or "" if they do or there is one rank."""
        self._lane, self.way, device = HostLane(), "", self._device
        if device.type == "cpu":
            return "the model is on the CPU"
        if self.world == 1:
            return ""
        told = self.gather((identity_of(device), backend_of(device)))
        why = "lane='host'" if self._wanted_lane == "host" else reason_for_host(told, device)
        self.way = f"tensors pass through host memory: {why}" if why else f"tensors go from device to device by {told[0][1]}"
        if not why:
            store = _C10D.PrefixStore(f"{self._key}/channels", dist.distributed_c10d._get_default_store())
            self._lane = DeviceLane(device, told[0][1], self.number, store, self._limit_s, self._sockets)
        return why

    def open(self, channels: Sequence[Channel]) -> None:
        """Opens channels between devices that are not open yet. All ranks call it with the same ones, between the same messages."""
        lane = self._lane
        if isinstance(lane, DeviceLane) and (new := [channel for channel in channels if channel not in lane]):
            self.agree({"order of channels": describe(new)})
            self.guard(lambda: lane.open(new))

    def settle(self) -> None:
        """Waits for the messages between devices so far. Raises if a rank is lost."""
        lane = self._lane
        if isinstance(lane, DeviceLane):
            self.guard(lane.settle)

    @property
    def channel_device(self) -> Optional[torch.device]:
        """Returns the device, or None if its tensors pass through host memory."""
        return self._device if isinstance(self._lane, DeviceLane) else None

    def _abort_channels(self, why: str) -> None:
        if isinstance(self._lane, DeviceLane):
            self._lane.fail(why)

    def ready(self, tensors: Sequence[Tensor]) -> list[Tensor]:
        """Returns the tensors for `send` to take without a wait. If they pass through host memory, waits once for all of them."""
        return self._lane.ready(tensors)

    def send(self, tensor: Tensor, to: int, tag: int, replica: Optional[int] = None, purpose: str = "") -> "Message":
        """Begins to send to position `to` of this replica or of `replica`. Tensors of a device need a `purpose` whose channel is open."""
        other = self._layout[self.replica if replica is None else replica][to]
        return Message(self, lambda: self._lane.send(self._group, tensor, other, tag, purpose), other, tensor)

    def receive(self, tensor: Tensor, source: int, tag: int, replica: Optional[int] = None, purpose: str = "") -> "Message":
        other = self._layout[self.replica if replica is None else replica][source]
        return Message(self, lambda: self._lane.receive(self._group, tensor, other, tag, purpose), other, tensor)

    def sum(self, cells: Tensor) -> Tensor:
        """Adds up the cells of all ranks, in place. Exact if each cell is set by one rank only."""
        if self.world > 1:
            self.guard(lambda: dist.all_reduce(cells, group=self._group))
        return cells

    def begin_sum(self, cells: Tensor) -> Callable[[], None]:
        """Begins to add up the cells. Returns a call that waits for the end."""
        if self.world == 1:
            return lambda: None
        return _Work(self, lambda: dist.all_reduce(cells, group=self._group, async_op=True), None).wait

    def gather(self, value: Any) -> list[Any]:
        """Returns the values of all ranks, by number."""
        if self.world == 1:
            return [value]
        values: list[Any] = [None] * self.world
        self.guard(lambda: dist.all_gather_object(values, value, group=self._group))
        return values

    def first_of(self, number: int) -> int:
        """Returns the first rank of the replica of `number`."""
        return next(row[0] for row in self._layout if number in row)

    def agree(self, own: Mapping[str, Any], problem: str = "", apart: Collection[str] = ()) -> None:
        """Raises the same BadInputError on all ranks if a rank has a `problem`, or if a named value differs from rank 0's.

        Values named in `apart` need to agree only within a replica.
        """
        told = self.gather((problem, dict(own)))
        problems = [trouble for trouble, _ in told]
        for rank, trouble in enumerate(problems):
            if trouble:
                raise self.agreed(trouble if len(set(problems)) == 1 else f"rank {rank}: {trouble}")
        for rank, (_, values) in enumerate(told):
            for what in [*told[0][1], *values]:
                other = self.first_of(rank) if what in apart else 0
                first = told[other][1]
                if values.get(what) != first.get(what):
                    given = f": {values.get(what)}, on rank {other} {first.get(what)}"
                    raise self.differs(rank, what, other, given if len(given) <= MAX_GIVEN else "", what in apart)

    def differs(self, rank: int, what: str, other: int, given: str = "", apart: bool = False) -> BadInputError:
        where = "all ranks of a replica" if apart and self.replicas > 1 else "all ranks"
        return self.agreed(f"rank {rank} has another {what} than rank {other}{given}, wanted the same on {where}")

    def agreed(self, line: str) -> BadInputError:
        """Returns an error that all ranks raise, so that `tell` need not send it."""
        self._agreed = error = BadInputError(line)
        return error

    def attempt(self, what: str, call: Callable[[], tuple[Result, Mapping[str, Any]]], apart: Collection[str] = ()) -> Result:
        """Calls `call` on every rank and returns its result. If one raises, or the facts of ranks differ, all raise the same error."""
        result: Optional[tuple[Result, Mapping[str, Any]]] = None
        problem = ""
        cause: Optional[Exception] = None
        try:
            result = call()
        except RankLostError:
            raise
        except Exception as error:
            problem = one_line(error)
            if not isinstance(error, BadInputError):
                problem, cause = f"{what} ends with {problem}", error
        try:
            self.agree(result[1] if result is not None else {}, problem, apart)
        except BadInputError as refused:
            raise refused from cause
        assert result is not None
        return result[0]

    def tell(self, error: Exception) -> None:
        """Tells the other ranks why this rank cannot continue in the middle of a step. Ends the connections.

        Does nothing for an error that all ranks have raised together, or if a rank is lost, which may be its cause.
        """
        if self._is_known(error):
            return
        self._refused = f"rank {self.number}: {one_line(error)}"
        store: Any = dist.distributed_c10d._get_default_store()
        with contextlib.suppress(RuntimeError):  # the store's process may be lost, too
            store.set(self._key, self._refused)
        self._disconnect(error)
        with contextlib.suppress(RuntimeError):
            deadline = time.monotonic() + TOLD_S
            while store.add(f"{self._key}/read", 0) < self.world - 1 and time.monotonic() < deadline:
                time.sleep(0.01)

    def tell_if_alone(self, error: Exception) -> None:
        """Like `tell`, for an error between two steps, such as one of the caller's own code.

        If all ranks raise an error, no rank waits for another. The group then stays usable.
        """
        if self._is_known(error):
            return
        with contextlib.suppress(RuntimeError):
            store: Any = dist.distributed_c10d._get_default_store()
            key = f"{self._key}/raised/{self._raised}"
            verdict = ALL if store.add(f"{key}/ranks", 1) == self.world else str(self.number)
            deadline = time.monotonic() + ALONE_S
            while verdict != ALL and not store.check([key]) and time.monotonic() < deadline:
                time.sleep(0.01)
            if store.compare_set(key, "", verdict).decode() == ALL:  # the first verdict holds on all ranks
                self._raised += 1
                return
        self.tell(error)

    def _is_known(self, error: Exception) -> bool:
        """Returns whether all ranks have this error, or know why this one cannot continue. None can be told without a group."""
        alone = self.world == 1 or self._group is None or not dist.is_initialized()
        return alone or error is self._agreed or self.heard is not None and self.heard()

    def refusal(self, error: Exception) -> str:
        """Returns the line with which all ranks end after this error, or ""."""
        return str(error) if error is self._agreed else self._refused

    def _read_refused(self) -> None:
        """Reads the refusal of another rank, which may be the reason for a failed message."""
        with contextlib.suppress(RuntimeError):
            store = dist.distributed_c10d._get_default_store()
            if store.check([self._key]):
                self._refused = store.get(self._key).decode()
                store.add(f"{self._key}/read", 1)

    def agree_on_work(self, flags: int, changed: bool) -> None:
        """Raises BadInputError if requires_grad flags, or calls of changed(), differ between ranks."""
        cells = torch.zeros(self.world, 2, dtype=torch.float64)
        cells[self.number] = torch.tensor([flags, changed], dtype=torch.float64)
        for rank, (other_flags, other_changed) in enumerate(told := self.sum(cells).tolist()):
            if other_flags != told[0][0]:
                raise BadInputError(f"rank {rank} has other requires_grad flags than rank 0, wanted the same on all ranks")
            if other_changed != told[0][1]:
                raise BadInputError(f"rank {rank} has called changed() otherwise than rank 0, wanted the same on all ranks")

    # --- Loss of a rank. ---

    def guard(self, call: Callable[[], Result], peer: Optional[int] = None) -> Result:
        """Calls `call`. Raises RankLostError with the lost rank if the transport fails, or BadInputError if another rank has refused."""
        if self._refused:
            raise BadInputError(self._refused)
        if self._lost:
            raise RankLostError(self._lost)
        try:
            if isinstance(self._lane, DeviceLane):
                self._lane.check()
            return call()
        except RuntimeError as error:
            if self.heard is None or not self.heard():  # otherwise the store may be lost, too
                self._read_refused()
            if self._refused:
                self._disconnect(error)
                raise BadInputError(self._refused) from error
            lost = find_lost(self.places, self.number, peer) if self.heard is None else None
            why = str(error).replace("\n", " ")[:200]
            self._lost = (
                f"rank {self.number}: rank {lost} is lost ({why}); start again from the newest checkpoint"
                if lost is not None
                else f"rank {self.number}: a message failed, and no rank is known to be lost ({why})"
            )
            self._disconnect(error)
            raise RankLostError(self._lost) from error

    def _disconnect(self, error: Exception) -> None:
        """Closes this rank's connections, so that ranks that wait for it notice now, and not when this process ends.

        Gloo has no call for that. It closes connections when nothing refers to the group, its requests, or a frame with one of them.
        """
        self._abort_channels("the group is given up")
        self._fail_messages()  # the group's end waits for sums
        traceback.clear_frames(error.__traceback__)
        for work in list(self._works):
            work.drop()
        group, self._group = self._group, None
        if group is not None:
            dist.destroy_process_group(group)


class _Work:
    """A request in progress, which is dropped when the connections end."""

    def __init__(self, ranks: Ranks, post: Callable[[], Any], peer: Optional[int]) -> None:
        self._ranks, self._peer = ranks, peer
        self._work = ranks.guard(post, peer)
        ranks._works.add(self)

    def wait(self) -> None:
        self._ranks.guard(lambda: self._work.wait(), self._peer)

    def drop(self) -> None:
        self._work = None


class Message:
    """A tensor that is being sent or received. It is kept until `wait` returns."""

    def __init__(self, ranks: Ranks, post: Callable[[], Any], peer: int, tensor: Tensor) -> None:
        self.tensor, self._work = tensor, _Work(ranks, post, peer)

    def wait(self) -> Tensor:
        self._work.wait()
        return self.tensor
