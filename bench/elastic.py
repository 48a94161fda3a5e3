#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""What it costs that a run can change its size: pauses of planned changes, and the price of being ready for them.

Changes: one run of --ranks processes that packs onto one rank fewer (`dynmo ctl RUN pack`) and takes in another
(`dynmo train --join RUN`) again and again. Its events.jsonl says how long each change held up all ranks:
  group   the change of groups alone, without layers that move (event "size")
  data    what moved before it, off the rank that left (event "move" with the change as its cause)
  raw     the same bytes through a socket of this host, from one process to another, in pieces of 1 MiB, after the run,
          between memory of that size that was in use before; and between one MiB of each, which no move of so many
          bytes can do, as the bound of what sockets carry
  exit    from the change to the end of the process that left
Ready: pairs of undisturbed runs with elastic.enabled = true and false, in turn, who begins alternating: the paired
ratio of their tokens/s.

    bench/elastic.py --dynmo build/release/apps/dynmo/dynmo --out build/bench-elastic.json
"""
import argparse
import json
import mmap
import os
import platform
import signal
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

MIB = 1 << 20
# About 6 million parameters; steps of a fraction of a second on two cores.
MODEL = ("model.sequence=64", "batch.micro_batches=4", "batch.micro_batch_size=1", "train.validation_every=0",
         "run.load_trace=0", "run.trace_steps=0", "pipeline.pin=false")
WAIT_S = 120  # for one change; a bound on hangs


def say(text):
    print(text, flush=True)


def write_result(path, result):
    """Writes the parts that are measured, if a file is asked for: what fails later loses none of them."""
    if path:
        Path(path).write_text(json.dumps(result, indent=2) + "\n")


def quantiles(values):
    ordered = sorted(values)
    at = lambda share: ordered[min(len(ordered) - 1, round(share * (len(ordered) - 1)))]
    return {"count": len(ordered), "p50": at(0.5), "p99": at(0.99), "min": ordered[0], "max": ordered[-1]}


def write_data(folder):
    text = folder / "text"
    text.mkdir()
    for number in range(20):
        (text / f"{number}.txt").write_text("".join(f"line {i} of {number}: {i * number % 97}\n" for i in range(2000)))
    return folder / "data"


class Run:
    """A training in its folder, whose events are read as they are written."""

    def __init__(self, options, folder, data):
        self.options, self.folder, self.data = options, folder, data
        self.process = None
        self.joined = []

    def start(self, *settings):
        command = [self.options.dynmo, "train", "--data", self.data, "--out", self.folder, "-n", str(self.options.ranks)]
        for setting in (*MODEL, *self.options.set, *settings):
            command += ["--set", setting]
        self.log = open(f"{self.folder}.log", "w")
        self.process = subprocess.Popen(command, stdout=self.log, stderr=subprocess.STDOUT, stdin=subprocess.DEVNULL)

    def events(self, kind):
        path = self.folder / "events.jsonl"
        lines = path.read_text().splitlines() if path.exists() else []
        found = [json.loads(line) for line in lines if line.endswith("}")]
        return [event for event in found if event["event"] == kind]

    def wait_for(self, what, done):
        end = time.monotonic() + WAIT_S
        while not done():
            if self.process.poll() is not None or time.monotonic() > end:
                sys.exit(f"{what} did not happen: see {self.log.name}")
            time.sleep(0.02)

    def control(self, *words):
        done = subprocess.run([self.options.dynmo, "ctl", self.folder, *words], capture_output=True, text=True, timeout=WAIT_S)
        if done.returncode:
            sys.exit(f"dynmo ctl {' '.join(words)}: {done.stderr.strip()}")

    def join(self):
        sizes = len(self.events("size"))
        log = open(f"{self.folder}.join.log", "a")
        self.joined.append(subprocess.Popen([self.options.dynmo, "train", "--join", self.folder, "--data", self.data],
                                            stdout=log, stderr=subprocess.STDOUT, stdin=subprocess.DEVNULL))
        self.wait_for("a join", lambda: len(self.events("size")) > sizes)

    def pack(self, ranks):
        """How long the process that left took to end; None: it is the launcher's."""
        self.control("pack", str(ranks))
        at = self.events("size")[-1]["time_s"]
        if not self.joined:
            return None
        left = self.joined[-1]
        if left.wait(WAIT_S) != 0:
            sys.exit(f"a released rank ended with {left.returncode}: see {self.folder}.join.log")
        self.joined.pop()
        return time.time() - at

    def end(self):
        """Interrupts the run. Kills what has not ended within WAIT_S; ranks end with the process that started them."""
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGINT)
        until = time.monotonic() + WAIT_S
        for process in (self.process, *self.joined):
            try:
                process.wait(max(0, until - time.monotonic()))
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()


