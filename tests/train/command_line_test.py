# SPDX-License-Identifier: Apache-2.0
"""The command line as a user meets it: bad input, resume after SIGKILL, a rank that dies.

DYNMO is the program, FAULT_PROGRAM one that kills a rank at a scripted message. Every wait is bounded.
"""
import json
import os
import pathlib
import random
import re
import resource
import shutil
import signal
import socket
import subprocess
import tempfile
import time
import unittest

DYNMO = os.environ["DYNMO"]
FAULT_PROGRAM = os.environ.get("FAULT_PROGRAM", "")
TINY = [
    "model.hidden=32", "model.blocks=3", "model.heads=4", "model.kv_heads=2", "model.intermediate=48", "model.sequence=16",
    "model.dropout=0.1", "batch.micro_batches=4", "batch.micro_batch_size=2", "train.validation_every=0",
    "optimizer.warmup_steps=3", "pipeline.pin=false",
]


def settings(values):
    return [word for value in values for word in ("--set", value)]


def rank_processes(marker):
    """Processes of this machine whose command line has `marker`."""
    found = []
    for entry in pathlib.Path("/proc").iterdir():
        if not entry.name.isdigit():
            continue
        try:
            line = (entry / "cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
            state = (entry / "stat").read_text().rsplit(")", 1)[1].split()[0]
        except OSError:
            continue
        if marker in line and state != "Z" and int(entry.name) != os.getpid():
            found.append((int(entry.name), line))
    return found


class Case(unittest.TestCase):
    @classmethod
    def setUpClass(cls):
        cls.folder = pathlib.Path(tempfile.mkdtemp(prefix="dynmo-cli-"))
        corpus = cls.folder / "corpus"
        corpus.mkdir()
        for number in range(40):
            text = "".join(f"line {i} of file {number}: {i * number % 97}\n" for i in range(60))
            (corpus / f"{number}.txt").write_text(text)
        cls.data = cls.folder / "data"
        subprocess.run([DYNMO, "data", "prepare", str(corpus), "--out", str(cls.data), "--validation", "0.1"], check=True,
                       capture_output=True, timeout=60)

    @classmethod
    def tearDownClass(cls):
        shutil.rmtree(cls.folder)

    def command(self, *words, run="run", extra=()):
        return [DYNMO, "train", "--data", str(self.data), "--out", str(self.folder / run), *settings(TINY),
                *settings(extra), *words]

    def run_command(self, command, timeout=120, env=None):
        return subprocess.run(command, capture_output=True, text=True, timeout=timeout, stdin=subprocess.DEVNULL,
                              env={**os.environ, **(env or {})}, cwd=self.folder)

    def assert_error(self, result, code, *words):
        self.assertEqual(result.returncode, code, result.stdout + result.stderr)
        lines = [line for line in result.stderr.splitlines() if line.strip()]
        self.assertEqual(len(lines), 1, result.stderr)
        self.assertTrue(lines[0].startswith("dynmo: error: "), lines[0])
        for word in words:
            self.assertIn(word, lines[0])


class BadInput(Case):
    def test_unknown_key_names_the_nearest_one(self):
        self.assert_error(self.run_command(self.command("--set", "model.hiden=3")), 2, "model.hiden", "model.hidden")

    def test_unknown_key_in_a_file_names_the_line(self):
        config = self.folder / "bad.toml"
        config.write_text("[train]\nstepps = 3\n")
        self.assert_error(self.run_command(self.command("--config", str(config))), 2, "bad.toml:2", "train.steps")

    def test_wrong_type(self):
        self.assert_error(self.run_command(self.command("--set", "train.steps=many")), 2, "train.steps", "whole number")

    def test_missing_config_file(self):
        self.assert_error(self.run_command(self.command("--config", "none.toml")), 2, "none.toml")

    def test_missing_data(self):
        self.assert_error(self.run_command([DYNMO, "train", "--data", "nowhere", "--out", "x"]), 2, "nowhere")

    def test_more_ranks_than_layers(self):
        self.assert_error(self.run_command(self.command("-n", "9")), 2, "9 ranks", "8 layers")

    def test_corpus_shorter_than_a_sequence(self):
        self.assert_error(self.run_command(self.command("--set", "model.sequence=10000000")), 2, "tokens", "10000000")

    def test_unknown_precision(self):
        self.assert_error(self.run_command(self.command("--set", "model.precision=fp16")), 2, "model.precision", "fp16",
                          "fp32 or bf16")

    def test_cuda_without_a_device(self):
        result = self.run_command(self.command("--set", "run.device=cuda"), env={"CUDA_VISIBLE_DEVICES": ""})
        self.assert_error(result, 2, "run.device = cuda: ", "set run.device = cpu")

    def test_recompute_without_a_limit_and_with_an_impossible_one(self):
        self.assert_error(self.run_command(self.command("--set", "pipeline.recompute=some")), 2, "pipeline.recompute",
                          "none, whole or auto")
        self.assert_error(self.run_command(self.command("--set", "pipeline.recompute=auto")), 2, "pipeline.memory", "2GiB")
        result = self.run_command(self.command("-n", "2", "--set", "pipeline.recompute=auto", "--set", "pipeline.memory=1KiB"))
        self.assertEqual(result.returncode, 3, result.stdout + result.stderr)  # known after measuring: every rank says so
        self.assertIn("fits their memory", result.stderr)

    def test_unknown_flag_and_run_name(self):
        self.assert_error(self.run_command(self.command("--rank", "3")), 2, "--rank")
        self.assert_error(self.run_command(self.command("--compare", "static,balancd")), 2, "balancd", "balanced")
        self.assert_error(self.run_command(self.command("--compare", "static,static")), 2, "'static' twice")

    def test_cut_that_does_not_fit(self):
        self.assert_error(self.run_command(self.command("-n", "2", "--set", "pipeline.cut=[3,3]")), 2, "pipeline.cut", "8")

    def test_resume_without_a_checkpoint(self):
        self.assert_error(self.run_command(self.command("-n", "2", "--resume", run="empty")), 4, "checkpoint")

    def test_port_in_use(self):
        with socket.socket() as taken:
            taken.bind(("127.0.0.1", 0))
            taken.listen()
            port = taken.getsockname()[1]
            env = {"RANK": "0", "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
            self.assert_error(self.run_command(self.command(), env=env), 2, str(port), "in use")

    def test_too_few_open_files(self):
        def limited(hard, soft):
            return lambda: resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
        start = {"capture_output": True, "text": True, "timeout": 60, "stdin": subprocess.DEVNULL, "cwd": self.folder}
        done = subprocess.run(self.command("-n", "8"), preexec_fn=limited(40, 40), **start)
        self.assert_error(done, 2, "at most 40 open files", "wanted 48", "ulimit -n 48")
        # A rank wants more than a launcher of as many.
        env = {**os.environ, "RANK": "0", "WORLD_SIZE": "8", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "1"}
        done = subprocess.run(self.command(), preexec_fn=limited(60, 60), env=env, **start)
        self.assert_error(done, 2, "rank 0 of 8", "at most 60 open files", "wanted 96")
        # A soft limit is raised.
        done = subprocess.run(self.command("-n", "2", "--steps", "1", run="raised"), preexec_fn=limited(100, 30), **start)
        self.assertEqual(done.returncode, 0, done.stderr)

    def test_broken_rank_environment(self):
        env = {"RANK": "two", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "1"}
        self.assert_error(self.run_command(self.command(), env=env), 2, "RANK", "two")


def losses(run):
    """By step, the last record of each (a resumed run repeats the steps after its checkpoint)."""
    found = {}
    for line in (run / "records" / "rank-0.jsonl").read_text().splitlines():
        record = json.loads(line)
        found[record["step"]] = record["loss"]
    return found


def newest_manifest(run):
    folders = sorted((run / "checkpoints").glob("step-*[0-9]"))
    return json.loads((folders[-1] / "manifest.json").read_text())


def digests(manifest):
    return {entry["layer"]: entry["digest"] for entry in manifest["files"]}


class Resume(Case):
    SETTINGS = ("train.steps=60", "checkpoint.every=10", "freezing.enabled=true", "freezing.every=4", "checkpoint.keep=3")

    def train(self, run, ranks, *words):
        return self.command("-n", str(ranks), *words, run=run, extra=self.SETTINGS)

    def test_killed_and_resumed_on_other_ranks_equals_undisturbed(self):
        undisturbed = self.run_command(self.train("undisturbed", 2))
        self.assertEqual(undisturbed.returncode, 0, undisturbed.stderr)
        reference = self.folder / "undisturbed"

        for ranks in (1, 3):
            run = self.folder / f"killed-{ranks}"
            process = subprocess.Popen(self.train(run.name, 2), stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
                                       stdin=subprocess.DEVNULL, cwd=self.folder)
            deadline = time.monotonic() + 60
            while not (run / "checkpoints" / "step-00000020").exists():
                self.assertLess(time.monotonic(), deadline, "no checkpoint within a minute")
                self.assertIsNone(process.poll(), "the run ended too early to be killed")
                time.sleep(0.005)
            process.kill()
            process.wait(timeout=10)
            deadline = time.monotonic() + 5
            while rank_processes(str(run)):
                self.assertLess(time.monotonic(), deadline, f"left running: {rank_processes(str(run))}")
                time.sleep(0.02)

            resumed = self.run_command(self.train(run.name, ranks, "--resume"))
            self.assertEqual(resumed.returncode, 0, resumed.stdout + resumed.stderr)
            self.assertIn("resume", resumed.stdout)
            self.assertEqual(losses(run), losses(reference), f"{ranks} ranks")
            self.assertEqual(digests(newest_manifest(run)), digests(newest_manifest(reference)), f"{ranks} ranks")

    def test_bf16_resumes_with_the_same_bits_and_in_bf16_only(self):
        def train(run, ranks, *words):
            return self.train(run, ranks, *words) + ["--set", "model.precision=bf16"]

        undisturbed = self.run_command(train("bf16", 2))
        self.assertEqual(undisturbed.returncode, 0, undisturbed.stderr)
        reference, run = self.folder / "bf16", self.folder / "bf16-resumed"
        shutil.copytree(reference, run)
        for step in (50, 60):
            shutil.rmtree(run / "checkpoints" / f"step-{step:08d}")
        resumed = self.run_command(train(run.name, 3, "--resume"))
        self.assertEqual(resumed.returncode, 0, resumed.stdout + resumed.stderr)
        self.assertIn("step 40", resumed.stdout)
        self.assertEqual(losses(run), losses(reference))
        self.assertEqual(digests(newest_manifest(run)), digests(newest_manifest(reference)))

        # What fp32 tools open: every tensor fp32 under its own name, no rounded copy.
        layer = (run / "checkpoints" / "step-00000060" / "layer-0007.safetensors").read_bytes()
        header = json.loads(layer[8:8 + int.from_bytes(layer[:8], "little")])
        names = ["model.norm.weight", "lm_head.weight"]
        moments = [f"optimizer.{kind}.{name}" for kind in ("exp_avg", "exp_avg_sq") for name in names]
        self.assertEqual(sorted(set(header) - {"__metadata__"}), sorted(names + moments))
        self.assertEqual({header[name]["dtype"] for name in names + moments}, {"F32"})
        text = self.run_command([DYNMO, "generate", str(run), "--prompt", "line ", "--tokens", "3"])
        self.assertEqual(text.returncode, 0, text.stderr)
        self.assert_error(self.run_command(self.train(run.name, 2, "--resume")), 2, "checkpoint", "model")

    def test_corrupted_checkpoints(self):
        run = self.folder / "damaged"
        done = self.run_command(self.train("damaged", 2))
        self.assertEqual(done.returncode, 0, done.stderr)
        newest, older, oldest = sorted((run / "checkpoints").glob("step-*[0-9]"), reverse=True)
        layer = newest / "layer-0002.safetensors"
        content = bytearray(layer.read_bytes())
        content[len(content) // 2] ^= 1
        layer.write_bytes(content)
        resumed = self.run_command(self.train("damaged", 2, "--resume"))
        self.assertEqual(resumed.returncode, 0, resumed.stderr)
        self.assertIn("layer-0002.safetensors", resumed.stdout + resumed.stderr)
        self.assertIn("step 50", resumed.stdout)

        for folder in (run / "checkpoints").iterdir():
            manifest = folder / "manifest.json"
            manifest.write_text(manifest.read_text()[:-20])
        self.assert_error(self.run_command(self.train("damaged", 2, "--resume")), 4, "checkpoint")

    def test_resume_of_another_model_is_refused(self):
        done = self.run_command(self.train("other", 2))
        self.assertEqual(done.returncode, 0, done.stderr)
        self.assert_error(self.run_command(self.train("other", 2, "--resume") + ["--set", "model.hidden=64"]), 2,
                          "checkpoint")


class Interrupt(Case):
    def test_ctrl_c_ends_all_ranks_with_130(self):
        run = self.folder / "interrupted"
        process = subprocess.Popen(self.command("-n", "2", run="interrupted", extra=("train.steps=100000",)),
                                   stdout=subprocess.PIPE, stderr=subprocess.PIPE, stdin=subprocess.DEVNULL, cwd=self.folder,
                                   text=True)
        deadline = time.monotonic() + 60
        records = run / "records" / "rank-1.jsonl"
        while not records.exists():
            self.assertLess(time.monotonic(), deadline)
            self.assertIsNone(process.poll())
            time.sleep(0.02)
        process.send_signal(signal.SIGINT)
        process.communicate(timeout=15)
        self.assertEqual(process.returncode, 130)
        self.assertEqual(rank_processes(str(run)), [])


class LostRank(Case):
    """A rank killed in forward, in backward, in the middle of migrating a 64 MiB layer, in summing gradients over two replicas;
    with and without our launcher."""

    RANKS = {"forward": 3, "backward": 3, "migration": 3, "reduction": 4}

    def start(self, where, victim, run, launcher):
        words = [FAULT_PROGRAM, where, str(victim), str(self.data), str(run)]
        if launcher:
            return [subprocess.Popen([*words, "launch"], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
                                     stdin=subprocess.DEVNULL)]
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = free.getsockname()[1]
        processes = []
        for rank in range(self.RANKS[where]):
            env = {**os.environ, "RANK": str(rank), "WORLD_SIZE": str(self.RANKS[where]), "MASTER_ADDR": "127.0.0.1",
                   "MASTER_PORT": str(port)}
            processes.append(subprocess.Popen(words, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=env,
                                              stdin=subprocess.DEVNULL))
        return processes

    def check(self, where, victim, launcher):
        run = self.folder / f"{where}-{victim}-{launcher}"
        processes = self.start(where, victim, run, launcher)
        try:
            killed = run / "killed"  # written by the victim just before it dies
            deadline = time.monotonic() + 120
            while not killed.exists():
                self.assertLess(time.monotonic(), deadline, "the victim was never killed")
                if all(process.poll() is not None for process in processes):
                    self.fail("ended before the kill: " + " ".join(str(p.communicate()) for p in processes))
                time.sleep(0.005)
            start = time.monotonic()
            outputs = [process.communicate(timeout=30) for process in processes]
            elapsed = time.monotonic() - start
        finally:
            for process in processes:
                process.kill()
        self.assertLess(elapsed, 5, f"{where}, victim {victim}, launcher {launcher}: {outputs}")
        for rank, (process, (_, err)) in enumerate(zip(processes, outputs)):
            if not launcher and rank == victim:
                self.assertEqual(process.returncode, -signal.SIGKILL)
                continue
            self.assertEqual(process.returncode, 5, err)
            lines = [line for line in err.splitlines() if "error" in line]
            self.assertEqual(len(lines), 1, err)
            self.assertIn(f"rank {victim}", lines[0])
        self.assertEqual(rank_processes(str(run)), [])
        if where != "migration":
            verified = self.run_command([FAULT_PROGRAM, "verify", "0", str(self.data), str(run)])
            self.assertEqual(verified.returncode, 0, verified.stdout + verified.stderr)

    def test_in_forward(self):
        for victim, launcher in ((0, True), (1, False), (1, True)):
            with self.subTest(victim=victim, launcher=launcher):
                self.check("forward", victim, launcher)

    def test_in_backward(self):
        for victim, launcher in ((1, True), (2, False), (2, True)):
            with self.subTest(victim=victim, launcher=launcher):
                self.check("backward", victim, launcher)

    def test_in_the_middle_of_a_migration(self):
        for victim, launcher in ((0, True), (0, False), (1, True), (1, False)):
            with self.subTest(victim=victim, launcher=launcher):
                self.check("migration", victim, launcher)


    def test_in_one_replica(self):
        for victim, launcher in ((3, True), (1, False), (2, False)):
            with self.subTest(victim=victim, launcher=launcher):
                self.check("reduction", victim, launcher)


class Replicas(Case):
    """Two replicas of a pipeline: the same numbers on any number of ranks, and after a restart."""

    SETTINGS = ("train.steps=12", "checkpoint.every=4", "checkpoint.keep=3", "freezing.enabled=true", "freezing.every=4",
                "train.validation_every=6", "train.validation_steps=1")

    def train(self, run, *extra, words=()):
        result = self.run_command(self.command(*words, run=run, extra=(*self.SETTINGS, *extra)))
        self.assertEqual(result.returncode, 0, result.stdout + result.stderr)
        return result.stdout

    def validation_line(self, text):
        return next(line for line in text.splitlines() if "validation loss" in line).split()

    def test_the_same_numbers_on_any_ranks_and_after_a_restart(self):
        two = self.train("two", "pipeline.replicas=2", "pipeline.ranks=2")
        one = self.train("one", "pipeline.replicas=2", "pipeline.ranks=1")
        reference = self.folder / "two"
        self.assertIn("each of 2 x 2 ranks", two)
        self.assertIn("ranks 2 x 2", two)
        self.assertEqual(losses(self.folder / "one"), losses(reference))
        self.assertEqual(len(losses(reference)), 12)
        self.assertEqual(digests(newest_manifest(self.folder / "one")), digests(newest_manifest(reference)))
        self.assertEqual(self.validation_line(one), self.validation_line(two))
        summary = json.loads((reference / "summary.json").read_text())
        self.assertEqual(summary["runs"][0]["ranks"], 4)
        for rank in range(4):
            record = json.loads((reference / "records" / f"rank-{rank}.jsonl").read_text().splitlines()[0])
            self.assertEqual(record["rank"], rank)
            self.assertEqual(record["tokens"], 2 * 4 * 2 * 16)
            self.assertEqual(record["first_layer"] > 0, rank % 2 == 1)
        trace = json.loads((reference / "trace.json").read_text())
        names = {(event["name"], event["pid"], event["args"]["name"]) for event in trace["traceEvents"] if event["ph"] == "M"}
        processes = sorted(name for kind, _, name in names if kind == "process_name")
        self.assertEqual(processes, ["measured, replica 0", "measured, replica 1"])
        ranks = [name for kind, _, name in names if kind == "thread_name" and name in ("rank 0", "rank 1")]
        self.assertEqual(len(ranks), 4, "two ranks of each replica")

        for run, extra in (("three", ("pipeline.replicas=2", "pipeline.ranks=3")),
                           ("alone", ("pipeline.replicas=1", "pipeline.ranks=2", "batch.accumulation=2"))):
            shutil.copytree(reference, self.folder / run)
            shutil.rmtree(self.folder / run / "checkpoints" / "step-00000012")
            resumed = self.train(run, *extra, words=("--resume",))
            self.assertIn("step 8 of 12", resumed)
            found = losses(self.folder / run)
            if run == "three":
                self.assertEqual(found, losses(reference))
                self.assertEqual(digests(newest_manifest(self.folder / run)), digests(newest_manifest(reference)))
                continue
            # The same samples in another grouping of the sums: the last bits differ.
            for step, loss in losses(reference).items():
                self.assertAlmostEqual(found[step], loss, places=4)
        self.assert_error(self.run_command(self.command("--resume", run="two", extra=(
            *self.SETTINGS, "pipeline.replicas=1", "pipeline.ranks=2"))), 2, "accumulation")

    def test_accumulated_rounds_equal_one_round(self):
        self.train("at-once", "pipeline.ranks=2")
        self.train("rounds", "pipeline.ranks=2", "batch.micro_batches=2", "batch.accumulation=2")
        self.assertEqual(losses(self.folder / "at-once"), losses(self.folder / "rounds"))
        self.assertEqual(digests(newest_manifest(self.folder / "at-once")), digests(newest_manifest(self.folder / "rounds")))

    def test_ranks_that_do_not_divide(self):
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = free.getsockname()[1]
        env = {"RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
        self.assert_error(self.run_command(self.command("--set", "pipeline.replicas=2"), env=env), 2, "1 ranks",
                          "pipeline.replicas = 2")


class Schedules(Case):
    def test_all_train_to_the_same_numbers(self):
        found = {}
        for schedule in ("1f1b", "gpipe", "zb-h1", "zb-v", "interleaved", "auto"):
            result = self.run_command(self.command("-n", "2", "--steps", "4", run=schedule,
                                                   extra=[f"pipeline.schedule={schedule}"]))
            self.assertEqual(result.returncode, 0, result.stdout + result.stderr)
            found[schedule] = losses(self.folder / schedule)
            self.assertEqual(len(found[schedule]), 4)
            self.assertEqual(found[schedule], found["1f1b"], schedule)

    def test_one_that_does_not_exist(self):
        self.assert_error(self.run_command(self.command("--set", "pipeline.schedule=zbv")), 2, "pipeline.schedule", "zb-v")

    def test_micro_batches_it_cannot_take(self):
        command = self.command("-n", "3", "--set", "pipeline.schedule=interleaved", "--set", "model.blocks=8")
        result = self.run_command(command)
        self.assertEqual(result.returncode, 2, result.stdout + result.stderr)
        self.assertIn("want 3 or 6 micro-batches", result.stderr)


class Emulated(Case):
    def profile(self):
        layers = [{"name": f"layer{i}", "forward_s": 0.002, "backward_input_s": 0.002, "backward_weight_s": 0.002,
                   "parameter_bytes": 1 << 20, "boundary_bytes": 1 << 16} for i in range(8)]
        path = self.folder / "profile.json"
        path.write_text(json.dumps({"format": "dynmo-profile-1", "layers": layers}))
        return path

    def command(self, *words, extra=()):
        return [DYNMO, "train", "--out", str(self.folder / "emulated"), "--steps", "6", "-n", "4",
                *settings(["run.device=emulated", "train.validation_every=0", "pipeline.pin=false", *extra]), *words]

    def test_ranks_sleep_for_their_layers_and_say_so(self):
        result = self.run_command(self.command(extra=[f"emulated.profile={self.profile()}", "emulated.memory_scale=0.01"]))
        self.assertEqual(result.returncode, 0, result.stdout + result.stderr)
        self.assertIn("EMULATED", result.stdout)
        records = [json.loads(line) for line in (self.folder / "emulated/records/rank-0.jsonl").read_text().splitlines()]
        # 8 micro-batches through 4 ranks of two layers of 2 ms: at least their work and the fill.
        for record in records:
            self.assertGreaterEqual(record["step_s"], 8 * 2 * 0.006 + 3 * 2 * 0.002)

    def test_a_rank_that_becomes_slow_is_named_once(self):
        layer = {"forward_s": 0.002, "backward_input_s": 0.001, "backward_weight_s": 0.001, "parameter_bytes": 1 << 10}
        slowed = [0.002] * 2 + [0.008] * 2 + [0.002] * 4  # those of rank 1
        trace = self.folder / "slow.jsonl"
        trace.write_text("".join(json.dumps(line) + "\n" for line in (
            {"format": "dynmo-load-trace-1", "layers": [{"name": f"layer{i}", **layer} for i in range(8)]},
            {"step": 0}, {"step": 25, "forward_s": slowed})))
        command = self.command(extra=[f"emulated.trace={trace}", "pipeline.cut=[2,2,2,2]", "balance.enabled=false",
                                      "batch.micro_batches=2"])
        command[command.index("--steps") + 1] = "60"
        result = self.run_command(command)
        self.assertEqual(result.returncode, 0, result.stderr)
        said = [line for line in result.stdout.splitlines() if "is slow" in line]
        self.assertEqual(len(said), 1, said)
        self.assertRegex(said[0], r"step +2[789]  rank 1 is slow: all its layers take [2-5]\.\d x as long as before")

    def test_what_is_missing_or_wrong(self):
        self.assert_error(self.run_command(self.command()), 2, "emulated.profile")
        self.assert_error(self.run_command(self.command(extra=["emulated.profile=nowhere.json"])), 2, "nowhere.json")
        self.assert_error(self.run_command(self.command(extra=["run.device=gpu"])), 2, "run.device", "emulated")
        scale = [f"emulated.profile={self.profile()}", "emulated.memory_scale=3"]
        self.assert_error(self.run_command(self.command(extra=scale)), 2, "memory_scale is 3")


class TrainedModel(Case):
    @classmethod
    def setUpClass(cls):
        super().setUpClass()
        cls.run_folder = cls.folder / "run"
        subprocess.run([DYNMO, "train", "--data", str(cls.data), "--out", str(cls.run_folder), *settings(TINY), "-n", "2", "--steps",
                        "30", *settings(["checkpoint.every=15", "optimizer.learning_rate=1e-2"])], check=True, timeout=120,
                       capture_output=True)

    def dynmo(self, *words):
        return self.run_command([DYNMO, *map(str, words)])

    def test_generate_continues_a_prompt(self):
        greedy = self.dynmo("generate", self.run_folder, "--prompt", "line 1", "--tokens", 40)
        self.assertEqual(greedy.returncode, 0, greedy.stderr)
        self.assertTrue(greedy.stdout.startswith("line 1"))
        self.assertEqual(greedy.stdout, self.dynmo("generate", self.run_folder, "--prompt", "line 1", "--tokens", 40).stdout)
        # As bytes: what is drawn need not be text.
        drawn = [subprocess.run([DYNMO, "generate", str(self.run_folder), "--prompt", "line", "--temperature", "1", "--seed",
                                 str(seed)], capture_output=True, timeout=120) for seed in (1, 1, 2)]
        self.assertEqual(drawn[0].stdout, drawn[1].stdout)
        self.assertNotEqual(drawn[0].stdout, drawn[2].stdout)

    def test_generate_with_wrong_input(self):
        self.assert_error(self.dynmo("generate", self.run_folder, "--prompt", ""), 2, "prompt")
        self.assert_error(self.dynmo("generate", self.run_folder, "--prompt", "a", "--top-p", 2), 2, "top-p of 2")
        self.assert_error(self.dynmo("generate", self.folder / "none", "--prompt", "a"), 4, "checkpoint")
        scores = self.folder / "scores"
        self.assert_error(self.dynmo("generate", self.run_folder, "--prompt", "a", "--scores", scores), 2, "--prompt-tokens")

    def test_inspect_and_verify(self):
        inspected = self.dynmo("checkpoint", "inspect", self.run_folder)
        self.assertIn("model.layers.2.mlp.down_proj.weight", inspected.stdout)
        verified = self.dynmo("checkpoint", "verify", self.run_folder)
        self.assertIn("step 30, 8 files", verified.stdout)
        copy = self.folder / "damaged"
        shutil.copytree(self.run_folder / "checkpoints" / "step-00000030", copy)
        layer = copy / "layer-0003.safetensors"
        layer.write_bytes(layer.read_bytes()[:-1] + b"x")
        self.assert_error(self.dynmo("checkpoint", "verify", copy), 4, "layer-0003")
        self.assert_error(self.dynmo("generate", copy, "--prompt", "a"), 4, "layer-0003")

    def test_export_writes_what_transformers_reads(self):
        out = self.folder / "hugging-face"
        result = self.dynmo("checkpoint", "export-hf", self.run_folder, "--out", out)
        self.assertEqual(result.returncode, 0, result.stderr)
        config = json.loads((out / "config.json").read_text())
        self.assertEqual((config["model_type"], config["num_hidden_layers"], config["vocab_size"]), ("llama", 3, 257))
        data = (out / "model.safetensors").read_bytes()
        header = json.loads(data[8:8 + int.from_bytes(data[:8], "little")])
        names = set(header) - {"__metadata__"}
        self.assertEqual(len(names), 1 + 3 * 9 + 2)
        self.assertEqual(header["lm_head.weight"]["shape"], [257, 32])
        self.assertFalse(any(name.startswith("optimizer") for name in names))


class DryRun(Case):
    def dry_run(self, *words, extra=()):
        return self.run_command(self.command("--dry-run", *words, run="never", extra=extra))

    def rows(self, result):
        """Words of the table, by rank."""
        self.assertEqual(result.returncode, 0, result.stderr)
        self.assertFalse((self.folder / "never").exists())
        lines = result.stdout.splitlines()
        head = next(i for i, line in enumerate(lines) if line.split()[:2] == ["rank", "layers"])
        return [re.sub(r" (?=[KMG]?i?B)", "", line).split() for line in lines[head + 1:]]

    @staticmethod
    def kibibytes(count):
        return f"{count / 1024:.1f}KiB"

    def test_says_what_a_run_holds(self):
        cut = [3, 2, 3]
        done = self.run_command(self.command("-n", "3", "--steps", "2", run="real", extra=["pipeline.cut=[3,2,3]"]))
        self.assertEqual(done.returncode, 0, done.stderr)
        layers = json.loads((self.folder / "real" / "profile.json").read_text())["layers"]
        result = self.dry_run("-n", "3", extra=["pipeline.cut=[3,2,3]"])
        rows = self.rows(result)
        self.assertIn("measured here, one layer of each of 4 kinds", result.stdout)
        self.assertRegex(result.stdout, r"step +[0-9.]+ [mun]?s predicted")
        first = 0
        for rank, count in enumerate(cut):
            own = layers[first:first + count]
            parameters = sum(layer["parameter_bytes"] for layer in own)
            stashes = min(4, 3 - rank) * sum(layer["activation_bytes"] for layer in own)  # 1F1B, 4 micro-batches
            self.assertEqual(rows[rank], [str(rank), f"{first}-{first + count - 1}", self.kibibytes(parameters),
                                          self.kibibytes(parameters), self.kibibytes(2 * parameters), self.kibibytes(stashes),
                                          self.kibibytes(4 * parameters + stashes)])
            first += count

    def test_uses_formulas_for_what_it_cannot_measure(self):
        large = ["model.hidden=8192", "model.heads=64", "model.kv_heads=8", "model.intermediate=28672", "model.blocks=80",
                 "model.sequence=4096"]
        result = self.dry_run("-n", "8", extra=large)
        self.assertEqual(len(self.rows(result)), 8)
        self.assertIn("by formulas", result.stdout)

    def test_what_cannot_be_run_is_an_error_here_too(self):
        self.assert_error(self.dry_run("-n", "9"), 2, "9 ranks")
        self.assert_error(self.dry_run("--resume"), 2, "--dry-run")

    def test_speaks_for_rank_0_of_ranks_that_were_started(self):
        env = {"WORLD_SIZE": "4", "MASTER_ADDR": "nowhere", "MASTER_PORT": "1"}
        first = self.run_command(self.command("--dry-run", run="never"), env={**env, "RANK": "0"})
        self.assertEqual(len(self.rows(first)), 4)
        other = self.run_command(self.command("--dry-run", run="never"), env={**env, "RANK": "3"})
        self.assertEqual((other.returncode, other.stdout), (0, ""))


class Checkpoints(Case):
    """What fails while checkpoints are written, and what is said of damaged ones."""

    SETTINGS = ("train.steps=30", "checkpoint.every=10", "run.trace_steps=0")

    def train(self, run, *words, **options):
        return subprocess.run(self.command("-n", "2", *words, run=run, extra=self.SETTINGS), capture_output=True, text=True,
                              timeout=120, stdin=subprocess.DEVNULL, cwd=self.folder, **options)

    def dynmo(self, *words):
        return self.run_command([DYNMO, *map(str, words)])

    def test_a_full_disk_stops_no_training(self):
        reference = self.train("reference")
        self.assertEqual(reference.returncode, 0, reference.stderr)
        largest = max(path.stat().st_size for path in (self.folder / "reference/checkpoints").glob("*/layer-*"))

        def limit():
            # Writes beyond it fail like those to a full disk; all files of a run but the layers' are smaller.
            signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
            resource.setrlimit(resource.RLIMIT_FSIZE, (largest - 1, largest - 1))

        full = self.train("full", preexec_fn=limit, restore_signals=False)
        self.assertEqual(losses(self.folder / "full"), losses(self.folder / "reference"), full.stdout + full.stderr)
        alarms = [line for line in full.stdout.splitlines() if line.startswith("ALARM")]
        self.assertEqual(len(alarms), 3, full.stdout)
        for step, line in zip((10, 20, 30), alarms):
            self.assertIn(f"no checkpoint of step {step}", line)
            self.assertIn("File too large", line)
            self.assertIn("checkpoints/step-", line)
            self.assertIn("no good one yet", line)
        self.assertIn("0 checkpoints, 3 FAILED", full.stdout)
        # The trained model is lost: that is said, and by the exit code, too.
        self.assertEqual(full.returncode, 4)
        self.assertIn("its last checkpoint could not be written", full.stderr)
        self.assertEqual(list((self.folder / "full/checkpoints").iterdir()), [], "a failed one leaves room")

        # Where an older one is good, it stays and is named, and training can go on from it.
        shutil.copytree(self.folder / "reference", self.folder / "older")
        shutil.rmtree(self.folder / "older/checkpoints/step-00000030")
        older = self.train("older", "--resume", preexec_fn=limit, restore_signals=False)
        self.assertIn("still good: ", older.stdout + older.stderr)
        self.assertIn("checkpoints/step-00000020", older.stdout)
        again = self.train("older", "--resume")
        self.assertEqual(again.returncode, 0, again.stdout + again.stderr)
        self.assertEqual(digests(newest_manifest(self.folder / "older")), digests(newest_manifest(self.folder / "reference")))

    def test_a_disk_without_room(self):
        """A real file system of 200 KiB, where the kernel lets this user mount one."""
        if shutil.which("unshare") is None or subprocess.run(
                ["unshare", "--map-root-user", "--mount", "true"], capture_output=True).returncode != 0:
            self.skipTest("this user may not mount anything")
        run = self.folder / "small-disk"
        (run / "checkpoints").mkdir(parents=True)
        command = self.command("-n", "2", run="small-disk", extra=self.SETTINGS)
        script = 'mount -t tmpfs -o size=200k none "$0" && exec "$@"'
        result = self.run_command(["unshare", "--map-root-user", "--mount", "sh", "-c", script, str(run / "checkpoints"), *command])
        if "mount:" in result.stderr:
            self.skipTest(f"this user may not mount a tmpfs: {result.stderr.strip()}")
        self.assertEqual(result.returncode, 4, result.stdout + result.stderr)
        self.assertEqual(result.stdout.count("No space left on device"), 3, result.stdout)
        self.assertEqual(len(losses(run)), 30)

    def test_verify_and_inspect_walk_back(self):
        self.assertEqual(self.train("walk").returncode, 0)
        run = self.folder / "walk"
        # Another run in its folder would take these for its own.
        self.assert_error(self.train("walk"), 2, "walk/checkpoints", "--resume", "--out")
        self.assertIn("step-00000030: step 30, 8 files, all digests match", self.dynmo("checkpoint", "verify", run).stdout)
        newest = run / "checkpoints" / "step-00000030"
        layer = newest / "layer-0004.safetensors"
        layer.write_bytes(layer.read_bytes()[:-5])
        (run / "checkpoints" / "step-00000040").mkdir()  # lost its manifest, or is somebody else's
        verified = self.dynmo("checkpoint", "verify", run)
        self.assertEqual(verified.returncode, 0, verified.stderr)
        lines = verified.stdout.splitlines()
        self.assertIn("step-00000040", lines[0])
        self.assertIn("DAMAGED", lines[0])
        self.assertIn("layer-0004.safetensors has", lines[1])
        self.assertIn("step-00000020: step 20", lines[2])
        inspected = self.dynmo("checkpoint", "inspect", run)
        self.assertEqual(inspected.returncode, 0, inspected.stderr)
        self.assertIn("passed over: ", inspected.stdout)
        self.assertIn("step       20", inspected.stdout)
        resumed = self.train("walk", "--resume")
        self.assertEqual(resumed.returncode, 0, resumed.stderr)
        self.assertIn("layer-0004.safetensors", resumed.stdout)
        self.assertIn("step 20 of 30", resumed.stdout)

        for manifest in (run / "checkpoints").glob("*/manifest.json"):
            manifest.write_text('{"format": "something-else"}')
        for words in (("verify", run), ("inspect", run)):
            self.assert_error(self.dynmo("checkpoint", *words), 4, "no usable checkpoint", "manifest.json")

    def test_killed_while_writing(self):
        """Killed at random moments, many of them in the middle of a checkpoint: what is listed verifies, resume is exact."""
        extra = ("train.steps=120", "checkpoint.every=2", "run.trace_steps=0")
        undisturbed = self.run_command(self.command("-n", "2", run="steady", extra=extra))
        self.assertEqual(undisturbed.returncode, 0, undisturbed.stderr)
        run = self.folder / "hunted"
        draw = random.Random(5)
        half_written = 0

        def committed():
            return max((path.name for path in (run / "checkpoints").glob("step-*[0-9]")), default="")

        for _ in range(6):
            before = committed()
            words = ["--resume"] if before else []
            process = subprocess.Popen(self.command("-n", "2", *words, run="hunted", extra=extra), cwd=self.folder,
                                       stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, stdin=subprocess.DEVNULL)
            deadline = time.monotonic() + 60
            while process.poll() is None and committed() <= before and time.monotonic() < deadline:
                time.sleep(0.005)
            time.sleep(draw.uniform(0, 0.2))
            process.kill()
            process.wait(timeout=10)
            deadline = time.monotonic() + 10
            while rank_processes(str(run)):
                self.assertLess(time.monotonic(), deadline)
                time.sleep(0.02)
            half_written += len(list((run / "checkpoints").glob("step-*.tmp")))
            verified = self.dynmo("checkpoint", "verify", run)
            self.assertEqual(verified.returncode, 0, verified.stdout + verified.stderr)
            self.assertNotIn("DAMAGED", verified.stdout)
        self.assertGreater(half_written, 0, "no kill came while a checkpoint was written")
        resumed = self.run_command(self.command("-n", "3", "--resume", run="hunted", extra=extra))
        self.assertEqual(resumed.returncode, 0, resumed.stdout + resumed.stderr)
        self.assertEqual(digests(newest_manifest(run)), digests(newest_manifest(self.folder / "steady")))


class Report(Case):
    def test_says_again_what_the_run_said_with_layers_and_traffic(self):
        result = self.run_command(self.command("-n", "2", "--steps", "24", run="told", extra=[
            "pipeline.cut=[4,4]", "balance.enabled=false", "train.validation_every=12", "train.validation_steps=1",
            "checkpoint.every=12"]))
        self.assertEqual(result.returncode, 0, result.stdout + result.stderr)
        run = self.folder / "told"
        report = self.run_command([DYNMO, "report", str(run)])
        self.assertEqual(report.returncode, 0, report.stderr)
        said = result.stdout[result.stdout.index("\nrun  ") + 1:]
        self.assertTrue(report.stdout.startswith(said), said + "\n---\n" + report.stdout)
        self.assertRegex(said, r"predicted  step time: median error [0-9.]+ %, worst [0-9.]+ %, over 2[0-9] steps")
        self.assertIn("2 checkpoints", said)
        for layer in ("embed", "blocks.2.mlp", "head", "all"):
            self.assertIn(layer, report.stdout)

        # 24 steps and 2 validations of 4 micro-batches over one boundary of 2 x 16 x 32 floats.
        summary = json.loads((run / "summary.json").read_text())
        traffic = {(row["from"], row["to"], row["purpose"]): (row["messages"], row["bytes"])
                   for row in summary["runs"][0]["traffic"]}
        boundary = 2 * 16 * 32 * 4
        self.assertEqual(traffic[0, 1, "activation"], ((24 + 2) * 4, (24 + 2) * 4 * boundary))
        self.assertEqual(traffic[1, 0, "gradient"], (24 * 4, 24 * 4 * boundary))
        self.assertEqual({key[2] for key in traffic}, {"activation", "gradient", "control"})
        sent = sum(json.loads(line)["sent_bytes"] for line in (run / "records/rank-1.jsonl").read_text().splitlines())
        of_rank_1 = sum(row[1] for key, row in traffic.items() if key[0] == 1)
        self.assertLessEqual(sent, of_rank_1)
        self.assertGreater(sent, 24 * 4 * boundary)

        # The trace ties every send to its receive; validation and checkpoint are in it.
        events = json.loads((run / "trace.json").read_text())["traceEvents"]
        slices = [event for event in events if event["ph"] == "X"]
        self.assertLessEqual({"validation", "checkpoint"}, {event["name"] for event in slices})
        flows = {}
        for event in events:
            if event["ph"] in "stf":
                flows.setdefault(event["id"], []).append(event)
        sends = [event for event in slices if "SEND" in event["name"]]
        self.assertEqual(len(sends), 4 * 2 * 4)  # steps x directions x micro-batches
        self.assertEqual(len(flows), len(sends))

        def at(event):
            return [s["name"] for s in slices if s["tid"] == event["tid"] and s["ts"] <= event["ts"] < s["ts"] + s["dur"]]

        for flow in flows.values():
            self.assertEqual([event["ph"] for event in flow], ["s", "t", "t", "f"])
            (send,), (receive,) = at(flow[1]), at(flow[2])
            stage, kind, micro_batch = re.fullmatch(r"(\d+)SEND_([FB])(\d+)", send).groups()
            self.assertEqual(receive, f"{int(stage) + (1 if kind == 'F' else -1)}RECV_{kind}{micro_batch}")

        # What the layers cost over the run, as a simulation and emulated ranks read it.
        trace = run / "load-trace.jsonl"
        self.assertEqual([json.loads(line)["step"] for line in trace.read_text().splitlines()[1:]], [0, 10, 20])
        emulated = self.run_command([DYNMO, "train", "--out", str(self.folder / "again"), "-n", "2", "--steps", "4", *settings(
            ["run.device=emulated", f"emulated.trace={trace}", "train.validation_every=0", "pipeline.pin=false"])])
        self.assertEqual(emulated.returncode, 0, emulated.stderr)
        self.assertIn("EMULATED", emulated.stdout)

        # Resumed when nothing is left to do, a run keeps what it said at its end.
        nothing = self.run_command([DYNMO, "train", "--config", str(run / "config.toml"), "--resume", "-n", "2"])
        self.assertEqual(nothing.returncode, 0, nothing.stderr)
        self.assertIn("nothing left to do", nothing.stdout)
        self.assertEqual(json.loads((run / "summary.json").read_text()), summary)

    def test_of_what_is_no_run(self):
        self.assert_error(self.run_command([DYNMO, "report", "nowhere"]), 2, "nowhere/summary.json")


class Families(Case):
    """Both families by the command line: train, hand to transformers and take back, start from weights."""

    FAMILIES = {"llama": ["model.tied_embeddings=true"], "gpt2": ["model.family=gpt2", "model.positions=24"]}

    @classmethod
    def setUpClass(cls):
        super().setUpClass()
        for family, extra in cls.FAMILIES.items():
            subprocess.run([DYNMO, "train", "--data", str(cls.data), "--out", str(cls.folder / family), *settings([*TINY, *extra]),
                            "-n", "2", "--steps", "20", *settings(["checkpoint.every=20", "optimizer.learning_rate=1e-2"])],
                           check=True, timeout=240, capture_output=True)

    def start(self, family, init, run, *extra):
        return self.command("-n", "2", "--steps", "4", run=run,
                            extra=[*self.FAMILIES[family], f"train.init={init}", *extra])

    def test_exported_and_imported_weights_start_the_same_run(self):
        for family in self.FAMILIES:
            exported, imported = self.folder / f"{family}-hf", self.folder / f"{family}-imported"
            for words in (["export-hf", self.folder / family, "--out", exported], ["import-hf", exported, imported]):
                done = self.run_command([DYNMO, "checkpoint", *map(str, words)])
                self.assertEqual(done.returncode, 0, done.stderr)
            data = (exported / "model.safetensors").read_bytes()
            self.assertNotIn(b"lm_head.weight", data[:8 + int.from_bytes(data[:8], "little")])
            found = {}
            for source in (family, exported.name, imported.name):
                done = self.run_command(self.start(family, self.folder / source, f"from-{source}"))
                self.assertEqual(done.returncode, 0, done.stdout + done.stderr)
                self.assertIn("weights  of", done.stdout)
                found[source] = losses(self.folder / f"from-{source}")
            self.assertEqual(found[family], found[exported.name])
            self.assertEqual(found[family], found[imported.name])
            # It goes on from what was learned.
            self.assertLess(found[family][0], losses(self.folder / family)[0] - 0.5)
            words = ["--prompt", "line 1", "--tokens", "8"]  # not beyond the shortest of their longest inputs
            texts = {self.run_command([DYNMO, "generate", str(self.folder / source), *words]).stdout
                     for source in (family, exported.name, imported.name)}
            self.assertEqual(len(texts), 1, texts)
            self.assert_error(self.run_command(self.command("-n", "2", "--resume", run=imported.name)), 2, "train.init")
            self.assert_error(self.run_command([DYNMO, "checkpoint", "import-hf", str(exported), str(imported)]), 2,
                              "has checkpoints already")

    def test_weights_of_another_decoder(self):
        gpt2 = self.folder / "gpt2"
        self.assert_error(self.run_command(self.start("gpt2", gpt2, "wrong", "model.hidden=64")), 2, "train.init", "model.hidden")
        self.assert_error(self.run_command(self.start("llama", gpt2, "wrong")), 2, "train.init", "model.family = gpt2")
        self.assert_error(self.run_command(self.start("gpt2", self.folder / "nowhere", "wrong")), 4, "train.init", "nowhere")

    def test_a_family_that_does_not_exist(self):
        self.assert_error(self.run_command(self.command("--set", "model.family=gpt-2")), 2, "model.family", "gpt2")
        self.assert_error(self.run_command(self.command("--set", "model.familly=gpt2")), 2, "model.family")

    def test_freezing_with_tied_embeddings(self):
        frozen = self.command("--set", "model.family=gpt2", "--set", "freezing.enabled=true")
        self.assert_error(self.run_command(frozen), 2, "tied_embeddings")

    def test_tokens_in_and_out(self):
        run = str(self.folder / "gpt2")
        done = self.run_command([DYNMO, "generate", run, "--prompt-tokens", "108,105", "--tokens", "5"])
        self.assertEqual(done.returncode, 0, done.stderr)
        self.assertEqual(len(done.stdout.split()), 5)
        self.assert_error(self.run_command([DYNMO, "generate", run]), 2, "--prompt-tokens")
        self.assert_error(self.run_command([DYNMO, "generate", run, "--prompt-tokens", "999"]), 2, "999")
        self.assert_error(self.run_command([DYNMO, "generate", run, "--prompt-tokens", ""]), 2, "--prompt-tokens")
        self.assert_error(self.run_command([DYNMO, "generate", run, "--prompt", "a", "--seed", "-1"]), 2, "--seed")


class SentencePiece(Case):
    """A model whose tokens are pieces of words, and shards that say nothing of themselves."""

    TRAIN = ["--steps", "25", "-n", "2", *settings(TINY), *settings(["checkpoint.every=25", "optimizer.learning_rate=1e-2"])]

    def dynmo(self, *words):
        return self.run_command([DYNMO, *map(str, words)])

    def test_a_model_continues_text_and_validates(self):
        words = ["data", "prepare", self.folder / "corpus", "--out", "pieces", "--validation", "0.2", "--tokenizer", "sentencepiece"]
        made = self.dynmo(*words, "--vocab", 290)
        self.assertEqual(made.returncode, 0, made.stderr)
        done = self.dynmo("train", "--data", "pieces", "--out", "run", *self.TRAIN, "--set", "train.validation_every=25")
        self.assertEqual(done.returncode, 0, done.stderr)
        self.assertIn("validation loss", done.stdout)
        prompt = "line 3 of été 🎉"
        spoken = [self.dynmo("generate", "run", "--prompt", prompt, "--tokens", 30, *more)
                  for more in ([], ["--tokenizer", "pieces/tokenizer.model"], ["--temperature", 3, "--seed", 4])]
        for result in spoken:
            self.assertEqual(result.returncode, 0, result.stderr)
            self.assertTrue(result.stdout.startswith(prompt), result.stdout)  # decoded as UTF-8 by this test
            self.assertGreater(len(result.stdout), len(prompt) + 10)
        self.assertEqual(spoken[0].stdout, spoken[1].stdout)
        words[words.index("pieces")] = "larger"
        self.assertEqual(self.dynmo(*words, "--vocab", 294).returncode, 0)
        self.assert_error(self.dynmo("generate", "run", "--prompt", "a", "--tokenizer", "larger"), 2, "vocabulary of 294", "290")
        (self.folder / "pieces").rename(self.folder / "moved")
        self.assert_error(self.dynmo("generate", "run", "--prompt", "a"), 2, "--tokenizer")
        again = self.dynmo("generate", "run", "--prompt", prompt, "--tokens", 30, "--tokenizer", "moved")
        self.assertEqual(again.stdout, spoken[0].stdout)

    def test_shards_without_description_train_to_the_same_numbers(self):
        done = self.dynmo("train", "--data", self.data, "--out", "described", *self.TRAIN)
        self.assertEqual(done.returncode, 0, done.stderr)
        bare = self.folder / "bare"
        bare.mkdir()
        for ending in (".bin", ".idx"):
            shutil.copy(self.data / f"train{ending}", bare / f"part{ending}")
        for number, path in enumerate((bare, bare / "part")):
            done = self.dynmo("train", "--data", path, "--out", f"bare-{number}", *self.TRAIN, "--set", "data.vocabulary=257")
            self.assertEqual(done.returncode, 0, done.stderr)
            self.assertEqual(losses(self.folder / f"bare-{number}"), losses(self.folder / "described"))
        train = ["train", "--data", bare / "part", "--out", "x", *self.TRAIN]
        self.assert_error(self.dynmo(*train), 2, "data.vocabulary is not set")
        validated = [*train, "--set", "data.vocabulary=257", "--set", "train.validation_every=25"]
        self.assert_error(self.dynmo(*validated), 2, "data.validation_path is not set")
        done = self.dynmo(*validated, "--set", f"data.validation_path={self.data}/validation")
        self.assertIn("validation loss", done.stdout, done.stderr)
        self.assert_error(self.dynmo("train", "--data", self.data, "--out", "x", *self.TRAIN, "--set", "data.vocabulary=9"), 2,
                          "data.vocabulary is 9", "257")


class CustomLayer(Case):
    REPOSITORY = pathlib.Path(__file__).resolve().parents[2]

    def test_the_example_trains(self):
        run = self.folder / "primer"
        result = self.run_command([os.environ["CUSTOM_LAYER"], str(self.data), str(run)])
        self.assertEqual(result.returncode, 0, result.stdout + result.stderr)
        values = list(losses(run).values())
        self.assertEqual(len(values), 30)
        self.assertLess(sum(values[-5:]) / 5, 0.8 * values[0])

    def test_the_page_shows_the_code_that_runs(self):
        source = (self.REPOSITORY / "examples" / "custom_layer.cpp").read_text()
        page = (self.REPOSITORY / "docs" / "custom-layer.md").read_text()
        blocks = re.findall(r"```cpp\n(.*?)```", page, re.DOTALL)
        self.assertEqual(len(blocks), 3)
        for block in blocks:
            flat = re.sub(r"\s+", " ", source)
            self.assertIn(re.sub(r"\s+", " ", block).strip(), flat)


if __name__ == "__main__":
    unittest.main()
