# SPDX-License-Identifier: Apache-2.0
"""An elastic run over two hosts (support/two_hosts.py)."""
import contextlib
import json
import os

from elastic_case import LIMIT, ElasticCase
from program import DYNMO
from two_hosts import die_with_parent, make_hosts, remove_hosts

A, B = 0, 1
PORT = 29519
# A constant learning rate: losses do not depend on the number of steps that a run is to do.
SETTINGS = ("elastic.enabled=true", "optimizer.learning_rate=0.001", "optimizer.minimum_learning_rate=0.001")


class HostsCase(ElasticCase):
    SETTINGS = (*SETTINGS, "train.steps=1000000")

    @classmethod
    def setUpClass(cls):
        super().setUpClass()
        cls.alone = {}  # losses by step, of other settings each
        cls.hosts = make_hosts(cls.folder)
        cls.addClassCleanup(remove_hosts, cls.hosts)

    def setUp(self):
        super().setUp()
        self.host = A  # where commands run

    def spawn(self, command, **how):
        return super().spawn(self.hosts[self.host].inside(*command), preexec_fn=die_with_parent, **how)

    def run_command(self, command, timeout=LIMIT, env=None):
        return super().run_command(self.hosts[self.host].inside(*command), timeout, env)

    def start_ranks(self, run, hosts, master, *extra):
        """A run that has done a step, of ranks that nobody has launched."""
        processes = []
        for rank, self.host in enumerate(hosts):
            place = {"RANK": str(rank), "LOCAL_RANK": str(hosts[:rank].count(self.host)), "WORLD_SIZE": str(len(hosts)),
                     "MASTER_ADDR": master, "MASTER_PORT": str(PORT)}
            processes.append(self.spawn(self.command(run=run, extra=(*self.SETTINGS, *extra)), env={**os.environ, **place}))
        self.host = A
        self.until(processes[0], lambda: self.status(run).get("step", 0) >= 2)
        return processes

    def job(self, run):
        return json.loads((self.folder / run / "job.json").read_text())

    def where(self, run):
        job = self.job(run)
        return f"{job['address']}:{job['port']}"

    def join_at(self, host, run, *words):
        self.host = host
        return self.spawn([DYNMO, "train", "--join", *(words or [str(self.folder / run)])])

    def hosts_of(self, run):
        return {rank["rank"]: rank["host"] for rank in self.status(run)["ranks"]}

    def losses(self, run):
        """By step; all ranks that were there have recorded the same."""
        found = {}
        for path in (self.folder / run / "records").glob("rank-*.jsonl"):
            for line in path.read_text().splitlines():
                record = None
                with contextlib.suppress(json.JSONDecodeError):  # a killed rank may leave half a line
                    record = json.loads(line)
                if record is None:
                    continue
                self.assertEqual(found.setdefault(record["step"], record["loss"]), record["loss"], f"{path.name}, step {record['step']}")
        return found

    def assert_same_losses(self, run, *extra):
        """The losses of a run that was stopped are those of one on a rank alone, which all runs of a class with the same settings share."""
        found = self.losses(run)
        done = json.loads((self.folder / run / "summary.json").read_text())["runs"][0]
        self.assertEqual(sorted(found), list(range(done["steps"])))
        alone = self.alone.setdefault(extra, {})
        if len(alone) < len(found):
            self.host = A
            self.succeed(self.command("-n", "1", run=f"{run}-alone", extra=(
                *SETTINGS, f"train.steps={2 * len(found)}", "balance.enabled=false", *extra)))
            alone.update(self.losses(f"{run}-alone"))
        self.assertEqual(found, {step: alone[step] for step in found})

    def assert_same_as_alone(self, run):
        """The losses of a run that was stopped are those of one on a fixed number of ranks."""
        found = self.losses(run)
        steps = json.loads((self.folder / run / "summary.json").read_text())["runs"][0]["steps"]
        self.host = A
        self.succeed(self.command("-n", "2", run=f"{run}-alone", extra=(
            *SETTINGS, f"train.steps={steps}", "balance.enabled=false")))
        alone = self.losses(f"{run}-alone")
        self.assertEqual(sorted(found), list(range(steps)))
        self.assertEqual(found, alone)
        ours, theirs = (json.loads((self.folder / name / "summary.json").read_text())["runs"][0] for name in (run, f"{run}-alone"))
        self.assertEqual(ours["loss_digest"], theirs["loss_digest"])
        return ours
