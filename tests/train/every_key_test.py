# SPDX-License-Identifier: Apache-2.0
"""Every key of a config, alone, with another value: the training differs from one without it, or a line refuses it by name. CI draws keys."""
import json
import re
import shutil
import unittest

from drawn import drawn
from run_case import RunCase, digests, newest_manifest

FREEZING = ("freezing.enabled=true", "freezing.start=0.2", "freezing.end=0.6", "freezing.fraction=0.5")
CONVERGING = ("freezing.enabled=true", "freezing.rule=norm", "freezing.check_every=1", "freezing.smooth_steps=2", "freezing.bootstrap=0",
              "freezing.tolerance=1", "freezing.patience=1", "freezing.max_fraction=0.75", "optimizer.warmup_steps=1")
PRUNING = ("pruning.enabled=true", "pruning.start=2", "pruning.end=6", "pruning.every=2", "pruning.final_sparsity=0.8")
EXITS = ("early_exit.enabled=true", "early_exit.exit_every=1", "early_exit.warm_up=1", "early_exit.ramp_steps=4")
DEPTHS = ("mixture_of_depths.enabled=true", "mixture_of_depths.capacity=0.5")
ATTENTION = ("sparse_attention.enabled=true", "sparse_attention.buckets=2", "model.sequence=32")
MOE = ("moe.enabled=true",)
DROPPING = (*MOE, "moe.capacity_factor=1.0")
BIAS = (*MOE, "moe.router=bias")
ELASTIC = ("elastic.enabled=true",)
SAVING = ("checkpoint.every=3",)
VALIDATING = ("train.validation_every=4",)
LLAMA3 = ("model.rope_scaling=llama3", "model.rope_original_positions=16")
EMULATED = ("run.device=emulated", "emulated.profile=costs.json")

RECORDED = ("step", "rank", "tokens", "first_layer", "layers", "loss", "frozen_layers", "gradient_norm", "learning_rate", "sources")
SUMMED = ("steps", "ranks", "replicas", "validation_loss", "checkpoints_written")

