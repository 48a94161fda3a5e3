# SPDX-License-Identifier: Apache-2.0
"""The log of each rank: its lines, what they say of a run and of a lost rank, and disks that take none."""
import collections
import contextlib
import datetime
import os
import re
import shutil
import signal
import subprocess
import time

from program import DYNMO
from run_case import RunCase

LINE = re.compile(r"(\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\.\d{3}Z) (debug|info|warning|error) rank (\d+): (.*)")
Line = collections.namedtuple("Line", "time level rank text")


def parsed(path):
    """The lines, each of which has the format."""
    found = []
    for line in path.read_text().splitlines():
        match = LINE.fullmatch(line)
        assert match, line
        found.append(Line(datetime.datetime.fromisoformat(match[1].replace("Z", "+00:00")), match[2], int(match[3]), match[4]))
    return found


class Logs(RunCase):
    def train(self, run, *words, extra=(), ranks=3, log="log"):
        extra = (f"run.log={self.folder / run / log}", "train.steps=6", *extra)
        return self.run_command(self.command("-n", str(ranks), *words, run=run, extra=extra))

    def lines(self, run, rank):
        return parsed(self.folder / run / "log" / f"rank-{rank}.log")

    def assert_has(self, lines, level, pattern):
        self.assertTrue(any(line.level == level and re.search(pattern, line.text) for line in lines), (level, pattern, lines))

    def test_each_rank_has_a_file_of_what_happened(self):
        begin = datetime.datetime.now(datetime.timezone.utc) - datetime.timedelta(seconds=1)
        done = self.succeeded(self.train("three", extra=("checkpoint.every=3", "train.validation_every=3", "run.log_level=debug")))
        self.assertEqual(sorted(path.name for path in (self.folder / "three" / "log").iterdir()), [f"rank-{rank}.log" for rank in range(3)])
        end = datetime.datetime.now(datetime.timezone.utc) + datetime.timedelta(seconds=1)
        for rank in range(3):
            lines = self.lines("three", rank)
            times = [line.time for line in lines]
            self.assertEqual(times, sorted(times))
            self.assertTrue(begin <= times[0] and times[-1] <= end, times)
            self.assertEqual({line.rank for line in lines}, {rank})
            self.assertRegex(lines[0].text, rf"^begins   dynmo .* as rank {rank} of 3, process \d+ on \S+, run '.*three'$")
            self.assertEqual((lines[-1].level, lines[-1].text), ("info", "ended with exit code 0"))
            self.assert_has(lines, "info", rf"^step     0  group of generation \d+ with 3 ranks; 1 node; this is rank {rank}; plan ")
            self.assert_has(lines, "info", r'^step     3  run: checkpoint')
            self.assert_has(lines, "info", r'^step     6  run: validation {"loss":')
            for step in range(6):
                self.assert_has(lines, "debug", rf"^step     {step}  loss [0-9.]+, gradient norm [0-9.]+, took ")
        # A line of the terminal is in the file, too.
        texts = [line.text for line in self.lines("three", 0)]
        for line in done.stdout.splitlines():
            if not line.startswith("step "):
                self.assertIn(line.encode("utf-8", "replace").decode(), texts)

    def test_levels_leave_out_what_matters_less(self):
        for level, wanted in (("info", {"info"}), ("warning", set())):
            run = f"level-{level}"
            self.succeeded(self.train(run, ranks=2, extra=(f"run.log_level={level}",)))
            self.assertEqual({line.level for line in self.lines(run, 1)}, wanted)

    def test_a_resumed_run_appends(self):
        extra = ("checkpoint.every=3",)
        self.succeeded(self.train("resumed", ranks=2, extra=extra))
        before = (self.folder / "resumed" / "log" / "rank-1.log").read_bytes()
        shutil.rmtree(self.folder / "resumed" / "checkpoints" / "step-00000006")
        self.succeeded(self.train("resumed", "--resume", ranks=2, extra=extra))
        after = (self.folder / "resumed" / "log" / "rank-1.log").read_bytes()
        self.assertTrue(after.startswith(before) and len(after) > len(before))
        self.assertEqual(len([line for line in self.lines("resumed", 1) if line.text.startswith("begins ")]), 2)

    def test_survivors_log_the_loss_of_a_rank(self):
        logs = self.folder / "lost" / "log"
        command = self.command("-n", "3", run="lost", extra=(f"run.log={logs}", "train.steps=100000", "elastic.enabled=true"))
        process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, stdin=subprocess.DEVNULL, cwd=self.folder, text=True)
        self.addCleanup(self.end, process)
        self.wait_for(process, lambda: self.has(logs / "rank-1.log", "group of generation"))
        victim = int(re.search(r" process (\d+) on ", self.lines("lost", 1)[0].text)[1])
        self.wait_for(process, lambda: all(self.has(self.folder / "lost" / "records" / f"rank-{rank}.jsonl", '"step":3') for rank in range(3)))
        os.kill(victim, signal.SIGKILL)
        self.wait_for(process, lambda: all(self.has(logs / f"rank-{rank}.log", "run: recovery") for rank in (0, 2)))
        self.succeed([DYNMO, "ctl", str(self.folder / "lost"), "stop"])
        out, _ = process.communicate(timeout=100)
        self.assertEqual(process.returncode, 130, out)
        for rank in (0, 2):
            lines = self.lines("lost", rank)
            self.assert_has(lines, "warning", r"^step +\d+  .*rank 1 .*(lost|killed|ended)")
            self.assert_has(lines, "info", r"^step +\d+  met after the loss: ranks 0, 2$")
            self.assert_has(lines, "warning", r'^step +\d+  run: loss {"lost":\[1\],')
            self.assert_has(lines, "info", r"^step +\d+  group of generation \d+ with 2 ranks: 0 on \S+ \(process \d+\), 2 on ")
            self.assertRegex(lines[-1].text, r"^ended with exit code 130: stopped before step ")
        self.assertNotIn("ended", self.lines("lost", 1)[-1].text)

    def test_a_full_disk_stops_nothing(self):
        logs = self.folder / "full" / "log"
        logs.mkdir(parents=True)
        (logs / "rank-1.log").symlink_to("/dev/full")
        done = self.succeeded(self.train("full", ranks=2))
        said = [line for line in (done.stdout + done.stderr).splitlines() if "cannot write the log" in line]
        self.assertEqual(said, [f"[rank 1] log      cannot write the log '{logs}/rank-1.log': No space left on device; training goes on"])
        self.assertEqual(self.lines("full", 0)[-1].text, "ended with exit code 0")

    def test_a_folder_that_cannot_be_made_is_a_line(self):
        (self.folder / "file").write_text("")
        done = self.run_command(self.command("-n", "2", run="refused", extra=("run.log=file/log",)))
        self.assert_error(done, 2, "run.log is 'file/log': cannot make folder 'file/log': Not a directory; wanted a folder")
        done = self.run_command(self.command("-n", "2", run="refused", extra=("run.log_level=debug",)))
        self.assert_error(done, 2, "run.log_level", "a run.log")
        done = self.run_command(self.command("-n", "2", run="refused", extra=("run.log=log", "run.log_level=all")))
        self.assert_error(done, 2, "run.log_level", "debug, info, warning")

    @staticmethod
    def has(path, text):
        return path.exists() and text in path.read_text()

    def wait_for(self, process, holds):
        deadline = time.monotonic() + 100
        while not holds():
            self.assertLess(time.monotonic(), deadline)
            self.assertIsNone(process.poll(), "ended too early")
            time.sleep(0.02)

    @staticmethod
    def end(process):
        with contextlib.suppress(ProcessLookupError):
            process.kill()
        process.communicate()
