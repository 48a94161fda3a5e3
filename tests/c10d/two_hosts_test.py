# SPDX-License-Identifier: Apache-2.0
"""`dynmo train` over two hosts (support/two_hosts.py): ranks 0 and 1 run on the first, 2 and 3 on the second. DYNMO is the program."""
import json
import os
import pathlib
import random
import shutil
import subprocess
import sys
import tempfile
import time
import unittest

from two_hosts import ADDRESSES, NAME, RATE_BITS_PER_S, die_with_parent, make_hosts, remove_hosts, run_tests

PORT = 29517
RANKS = 4
SEQUENCE, HIDDEN, ROWS, MICRO_BATCHES = 128, 64, 4, 8
SETTINGS = [
    f"model.hidden={HIDDEN}", "model.blocks=4", "model.heads=4", "model.kv_heads=2", "model.intermediate=96",
    f"model.sequence={SEQUENCE}", f"batch.micro_batches={MICRO_BATCHES}", f"batch.micro_batch_size={ROWS}",
    "train.validation_every=0", "pipeline.pin=false", "pipeline.cut=[2,3,3,2]", "balance.enabled=false",
]
# Becomes a program on a machine of that name.
NAMED = "import os, socket, sys; socket.sethostname(sys.argv[1]); os.execv(sys.argv[2], sys.argv[2:])"


def losses(run):
    return [json.loads(line)["loss"] for line in (run / "records" / "rank-0.jsonl").read_text().splitlines()]


