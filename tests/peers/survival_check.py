#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Kills ranks of a Llama on dynmo.torch until a time is over, and compares each run with the plain loop, bit for bit.

Every run has 4 ranks and up to 3 losses: at drawn steps and places, one after the other, one within the recovery from another, or of two
ranks at once. Prints the time from a kill to the next step that is done. A run either has the bits of the plain loop, or ends on all
ranks with the line of a lost layer.
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
WITHIN = ("restore", "new group", "vote")
SCHEDULES = ("1f1b", "gpipe", "zb-h1")


def drawn_case(rng):
    """Losses in the order of their steps."""
    count = rng.choice((1, 2, 3))
    victims = rng.sample(range(RANKS), count)
    steps = sorted(rng.sample(range(3, STEPS - 1), count))
    kills = [[victim, step, rng.choice(PLACES)] for victim, step in zip(victims, steps)]
    if count > 1 and rng.random() < 0.3:
        kills[1][1:] = [kills[0][1], rng.choice(WITHIN)]
    return {
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
                    seconds = begun[1] - min(killed[int(rank)] for rank in lost.split(","))
                    found[lost] = max(seconds, found.get(lost, 0.0))
    return list(found.values())


def may_end(case):
    """Whether a loss may fall into the recovery from another one. A rank with "snapshot" is killed in the next one, whenever that is."""
    return any(place in (*WITHIN, "snapshot") for _, _, place in case["kills"])


def outcome(case, codes, folder, wanted):
    """`equal`, `ended` as documented, or what is wrong."""
    victims = {victim for victim, _, _ in case["kills"]}
    said = {rank: (folder / f"rank-{rank}.txt").read_text(encoding="utf-8") for rank in range(RANKS)}
    alive = [rank for rank in range(RANKS) if codes[rank] != -signal.SIGKILL]
    if any(codes[rank] == -signal.SIGKILL and rank not in victims for rank in range(RANKS)):
        return f"a rank was killed by another: {codes}"
    if may_end(case) and all(codes[rank] == 1 and "all copies of layer" in said[rank] for rank in alive):
        return "ended"
    if any(codes[rank] != 0 for rank in alive):
        return f"codes {codes}: {[text[-300:] for text in said.values()]}"
    weights, state = {}, {}
    for rank in alive:
        part = torch.load(folder / f"rank-{rank}.pt")
        if part["losses"] != wanted["losses"]:
            return f"rank {rank} has other losses"
        weights.update(part["weights"])
        state.update({(name, key): value for name, values in part["state"].items() for key, value in values.items()})
    names = {(name, key) for name, values in wanted["state"].items() for key in values}
    if weights.keys() != wanted["weights"].keys() or state.keys() != names:
        return "weights or states are missing"
    same = all(torch.equal(weights[name], value) for name, value in wanted["weights"].items())
    same &= all(torch.equal(torch.as_tensor(state[name, key]), torch.as_tensor(wanted["state"][name][key])) for name, key in names)
    return "equal" if same else "weights or states differ"


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--dynmo", help="not used: the package is")
    parser.add_argument("--seconds", type=float, default=300)
    parser.add_argument("--seed", type=int, default=1)
    arguments = parser.parse_args()
    assert survival.can_fork()
    rng, begin = random.Random(arguments.seed), time.monotonic()
    counts, recovered, kills, number = {"equal": 0, "ended": 0}, [], 0, 0
    with tempfile.TemporaryDirectory() as place:
        plain = pathlib.Path(place) / "plain"
        survival.run({**drawn_case(rng), "ranks": 0, "plain": True}, plain)
        wanted = torch.load(plain / "plain.pt")
        while time.monotonic() - begin < arguments.seconds:
            case, folder = drawn_case(rng), pathlib.Path(place) / str(number)
            codes = survival.run(case, folder)
            found = outcome(case, codes, folder, wanted)
            kills += sum(code == -signal.SIGKILL for code in codes)
            if found not in counts:
                print(f"FAIL survival: run {number} of seed {arguments.seed}, {case}: {found}")
                return 1
            counts[found] += 1
            recovered += seconds_to_next_step(folder)
            number += 1
    print(f"{kills} kills in {number} runs: {counts['equal']} equal bit for bit, {counts['ended']} ended as documented")
    cuts = statistics.quantiles(recovered, n=100)
    print(f"from a kill to the next step that is done: p50 {cuts[49]:.2f} s, p99 {cuts[98]:.2f} s, of {len(recovered)}")
    print("PASS survival")
    return 0


if __name__ == "__main__":
    sys.exit(main())
