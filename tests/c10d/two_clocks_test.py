# SPDX-License-Identifier: Apache-2.0
"""The trace of two hosts whose clocks are 3 s apart. DYNMO is the program.

The hosts are namespaces of the network, the host name and the clock. The link between them is this process: it reads packets from one TUN
device and writes them to the other one after a delay, which may differ in the two directions. Exits with 77, saying what is missing, where
it cannot run.
"""
import collections
import ctypes
import fcntl
import json
import os
import pathlib
import re
import select
import shutil
import struct
import subprocess
import sys
import tempfile
import threading
import time
import unittest

from drawn import run_drawn
from two_hosts import HOST_NAMES, die_with_parent

ADDRESSES = ("10.178.0.1", "10.178.0.2")
DEVICE = "delayed"
AHEAD_S = 3  # of the second host's clock
PORT = 29523
HOSTS = (0, 0, 1, 1)  # of the ranks
SETTINGS = [
    "model.hidden=32", "model.blocks=4", "model.heads=4", "model.kv_heads=2", "model.intermediate=48", "model.sequence=16",
    "batch.micro_batches=4", "batch.micro_batch_size=1", "train.validation_every=0", "pipeline.pin=false", "balance.enabled=false",
]
SLICE = re.compile(r"(\d+)(SEND|RECV)_([FB])(\d+)")


class Host:
    """Namespaces that live as long as their first process."""

    def __init__(self, number):
        clock = ["--time", "--monotonic", str(AHEAD_S)] if number == 1 else []
        self.holder = subprocess.Popen(["unshare", "--net", "--uts", *clock, "--fork", "--kill-child", "sh", "-c", "echo $$; exec sleep 100000"],
                                       stdout=subprocess.PIPE, stderr=subprocess.PIPE, preexec_fn=die_with_parent)
        first = self.holder.stdout.readline().strip()
        if not first:
            raise OSError(f"the namespaces were not made: {self.holder.communicate()[1].decode().strip()}")
        self.kinds = ["--net", "--uts", *(["--time"] if clock else [])]
        self.pid = int(first)
        self.run(sys.executable, "-c", f"import socket; socket.sethostname({HOST_NAMES[number]!r})")
        self.run("ip", "link", "set", "lo", "up")
        self.link = self.make_link()
        self.run("ip", "address", "add", ADDRESSES[number] + "/24", "dev", DEVICE)
        self.run("ip", "link", "set", DEVICE, "up")

    def inside(self, *words):
        return ["nsenter", "-t", str(self.pid), *self.kinds, *words]

    def run(self, *words):
        done = subprocess.run(self.inside(*words), capture_output=True, text=True, timeout=20)
        if done.returncode != 0:
            raise OSError(f"{' '.join(words)}: {done.stderr.strip()}")
        return done.stdout

    def make_link(self):
        """Returns the file of a TUN device in the host's network, which a thread enters for that."""
        result = []

        def make():
            try:
                with open(f"/proc/{self.pid}/ns/net") as network:
                    libc = ctypes.CDLL(None, use_errno=True)
                    if libc.setns(network.fileno(), 0x40000000) != 0:  # CLONE_NEWNET
                        raise OSError(ctypes.get_errno(), "setns")
                    file = os.open("/dev/net/tun", os.O_RDWR | os.O_NONBLOCK)
                    fcntl.ioctl(file, 0x400454CA, struct.pack("16sH22x", DEVICE.encode(), 0x1001))  # TUNSETIFF, IFF_TUN | IFF_NO_PI
                    result.append(file)
            except OSError as fault:
                result.append(fault)

        thread = threading.Thread(target=make)
        thread.start()
        thread.join()
        if isinstance(result[0], OSError):
            raise result[0]
        return result[0]

    def remove(self):
        os.close(self.link)
        self.holder.kill()
        self.holder.communicate()


class Relay:
    """The link: `delays_s` are those of packets from the first host and from the second one."""

    def __init__(self, hosts):
        self.files = [host.link for host in hosts]
        self.delays_s = [0, 0]
        self.stop, self.wake = os.pipe()
        self.thread = threading.Thread(target=self.work)
        self.thread.start()

    def work(self):
        waiting = [collections.deque(), collections.deque()]
        while True:
            due = [queue[0][0] for queue in waiting if queue]
            ready, _, _ = select.select([*self.files, self.stop], [], [], max(0, min(due) - time.monotonic()) if due else None)
            if self.stop in ready:
                return
            for side in (0, 1):
                if self.files[side] in ready:
                    packet = os.read(self.files[side], 65536)
                    waiting[side].append((time.monotonic() + self.delays_s[side], packet))
                while waiting[side] and waiting[side][0][0] <= time.monotonic():
                    try:
                        os.write(self.files[1 - side], waiting[side].popleft()[1])
                    except OSError:
                        pass  # TCP sends it again

    def remove(self):
        os.write(self.wake, b"x")
        self.thread.join()
        os.close(self.stop)
        os.close(self.wake)


def messages(trace, moved_us=None):
    """{name of the receive in its step: (begin of the send, end of the receive)} in microseconds; `moved_us`: of each rank's track."""
    events = trace["traceEvents"]
    ranks = {event["tid"]: int(event["args"]["name"].split()[1]) for event in events
             if event.get("name") == "thread_name" and event["args"]["name"].startswith("rank ")}
    times = {}
    for event in events:
        found = SLICE.fullmatch(event["name"]) if event["ph"] == "X" else None
        if not found:
            continue
        moved = moved_us[ranks[event["tid"]]] if moved_us else 0
        times[event["args"]["step"], *found.groups()] = event["ts"] + moved, event["ts"] + event["dur"] + moved
    paired = {}
    for (step, stage, kind, way, micro_batch), (_, end) in times.items():
        if kind == "RECV":
            sender = str(int(stage) + (-1 if way == "F" else 1))
            paired[f"step {step}, {stage}RECV_{way}{micro_batch}"] = times[step, sender, "SEND", way, micro_batch][0], end
    return paired