class TwoHosts(unittest.TestCase):
    @classmethod
    def setUpClass(cls):
        cls.dynmo = os.environ["DYNMO"]
        cls.folder = pathlib.Path(tempfile.mkdtemp(prefix="dynmo-hosts-"))
        cls.hosts = make_hosts(cls.folder)
        draw = random.Random(1)
        corpus = cls.folder / "corpus.txt"
        corpus.write_text("".join(f"{draw.randrange(1000)} and {draw.randrange(1000)}\n" for _ in range(4000)))
        subprocess.run([cls.dynmo, "data", "prepare", str(corpus), "--out", str(cls.folder / "data")], check=True,
                       capture_output=True, timeout=60)

    @classmethod
    def tearDownClass(cls):
        remove_hosts(cls.hosts)
        shutil.rmtree(cls.folder)

    def command(self, run, steps, settings=()):
        words = [self.dynmo, "train", "--data", str(self.folder / "data"), "--out", str(run), "--steps", str(steps)]
        for setting in [*SETTINGS, *settings]:
            words += ["--set", setting]
        return words

    def start(self, run, steps, master, hosts=(0, 0, 1, 1), settings=(), names=(), variables=({},) * RANKS):
        """`names`: of the ranks' machines, where they are others than the hosts'. `variables`: more of each rank's environment."""
        processes = []
        for rank in range(RANKS):
            env = {**os.environ, "RANK": str(rank), "LOCAL_RANK": str(hosts[:rank].count(hosts[rank])), "WORLD_SIZE": str(RANKS),
                   "MASTER_ADDR": master, "MASTER_PORT": str(PORT), **variables[rank]}
            words = self.command(run, steps, settings)
            if names:
                words = ["unshare", "--uts", sys.executable, "-c", NAMED, names[rank], *words]
            processes.append(subprocess.Popen(self.hosts[hosts[rank]].inside(*words), env=env, text=True,
                                              stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
                                              preexec_fn=die_with_parent))
        self.addCleanup(lambda: [process.kill() for process in processes])
        return processes

    def test_losses_equal_those_on_one_host(self):
        alone = self.folder / "alone"
        done = subprocess.run([*self.command(alone, 5), "-n", str(RANKS)], capture_output=True, text=True, timeout=120)
        self.assertEqual(done.returncode, 0, done.stderr)
        for master in (ADDRESSES[0], NAME):
            with self.subTest(master=master):
                run = self.folder / f"at-{master}"
                before = [host.sent_bytes() for host in self.hosts]
                for rank, process in enumerate(self.start(run, 5, master)):
                    out, err = process.communicate(timeout=120)
                    self.assertEqual(process.returncode, 0, f"rank {rank}: {out}{err}")
                self.assertEqual(losses(run), losses(alone))
                # The hidden tensors of a step cross once each way, and no faster than the link is.
                step_bytes = MICRO_BATCHES * ROWS * SEQUENCE * HIDDEN * 4
                for host, sent in zip(self.hosts, before):
                    self.assertGreater(host.sent_bytes() - sent, 5 * step_bytes)
                records = [json.loads(line) for line in (run / "records" / "rank-0.jsonl").read_text().splitlines()]
                for record in records:
                    self.assertGreater(record["step_s"], 0.9 * 8 * step_bytes / RATE_BITS_PER_S)

    def test_ranks_that_came_in_any_order_are_placed_by_host(self):
        """A B A B: with pipeline.place = "hosts" the pipeline crosses the link once, not three times, with the same losses."""
        summaries = {}
        for name, hosts, place in [("together", (0, 0, 1, 1), "given"), ("placed", (0, 1, 0, 1), "hosts"), ("mixed", (0, 1, 0, 1), "given")]:
            run = self.folder / name
            for rank, process in enumerate(self.start(run, 6, ADDRESSES[0], hosts, [f"pipeline.place={place}"])):
                out, err = process.communicate(timeout=120)
                self.assertEqual(process.returncode, 0, f"{name}, rank {rank}: {out}{err}")
            start = json.loads((run / "events.jsonl").read_text().splitlines()[0])
            nodes = [hosts[stage["rank"]] for stage in start["plan"]["stages"]]
            crossings = sum(a != b for a, b in zip(nodes, nodes[1:]))
            self.assertEqual(crossings, 3 if name == "mixed" else 1, nodes)
            summaries[name] = json.loads((run / "summary.json").read_text())["runs"][0]
            cluster = json.loads((run / "cluster.json").read_text())
            self.assertEqual([rank["node"] for rank in cluster["ranks"]], list(hosts))
            link = cluster["links"]["between_nodes"]
            self.assertLess(link["bandwidth_bytes_per_s"], 2 * RATE_BITS_PER_S / 8)
            records = [json.loads(line) for line in (run / "records" / "rank-0.jsonl").read_text().splitlines()]
            times = sorted(record["step_s"] for record in records)
            print(f"{name}: step {times[len(times) // 2]:.3f} s, predicted {records[-1]['predicted_s']:.3f} s, link {link}", flush=True)
        self.assertEqual(len({summary["loss_digest"] for summary in summaries.values()}), 1)
        # What crosses the link, by the counted messages between hosts.
        crossed = {}
        for name, hosts in [("together", (0, 0, 1, 1)), ("placed", (0, 1, 0, 1)), ("mixed", (0, 1, 0, 1))]:
            crossed[name] = sum(row["bytes"] for row in summaries[name]["traffic"]
                                if hosts[row["from"]] != hosts[row["to"]] and row["purpose"] in ("activation", "gradient"))
        self.assertEqual(crossed["placed"], crossed["together"])
        self.assertEqual(crossed["mixed"], 3 * crossed["together"])
        # `dynmo plan` takes the measured cluster.
        done = subprocess.run([self.dynmo, "plan", str(self.folder / "mixed" / "profile.json"), "--cluster", str(self.folder / "mixed" / "cluster.json"),
                               "--place", "--balancer", "optimal", "--schedule", "1f1b"], capture_output=True, text=True, timeout=60)
        self.assertEqual(done.returncode, 0, done.stderr)

    def test_switches_that_slurm_names_are_a_level(self):
        """Four machines, two at either end of the link: as switches that Slurm names they are told apart, and the pipeline crosses once."""
        places = (0, 1, 0, 1)
        machines = ("node1", "node2", "node3", "node4")

        def topology(rank, address):
            return {"SLURM_TOPOLOGY_ADDR": address.format(switch=places[rank], node=machines[rank]),
                    "SLURM_TOPOLOGY_ADDR_PATTERN": "switch.switch.node"}

        good = [topology(rank, "top.leaf{switch}.{node}") for rank in range(RANKS)]
        bad = [*good[:3], topology(3, "{node}")]
        for name, variables in (("switches", good), ("bad", bad), ("none", [{}] * RANKS)):
            run = self.folder / name
            outputs = []
            for rank, process in enumerate(self.start(run, 3, ADDRESSES[0], places, names=machines, variables=variables)):
                outputs.append(process.communicate(timeout=120))
                self.assertEqual(process.returncode, 0, f"{name}, rank {rank}: {outputs[-1]}")
            cluster = json.loads((run / "cluster.json").read_text())
            self.assertEqual([rank["node"] for rank in cluster["ranks"]], [0, 1, 2, 3])
            self.assertEqual([rank.get("switch", 0) for rank in cluster["ranks"]], list(places) if name == "switches" else [0] * 4)
            lines = [line for text, _ in outputs for line in text.splitlines() if "SLURM_TOPOLOGY_ADDR" in line]
            self.assertEqual(len(lines), 1 if name == "bad" else 0, outputs)
            if name == "bad":
                self.assertIn("rank 3 has SLURM_TOPOLOGY_ADDR='node4' with SLURM_TOPOLOGY_ADDR_PATTERN='switch.switch.node'", lines[0])
            links = cluster["links"]
            self.assertEqual("between_switches" in links, name == "switches")
            if name != "switches":
                continue
            slow = links["between_switches"]["bandwidth_bytes_per_s"]
            self.assertLess(slow, 2 * RATE_BITS_PER_S / 8)
            self.assertGreater(links["between_nodes"]["bandwidth_bytes_per_s"], 4 * slow)
            start = json.loads((run / "events.jsonl").read_text().splitlines()[0])
            ends = [places[stage["rank"]] for stage in start["plan"]["stages"]]
            self.assertEqual(sum(a != b for a, b in zip(ends, ends[1:])), 1, ends)
        self.assertEqual(losses(self.folder / "switches"), losses(self.folder / "none"))

    def test_a_cut_link_ends_all_ranks(self):
        run = self.folder / "cut"
        processes = self.start(run, 100000, ADDRESSES[0])
        records = run / "records" / "rank-3.jsonl"
        deadline = time.monotonic() + 60
        while not records.exists() or not records.read_text():
            self.assertLess(time.monotonic(), deadline, "no step within a minute")
            ended = [p.communicate() for p in processes if p.poll() is not None]
            self.assertEqual(ended, [])
            time.sleep(0.05)
        self.hosts[0].run("ip", "link", "set", self.hosts[0].device, "down")
        self.addCleanup(self.hosts[0].run, "ip", "link", "set", self.hosts[0].device, "up")
        start = time.monotonic()
        outputs = [process.communicate(timeout=60) for process in processes]
        # 3 s of silence make a loss.
        self.assertLess(time.monotonic() - start, 30, outputs)
        for rank, (process, (_, err)) in enumerate(zip(processes, outputs)):
            self.assertEqual(process.returncode, 5, f"rank {rank}: {err}")
            lines = [line for line in err.splitlines() if line.startswith("dynmo: error")]
            self.assertEqual(len(lines), 1, err)
            # Each side loses one of the other side.
            self.assertRegex(lines[0], r"rank [23] was lost: nothing was heard of it for \d+\.\d s" if rank < 2 else
                             r"rank 0 was lost: nothing was heard of it for \d+\.\d s")


if __name__ == "__main__":
    run_tests(2)
