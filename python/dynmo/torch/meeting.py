# SPDX-License-Identifier: Apache-2.0
"""Forms the next group after a loss: the survivors leave their group, and the lowest of them calls the next one.

Every survivor says which generation it has left. The lowest waits until all live ones have said so, opens a store in its own process, and
calls a group of a higher generation. If a rank cannot enter that group, it leaves it, too, and all meet again.
"""
from __future__ import annotations

import time
from dataclasses import dataclass
from typing import Any, Optional

from ..errors import BadInputError, RankLostError
from .lines import ENDED, Lines
from .ranks import open_store

OWN_STORE_S = 10.0  # to open a store in this process


class AllDone(Exception):
    """Raised if a member has done all steps, so that no group is formed any more."""


@dataclass
class Meeting:
    """A group to form: its members in the order of their new numbers, and the address of its store."""

    generation: int
    members: list[int]
    address: str
    port: int
    store: Any = None  # only at the leader, which runs it


def meet(lines: Lines, left: int, limit_s: float) -> "Meeting | str":
    """Waits for the group after generation `left`. Returns it, or why this process cannot be in one. Raises AllDone if there will be
    none, or BadInputError if a member has ended with an error of all.
    """
    deadline = time.monotonic() + limit_s
    with lines.changed:
        lines.say(left=left)
        while True:
            if lines.done:  # a member that is done leaves no group
                raise AllDone
            if lines.refused:
                raise BadInputError(lines.refused)
            if end := _reason_to_end(lines):
                return end
            alive = lines.alive
            newest = max([lines.ready.get(member, -1) for member in alive], default=-1)
            form = lines.form
            if form is not None and form["form"] > max(left, newest):
                if [member for member in form["members"] if member not in lines.newcomers] == alive:
                    return Meeting(form["form"], form["members"], *form["address"])
                newest = form["form"]  # a member was lost after the call
            if newest > left:
                left = newest
                lines.say(left=left)
            called = sorted([*alive, *(newcomer for newcomer, is_ready in lines.newcomers.items() if is_ready)])
            late = [member for member in called if member != lines.member and lines.ready.get(member, -1) < left]
            if alive[0] == lines.member and not late:
                return _call(lines, left + 1, called)
            if time.monotonic() > deadline:
                deadline = time.monotonic() + limit_s
                for member in late or alive[:1]:
                    lines.leave_out(member)
            lines.changed.wait(max(0.01, deadline - time.monotonic()))


def wait_for_place(lines: Lines, limit_s: float) -> Meeting:
    """Returns the first group of a process that joins. Until then this process also leaves each generation that a member leaves."""
    deadline, left = time.monotonic() + limit_s, -1
    with lines.changed:
        lines.say(joins=True)
        while True:
            newest = max([lines.ready.get(member, -1) for member in lines.connected], default=-1)
            if newest > left:
                left = newest
                lines.say(left=left)
            form = lines.form
            if form is not None and form["form"] > left and lines.member in form["members"]:
                if set(form["members"]) <= {lines.member, *lines.connected}:
                    return Meeting(form["form"], form["members"], *form["address"])
            if lines.refused:
                raise BadInputError(lines.refused)
            if lines.done:
                raise RankLostError(f"rank {lines.member}: the ranks have done all steps before they could let in this process")
            if not lines.connected or lines.left_out or time.monotonic() > deadline:
                raise RankLostError(f"rank {lines.member}: the ranks have not let in this process; start it again")
            lines.changed.wait(max(0.01, deadline - time.monotonic()))


def _call(lines: Lines, generation: int, alive: list[int]) -> Meeting:
    address = lines.address
    store = open_store(address, 0, here=True, timeout_s=OWN_STORE_S)
    lines.say(form=generation, members=alive, address=[address, store.port])
    return Meeting(generation, alive, address, store.port, store)


def _reason_to_end(lines: Lines) -> Optional[str]:
    """Returns why this process must end, because other ranks may continue without it, or None."""
    if lines.left_out:
        return "the others have left out this rank, which had not answered"
    voters = [member for member in lines.members if lines.lost.get(member) != ENDED]
    if len(voters) > len(lines.alive) and 2 * len(lines.alive) <= len(voters):
        silent = ", ".join(str(member) for member in voters if member in lines.lost)
        return f"rank {silent} does not answer, and may go on without this one"
    return None
