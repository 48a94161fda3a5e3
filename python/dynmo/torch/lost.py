# SPDX-License-Identifier: Apache-2.0
"""Finds the rank that was lost first, after a message of a group has failed."""
from __future__ import annotations

import os
import time
from collections.abc import Sequence
from typing import Any, Optional

import torch.distributed as dist

LOST_KEY = "dynmo/lost"
LOOK_S = 1.0  # longest wait for a process of this host to end, or for another rank to name one


Place = tuple[str, int, str]  # host, process and process space of a rank


def boot_id() -> str:
    """Returns what processes of one machine share until it restarts, or ""."""
    try:
        with open("/proc/sys/kernel/random/boot_id", encoding="ascii") as file:
            return file.read().strip()
    except OSError:
        return ""


def process_space() -> str:
    """Returns what tells processes with this one's numbers from others, or "". Machines and containers may share a host name."""
    boot = boot_id()
    try:
        return boot and f"{boot} {os.readlink('/proc/self/ns/pid')}"
    except OSError:
        return ""


def find_lost(places: Sequence[Place], number: int, peer: Optional[int]) -> Optional[int]:
    """Returns the rank that was lost first: it has ended, or another rank has named it; else `peer`, the other end of the failed message.

    `number` is this rank.
    """
    store = dist.distributed_c10d._get_default_store()
    deadline = time.monotonic() + LOOK_S
    named: Optional[int] = None
    here = process_space()
    while named is None:
        ended = [rank for rank, (_, pid, space) in enumerate(places) if space and space == here and rank != number and _ended(pid)]
        said = _read(store)
        named = said if said is not None else ended[0] if ended else None
        if time.monotonic() > deadline:
            break
        time.sleep(0.02)
    named = peer if named is None else named
    if named is not None:
        try:
            named = int(store.compare_set(LOST_KEY, "", str(named)))
        except (RuntimeError, ValueError):
            pass  # the store's process may be lost, too
    return named


def _ended(pid: int) -> bool:
    """Returns whether a process of this host has ended. A zombie has."""
    try:
        with open(f"/proc/{pid}/stat", encoding="ascii", errors="replace") as file:
            return file.read().rpartition(")")[2].split()[0] in "ZX"
    except (OSError, IndexError):
        return True


def _read(store: Any) -> Optional[int]:
    try:
        return int(store.get(LOST_KEY)) if store.check([LOST_KEY]) else None
    except (RuntimeError, ValueError):
        return None
