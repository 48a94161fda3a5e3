# SPDX-License-Identifier: Apache-2.0
"""Ranks of one run are killed, crash, are stopped or end with 1 at drawn moments, again and again, the leader too: the run goes on, its losses
and checkpoints are those of an undisturbed one, and nothing of the lost ranks stays.

DYNMO_SAMPLES is the number of losses (all: 5000), DYNMO_SEED the seed, DYNMO_LEDGER a file for a JSON line a loss. Where `dynmo train` starts
others itself (elastic.respawn), up to a minute later, there are 100 at most.
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

from elastic_case import LIMIT, ElasticCase, events, manifests
from run_case import rank_processes

LOSSES = {"": 6, "part": 3, "all": 5000}
SAMPLES = os.environ.get("DYNMO_SAMPLES", "")
COUNT = LOSSES[SAMPLES] if SAMPLES in LOSSES else int(SAMPLES)
SEED = int(os.environ.get("DYNMO_SEED", "1"))
HOOK = os.environ.get("KILL_AT_WRITE_LIBRARY", "")
RANKS = 3
EXIT_1 = signal.SIGUSR2  # by the preloaded library
KINDS = [signal.SIGKILL] * 8 + [signal.SIGSEGV] * 4 + [EXIT_1] * 3 + [signal.SIGSTOP]
STEPS_AFTER = 8  # of all ranks before the next loss, at most
RESPAWNED = min(100, COUNT // 2)


class KillScripts(ElasticCase):
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

    def launcher(self, process):
        """Its descriptors and its children that nobody has waited for."""
        mine = pathlib.Path("/proc") / str(process.pid)
        children = (mine / "task" / str(process.pid) / "children").read_text().split()
        states = [(pathlib.Path("/proc") / child / "stat").read_text().rsplit(")", 1)[1].split()[0] for child in children]
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
        process = self.spawn(self.command("-n", str(RANKS), run=name, extra=extra), env=env)
        self.until(process, lambda: self.status(name).get("step", 0) > 0)
        ledger, reached, first = [], 0, None
        while len(ledger) < count:
            status = self.whole(process, reached + draw.randrange(STEPS_AFTER), name, respawns)
            first = first or self.launcher(process)
            time.sleep(draw.uniform(0, 0.02))  # any moment of a step
            how, lost = draw.choice(KINDS), draw.sample(status["ranks"], 1 + (draw.random() < 0.3))
            for rank in lost:
                os.kill(rank["pid"], how)
                time.sleep(draw.choice((0, draw.uniform(0, 0.08))))  # the second one while the others recover
            numbers = {rank["rank"] for rank in lost}
            self.until(process, lambda n=numbers: n <= {number for event in events(run, "loss") for number in event["lost"]})
            event = events(run, "recovery")[-1]
            reached = event["step"] + event["steps_again"]
            ledger.append({"seed": SEED, "loss": len(ledger), "kind": how.name, "ranks": sorted(numbers), "respawns": respawns,
                           "leads": status["ranks"][0] in lost, "step": reached, "from": event["from"], "steps_again": event["steps_again"], "ms": event["ms"]})
            if "DYNMO_LEDGER" in os.environ:
                with open(os.environ["DYNMO_LEDGER"], "a") as file:
                    file.write(json.dumps(ledger[-1]) + "\n")
        self.whole(process, reached, name, respawns)
        descriptors, zombies = self.launcher(process)
        self.assertLessEqual(descriptors, first[0])
        self.assertLessEqual(zombies, 1)  # the first child's number stays its group's
        self.done(name, "stop")
        self.ended(process, code=130)
        self.assertEqual(rank_processes(str(run)), [])
        self.assertEqual([name for name in ("job.json", "secret") if (run / name).exists()], [])
        ours = self.losses(name)
        self.assertEqual(sorted(ours), list(range(len(ours))))
        twin = self.start("twin", 1, "balance.enabled=false")
        self.until(twin, lambda: self.status("twin").get("step", 0) > len(ours))
        self.done("twin", "stop")
        self.ended(twin, code=130)
        theirs, there = self.losses("twin"), manifests(self.folder / "twin")
        self.assertEqual(ours, {step: theirs[step] for step in ours})
        self.assertTrue(set(manifests(run)) & set(there))
        for step, layers in manifests(run).items():
            self.assertEqual(layers, there.get(step, layers), f"checkpoint of step {step}")
        again = [loss["steps_again"] for loss in ledger]
        print(f"{len(ledger)} losses: {dict(collections.Counter(loss['kind'] for loss in ledger))}, {sum(loss['leads'] for loss in ledger)} with the "
              f"leader, from {dict(collections.Counter(loss['from'] for loss in ledger))}, {max(again)} steps again at most, {len(ours)} steps")


if __name__ == "__main__":
    unittest.main()
