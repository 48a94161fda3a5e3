#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Kills ranks of a Llama on dynmo.torch until a time is over, and compares each run with the plain loop, bit for bit.

Every run has 4 ranks, half of them in two replicas, and up to 3 losses: at drawn steps and places, one after the other, one within the
recovery from another, or of two ranks at once. Every eighth run stops a rank by SIGSTOP instead, and wakes it at the end. Prints the time
from a kill to the next step that is done. A run either has the bits of the plain loop, or ends on all ranks as documented.
"""
import argparse
import pathlib
import random
import signal
import statistics
import sys
import tempfile
import time

sys.path[:0] = [str(pathlib.Path(__file__).resolve().parents[1] / folder) for folder in ("python", "support")]
import torch

import torch_cases
import torch_survival_rank as survival

STEPS, RANKS = 10, 4
PLACES = ("step", "forward", "backward", "exchange", "snapshot")
SILENCE_S = 3
WITHIN = ("restore", "new group", "vote")
ENDS = ("all copies of layer", "left for 2 replicas")
SCHEDULES = ("1f1b", "gpipe", "zb-h1")


def drawn_case(rng):
    """Losses in the order of their steps. The place of two at once is the number of the second rank."""
    replicas = rng.choice((1, 2))
    count = rng.choice((1, 2, 3) if replicas == 1 else (1, 1, 2, 2, 3))
    victims = rng.sample(range(RANKS), count)
    steps = sorted(rng.sample(range(3, STEPS - 1), count))
    kills = [[victim, step, rng.choice(PLACES)] for victim, step in zip(victims, steps)]
    kind = rng.random()
    if count > 1 and kind < 0.3:
        kills[1][1:] = [kills[0][1], rng.choice(WITHIN)]
    elif count > 1 and kind < 0.5:
        kills = [[victims[0], steps[0], victims[1]], *kills[2:]]
    elif kind > 0.875:
        kills = [[victims[0], steps[0], "stopped"]]
    return {
        "replicas": replicas, "silence_s": SILENCE_S if kills[0][2] == "stopped" else 60,
        "family": "llama", "micro_batches": 4, "ranks": RANKS, "steps": STEPS, "clip": 1.0, "every": rng.choice((0, 1, 2, 3)),
        "schedule": rng.choice(SCHEDULES), "kills": kills,
    }


def seconds_to_next_step(folder):
    """Of each recovery: from the first kill that it answers until the slowest rank has done the step behind it."""
    said = {int(path.stem[5:]): path.read_text(encoding="utf-8").splitlines() for path in folder.glob("rank-*.txt")}
    killed = {rank: float(line.split()[1]) for rank, lines in said.items() for line in lines if line.startswith("killed ")}
    found = {}
    for lines in said.values():
        for number, line in enumerate(lines):
            if line.startswith("recovered "):
                lost = line.split()[2].rstrip(":")
                begun = [float(later.split()[2]) for later in lines[number:] if later.startswith("step ")]
                if len(begun) > 1:  # a step is done when the next one begins
                    seconds = begun[1] - min(killed[rank] for rank in map(int, lost.split(",")) if rank in killed)
                    found[lost] = max(seconds, found.get(lost, 0.0))
    return list(found.values())


def may_end(case):
    """Whether two losses may be one, or too few ranks left. A rank with "snapshot" is killed in the next one, whenever that is."""
    return any(place in (*WITHIN, "snapshot") or isinstance(place, int) for _, _, place in case["kills"]) or RANKS - len(victims_of(case)) < case["replicas"]


def victims_of(case):
    """The ranks that are killed."""
    return {victim for victim, _, place in case["kills"] if place != "stopped"} | {place for _, _, place in case["kills"] if isinstance(place, int)}


def outcome(case, codes, folder, wanted):
    """`equal`, `ended` as documented, or what is wrong."""
    victims = victims_of(case)
    said = {rank: (folder / f"rank-{rank}.txt").read_text(encoding="utf-8") for rank in range(RANKS)}
    stopped = {victim for victim, _, place in case["kills"] if place == "stopped"}
    if any(codes[rank] != 1 or "the others have left out this rank" not in said[rank] for rank in stopped):
        return f"a rank was stopped, and did not end when it woke: {codes}, {[said[rank][-300:] for rank in stopped]}"
    alive = [rank for rank in range(RANKS) if codes[rank] != -signal.SIGKILL and rank not in stopped]
    if any(codes[rank] == -signal.SIGKILL and rank not in victims for rank in range(RANKS)):
        return f"a rank was killed by another: {codes}"
    if may_end(case) and all(codes[rank] == 1 and any(line in said[rank] for line in ENDS) for rank in alive):
        return "ended"
    if any(codes[rank] != 0 for rank in alive):
        return f"codes {codes}: {[text[-300:] for text in said.values()]}"
    counts = dict.fromkeys(wanted["weights"], 0)
    for rank in alive:
        part = torch.load(folder / f"rank-{rank}.pt")
        if part["losses"] != wanted["losses"]:
            return f"rank {rank} has other losses"
        for name, weights in part["weights"].items():
            counts[name] += 1
            state, other = part["state"][name], wanted["state"][name]
            same = torch.equal(weights, wanted["weights"][name]) and state.keys() == other.keys()
            if not same or not all(torch.equal(torch.as_tensor(state[key]), torch.as_tensor(other[key])) for key in other):
                return f"rank {rank} has another {name}, or another state of it"
    return "equal" if set(counts.values()) == {case["replicas"]} else f"layers are held by other ranks than each once a replica: {counts}"


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--dynmo", help="not used: the package is")
    parser.add_argument("--seconds", type=float, default=300)
    parser.add_argument("--seed", type=int, default=1)
    arguments = parser.parse_args()
    assert survival.can_fork()
    rng, begin = random.Random(arguments.seed), time.monotonic()
    counts, recovered, left_out, kills, number = {"equal": 0, "ended": 0}, [], [], 0, 0
    in_replicas = stops = 0
    with tempfile.TemporaryDirectory() as place:
        wanted = {}
        for replicas in (1, 2):
            plain = pathlib.Path(place) / f"plain {replicas}"
            survival.run({**drawn_case(rng), "replicas": replicas, "ranks": 0, "plain": True, "kills": []}, plain)
            wanted[replicas] = torch.load(plain / "plain.pt")
        while time.monotonic() - begin < arguments.seconds:
            case, folder = drawn_case(rng), pathlib.Path(place) / str(number)
            codes = survival.run(case, folder)
            found = outcome(case, codes, folder, wanted[case["replicas"]])
            stopped = case["kills"][0][2] == "stopped"
            dead = sum(code == -signal.SIGKILL for code in codes) + stopped
            kills, stops, in_replicas = kills + dead, stops + stopped, in_replicas + (dead if case["replicas"] > 1 else 0)
            if found not in counts:
                print(f"FAIL survival: run {number} of seed {arguments.seed}, {case}: {found}")
                return 1
            counts[found] += 1
            (left_out if stopped else recovered).extend(seconds_to_next_step(folder))
            number += 1
    print(f"{kills} kills, of which {in_replicas} in replicas and {stops} by SIGSTOP, in {number} runs: {counts['equal']} equal bit for bit, {counts['ended']} ended as documented")
    cuts = statistics.quantiles(recovered, n=100)
    print(f"from a kill to the next step that is done: p50 {cuts[49]:.2f} s, p99 {cuts[98]:.2f} s, of {len(recovered)}")
    if left_out:
        print(f"after SIGSTOP, {SILENCE_S} s of silence among them: p50 {statistics.median(left_out):.2f} s, max {max(left_out):.2f} s, of {len(left_out)}")
    print("PASS survival")
    return 0


if __name__ == "__main__":
    sys.exit(main())
