# SPDX-License-Identifier: Apache-2.0
"""`dynmo train` over two hosts: network namespaces with addresses of their own, joined by a link of limited bandwidth.

Ranks 0 and 1 run on the first, 2 and 3 on the second; each host knows the first one's name as its own /etc/hosts has it, which
on the first is a loopback address, as on Debian. Namespaces have no names and go with the processes in them, so nothing is left
behind whatever happens here. Wants the right to make them (root, or user namespaces) and ip, tc, nsenter; exits with 77, saying
what is missing, where it cannot run. DYNMO is the program.
"""
import ctypes
import json
import os
import pathlib
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import unittest

ADDRESSES = ("10.177.0.1", "10.177.0.2")
NAME = "first-host"
PORT = 29517
RATE_BITS_PER_S = 40e6
RANKS = 4
SEQUENCE, HIDDEN, ROWS, MICRO_BATCHES = 128, 64, 4, 8
SETTINGS = [
    f"model.hidden={HIDDEN}", "model.blocks=4", "model.heads=4", "model.kv_heads=2", "model.intermediate=96",
    f"model.sequence={SEQUENCE}", f"batch.micro_batches={MICRO_BATCHES}", f"batch.micro_batch_size={ROWS}",
    "train.validation_every=0", "pipeline.pin=false", "pipeline.cut=[2,3,3,2]", "balance.enabled=false",
]


def die_with_parent():
    ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG


class Host:
    """A network and mount namespace; lives as long as its first process."""

    def __init__(self, number, folder):
        self.holder = subprocess.Popen(["unshare", "--net", "--mount", "sh", "-c", "echo ready; exec sleep 100000"],
                                       stdout=subprocess.PIPE, preexec_fn=die_with_parent)
        if self.holder.stdout.readline() != b"ready\n":
            raise OSError("the namespaces were not made")
        self.device = f"link{number}"
        hosts = folder / f"hosts-{number}"
        hosts.write_text(f"127.0.0.1 localhost\n{'127.0.1.1' if number == 0 else ADDRESSES[0]} {NAME}\n")
        self.run("mount", "--bind", str(hosts), "/etc/hosts")
        # Full shared memory, as in a container with a small /dev/shm: nothing of ours, of libtorch or of Gloo needs it.
        self.run("mount", "-t", "tmpfs", "-o", "size=4k", "tmpfs", "/dev/shm")
        self.run("sh", "-c", "head -c 4096 /dev/zero >/dev/shm/full; test \"$(df --output=avail /dev/shm | tail -n 1)\" -eq 0")
        self.run("ip", "link", "set", "lo", "up")

    def inside(self, *words):
        return ["nsenter", "-t", str(self.holder.pid), "--net", "--mount", *words]

    def run(self, *words):
        done = subprocess.run(self.inside(*words), capture_output=True, text=True, timeout=20)
        if done.returncode != 0:
            raise OSError(f"{' '.join(words)}: {done.stderr.strip()}")
        return done.stdout

    def connect(self, number):
        self.run("ip", "address", "add", ADDRESSES[number] + "/24", "dev", self.device)
        self.run("ip", "link", "set", self.device, "up")
        self.run("tc", "qdisc", "add", "dev", self.device, "root", "tbf", "rate", f"{int(RATE_BITS_PER_S)}bit", "burst", "64kb",
                 "latency", "200ms")

    def sent_bytes(self):
        return int(json.loads(self.run("ip", "-s", "-j", "link", "show", self.device))[0]["stats64"]["tx"]["bytes"])


def make_hosts(folder):
    hosts = [Host(number, folder) for number in (0, 1)]
    hosts[0].run("ip", "link", "add", hosts[0].device, "type", "veth", "peer", "name", hosts[1].device, "netns",
                 str(hosts[1].holder.pid))
    for number, host in enumerate(hosts):
        host.connect(number)
    return hosts


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
        for host in cls.hosts:
            host.holder.kill()
            host.holder.wait()
            host.holder.stdout.close()
        shutil.rmtree(cls.folder)

    def command(self, run, steps):
        words = [self.dynmo, "train", "--data", str(self.folder / "data"), "--out", str(run), "--steps", str(steps)]
        for setting in SETTINGS:
            words += ["--set", setting]
        return words

    def start(self, run, steps, master):
        processes = []
        for rank in range(RANKS):
            env = {**os.environ, "RANK": str(rank), "LOCAL_RANK": str(rank % 2), "WORLD_SIZE": str(RANKS),
                   "MASTER_ADDR": master, "MASTER_PORT": str(PORT)}
            processes.append(subprocess.Popen(self.hosts[rank // 2].inside(*self.command(run, steps)), env=env, text=True,
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


def missing():
    """Why this cannot run here, or an empty text."""
    for tool in ("unshare", "nsenter", "ip", "tc", "mount"):
        if shutil.which(tool) is None:
            return f"no {tool} here (packages util-linux, iproute2)"
    with tempfile.TemporaryDirectory() as folder:
        try:
            hosts = make_hosts(pathlib.Path(folder))
        except OSError as fault:
            return f"no right to make network namespaces: {fault}"
        for host in hosts:
            host.holder.kill()
            host.holder.wait()
            host.holder.stdout.close()
    return ""


if __name__ == "__main__":
    os.environ["PATH"] += ":/usr/sbin:/sbin"
    as_root = ["unshare", "--user", "--map-root-user"]
    if os.geteuid() != 0 and shutil.which("unshare") and subprocess.run([*as_root, "true"], capture_output=True).returncode == 0:
        os.execvp("unshare", [*as_root, sys.executable, *sys.argv])
    reason = missing()
    if reason:
        print(f"skipped: {reason}")
        sys.exit(77)
    unittest.main(verbosity=2)
