# SPDX-License-Identifier: Apache-2.0
"""Shuts down the connections of a group, from any thread. Gloo has no call for it, and its calls continue to wait for a lost peer.

A connection is identified by its inode. Those that another thread opens at the same time count as the group's.
"""
from __future__ import annotations

import contextlib
import os
import select
import socket
import stat
from collections.abc import Callable, Iterator

from ..errors import BadInputError

Inode = tuple[int, int]


def own_address() -> str:
    """Returns the address of this host at which other ranks reach it."""
    master = os.environ.get("MASTER_ADDR")
    try:
        if master is None:
            return socket.gethostbyname(socket.gethostname())
        family, kind, protocol, _, place = socket.getaddrinfo(master, int(os.environ.get("MASTER_PORT", "1")), type=socket.SOCK_DGRAM)[0]
        with socket.socket(family, kind, protocol) as probe:
            probe.connect(place)  # sends nothing
            return str(probe.getsockname()[0])
    except (OSError, ValueError) as error:
        given = "which is not set" if master is None else repr(master)
        raise BadInputError(f"MASTER_ADDR, {given}: this host finds no address of its own by it ({error}), wanted the address of rank 0") from error


class Sockets:
    """The sockets that were opened in `opening()`. Another thread may call `shut_down` at any time."""

    def __init__(self) -> None:
        self._before: set[Inode] = set()
        self._opened: set[Inode] = set()
        self._opening = False

    @contextlib.contextmanager
    def opening(self) -> Iterator[None]:
        """Takes the sockets that are opened inside, and still exist at the end, as those of the group."""
        self._before, self._opened, self._opening = {inode for _, inode in _open_sockets()}, set(), True
        try:
            yield
        finally:
            self._opened = {inode for _, inode in _open_sockets()} - self._before
            self._opening = False

    def shut_down(self) -> None:
        """Shuts down the connections. Listening sockets stay, because Gloo's thread ends the process if they fail."""
        for number, inode in _open_sockets():
            if inode in self._opened or self._opening and inode not in self._before:
                with contextlib.suppress(OSError):
                    _end(os.dup(number), inode)

    def watched(self) -> Callable[[float], bool]:
        """Returns a call that waits up to a number of seconds, and returns whether a connection that exists now has ended."""
        own = [(number, inode) for number, inode in _open_sockets() if inode in self._opened and _is_connected(number)]

        def ended(limit_s: float) -> bool:
            poller = select.poll()
            for number, inode in own:
                try:
                    if _inode(number) != inode:
                        return True
                except OSError:
                    return True
                poller.register(number, select.POLLRDHUP)
            return bool(poller.poll(limit_s * 1000))

        return ended


def _is_connected(number: int) -> bool:
    try:
        with socket.socket(fileno=os.dup(number)) as connection:
            connection.getpeername()
            return connection.family in (socket.AF_INET, socket.AF_INET6)
    except OSError:
        return False


def _end(copy: int, inode: Inode) -> None:
    """Shuts down the connection of a duplicated descriptor, unless the original was reused for another socket."""
    if _inode(copy) != inode:
        os.close(copy)
        return
    with socket.socket(fileno=copy) as connection:
        if connection.family in (socket.AF_INET, socket.AF_INET6):
            connection.getpeername()
            connection.shutdown(socket.SHUT_RDWR)


def _inode(number: int) -> Inode:
    found = os.fstat(number)
    return found.st_dev, found.st_ino


def _open_sockets() -> list[tuple[int, Inode]]:
    """Returns the descriptors of all sockets with their inodes."""
    found = []
    for number in map(int, os.listdir("/proc/self/fd")):
        with contextlib.suppress(OSError):
            if stat.S_ISSOCK(os.fstat(number).st_mode):
                found.append((number, _inode(number)))
    return found
