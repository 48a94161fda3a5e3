# SPDX-License-Identifier: Apache-2.0
"""An elastic run that a test starts, asks, commands and joins."""
import json
import shutil
import subprocess
import time

from program import DYNMO
from run_case import RunCase, digests

LIMIT = 120  # seconds for anything to happen: bounds a hang, decides nothing


def events(run, kind=None):
    """Those whose line is whole: one that is being written is seen next time."""
    path = run / "events.jsonl"
    lines = path.read_text().split("\n")[:-1] if path.exists() else []
    return [event for event in map(json.loads, lines) if kind in (None, event["event"])]


def manifests(run):
    """By step."""
    return {int(folder.name.split("-")[1]): digests(json.loads((folder / "manifest.json").read_text()))
            for folder in (run / "checkpoints").glob("step-*[0-9]")}


class ElasticCase(RunCase):
    SETTINGS = ("elastic.enabled=true", "train.steps=100000", "checkpoint.every=20", "checkpoint.keep=1000",
                "freezing.enabled=true", "freezing.start=0.0001", "freezing.end=0.002", "pruning.enabled=true", "pruning.start=5",
                "pruning.end=145", "pruning.every=20", "pruning.sparse_above=0.7", "model.blocks=4")

    def setUp(self):
        self.started = []

    def tearDown(self):
        for process in self.started:
            if process.poll() is None:
                process.kill()
            process.communicate(timeout=LIMIT)

    def spawn(self, command, **how):
        process = subprocess.Popen(command, stderr=subprocess.STDOUT, text=True, stdin=subprocess.DEVNULL, cwd=self.folder,
                                   **{"stdout": subprocess.PIPE, **how})
        self.started.append(process)
        return process

    def start(self, run, ranks, *extra, words=()):
        """A run that has done a step."""
        shutil.rmtree(self.folder / run, ignore_errors=True)
        process = self.spawn(self.command("-n", str(ranks), *words, run=run, extra=(*self.SETTINGS, *extra)))
        self.until(process, lambda: self.status(run).get("step", 0) >= 2)
        return process

    def until(self, process, holds, limit=LIMIT):
        deadline = time.monotonic() + limit
        while not holds():
            self.assertIsNone(process.poll(), f"it has ended: {process.stdout.read() if process.poll() is not None and process.stdout else ''}")
            self.assertLess(time.monotonic(), deadline, "nothing happened")
            time.sleep(0.02)  # between two looks

    def ctl(self, run, *words):
        return self.run_command([DYNMO, "ctl", str(self.folder / run), *words], timeout=LIMIT)

    def done(self, run, *words):
        return self.succeeded(self.ctl(run, *words)).stdout

    def refused(self, result, *wanted, code=2):
        self.assert_error(result, code, *wanted)

    def status(self, run):
        result = self.ctl(run, "status", "--json")
        return json.loads(result.stdout) if result.returncode == 0 else {}

    def join(self, run, *words):
        return self.spawn([DYNMO, "train", "--join", str(self.folder / run), *words])

    def ranks(self, run):
        return [rank["rank"] for rank in self.status(run).get("ranks", ())]

    def ended(self, process, code=0):
        output, _ = process.communicate(timeout=LIMIT)
        self.assertEqual(process.returncode, code, output)
        return output

    def stopped(self, run, process):
        """The output of an endless run, which no slow newcomer or command is too late for."""
        self.done(run, "stop")
        return self.ended(process, code=130)
