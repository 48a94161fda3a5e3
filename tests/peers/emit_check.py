#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""The readers of torchtitan and Megatron-Core, and the runtime of PyTorch's pipelining, on what `dynmo plan --emit` writes.

torchtitan's parser of flags, splitter and schedule loader, and Megatron-Core's layout, read 20 random plans each back as the cut
that was planned. The README's two commands lead to a pipeline of torchtitan's own Llama 3 8B. Processes then run emitted plans of
unequal stages by PyTorch's runtime: their gradients are those of a loop on the whole model. By the interpreters of `scripts/setup
peers`: that with our version of PyTorch, and that with the newest.
"""
import argparse
import json
import os
import pathlib
import random
import shutil
import subprocess
import sys
import tempfile

import gloo_ranks

ROOT = pathlib.Path(__file__).resolve().parents[2]
PLANS = 20
SAMPLES_A_MICRO_BATCH, WIDTH = 2, 16


def profile(blocks, draw):
    """Uneven halves of blocks between an embedding and a head."""
    names = ["embedding", *(f"blocks.{block}.{half}" for block in range(blocks) for half in ("attention", "mlp")), "head"]
    layers = []
    for name in names:
        forward, backward = 1e-3 * draw.uniform(0.2, 3), 1e-3 * draw.uniform(0.2, 3)
        layers.append({"name": name, "forward_s": forward, "backward_input_s": backward, "backward_weight_s": backward})
    return {"format": "dynmo-profile-1", "layers": layers}


def emitted(dynmo, folder, form, blocks, ranks, micro_batches, draw, *words):
    """Plans, and returns the plan's document."""
    folder.mkdir()
    (folder / "profile.json").write_text(json.dumps(profile(blocks, draw)))
    command = [dynmo, "plan", folder / "profile.json", "--ranks", ranks, "--micro-batches", micro_batches, "--evaluations", 300,
               "--emit", form, "--emit-to", folder, "--json", *words]
    done = subprocess.run(list(map(str, command)), capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    return json.loads(done.stdout)


def modules_of(plan, blocks):
    """torchtitan's names of the plan's stages; the middle of a V is one stage there."""
    names = [["tok_embeddings"], *([f"layers.{block}"] for block in range(blocks)), ["norm", "lm_head"]]
    ends = [stage["first_layer"] + stage["layers"] for stage in plan["stages"]]
    return [sum(names[first:end], []) for first, end in zip([0, *ends], ends)]


def titan_plan(draw, case, small=False):
    """Ranks, blocks, micro-batches and flags of a plan."""
    ranks = draw.choice([2, 4]) if small else draw.randint(2, 5)
    kinds = ["1f1b", "interleaved", "zb-v", "gpipe", "zb-h1", "auto"]
    return ranks, draw.randint(2 * ranks, 6 * ranks), ranks * draw.randint(1, 4), ["--schedule", kinds[case % len(kinds)]]


def check_torchtitan(dynmo, folder):
    import torch
    import torch.distributed as dist
    import tyro
    from dataclasses import dataclass, field
    from torch import nn
    from torch.distributed.device_mesh import init_device_mesh
    from torch.testing._internal.distributed.fake_pg import FakeStore
    from torchtitan.config.configs import ParallelismConfig
    from torchtitan.config.manager import ConfigManager, custom_registry
    from torchtitan.distributed import pipeline_parallel as titan

    ConfigManager.register_tyro_rules(custom_registry)

    @dataclass
    class Config:
        parallelism: ParallelismConfig = field(default_factory=ParallelismConfig)

    class Whole(nn.Module):
        def __init__(self, blocks):
            super().__init__()
            self.tok_embeddings = nn.Embedding(8, 4)
            self.layers = nn.ModuleDict({str(block): nn.Linear(4, 4) for block in range(blocks)})
            self.norm = nn.LayerNorm(4)
            self.lm_head = nn.Linear(4, 8)

    draw, kinds = random.Random(44), set()
    for case in range(PLANS):
        ranks, blocks, micro_batches, words = titan_plan(draw, case)
        place = folder / f"titan-{case}"
        plan = emitted(dynmo, place, "torchtitan", blocks, ranks, micro_batches, draw, *words)
        keys = json.loads((place / "torchtitan.json").read_text())["parallelism"]
        config = ParallelismConfig(**keys)
        flags = (place / "torchtitan.args").read_text().split()
        assert tyro.cli(Config, args=flags, registry=custom_registry).parallelism == config, flags
        parts = config.module_fqns_per_model_part
        wanted = modules_of(plan, blocks)
        if len(parts) > len(wanted):  # a V
            middle = ranks - 1
            assert parts[:middle] == wanted[:middle] and parts[middle + 2:] == wanted[middle + 1:], (parts, wanted)
            assert parts[middle] + parts[middle + 1] == wanted[middle], (parts, wanted)
        else:
            assert parts == wanted, (parts, wanted)
        kinds.add(config.pipeline_parallel_schedule)
        whole, seen, rank_of = Whole(blocks), [], {}
        for rank in range(ranks):
            dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=ranks)
            mesh = init_device_mesh("cpu", (ranks,), mesh_dim_names=("pp",))
            stages, models = titan._pipeline_module_split(whole, mesh, config.pipeline_parallel_schedule, torch.device("cpu"), parts)
            schedule = titan._build_pipeline_schedule(
                parallelism=config, local_batch_size=micro_batches * config.pipeline_parallel_microbatch_size, stages=stages,
                loss_fn=lambda *_: (None, None))
            assert len(stages) * ranks == len(parts) and len(schedule.pipeline_order) == ranks
            for stage, model in zip(stages, models):
                rank_of[stage.stage_index] = rank
                seen += [name for name, _ in model.named_parameters()]
                assert {name.rsplit(".", 1)[0] for name, _ in model.named_parameters()} == set(parts[stage.stage_index])
            dist.destroy_process_group()
        assert sorted(seen) == sorted(name for name, _ in whole.named_parameters())
        planned = {stage["stage"]: stage["rank"] for stage in plan["stages"]}
        if len(parts) == len(wanted):
            assert rank_of == planned, (rank_of, planned)
        assert schedule.stage_index_to_group_rank == rank_of, (schedule.stage_index_to_group_rank, rank_of)
    assert kinds >= {"1F1B", "Interleaved1F1B", "ZBVZeroBubble"}, kinds
    print(f"PASS torchtitan reads {PLANS} plans: {', '.join(sorted(kinds))}")


def readme_words(dynmo, place, form, program):
    """Runs the README's first command for a form with Llama 3 8B's config.json, and returns the words of the second, which starts `program`."""
    sys.path.insert(0, str(ROOT / "tests" / "docs"))
    import blocks

    (place / "tools").mkdir(parents=True)
    shutil.copy(ROOT / "tests" / "docs" / "llama3-8b.json", place / "config.json")
    plan, = [line for block in blocks.shell_blocks("README.md") for line in block.splitlines() if f"--emit {form}" in line]
    path = f"{pathlib.Path(dynmo).resolve().parent}:{os.environ['PATH']}"
    subprocess.run(plan, shell=True, cwd=place, env={**os.environ, "PATH": path}, check=True, capture_output=True)
    second, = [command for command in blocks.commented_commands("README.md") if program in command]
    return blocks.words_of(second, place, place / "tools")


def check_readme(dynmo, folder):
    """The README's two commands with Llama 3 8B's config.json: torchtitan itself takes the words, and makes its pipeline of its own model."""
    import torch
    import torch.distributed as dist
    from torch.testing._internal.distributed.fake_pg import FakeStore
    from torchtitan.config.manager import ConfigManager
    from torchtitan.distributed.parallel_dims import ParallelDims

    place = folder / "readme"
    words = readme_words(dynmo, place, "torchtitan", "torchtitan.train")
    os.chdir(place)  # the flags name the order's file as the reader's folder has it
    config = ConfigManager().parse_args(words[words.index("torchtitan.train") + 1:])
    with torch.device("meta"):
        model = config.model_spec.model.build()
    seen, ranks, micro_batches = [], config.parallelism.pipeline_parallel_degree, config.training.local_batch_size
    assert words[words.index("--nproc-per-node") + 1] == str(ranks)
    for rank in range(ranks):
        dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=ranks)
        schedule, parts, _, _ = config.model_spec.pipelining_fn(
            model, parallel_dims=ParallelDims.from_config(config.parallelism, ranks), training=config.training,
            parallelism=config.parallelism, compile_config=config.compile, ac_config=config.activation_checkpoint,
            dump_folder=config.dump_folder, device=torch.device("cpu"), model_config=config.model_spec.model,
            parallelize_fn=lambda part, **_: part, loss_fn=lambda *_: (None, None))
        seen += [name for part in parts for name, _ in part.named_parameters()]
        forwards = [action for action in schedule.pipeline_order[rank] if action and action.computation_type.name == "FORWARD"]
        assert len(forwards) == micro_batches * len(parts), (len(forwards), micro_batches, len(parts))
        dist.destroy_process_group()
    assert sorted(seen) == sorted(name for name, _ in model.named_parameters())
    print(f"PASS torchtitan makes its pipeline of Llama 3 8B by the README's two commands: {config.parallelism.pipeline_parallel_schedule}, "
          f"{ranks} ranks, {len(seen)} parameters")


def check_megatron(dynmo, folder):
    from megatron.core.transformer.enums import LayerType
    from megatron.core.transformer.pipeline_parallel_layer_layout import PipelineParallelLayerLayout

    draw, laps_seen = random.Random(45), set()
    for case in range(PLANS):
        ranks, blocks, micro_batches, _ = titan_plan(draw, case)
        place = folder / f"megatron-{case}"
        words = ["--schedule", ["1f1b", "interleaved", "auto"][case % 3]]
        plan = emitted(dynmo, place, "megatron", blocks, ranks, micro_batches, draw, *words)
        flags = (place / "megatron.args").read_text().split()
        named = dict(zip(flags[::2], flags[1::2]))
        assert named["--pipeline-model-parallel-size"] == str(ranks), flags
        layout = PipelineParallelLayerLayout(named["--pipeline-model-parallel-layout"], ranks)
        layout.validate_layer_layout(blocks, None)
        laps = layout.virtual_pipeline_model_parallel_size
        laps_seen.add(laps)
        assert laps * ranks == len(plan["stages"])
        for stage in plan["stages"]:
            rank, lap = stage["stage"] % ranks, stage["stage"] // ranks
            assert rank == stage["rank"]
            kinds = layout.layout[rank][lap]
            first = stage["first_layer"]
            wanted = [LayerType.embedding if layer == 0 else LayerType.loss if layer == blocks + 1 else LayerType.decoder
                      for layer in range(first, first + stage["layers"])]
            assert kinds == wanted, (kinds, wanted)
    assert laps_seen >= {1, 2}, laps_seen
    words = readme_words(dynmo, folder / "readme-megatron", "megatron", "pretrain_gpt.py")
    named = dict(zip(words, words[1:]))
    layout = PipelineParallelLayerLayout(named["--pipeline-model-parallel-layout"], int(named["--pipeline-model-parallel-size"]))
    layout.validate_layer_layout(json.loads((folder / "readme-megatron" / "config.json").read_text())["num_hidden_layers"], None)
    print(f"PASS Megatron-Core reads {PLANS} plans, and that of the README")


def rank_main(folder):
    """Runs the plan in `folder` by PyTorch's runtime, and compares its gradients with a loop on the whole model."""
    import torch
    import torch.distributed as dist
    from torch import nn
    from torch.distributed.pipelining import PipelineStage
    from torch.distributed.pipelining.schedules import _PipelineScheduleRuntime

    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    rank, ranks = dist.get_rank(), dist.get_world_size()
    keys = json.loads((folder / "torchtitan.json").read_text())["parallelism"]
    parts = keys["module_fqns_per_model_part"]
    rows = [row.split(",") for row in (folder / "schedule.csv").read_text().splitlines()]
    micro_batches = 1 + max(int(cell.split("F")[1]) for row in rows for cell in row if "F" in cell)

    def make():
        torch.manual_seed(7)
        return {name: nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh()) for name in sum(parts, [])}

    torch.manual_seed(8)
    samples = micro_batches * SAMPLES_A_MICRO_BATCH
    given, target = torch.randn(samples, WIDTH), torch.randn(samples, WIDTH)
    modules = make()
    mine = sorted({int(cell.split("F")[0]) for cell in rows[rank] if "F" in cell})
    first, inner = (torch.randn(SAMPLES_A_MICRO_BATCH, WIDTH, requires_grad=grad) for grad in (False, True))
    stages = [PipelineStage(nn.Sequential(*(modules[name] for name in parts[index])), index, len(parts), torch.device("cpu"),
                            input_args=(inner if index else first,), output_args=(inner,)) for index in mine]
    # Each pair of ranks meets before the first step. Gloo refuses messages to oneself, which a V asks for.
    if hasattr(stages[0], "_get_init_p2p_neighbors_ops"):
        for stage in stages:
            stage._get_init_p2p_neighbors_ops = list
    schedule = _PipelineScheduleRuntime(stages, micro_batches, loss_fn=nn.functional.mse_loss, scale_grads=False)
    schedule._load_csv(str(folder / "schedule.csv"))
    schedule.step(*((given,) if 0 in mine else ()), **({"target": target} if len(parts) - 1 in mine else {}))
    whole = make()
    model = nn.Sequential(*whole.values())
    for part, wanted in zip(given.tensor_split(micro_batches), target.tensor_split(micro_batches)):
        nn.functional.mse_loss(model(part), wanted).backward()
    for index in mine:
        for name in parts[index]:
            for one, other in zip(modules[name].parameters(), whole[name].parameters()):
                assert torch.equal(one.grad, other.grad), (index, name, (one.grad - other.grad).abs().max())
    dist.destroy_process_group()


def check_runtime(pythons, dynmo, folder):
    draw = random.Random(46)
    for ranks in (2, 4):
        for kind, name in (("1f1b", "1F1B"), ("interleaved", "Interleaved1F1B"), ("zb-v", "ZBVZeroBubble"), ("adaptive", None)):
            place = folder / f"run-{ranks}-{kind}"
            plan = emitted(dynmo, place, "torchtitan", 4 * ranks + 1, ranks, 2 * ranks, draw, "--schedule", kind)
            keys = json.loads((place / "torchtitan.json").read_text())["parallelism"]
            assert name in (None, keys["pipeline_parallel_schedule"]), keys
            counts = [stage["layers"] for stage in plan["stages"]]
            assert len(set(counts)) > 1, counts
            for which, python in pythons.items():
                failed = gloo_ranks.run([python, __file__, "--dynmo", dynmo, "--rank-of", place], ranks)
                said = f"{which} runs {kind} {'|'.join(map(str, counts))} on {ranks} ranks"
                print(f"FAIL {said}: {failed.splitlines()[-1]}\n{failed}" if failed else f"PASS {said}", flush=True)


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--dynmo", type=lambda path: pathlib.Path(path).resolve(), required=True)
    parser.add_argument("--newest", type=pathlib.Path, help="an interpreter with torchtitan, Megatron-Core and the newest PyTorch")
    parser.add_argument("--rank-of", type=pathlib.Path, help="the folder of a rank that this program has started")
    parser.add_argument("--readers", action="store_true", help="the checks that import torchtitan and Megatron-Core, here")
    arguments = parser.parse_args()
    if arguments.rank_of:
        rank_main(arguments.rank_of)
        return 0
    with tempfile.TemporaryDirectory() as name:
        folder = pathlib.Path(name)
        if arguments.readers:
            check_torchtitan(arguments.dynmo, folder)
            check_readme(arguments.dynmo, folder)
            check_megatron(arguments.dynmo, folder)
            return 0
        cache = os.environ.get("DYNMO_CACHE") or pathlib.Path(os.environ.get("XDG_CACHE_HOME") or pathlib.Path.home() / ".cache") / "dynmo"
        newest = arguments.newest or pathlib.Path(cache) / "peers-newest" / "bin" / "python"
        pythons = {"our PyTorch": sys.executable}
        if not newest.exists():
            print(f"SKIP torchtitan and Megatron-Core: no {newest}, which scripts/setup peers makes")
        else:
            pythons["the newest PyTorch"] = newest
            done = subprocess.run([newest, __file__, "--dynmo", arguments.dynmo, "--readers"], capture_output=True, text=True, check=False)
            print(done.stdout)
            if done.returncode:
                print(f"{done.stderr}FAIL readers: {done.stderr.splitlines()[-1]}")
        check_runtime(pythons, arguments.dynmo, folder)
    return 0


if __name__ == "__main__":
    sys.exit(main())