def owners(plan):
    """Rank of each layer."""
    return [stage["rank"] for stage in plan["stages"] for _ in range(stage["layers"])]


def moved_bytes(before, after, costs):
    return sum(layer["parameter_bytes"] + layer["optimizer_bytes"]
               for layer, was, now in zip(costs, owners(before), owners(after)) if was != now)


def written(size):
    """Memory of `size` bytes that the system has backed; `pieces` are the spans of 1 MiB."""
    memory = mmap.mmap(-1, size)
    for start in range(0, size, MIB):
        memory[start:start + MIB] = bytes(memory[start:start + MIB])
    view = memoryview(memory)
    return [view[start:start + MIB] for start in range(0, size, MIB)]


def raw_seconds(size, rounds=9, one_piece=False):
    """Median time of sending `size` bytes to another process until it says that it has them.

    From memory of that size into memory of that size, both in use before; with `one_piece`, the first MiB of each
    again and again, which stays in the processor's caches.
    """
    ours, theirs = connected()
    child = os.fork()
    pieces = written(size)
    if one_piece:
        pieces = [pieces[0][:len(piece)] for piece in pieces]
    if child == 0:
        ours.close()
        theirs.sendall(b"1")
        for _ in range(rounds):
            for piece in pieces:
                while len(piece):
                    piece = piece[theirs.recv_into(piece):]
            theirs.sendall(b"1")
        os._exit(0)
    theirs.close()
    ours.recv(1)
    times = []
    for _ in range(rounds):
        begin = time.perf_counter()
        for piece in pieces:
            ours.sendall(piece)
        ours.recv(1)
        times.append(time.perf_counter() - begin)
    os.waitpid(child, 0)
    return statistics.median(times)


def connected():
    with socket.create_server(("127.0.0.1", 0)) as listener:
        ours = socket.create_connection(listener.getsockname())
        theirs, _ = listener.accept()
    for each in (ours, theirs):
        each.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    return ours, theirs


def measure_changes(options, folder, data):
    run = Run(options, folder / "changes", data)
    exits = []
    run.start("elastic.enabled=true", "train.steps=1000000")
    try:
        records = run.folder / "records" / "rank-0.jsonl"
        run.wait_for("the first step", lambda: records.exists() and records.stat().st_size > 0)
        for number in range(options.changes):
            if number % 2:
                run.join()
            else:
                took = run.pack(options.ranks - 1)
                exits += [] if took is None else [took]
            if number % 10 == 9:
                say(f"{number + 1} of {options.changes} changes")
        run.control("stop")
        run.process.wait(WAIT_S)
    finally:
        run.end()
    sizes = run.events("size")
    costs = json.loads((run.folder / "profile.json").read_text())["layers"]
    moves = [event for event in run.events("move") if "cause" in event and "seconds" in event]
    result = {"changes": len(sizes),
              "group_s": quantiles([event["seconds"] for event in sizes]),
              "group_leave_s": quantiles([e["seconds"] for e in sizes if len(e["ranks"]) < len(e["ranks_before"])]),
              "group_join_s": quantiles([e["seconds"] for e in sizes if len(e["ranks"]) > len(e["ranks_before"])]),
              "exit_s": quantiles(exits) if exits else None}
    # The plan before a move is that of the newest event before it.
    plans = sorted(run.events("size") + run.events("move"), key=lambda event: event["time_s"])
    ratios = []
    pairs = []
    for move in moves:
        before = [event for event in plans if event["time_s"] < move["time_s"]]
        if not before:
            continue
        size = moved_bytes(before[-1]["plan"], move["plan"], costs)
        if size:
            pairs.append((size, move["seconds"]))
    sizes_moved = sorted({size for size, _ in pairs})
    raw = {size: raw_seconds(size) for size in sizes_moved}
    cached = {size: raw_seconds(size, one_piece=True) for size in sizes_moved}
    for size, seconds in pairs:
        ratios.append(seconds / raw[size])
    if pairs:
        result["data"] = {"bytes": quantiles([size for size, _ in pairs]),
                          "seconds": quantiles([seconds for _, seconds in pairs]),
                          "raw_s": quantiles([raw[size] for size, _ in pairs]), "ratio": quantiles(ratios),
                          "one_piece_s": quantiles([cached[size] for size, _ in pairs]),
                          "ratio_one_piece": quantiles([seconds / cached[size] for size, seconds in pairs])}
    return result


