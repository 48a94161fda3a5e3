# SPDX-License-Identifier: Apache-2.0
"""A run over two hosts (support/two_hosts.py) loses ranks, or the way between the hosts: who goes on, and that no two do."""
import json
import os
import random
import signal
import time

from elastic_case import LIMIT, events
from hosts_case import A, B, HostsCase
from two_hosts import ADDRESSES, RATE_BITS_PER_S, run_tests

SEED = 22
SILENCE_S = 1  # a third of the default: this is what the tests wait for


class SurvivalHosts(HostsCase):
    SETTINGS = (*HostsCase.SETTINGS, f"elastic.silence_s={SILENCE_S}")
    draw = random.Random(SEED)

    def steps(self, run):
        return max(self.losses(run), default=-1)

    def recovered(self, run, process, losses):
        """Until so many losses were survived and two steps were done since."""
        self.until(process, lambda: len(events(self.folder / run, "recovery")) == losses)
        done = self.steps(run)
        self.until(process, lambda: self.steps(run) > done + 1)

    def stop(self, run, host):
        self.host = host
        self.done(run, "stop")

    def test_ranks_of_either_host_are_killed(self):
        """The leader, too, until the lead is on the other host."""
        ranks = self.start_ranks("killed", [A, A, B, B], ADDRESSES[A])
        for turn, (victim, left) in enumerate(((3, [0, 1, 2]), (0, [1, 2]), (1, [2]))):
            ranks[victim].kill()
            self.recovered("killed", ranks[2], turn + 1)
            self.assertEqual(events(self.folder / "killed", "loss")[turn]["lost"], [victim])
            self.host = B
            self.assertEqual(self.ranks("killed"), left)
        self.assertEqual(self.job("killed")["address"], ADDRESSES[B])
        self.assertNotIn("initial values", [event["from"] for event in events(self.folder / "killed", "recovery")])
        self.stop("killed", B)
        self.ended(ranks[2], code=130)
        self.assert_same_losses("killed")

    def test_all_ranks_of_a_host_are_killed(self):
        """Snapshots lie on the other host."""
        for host in (A, B):
            with self.subTest(host):
                run = f"emptied-{host}"
                ranks = self.start_ranks(run, [A, A, B, B], ADDRESSES[A])
                mine, others = ranks[2 * host:2 * host + 2], ranks[2 * (1 - host):2 * (1 - host) + 2]
                for process in mine:
                    process.kill()
                self.until(others[0], lambda run=run: sum(len(event["lost"]) for event in events(self.folder / run, "loss")) == 2)
                done = self.steps(run)
                self.until(others[0], lambda run=run, done=done: self.steps(run) > done + 1)
                self.assertNotIn("initial values", [event["from"] for event in events(self.folder / run, "recovery")])
                self.stop(run, 1 - host)
                for process in others:
                    self.ended(process, code=130)
                self.assert_same_losses(run)

    def test_the_way_between_the_hosts_is_cut_for_a_while(self):
        """No rank is lost: nobody goes on before the others answer again."""
        ranks = self.start_ranks("cut", [A, A, B, B], ADDRESSES[A])
        link = self.hosts[A]
        link.run("ip", "link", "set", link.device, "down")
        time.sleep(2 * SILENCE_S)  # beyond what makes a silent rank a lost one
        done = self.steps("cut")
        time.sleep(SILENCE_S)
        self.assertEqual(self.steps("cut"), done)
        link.run("ip", "link", "set", link.device, "up")
        self.recovered("cut", ranks[0], 1)
        self.host = A
        self.assertEqual(self.ranks("cut"), [0, 1, 2, 3])
        self.stop("cut", A)
        for process in ranks:
            self.ended(process, code=130)
        self.assert_same_losses("cut")

    def test_a_spare_leaves_so_that_the_others_are_more_than_half(self):
        """Of two replicas of two ranks one rank is silent. Two of four are not more than half, but two of three are."""
        hosts, replicas = [A, A, A, B], "pipeline.replicas=2"
        ranks = self.start_ranks("spare", hosts, ADDRESSES[A], replicas)
        self.link(up=False)
        try:
            self.recovered("spare", ranks[0], 1)
            self.ended(ranks[2])
        finally:
            self.undo("cut", ranks, hosts)
        loss, = events(self.folder / "spare", "loss")
        self.assertEqual((loss["lost"], loss["spares"]), ([3], [2]))
        self.assertRegex(self.ended(ranks[3], code=5), "go on without")
        self.stop("spare", A)
        for process in ranks[:2]:
            self.ended(process, code=130)
        self.assert_same_losses("spare", replicas)

    def last_steps(self, run, hosts):
        """By host, the last step that one of its ranks has recorded."""
        found = {}
        for rank, host in enumerate(hosts):
            path = self.folder / run / "records" / f"rank-{rank}.jsonl"
            lines = path.read_text().splitlines() if path.exists() else []
            found[host] = max([found.get(host, -1), *(json.loads(line)["step"] for line in lines if line.endswith("}"))])
        return found

    def pass_nothing(self, host, passes_nothing):
        """Messages from there to the other host are lost; the other way is open."""
        rate = ("8bit", "burst", "10", "limit", "10")
        if not passes_nothing:
            rate = (f"{int(RATE_BITS_PER_S)}bit", "burst", "64kb", "latency", "200ms")
        self.hosts[host].run("tc", "qdisc", "replace", "dev", self.hosts[host].device, "root", "tbf", "rate", *rate)

    def link(self, up):
        self.hosts[A].run("ip", "link", "set", self.hosts[A].device, "up" if up else "down")

    def freeze(self, ranks, hosts, host, how):
        for process, at in zip(ranks, hosts):
            if at == host and process.poll() is None:
                process.send_signal(how)

    def do(self, fault, ranks, hosts):
        if fault == "cut and killed":
            ranks[-1].kill()
        if fault in ("cut", "cut and killed", "soon healed", "late healed") or fault.startswith("no power"):
            self.link(up=False)
        if fault.startswith("no power"):
            self.freeze(ranks, hosts, int(fault[-1]), signal.SIGSTOP)
        if fault.startswith("one way"):
            self.pass_nothing(int(fault[-1]), True)

    def undo(self, fault, ranks, hosts):
        self.link(up=True)
        for host in (A, B):
            self.pass_nothing(host, False)
            self.freeze(ranks, hosts, host, signal.SIGCONT)

    def settled(self, run, ranks, victim, hosts):
        """The ranks that go on, once all others have ended with 5 and a step is done since."""
        deadline = time.monotonic() + LIMIT
        done = self.steps(run)
        while True:
            left = [rank for rank, process in enumerate(ranks) if process.poll() is None]
            if left:
                self.host = hosts[left[0]]
                found = [rank["rank"] for rank in self.status(run).get("ranks", [])]
            if not left or (found == left and self.steps(run) > done + 1):
                for rank, process in enumerate(ranks):
                    if rank not in left:
                        self.ended(process, code=5 if rank != victim else -signal.SIGKILL)
                return left
            self.assertLess(time.monotonic(), deadline, f"{left} are left")
            time.sleep(0.1)

    def cell(self, hosts, fault):
        run = "-".join(map(str, (*hosts, *fault.split())))
        ranks = self.start_ranks(run, hosts, ADDRESSES[A])
        time.sleep(self.draw.uniform(0, 0.5))
        off = int(fault[-1]) if fault.startswith("no power") else None
        victim = len(hosts) - 1 if fault == "cut and killed" else None  # of host B, which alone knows that it has ended
        alive = {host: sum(at == host and rank != victim for rank, at in enumerate(hosts)) for host in (A, B)}
        known = {host: len(hosts) - (victim is not None and host == B) for host in (A, B)}
        most = next((host for host in (A, B) if 2 * alive[host] > known[host] and host != off), None)
        try:
            self.do(fault, ranks, hosts)
            if fault.endswith("healed"):
                time.sleep(SILENCE_S * (0.3 if fault.startswith("soon") else 2))  # before and after the silence that is a loss
            elif most is not None:  # goes on; of the others nobody does a step
                others = self.last_steps(run, hosts).get(1 - most)
                self.until(ranks[hosts.index(most)], lambda: len(events(self.folder / run, "recovery")) == 1)
                done = self.steps(run)
                self.until(ranks[hosts.index(most)], lambda: self.last_steps(run, hosts)[most] > done + 1)
                self.assertLessEqual(self.last_steps(run, hosts)[1 - most], others + 1)
                self.assertEqual(sorted(events(self.folder / run, "loss")[0]["lost"]),
                                 [rank for rank, host in enumerate(hosts) if host != most or rank == victim])
            else:  # nobody does
                for rank, (process, host) in enumerate(zip(ranks, hosts)):
                    if host != off and rank != victim:
                        self.assertRegex(self.ended(process, code=5), r"rank \d on host 'host-[ab]'.* may still live")
                self.assertEqual(events(self.folder / run, "recovery"), [])
        finally:
            self.undo(fault, ranks, hosts)
        left = self.settled(run, ranks, victim, hosts)
        if fault.endswith("healed") and most is None:
            self.assertEqual(left, list(range(len(hosts))))
        elif not fault.endswith("healed") and most is not None:
            self.assertEqual([hosts[rank] for rank in left], [most] * alive[most])
        if left:
            self.stop(run, hosts[left[0]])
            for rank in left:
                self.ended(ranks[rank], code=130)
            self.assert_same_losses(run)

    def test_cells(self):
        """Who goes on where hosts do not hear each other; with DYNMO_SAMPLES=all, which takes half an hour, all cells."""
        layouts = ([A, A, B, B], [A, A, A, B], [A, B, B, B], [A, B], [A, A, B, B, B])
        faults = ("cut", "cut and killed", "one way from 0", "one way from 1", "soon healed", "late healed", "no power at 0", "no power at 1")
        cells = [(hosts, fault) for hosts in layouts for fault in faults]
        if os.environ.get("DYNMO_SAMPLES") != "all":
            cells = [([A, B, B, B], "no power at 0"), ([A, A, A, B], "one way from 1")]
        for hosts, fault in cells:
            with self.subTest(hosts=hosts, fault=fault, seed=SEED):
                self.cell(hosts, fault)


if __name__ == "__main__":
    run_tests(2)
