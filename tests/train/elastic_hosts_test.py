# SPDX-License-Identifier: Apache-2.0
"""A run that changes its size over two hosts (support/two_hosts.py): who joins, asks and leads from where, and what a hook is told."""
import json

from elastic_case import events
from hosts_case import A, B, HostsCase
from program import DYNMO
from two_hosts import ADDRESSES, NAME, run_tests


class ElasticHosts(HostsCase):
    def test_join_command_and_lead_from_the_other_host(self):
        hook = self.folder / "hook"
        hook.write_text("#!/bin/sh\necho \"$(uname -n) $DYNMO_RELEASED_HOSTS|$DYNMO_KEPT_HOSTS\" >> \"$DYNMO_RUN/told\"\n")
        hook.chmod(0o755)
        run = self.folder / "both"
        ranks = self.start_ranks("both", [A, A, B, B], ADDRESSES[A], f"elastic.release_command={hook}")
        self.assertEqual(self.job("both")["address"], ADDRESSES[A])
        secret = run / "secret"
        kept_secret = secret.read_text()

        self.host = B
        self.assertEqual(self.hosts_of("both"), {0: "host-a", 1: "host-a", 2: "host-b", 3: "host-b"})
        guess = self.folder / "guess"
        guess.write_text("f" * 32)
        address = self.where("both")
        for command in (["ctl", address, "--secret", str(guess), "stop"], ["train", "--join", address, "--secret", str(guess)]):
            self.refused(self.run_command([DYNMO, *command]), "wanted the run's secret")

        joiners = [self.join_at(B, "both", address, "--secret", str(secret)), self.join_at(B, "both")]
        self.until(ranks[0], lambda: self.ranks("both") == [0, 1, 2, 3, 4, 5])
        self.assertIn("packed onto 2 ranks", self.done("both", "pack", "2"))
        for process in (*ranks[2:], *joiners):
            self.ended(process)
        self.until(ranks[0], lambda: len(events(run, "release")) == 1)
        self.assertEqual(self.hosts_of("both"), {0: "host-a", 1: "host-a"})

        joiners = [self.join_at(B, "both"), self.join_at(B, "both")]
        self.until(ranks[0], lambda: self.ranks("both") == [0, 1, 6, 7])
        for number in (0, 1):
            self.done("both", "drain", str(number))
            self.ended(ranks[number])
        self.assertEqual((self.job("both")["address"], self.job("both")["host"]), (ADDRESSES[B], "host-b"))
        self.assertEqual(secret.read_text(), kept_secret)
        self.until(joiners[0], lambda: len(events(run, "release")) == 3)

        address = self.where("both")
        joiners += [self.join_at(A, "both"), self.join_at(A, "both", address, "--secret", str(secret))]
        self.until(joiners[0], lambda: len(self.ranks("both")) == 4)
        self.assertEqual(self.hosts_of("both"), {6: "host-b", 7: "host-b", 8: "host-a", 9: "host-a"})
        self.succeed([DYNMO, "ctl", address, "--secret", str(secret), "stop"])
        for process in joiners:
            self.ended(process, code=130)
        self.assertEqual((run / "told").read_text().splitlines(), [
            "host-a host-b|host-a",
            "host-a |host-a,host-b",
            "host-b host-a|host-b"])
        ours = self.assert_same_as_alone("both")
        self.assertEqual(ours["size"]["members"], 10)

    def test_packing_frees_a_whole_host(self):
        """Of ranks that came in any order, and again after a drain and joins have mixed them anew."""
        ranks = self.start_ranks("mixed", [A, B, A, B], ADDRESSES[A])
        self.assertIn("packed onto 2 ranks", self.done("mixed", "pack", "2"))
        for place in (1, 3):
            self.ended(ranks[place])
        self.assertEqual(self.hosts_of("mixed"), {0: "host-a", 2: "host-a"})
        joiners = []
        for number, host in enumerate((B, A, B), start=4):
            joiners.append(self.join_at(host, "mixed"))
            self.until(ranks[0], lambda: number in self.ranks("mixed"))
        self.done("mixed", "drain", "2")
        self.ended(ranks[2])
        self.assertEqual(self.hosts_of("mixed"), {0: "host-a", 4: "host-b", 5: "host-a", 6: "host-b"})
        cluster = json.loads((self.folder / "mixed" / "cluster.json").read_text())
        self.assertEqual([rank["node"] for rank in cluster["ranks"]], [0, 1, 0, 1])
        self.done("mixed", "pack", "2")
        self.assertEqual(self.hosts_of("mixed"), {0: "host-a", 5: "host-a"})
        self.done("mixed", "stop")
        for process in (ranks[0], joiners[1]):
            self.ended(process, code=130)
        self.assert_same_as_alone("mixed")

    def test_a_run_of_one_host_is_reached_where_it_says(self):
        # By default nobody else reaches it, and nobody hears its secret.
        process = self.start("closed", 1)
        self.assertEqual((self.job("closed")["address"], self.job("closed")["host"]), ("127.0.0.1", "host-a"))
        self.host = B
        for command in (["ctl", str(self.folder / "closed"), "status"], ["train", "--join", str(self.folder / "closed")]):
            self.refused(self.run_command([DYNMO, *command]), "of host 'host-a' only", "elastic.listen")
        self.host = A
        self.stopped("closed", process)

        process = self.start("open", 1, f"elastic.listen={ADDRESSES[A]}")
        self.assertEqual(self.job("open")["address"], ADDRESSES[A])
        joiner = self.join_at(B, "open")
        self.until(process, lambda: self.ranks("open") == [0, 1])
        self.assertIn(" -> 3 ranks", self.done("open", "grow", "1"))
        self.assertEqual(self.hosts_of("open"), {0: "host-a", 1: "host-b", 2: "host-a"})
        self.done("open", "drain", "0")
        self.assertEqual(self.job("open")["address"], ADDRESSES[B])
        self.refused(self.ctl("open", "grow", "1"), "--join RUN")
        self.host = A
        self.done("open", "stop")
        for each in (process, joiner):
            self.ended(each, code=130)
        self.assert_same_as_alone("open")

    def test_a_name_that_is_loopback_at_home(self):
        for number in (1, 2):  # one alone has no group that could tell it its address
            run = f"named-{number}"
            ranks = self.start_ranks(run, [A] * number, NAME)
            self.assertEqual(self.job(run)["address"], NAME)
            joiners = [self.join_at(host, run) for host in (A, B)]
            self.until(ranks[0], lambda: len(self.ranks(run)) == number + 2)
            for rank, process in enumerate(ranks):
                self.done(run, "drain", str(rank))
                self.ended(process)
            self.assertIn(self.job(run)["address"], ADDRESSES)
            self.done(run, "stop")
            for process in joiners:
                self.ended(process, code=130)

    def test_who_stands_by_follows_the_lead(self):
        """Two replicas take two newcomers at a time: one waits, by the address of a leader that moves away."""
        ranks = self.start_ranks("pairs", [A, B, A, B], ADDRESSES[A], "pipeline.replicas=2")
        run = self.folder / "pairs"
        first = self.join_at(B, "pairs", self.where("pairs"), "--secret", str(run / "secret"))
        self.assertEqual(first.stdout.readline(), "waiting as rank 4\n")
        self.done("pairs", "drain", "0")
        for rank in (0, 2):
            self.ended(ranks[rank])
        self.assertEqual(self.job("pairs")["address"], ADDRESSES[B])
        self.assertEqual(first.stdout.readline(), "waiting as rank 5\n")
        second = self.join_at(A, "pairs")
        self.until(ranks[1], lambda: len(self.ranks("pairs")) == 4)
        self.done("pairs", "stop")
        for process in (ranks[1], ranks[3], first, second):
            self.ended(process, code=130)

    def test_a_leader_that_listens_to_its_own_host(self):
        ranks = self.start_ranks("quiet", [A, B], ADDRESSES[A], "elastic.listen=loopback")
        self.assertEqual((self.job("quiet")["address"], self.job("quiet")["host"]), ("127.0.0.1", "host-a"))
        self.host = B
        self.refused(self.ctl("quiet", "status"), "listens at 127.0.0.1:", "of host 'host-a' only, and this is 'host-b'")
        self.host = A
        self.done("quiet", "drain", "0")
        self.ended(ranks[0])
        self.refused(self.ctl("quiet", "status"), "of host 'host-b' only, and this is 'host-a'")
        self.host = B
        self.stopped("quiet", ranks[1])

    def test_the_folder_of_the_run_is_wanted(self):
        process = self.start("here", 1, f"elastic.listen={ADDRESSES[A]}")
        secret = self.folder / "copied"
        secret.write_text((self.folder / "here" / "secret").read_text())
        self.hosts[B].run("mount", "-t", "tmpfs", "tmpfs", str(self.folder / "here"))  # there its name is another folder's
        self.host = B
        self.refused(self.run_command([DYNMO, "train", "--join", self.where("here"), "--secret", str(secret)]),
                     "is not the folder of the run at", "--join FOLDER")
        self.hosts[B].run("umount", str(self.folder / "here"))
        joiner = self.join_at(B, "here", self.where("here"), "--secret", str(secret))
        self.until(process, lambda: self.ranks("here") == [0, 1])
        self.done("here", "stop")
        for each in (process, joiner):
            self.ended(each, code=130)


if __name__ == "__main__":
    run_tests(3)
