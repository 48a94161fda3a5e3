#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""What the loss of a rank costs, and the price of being ready for it.

Kills: a run of --ranks processes, of which a drawn one, the leader too, is killed again and again; another joins after
each (`dynmo ctl RUN grow 1`). For each loss:
  ended     from the kill until the system has taken the process apart (its pidfd): its connections close
            towards the end of that
  noticed   from the kill until the control plane of the rank that leads then has learned of it (clocks of one host)
  rest      from there until its main thread has left what it was at (event "recovery", ms.rest)
  meet      from there to the new group (ms.meet)
  ready     from the kill until the others are ready for their next step
  finished  from the kill until the next step is done: ready, and that step's time by its record
  again     steps that run again, and where the layers came from
Ready: pairs of undisturbed runs with snapshots and without, in turn, who begins alternating: the paired ratio of their
tokens/s.
Plane: the processor time of the threads of the control plane in an undisturbed run of --plane seconds, of that of all
threads of the ranks. Where processors are busy, training has so much less.

    bench/recovery.py --dynmo build/release/apps/dynmo/dynmo --out build/bench-recovery.json
"""
import argparse
import collections
import json
import os
import random
import select
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from elastic import Run, WAIT_S, quantiles, say, tokens_per_s, write_data, write_result


def members(run, after=-1):
    """Processes by rank, none where the run has done no step more than `after`."""
    done = subprocess.run([run.options.dynmo, "ctl", run.folder, "status", "--json"], capture_output=True, text=True,
                          timeout=WAIT_S)
    found = json.loads(done.stdout) if done.returncode == 0 else {}
    if found.get("step", -1) <= after:
        return {}
    return {rank["rank"]: rank["pid"] for rank in found.get("ranks", [])}


def step_times(run):
    """Seconds by step; of a step that ran again, the longest."""
    found = {}
    for path in (run.folder / "records").glob("rank-*.jsonl"):
        for line in path.read_text().splitlines():
            if line.endswith("}"):  # a killed rank may leave half a line
                record = json.loads(line)
                found[record["step"]] = max(record["step_s"], found.get(record["step"], 0))
    return found


def measure_kills(options, folder, data):
    """Measures losses. If one fails, the result has those before it, and the reason under "failed"."""
    draw = random.Random(options.seed)
    run = Run(options, folder / "kills", data)
    ready, noticed, ended = [], [], []
    failed = {}
    reached = -1  # steps done at the last loss: a run ends with the third of one step
    run.start("elastic.enabled=true", "train.steps=1000000")
    try:
        run.wait_for("the first step", lambda: len(members(run)) == options.ranks)
        for number in range(options.kills):
            run.wait_for("the run of all ranks", lambda: len(members(run, reached)) == options.ranks)
            time.sleep(draw.uniform(0, 1))
            processes = members(run)
            pid = processes[draw.choice(sorted(processes))]
            process = os.pidfd_open(pid)
            killed_at = time.time()
            os.kill(pid, signal.Signals[options.signal])
            select.select([process], [], [])
            ended.append(time.time() - killed_at)
            os.close(process)
            run.wait_for("a recovery", lambda: len(run.events("recovery")) > number)
            event = run.events("recovery")[number]
            reached = run.events("loss")[number]["step"]
            ready.append(event["time_s"] - killed_at)
            noticed.append(ready[-1] - event["ms"]["all"] / 1000)
            run.control("grow", "1")
            if number % 10 == 9:
                say(f"{number + 1} of {options.kills} kills")
        run.control("stop")
        run.process.wait(WAIT_S)
    except (Exception, SystemExit) as why:
        if not noticed:
            raise
        failed = {"failed": f"{type(why).__name__}: {why}"}
    finally:
        run.end()
    events = run.events("recovery")[:len(noticed)]
    times = step_times(run)
    # A run that failed may have ended before that step.
    finished = [ready_s + times[event["step"]] for ready_s, event in zip(ready, events) if event["step"] in times]
    return {**failed, "kills": len(events), "seed": options.seed, "ended_s": quantiles(ended), "noticed_s": quantiles(noticed),
            "noticed_after_end_s": quantiles([late - end for late, end in zip(noticed, ended)]),
            **{f"{phase}_s": quantiles([event["ms"][phase] / 1000 for event in events]) for phase in ("rest", "meet")},
            "ready_s": quantiles(ready), "finished_s": quantiles(finished) if finished else None,
            "steps_again": quantiles([event["steps_again"] for event in events]),
            "from": dict(collections.Counter(event["from"] for event in events))}


def measure_ready(options, folder, data):
    ratios = []
    for number in range(options.rounds):
        found = {}
        for snapshots in (("auto", "never") if number % 2 else ("never", "auto")):
            found[snapshots] = tokens_per_s(options, folder / f"ready-{number}-{snapshots}", data, True,
                                            f"elastic.snapshots={snapshots}")
        ratios.append(found["auto"] / found["never"])
        say(f"round {number + 1}: {found['auto']:.0f} tokens/s with snapshots, {found['never']:.0f} without")
    return {"rounds": len(ratios), "ratio": ratios, "median": statistics.median(ratios), "min": min(ratios), "max": max(ratios)}


def processor_seconds(pids):
    """Of the threads of the control plane, and of all threads."""
    plane = every = 0.0
    for pid in pids:
        for task in Path(f"/proc/{pid}/task").iterdir():
            seconds = int((task / "schedstat").read_text().split()[0]) / 1e9
            every += seconds
            plane += seconds if (task / "comm").read_text() == "dynmo-plane\n" else 0.0
    return plane, every


def measure_plane(options, folder, data):
    run = Run(options, folder / "plane", data)
    run.start("elastic.enabled=true", "train.steps=1000000")
    try:
        run.wait_for("ten steps", lambda: len(members(run, 10)) == options.ranks)
        pids = list(members(run).values())
        before = processor_seconds(pids)
        time.sleep(options.plane)
        plane, every = (late - early for late, early in zip(processor_seconds(pids), before))
        run.control("stop")
        run.process.wait(WAIT_S)
    finally:
        run.end()
    return {"seconds": options.plane, "plane_s": plane, "all_s": every, "share": plane / every}


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--dynmo", default="build/release/apps/dynmo/dynmo")
    parser.add_argument("--ranks", type=int, default=4)
    parser.add_argument("--kills", type=int, default=200)
    parser.add_argument("--signal", default="SIGKILL", help="SIGSTOP: the others end the rank after elastic.silence_s")
    parser.add_argument("--rounds", type=int, default=10, help="pairs with snapshots and without")
    parser.add_argument("--steps", type=int, default=200, help="of each run of a pair")
    parser.add_argument("--plane", type=float, default=60, help="seconds in which the control plane is measured")
    parser.add_argument("--seed", type=int, default=22)
    parser.add_argument("--set", action="append", default=[], metavar="KEY=VALUE", help="of the run's settings")
    parser.add_argument("--out", type=Path, help="where the result goes as JSON")
    options = parser.parse_args()
    result = {}
    with tempfile.TemporaryDirectory(prefix="dynmo-bench-") as name:
        folder = Path(name)
        data = write_data(folder)
        subprocess.run([options.dynmo, "data", "prepare", folder / "text", "--out", data], check=True, stdout=subprocess.DEVNULL)
        if options.kills:
            result["kills"] = measure_kills(options, folder, data)
            write_result(options.out, result)
        if options.rounds:
            result["ready"] = measure_ready(options, folder, data)
            write_result(options.out, result)
        if options.plane:
            result["plane"] = measure_plane(options, folder, data)
            write_result(options.out, result)
    for name in ("ended_s", "noticed_s", "noticed_after_end_s", "rest_s", "meet_s", "ready_s", "finished_s"):
        found = result["kills"][name] if options.kills else None
        if found:
            say(f"{name:19} {found['count']:4}   p50 {1e3 * found['p50']:8.1f}   p99 {1e3 * found['p99']:8.1f} ms")
    if options.kills:
        again = result["kills"]["steps_again"]
        say(f"again               p50 {again['p50']}, max {again['max']} steps; from {result['kills']['from']}")
    if options.rounds:
        ready = result["ready"]
        say(f"snapshots           {ready['median']:.3f} of the tokens/s without ({ready['min']:.3f} to {ready['max']:.3f})")
    if options.plane:
        say(f"control plane       {100 * result['plane']['share']:.3f} % of the processor time of the ranks")
    if options.kills and "failed" in result["kills"]:
        sys.exit(f"after {result['kills']['kills']} kills: {result['kills']['failed']}")


if __name__ == "__main__":
    main()
