# SPDX-License-Identifier: Apache-2.0
"""A connection from every rank to every other, separate from the group. It shows at once that a rank has ended, and carries the survivors'
messages.

A thread sends a beat on each line. A closed line means that the process has ended. A line without beats means that it is stopped. A
member's number is its rank at the start, or the next free number if it has joined. It is never reused.
"""
from __future__ import annotations

import contextlib
import json
import secrets
import selectors
import socket
import threading
import time
from typing import Any, Optional

from .endpoint import ANSWER_S, MAX_ASKED, Endpoint, Entry, Guest
from .ranks import Ranks
from .sockets import own_address

BEAT_S = 0.2
CONNECT_S = 60.0
SEND_S = 5.0
MAX_GUESTS = 16  # connections at the endpoint with an incomplete request; the oldest is closed
ENDED, SILENT = "has ended", "is silent"


class Lines:
    """The connections of a rank to all others. All ranks open them together, or a process that joins, with its `entry`.

    Any thread may call every method.
    """

    def __init__(self, ranks: Ranks, silence_s: float, entry: Optional[Entry] = None) -> None:
        self.member, self.members = (ranks.members[ranks.number], list(ranks.members)) if entry is None else (entry.member, [])
        self.address = "" if entry is None else entry.address
        self.newcomers: dict[int, bool] = {}  # processes that are no members yet; whether they have all their lines
        self.changed = threading.Condition(threading.RLock())
        self.lost: dict[int, str] = {}  # the reason, by member
        self.ready: dict[int, int] = {}  # the newest generation that each member has left
        self.form: Optional[dict[str, Any]] = None  # the newest group that a leader has called
        self.done: set[int] = set()  # members that have finished training
        self.refused = ""  # line with which a member has ended, so that all end with it
        self.left_out = False
        self._ranks, self._silence_s = ranks, silence_s
        self._generation: Optional[int] = 0 if entry is None else None  # of the current group; None if there is none
        self._endpoint: Optional[Endpoint] = None
        self._queue: list[tuple[Guest, dict[str, Any]]] = []  # processes that wait until another is a member
        self._rests = False  # the endpoint, after an accept() that failed
        self._fault: Optional[str] = None  # of the first such accept(), "" once it was taken
        self._alarmed = self._closing = False
        self._lines: dict[int, socket.socket] = {}
        self._heard: dict[int, float] = {}
        self._parts: dict[int, bytes] = {}
        self._selector = selectors.DefaultSelector()
        if entry is None:
            self._connect()
        for member, line in (entry.lines if entry is not None else {}).items():
            self._add(member, line)
        ranks.highest = max([ranks.highest, self.member, *self._lines])
        self._ticked = self._beaten = time.monotonic()
        self._thread = threading.Thread(target=self._run, name="dynmo lines", daemon=True)
        self._thread.start()

    @property
    def alive(self) -> list[int]:
        """Returns the members of the group that are not lost."""
        return [member for member in self.members if member not in self.lost]

    def hears_of_loss(self, limit_s: float) -> bool:
        """Waits up to `limit_s`. Returns whether a member of the current group is lost or has left it."""
        with self.changed:
            return self.changed.wait_for(lambda: self._alarmed, limit_s)

    def enter(self, generation: int, members: list[int]) -> None:
        """Watches a group. If a member is lost or leaves, ends this rank's connections in the group, so that no call waits for it."""
        with self.changed:
            self._generation, self.members = generation, members
            self._ranks.highest = max(self._ranks.highest, *members)
            for member in members:
                self.newcomers.pop(member, None)
            self._alarmed = any(member in self.lost or self.ready.get(member, -1) >= generation for member in members)

    def leave(self) -> int:
        """Leaves the current group. Returns its generation."""
        with self.changed:
            generation, self._generation = self._generation, None
            self._alarmed = False
            assert generation is not None
            return generation

    def say(self, **facts: Any) -> None:
        """Sends facts to all members that are not lost."""
        with self.changed:
            for member in list(self._lines):
                self._send(member, json.dumps(facts).encode() + b"\n")

    @property
    def connected(self) -> list[int]:
        """Returns the members and newcomers that have a line."""
        return sorted(self._lines)

    def asks(self) -> bool:
        """Returns whether a process waits to become a member."""
        with self.changed:
            return any(self.newcomers.values())

    def open(self, endpoint: Endpoint) -> None:
        """Lets processes join from now on."""
        with self.changed:
            self._endpoint = endpoint
            self._selector.register(endpoint.listener, selectors.EVENT_READ, endpoint)

    @property
    def is_open(self) -> bool:
        return self._endpoint is not None

    def take_fault(self) -> str:
        """Why processes wait to be let in, or have waited, once."""
        fault, self._fault = self._fault, None if self._fault is None else ""
        return fault or ""

    def leave_out(self, member: int) -> None:
        """Marks a member that does not answer as lost, and sends it a message about that."""
        with self.changed:
            if member in self._lines:
                self._send(member, json.dumps({"out": True}).encode() + b"\n")
                self._lose(member, SILENT)

    def close(self, done: bool, refused: str = "") -> None:
        """Closes the lines. Others see a loss unless this member is `done`. With the line `refused` they do not survive it."""
        with self.changed:
            self._generation, self._alarmed = None, False
            if done:
                self.say(done=True)
            if refused:
                self.say(refused=refused)
            self._closing = True
        self._thread.join()
        if self._endpoint is not None:
            self._endpoint.close()
        for guest in [*self._guests, *(one for one, _ in self._queue)]:
            guest.line.close()
        for line in self._lines.values():
            line.close()
        self._selector.close()

    # --- Inside. ---

    def _connect(self) -> None:
        def listening() -> tuple[tuple[str, socket.socket], dict[str, Any]]:
            address = own_address()
            return (address, socket.create_server((address, 0), family=socket.AF_INET6 if ":" in address else socket.AF_INET)), {}

        self.address, listener = self._ranks.attempt("Survivor: its listening", listening)
        with listener:
            token = secrets.token_hex(8)
            told = self._ranks.gather((self.address, listener.getsockname()[1], token))
            self._ranks.attempt("Survivor: its connections", lambda: (None, self._meet(listener, told, token.encode())))

    def _meet(self, listener: socket.socket, told: list[Any], token: bytes) -> dict[str, Any]:
        """Connects to the members before this one, and waits for the others. Returns {}: the ranks need not agree on a value."""
        deadline = time.monotonic() + CONNECT_S
        for member, (address, port, key) in zip(self.members[: self._ranks.number], told):
            line = socket.create_connection((address, port), CONNECT_S)
            line.sendall(key.encode() + b"%8d" % self.member)
            self._add(member, line)
        while len(self._lines) < len(told) - 1:
            listener.settimeout(max(0.01, deadline - time.monotonic()))
            line, _ = listener.accept()
            line.settimeout(SEND_S)
            hello = b""
            with contextlib.suppress(OSError):
                hello = line.recv(len(token) + 8, socket.MSG_WAITALL)
            if len(hello) != len(token) + 8 or not secrets.compare_digest(hello[: len(token)], token):
                line.close()
                continue
            self._add(int(hello[len(token) :]), line)
        return {}

    def _add(self, member: int, line: socket.socket) -> None:
        line.settimeout(SEND_S)
        line.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._lines[member], self._parts[member], self._heard[member] = line, b"", time.monotonic()
        self._selector.register(line, selectors.EVENT_READ, member)

    def _run(self) -> None:
        while not self._closing:
            events = self._selector.select(BEAT_S)
            with self.changed:
                now = time.monotonic()
                if now - self._ticked > self._silence_s / 2:  # this process was stopped, not the others
                    self._heard = dict.fromkeys(self._heard, now)
                self._ticked = now
                for key, _ in sorted(events, key=lambda event: isinstance(event[0].data, Endpoint)):  # the endpoint may close a guest
                    if isinstance(key.data, int):
                        self._read(key.data, now)
                    elif isinstance(key.data, Guest):
                        self._hear(key.data)
                    else:
                        self._welcome(key.data)
                while self._queue and not self.newcomers:
                    self._let_in(*self._queue.pop(0))
                if now - self._beaten >= BEAT_S:
                    self._beaten = now
                    if self._rests and self._endpoint is not None:
                        self._rests = False
                        self._selector.register(self._endpoint.listener, selectors.EVENT_READ, self._endpoint)
                    for member in list(self._lines):
                        self._send(member, b"\n")
                for member in [member for member in self._lines if now - self._heard[member] > self._silence_s]:
                    self.leave_out(member)
                self.changed.notify_all()
                if self._alarmed:  # repeated, because connections may have been opened since
                    self._ranks.abort()

    def _read(self, member: int, now: float) -> None:
        if member not in self._lines:
            return
        try:
            found = self._lines[member].recv(1 << 16)
        except OSError:
            found = b""
        if not found:
            self._lose(member, ENDED)
            return
        self._heard[member] = now
        *texts, self._parts[member] = (self._parts[member] + found).split(b"\n")
        for text in filter(None, texts):
            self._take(member, json.loads(text))

    def _welcome(self, endpoint: Endpoint) -> None:
        try:
            line, _ = endpoint.listener.accept()
        except (BlockingIOError, ConnectionAbortedError):
            return
        except OSError as error:  # no free descriptor: the listener would be readable at once again, so it rests until the next beat
            self._selector.unregister(endpoint.listener)
            self._rests = True
            self._fault = error.strerror if self._fault is None else self._fault
            return
        line.setblocking(False)
        self._selector.register(line, selectors.EVENT_READ, Guest(line))
        for guest in self._guests[:-MAX_GUESTS]:
            self._selector.unregister(guest.line)
            guest.line.close()

    @property
    def _guests(self) -> list[Guest]:
        """Returns the processes at the endpoint with an incomplete request, the oldest first."""
        return [key.data for key in self._selector.get_map().values() if isinstance(key.data, Guest)]

    def _hear(self, guest: Guest) -> None:
        """Reads from a process at the endpoint. Queues it once its request is complete."""
        assert self._endpoint is not None
        try:
            found = guest.line.recv(1 << 16)
        except OSError:
            found = b""
        guest.said += found
        if found and len(guest.said) <= MAX_ASKED and not guest.said.endswith(b"\n"):
            return
        self._selector.unregister(guest.line)
        with contextlib.suppress(ValueError, KeyError, TypeError, RecursionError):  # any program may connect
            told = json.loads(guest.said)
            if secrets.compare_digest(str(told["token"]), self._endpoint.token) and isinstance(told["asked"], dict):
                self._queue.append((guest, {name: told[name] for name in ("asked", "address", "key")}))
                return
        guest.line.close()

    def _let_in(self, guest: Guest, told: dict[str, Any]) -> None:
        """Gives a process a number and tells all members to connect to it, or refuses it."""
        assert self._endpoint is not None
        guest.line.settimeout(SEND_S)
        with contextlib.suppress(OSError):
            if refused := self._endpoint.admits(told["asked"]):
                guest.line.sendall(json.dumps({"refused": refused}).encode() + b"\n")
                guest.line.close()
                return
            number = self._ranks.highest = self._ranks.highest + 1
            others = [member for member in self.alive if member != self.member]
            answer = {"member": number, "leader": self.member, "others": others, "facts": self._endpoint.facts}
            guest.line.sendall(json.dumps(answer).encode() + b"\n")
            self.newcomers[number] = False
            self.lost.pop(number, None)
            for member in others:
                self._send(member, json.dumps({"newcomer": number, "address": told["address"], "key": told["key"]}).encode() + b"\n")
            self._add(number, guest.line)

    def _greet(self, number: int, address: list[Any], key: str) -> None:
        """Connects to a process that the lowest rank has let in."""
        with contextlib.suppress(OSError):
            line = socket.create_connection(tuple(address), ANSWER_S)
            line.sendall(key.encode() + b"%8d" % self.member)
            old = self._lines.pop(number, None)
            if old is not None:  # of a process that an earlier lowest rank had let in
                self._selector.unregister(old)
                old.close()
            self.lost.pop(number, None)
            self.newcomers[number] = False
            self._ranks.highest = max(self._ranks.highest, number)
            self._add(number, line)

    def _take(self, member: int, facts: dict[str, Any]) -> None:
        if "newcomer" in facts:
            self._greet(facts["newcomer"], facts["address"], facts["key"])
        if "joins" in facts and member in self.newcomers:
            self.newcomers[member] = True
        if "out" in facts:
            self.left_out = self._alarmed = True
        if "done" in facts:
            self.done.add(member)
        if "refused" in facts:
            self.refused = facts["refused"]
        if "left" in facts:
            self.ready[member] = max(self.ready.get(member, -1), facts["left"])
            if self._generation is not None and member in self.members and self.ready[member] >= self._generation:
                self._alarmed = True
        if "form" in facts and (self.form is None or facts["form"] > self.form["form"]):
            self.form = facts

    def _send(self, member: int, text: bytes) -> None:
        try:
            self._lines[member].sendall(text)
        except OSError:
            self._lose(member, ENDED)

    def _lose(self, member: int, why: str) -> None:
        line = self._lines.pop(member, None)
        if line is None:
            return
        with contextlib.suppress(KeyError, ValueError):
            self._selector.unregister(line)
        line.close()
        if member in self.done or self.newcomers.pop(member, None) is not None:
            self.changed.notify_all()
            return
        self.lost[member] = why
        if self._generation is not None and member in self.members:
            self._alarmed = True
        self.changed.notify_all()
