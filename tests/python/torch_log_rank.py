# SPDX-License-Identifier: Apache-2.0
"""torch_log_rank.py FOLDER PORT: one rank of a pipeline with a log, metrics and, where PORT is not 0, an endpoint."""
import json
import pathlib
import sys
import urllib.request

import torch
import torch.distributed as dist

import dynmo
import dynmo.torch as dt
import torch_cases

CASE = {"family": "llama", "micro_batches": 2, "steps": 4}
PEAK = 1e9


def main():
    folder, port = pathlib.Path(sys.argv[1]), int(sys.argv[2])
    dist.init_process_group("gloo")
    model = torch_cases.make_model(CASE)
    optimizer = torch_cases.make_optimizer(CASE, model.parameters())
    more = {"metrics": ("prometheus",), "metrics_port": port, "peak_flops": PEAK, "run": folder / "run"} if port else {}
    pipe = dt.Pipeline(model, optimizer, micro_batches=CASE["micro_batches"], accumulation=2, steps=CASE["steps"], log=folder / "log",
                       log_level="debug", **more)
    tokens = 0
    for step in range(CASE["steps"]):
        tokens = 0
        for call, number in ((pipe.accumulate, 2 * step), (pipe.step, 2 * step + 1)):
            batch = torch_cases.batch_of(CASE, number)
            tokens += batch["input_ids"].numel()
            call(**batch)
        optimizer.step()
        optimizer.zero_grad()
        pipe.balance()
    if port and pipe.rank == 0:
        # The record of the newest step is written by another thread.
        while f"dynmo_step{{run=\"{folder / 'run'}\"}} {CASE['steps'] - 1}\n" not in (text := read(port)):
            pass
        (folder / "served.txt").write_text(text)
        (folder / "tokens.json").write_text(json.dumps(tokens))
    pipe.close()
    if port:
        again = dt.Pipeline(torch_cases.make_model(CASE), micro_batches=CASE["micro_batches"], run=folder / "run")
        try:
            again.step(**torch_cases.batch_of(CASE, 0))
        except dynmo.BadInputError as error:
            assert "holds an earlier run" in str(error), error
        else:
            raise AssertionError("the earlier run was overwritten")
    dist.destroy_process_group()


def read(port):
    with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=60) as answer:
        return answer.read().decode()


if __name__ == "__main__":
    torch.set_num_threads(1)
    main()