# By key: another value, and what it acts beside.
ROWS = {
    "model.family": ("gpt2",), "model.vocabulary": ("300",), "model.hidden": ("64",), "model.blocks": ("4",),
    "model.heads": ("2",), "model.kv_heads": ("1",), "model.intermediate": ("64",), "model.sequence": ("8",), "model.dropout": ("0.3",),
    "model.rope_theta": ("100.0",), "model.rope_scaling": ("linear",), "model.rope_factor": ("2", "model.rope_scaling=linear"),
    "model.rope_low_freq_factor": ("2.0", *LLAMA3), "model.rope_high_freq_factor": ("8.0", *LLAMA3),
    "model.rope_original_positions": ("32", *LLAMA3), "model.qkv_bias": ("true",), "model.precision": ("bf16",), "model.positions": ("64", "model.family=gpt2", "checkpoint.every=3"),
    "model.norm_epsilon": ("0.1",), "model.tied_embeddings": ("true",), "model.head_slices": ("2",),
    "data.path": ("elsewhere",), "data.blend": ('["1 elsewhere"]',), "data.validation_path": ("data", *VALIDATING), "data.vocabulary": ("300",),
    "batch.micro_batches": ("2",), "batch.micro_batch_size": ("1",), "batch.accumulation": ("2",),
    "optimizer.learning_rate": ("0.01",), "optimizer.minimum_learning_rate": ("0.0005",), "optimizer.warmup_steps": ("1",),
    "optimizer.decay": ("linear",), "optimizer.decay_share": ("0.8", "optimizer.decay=wsd"), "optimizer.beta1": ("0.5",),
    "optimizer.beta2": ("0.5",), "optimizer.epsilon": ("0.001",), "optimizer.weight_decay": ("0.9",), "optimizer.clip_norm": ("0.1",),
    "train.steps": ("9",), "train.seed": ("2",), "train.init": ("nowhere",), "train.on_nan": ("skip", "optimizer.learning_rate=1e30"),
    "train.validation_every": ("4",), "train.validation_steps": ("1", *VALIDATING),
    "pipeline.ranks": ("3",), "pipeline.replicas": ("2",), "pipeline.schedule": ("zb-h1",),
    "pipeline.stages_per_rank": ("3", "pipeline.schedule=interleaved"), "pipeline.balancer": ("uniform", "model.vocabulary=4000"),
    "pipeline.cut": ("[1, 7]",), "pipeline.recompute": ("whole",), "pipeline.memory": ("\"500KiB\"", "pipeline.recompute=auto"),
    **{f"moe.{key}": (value, *beside) for key, value, *beside in (
        ("enabled", "true"), ("experts", "4", *MOE), ("top_k", "1", *MOE), ("expert_hidden", "16", *MOE), ("router", "sinkhorn", *MOE),
        ("aux_loss", "0.5", *MOE), ("z_loss", "0.5", *MOE), ("bias_rate", "0.1", *BIAS), ("capacity_factor", "0.5", *MOE),
        ("drop", "score", *DROPPING))},
    **{f"pruning.{key}": (value, *beside) for key, value, *beside in (
        ("enabled", "true"), ("start", "4", *PRUNING), ("end", "4", *PRUNING), ("every", "1", *PRUNING), ("initial_sparsity", "0.5", *PRUNING),
        ("final_sparsity", "0.5", *PRUNING), ("max_sparsity", "0.81", *PRUNING), ("magnitude", "raw", *PRUNING), ("form", "units", *PRUNING),
        ("unit_multiple", "1", "pruning.form=units", *PRUNING))},
    **{f"freezing.{key}": (value, *beside) for key, value, *beside in (
        ("enabled", "true"), ("rule", "norm", "freezing.enabled=true"), ("start", "0.5", *FREEZING), ("end", "0.9", *FREEZING),
        ("fraction", "0.9", *FREEZING), ("every", "4", *FREEZING), ("check_every", "6", *CONVERGING), ("smooth_steps", "6", *CONVERGING),
        ("bootstrap", "0.9", *CONVERGING), ("tolerance", "0.01", *CONVERGING), ("patience", "3", *CONVERGING),
        ("max_fraction", "0.2", *CONVERGING), ("unfreeze_below", "0.9", *CONVERGING))},
    **{f"sparse_attention.{key}": (value, *beside) for key, value, *beside in (
        ("enabled", "true", "model.sequence=32"), ("rule", "drop", *ATTENTION), ("buckets", "8", *ATTENTION),
        ("dropped", "0.9", "sparse_attention.enabled=true", "sparse_attention.rule=drop", "model.sequence=32"))},
    **{f"early_exit.{key}": (value, *beside) for key, value, *beside in (
        ("enabled", "true", "early_exit.warm_up=1", "early_exit.exit_every=1"), ("survivors", "0.6", *EXITS), ("exit_every", "2", *EXITS), ("exited", "kept", *EXITS),
        ("warm_up", "4", *EXITS), ("ramp_steps", "8", *EXITS), ("confidence", "entropy", *EXITS), ("threshold", "0.2", *EXITS),
        ("exit_loss", "0.9", *EXITS))},
    **{f"mixture_of_depths.{key}": (value, *beside) for key, value, *beside in (
        ("enabled", "true"), ("capacity", "0.25", *DEPTHS), ("every", "1", *DEPTHS), ("first_block", "2", *DEPTHS))},
    "elastic.enabled": ("true",), "elastic.pack": ("auto", *ELASTIC), "elastic.pack_ranks": ("1", *ELASTIC), "elastic.ranks_min": ("3", *ELASTIC),
    "elastic.release_command": ("nowhere", *ELASTIC), "elastic.listen": ("192.0.2.1", *ELASTIC),
    "checkpoint.every": ("2",), "checkpoint.keep": ("1", *SAVING),
    "emulated.profile": ("other.json", *EMULATED), "emulated.trace": ("costs.jsonl",),
    "emulated.memory_scale": ("0.5", *EMULATED),
    "run.directory": ("elsewhere",), "run.device": ("emulated", "emulated.profile=costs.json"), "run.trace_steps": ("0",),
    "run.deterministic": ("false",), "run.fused_kernels": ("false",),
    "run.load_trace": ("0",), "run.tensorboard": ("true",), "run.prometheus": ("true",), "run.log": ("run/log",),
}

