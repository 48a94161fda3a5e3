# SPDX-License-Identifier: Apache-2.0
"""Drawn scripts of pack, grow, drain, join, SIGTERM and checkpoint: no run is lost, and each leaves what an undisturbed one leaves.

DYNMO_SAMPLES is the number of scripts (all: 200), DYNMO_SEED the first seed.
"""
import json
import os
import random
import re
import signal
import time
import unittest

from elastic_case import LIMIT, ElasticCase, events, manifests

SCRIPTS = {"": 2, "part": 1, "all": 200}
SAMPLES = os.environ.get("DYNMO_SAMPLES", "")
COUNT = SCRIPTS[SAMPLES] if SAMPLES in SCRIPTS else int(SAMPLES)
SEED = int(os.environ.get("DYNMO_SEED", "1"))
MAX_RANKS = 4  # of all replicas


class Script:
    """A run and what is drawn to happen to it."""

    def __init__(self, case, seed):
        self.case, self.draw = case, random.Random(seed)
        self.name = f"script-{seed}"
        self.run = case.folder / self.name
        self.replicas = self.draw.choice((1, 1, 2))
        self.ranks_min = self.draw.choice((1, 1, 2 // self.replicas))
        self.joiners, self.joined, self.asked, self.story, self.status = [], {}, set(), [], {}  # joined: numbers of joiners

    def positions(self):
        return len(self.status["ranks"]) // self.replicas

    def play(self):
        start = self.draw.randint(self.ranks_min, MAX_RANKS // self.replicas)
        self.story.append(f"{start} x {self.replicas} ranks, {self.ranks_min} at least")
        self.process = self.case.start(self.name, start, f"pipeline.replicas={self.replicas}", f"elastic.ranks_min={self.ranks_min}",
                                       f"checkpoint.every={self.draw.choice((0, 20))}", "elastic.release_after=5")
        things = self.draw.randint(4, 8)
        for _ in range(20 * things):  # many cannot be done just now
            self.look()
            things -= self.draw.choice((self.pack, self.grow, self.drain, self.join, self.signal, self.checkpoint))()
            if things == 0:
                break
        # A rank that was refused leaves as soon as there are enough: then the run stops as one that is whole.
        self.case.done(self.name, "stop")
        for joiner in self.joiners:
            output, _ = joiner.communicate(timeout=LIMIT)
            self.heard(joiner, output)
            self.case.assertIn(joiner.returncode, (0, 130) if joiner in self.joined else (5, 130), output)
        # The launcher ends with its last rank: with 0 if only ranks of others were left to be stopped.
        sizes = events(self.run, "size")
        others = bool(sizes) and set(sizes[-1]["ranks"]) <= set(self.joined.values())
        self.case.ended(self.process, code=0 if others else 130)

    def heard(self, joiner, output):
        found = re.search(r"joined as rank (\d+)", output)
        if found:
            self.joined[joiner] = int(found.group(1))

    def until(self, holds):
        deadline = time.monotonic() + LIMIT
        while not holds():
            self.case.assertIn(self.process.poll(), (None, 0), "it has ended")
            self.case.assertTrue(any(each.poll() is None for each in (self.process, *self.joiners)), "all have ended")
            self.case.assertLess(time.monotonic(), deadline, "nothing happened")
            time.sleep(0.02)  # between two looks

    def look(self):
        def answers():
            found = self.case.status(self.name)
            self.status = found or self.status
            return found.get("ranks")

        self.until(answers)
        return self.status

    def ctl(self, *words):
        """True: it is done, or refused because somebody who was asked to leave does so meanwhile."""
        self.story.append(" ".join(words))
        result = self.case.ctl(self.name, *words)
        refusals = ("",) if words[0] == "grow" else ("another change is under way", "elastic.ranks_min", "leaves already", "there is no rank", "grow` starts more")
        self.case.assertTrue(result.returncode == 0 or result.returncode == 2 and any(why in result.stderr for why in refusals),
                             f"{words}: {result.returncode} {result.stdout}{result.stderr}")
        return result.returncode == 0

    def somebody_leaves(self):
        """Who has been asked to and has not: if only such ranks were left, the run would stop."""
        return any(rank["pid"] in self.asked for rank in self.status["ranks"])

    def pack(self):
        if self.somebody_leaves() or self.positions() == self.ranks_min:
            return False
        return self.ctl("pack", str(self.draw.randint(self.ranks_min, self.positions() - 1)))

    def grow(self):
        room = MAX_RANKS // self.replicas - self.positions()
        # A rank that the launcher has not started cannot have more started.
        if room <= 0 or self.status["ranks"][0]["pid"] in {joiner.pid for joiner in self.joiners}:
            return False
        return self.ctl("grow", str(self.draw.randint(1, room)))

    def drain(self):
        if self.somebody_leaves() or self.positions() == self.ranks_min:
            return False
        return self.ctl("drain", str(self.draw.choice(self.status["ranks"])["rank"]))

    def checkpoint(self):
        return self.ctl("checkpoint")

    def join(self):
        if self.positions() >= MAX_RANKS // self.replicas:
            return False
        self.story.append("join")
        new = [self.case.join(self.name) for _ in range(self.replicas)]
        self.joiners += new
        if self.draw.random() < 0.7:  # else the next thing comes meanwhile
            for joiner in new:
                line = "."
                while line and joiner not in self.joined:
                    line = joiner.stdout.readline()
                    self.heard(joiner, line)
                self.case.assertTrue(line, f"it has ended with {joiner.wait(timeout=LIMIT) if not line else 0}")
        return True

    def signal(self):
        rank = self.draw.choice(self.status["ranks"])
        pids = {each["pid"] for each in self.status["ranks"]}
        if len(pids & (self.asked | {rank["pid"]})) >= self.positions():  # of every position one: the run would stop
            return False
        self.story.append(f"SIGTERM to {rank['rank']}")
        first = not self.somebody_leaves()  # else those leave first, and there may not be enough left for this one
        self.asked.add(rank["pid"])
        try:
            os.kill(rank["pid"], signal.SIGTERM)
        except ProcessLookupError:
            return False  # it has left meanwhile
        if first and self.positions() > self.ranks_min and self.draw.random() < 0.7:
            number = rank["rank"]
            self.until(lambda: number not in [each["rank"] for each in self.look()["ranks"]])
        return True

    def losses(self):
        """Of all ranks that were in it, by step."""
        found = {}
        for path in sorted((self.run / "records").glob("rank-*.jsonl")):
            for line in path.read_text().splitlines():
                record = json.loads(line)
                found.setdefault(record["step"], set()).add(record["loss"])
        return found


class ElasticScripts(ElasticCase):
    def test_no_script_loses_a_run_or_changes_a_bit(self):
        scripts, changes = [Script(self, SEED + i) for i in range(COUNT)], 0
        for script in scripts:
            with self.subTest(script=script.name, story=script.story):
                try:
                    script.play()
                finally:  # one that has failed goes on no longer
                    for process in (script.process, *script.joiners):
                        process.kill()
                changes += len(events(script.run, "size"))
        last = max(max(script.losses()) for script in scripts if script.run.exists())
        for replicas in sorted({script.replicas for script in scripts}):
            name = f"twin-{replicas}"
            twin = self.start(name, 1, f"pipeline.replicas={replicas}", "balance.enabled=false", "checkpoint.every=20")
            self.until(twin, lambda: self.status(name)["step"] > last)
            self.stopped(name, twin)
            reference = Script(self, 0)
            reference.run = self.folder / name
            wanted, checkpoints = reference.losses(), manifests(reference.run)
            for script in (script for script in scripts if script.replicas == replicas):
                with self.subTest(script=script.name, story=script.story):
                    found = script.losses()
                    self.assertEqual(sorted(found), list(range(len(found))))
                    self.assertEqual(found, {step: wanted[step] for step in found})
                    for step, layers in manifests(script.run).items():
                        self.assertEqual(layers, checkpoints.get(step, layers), f"checkpoint of step {step}")
        print(f"{len(scripts)} scripts, {changes} changes of size, {last + 1} steps at most")


if __name__ == "__main__":
    unittest.main()
