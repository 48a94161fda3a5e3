#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""CPU time of a layer of experts beside transformers' MixtralSparseMoeBlock, as it is and with its grouped products, on one core.

Both compute x + block(rms_norm(x)) forward and backward in fp32, 8 experts, 2 a token, as many rows an expert, on one thread; ours
with its auxiliary loss, theirs without. Rounds are interleaved; what is reported is the median of the paired ratios and their
spread, and whether ours is WANTED times as fast as the fastest of theirs.

    bench/peers/moe_compare.py --bench build/release/bench/moe_bench

Needs a Python with PyTorch 2.11 and transformers: $DYNMO_CACHE/peers/bin/python (`scripts/setup peers`).
"""
import argparse
import json
import os
import statistics
import subprocess
import sys
import time
from pathlib import Path

import torch
import transformers
from transformers.models.mixtral.modeling_mixtral import MixtralRMSNorm, MixtralSparseMoeBlock

EXPERTS, CHOSEN = 8, 2
IMPLEMENTATIONS = ("eager", "grouped_mm")
WANTED = 1.2


class HalfBlock(torch.nn.Module):
    """What our layer is: the residual sum around norm and experts."""

    def __init__(self, hidden, implementation):
        super().__init__()
        config = transformers.MixtralConfig(hidden_size=hidden, intermediate_size=hidden * 11 // 4, num_local_experts=EXPERTS,
                                            num_experts_per_tok=CHOSEN)
        config._experts_implementation = implementation
        self.norm = MixtralRMSNorm(hidden, eps=config.rms_norm_eps)
        self.block = MixtralSparseMoeBlock(config)
        with torch.no_grad():
            for parameter in self.block.parameters():
                parameter.normal_(std=0.02)
            # The router reads its first inputs, which say where a token goes.
            self.block.gate.weight.copy_(torch.eye(EXPERTS, hidden))

    def forward(self, x):
        return x + self.block(self.norm(x))


def even_input(tokens, hidden):
    x = torch.randn(1, tokens, hidden)
    x[..., :EXPERTS] = 0
    for token in range(tokens):
        x[0, token, 2 * token % EXPERTS] = 4
        x[0, token, (2 * token + 1) % EXPERTS] = 3
    return x.requires_grad_()


class Theirs:
    def __init__(self, hidden, rows, implementation):
        tokens = rows * EXPERTS // CHOSEN
        self.layer = HalfBlock(hidden, implementation)
        self.x = even_input(tokens, hidden)
        self.gradient = torch.randn_like(self.x)
        with torch.no_grad():
            _, _, chosen = self.layer.block.gate(self.layer.norm(self.x))
        counts = torch.bincount(chosen.flatten(), minlength=EXPERTS)
        if set(counts.tolist()) != {rows}:
            raise SystemExit(f"experts of uneven sizes: {counts.tolist()}")

    def milliseconds(self, seconds):
        """The median of forward and backward, weights' gradients added to those that are there."""
        times, end = [], time.perf_counter() + seconds
        while time.perf_counter() < end or len(times) < 3:
            start = time.process_time()
            self.layer(self.x).backward(self.gradient)
            times.append(time.process_time() - start)
            self.x.grad = None
        return 1e3 * statistics.median(times)


def ours(bench, hidden, rows, seconds):
    command = [str(bench), f"--benchmark_filter=^layer/hidden:{hidden}/rows:{rows}$", f"--benchmark_min_time={seconds}",
               "--benchmark_format=json"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=600, check=True)
    found = json.loads(done.stdout)["benchmarks"]
    if len(found) != 1 or found[0].get("error_occurred"):
        raise SystemExit(f"{bench} has no layer of hidden {hidden} and {rows} rows: {done.stdout}")
    return found[0]["cpu_time"]


def spread(values):
    return f"{statistics.median(values):.2f} ({min(values):.2f} to {max(values):.2f})"


def compare(options, hidden, rows):
    peers = {name: Theirs(hidden, rows, name) for name in IMPLEMENTATIONS}
    for peer in peers.values():
        peer.milliseconds(0.2)
    rounds = []
    for _ in range(options.rounds):
        took = {"ours": ours(options.bench, hidden, rows, options.seconds)}
        took |= {name: peer.milliseconds(options.seconds) for name, peer in peers.items()}
        rounds.append(took)
    ratios = {name: [took[name] / took["ours"] for took in rounds] for name in IMPLEMENTATIONS}
    least = min(statistics.median(values) for values in ratios.values())
    times = ", ".join(f"{name} {statistics.median(took[name] for took in rounds):.2f} ms" for name in rounds[0])
    said = "; ".join(f"{name} / ours {spread(values)}" for name, values in ratios.items())
    print(f"hidden {hidden}, {rows} rows an expert: {times}; {said}: {'met' if least >= WANTED else 'NOT met'}", flush=True)
    return {"hidden": hidden, "rows": rows, "milliseconds": rounds, "ratios": ratios, "least": least, "wanted": WANTED}


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--bench", type=Path, required=True, help="the program moe_bench")
    parser.add_argument("--hidden", type=int, nargs="+", default=[256, 512])
    parser.add_argument("--rows", type=int, nargs="+", default=[32, 128, 512])
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--seconds", type=float, default=1.0, help="of each measurement")
    parser.add_argument("--core", type=int, help="that all run on; else the last one there is")
    parser.add_argument("--out", type=Path, help="JSON of all measurements")
    options = parser.parse_args()
    os.sched_setaffinity(0, {max(os.sched_getaffinity(0)) if options.core is None else options.core})
    torch.set_num_threads(1)
    torch.manual_seed(1)
    found = [compare(options, hidden, rows) for hidden in options.hidden for rows in options.rows]
    if options.out:
        versions = {"torch": torch.__version__, "transformers": transformers.__version__}
        options.out.write_text(json.dumps({"versions": versions, "cases": found}, indent=1))
    return 0


if __name__ == "__main__":
    sys.exit(main())
