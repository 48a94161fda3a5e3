# SPDX-License-Identifier: Apache-2.0
"""Two hosts on one machine: network namespaces with addresses and host names of their own, joined by a link of limited bandwidth.

Each knows the first one's name NAME as its own /etc/hosts has it, which on the first is a loopback address, as on Debian. Namespaces have
no names and go with the processes in them, so nothing is left behind whatever happens in a test. Wants the right to make them (root, or
user namespaces) and ip, tc, nsenter; `run_tests` exits with 77, saying what is missing, where it cannot run.
"""
import ctypes
import json
import os
import pathlib
import shutil
import signal
import subprocess
import sys
import tempfile

from drawn import run_drawn

ADDRESSES = ("10.177.0.1", "10.177.0.2")
HOST_NAMES = ("host-a", "host-b")
NAME = "first-host"
RATE_BITS_PER_S = 40e6


def die_with_parent():
    ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG


class Host:
    """A network and mount namespace with a host name; lives as long as its first process."""

    def __init__(self, number, folder):
        self.holder = subprocess.Popen(["unshare", "--net", "--mount", "--uts", "sh", "-c", "echo ready; exec sleep 100000"],
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
        self.run(sys.executable, "-c", f"import socket; socket.sethostname({HOST_NAMES[number]!r})")
        self.run("ip", "link", "set", "lo", "up")

    def inside(self, *words):
        return ["nsenter", "-t", str(self.holder.pid), "--net", "--mount", "--uts", *words]

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


def remove_hosts(hosts):
    for host in hosts:
        host.holder.kill()
        host.holder.wait()
        host.holder.stdout.close()


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
        remove_hosts(hosts)
    return ""


def run_tests(count):
    """Of a test program: as root, if only in a user namespace. CI draws `count` of them."""
    os.environ["PATH"] += ":/usr/sbin:/sbin"
    as_root = ["unshare", "--user", "--map-root-user"]
    if os.geteuid() != 0 and shutil.which("unshare") and subprocess.run([*as_root, "true"], capture_output=True).returncode == 0:
        os.execvp("unshare", [*as_root, sys.executable, *sys.argv])
    reason = missing()
    if reason:
        print(f"skipped: {reason}")
        sys.exit(77)
    sys.exit(run_drawn(count, "__main__"))
