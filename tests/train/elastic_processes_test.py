# SPDX-License-Identifier: Apache-2.0
"""What an elastic run starts and leaves: hooks, files that say where it listens, processes of ranks that have ended."""
import os
import pathlib
import re
import resource
import signal
import subprocess
import time

from elastic_case import LIMIT, ElasticCase, events
from program import DYNMO
from run_case import rank_processes

MANY = 100 if os.environ.get("DYNMO_SAMPLES") == "all" else 4


def children(pid):
    """Processes that `pid` has started and not reaped."""
    found = 0
    for path in pathlib.Path("/proc").glob("[0-9]*/stat"):
        try:
            found += int(path.read_text().rsplit(")", 1)[1].split()[1]) == pid
        except OSError:
            pass
    return found


def is_running(pid):
    try:
        return pathlib.Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] != "Z"
    except OSError:
        return False


class ElasticProcesses(ElasticCase):
    def start_with_hook(self, run, ranks, *extra):
        """A run of one rank less, with the process of a hook that does not end."""
        hook = self.folder / "endless"
        hook.write_text("#!/bin/sh\ntrap '' TERM\necho $$ > \"$DYNMO_RUN/new\"; mv \"$DYNMO_RUN/new\" \"$DYNMO_RUN/hook\"\n"
                        "sleep 1000; sleep 1000\n")
        hook.chmod(0o755)
        process = self.start(run, ranks, f"elastic.release_command={hook}", *extra)
        self.done(run, "drain", "0")
        written = self.folder / run / "hook"
        self.until(process, written.exists)
        return process, int(written.read_text())

    def assert_gone(self, pid):
        deadline = time.monotonic() + LIMIT
        while is_running(pid):
            self.assertLess(time.monotonic(), deadline, f"{pid} runs")
            time.sleep(0.02)

    def assert_nothing_left(self, run, hook):
        self.assert_gone(hook)
        for name in ("job.json", "secret", "run.lock"):
            self.assertFalse((self.folder / run / name).exists(), name)
        self.assertEqual(rank_processes(str(self.folder / run)), [])

    def test_ranks_wait_for_a_hook_longer_than_for_a_message(self):
        process, hook = self.start_with_hook("waits", 3, "pipeline.timeout_s=4")
        leader = self.status("waits")["ranks"][0]["pid"]
        stop = self.spawn([DYNMO, "ctl", str(self.folder / "waits"), "stop"])
        self.until(process, lambda: (self.folder / "waits" / "trace.json").exists())  # ranks have done all but wait
        for _ in range(50):
            self.assertIsNone(process.poll(), process.stdout.read() if process.poll() is not None else "")
            time.sleep(0.1)
        self.assertTrue(is_running(hook))
        os.kill(leader, signal.SIGTERM)  # no need to wait for the end of its time
        self.assertIn("after a checkpoint", self.ended(stop))
        self.assertIn("it was stopped", self.ended(process, code=130))
        self.assert_nothing_left("waits", hook)

    def test_a_leader_leaves_after_the_hook_that_it_has_called(self):
        hook = self.folder / "slow"
        hook.write_text("#!/bin/sh\necho begin $DYNMO_RELEASE >> \"$DYNMO_RUN/told\"\nsleep 2\necho end $DYNMO_RELEASE >> \"$DYNMO_RUN/told\"\n")
        hook.chmod(0o755)
        run = self.folder / "after"
        process = self.start("after", 4, f"elastic.release_command={hook}")
        for number in ("3", "0"):  # the hook of the first runs
            self.done("after", "drain", number)
        self.assertEqual([(event["number"], event["outcome"]) for event in events(run, "release")], [(1, "done")])
        self.done("after", "drain", "1")
        self.until(process, lambda: len(events(run, "release")) == 3)
        self.assertEqual((run / "told").read_text().split("\n")[:-1], [f"{what} {number}" for number in (1, 2, 3) for what in ("begin", "end")])
        self.assertEqual([event["outcome"] for event in events(run, "release")], ["done"] * 3)
        self.stopped("after", process)

    def test_signals_leave_neither_hooks_nor_files(self):
        for name, signals in (("int", [signal.SIGINT]), ("hup", [signal.SIGHUP]), ("term", [signal.SIGTERM, signal.SIGTERM])):
            with self.subTest(name):
                process, hook = self.start_with_hook(name, 3)
                manifests = self.folder / name / "checkpoints"
                records = self.folder / name / "records" / "rank-1.jsonl"
                at = len(records.read_text().splitlines())
                self.until(process, lambda: len(records.read_text().splitlines()) > at + 45)
                self.until(process, lambda: list(manifests.glob("step-*[0-9]")))
                for each in signals:
                    process.send_signal(each)
                output = self.ended(process, code=130)
                self.assert_nothing_left(name, hook)
                # Rank 0 has left, and its records with it.
                found = re.search(r"interrupted at step (\d+) of 100000; checkpoint of step (\d+)", output)
                self.assertTrue(found, output)
                self.assertGreaterEqual(int(found[1]), int(found[2]), output)

    def test_a_rank_that_cannot_start_is_told_to_who_asked_for_it(self):
        process = self.start("barren", 2)
        elsewhere = self.data.with_name("moved")
        self.data.rename(elsewhere)
        try:
            self.refused(self.ctl("barren", "grow", "1"), "1 of 1 ranks that were started ended before they had joined, with exit code 2",
                         code=5)
        finally:
            elsewhere.rename(self.data)
        self.assertIn("2 ranks -> 3 ranks", self.done("barren", "grow", "1"))
        self.assertIn("dynmo: error: ", self.stopped("barren", process))

    def test_a_rank_that_comes_when_the_run_ends_says_nothing(self):
        process = self.start("over", 2)
        grow = self.spawn([DYNMO, "ctl", str(self.folder / "over"), "grow", "1"])
        self.until(process, lambda: any(" --join " in line for _, line in rank_processes(str(self.folder / "over"))))
        self.done("over", "stop")
        lines = [line for line in self.ended(process, code=130).splitlines() if line.startswith("[rank 2]")]
        self.assertEqual([line for line in lines if "stopped before step" not in line], [])  # it may have become a rank
        grow.communicate(timeout=LIMIT)

    def test_the_launcher_keeps_nothing_of_ranks_that_have_left(self):
        process = self.start("flat", 1)

        def held():
            return children(process.pid), len(os.listdir(f"/proc/{process.pid}/fd"))

        before = held()
        for turn in range(MANY):
            self.done("flat", "grow", "1")
            self.done("flat", "pack", "1")
        self.until(process, lambda: held() == before)
        self.assertEqual(len(events(self.folder / "flat", "size")), 2 * MANY)
        self.stopped("flat", process)

    def test_a_stop_on_a_full_disk_says_so(self):
        def limit():
            # Writes beyond it fail like those to a full disk; layers' files are larger.
            resource.setrlimit(resource.RLIMIT_FSIZE, (12000, 12000))

        process = subprocess.Popen(self.command("-n", "2", run="full", extra=(*self.SETTINGS, "checkpoint.every=0", "run.trace_steps=0")),
                                   stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, cwd=self.folder, preexec_fn=limit)
        self.started.append(process)
        self.until(process, lambda: self.status("full").get("step", 0) >= 2)
        self.refused(self.ctl("full", "stop"), "its last checkpoint could not be written", code=4)
        self.ended(process, code=4)

    def test_a_folder_is_no_hook_and_no_lock(self):
        result = self.run_command(self.command("-n", "2", run="none", extra=("elastic.enabled=true", "elastic.release_command=/tmp/")))
        self.refused(result, "elastic.release_command", "'/tmp/' is a folder, wanted a program")
        (self.folder / "odd" / "run.lock").mkdir(parents=True)
        result = self.run_command(self.command("-n", "2", run="odd"))
        self.refused(result, "cannot create '", "run.lock': Is a directory; wanted another run.directory")
        self.assertNotIn("in use", result.stderr)
