# SPDX-License-Identifier: Apache-2.0
"""What a new user meets in the first hour: stopping, continuing and repeating a run, and what it shows meanwhile."""
import contextlib
import fcntl
import os
import pathlib
import pty
import re
import select
import shutil
import signal
import struct
import subprocess
import sys
import termios
import time

from program import DYNMO, held_port
from run_case import RunCase, losses, newest_manifest, rank_processes

REPOSITORY = pathlib.Path(__file__).resolve().parents[2]
LIMIT = 120  # seconds for anything to happen: bounds a hang, decides nothing
LONG = ("train.steps=100000",)


def content(folder):
    """Every file of a folder, and when it was written."""
    return {path: (path.stat().st_mtime_ns, path.read_bytes()) for path in sorted(folder.rglob("*")) if path.is_file()}


class Case(RunCase):
    def done(self, *words, run, extra=()):
        return self.succeed(self.command("-n", "2", *words, run=run, extra=extra))

    def start(self, *words, run, extra=(), **options):
        process = subprocess.Popen(self.command("-n", "2", *words, run=run, extra=extra), stdout=subprocess.PIPE, stderr=subprocess.PIPE,
                                   stdin=subprocess.DEVNULL, text=True, cwd=self.folder, **options)
        self.addCleanup(process.kill)
        self.wait_for_step(process, run)
        return process

    def wait_for_step(self, process, run):
        records = self.folder / run / "records" / "rank-0.jsonl"
        deadline = time.monotonic() + LIMIT
        while not records.exists() or '"step":2' not in records.read_text():
            self.assertLess(time.monotonic(), deadline)
            self.assertIsNone(process.poll(), "ended too early")
            time.sleep(0.02)


