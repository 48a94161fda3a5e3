# SPDX-License-Identifier: Apache-2.0
"""`dynmo train` on devices beside the CPU: 1, 2 and 4 ranks on one device, resuming, NCCL where there are two.

DYNMO is the program, DYNMO_DEVICE the kind of device, cuda if it is not set. Exit code 77, and the reason, where there is none.
"""
import json
import os
import pathlib
import shutil
import subprocess
import sys
import tempfile
import unittest

DYNMO = os.environ["DYNMO"]
DEVICE = os.environ.get("DYNMO_DEVICE", "cuda")
TOLERANCE = 2e-3  # of the loss; sums of a device have an order of their own
COMMON = ["train.steps=12", "train.validation_every=0", "optimizer.warmup_steps=3", "balance.enabled=false", "pipeline.pin=false",
          "model.hidden=64", "model.blocks=3", "model.heads=2", "model.kv_heads=2", "model.intermediate=96", "model.sequence=32",
          "batch.micro_batches=4", "batch.micro_batch_size=2"]


def run(*words, **variables):
    return subprocess.run([DYNMO, *map(str, words)], capture_output=True, text=True, timeout=600, stdin=subprocess.DEVNULL,
                          env={**os.environ, **variables}, check=False)


class Device(unittest.TestCase):
    @classmethod
    def setUpClass(cls):
        cls.temporary = tempfile.TemporaryDirectory(prefix="dynmo-gpu-")
        cls.folder = pathlib.Path(cls.temporary.name)
        corpus = cls.folder / "corpus"
        corpus.mkdir()
        for number in range(40):
            (corpus / f"{number}.txt").write_text("".join(f"line {i} of file {number}: {i * number % 97}\n" for i in range(200)))
        done = run("data", "prepare", corpus, "--out", cls.folder / "data")
        assert done.returncode == 0, done.stderr

    @classmethod
    def tearDownClass(cls):
        cls.temporary.cleanup()

    def train(self, name, ranks, device, *more, settings=()):
        words = [word for setting in [*COMMON, f"run.device={device}", *settings] for word in ("--set", setting)]
        done = run("train", "--data", self.folder / "data", "--out", self.folder / name, "-n", ranks, *words, *more)
        self.assertEqual(done.returncode, 0, done.stdout + done.stderr)
        return done.stdout

    def losses(self, name):
        found = {}
        for path in (self.folder / name / "records").glob("*.jsonl"):
            for line in path.read_text().splitlines():
                record = json.loads(line)
                found[record["step"]] = record["loss"]
        return found

    def assert_close(self, name, expected):
        actual = self.losses(name)
        self.assertEqual(actual.keys(), expected.keys())
        for step, loss in expected.items():
            self.assertAlmostEqual(actual[step], loss, delta=TOLERANCE * loss, msg=f"{name}, step {step}")

    def test_ranks_on_one_device_train_like_the_cpu(self):
        self.train("cpu", 2, "cpu")
        for ranks in (1, 2, 4):
            out = self.train(f"device-{ranks}", ranks, DEVICE)
            self.assertIn(f"device   {DEVICE}:", out)
            self.assert_close(f"device-{ranks}", self.losses("cpu"))

    def test_a_checkpoint_of_the_cpu_continues_on_the_device_and_back(self):
        self.train("whole", 2, "cpu")
        half = ["checkpoint.every=4"]
        self.train("moved", 2, "cpu", settings=half)
        for checkpoint in sorted((self.folder / "moved/checkpoints").glob("step-*"))[-1:]:
            shutil.rmtree(checkpoint)  # as if it had been stopped behind the one before
        out = self.train("moved", 2, DEVICE, "--resume", settings=half)
        self.assertIn("resume   step 8 of 12", out)
        self.assert_close("moved", self.losses("whole"))
        self.assertEqual(run("checkpoint", "verify", self.folder / "moved").returncode, 0)

    def test_bf16_learns(self):
        self.train("bf16", 2, DEVICE, settings=["model.precision=bf16"])
        losses = self.losses("bf16")
        self.assertLess(losses[11], losses[0])

    def test_nccl_carries_what_passes_between_devices(self):
        listed = "" if DEVICE != "cuda" or shutil.which("nvidia-smi") is None else subprocess.check_output(["nvidia-smi", "-L"], text=True)
        if len(listed.splitlines()) < 2:
            self.skipTest("NCCL wants a device for each rank, and there are not two")
        self.train("cpu-2", 2, "cpu")
        out = self.train("nccl", 2, DEVICE)
        self.assertIn("by NCCL", out)
        self.assert_close("nccl", self.losses("cpu-2"))


if __name__ == "__main__":
    probe = run("train", "--dry-run", "--data", "nowhere", "--set", f"run.device={DEVICE}")
    if f"run.device = {DEVICE}: " in probe.stderr:
        print("skipped:", probe.stderr.strip())
        sys.exit(77)
    unittest.main()
