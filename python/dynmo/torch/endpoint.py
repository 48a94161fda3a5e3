# SPDX-License-Identifier: Apache-2.0
"""Lets a new process find a running pipeline: the lowest rank listens, and a file has its address.

The new process asks to be let in. The lowest rank compares its settings and gives it a number. Then every rank connects to it. It is a
member once the ranks form their next group, between two steps.
"""
from __future__ import annotations

import contextlib
import json
import os
import pathlib
import secrets
import socket
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Union

from ..errors import BadInputError

Path = Union[str, "os.PathLike[str]"]
FIND_S = 10.0  # how long to try, as the file may be that of a lost rank
ANSWER_S = 2.0  # to connect
MAX_ASKED = 1 << 20  # bytes that a process may send to the endpoint


@dataclass
class Endpoint:
    """The listening socket at the lowest rank. `admits` returns why a process with these settings cannot join, or ""."""

    listener: socket.socket
    path: pathlib.Path
    token: str
    admits: Callable[[dict[str, Any]], str]
    facts: dict[str, Any]  # sent to a process that joins

    def close(self) -> None:
        """Closes the socket, and removes the file unless another rank has replaced it."""
        with contextlib.suppress(OSError, ValueError, KeyError):
            if json.loads(self.path.read_text(encoding="utf-8"))["token"] == self.token:
                self.path.unlink()
        self.listener.close()


@dataclass
class Guest:
    """A process that has connected to the endpoint, and the bytes that it has sent."""

    line: socket.socket
    said: bytes = b""


@dataclass
class Entry:
    """The state of a process that was let in: its number, its address, a connection to every member, and the endpoint's facts."""

    member: int
    address: str
    lines: dict[int, socket.socket] = field(default_factory=dict)
    facts: dict[str, Any] = field(default_factory=dict)


def open_endpoint(path: Path, address: str, admits: Callable[[dict[str, Any]], str], facts: dict[str, Any]) -> Endpoint:
    """Listens, and writes the address and a token to the file. Only this user can read it, and only the token lets a process in."""
    place = pathlib.Path(path)
    try:
        listener = socket.create_server((address, 0), family=socket.AF_INET6 if ":" in address else socket.AF_INET)
    except OSError as error:
        raise BadInputError(f"endpoint={place}: this rank cannot listen at {address} ({error.strerror})") from error
    listener.setblocking(False)
    endpoint = Endpoint(listener, place, secrets.token_hex(16), admits, facts)
    written = place.with_name(f".{place.name}.{endpoint.token[:8]}")
    try:
        with open(os.open(written, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w", encoding="utf-8") as file:
            json.dump({"format": "dynmo-endpoint-1", "address": address, "port": listener.getsockname()[1], "token": endpoint.token}, file)
        os.replace(written, place)
    except OSError as error:
        endpoint.close()
        with contextlib.suppress(OSError):
            written.unlink()
        raise BadInputError(f"endpoint={place}: it cannot be written ({error.strerror}), wanted a file in a folder that all ranks share") from error
    return endpoint


def join(path: Path, asked: dict[str, Any], limit_s: float) -> Entry:
    """Asks to be let in with the settings `asked`, and waits for a connection to each member. Raises BadInputError if refused."""
    deadline = time.monotonic() + limit_s
    line, token = _find(path)
    try:
        address = line.getsockname()[0]
        with socket.create_server((address, 0), family=line.family) as listener:
            key = secrets.token_hex(8)
            told = {"token": token, "asked": asked, "address": [address, listener.getsockname()[1]], "key": key}
            line.sendall(json.dumps(told).encode() + b"\n")
            answer = json.loads(_read_line(line, deadline))
            if "refused" in answer:
                raise BadInputError(f"endpoint={os.fspath(path)}: {answer['refused']}")
            entry = Entry(answer["member"], address, {answer["leader"]: line}, answer["facts"])
            while set(answer["others"]) - entry.lines.keys():
                other, number = _accept(listener, key, deadline)
                if number >= 0:
                    entry.lines[number] = other
        return entry
    except (OSError, ValueError, KeyError) as error:
        line.close()
        raise BadInputError(f"endpoint={os.fspath(path)}: no answer ({error}), wanted a pipeline that trains; start this process again") from error


def _find(path: Path) -> tuple[socket.socket, str]:
    deadline = time.monotonic() + FIND_S
    while True:
        try:
            place = json.loads(pathlib.Path(path).read_text(encoding="utf-8"))
            return socket.create_connection((place["address"], place["port"]), ANSWER_S), str(place["token"])
        except (OSError, ValueError, KeyError, TypeError) as error:
            if time.monotonic() > deadline:
                raise BadInputError(f"endpoint={os.fspath(path)}: no rank listens ({error}), wanted the file of a Survivor that trains") from error
        time.sleep(0.1)


def _read_line(line: socket.socket, deadline: float) -> bytes:
    """Reads a line byte by byte, because later bytes belong to the members' protocol."""
    said = b""
    while not said.endswith(b"\n"):
        line.settimeout(max(0.01, deadline - time.monotonic()))
        found = line.recv(1)
        if not found or len(said) > MAX_ASKED:
            raise ConnectionError("the connection was closed")
        said += found
    return said


def _accept(listener: socket.socket, key: str, deadline: float) -> tuple[socket.socket, int]:
    """Accepts a connection. Returns it with the number of its member, or -1 if another program has connected."""
    listener.settimeout(max(0.01, deadline - time.monotonic()))
    line, _ = listener.accept()
    line.settimeout(ANSWER_S)
    with contextlib.suppress(OSError):
        hello = line.recv(len(key) + 8, socket.MSG_WAITALL)
        if len(hello) == len(key) + 8 and secrets.compare_digest(hello[: len(key)], key.encode()):
            return line, int(hello[len(key) :])
    line.close()
    return line, -1
