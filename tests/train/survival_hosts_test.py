# SPDX-License-Identifier: Apache-2.0
"""A run over two hosts (support/two_hosts.py) loses ranks, or the way between the hosts: who goes on, and that no two do."""
import os
import time
import unittest

from elastic_case import LIMIT, events
from hosts_case import A, B, HostsCase
from two_hosts import ADDRESSES, run_tests


class SurvivalHosts(HostsCase):
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
        self.assert_same_as_alone("killed")

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
                self.assert_same_as_alone(run)

    def test_the_way_between_the_hosts_is_cut_for_a_while(self):
        """No rank is lost: nobody goes on before the others answer again."""
        ranks = self.start_ranks("cut", [A, A, B, B], ADDRESSES[A])
        link = self.hosts[A]
        link.run("ip", "link", "set", link.device, "down")
        time.sleep(5)  # as long as the cut lasts: beyond the three seconds after which a silent rank is lost
        done = self.steps("cut")
        time.sleep(1)
        self.assertEqual(self.steps("cut"), done)
        link.run("ip", "link", "set", link.device, "up")
        self.recovered("cut", ranks[0], 1)
        self.host = A
        self.assertEqual(self.ranks("cut"), [0, 1, 2, 3])
        self.stop("cut", A)
        for process in ranks:
            self.ended(process, code=130)
        self.assert_same_as_alone("cut")

    @unittest.skipUnless(os.environ.get("DYNMO_SAMPLES") == "all", "takes more than a minute each")
    def test_the_way_between_the_hosts_is_cut_for_good(self):
        for hosts in ([A, A, B, B], [A, A, A, B], [A, B]):
            with self.subTest(hosts):
                run = "apart-" + "".join(map(str, hosts))
                ranks = self.start_ranks(run, hosts, ADDRESSES[A])
                link = self.hosts[A]
                link.run("ip", "link", "set", link.device, "down")
                try:
                    time.sleep(5)
                    done = self.steps(run)
                    for process in ranks:
                        self.assertRegex(self.ended(process, code=5), r"rank \d on host 'host-[ab]'.* may still live")
                    self.assertEqual(self.steps(run), done)
                finally:
                    link.run("ip", "link", "set", link.device, "up")


if __name__ == "__main__":
    run_tests()
