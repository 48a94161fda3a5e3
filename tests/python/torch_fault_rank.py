# SPDX-License-Identifier: Apache-2.0
"""torch_fault_rank.py PLACE RANK: two blocks a rank; rank RANK is killed at PLACE in the third step, or a byte is damaged.

Or it tells an error, with a store or without one.
"""
import os
import sys
import time
from unittest import mock

import torch
import torch.distributed as dist

import dynmo
import torch_cases
from dynmo.torch import move, ranks, step
from plans import plan_of
from torch_ranks import kill_in, make_pipe, run_rank, train_step


PLACES = {
    "forward": (step.Step, "_forward"),
    "backward": (step.Step, "_backward"),
    "exchange": (ranks.Ranks, "sum"),
    "vote": (move.Mover, "vote"),
    "move": (move.Mover, "_exchange"),
}


def cut(first):
    between = dist.get_world_size() - 2
    return plan_of([first, *[1] * between, 6 - first - between])


def wait_until_all_have_noticed():
    """No rank ends before every other has noticed, so that none does because its neighbour has ended. Rank 0 has the store."""
    store = dist.distributed_c10d._get_default_store()
    try:
        count, deadline = store.add("noticed", 1), time.monotonic() + 100
        while count < dist.get_world_size() - 1:
            if time.monotonic() > deadline:
                print(f"{count} ranks have noticed")
                os._exit(3)
            time.sleep(0.01)
            count = store.add("noticed", 0)
    except RuntimeError:
        pass  # rank 0 has ended: it is the victim, or has seen that all have noticed


class Gone:
    """A store whose process is lost."""

    def set(self, key, value):
        raise RuntimeError("connection reset by peer")

    add = set


def tell(place, victim):
    """A sum is on the way, and ahead of it arrives a message whose receive has ended with the error."""
    group, store = ranks.Ranks(20), dist.distributed_c10d._get_default_store()
    cells, message = torch.zeros(4), torch.ones(4)
    if group.number == victim:
        begun = group.receive(message, 0, 1), group.begin_sum(cells)  # kept, as by the frames of a step
        dropped = ranks._Work.drop
        found = Gone() if place == "told without a store" else store
        with mock.patch.object(dist.distributed_c10d, "_get_default_store", lambda: found):
            with mock.patch.object(ranks._Work, "drop", lambda work: (dropped(work), store.set("dropped", ""))):
                group.tell(OSError("one rank's own"))
        store.wait(["noticed"])
        del begun
        return
    store.wait(["dropped"])
    try:
        group.send(message, victim, 1)
        group.sum(cells)
    except dynmo.DynmoError as error:
        print(f"{type(error).__name__}: {error}")
        assert "imed out" not in str(error.__cause__), error.__cause__
    store.set("noticed", "")


def main(place, victim):
    victim, case = int(victim), {"family": "llama", "micro_batches": 4}
    if place.startswith("told"):
        tell(place, victim)
        return
    pipe = make_pipe(case, plan=cut(1))
    now = [0]
    if dist.get_rank() == victim and place in PLACES:
        kill_in(*PLACES[place], lambda: now[0] == 2)
    if place == "damage":
        move.Mover._damage = lambda self, layer, packed: packed[5].add_(1) if now[0] == 2 and pipe.rank == victim else None
    try:
        train(pipe, case, place, now)
    except dynmo.RankLostError as error:
        print(f"RankLostError: {error}", flush=True)
        wait_until_all_have_noticed()
        sys.exit(1)


def train(pipe, case, place, now):
    for number in range(5):
        now[0] = number
        train_step(pipe, torch_cases.batch_of(case, number))
        before = pipe.plan
        moved = pipe.move_to(cut(1 + (number + 1) % 3))
        if place == "damage":
            assert moved.done == (number != 2) and (moved.done or pipe.plan == before)
            print(f"step {number}: {pipe.plan.cut}, loss {sum(pipe.losses)}")


if __name__ == "__main__":
    run_rank(main)
