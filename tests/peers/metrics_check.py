#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""TensorBoard's own reader reads the event files of a run, and Prometheus' Python client its text: every number of the step records is
in both, with the value of the record."""
import argparse
import json
import math
import pathlib
import subprocess
import tempfile

from prometheus_client.parser import text_string_to_metric_families
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

TINY = {"model.hidden": 32, "model.blocks": 3, "model.heads": 4, "model.kv_heads": 2, "model.intermediate": 48, "model.sequence": 16,
        "batch.micro_batches": 4, "batch.micro_batch_size": 2, "train.steps": 12, "train.validation_every": 5, "pipeline.pin": "false",
        "run.tensorboard": "true", "run.prometheus": "true", "run.peak_flops": "1e12"}
OTHER_TAGS = {"loss": "loss_metrics/global_avg_loss", "gradient_norm": "grad_norm", "learning_rate": "lr"}
NOT_METRICS = {"format", "step", "rank", "sources"}


def train(dynmo, folder):
    (folder / "text").mkdir()
    (folder / "text" / "a.txt").write_text("".join(f"line {i} of a text: {i * 31 % 97}\n" for i in range(2000)))
    subprocess.run([dynmo, "data", "prepare", folder / "text", "--out", folder / "data", "--validation", "0.1"], check=True, timeout=100)
    settings = [f"--{key}={value}" for key, value in TINY.items()]
    subprocess.run([dynmo, "train", "--data", folder / "data", "--out", folder / "run", "-n", "2", *settings], check=True, timeout=300)


def points_of(folder):
    reader = EventAccumulator(str(folder), size_guidance={"scalars": 0})
    reader.Reload()
    return {tag: {point.step: point.value for point in reader.Scalars(tag)} for tag in reader.Tags()["scalars"]}, reader.Tags()["tensors"]


def check(run):
    of_run, texts = points_of(run / "tensorboard")
    assert "dynmo/events" in texts, texts
    assert sorted(of_run["validation_metrics/loss"]), of_run.keys()
    assert len(of_run["tflops"]) == TINY["train.steps"]
    for step, tflops in of_run["tflops"].items():
        assert math.isclose(of_run["mfu(%)"][step], 100 * tflops, rel_tol=1e-6), step
    compared = 0
    for rank in range(2):
        of_rank, _ = points_of(run / "tensorboard" / f"rank-{rank}")
        gauges = {sample.name: sample.value for family in text_string_to_metric_families((run / "metrics" / f"rank-{rank}.prom").read_text())
                  for sample in family.samples}
        records = [json.loads(line) for line in (run / "records" / f"rank-{rank}.jsonl").read_text().splitlines()]
        for record in records:
            for key, value in record.items():
                if key in NOT_METRICS or value is None:
                    continue
                tag = OTHER_TAGS.get(key, f"dynmo/{key}")
                points = of_rank.get(tag) or (of_run[tag] if rank == 0 else None)
                if points is None:
                    continue  # of the run, which the leader writes
                assert math.isclose(points[record["step"]], float(value), rel_tol=1e-6, abs_tol=1e-30), (tag, record["step"])
                compared += 1
                if record is not records[-1]:
                    continue
                name = "dynmo_" + (key[:-2] + "_seconds" if key.endswith("_s") else key)
                assert math.isclose(gauges[name], float(value), rel_tol=1e-12), (name, gauges[name], value)
    return compared


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--dynmo", required=True)
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        folder = pathlib.Path(name)
        train(pathlib.Path(arguments.dynmo).resolve(), folder)
        print(f"PASS metrics of a run: {check(folder / 'run')} values are equal in records, TensorBoard and Prometheus")


if __name__ == "__main__":
    main()
