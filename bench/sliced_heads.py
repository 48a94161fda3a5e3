#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Plans of models whose heads lie in slices beside those of whole heads: step time relative to the ideal one.

    bench/sliced_heads.py build/release/apps/dynmo/dynmo [--slices 16] [--only pruning]

The costs are those of the load models at the end of a training (GPT, hidden 1024, 50k words, H100). A rank does not reach the ideal
of its work divided by all ranks; the search's own result beside the whole head's shows what the slices give. The last column is the
step of the dense model with a whole head, cut evenly under 1F1B, divided by the step with slices.
"""
import argparse
import json
import pathlib
import resource
import subprocess
import tempfile

END = 9999  # the step whose costs are planned with
SOURCES = {"dense": ("none", ()),
           "pruned 90 %": ("pruning", ("pruning.final_sparsity=0.9",)),
           "frozen 75 %": ("freezing", ("freezing.fraction=0.75",)),
           "depths": ("mixture-of-depths", ()),
           "exits 3 %": ("early-exit", ("early_exit.survivors=0.03",))}
ROWS = (("dense", 8, 24), ("pruned 90 %", 8, 24), ("frozen 75 %", 8, 24), ("depths", 8, 24), ("exits 3 %", 8, 24),
        ("dense", 16, 24), ("depths", 16, 24), ("pruned 90 %", 16, 48))


def run(command):
    done = subprocess.run([str(word) for word in command], capture_output=True, text=True)
    if done.returncode != 0:
        raise SystemExit(f"{' '.join(map(str, command))}\n{done.stderr}")
    return done.stdout


def costs_at_the_end(dynmo, folder, source, blocks, slices):
    name, settings = SOURCES[source]
    scenario = folder / "scenario.toml"
    scenario.write_text(f"""[model]
blocks = {blocks}
hidden = 1024
sequence = 2048
head_slices = {slices}
[cluster]
pipeline_ranks = 8
[dynamism]
source = "{name}"
[training]
steps = {END + 1}
micro_batches = 32
sample_every = {END}
[policy]
compare = ["uniform"]
""")
    loads = folder / "loads.jsonl"
    changes = [word for setting in settings for word in ("--set", setting)]
    run([dynmo, "simulate", scenario, "--load-trace", loads, *changes])
    lines = [json.loads(line) for line in loads.read_text().splitlines()]
    layers = lines[0]["layers"]
    for line in lines[1:]:
        for key, values in line.items():
            if isinstance(values, list):
                for layer, value in zip(layers, values, strict=True):
                    layer[key] = value
    profile = folder / "profile.json"
    profile.write_text(json.dumps({"format": "dynmo-profile-1", "layers": layers}))
    return profile


def cluster_of(folder, ranks):
    path = folder / "cluster.json"
    nodes = [{"node": rank // 8} for rank in range(ranks)]
    path.write_text(json.dumps({"format": "dynmo-cluster-1", "ranks": nodes,
                                "links": {"inside_node": {"latency_s": 5e-6, "bandwidth_bytes_per_s": 450e9},
                                          "between_nodes": {"latency_s": 1e-5, "bandwidth_bytes_per_s": 50e9}}}))
    return path


def plan(dynmo, profile, cluster, *words):
    began = resource.getrusage(resource.RUSAGE_CHILDREN).ru_utime  # of a processor, whatever else runs there
    made = json.loads(run([dynmo, "plan", profile, "--cluster", cluster, "--json", *words]))
    spent = resource.getrusage(resource.RUSAGE_CHILDREN).ru_utime - began
    return made["step_time_s"] / made["ideal_step_time_s"], made["step_time_s"], spent


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("dynmo")
    parser.add_argument("--slices", type=int, default=16)
    parser.add_argument("--only", default="")
    options = parser.parse_args()
    print(f"| model, ranks | planned by | x ideal, whole head | x ideal, {options.slices} slices | step, slices / whole | plan's time, slices / whole | dense / slices |")
    print("|---|---|---|---|---|---|---|")
    with tempfile.TemporaryDirectory() as name:
        folder = pathlib.Path(name)
        for source, ranks, blocks in ROWS:
            if options.only not in source:
                continue
            cluster = cluster_of(folder, ranks)
            dense = plan(options.dynmo, costs_at_the_end(options.dynmo, folder, "dense", blocks, 1), cluster,
                         "--balancer", "uniform", "--schedule", "1f1b")[1]
            for balancer, schedule in (("search", "auto"), ("optimal", "1f1b")):
                words = ("--balancer", balancer, "--schedule", schedule)
                found = [plan(options.dynmo, costs_at_the_end(options.dynmo, folder, source, blocks, slices), cluster, *words)
                         for slices in (1, options.slices)]
                (whole, whole_s, whole_t), (sliced, sliced_s, sliced_t) = found
                times = f"{sliced_t / whole_t:.2f}" if balancer == "search" else ""  # others take milliseconds
                print(f"| {source}, {blocks} blocks, {ranks} | {balancer}, {schedule} | {whole:.3f} | {sliced:.3f} | {sliced_s / whole_s:.3f} "
                      f"| {times} | {dense / sliced_s:.2f} |", flush=True)


if __name__ == "__main__":
    main()
