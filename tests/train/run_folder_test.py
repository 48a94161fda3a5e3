# SPDX-License-Identifier: Apache-2.0
"""The folder of a run: one run at a time, disks that are full, what an interrupted run leaves."""
import os
import shlex
import signal
import socket
import subprocess
import time
import urllib.request

import event_files
from program import held_port
from run_case import RunCase, losses, rank_processes


class RunFolder(RunCase):
    def start(self, run, *words, extra=()):
        return subprocess.Popen(self.command("-n", "2", *words, run=run, extra=("train.steps=100000", *extra)),
                                stdout=subprocess.PIPE, stderr=subprocess.PIPE, stdin=subprocess.DEVNULL, cwd=self.folder,
                                text=True)

    def wait_until(self, holds, process=None):
        """Looks again and again; `process` is to run meanwhile."""
        deadline = time.monotonic() + 100
        while not holds():
            self.assertLess(time.monotonic(), deadline)
            self.assertTrue(process is None or process.poll() is None, "ended too early")
            time.sleep(0.02)

    def wait_for(self, process, path, text=""):
        self.wait_until(lambda: path.exists() and text in path.read_text(), process)

    def resume(self, run):
        """A resumed run that has done a step."""
        records = self.folder / run / "records" / "rank-1.jsonl"
        size = records.stat().st_size
        process = self.start(run, "--resume", extra=("checkpoint.every=5",))
        self.wait_until(lambda: records.stat().st_size > size, process)
        return process

    def interrupt(self, process):
        process.send_signal(signal.SIGINT)
        _, err = process.communicate(timeout=100)
        self.assertEqual(process.returncode, 130, err)
        return err

    def test_metrics_are_those_of_the_records_after_a_restart_too(self):
        run = self.folder / "metrics"
        extra = ("run.tensorboard=true", "run.prometheus=true", "checkpoint.every=5", "train.steps=60")
        process = self.start("metrics", extra=extra)
        self.wait_for(process, run / "records" / "rank-0.jsonl", '"step":7')
        process.send_signal(signal.SIGINT)
        process.communicate(timeout=100)
        self.succeed(self.command("-n", "2", "--resume", "auto", run="metrics", extra=extra))
        found = event_files.scalars(run / "tensorboard")
        records = losses(run)
        self.assertEqual(sorted(found["loss_metrics/global_avg_loss"]), list(range(60)))
        for step, loss in found["loss_metrics/global_avg_loss"].items():
            self.assertAlmostEqual(loss, records[step], places=5)
        self.assertEqual(set(found["dynmo/ranks"].values()), {2})
        for rank in range(2):
            self.assertEqual(sorted(event_files.scalars(run / "tensorboard" / f"rank-{rank}")["dynmo/busy_s"]), list(range(60)))
        text = (run / "metrics" / "rank-0.prom").read_text()
        self.assertRegex(text, r'(?m)^dynmo_step\{run="[^"]*"\} 59$')
        self.assertRegex(text, r'(?m)^dynmo_busy_seconds\{run="[^"]*",rank="0"\} [0-9.e-]+$')

    def test_the_leader_serves_metrics_while_it_trains(self):
        run = self.folder / "served"
        with held_port() as port:
            process = self.start("served", extra=(f"run.metrics_port={port}", "run.peak_flops=1e9"))
            self.wait_for(process, run / "records" / "rank-0.jsonl", '"step":2')
            with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=60) as answer:
                text = answer.read().decode()
            process.send_signal(signal.SIGINT)
            _, err = process.communicate(timeout=100)
        self.assertEqual(process.returncode, 130, err)
        for name in ("dynmo_loss", "dynmo_step", "dynmo_tflops_per_rank", "dynmo_mfu_percent"):
            self.assertRegex(text, rf'(?m)^{name}\{{run="[^"]*"\}} [0-9.e+-]+$')

    def test_a_port_for_metrics_that_is_in_use_is_a_line(self):
        with socket.create_server(("127.0.0.1", 0)) as taken:
            port = taken.getsockname()[1]
            extra = (f"run.metrics_port={port}", "train.steps=3", "run.peak_flops=1e9", "mixture_of_depths.enabled=true")
            result = self.run_command(self.command("-n", "2", run="unserved", extra=extra))
        said = result.stdout + result.stderr
        self.assertEqual(result.returncode, 0, said)
        self.assertEqual(said.count(f"metrics  no metrics at 127.0.0.1: port {port} on 127.0.0.1 is in use: end the program"), 1, said)
        self.assertRegex(said, r"step +3/3 .*  memory [0-9.]+ .iB  MFU [0-9.]+ % \(of dense products\)")

    def test_a_killed_launcher_takes_its_ranks_along(self):
        run = self.folder / "left"
        process = self.start("left")
        self.addCleanup(process.communicate)
        self.wait_for(process, run / "records" / "rank-1.jsonl", '"step":2')
        process.kill()
        process.wait()
        self.wait_until(lambda: not rank_processes(str(run)))

    def test_a_second_run_is_refused_until_the_first_has_ended(self):
        run = self.folder / "locked"
        first = self.start("locked", extra=("checkpoint.every=5",))
        self.wait_for(first, run / "records" / "rank-1.jsonl", '"step":6')
        before = (run / "config.toml").read_bytes()
        for words in ((), ("--resume",), ("--compare", "static,balanced")):
            second = self.run_command(self.command("-n", "2", *words, run="locked", extra=("checkpoint.every=5",)))
            self.assert_error(second, 2, str(run), f"in use by another run: process {first.pid} on ", ", since 20")
        with held_port() as port:
            as_rank = {"RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
            self.assert_error(self.run_command(self.command(run="locked"), env=as_rank), 2, f"process {first.pid} on ")
        self.assertEqual((run / "config.toml").read_bytes(), before)
        first.kill()
        first.communicate(timeout=100)
        # The launcher was killed: its file is left, its lock is not.
        self.assertTrue((run / "run.lock").exists())
        third = self.resume("locked")
        self.assertIn(f'"pid":{third.pid},', (run / "run.lock").read_text())
        self.interrupt(third)
        self.assertFalse((run / "run.lock").exists())

    def test_a_run_of_a_comparison_is_locked_too(self):
        run = self.folder / "compared"
        first = self.start("compared", "--compare", "static,balanced")
        self.wait_for(first, run / "balanced" / "records" / "rank-1.jsonl", '"step":1')
        second = self.run_command(self.command("-n", "2", run="compared/static"))
        self.assert_error(second, 2, f"process {first.pid} on ")
        self.assertIn("a comparison starts at step 0 again", self.interrupt(first))
        self.assertEqual(sorted(path.name for path in run.rglob("run.lock")), [])

    def test_an_interrupted_run_says_its_step_and_how_to_go_on(self):
        name = "someone's $runs, interrupted"  # what a shell would take apart
        run = self.folder / name
        first = self.start(name, extra=("checkpoint.every=5",))
        self.wait_for(first, run / "checkpoints" / "step-00000005" / "manifest.json")
        lines = self.interrupt(first).splitlines()
        self.assertEqual(len(lines), 1, lines)
        newest = sorted((run / "checkpoints").glob("step-*[0-9]"))[-1].name
        self.assertRegex(lines[0], rf"^dynmo: interrupted at step \d+ of 100000; checkpoint of step {int(newest[5:])}; ")
        command = shlex.split(lines[0].split("continue with: dynmo ")[1])
        self.assertEqual(command, ["train", "--config", str(run / "config.toml"), "--resume"])
        self.interrupt(self.resume(name))

    def test_without_a_checkpoint_it_says_so(self):
        first = self.start("unsaved")
        self.wait_for(first, self.folder / "unsaved" / "records" / "rank-1.jsonl", '"step":2')
        self.assertIn("no checkpoint to continue from", self.interrupt(first))

    def test_a_full_disk_under_the_records_stops_nothing(self):
        records = self.folder / "full" / "records"
        records.mkdir(parents=True)
        os.symlink("/dev/full", records / "rank-0.jsonl")
        done = self.succeed(self.command("-n", "2", run="full", extra=("train.steps=40",)))
        told = [line for line in done.stdout.splitlines() if line.startswith("records ")]
        self.assertIn(len(told), (1, 2), done.stdout)  # at once, unless the writer was late, and at the end
        self.assertIn("No space left on device", told[0])
        self.assertIn("40 lines are missing", told[-1])
        self.assertTrue((self.folder / "full" / "summary.json").exists())
        self.succeed(self.command("-n", "2", run="empty", extra=("train.steps=8",)))
        self.assertEqual(len(losses(self.folder / "empty")), 8)