class Stop(Case):
    """A run that is asked to end writes a checkpoint, says how to go on, and ends with 130."""

    def stopped(self, run, number, *, extra=(), ask=None):
        process = self.start(run=run, extra=(*LONG, *extra))
        (ask or (lambda: process.send_signal(number)))()
        out, err = process.communicate(timeout=LIMIT)
        self.assertEqual(process.returncode, 130, out + err)
        steps = len(losses(self.folder / run))
        self.assertEqual(newest_manifest(self.folder / run)["step"], steps)
        self.assertIn(f"stopped before step {steps} of 100000", out)
        self.assertEqual(err.splitlines(), [f"dynmo: interrupted at step {steps} of 100000; checkpoint of step {steps}; continue with: "
                                            f"dynmo train --config {self.folder / run}/config.toml --resume"])
        self.assertEqual(rank_processes(str(self.folder / run)), [])
        return steps

    def test_by_sigterm_and_by_slurms_warning(self):
        for name, number in (("term", signal.SIGTERM), ("usr1", signal.SIGUSR1)):
            with self.subTest(signal=name):
                steps = self.stopped(name, number, extra=("checkpoint.every=0",))
                resumed = self.run_command(self.command("-n", "1", "--resume", run=name, extra=(f"train.steps={steps}",)))
                self.assert_error(resumed, 2, "train.steps is", "the run's is 100000")

    def test_also_where_the_checkpoint_of_that_step_is_written_already(self):
        self.stopped("every", signal.SIGTERM, extra=("checkpoint.every=1",))

    def test_by_a_signal_to_one_rank(self):
        def ask():
            found = rank_processes(str(self.folder / "one"))
            launcher = min(pid for pid, _ in found)
            os.kill(max(pid for pid, _ in found if pid != launcher), signal.SIGTERM)

        self.stopped("one", None, ask=ask)

    def test_a_comparison_ends_without_one(self):
        run = self.folder / "pair"
        process = subprocess.Popen(self.command("-n", "2", "--compare", "static,balanced", run="pair", extra=LONG), stdout=subprocess.PIPE,
                                   stderr=subprocess.PIPE, stdin=subprocess.DEVNULL, text=True, cwd=self.folder)
        self.addCleanup(process.kill)
        self.wait_for_step(process, "pair/balanced")
        process.send_signal(signal.SIGTERM)
        _, err = process.communicate(timeout=LIMIT)
        self.assertEqual(process.returncode, 130, err)
        self.assertIn("a comparison starts at step 0 again", err)
        self.assertEqual(list(run.rglob("checkpoints")), [])

    def test_the_batch_script_of_slurm(self):
        """Its body with programs of the same names: `srun` starts two ranks here and passes SIGUSR1 on, `scontrol` notes what it is asked."""
        script = REPOSITORY / "examples" / "slurm" / "train.sbatch"
        self.assertEqual(subprocess.run(["bash", "-n", script], capture_output=True).returncode, 0)
        text = script.read_text()
        self.assertIn("#SBATCH --signal=USR1@", text)
        page = (REPOSITORY / "docs" / "clusters.md").read_text()
        self.assertIn(text[text.index("#SBATCH --signal"):text.index("#SBATCH --requeue")].strip(), page)
        programs = self.folder / "programs"
        programs.mkdir()
        (programs / "dynmo").symlink_to(DYNMO)
        (programs / "scontrol").write_text('#!/bin/bash\necho "$@" >> asked\n')
        (programs / "srun").write_text(
            f"#!{sys.executable}\n"
            "import os, signal, subprocess, sys\n"
            "ranks = [subprocess.Popen(sys.argv[1:], env={**os.environ, 'SLURM_PROCID': str(r), 'SLURM_LOCALID': str(r), 'SLURM_STEP_NUM_TASKS': '2'})\n"
            "         for r in range(2)]\n"
            "signal.signal(signal.SIGUSR1, lambda *_: [rank.send_signal(signal.SIGUSR1) for rank in ranks])\n"
            "open('srun.pid', 'w').write(str(os.getpid()))\n"
            "sys.exit(max(rank.wait() for rank in ranks))\n")
        for name in ("scontrol", "srun"):
            (programs / name).chmod(0o755)
        (self.folder / "run.toml").write_text("")
        keys = self.command()[6:]
        with held_port() as port:
            env = {**os.environ, "PATH": f"{programs}:{os.environ['PATH']}", "DATA": str(self.data), "OUT": str(self.folder / "job"), "SLURM_JOB_ID": "7",
                   "SLURM_STEP_ID": "0", "SLURM_JOB_NODELIST": "localhost", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
            first = subprocess.Popen(["bash", script, *keys, "--train.steps", "100000"], env=env, cwd=self.folder, stdout=subprocess.PIPE,
                                     stderr=subprocess.STDOUT, stdin=subprocess.DEVNULL, text=True)
            self.addCleanup(first.kill)
            self.wait_for_step(first, "job")
            os.kill(int((self.folder / "srun.pid").read_text()), signal.SIGUSR1)
            out = first.communicate(timeout=LIMIT)[0]
            self.assertEqual(first.returncode, 130, out)
            self.assertEqual((self.folder / "asked").read_text(), "requeue 7\n")
            steps = newest_manifest(self.folder / "job")["step"]
            again = subprocess.Popen(["bash", script, *keys, "--train.steps", "100000"], env=env, cwd=self.folder, stdout=subprocess.PIPE,
                                     stderr=subprocess.STDOUT, stdin=subprocess.DEVNULL, text=True)
            self.addCleanup(again.kill)
            self.assertIn(f"resume   step {steps} of 100000", self.read_until(again.stdout, "resume   step"))
            again.kill()
            os.kill(int((self.folder / "srun.pid").read_text()), signal.SIGKILL)
            for pid, _ in rank_processes(str(self.folder / "job")):
                with contextlib.suppress(ProcessLookupError):  # it may have ended with them
                    os.kill(pid, signal.SIGKILL)
            again.communicate(timeout=LIMIT)

    def read_until(self, stream, word):
        for line in stream:
            if word in line:
                return line
        self.fail(f"no line with {word}")


class Repeat(Case):
    def test_a_run_is_overwritten_only_by_name(self):
        run = self.folder / "finished"
        self.done(run="finished", extra=("train.steps=8",))
        before = content(run)
        for words, extra in (((), ("train.steps=9",)), (("--compare", "static,balanced"), ("train.steps=9",)), ((), ("train.steps=9", "checkpoint.every=3"))):
            refused = self.run_command(self.command("-n", "2", *words, run="finished", extra=extra))
            self.assert_error(refused, 2, f"'{run}' holds an earlier run", "--resume", "another --out", "--overwrite")
            self.assertEqual(content(run), before)
        with held_port() as port:
            as_rank = {"RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
            self.assert_error(self.run_command(self.command(run="finished"), env=as_rank), 2, "holds an earlier run")
        self.assertEqual(content(run), before)
        self.succeed(self.command("--dry-run", run="finished"))
        self.assertEqual(content(run), before)

    def test_overwriting_removes_the_whole_earlier_run_and_nothing_else(self):
        run = self.folder / "first"
        self.succeed(self.command("-n", "3", run="first", extra=("train.steps=8", "checkpoint.every=4")))
        (run / "notes.txt").write_text("mine")
        self.assertTrue((run / "records" / "rank-2.jsonl").exists())
        done = self.done("--overwrite", run="first", extra=("train.steps=5",))
        self.assertIn(f"removed  the earlier run in '{run}'", done.stdout)
        self.assertEqual((run / "notes.txt").read_text(), "mine")
        self.assertFalse((run / "checkpoints").exists() or (run / "records" / "rank-2.jsonl").exists())
        self.assertEqual(len(losses(run)), 5)
        both = self.run_command(self.command("--overwrite", "--resume", run="first"))
        self.assert_error(both, 2, "--overwrite with --resume")

    def test_resume_auto_begins_a_run_without_checkpoints_again_and_says_so(self):
        self.done(run="bare", extra=("train.steps=4",))
        again = self.done("--resume", "auto", run="bare", extra=("train.steps=4",))
        self.assertIn("removed  the earlier run in", again.stdout)


class Continue(Case):
    SETTINGS = ("train.steps=8", "checkpoint.every=4", "checkpoint.keep=9")

    def test_a_key_that_differs_is_named(self):
        self.done(run="named", extra=self.SETTINGS)
        before = content(self.folder / "named")
        for setting, says in (("train.seed=7", "train.seed is 7, the run's is "), ("model.hidden=64", "model.hidden is 64, the run's is 32"),
                              ("freezing.enabled=true", "freezing.enabled is true, the run's is false"),
                              ("batch.accumulation=2", "pipeline.replicas x batch.accumulation x batch.micro_batches is 8, the run's is 4"),
                              ("optimizer.learning_rate=1", "optimizer.learning_rate is 1.0, the run's is "),
                              ("train.steps=6", "train.steps is 6, the run's is 8")):
            with self.subTest(setting=setting):
                result = self.run_command(self.command("-n", "2", "--resume", run="named", extra=(*self.SETTINGS, setting)))
                self.assert_error(result, 2, says, "config.toml")
        self.assertEqual(content(self.folder / "named"), before)

    def test_a_finished_run_is_left_as_it_is(self):
        self.done(run="over", extra=self.SETTINGS)
        before = content(self.folder / "over")
        again = self.done("--resume", run="over", extra=self.SETTINGS)
        self.assertIn("all 8 steps of the run are done", again.stdout)
        self.assertNotIn("tokens/s", again.stdout)
        self.assertEqual(content(self.folder / "over"), before)

    def test_steps_may_grow_once_a_run_has_finished(self):
        for extra in ((), ("freezing.enabled=true", "freezing.every=2"), ("pruning.enabled=true", "pruning.start=2", "pruning.end=6", "pruning.every=2")):
            name = f"grown-{len(extra)}"
            with self.subTest(extra=extra):
                self.done(run=name, extra=(*self.SETTINGS, *extra))
                self.done("--resume", run=name, extra=(*self.SETTINGS, *extra, "train.steps=12"))
                self.assertEqual(sorted(losses(self.folder / name)), list(range(12)))
                self.assertEqual(newest_manifest(self.folder / name)["step"], 12)
        # Of one that has not finished its learning rates would change on the way.
        shutil.rmtree(self.folder / "grown-0" / "checkpoints" / "step-00000012")
        shutil.rmtree(self.folder / "grown-0" / "checkpoints" / "step-00000008")
        refused = self.run_command(self.command("--resume", run="grown-0", extra=(*self.SETTINGS, "train.steps=20")))
        self.assert_error(refused, 2, "train.steps is 20, the run's is 8", "step 4 is the newest")


class Screen(Case):
    def test_no_line_of_progress_is_as_wide_as_the_terminal(self):
        main, other = pty.openpty()
        self.addCleanup(os.close, main)

        def resize(columns):
            fcntl.ioctl(other, termios.TIOCSWINSZ, struct.pack("HHHH", 24, columns, 0, 0))

        resize(50)
        process = subprocess.Popen(self.command("-n", "2", run="narrow", extra=LONG), stdout=other, stderr=subprocess.DEVNULL, stdin=subprocess.DEVNULL,
                                   cwd=self.folder)
        self.addCleanup(process.kill)
        seen = b""

        def rows():
            nonlocal seen
            if select.select([main], [], [], 0.1)[0]:
                seen += os.read(main, 1 << 16)
            return rows_of(seen)

        while len(rows()) < 5:
            self.assertIsNone(process.poll())
        wide = len(rows())
        resize(30)
        while len(rows()) < wide + 8:
            self.assertIsNone(process.poll())
        process.send_signal(signal.SIGINT)
        while process.poll() is None:
            rows()
        os.close(other)
        shown = [len(row.split(b"\r")[0].split(b"\n")[0]) for row in rows_of(seen)]
        self.assertLessEqual(max(shown), 49)
        self.assertLessEqual(max(shown[wide + 2:]), 29)
        self.assertEqual(min(shown), 29)

    def test_a_file_gets_lines_with_the_time(self):
        said = self.done(run="file", extra=("train.steps=40",)).stdout
        lines = re.findall(r"(?m)^step +\d+/40 .*  \d\d:\d\d:\d\d$", said)
        self.assertEqual(len(lines), 20, said)
        self.assertIn(" left  ", lines[0])

    def test_plain_characters_where_the_locale_has_no_others(self):
        words = self.command("-n", "2", "--compare", "static,balanced", run="plain", extra=("train.steps=30",))
        for env, plain in (({"LC_ALL": "C"}, True), ({"LC_ALL": "C.UTF-8"}, False)):
            result = subprocess.run([*words, "--overwrite"], capture_output=True, timeout=LIMIT, stdin=subprocess.DEVNULL, cwd=self.folder,
                                    env={**os.environ, **env})
            self.assertEqual(result.returncode, 0, result.stderr)
            report = subprocess.run([DYNMO, "report", str(self.folder / "plain")], capture_output=True, env={**os.environ, **env}, timeout=LIMIT)
            for text in (result.stdout, report.stdout):
                self.assertEqual(text.isascii(), plain, text)


def rows_of(seen):
    return [row for row in seen.split(b"\r\x1b[K") if row.startswith(b"step ")]


class Tokenizer(Case):
    def test_another_one_in_the_same_folder_is_an_error_and_an_export_has_its_own(self):
        prepare = ["data", "prepare", "corpus", "--out", "pieces", "--held-out", "0.1", "--tokenizer"]
        self.succeeded(self.run_program(*prepare, "sentencepiece", "--vocabulary", 290))
        self.succeeded(self.run_program("train", "--data", "pieces", "--out", "spoken", "-n", 2, *self.command(extra=("train.steps=4", "checkpoint.every=4"))[6:]))
        exported = self.run_program("checkpoint", "export-hf", "spoken", "--out", "exported")
        self.assertEqual((exported.returncode, exported.stderr), (0, ""))
        self.assertIn("tokenizer.model", exported.stdout)
        self.assertEqual((self.folder / "exported/tokenizer.model").read_bytes(), (self.folder / "pieces/tokenizer.model").read_bytes())
        self.succeeded(self.run_program("generate", "exported", "--prompt", "line 3", "--tokens", 4))

        self.succeeded(self.run_program(*prepare, "bytes", "--overwrite"))
        self.assert_error(self.run_program("generate", "spoken", "--prompt", "line 3"), 2, "'pieces' have another tokenizer now", "--tokenizer")
        without = self.succeeded(self.run_program("checkpoint", "export-hf", "spoken", "--out", "without"))
        self.assertIn("no tokenizer is exported: the data 'pieces' have another tokenizer now", without.stderr)
        self.assertEqual(sorted(path.name for path in (self.folder / "without").iterdir()), ["config.json", "model.safetensors"])
