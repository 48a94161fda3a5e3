#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Where the time of one step of PyTorch's own loop goes: what step_profile prints of DynMo, for the peer of compare.py.

One JSON argument: model, precision, device, micro_batches, micro_batch_size, as pipelining_peer.py has them.
"""

import collections
import json
import sys
import time
from pathlib import Path

import torch
from torch.profiler import ProfilerActivity

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "peers"))
import pipelining_peer as peer  # noqa: E402


def main():
    c = json.loads(sys.argv[1])
    c.update(learning_rate=1e-3, beta1=0.9, beta2=0.95, epsilon=1e-8, weight_decay=0.1, schedule="eager")
    torch.manual_seed(1)
    work = peer.Eager(c)
    optimizer = peer.optimizer_of(work.modules, c)
    shape = (c["micro_batches"] * c["micro_batch_size"], c["model"]["sequence"])
    tokens, targets = (torch.randint(c["model"]["vocabulary"], shape) for _ in range(2))

    def step():
        work.step(tokens, targets)
        optimizer.step()
        optimizer.zero_grad()

    for _ in range(3):
        step()
    work.wait()
    begin = time.perf_counter()
    for _ in range(5):
        step()
    work.wait()
    seconds = (time.perf_counter() - begin) / 5
    on_gpu = c["device"] == "cuda"
    with torch.profiler.profile(activities=[ProfilerActivity.CPU] + [ProfilerActivity.CUDA] * on_gpu) as profile:
        step()
        work.wait()
    kernels = collections.defaultdict(lambda: [0, 0.0])
    for event in profile.profiler.kineto_results.events():
        if (event.device_type() == torch.autograd.DeviceType.CUDA) == on_gpu:
            kernel = kernels[event.name()]
            kernel[0] += 1
            kernel[1] += event.duration_ns() / 1e6
    print(json.dumps({"step_s": seconds, "kernels": [{"name": n, "calls": k[0], "ms": k[1]} for n, k in kernels.items()]}))


if __name__ == "__main__":
    main()
