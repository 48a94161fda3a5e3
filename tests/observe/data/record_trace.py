# SPDX-License-Identifier: Apache-2.0
"""Records a trace for `dynmo trace import`: training steps whose layers are named in the forward pass.

Usage: record_trace.py OUT.json [--trim]   (needs PyTorch; 2.11 wrote pytorch_trace.json with --trim)
"""
import json
import sys

import torch
from torch import nn
from torch.profiler import ProfilerActivity, profile, record_function

HIDDEN, VOCABULARY, TOKENS, MICRO_BATCHES = 128, 1024, 512, 3


class Mlp(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.up, self.down = nn.Linear(HIDDEN, width), nn.Linear(width, HIDDEN)

    def forward(self, x):
        return x + self.down(torch.relu(self.up(x)))


def micro_batch(layers):
    x = torch.randint(VOCABULARY, (TOKENS,))
    targets = torch.randint(VOCABULARY, (TOKENS,))
    for name, layer in layers.items():
        with record_function(f"{name}.forward"):  # all that the import needs
            x = layer(x)
            if name == "head":
                x = nn.functional.cross_entropy(x, targets)
    x.backward()


def trim(path):
    """Keeps the events that the import and its test read, to spare the repository the rest."""
    with open(path) as file:
        trace = json.load(file)
    kept = []
    for event in trace["traceEvents"]:
        numbers = {k: v for k, v in event.get("args", {}).items() if k in ("Sequence number", "Fwd thread id")}
        named = event.get("cat") in ("user_annotation", "fwdbwd") or "evaluate_function" in event["name"]
        if named or (event["ph"] == "X" and numbers):
            kept.append(json.dumps(event | {"args": numbers}, separators=(",", ":")))
    with open(path, "w") as file:
        file.write('{"schemaVersion":1,"traceEvents":[\n' + ",\n".join(kept) + "\n]}\n")


def main():
    torch.manual_seed(0)
    torch.set_num_threads(1)
    layers = {"embedding": nn.Embedding(VOCABULARY, HIDDEN), "block0.mlp": Mlp(256), "block1.mlp": Mlp(2048),
              "head": nn.Linear(HIDDEN, VOCABULARY)}
    for _ in range(3):
        micro_batch(layers)  # memory is allocated and kernels are chosen
    with profile(activities=[ProfilerActivity.CPU]) as profiler:
        for _ in range(MICRO_BATCHES):
            micro_batch(layers)
    profiler.export_chrome_trace(sys.argv[1])
    if "--trim" in sys.argv:
        trim(sys.argv[1])


main()
