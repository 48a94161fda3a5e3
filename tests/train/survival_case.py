# SPDX-License-Identifier: Apache-2.0
"""An elastic run that loses ranks, beside its undisturbed twin."""
import contextlib
import json
import os
import pathlib
import random
import signal
import time

from elastic_case import LIMIT, ElasticCase, events, manifests
from run_case import rank_processes

SEED = 22


class SurvivalCase(ElasticCase):
    """A subclass gives SETTINGS of a run of STEPS steps."""

    ENDLESS = ("train.steps=100000",)
    KILLS_BEFORE = 60  # the first step at which no rank is killed any more, of each 60

    @classmethod
    def setUpClass(cls):
        super().setUpClass()
        cls.draw = random.Random(SEED)

    def losses_of(self, run):
        """By step, from whichever rank wrote the last line of it; ranks that repeat a step have the same loss."""
        found = {}
        for path in sorted((self.folder / run / "records").glob("rank-*.jsonl")):
            for line in path.read_text().splitlines():
                with contextlib.suppress(json.JSONDecodeError):  # a killed rank may leave half a line
                    record = json.loads(line)
                    self.assertEqual(found.setdefault(record["step"], record["loss"]), record["loss"], (path, record["step"]))
        return found

    def twin(self, name, ranks, *extra):
        if not (self.folder / name).exists():
            self.succeed(self.command("-n", str(ranks), run=name, extra=(*self.SETTINGS, *extra)))

    def recoveries(self, run, key):
        return [event[key] for event in events(self.folder / run, "recovery")]

    def assert_as_twin(self, run, twin, unfinished=None):
        """At most so many checkpoints may be missing, one a loss: those that were being written then, where no step ran again."""
        self.assertEqual(self.losses_of(run), self.losses_of(twin))
        self.assertEqual(sorted(self.losses_of(run)), list(range(self.STEPS)))
        ours, theirs = manifests(self.folder / run), manifests(self.folder / twin)
        if unfinished is None:
            unfinished = len(events(self.folder / run, "loss"))
        self.assertGreaterEqual(len(ours), len(theirs) - unfinished)
        self.assertEqual(ours, {step: theirs.get(step) for step in ours})
        summaries = [json.loads((self.folder / name / "summary.json").read_text()) for name in (run, twin)]
        self.assertEqual(summaries[0]["runs"][0]["loss_digest"], summaries[1]["runs"][0]["loss_digest"])
        self.assertEqual(rank_processes(str(self.folder / run)), [])
        for name in ("job.json", "secret"):
            self.assertFalse((self.folder / run / name).exists(), name)

    def assert_as_endless_twin(self, run):
        """Of a run with ENDLESS that was stopped."""
        twin = f"{run}-twin"
        process = self.spawn(self.command("-n", "2", run=twin, extra=(*self.SETTINGS, *self.ENDLESS)))
        ours = self.losses_of(run)
        self.until(process, lambda: self.steps_done(twin) > len(ours))
        self.stopped(twin, process)
        theirs = self.losses_of(twin)
        self.assertEqual(ours, {step: theirs[step] for step in ours})
        both = set(manifests(self.folder / run)) & set(manifests(self.folder / twin))
        for step in both:
            self.assertEqual(manifests(self.folder / run)[step], manifests(self.folder / twin)[step])

    def steps_done(self, run):
        paths = (self.folder / run / "records").glob("rank-*.jsonl")
        return max((path.read_text().count("\n") for path in paths), default=0)

    def look(self, process, holds):
        while process.poll() is None and not holds():
            time.sleep(0.0005)

    def processes(self, run, process):
        """By the number that the launcher gave them."""
        found = {}
        for pid, _ in rank_processes(str(self.folder / run)):
            with contextlib.suppress(OSError):
                words = (pathlib.Path("/proc") / str(pid) / "environ").read_bytes().split(b"\0")
                found.update({int(word[5:]): pid for word in words if word.startswith(b"RANK=") and word[5:] and pid != process.pid})
        return found

    def kill(self, run, process, number, at, how=signal.SIGKILL):
        """When that many steps are done, and not before the loss is noted."""
        deadline = time.monotonic() + LIMIT
        pid = None
        while pid is None or self.steps_done(run) <= at:
            self.assertLess(time.monotonic(), deadline, "no step")
            self.assertIsNone(process.poll(), f"ended before rank {number} was lost at {at}, seed {SEED}")
            pid = pid or self.processes(run, process).get(number)
            time.sleep(0.001)
        os.kill(pid, how)
        while not any(number in event["lost"] for event in events(self.folder / run, "loss")):
            self.assertLess(time.monotonic(), deadline, "no recovery")
            if process.poll() is not None:
                self.fail(f"ended when rank {number} was lost at {at}, seed {SEED}: {process.stdout.read()}")
            time.sleep(0.001)

    def hunted(self, run, ranks, kills, *extra, how=signal.SIGKILL, first=2):
        """A run of which these ranks are killed at drawn steps, from the step `first` on. Its output."""
        process = self.spawn(self.command("-n", str(ranks), run=run, extra=(*self.SETTINGS, *extra)))
        for turn, number in enumerate(kills):
            self.kill(run, process, number, 60 * turn + self.draw.randrange(first, self.KILLS_BEFORE), how)
        return self.ended(process)
