#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Closes the loop with torch.distributed.pipelining: an even cut runs, PyTorch's profiler traces it, `dynmo trace import` makes costs of
that, `dynmo plan --emit` plans, and the plan runs.

The model has equal blocks and a large vocabulary, so its even cut waits for the head. Two Gloo ranks have two stages each. Even and
planned steps are timed in five pairs. Needs two idle cores: a figure outside its bar says FAIL.
"""
import argparse
import json
import pathlib
import statistics
import subprocess
import sys
import tempfile
import time

import gloo_ranks

RANKS, STAGES, BLOCKS, MICRO_BATCHES, PAIRS, STEPS = 2, 4, 16, 8, 5, 12
WIDTH, INNER, VOCABULARY, TOKENS = 256, 1024, 12288, 128


def modules_of(name):
    """The modules of a name that torchtitan gives."""
    from torch import nn

    class Block(nn.Module):
        def __init__(self):
            super().__init__()
            self.norm, self.up, self.down = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, INNER), nn.Linear(INNER, WIDTH)

        def forward(self, hidden):
            return hidden + self.down(nn.functional.gelu(self.up(self.norm(hidden))))

    if name == "tok_embeddings":
        return nn.Embedding(VOCABULARY, WIDTH)
    if name == "lm_head":
        return nn.Linear(WIDTH, VOCABULARY)
    return nn.LayerNorm(WIDTH) if name == "norm" else Block()


def rank_main(folder, trace):
    """Runs the plan in `folder` and writes the median of its steps, or traces one step."""
    import torch
    import torch.distributed as dist
    from torch import nn
    from torch.distributed.pipelining import PipelineStage
    from torch.distributed.pipelining.schedules import _PipelineScheduleRuntime

    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    parts = json.loads((folder / "torchtitan.json").read_text())["parallelism"]["module_fqns_per_model_part"]
    rows = [row.split(",") for row in (folder / "schedule.csv").read_text().splitlines()]
    mine = sorted({int(cell.split("F")[0]) for cell in rows[rank] if "F" in cell})
    torch.manual_seed(7)
    ids = torch.randint(VOCABULARY, (MICRO_BATCHES, TOKENS))
    hidden = torch.randn(1, TOKENS, WIDTH, requires_grad=True)
    stages = []
    for index in mine:
        stage = nn.Sequential(*(modules_of(name) for name in parts[index]))
        last = index == len(parts) - 1
        output = torch.randn(1, TOKENS, VOCABULARY, requires_grad=True) if last else hidden
        stages.append(PipelineStage(stage, index, len(parts), torch.device("cpu"), input_args=(ids[:1] if index == 0 else hidden,),
                                    output_args=(output,)))

    def loss_of(logits, target):
        return nn.functional.cross_entropy(logits.flatten(0, 1), target.flatten())

    schedule = _PipelineScheduleRuntime(stages, MICRO_BATCHES, loss_fn=loss_of)
    schedule._load_csv(str(folder / "schedule.csv"))

    def step():
        for stage in stages:
            stage.submod.zero_grad()
        dist.barrier()
        begin = time.perf_counter()
        schedule.step(*((ids,) if 0 in mine else ()), **({"target": ids} if len(parts) - 1 in mine else {}))
        dist.barrier()
        return time.perf_counter() - begin

    for _ in range(3):
        step()
    if trace:
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profiler:
            for _ in range(3):
                step()
        profiler.export_chrome_trace(str(folder / f"rank{rank}.json"))
    else:
        (folder / f"seconds-{rank}").write_text(str(statistics.median(step() for _ in range(STEPS))))
    dist.destroy_process_group()


def run_ranks(dynmo, folder, *words):
    failed = gloo_ranks.run([sys.executable, __file__, "--dynmo", dynmo, "--rank-of", folder, *words], RANKS)
    assert not failed, failed


def seconds_of(dynmo, folder):
    run_ranks(dynmo, folder)
    return max(float((folder / f"seconds-{rank}").read_text()) for rank in range(RANKS))


def call(*words):
    done = subprocess.run(list(map(str, words)), capture_output=True, text=True, check=False)
    assert done.returncode == 0, f"{words}: {done.stdout}{done.stderr}"
    return done.stdout


def plan(dynmo, profile, folder, *words):
    """Returns the predicted seconds of a step; the plan for PyTorch lies in the folder."""
    said = call(dynmo, "plan", profile, "--ranks", RANKS, "--micro-batches", MICRO_BATCHES, "--schedule", "interleaved", "--granularity", "block",
                "--emit", "torchtitan", "--emit-to", folder, "--json", *words)
    return json.loads(said)["step_time_s"]


def equal_profile():
    """Costs of a model whose blocks alone count."""
    light, one = ({f"{part}_s": seconds for part in ("forward", "backward_input", "backward_weight")} for seconds in (1e-6, 1e-3))
    layers = [{"name": "embedding", **light}, *({"name": f"blocks.{block}", **one} for block in range(BLOCKS)), {"name": "head", **light}]
    return {"format": "dynmo-profile-1", "layers": layers}


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--dynmo", type=lambda path: pathlib.Path(path).resolve(), required=True)
    parser.add_argument("--rank-of", type=pathlib.Path, help="the folder of a rank that this program has started")
    parser.add_argument("--trace", action="store_true", help="the rank writes a trace")
    arguments = parser.parse_args()
    if arguments.rank_of:
        rank_main(arguments.rank_of, arguments.trace)
        return 0
    dynmo = arguments.dynmo
    with tempfile.TemporaryDirectory() as name:
        folder = pathlib.Path(name)
        (folder / "equal.json").write_text(json.dumps(equal_profile()))
        even, planned, measured = folder / "even", folder / "planned", folder / "profile.json"
        plan(dynmo, folder / "equal.json", even, "--balancer", "blocks")
        run_ranks(dynmo, even, "--trace")
        said = call(dynmo, "trace", "import", even / "rank0.json", even / "rank1.json", "--blocks", ",".join([str(BLOCKS // STAGES)] * STAGES),
                    "--boundary-bytes", 4 * TOKENS * WIDTH, "--out", measured)
        print(said.strip())
        before_s = plan(dynmo, measured, folder / "again", "--balancer", "blocks")
        after_s = plan(dynmo, measured, planned)
        parts = json.loads((planned / "torchtitan.json").read_text())["parallelism"]["module_fqns_per_model_part"]
        pairs = [(seconds_of(dynmo, even), seconds_of(dynmo, planned)) for _ in range(PAIRS)]
    gains = sorted(1 - after / before for before, after in pairs)
    gain, wanted = statistics.median(gains), 1 - after_s / before_s
    error = after_s / statistics.median(after for _, after in pairs) - 1
    cut = "|".join(str(sum(name.startswith("layers.") for name in part)) for part in parts)
    print(f"even {1e3 * statistics.median(before for before, _ in pairs):.0f} ms, blocks {cut} "
          f"{1e3 * statistics.median(after for _, after in pairs):.0f} ms: {gain:.1%} less ({gains[0]:.1%} to {gains[-1]:.1%}), predicted "
          f"{1e3 * before_s:.0f} and {1e3 * after_s:.0f} ms: {wanted:.1%}; error of the predicted step {error:+.1%}")
    good = gain >= 0.8 * wanted and abs(error) <= 0.1 and wanted > 0.05
    print("PASS loop" if good else "FAIL loop: wanted 0.8 of the predicted gain, and a step within 10 %")
    return 0


if __name__ == "__main__":
    sys.exit(main())
