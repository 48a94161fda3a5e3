# SPDX-License-Identifier: Apache-2.0
"""The hook of scripts/release/slurm in a job of a real Slurm: three nodes that are network namespaces of this host.

Needs root, and munge, slurmctld, slurmd and the client in PATH (Debian's packages); ends with 77, which is skipped, without.
Everything runs in namespaces of its own and ends with them. Ten seconds.
"""
import os
import pathlib
import shutil
import subprocess
import sys
import tempfile
import time
import unittest

HOOK = pathlib.Path(__file__).resolve().parents[2] / "scripts/release/slurm"
NODES = (1, 2, 3)
CONFIG = """ClusterName=test
SlurmctldHost=ctl(10.177.0.1)
SlurmUser=root
SlurmdUser=root
AuthType=auth/munge
AuthInfo=socket={folder}/munge/socket
CredType=cred/munge
SlurmctldPort=17817
SlurmdPort=17818
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool-%n
SlurmdPidFile={folder}/%n.pid
SlurmctldPidFile={folder}/ctl.pid
SelectType=select/linear
SchedulerType=sched/builtin
SlurmdParameters=config_overrides
ReturnToService=2
SlurmdTimeout=60
KillWait=1
MpiDefault=none
AccountingStorageType=accounting_storage/none
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
JobAcctGatherType=jobacct_gather/none
{nodes}
PartitionName=p Nodes=ALL Default=YES MaxTime=INFINITE State=UP
"""
# The "ranks" are shells; that of node3 ends at once, as a rank that was left out does.
JOB = """#!/bin/bash
cd {folder}
srun --no-kill --kill-on-bad-exit=0 --wait=0 sh -c '[ $(hostname) = node3 ] || until [ -e go-on ]; do sleep 0.1; done; touch end-$(hostname)' &
until [ -e end-node3 ]; do sleep 0.1; done
call() {{ DYNMO_RELEASED_HOSTS=$1 {hook}; echo "code $?"; }}
call node1
call node3
squeue --noheader --jobs $SLURM_JOB_ID --format %N
call node3
until [ -e second-job ]; do sleep 0.1; done
touch go-on
wait
until [ -e no-controller ]; do sleep 0.1; done
DYNMO_SLURM_TIMEOUT_S=2 call node2
touch end
"""
WANTED = """slurm: job 1 has no node left to give back; node1 runs the batch script and stays until the job ends
code 0
slurm: job 1 gave back node3
code 0
node[1-2]
slurm: job 1 has no node left to give back
code 0
slurm: no answer from squeue within 2 s
code 75
"""


def call(*words):
    return subprocess.run([str(word) for word in words], check=True, capture_output=True, text=True, timeout=60).stdout


