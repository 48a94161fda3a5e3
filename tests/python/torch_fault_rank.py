# SPDX-License-Identifier: Apache-2.0
"""torch_fault_rank.py PLACE RANK: two blocks a rank; rank RANK is killed at PLACE in the third step, or a byte is damaged."""
import os
import signal
import sys
import time

import torch
import torch.distributed as dist

import dynmo
import dynmo.torch as dt
import torch_cases
from dynmo.torch import move, ranks, step


def kill_in(owner, name, when):
    """Ends this process in a call of `name`, once `when` says so."""
    real = getattr(owner, name)

    def call(self, *arguments, **named):
        if when():
            os.kill(os.getpid(), signal.SIGKILL)
        return real(self, *arguments, **named)

    setattr(owner, name, call)


PLACES = {
    "forward": (step.Step, "_forward"),
    "backward": (step.Step, "_backward"),
    "exchange": (ranks.Ranks, "sum"),
    "vote": (move.Mover, "vote"),
    "move": (move.Mover, "_exchange"),
}


def cut(first, kind="1f1b"):
    world = dist.get_world_size()
    counts = [first] + [1] * (world - 2) + [6 - first - (world - 2)]
    stages = [
        {"stage": index, "rank": index, "first_layer": sum(counts[:index]), "layers": count} for index, count in enumerate(counts)
    ]
    return {"format": "dynmo-plan-1", "ranks": world, "schedule": kind, "stages": stages}


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


def main():
    place, victim = sys.argv[1], int(sys.argv[2])
    dist.init_process_group("gloo")
    case = {"family": "llama", "micro_batches": 4}
    model = torch_cases.make_model(case)
    optimizer = torch_cases.make_optimizer(case, model.parameters())
    pipe = dt.Pipeline(model, optimizer, micro_batches=4, plan=cut(1))
    now = [0]
    if dist.get_rank() == victim and place in PLACES:
        kill_in(*PLACES[place], lambda: now[0] == 2)
    if place == "damage":
        move.Mover._damage = lambda self, layer, packed: packed[5].add_(1) if now[0] == 2 and pipe.rank == victim else None
    try:
        train(pipe, optimizer, case, place, now)
    except dynmo.RankLostError as error:
        print(f"RankLostError: {error}", flush=True)
        wait_until_all_have_noticed()
        sys.exit(1)


def train(pipe, optimizer, case, place, now):
    for number in range(5):
        now[0] = number
        pipe.step(**torch_cases.batch_of(case, number))
        optimizer.step()
        optimizer.zero_grad()
        before = pipe.plan
        moved = pipe.move_to(cut(1 + (number + 1) % 3))
        if place == "damage":
            assert moved.done == (number != 2) and (moved.done or pipe.plan == before)
            print(f"step {number}: {pipe.plan.cut}, loss {sum(pipe.losses)}")


if __name__ == "__main__":
    torch.set_num_threads(1)
    main()