def tokens_per_s(options, folder, data, enabled, *settings):
    run = Run(options, folder, data)
    run.start(f"elastic.enabled={'true' if enabled else 'false'}", f"train.steps={options.steps}", *settings)
    try:
        if run.process.wait() != 0:
            sys.exit(f"a run failed: see {run.log.name}")
    finally:
        run.end()
    return json.loads((run.folder / "summary.json").read_text())["runs"][0]["tokens_per_s"]


def measure_ready(options, folder, data):
    ratios = []
    for number in range(options.rounds):
        found = {}
        for enabled in ((True, False) if number % 2 else (False, True)):
            found[enabled] = tokens_per_s(options, folder / f"ready-{number}-{enabled}", data, enabled)
        ratios.append(found[True] / found[False])
        say(f"round {number + 1}: {found[True]:.0f} tokens/s with elastic.enabled, {found[False]:.0f} without")
    return {"rounds": len(ratios), "ratio": ratios, "median": statistics.median(ratios),
            "min": min(ratios), "max": max(ratios)}


def table(result):
    ms = lambda value: f"{1e3 * value:8.1f}"
    lines = []
    if "changes" in result:
        changes = result["changes"]
        for name in ("group_s", "group_leave_s", "group_join_s", "exit_s"):
            if changes.get(name):
                found = changes[name]
                lines.append(f"{name:14} {found['count']:4}   p50 {ms(found['p50'])}   p99 {ms(found['p99'])} ms")
        if "data" in changes:
            data = changes["data"]
            lines.append(f"{'data':14} {data['ratio']['count']:4}   p50 {ms(data['seconds']['p50'])}   raw "
                         f"{ms(data['raw_s']['p50'])} ms of {data['bytes']['p50'] / MIB:.1f} MiB: ratio p50 "
                         f"{data['ratio']['p50']:.2f}, p99 {data['ratio']['p99']:.2f}")
            lines.append(f"{'':14}        of one MiB again and again {ms(data['one_piece_s']['p50'])} ms: ratio p50 "
                         f"{data['ratio_one_piece']['p50']:.2f}, p99 {data['ratio_one_piece']['p99']:.2f}")
    if "ready" in result:
        ready = result["ready"]
        lines.append(f"{'ready':14} {ready['rounds']:4}   tokens/s x {ready['median']:.4f} "
                     f"({ready['min']:.4f} to {ready['max']:.4f})")
    return "\n".join(lines)


def parse():
    parser = argparse.ArgumentParser(description=__doc__.split("\n", maxsplit=1)[0])
    parser.add_argument("--dynmo", required=True)
    parser.add_argument("--out", help="file for the result as JSON")
    parser.add_argument("--ranks", type=int, default=4)
    parser.add_argument("--changes", type=int, default=100, help="0: leave them out")
    parser.add_argument("--rounds", type=int, default=10, help="of pairs of undisturbed runs; 0: none")
    parser.add_argument("--steps", type=int, default=60, help="of an undisturbed run")
    parser.add_argument("--set", action="append", default=[], help="KEY=VALUE, for all runs")
    return parser.parse_args()


def main():
    options = parse()
    options.dynmo = Path(options.dynmo).resolve()
    result = {"machine": {"processor": platform.processor() or platform.machine(), "cores": os.cpu_count()}}
    with tempfile.TemporaryDirectory(prefix="dynmo-elastic-") as name:
        folder = Path(name)
        data = write_data(folder)
        subprocess.run([options.dynmo, "data", "prepare", folder / "text", "--out", data], check=True, capture_output=True)
        if options.changes:
            result["changes"] = measure_changes(options, folder, data)
            write_result(options.out, result)
        if options.rounds:
            result["ready"] = measure_ready(options, folder, data)
            write_result(options.out, result)
    say(table(result))


if __name__ == "__main__":
    main()