# Keys that no figure of so short a run shows, with the test that shows them.
ELSEWHERE = {
    "pipeline.place": "ranks of several hosts: plan_test", "pipeline.measure_steps": "which steps are measured: train_test",
    "pipeline.pin": "processors: first_hour_test", "pipeline.timeout_s": "a wait: lost_rank_test",
    "balance.enabled": "measured times: control_test", "balance.balancer": "measured times: control_test", "balance.minimum_gain": "measured times: control_test", "balance.noise_factor": "measured times: control_test",
    "balance.window": "measured times: control_test", "pruning.sparse_above": "the format of a matrix: dynamism_test",
    "early_exit.row_room": "memory: sources_test", "elastic.pack_slack": "measured times: plan_test",
    "elastic.release_after": "boundaries: elastic_test", "elastic.respawn": "a lost rank: survival_test",
    "elastic.silence_s": "a wait: survival_test", "elastic.snapshots": "a lost rank: survival_test",
    "elastic.snapshot_cost": "measured times: train_test", "elastic.release_timeout_s": "a wait: release_hook_test",
    "checkpoint.asynchronous": "when files are written: checkpoints_test", "checkpoint.memory": "when files are written: checkpoints_test",
    "emulated.time_scale": "times: layouts_test", "emulated.slow_ranks": "times: layouts_test", "emulated.slow_speed": "times: layouts_test",
    "run.log_level": "lines of a file: logs_test", "run.metrics_port": "an endpoint: run_folder_test", "run.peak_flops": "times: run_folder_test",
    "emulated.slow_from": "times: layouts_test", "emulated.slow_until": "times: layouts_test",
}


class EveryKey(RunCase):
    @classmethod
    def setUpClass(cls):
        super().setUpClass()
        layer = {"forward_s": 0.001, "backward_input_s": 0.001, "backward_weight_s": 0.001, "parameter_bytes": 1 << 10}
        layers = [{"name": f"layer{i}", **layer} for i in range(4)]
        for name, count in (("costs.json", 4), ("other.json", 3)):
            (cls.folder / name).write_text(json.dumps({"format": "dynmo-profile-1", "layers": layers[:count]}))
        lines = ({"format": "dynmo-load-trace-1", "layers": layers}, {"step": 0})
        (cls.folder / "costs.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))

    def answer(self, settings):
        """What a run gave, without times; or its refusal."""
        shutil.rmtree(self.folder / "run", ignore_errors=True)
        ranks = () if any(setting.startswith("pipeline.ranks") for setting in settings) else ("-n", "2")
        done = self.run_command(self.command(*ranks, extra=("train.steps=8", "balance.enabled=false", *settings)))
        if done.returncode != 0:  # 3: no plan fits, 4: no checkpoint is there
            self.assertIn((done.returncode, len(done.stderr.splitlines())), ((2, 1), (3, 1), (4, 1)), done.stderr)
            return done.stderr
        run = self.folder / "run"
        records = [json.loads(line) for path in sorted(run.glob("records/*")) for line in path.read_text().splitlines()]
        summary = json.loads((run / "summary.json").read_text())["runs"][0]
        traffic = [row for row in summary["traffic"] if row["purpose"] != "control"]
        files = sorted(str(path.relative_to(run)) for path in run.rglob("*") if path.is_file() and path.name != "traffic.jsonl")
        checkpoint = digests(newest_manifest(run)) if list(run.glob("checkpoints/step-*")) else {}
        last = [re.sub(r"[0-9.]+ GiB|[0-9:]+$", "", line) for line in done.stdout.splitlines()[:2]]
        figures = [{key: record.get(key) for key in RECORDED} for record in records], [summary[key] for key in SUMMED]
        return *figures, traffic, files, checkpoint, last

    def test_has_an_effect_or_is_refused_by_name(self):
        shown = self.run_program("config", "--defaults")
        table, keys = "", []
        for line in shown.stdout.splitlines():
            table = line.strip("[]") if line.startswith("[") else table
            keys += [f"{table}.{line.split(' = ')[0]}"] if " = " in line else []
        keys += ["model.tied_embeddings"]  # written if it is given
        self.assertEqual(sorted(keys), sorted([*ROWS, *ELSEWHERE]))
        answers = {}
        for key in drawn(ROWS, 6, "every_key_test"):
            value, *beside = ROWS[key]
            with self.subTest(key=key, value=value):
                if tuple(beside) not in answers:
                    answers[tuple(beside)] = self.answer(beside)
                given = self.answer([*beside, f"{key}={value}"])
                self.assertNotEqual(given, answers[tuple(beside)])
                # (What comes with a switch may be refused without it.)
                self.assertFalse(isinstance(given, str) and isinstance(answers[tuple(beside)], str), given)
                if isinstance(given, str):
                    # (A switch or a rule may be refused for a key that comes with it.)
                    self.assertIn(re.sub("(enabled|rule)$", "", key), given)


if __name__ == "__main__":
    unittest.main()