class Cluster(unittest.TestCase):
    def setUp(self):
        temporary = tempfile.TemporaryDirectory(prefix="dynmo-slurm-")
        self.addCleanup(temporary.cleanup)
        self.folder = pathlib.Path(temporary.name)
        self.folder.chmod(0o755)
        (self.folder / "munge").mkdir(mode=0o755)
        (self.folder / "state").mkdir()
        key = self.folder / "munge" / "key"
        key.write_bytes(os.urandom(1024))
        key.chmod(0o400)
        nodes = "\n".join(f"NodeName=node{i} NodeAddr=10.177.0.1{i} CPUs=2 RealMemory=100 State=UNKNOWN" for i in NODES)
        (self.folder / "slurm.conf").write_text(CONFIG.format(folder=self.folder, nodes=nodes))
        (self.folder / "hosts").write_text("127.0.0.1 localhost\n10.177.0.1 ctl\n" + "".join(f"10.177.0.1{i} node{i}\n" for i in NODES))
        call("mount", "--bind", self.folder / "hosts", "/etc/hosts")
        os.environ["SLURM_CONF"] = str(self.folder / "slurm.conf")
        for line in ("hostname ctl", "ip link set lo up", "ip link add bridge type bridge", "ip addr add 10.177.0.1/24 dev bridge",
                     "ip link set bridge up"):
            call(*line.split())
        self.start("munged", "--foreground", "--force", f"--key-file={key}", f"--socket={self.folder}/munge/socket",
                   f"--pid-file={self.folder}/munge/pid", f"--seed-file={self.folder}/munge/seed", f"--log-file={self.folder}/munge/log")
        for i in NODES:
            holder = self.start("unshare", "--net", "--uts", "sh", "-c", f"hostname node{i}; exec sleep 1000")
            inside = ("nsenter", "--target", holder.pid, "--net", "--uts")
            self.until(lambda inside=inside, i=i: call(*inside, "hostname").strip() == f"node{i}")
            call("ip", "link", "add", f"node{i}", "type", "veth", "peer", "name", "eth0", "netns", holder.pid)
            call("ip", "link", "set", f"node{i}", "master", "bridge", "up")
            for line in (f"addr add 10.177.0.1{i}/24 dev eth0", "link set eth0 up", "link set lo up"):
                call(*inside, "ip", *line.split())
            self.start(*inside, "slurmd", "-D")
        self.controller = self.start("slurmctld", "-D")
        self.until(lambda: "3 idle" in subprocess.run(["sinfo", "-h", "-o", "%D %t"], capture_output=True, text=True).stdout)

    def start(self, *words):
        log = open(self.folder / "log", "a")
        self.addCleanup(log.close)
        process = subprocess.Popen([str(word) for word in words], stdin=subprocess.DEVNULL, stdout=log, stderr=log)
        self.addCleanup(process.wait)
        self.addCleanup(process.kill)
        return process

    def until(self, condition):
        deadline = time.monotonic() + 60
        while not condition():
            self.assertLess(time.monotonic(), deadline, (self.folder / "log").read_text()[-4000:])
            time.sleep(0.1)

    def submit(self, name, script, *options):
        (self.folder / name).write_text(script)
        call("sbatch", *options, "--chdir", self.folder, "--output", self.folder / f"{name}.out", self.folder / name)

    def test_takes_released_nodes_back_and_the_job_goes_on(self):
        self.submit("job", JOB.format(folder=self.folder, hook=HOOK), "--no-kill", "--nodes=3", "--ntasks-per-node=1")
        # It has room only once node3 was given back.
        self.submit("second", f"#!/bin/sh\nhostname > {self.folder}/name\nmv {self.folder}/name {self.folder}/second-job\n", "--nodes=1")
        self.until((self.folder / "end-node2").exists)
        self.assertEqual((self.folder / "second-job").read_text(), "node3\n")
        self.assertTrue((self.folder / "end-node1").exists())
        self.controller.kill()
        self.controller.wait()
        (self.folder / "no-controller").touch()
        self.until((self.folder / "end").exists)
        self.assertEqual((self.folder / "job.out").read_text(), WANTED)
        self.assertEqual(list(self.folder.glob("slurm_job_*")), [])


def missing():
    programs = [name for name in ("munged", "slurmctld", "slurmd", "sbatch", "scontrol", "unshare", "nsenter", "ip") if not shutil.which(name)]
    if programs:
        return f"not installed: {', '.join(programs)}"
    can = subprocess.run(["unshare", "--net", "--uts", "--pid", "--fork", "--mount", "--mount-proc", "true"], capture_output=True, text=True)
    return can.stderr.strip()


if __name__ == "__main__":
    if os.environ.get("DYNMO_TEST_INSIDE"):
        unittest.main()
    os.environ["PATH"] += ":/usr/sbin:/sbin"
    why = missing()
    if why:
        print(f"skipped: {why}")
        sys.exit(77)
    # As the first process of its own world: with it go all.
    os.environ["DYNMO_TEST_INSIDE"] = "1"
    os.execvp("unshare", ["unshare", "--net", "--uts", "--mount", "--pid", "--fork", "--kill-child", "--mount-proc", sys.executable, *sys.argv])
