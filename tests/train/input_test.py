# SPDX-License-Identifier: Apache-2.0
"""What is wrong with a run is said before it starts, and what it would be."""
import json
import os
import re
import resource
import socket
import subprocess

from program import held_port
from run_case import RunCase


class BadInput(RunCase):
    def test_a_model_that_this_host_cannot_hold(self):
        """A model that some cluster may hold, but not this host; what it would be is answered all the same."""
        large = ["model.hidden=65536", "model.blocks=400"]
        self.assert_error(self.run_command(self.command("-n", "2", extra=large)), 2, "this host has", "model.hidden")
        result = self.succeed(self.command("-n", "2", "--dry-run", extra=large))
        self.assertIn("TiB", result.stdout)

    def test_recompute_with_an_impossible_limit(self):
        result = self.run_command(self.command("-n", "2", "--set", "pipeline.recompute=auto", "--set", "pipeline.memory=1KiB"))
        self.assertEqual(result.returncode, 3, result.stdout + result.stderr)  # known after measuring: every rank says so
        self.assertIn("fits their memory", result.stderr)

    def test_port_in_use(self):
        with socket.socket() as taken:
            taken.bind(("127.0.0.1", 0))
            taken.listen()
            port = taken.getsockname()[1]
            env = {"RANK": "0", "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
            self.assert_error(self.run_command(self.command(), env=env), 2, str(port), "in use")

    def test_ranks_with_different_commands(self):
        for number, (setting, given) in enumerate([("optimizer.learning_rate=1", "learning_rate = 1"), ("train.seed=7", "seed = 7"),
                                                   ("model.hidden=64", "hidden = 64"), ("batch.micro_batches=8", "micro_batches = 8")]):
            with self.subTest(setting), held_port() as port:
                processes = []
                for rank, extra in ((0, ()), (1, (setting,))):
                    env = {**os.environ, "RANK": str(rank), "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
                    processes.append(subprocess.Popen(self.command(run=f"differs-{number}", extra=extra), env=env, text=True,
                                                      stdout=subprocess.PIPE, stderr=subprocess.PIPE, cwd=self.folder))
                for process in processes:
                    _, err = process.communicate(timeout=120)
                    self.assertEqual(process.returncode, 2, err)
                    self.assertEqual(len(err.splitlines()), 1, err)
                    self.assertIn(f"rank 1 was started with '{given}", err)
                    self.assertIn("same command", err)

    def test_too_few_open_files(self):
        def limited(hard, soft):
            return lambda: resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
        start = {"capture_output": True, "text": True, "timeout": 60, "stdin": subprocess.DEVNULL, "cwd": self.folder}
        done = subprocess.run(self.command("-n", "8"), preexec_fn=limited(40, 40), **start)
        self.assert_error(done, 2, "at most 40 open files", "wanted 48", "ulimit -n 48")
        # A rank wants more than a launcher of as many.
        env = {**os.environ, "RANK": "0", "WORLD_SIZE": "8", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "1"}
        done = subprocess.run(self.command(), preexec_fn=limited(60, 60), env=env, **start)
        self.assert_error(done, 2, "rank 0 of 8", "at most 60 open files", "wanted 96")
        # A soft limit is raised.
        done = subprocess.run(self.command("-n", "2", "--steps", "1", run="raised"), preexec_fn=limited(100, 30), **start)
        self.succeeded(done)


class DryRun(RunCase):
    def dry_run(self, *words, extra=()):
        return self.run_command(self.command("--dry-run", *words, run="never", extra=extra))

    def rows(self, result):
        """Words of the table, by rank."""
        self.succeeded(result)
        self.assertFalse((self.folder / "never").exists())
        lines = result.stdout.splitlines()
        head = next(i for i, line in enumerate(lines) if line.split()[:2] == ["rank", "layers"])
        return [re.sub(r" (?=[KMG]?i?B)", "", line).split() for line in lines[head + 1:]]

    @staticmethod
    def kibibytes(count):
        return f"{count / 1024:.1f}KiB"

    def test_says_what_a_run_holds(self):
        cut = [3, 2, 3]
        self.succeed(self.command("-n", "3", "--steps", "2", run="real", extra=["pipeline.cut=[3,2,3]"]))
        layers = json.loads((self.folder / "real" / "profile.json").read_text())["layers"]
        result = self.dry_run("-n", "3", extra=["pipeline.cut=[3,2,3]"])
        rows = self.rows(result)
        self.assertIn("measured here, one layer of each of 4 kinds", result.stdout)
        self.assertRegex(result.stdout, r"step +[0-9.]+ [mun]?s predicted")
        first = 0
        for rank, count in enumerate(cut):
            own = layers[first:first + count]
            parameters = sum(layer["parameter_bytes"] for layer in own)
            stashes = min(4, 3 - rank) * sum(layer["activation_bytes"] for layer in own)  # 1F1B, 4 micro-batches
            self.assertEqual(rows[rank], [str(rank), f"{first}-{first + count - 1}", self.kibibytes(parameters),
                                          self.kibibytes(parameters), self.kibibytes(2 * parameters), self.kibibytes(stashes),
                                          self.kibibytes(4 * parameters + stashes)])
            first += count

    def test_counts_compute_copies_where_there_are_any(self):
        rows = self.rows(self.dry_run("-n", "2", extra=["model.precision=bf16"]))
        for row in rows:
            amounts = [float(amount[:-3]) * {"K": 1, "M": 1024, "G": 1 << 20}[amount[-3]] for amount in row[2:]]
            self.assertEqual(len(amounts), 6)  # parameters, copies, gradients, optimizer, activations, together
            self.assertAlmostEqual(amounts[1], amounts[0] / 2, delta=0.01 * amounts[0])
            self.assertAlmostEqual(sum(amounts[:-1]), amounts[-1], delta=0.05 * amounts[-1])

    def test_formulas_have_the_vocabulary_of_the_model(self):
        large = ["model.hidden=8192", "model.heads=64", "model.kv_heads=8", "model.intermediate=28672", "model.blocks=8",
                 "model.sequence=4096"]

        def seconds(*extra):
            said = self.dry_run("-n", "2", extra=[*large, *extra]).stdout
            self.assertIn("by formulas", said)
            return float(re.search(r"step +([0-9.]+) s predicted", said)[1])

        self.assertGreater(seconds("model.vocabulary=200000"), 1.1 * seconds())

    def test_uses_formulas_for_what_it_cannot_measure(self):
        large = ["model.hidden=8192", "model.heads=64", "model.kv_heads=8", "model.intermediate=28672", "model.blocks=80",
                 "model.sequence=4096"]
        result = self.dry_run("-n", "8", extra=large)
        self.assertEqual(len(self.rows(result)), 8)
        self.assertIn("by formulas", result.stdout)

    def test_on_several_hosts_says_what_crosses_them(self):
        hosts = self.folder / "hosts.json"

        def crossing(*nodes, extra=()):
            hosts.write_text(json.dumps({"format": "dynmo-cluster-1", "ranks": [{"node": node} for node in nodes],
                                         "links": {"inside_node": {"latency_s": 1e-6, "bandwidth_bytes_per_s": 1e10},
                                                   "between_nodes": {"latency_s": 1e-4, "bandwidth_bytes_per_s": 5e6}}}))
            result = self.dry_run("--cluster", str(hosts), extra=extra)
            self.assertEqual(len(self.rows(result)), len(nodes))
            found = re.search(r"with ([0-9.]+ [KMG]?i?B) in (\d+) messages between hosts", result.stdout)
            return int(found[2]) if found else 0

        micro_batches = 4
        self.assertEqual(crossing(0, 0, 0, 0), 0)
        self.assertEqual(crossing(1, 1, 1, 1), 0)  # one host, whatever its number
        self.assertEqual(crossing(0, 0, 1, 1), 2 * micro_batches)
        self.assertEqual(crossing(0, 1, 0, 1), 2 * micro_batches)  # placed as 0 2 | 1 3
        self.assertEqual(crossing(0, 1, 0, 1, extra=["pipeline.place=given"]), 6 * micro_batches)
        self.assertEqual(crossing(0, 1, 0, 1, extra=["pipeline.cut=[2,2,2,2]"]), 2 * micro_batches)
        self.assert_error(self.dry_run("--cluster", str(hosts), "-n", "3"), 2, "the cluster has 4 ranks", "is 3")
        self.assert_error(self.dry_run("--cluster", str(self.folder / "none.json")), 2, "none.json")
        hosts.write_text("{}")
        self.assert_error(self.dry_run("--cluster", str(hosts)), 2, "hosts.json")

    def test_speaks_for_rank_0_of_ranks_that_were_started(self):
        env = {"WORLD_SIZE": "4", "MASTER_ADDR": "nowhere", "MASTER_PORT": "1"}
        first = self.run_command(self.command("--dry-run", run="never"), env={**env, "RANK": "0"})
        self.assertEqual(len(self.rows(first)), 4)
        other = self.run_command(self.command("--dry-run", run="never"), env={**env, "RANK": "3"})
        self.assertEqual((other.returncode, other.stdout), (0, ""))
