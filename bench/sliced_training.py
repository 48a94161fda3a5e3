#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Training with the head in slices beside the whole head, in turn: what clocks and meters say.

    bench/sliced_training.py build/release/apps/dynmo/dynmo [--rounds 5] [--part one-rank,freezing,emulated]

- one-rank: a step of all layers on one rank, with slices and with the whole head; the largest stash of a layer of the head.
  Processor time is beside it, since other programs lengthen a step.
- freezing: two ranks while layers freeze; what balancing gains beside what the best cuts would give, and the predicted step.
- emulated: eight ranks that sleep for the layers of a GPT of 24 blocks and 50k words under plans of `search`; measured and
  predicted step, with slices and with the whole head.

Every round has both heads, who begins alternating. Medians over rounds, ranges in brackets.
"""
import argparse
import json
import os
import pathlib
import resource
import statistics
import subprocess
import tempfile

MODEL = {"model.hidden": 256, "model.blocks": 6, "model.heads": 4, "model.vocabulary": 32768, "model.sequence": 128,
         "batch.micro_batches": 4, "batch.micro_batch_size": 2, "train.validation_every": 0}
WARM = 2  # steps that are not counted
SCENARIO = """[model]
blocks = 24
hidden = 1024
sequence = 256
head_slices = {slices}
[device]
name = "cpu"
[cluster]
pipeline_ranks = 8
[training]
steps = 20
micro_batches = 32
[policy]
compare = ["uniform"]
"""


def run(command):
    done = subprocess.run([str(word) for word in command], capture_output=True, text=True, check=False, stdin=subprocess.DEVNULL)
    if done.returncode != 0:
        raise SystemExit(f"{' '.join(map(str, command))}\n{done.stdout}{done.stderr}")
    return done.stdout


def seconds_of_processors():
    spent = resource.getrusage(resource.RUSAGE_CHILDREN)
    return spent.ru_utime + spent.ru_stime


def train(options, out, ranks, settings, *words):
    sets = [word for key, value in settings.items() for word in ("--set", f"{key}={value}")]
    run([options.dynmo, "train", "-n", ranks, "--out", out, "--overwrite", *sets, *words])


def prepared(options, folder):
    text = folder / "text.txt"
    text.write_text("".join(f"line {i} of a text with {i * i % 97} words\n" for i in range(20000)))
    run([options.dynmo, "data", "prepare", text, "--out", folder / "data"])
    return folder / "data"


def steps_of(run_folder):
    records = [json.loads(line) for line in (run_folder / "records" / "rank-0.jsonl").read_text().splitlines()]
    return records[WARM:]


def spread(values):
    return f"{statistics.median(values):.3f} ({min(values):.3f} to {max(values):.3f})"


def in_turn(options, measure):
    """measure(slices) of both heads in every round: lists of [whole, sliced]."""
    found = {1: [], options.slices: []}
    for number in range(options.rounds):
        order = (1, options.slices) if number % 2 == 0 else (options.slices, 1)
        for slices in order:
            found[slices].append(measure(slices))
    return found[1], found[options.slices]


def one_rank(options, folder):
    data = prepared(options, folder)
    stashes = {}
    processor = {1: [], options.slices: []}  # seconds, with the start of the run

    def measure(slices):
        out = folder / f"one-{slices}"
        began = seconds_of_processors()
        train(options, out, 1, MODEL | {"model.head_slices": slices}, "--data", data, "--steps", options.steps)
        processor[slices].append(seconds_of_processors() - began)
        layers = json.loads((out / "profile.json").read_text())["layers"]
        stashes[slices] = max(layer["activation_bytes"] for layer in layers if layer["name"].startswith("head"))
        return statistics.median(record["step_s"] for record in steps_of(out))

    whole, sliced = in_turn(options, measure)
    print(f"one rank, step, whole head: {spread(whole)} s")
    print(f"one rank, step, {options.slices} slices: {spread(sliced)} s")
    print(f"one rank, step, slices / whole: {spread([s / w for w, s in zip(whole, sliced)])}")
    print(f"one rank, processor time of {options.steps} steps and the start, slices / whole: "
          f"{spread([s / w for w, s in zip(processor[1], processor[options.slices])])}")
    hop = 4 * 2 * 128 * (256 + 2)
    allowed = 2 / options.slices + hop / stashes[1]
    print(f"largest stash of a layer of the head, slices / whole: {stashes[options.slices] / stashes[1]:.3f} (2 / slices and what passes "
          f"between two: {allowed:.3f})")


def freezing(options, folder):
    data = prepared(options, folder)
    freeze = {"model.head_slices": options.slices, "freezing.enabled": "true", "freezing.start": 0.1, "freezing.end": 0.3,
              "freezing.fraction": 0.75}
    gains, possible, shares, predicted = [], [], [], []
    for _ in range(options.rounds):
        out = folder / "freezing"
        train(options, out, 2, MODEL | freeze, "--data", data, "--steps", options.freezing_steps, "--compare", "static,balanced")
        summary = json.loads((out / "summary.json").read_text())
        gains.append(summary["speedup"])
        possible.append(summary["best_speedup"])
        # No share if nothing is to be gained, as in a run that is too short to freeze.
        if summary["best_speedup"] > 1.01:
            shares.append((summary["speedup"] - 1) / (summary["best_speedup"] - 1))
        predicted.append(summary["measured_step_time_s"] / summary["predicted_step_time_s"])
        print(f"  round: gain {gains[-1]:.3f} of {possible[-1]:.3f}, measured / predicted {predicted[-1]:.3f}", flush=True)
    print(f"two ranks, freezing, gain by balancing: {spread(gains)}, possible: {spread(possible)}, share: "
          f"{spread(shares) if shares else 'none'}, {options.rounds - len(shares)} rounds with nothing to gain left out")
    print(f"two ranks, freezing, measured / predicted step: {spread(predicted)}")


def emulated(options, folder):
    errors = {1: [], options.slices: []}
    for slices in errors:
        (folder / f"{slices}.toml").write_text(SCENARIO.format(slices=slices))
        run([options.dynmo, "simulate", folder / f"{slices}.toml", "--load-trace", folder / f"{slices}.jsonl"])

    def measure(slices):
        out = folder / f"emulated-{slices}"
        settings = {"run.device": "emulated", "emulated.trace": folder / f"{slices}.jsonl", "emulated.memory_scale": 0.001,
                    "emulated.time_scale": options.time_scale, "train.validation_every": 0, "batch.micro_batches": 32,
                    "pipeline.balancer": "search", "pipeline.schedule": "auto", "balance.enabled": "false"}
        train(options, out, 8, settings, "--steps", options.steps)
        records = steps_of(out)
        errors[slices].append(statistics.median(record["step_s"] / record["predicted_s"] for record in records))
        return statistics.median(record["step_s"] for record in records)

    whole, sliced = in_turn(options, measure)
    print(f"emulated, step, whole head: {spread(whole)} s, measured / predicted: {spread(errors[1])}")
    print(f"emulated, step, {options.slices} slices: {spread(sliced)} s, measured / predicted: {spread(errors[options.slices])}")
    print(f"emulated, step, whole / slices: {spread([w / s for w, s in zip(whole, sliced)])}")


def main():
    parts = {"one-rank": one_rank, "freezing": freezing, "emulated": emulated}
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("dynmo", type=lambda path: pathlib.Path(path).resolve())
    parser.add_argument("--slices", type=int, default=16)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--steps", type=int, default=10)
    parser.add_argument("--freezing-steps", type=int, default=60)
    parser.add_argument("--time-scale", type=float, default=0.2, help="of emulated layers")
    parser.add_argument("--part", default=",".join(parts))
    options = parser.parse_args()
    for name in options.part.split(","):
        with tempfile.TemporaryDirectory() as folder:
            before = os.getloadavg()[0]
            parts[name](options, pathlib.Path(folder))
            print(f"{name}: load average {before:.1f} before, {os.getloadavg()[0]:.1f} behind, {options.rounds} rounds", flush=True)


if __name__ == "__main__":
    main()
