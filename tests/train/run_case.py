# SPDX-License-Identifier: Apache-2.0
"""What tests of `dynmo train` share: prepared text, a tiny model, the ranks that a run has started."""
import contextlib
import json
import os
import pathlib
import random
import shutil
import signal
import subprocess
import tempfile
import time

from program import DYNMO, ProgramCase

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


class RunCase(ProgramCase):
    """The tests of a class share a folder with prepared text."""

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
        emulated = "run.device=emulated" in extra  # has the layers of its costs
        base = [value for value in TINY if not emulated or value.startswith("model.sequence") or not value.startswith("model.")]
        return [DYNMO, "train", "--data", str(self.data), "--out", str(self.folder / run), *settings(base),
                *settings(extra), *words]

    def hunt(self, extra, ranks=2):
        """Kills a rank at a random moment behind each of four checkpoints, and resumes; a run of its own that nobody kills has the same
        digests. What is listed verifies every time. The folder of the hunted run; the other's is `steady`."""
        self.succeed(self.command("-n", str(ranks), run="steady", extra=extra))
        run = self.folder / "hunted"
        seed = 7
        draw = random.Random(seed)

        def committed():
            return max((path.name for path in (run / "checkpoints").glob("step-*[0-9]")), default="")

        killed = 0
        for _ in range(4):
            before = committed()
            words = ["-n", str(ranks), *(["--resume"] if before else [])]
            process = subprocess.Popen(self.command(*words, run="hunted", extra=extra), cwd=self.folder, stdout=subprocess.DEVNULL,
                                       stderr=subprocess.PIPE, text=True, stdin=subprocess.DEVNULL)
            deadline = time.monotonic() + 120
            while process.poll() is None and committed() <= before:
                self.assertLess(time.monotonic(), deadline, "no checkpoint")
                time.sleep(0.002)
            time.sleep(draw.uniform(0, 0.05))
            found = [pid for pid, line in rank_processes(str(run)) if pid != process.pid]
            with contextlib.suppress(ProcessLookupError):  # it may end just now
                if found:
                    os.kill(draw.choice(sorted(found)), signal.SIGKILL)
            errors = process.communicate(timeout=120)[1]
            if process.returncode != 0:  # else it had ended before
                killed += 1
                self.assertEqual(process.returncode, 5, f"seed {seed}: {errors}")
                self.assertRegex(errors, "rank [0-9] was killed by signal 9", f"seed {seed}")
            self.succeed([DYNMO, "checkpoint", "verify", str(run)])
        self.assertGreater(killed, 0, f"seed {seed}")
        self.succeed(self.command("-n", str(ranks + 1), "--resume", run="hunted", extra=extra))
        self.assertEqual(digests(newest_manifest(run)), digests(newest_manifest(self.folder / "steady")))
        return run


class SourceCase(RunCase):
    """A source of dynamism as a user meets it. A class has its TABLE and the SETTINGS of its runs, which end at STEPS."""
    TABLE = ""
    SETTINGS = ()
    STEPS = 12

    def figures(self, run, table=""):
        """Of the class's source, or of another one, by step."""
        lines = (self.folder / run / "records" / "rank-0.jsonl").read_text().splitlines()
        return {record["step"]: record["sources"][table or self.TABLE] for record in map(json.loads, lines)}

    def train(self, run, ranks, *extra, words=()):
        return self.succeed(self.command("-n", str(ranks), *words, run=run, extra=(*self.SETTINGS, *extra)))

    def generate(self, run):
        return self.run_command([DYNMO, "generate", str(self.folder / run), "--prompt", "line 1", "--tokens", "24"])

    def assert_generates(self, *runs):
        """The same text of each."""
        self.assertEqual(len({self.succeeded(self.generate(run)).stdout for run in runs}), 1)

    def assert_generates_and_is_not_exported(self, **runs):
        """Each run has settings of its own."""
        for run, extra in runs.items():
            self.train(run, 1, *extra)
            self.assert_generates(run)
            self.assert_error(self.run_command(self.export(run)), 2, f"{self.TABLE}.enabled", "dense model")

    def assert_survives_kills(self, *extra, step):
        """As hunt() says; the figures of a step are the same, too."""
        self.hunt((*self.SETTINGS, *extra))
        self.assertEqual(self.figures("hunted")[step], self.figures("steady")[step])

    def export(self, run, folder="hf"):
        return [DYNMO, "checkpoint", "export-hf", str(self.folder / run), "--out", str(self.folder / folder)]

    def assert_all_refused(self, *cases):
        """Each has settings, and words of the line that refuses them, as `dynmo config` says it before any run."""
        for extra, *words in cases:
            self.assert_error(self.run_program("config", *settings((*TINY, "pipeline.ranks=2", *self.SETTINGS, *extra.split()))), 2, *words)

    def assert_same_run(self, run, reference):
        self.assertEqual(losses(self.folder / run), losses(self.folder / reference))
        self.assertEqual(digests(newest_manifest(self.folder / run)), digests(newest_manifest(self.folder / reference)))

    def assert_same_on_any_ranks(self, *extra, alone=("pipeline.recompute=whole",)):
        """On two ranks, on one with the settings `alone`, and on three after a restart. Returns what two say, and their figures."""
        shown, found = self.train("two", 2, *extra), self.figures("two")
        self.train("one", 1, *extra, *alone)
        self.assert_same_run("one", "two")
        self.assertEqual(self.figures("one"), found)
        self.assert_resumes("two", "three", 3, *extra)
        return shown.stdout + shown.stderr, found

    def go_back(self, reference, run):
        """Copies a run without its last checkpoint."""
        shutil.copytree(self.folder / reference, self.folder / run)
        shutil.rmtree(self.folder / run / "checkpoints" / f"step-{self.STEPS:08d}")

    def assert_resumes(self, reference, run, ranks, *extra):
        """Without its last checkpoint, on other ranks, to the same end."""
        self.go_back(reference, run)
        self.train(run, ranks, *extra, words=("--resume",))
        self.assert_same_run(run, reference)
