#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""plan::place beside SCOTCH's gmap and scipy's quadratic_assignment(method="2opt") on three levels: rank, node, switch.

build/bench/bench/place_cases gives the messages of real plans of 64 and 256 ranks (1F1B, V placement, interleaved), where each rank
is, and our order. The cost of an order is the sum over all messages of the time of the link that they take. gmap maps the graph of
positions onto the machine as a tleaf target; where it puts two positions on a rank, the one that gains least goes to a free rank.
scipy starts from the given order, or from a random one with --random-start, and is asked up to --two-opt-ranks; a plain exchange of
two ranks while any helps is compared in every case. Ours must cost no more than theirs on any case, nor than
the given order, and take at most 50 ms of CPU (the smallest of five).

    bench/peers/place_compare.py --cases build/bench/bench/place_cases --gmap scotch_gmap

Needs a Python with numpy and scipy, and Debian's package scotch.
"""
import argparse
import json
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import numpy as np
from scipy.optimize import quadratic_assignment

MAX_S = 0.05
ROUNDING = 1e-9  # of sums in another order


class Case:
    def __init__(self, line):
        self.given = json.loads(line)
        self.ranks = self.given["ranks"]
        nodes, switches = np.array(self.given["nodes"]), np.array(self.given["switches"])
        self.level = np.where(nodes[:, None] == nodes[None], 0, np.where(switches[:, None] == switches[None], 1, 2))
        base = np.array([latency for latency, _ in self.given["links"]])
        self.factors = base / base[0]
        per_byte = np.array([each for _, each in self.given["links"]])
        if not np.allclose(per_byte / per_byte[0], self.factors):
            raise SystemExit("latency and bandwidth of the levels differ by other factors: gmap knows one number a level")
        self.flow = np.zeros((self.ranks, self.ranks))  # seconds on the fastest link
        for sender, receiver, messages, size in self.given["rows"]:
            self.flow[sender, receiver] += messages * base[0] + size * per_byte[0]
        self.flow = self.flow + self.flow.T
        self.distance = self.factors[self.level]
        np.fill_diagonal(self.distance, 0)

    def cost(self, order):
        order = np.asarray(order)
        if sorted(order) != list(range(self.ranks)):
            raise SystemExit(f"no order of {self.ranks} ranks: {order}")
        return float((self.flow * self.distance[np.ix_(order, order)]).sum()) / 2


def gmap(program, case, flags, folder):
    """The order that gmap finds, and its seconds."""
    weights = np.maximum(np.rint(case.flow / case.flow.max() * 1e6), (case.flow > 0)).astype(int)
    degrees = (weights > 0).sum(axis=1)
    lines = ["0", f"{case.ranks} {degrees.sum()}", "0 010"]
    for position in range(case.ranks):
        neighbours = np.flatnonzero(weights[position])
        lines.append(" ".join([str(len(neighbours))] + [f"{weights[position, other]} {other}" for other in neighbours]))
    (folder / "graph.grf").write_text("\n".join(lines) + "\n")
    ranks = sorted(range(case.ranks), key=lambda r: (case.given["switches"][r], case.given["nodes"][r], r))
    nodes = len(set(case.given["nodes"]))
    switches = len(set(case.given["switches"]))
    sizes = (switches, nodes // switches, case.ranks // nodes)
    far, near, inside = (round(factor) for factor in case.factors[::-1])
    (folder / "target.tgt").write_text(f"tleaf 3 {sizes[0]} {far} {sizes[1]} {near} {sizes[2]} {inside}\n")
    start = time.perf_counter()
    subprocess.run([program, folder / "graph.grf", folder / "target.tgt", folder / "mapped.map", *flags], check=True,
                   stdout=subprocess.DEVNULL)
    took = time.perf_counter() - start
    leaves = [tuple(map(int, line.split())) for line in (folder / "mapped.map").read_text().splitlines()[1:]]
    order = [-1] * case.ranks
    for position, leaf in leaves:
        order[position] = ranks[leaf]
    return repaired(case, order), took


def repaired(case, order):
    order = list(order)
    free = sorted(set(range(case.ranks)) - set(order))
    seen = set()
    for position, rank in enumerate(order):
        if rank not in seen:
            seen.add(rank)
            continue
        costs = [(case.flow[position] * case.distance[other, order]).sum() for other in free]
        order[position] = free.pop(int(np.argmin(costs)))
    return order


def two_opt(case, random_start, seed):
    guess = None if random_start else np.stack([np.arange(case.ranks)] * 2, axis=1)
    start = time.perf_counter()
    found = quadratic_assignment(case.flow, case.distance, method="2opt", options={"rng": np.random.default_rng(seed), "partial_guess": guess})
    return found.col_ind, time.perf_counter() - start


def plain_two_opt(case, seed, starts=3):
    """Exchanges of two ranks while any helps, from the given order and from random ones: what scipy does, in minutes less."""
    random = np.random.default_rng(seed)
    start = time.perf_counter()
    best = None
    for turn in range(starts):
        order = np.arange(case.ranks) if turn == 0 else random.permutation(case.ranks)
        helped = True
        while helped:
            helped = False
            for i in range(case.ranks):
                apart = case.distance[np.ix_(order, order)]
                change = ((case.flow[i] - case.flow) * (apart - apart[i])).sum(axis=1) + 2 * case.flow[i] * apart[i]
                j = int(np.argmin(change))
                if change[j] < -ROUNDING * case.flow.sum():
                    order[[i, j]] = order[[j, i]]
                    helped = True
        if best is None or case.cost(order) < case.cost(best):
            best = order
    return best, time.perf_counter() - start


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cases", type=Path, required=True, help="the program place_cases, or its output")
    parser.add_argument("--gmap", default="scotch_gmap")
    parser.add_argument("--number", type=int, default=50, help="of cases")
    parser.add_argument("--two-opt-ranks", type=int, default=64, help="scipy only up to so many: 256 take it minutes")
    parser.add_argument("--random-start", action="store_true")
    parser.add_argument("--out", type=Path, help="JSON of all measurements")
    options = parser.parse_args()
    if options.cases.suffix == ".jsonl":
        lines = options.cases.read_text().splitlines()[:options.number]
    else:
        done = subprocess.run([options.cases, str(options.number)], capture_output=True, text=True, check=True)
        lines = done.stdout.splitlines()
    found = []
    with tempfile.TemporaryDirectory() as name:
        for line in lines:
            case = Case(line)
            ours = case.cost(case.given["order"])
            costs = {"given": case.cost(range(case.ranks))}
            seconds = {}
            for label, flags in (("gmap", []), ("gmap -cb", ["-cb"])):
                order, seconds[label] = gmap(options.gmap, case, flags, Path(name))
                costs[label] = case.cost(order)
            order, seconds["exchanges"] = plain_two_opt(case, case.given["seed"])
            costs["exchanges"] = case.cost(order)
            if case.ranks <= options.two_opt_ranks:
                order, seconds["2opt"] = two_opt(case, options.random_start, case.given["seed"])
                costs["2opt"] = case.cost(order)
            place_s = min(case.given["place_cpu_s"])
            above = [who for who, cost in costs.items() if ours > cost * (1 + ROUNDING)]
            passed = not above and place_s <= MAX_S
            ratios = ", ".join(f"{ours / cost:.4f} of {who}" for who, cost in costs.items())
            took = ", ".join(f"{who} {1e3 * s:.0f}" for who, s in seconds.items())
            print(f"{'PASS' if passed else 'FAIL'} case {case.given['seed']}, {case.ranks} ranks, {case.given['schedule']}: {ratios}; "
                  f"ms: ours {1e3 * place_s:.1f}, {took}; step {case.given['step_ns'] / case.given['given_step_ns']:.4f} of the given "
                  "order's", flush=True)
            found.append({"seed": case.given["seed"], "ranks": case.ranks, "ours": ours, "costs": costs, "seconds": seconds,
                          "place_cpu_s": case.given["place_cpu_s"], "passed": passed})
    for who in ("given", "gmap", "gmap -cb", "exchanges", "2opt"):
        ratios = [one["ours"] / one["costs"][who] for one in found if who in one["costs"]]
        if ratios:
            print(f"cost of {who}: ours is {statistics.median(ratios):.4f} ({min(ratios):.4f} to {max(ratios):.4f}) of it in "
                  f"{len(ratios)} cases")
    if options.out:
        options.out.write_text(json.dumps(found, indent=1))
    failed = sum(not one["passed"] for one in found)
    print(f"{len(found) - failed} passed, {failed} failed")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
