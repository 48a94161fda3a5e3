# SPDX-License-Identifier: Apache-2.0
"""Records the traces of a pipeline's ranks for `dynmo trace import`: PyTorch names the actions of its stages itself.

Usage: record_pipeline.py FOLDER (1f1b|interleaved|zero_bubble) [--trim]   (2 ranks with Gloo; PyTorch 2.11 wrote pipeline/ with --trim)
"""
import json
import os
import pathlib
import socket
import subprocess
import sys

RANKS, MICRO_BATCHES, HIDDEN, TOKENS = 2, 3, 64, 256


def record(path, kind, rank):
    import torch
    from torch import nn
    from torch.distributed.pipelining import PipelineStage, ScheduleInterleaved1F1B, ScheduleInterleavedZeroBubble
    from torch.distributed.pipelining.schedules import _PipelineScheduleRuntime
    from torch.profiler import ProfilerActivity, profile

    torch.set_num_threads(1)
    torch.manual_seed(rank)
    torch.distributed.init_process_group("gloo", rank=rank, world_size=RANKS)
    stages = RANKS if kind == "1f1b" else 2 * RANKS
    mine = range(rank, stages, RANKS)
    parts = []
    for index in mine:  # each wider than the one before
        width = 512 * (1 + index)
        module = nn.Sequential(nn.Linear(HIDDEN, width), nn.ReLU(), nn.Linear(width, HIDDEN))
        parts.append(PipelineStage(module, index, stages, torch.device("cpu")))
    if kind == "1f1b":  # PyTorch's Schedule1F1B names no action; the same order from a CSV does
        schedule = _PipelineScheduleRuntime(parts, MICRO_BATCHES, nn.functional.mse_loss)
        schedule._load_csv(str(pathlib.Path(path).with_name("order.csv")), format="compute_only")
    else:
        order = ScheduleInterleaved1F1B if kind == "interleaved" else ScheduleInterleavedZeroBubble
        schedule = order(parts, MICRO_BATCHES, nn.functional.mse_loss)
    inputs = (torch.randn(MICRO_BATCHES * TOKENS, HIDDEN),) if 0 in mine else ()
    targets = {"target": torch.randn(MICRO_BATCHES * TOKENS, HIDDEN), "losses": []} if stages - 1 in mine else {}
    for _ in range(2):
        schedule.step(*inputs, **targets)  # memory is allocated and peers are connected
    with profile(activities=[ProfilerActivity.CPU]) as profiler:
        schedule.step(*inputs, **targets)
    profiler.export_chrome_trace(path)
    torch.distributed.barrier()


def trim(path):
    """Keeps the ranges of actions and what runs directly in them, to spare the repository the rest."""
    trace = json.loads(path.read_text())
    events = [event for event in trace["traceEvents"] if event.get("cat") in ("user_annotation", "cpu_op")]
    events.sort(key=lambda event: (event["ts"], -event["dur"]))
    start = events[0]["ts"]
    kept, until = [], 0
    for event in events:
        is_action = event["name"].startswith("PP:")
        if not is_action and (event["ts"] < until or event["cat"] == "user_annotation"):
            continue
        if not is_action:
            until = event["ts"] + event["dur"]
        numbers = {k: v for k, v in event["args"].items() if k in ("Sequence number", "Fwd thread id")}
        event = {key: event[key] for key in ("ph", "cat", "name", "tid", "ts", "dur")} | {"tid": 1, "ts": round(event["ts"] - start, 3)}
        kept.append(json.dumps(event | ({"args": numbers} if numbers else {}), separators=(",", ":")))
    path.write_text('{"schemaVersion":1,"traceEvents":[\n' + ",\n".join(kept) + "\n]}\n")


def main():
    folder, kind = pathlib.Path(sys.argv[1]), sys.argv[2]
    if "MASTER_PORT" in os.environ and "--rank" in sys.argv:
        rank = int(sys.argv[sys.argv.index("--rank") + 1])
        return record(str(folder / f"{kind}.{rank}.json"), kind, rank)
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "order.csv").write_text("0F0,0F1,0B0,0F2,0B1,0B2\n1F0,1B0,1F1,1B1,1F2,1B2\n")
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = str(free.getsockname()[1])
    environment = os.environ | {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
    ranks = [subprocess.Popen([sys.executable, __file__, folder, kind, "--rank", str(rank)], env=environment) for rank in range(RANKS)]
    failed = [rank.wait(timeout=120) for rank in ranks]
    (folder / "order.csv").unlink()
    if any(failed):
        sys.exit(f"ranks ended with {failed}")
    if "--trim" in sys.argv:
        for rank in range(RANKS):
            trim(folder / f"{kind}.{rank}.json")


main()
