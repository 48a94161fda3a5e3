#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""How fast PyTorch multiplies matrices here: what compare.py takes shares of.

One JSON argument: rows, inner, columns, precision (fp32 | bf16), device (cpu | cuda), seconds. Multiplies
[rows, inner] by [inner, columns] on one thread for that long and prints {"flops_per_s": median}.
"""

import json
import statistics
import sys
import time

import torch


def main():
    c = json.loads(sys.argv[1])
    torch.set_num_threads(1)
    kind = {"fp32": torch.float32, "bf16": torch.bfloat16}[c["precision"]]
    a = torch.randn(c["rows"], c["inner"], device=c["device"]).to(kind)
    b = torch.randn(c["inner"], c["columns"], device=c["device"]).to(kind)
    out = torch.empty(c["rows"], c["columns"], device=c["device"], dtype=kind)
    wait = torch.cuda.synchronize if c["device"] == "cuda" else lambda: None
    at_once = 20 if c["device"] == "cuda" else 1  # a launch takes longer than a small product
    for _ in range(3):
        torch.mm(a, b, out=out)
    rates, end = [], time.perf_counter() + c["seconds"]
    while time.perf_counter() < end or len(rates) < 5:
        wait()
        start = time.perf_counter()
        for _ in range(at_once):
            torch.mm(a, b, out=out)
        wait()
        rates.append(at_once * 2 * c["rows"] * c["inner"] * c["columns"] / (time.perf_counter() - start))
    print(json.dumps({"flops_per_s": statistics.median(rates)}))


if __name__ == "__main__":
    main()
