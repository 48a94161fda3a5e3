#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""torchtitan's own splitter and schedule on the files that the adviser of dynmo.torch writes.

By the interpreter of `scripts/setup peers` that has the newest versions. Two ranks train a small model by the cut that torchtitan
makes and then by the adviser's; the gradients are those of a loop on the whole model.
"""
import argparse
import json
import os
import pathlib
import socket
import subprocess
import sys
import tempfile

ROOT = pathlib.Path(__file__).resolve().parents[2]
RANKS, MICRO_BATCHES = 2, 8


def rank_main(folder):
    import torch
    import torch.distributed as dist
    from torch.distributed.device_mesh import init_device_mesh
    from torchtitan.config.configs import ParallelismConfig
    from torchtitan.distributed import pipeline_parallel as titan

    import dynmo.torch as dt
    import torch_adviser_rank as own

    torch.set_num_threads(1)
    mesh = init_device_mesh("cpu", (RANKS,), mesh_dim_names=("pp",))
    given, target = own.batch()

    def train(keys, csv, advises):
        config = ParallelismConfig(
            **{**keys, "pipeline_parallel_schedule_csv": csv}, pipeline_parallel_microbatch_size=own.SAMPLES // MICRO_BATCHES)
        names = config.module_fqns_per_model_part
        stages, parts = titan._pipeline_module_split(
            own.Model(False, False), mesh, config.pipeline_parallel_schedule, torch.device("cpu"), names)
        adviser = dt.Adviser(stages, config.pipeline_parallel_schedule, micro_batches=MICRO_BATCHES, clock=own.clock)
        schedule = titan._build_pipeline_schedule(
            parallelism=config, local_batch_size=own.SAMPLES, stages=stages, loss_fn=lambda *a: (own.loss_fn(*a), None))
        schedule.step(*((given,) if dist.get_rank() == 0 else ()), **({"target": target} if dist.get_rank() == RANKS - 1 else {}))
        advice = adviser.advise() if advises else None
        return {name: p.grad for part in parts for name, p in part.named_parameters()}, advice

    even = titan._generate_llm_fqn_per_model_part(RANKS, own.BLOCKS)
    keys = {"pipeline_parallel_degree": RANKS, "pipeline_parallel_schedule": "1F1B"}
    before, advice = train({**keys, "module_fqns_per_model_part": even}, "", True)
    assert advice.gain_s > 0 and advice.before == even, advice
    advice.write(folder / str(dist.get_rank()))
    written = json.loads((folder / str(dist.get_rank()) / "torchtitan.json").read_text())["parallelism"]
    assert written["module_fqns_per_model_part"] != even
    after, _ = train(written, "", False)
    by_csv, _ = train(written, str(folder / str(dist.get_rank()) / "schedule.csv"), False)
    model = own.Model(False, False)
    for part, wanted in zip(given.tensor_split(MICRO_BATCHES), target.tensor_split(MICRO_BATCHES)):
        own.loss_fn(model(part), wanted).backward()
    whole = {name: parameter.grad for name, parameter in model.named_parameters()}
    seen = [None] * RANKS
    dist.all_gather_object(seen, (before, after, by_csv))
    for which in range(3):
        gradients = {name: gradient for one in seen for name, gradient in one[which].items()}
        assert gradients.keys() == whole.keys() and all(torch.equal(gradients[name], whole[name]) for name in whole), which
    if dist.get_rank() == 0:
        print(f"PASS torchtitan reads the adviser's files: {advice}")
    dist.destroy_process_group()


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--dynmo", type=pathlib.Path, required=True)
    parser.add_argument("--rank-of", type=pathlib.Path, help="the folder of a rank that this program has started")
    arguments = parser.parse_args()
    if arguments.rank_of:
        rank_main(arguments.rank_of)
        return 0
    cache = os.environ.get("DYNMO_CACHE") or pathlib.Path(os.environ.get("XDG_CACHE_HOME") or pathlib.Path.home() / ".cache") / "dynmo"
    python = pathlib.Path(cache) / "peers-newest" / "bin" / "python"
    if not python.exists():
        print(f"SKIP torchtitan: no {python}, which scripts/setup peers makes")
        return 0
    with socket.socket() as probe, tempfile.TemporaryDirectory() as folder:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
        probe.close()
        package = arguments.dynmo.resolve().parents[2] / "python"
        environment = {**os.environ, "PYTHONPATH": f"{package}:{ROOT / 'tests' / 'python'}", "PYTHONDONTWRITEBYTECODE": "1",
                       "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": "", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
        command = [python, __file__, "--dynmo", arguments.dynmo, "--rank-of", folder]
        ranks = [
            subprocess.Popen(command, env={**environment, "RANK": str(rank), "WORLD_SIZE": str(RANKS), "LOCAL_RANK": str(rank)},
                             stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
            for rank in range(RANKS)
        ]
        try:
            said = [rank.communicate(timeout=300)[0] for rank in ranks]
        finally:
            for rank in ranks:
                rank.kill()
        print("\n".join(said))
        if any(rank.returncode for rank in ranks):
            print(f"FAIL torchtitan: exit codes {[rank.returncode for rank in ranks]}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
