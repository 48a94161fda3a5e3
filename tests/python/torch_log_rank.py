# SPDX-License-Identifier: Apache-2.0
"""torch_log_rank.py FOLDER PORT: one rank of a pipeline with a log, metrics and, where PORT is not 0, an endpoint."""
import json
import pathlib
import urllib.request

import torch_cases
from torch_ranks import make_pipe, refused, run_rank

CASE = {"family": "llama", "micro_batches": 2, "steps": 4}
PEAK = 1e9


def main(folder, port):
    folder, port = pathlib.Path(folder), int(port)
    more = {"metrics": ("prometheus",), "metrics_port": port, "peak_flops": PEAK, "run": folder / "run"} if port else {}
    pipe = make_pipe(CASE, accumulation=2, steps=CASE["steps"], log=folder / "log", log_level="debug", **more)
    tokens = 0
    for step in range(CASE["steps"]):
        tokens = 0
        for call, number in ((pipe.accumulate, 2 * step), (pipe.step, 2 * step + 1)):
            batch = torch_cases.batch_of(CASE, number)
            tokens += batch["input_ids"].numel()
            call(**batch)
        torch_cases.update(pipe.optimizer)
        pipe.balance()
    if port and pipe.rank == 0:
        # The record of the newest step is written by another thread.
        while f"dynmo_step{{run=\"{folder / 'run'}\"}} {CASE['steps'] - 1}\n" not in (text := read(port)):
            pass
        (folder / "served.txt").write_text(text)
        (folder / "tokens.json").write_text(json.dumps(tokens))
    pipe.close()
    if port:
        again = make_pipe(CASE, run=folder / "run")
        refused("holds an earlier run", lambda: again.step(**torch_cases.batch_of(CASE, 0)))


def read(port):
    with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=60) as answer:
        return answer.read().decode()


if __name__ == "__main__":
    run_rank(main)
