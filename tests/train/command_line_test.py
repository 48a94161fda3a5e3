# SPDX-License-Identifier: Apache-2.0
"""The command line as a user meets it: bad input, resume after SIGKILL, a rank that dies.

DYNMO is the program, FAULT_PROGRAM one that kills a rank at a scripted message. Every wait is bounded.
"""
import json
import os
import pathlib
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

    def test_unknown_flag_and_run_name(self):
        self.assert_error(self.run_command(self.command("--rank", "3")), 2, "--rank")
        self.assert_error(self.run_command(self.command("--compare", "static,balancd")), 2, "balancd", "balanced")

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
    """A rank killed in forward, in backward, in the middle of migrating a 64 MiB layer; with and without our launcher."""

    RANKS = 3

    def start(self, where, victim, run, launcher):
        words = [FAULT_PROGRAM, where, str(victim), str(self.data), str(run)]
        if launcher:
            return [subprocess.Popen([*words, "launch"], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
                                     stdin=subprocess.DEVNULL)]
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = free.getsockname()[1]
        processes = []
        for rank in range(self.RANKS):
            env = {**os.environ, "RANK": str(rank), "WORLD_SIZE": str(self.RANKS), "MASTER_ADDR": "127.0.0.1",
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