def before_their_sends(found):
    return {name: times for name, times in found.items() if times[1] < times[0]}


class TwoClocks(unittest.TestCase):
    @classmethod
    def setUpClass(cls):
        cls.dynmo = os.environ["DYNMO"]
        cls.folder = pathlib.Path(tempfile.mkdtemp(prefix="dynmo-clocks-"))
        cls.addClassCleanup(shutil.rmtree, cls.folder)
        cls.hosts = []
        for number in (0, 1):
            cls.hosts.append(Host(number))
            cls.addClassCleanup(cls.hosts[number].remove)
        cls.relay = Relay(cls.hosts)
        cls.addClassCleanup(cls.relay.remove)
        corpus = cls.folder / "corpus.txt"
        corpus.write_text("".join(f"{i * 7919 % 1000} and {i * 104729 % 1000}\n" for i in range(2000)))
        subprocess.run([cls.dynmo, "data", "prepare", str(corpus), "--out", str(cls.folder / "data")], check=True, capture_output=True,
                       timeout=120)

    def train(self, name, steps=6):
        run = self.folder / name
        words = [self.dynmo, "train", "--data", str(self.folder / "data"), "--out", str(run), "--steps", str(steps)]
        for setting in SETTINGS:
            words += ["--set", setting]
        processes = []
        for rank, host in enumerate(HOSTS):
            env = {**os.environ, "RANK": str(rank), "LOCAL_RANK": str(HOSTS[:rank].count(host)), "WORLD_SIZE": str(len(HOSTS)),
                   "MASTER_ADDR": ADDRESSES[0], "MASTER_PORT": str(PORT)}
            processes.append(subprocess.Popen(self.hosts[host].inside(*words), env=env, text=True, stdin=subprocess.DEVNULL,
                                              stdout=subprocess.PIPE, stderr=subprocess.PIPE, preexec_fn=die_with_parent))
        self.addCleanup(lambda: [process.kill() for process in processes])
        outputs = [process.communicate(timeout=240) for process in processes]
        for rank, process in enumerate(processes):
            self.assertEqual(process.returncode, 0, f"rank {rank}: {outputs[rank]}")
        return run, outputs[0][0]

    def check(self, run, out, least_error_s):
        trace = json.loads((run / "trace.json").read_text())
        found = messages(trace)
        self.assertEqual(len(found), 4 * 2 * 3 * 4)  # steps x directions x boundaries x micro-batches
        self.assertEqual(before_their_sends(found), {})
        clocks = trace["otherData"]["clocks"]
        print(f"{run.name}: {clocks}", flush=True)
        self.assertEqual(clocks["ranks"][:2], [{"offset_s": 0, "error_s": 0}] * 2)
        self.assertEqual(clocks["ranks"][2]["offset_s"], clocks["ranks"][3]["offset_s"])
        for rank in clocks["ranks"][2:]:
            self.assertLessEqual(abs(rank["offset_s"] - AHEAD_S), rank["error_s"])
            self.assertGreater(rank["error_s"], least_error_s)
            self.assertLess(rank["error_s"], 1)
        self.assertEqual(clocks["error_s"], max(rank["error_s"] for rank in clocks["ranks"]))
        # The error is in the files and in the report.
        (event,) = [event for line in (run / "events.jsonl").read_text().splitlines() if (event := json.loads(line))["event"] == "clocks"]
        self.assertEqual({key: event[key] for key in ("error_s", "ranks")}, clocks)
        summary = json.loads((run / "summary.json").read_text())
        self.assertEqual(summary["runs"][0]["clock_error_s"], clocks["error_s"])
        shown = subprocess.run([self.dynmo, "report", str(run)], capture_output=True, text=True, timeout=120)
        (line,) = [line for line in shown.stdout.splitlines() if line.startswith("clocks ")]
        self.assertIn(line, out.splitlines())
        self.assertRegex(line, r"right within \d+\.\d+ ms$")
        return trace, clocks

    def test_no_receive_ends_before_its_send_begins(self):
        self.relay.delays_s = [5e-3, 5e-3]
        run, out = self.train("delayed")
        trace, clocks = self.check(run, out, 5e-3)
        # Without its offset each rank would have shown the opposite.
        moved = [1e6 * rank["offset_s"] for rank in clocks["ranks"]]
        self.assertEqual(len(before_their_sends(messages(trace, moved))), 4 * 4)

    def test_the_error_covers_other_delays_there_and_back(self):
        self.relay.delays_s = [1e-3, 15e-3]
        run, out = self.train("uneven")
        self.check(run, out, 7e-3)


def missing():
    """Why this cannot run here, or an empty text."""
    for tool in ("unshare", "nsenter", "ip"):
        if shutil.which(tool) is None:
            return f"no {tool} here (packages util-linux, iproute2)"
    hosts = []
    try:
        for number in (0, 1):
            hosts.append(Host(number))
        offsets = hosts[1].run("cat", "/proc/self/timens_offsets")
        if not re.search(rf"monotonic +{AHEAD_S} ", offsets):
            return f"the clock of a namespace is not {AHEAD_S} s ahead: {offsets}"
    except OSError as fault:
        return f"no right to make namespaces with a link: {fault}"
    finally:
        for host in hosts:
            host.remove()
    return ""


if __name__ == "__main__":
    os.environ["PATH"] += ":/usr/sbin:/sbin"
    REASON = missing()
    if REASON:
        print(f"skipped: {REASON}")
        sys.exit(77)
    sys.exit(run_drawn(1, "__main__"))
