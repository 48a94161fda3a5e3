#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Features of a coordinates file by brute force, and the autocorrelation of counts, for tensor_compare.py.

Prints JSON. Numbers of groups, their largest, smallest, sum and sum of squares are exact integers. Needs numpy.

    bench/peers/tensor_truth.py features|autocorrelation FILE
"""
import itertools
import json
import math
import sys

import numpy as np

PIECE = 1 << 26  # bytes that are read at once


def pieces(path):
    """The sizes of the header, then arrays of indices from 0, a row an entry, in the order of the file."""
    with open(path, "rb") as file:
        order = int(file.readline())
        sizes = [int(size) for size in file.readline().split()]
        if len(sizes) != order:
            raise SystemExit(f"{path}: {order} modes, but {len(sizes)} sizes")
        yield sizes
        rest = b""
        while True:
            text = file.read(PIECE)
            if not text:
                break
            text = rest + text
            end = text.rfind(b"\n") + 1
            rest = text[end:]
            numbers = np.fromstring(text[:end], sep=" ")
            yield numbers.reshape(-1, order + 1)[:, :order].astype(np.int64) - 1
        if rest:
            raise SystemExit(f"{path}: the last line has no end")


def key_of(indices, sizes, modes):
    """The indices of some modes as one number; Python's integers where 63 bits are too few."""
    wide = math.prod(sizes[m] for m in modes) >= 1 << 63
    key = np.zeros(len(indices[0]), dtype=object if wide else np.int64)
    for m in modes:
        key = key * sizes[m] + indices[m]
    return key


def moments(counts, groups):
    counts = np.asarray(counts)
    return {"groups": groups, "nonempty": len(counts), "sum": int(counts.sum()), "squares": int((counts * counts).sum()),
            "max": int(counts.max()), "min": int(counts.min())}


def brute_force(path):
    """Moments of entries, or of fibers, by the free modes of a group, which count from 1. No size is below an index."""
    source = pieces(path)
    sizes = next(source)
    order = len(sizes)
    read = list(source)
    indices = [np.concatenate([piece[:, m] for piece in read]) for m in range(order)]
    read.clear()
    largest = [int(index.max()) + 1 for index in indices]
    sizes = [max(pair) for pair in zip(sizes, largest)]
    every = range(order)
    frees = {tuple(free) for size in (1, 2, order - 1) for free in itertools.combinations(every, size) if 0 < size < order}
    found = {"sizes": sizes, "entries": len(indices[0]), "largest": largest}
    groups = []
    for free in sorted(frees):
        fixed = [m for m in every if m not in free]
        possible = math.prod(sizes[m] for m in fixed)
        named = [m + 1 for m in free]
        _, counts = np.unique(key_of(indices, sizes, fixed), return_counts=True)
        groups.append({"number": "entries", "free": named, **moments(counts, possible)})
        if len(free) == 2:
            # Different fibers along the last of the free modes: its index is left out, that of the other one is lowest.
            different = np.unique(key_of(indices, sizes, fixed + [free[0]]))
            _, counts = np.unique(different // sizes[free[0]], return_counts=True)
            groups.append({"number": "fibers", "free": named, **moments(counts, possible)})
    found["groups"] = groups
    return found


def autocorrelation(path):
    """Of counts of experts, with the next step, pooled over all series; and the coefficient of variation of all of them."""
    with open(path) as file:
        counts = np.array([json.loads(line)["sources"]["moe"]["counts"] for line in file], dtype=float)
    off = counts - counts.mean(axis=0)
    steps = len(counts)
    return {"autocorrelation": float((off[:-1] * off[1:]).sum() / (off * off).sum() * steps / (steps - 1)),
            "cv": float(counts.std() / counts.mean()), "sums": np.unique(counts.sum(axis=2)).tolist()}


if __name__ == "__main__":
    print(json.dumps({"features": brute_force, "autocorrelation": autocorrelation}[sys.argv[1]](sys.argv[2])))
