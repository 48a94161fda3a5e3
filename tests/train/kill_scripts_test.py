# SPDX-License-Identifier: Apache-2.0
"""Ranks of one run are killed, crash, are stopped or end with 1 at drawn moments, again and again, the leader too: the run goes on, its losses
and checkpoints are those of an undisturbed one, and nothing of the lost ranks stays.

DYNMO_SAMPLES is the number of ranks to lose (all: 5000), one or two at a time, DYNMO_SEED the seed, DYNMO_LEDGER a file for a JSON line a
loss. Where `dynmo train` starts others itself (elastic.respawn), up to a minute later, they are 100 at most.
"""
import collections
import contextlib
import json
import os
import pathlib
import random
import signal
import time
import unittest

from elastic_case import LIMIT, ElasticCase, manifests
from run_case import rank_processes

LOST = {"": 8, "part": 4, "all": 5000}
SAMPLES = os.environ.get("DYNMO_SAMPLES", "")
COUNT = LOST[SAMPLES] if SAMPLES in LOST else int(SAMPLES)
SEED = int(os.environ.get("DYNMO_SEED", "1"))
HOOK = os.environ.get("KILL_AT_WRITE_LIBRARY", "")
RANKS = 3
EXIT_1 = signal.SIGUSR2  # by the preloaded library
KINDS = [signal.SIGKILL] * 8 + [signal.SIGSEGV] * 4 + [EXIT_1] * 3 + [signal.SIGSTOP]
STEPS_AFTER = 8  # of all ranks before the next loss, at most
RESPAWNED = min(100, COUNT // 2)
SETTLED = 50  # losses after which memory grows no more
STEPS_PER_S = 50  # of a rank alone, at least


class Events:
    """Of a run; each line is read once, as there are tens of thousands."""

    def __init__(self, run):
        self.path, self.at = run / "events.jsonl", 0
        self.lost, self.recovery = set(), None

    def read(self):
        with open(self.path) as file:
            file.seek(self.at)
            for line in iter(file.readline, ""):
                if not line.endswith("\n"):
                    return  # not all of it as yet
                self.at += len(line.encode())
                event = json.loads(line)
                if event["event"] == "loss":
                    self.lost.update(event["lost"])
                    self.recovery = None
                if event["event"] == "recovery":
                    self.recovery = event


class KillScripts(ElasticCase):
    # Enough steps for all losses; layers freeze and are pruned in the first 200.
    SETTINGS = (*ElasticCase.SETTINGS, "train.steps=10000000", "freezing.start=0.000001", "freezing.end=0.00002")

    def losses(self, run):
        """By step."""
        found = {}
        for path in (self.folder / run / "records").glob("rank-*.jsonl"):
            for line in path.read_text().splitlines():
                with contextlib.suppress(json.JSONDecodeError):  # a killed rank may leave half a line
                    record = json.loads(line)
                    self.assertEqual(found.setdefault(record["step"], record["loss"]), record["loss"], f"{path.name}, step {record['step']}")
        return found

    def whole(self, process, after, run, respawns):
        """The status once all ranks are there and a step after `after` is done."""
        found = {}

        def holds():
            found.update(self.status(run))
            missing = RANKS - len(found.get("ranks", []))
            if 0 < missing < RANKS and not respawns:
                self.ctl(run, "grow", str(missing))
            return missing == 0 and found["step"] > after

        self.until(process, holds)
        return found

    def spawn_logged(self, run, ranks, extra, **how):
        """A pipe that nobody reads holds up who leads once it is full."""
        with open(self.folder / f"{run}.log", "w") as log:
            return self.spawn(self.command("-n", str(ranks), run=run, extra=extra), stdout=log, **how)

    def memory(self, pid):
        """That a process alone has, in KiB."""
        with contextlib.suppress(OSError):  # it may have ended
            for line in (pathlib.Path("/proc") / str(pid) / "status").read_text().splitlines():
                if line.startswith("RssAnon:"):
                    return int(line.split()[1])
        return 0

    def launcher(self, process):
        """Its descriptors and its children that nobody has waited for."""
        mine = pathlib.Path("/proc") / str(process.pid)
        children = (mine / "task" / str(process.pid) / "children").read_text().split()
        states = []
        for child in children:
            with contextlib.suppress(OSError):  # it may just be gone
                states.append((pathlib.Path("/proc") / child / "stat").read_text().rsplit(")", 1)[1].split()[0])
        return len(list((mine / "fd").iterdir())), states.count("Z")

    def test_no_loss_ends_a_run_or_changes_a_bit(self):
        self.hunt("hunted", COUNT, respawns=False)

    def test_nor_where_others_are_started_for_the_lost(self):
        self.hunt("refilled", RESPAWNED, respawns=True)

    def hunt(self, name, count, respawns):
        draw = random.Random(SEED)
        run = self.folder / name
        extra = (*self.SETTINGS, "checkpoint.keep=3", f"elastic.respawn={str(respawns).lower()}")
        env = {**os.environ, "LD_PRELOAD": HOOK, "EXIT_AT_SIGUSR2": "1"}
        process = self.spawn_logged(name, RANKS, extra, env=env)
        self.until(process, lambda: self.status(name).get("step", 0) > 0)
        ledger, reached, first = [], 0, None
        seen = Events(run)

        def noted(numbers, last):
            """(Whoever leads may be killed before it has written down the loss before its own.)"""
            seen.read()
            if last not in seen.lost or seen.recovery is None:
                return False
            there = {rank["rank"] for rank in self.status(name).get("ranks", [])}
            return bool(there) and numbers.isdisjoint(there)

        while sum(len(loss["ranks"]) for loss in ledger) < count:
            status = self.whole(process, reached + draw.randrange(STEPS_AFTER), name, respawns)
            first = first or self.launcher(process)
            time.sleep(draw.uniform(0, 0.02))  # any moment of a step
            how, lost = draw.choice(KINDS), draw.sample(status["ranks"], 1 + (draw.random() < 0.5))
            for rank in lost:
                os.kill(rank["pid"], how)
                time.sleep(draw.choice((0, draw.uniform(0, 0.08))))  # the second one while the others recover
            numbers = {rank["rank"] for rank in lost}
            self.until(process, lambda n=numbers, last=lost[-1]["rank"]: noted(n, last))
            event = seen.recovery
            reached = event["step"] + event["steps_again"]
            descriptors, zombies = self.launcher(process)
            ledger.append({"seed": SEED, "loss": len(ledger), "kind": how.name, "ranks": sorted(numbers), "respawns": respawns,
                           "leads": status["ranks"][0] in lost, "step": reached, "from": event["from"], "steps_again": event["steps_again"], "ms": event["ms"],
                           "descriptors": descriptors, "zombies": zombies, "launcher_kib": self.memory(process.pid),
                           "rank_kib": [self.memory(rank["pid"]) for rank in status["ranks"] if rank not in lost]})
            if "DYNMO_LEDGER" in os.environ:
                with open(os.environ["DYNMO_LEDGER"], "a") as file:
                    file.write(json.dumps(ledger[-1]) + "\n")
        self.whole(process, reached, name, respawns)
        descriptors, zombies = self.launcher(process)
        self.assertLessEqual(descriptors, first[0])
        self.assertLessEqual(zombies, 1)  # the first child's number stays its group's
        if len(ledger) > 2 * SETTLED:
            self.assertLessEqual(ledger[-1]["launcher_kib"], 1.02 * ledger[SETTLED]["launcher_kib"])
        self.stopped(name, process)
        self.assertEqual(rank_processes(str(run)), [])
        self.assertEqual([name for name in ("job.json", "secret") if (run / name).exists()], [])
        ours = self.losses(name)
        self.assertEqual(sorted(ours), list(range(len(ours))))
        twin_name = f"{name}-twin"
        twin = self.spawn_logged(twin_name, 1, (*self.SETTINGS, "balance.enabled=false"))
        self.until(twin, lambda: self.status(twin_name).get("step", 0) > len(ours), LIMIT + len(ours) / STEPS_PER_S)
        self.stopped(twin_name, twin)
        theirs, there = self.losses(twin_name), manifests(self.folder / twin_name)
        self.assertEqual(ours, {step: theirs[step] for step in ours})
        self.assertTrue(set(manifests(run)) & set(there))
        for step, layers in manifests(run).items():
            self.assertEqual(layers, there.get(step, layers), f"checkpoint of step {step}")
        kinds, origins = (dict(collections.Counter(loss[key] for loss in ledger)) for key in ("kind", "from"))
        print(f"{sum(len(loss['ranks']) for loss in ledger)} ranks lost in {len(ledger)} losses: {kinds}, {sum(loss['leads'] for loss in ledger)} with "
              f"the leader, from {origins}, {max(loss['steps_again'] for loss in ledger)} steps again at most, {len(ours)} steps")


if __name__ == "__main__":
    unittest.main()
