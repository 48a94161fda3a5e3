# SPDX-License-Identifier: Apache-2.0
"""The hooks of scripts/release against stubs of scontrol, squeue and kubectl that replay answers.

The answers were recorded from kubectl 1.32, before a server that gave them, and from Slurm 22.05; a few messages of Slurm that are
hard to come by are from its list of errors. Here no cluster is asked; slurm_cluster_test.py asks one.
"""
import os
import pathlib
import shutil
import signal
import subprocess
import tempfile
import time
import unittest

HOOKS = pathlib.Path(__file__).resolve().parents[2] / "scripts/release"

# Replays the next answer, whichever program is asked.
STUB = """#!/bin/sh
answers={folder}
n=$(($(cat $answers/calls | wc -l) + 1))
echo "$(basename $0) $*" >> $answers/calls
pwd > $answers/$n.pwd
if [ -e $answers/$n.hangs ]; then exec sleep 1000; fi
if [ $1 = update ]; then touch slurm_job_17_resize.sh slurm_job_17_resize.csh; fi
cat $answers/$n.out
cat $answers/$n.err >&2
exit $(cat $answers/$n.code)
"""
HANGS = object()


def fails(message):
    return "", message, 1


def becomes_true(condition):
    deadline = time.monotonic() + 60
    while not condition() and time.monotonic() < deadline:
        time.sleep(0.01)
    return condition()


def is_gone(group):
    """Whether no process of the group is left; those that have ended may wait for the system to collect them."""
    try:
        os.killpg(group, 0)
    except ProcessLookupError:
        return True
    return False


class HookCase(unittest.TestCase):
    programs = ()

    def setUp(self):
        temporary = tempfile.TemporaryDirectory(prefix="dynmo-test-")
        self.addCleanup(temporary.cleanup)
        self.folder = pathlib.Path(temporary.name)
        for name in ("bin", "run", "tmp"):
            (self.folder / name).mkdir()
        for program in self.programs:
            stub = self.folder / "bin" / program
            stub.write_text(STUB.format(folder=self.folder))
            stub.chmod(0o755)

    def run_hook(self, name, environment, *answers):
        """Exit code and the last line of a call whose programs give `answers`; leaves `self.calls`."""
        for old in self.folder.glob("[0-9]*.*"):
            old.unlink()
        (self.folder / "calls").write_text("")
        for n, answer in enumerate(answers, 1):
            if answer is HANGS:
                (self.folder / f"{n}.hangs").touch()
                continue
            out, err, code = (answer, "", 0) if isinstance(answer, str) else answer
            for kind, text in (("out", out), ("err", err), ("code", str(code))):
                (self.folder / f"{n}.{kind}").write_text(text + "\n" if text else "")
        variables = {"PATH": f"{self.folder / 'bin'}:/usr/bin:/bin", "TMPDIR": str(self.folder / "tmp"), "HOME": str(self.folder)}
        done = subprocess.run([HOOKS / name], env={**variables, **environment}, cwd=self.folder / "run", capture_output=True,
                              text=True, timeout=100, check=False, stdin=subprocess.DEVNULL)
        self.calls = (self.folder / "calls").read_text().splitlines()
        self.assertEqual(done.stderr, "")
        self.assertEqual(len(self.calls), len(answers), self.calls)
        for place in ("run", "tmp"):
            self.assertEqual(os.listdir(self.folder / place), [])
        lines = done.stdout.splitlines()
        self.assertEqual(len(lines), 1, lines)
        self.assertTrue(lines[0].startswith(name + ": "), lines)
        return done.returncode, lines[0][len(name) + 2:]


class Slurm(HookCase):
    programs = ("scontrol", "squeue")
    squeue = "squeue --noheader --jobs 17 --format %T|%B|%N"

    def hook(self, released, *answers, job="17", **more):
        environment = {"DYNMO_RELEASED_HOSTS": released, "DYNMO_KEPT_HOSTS": "node1", "SLURM_JOB_ID": job, **more}
        return self.run_hook("slurm", environment, *answers)

    def test_takes_the_released_nodes_out_of_the_job(self):
        answer = self.hook("node3,node4", "RUNNING|node1|node[1-4]", "node1\nnode2\nnode3\nnode4",
                           "To reset Slurm environment variables, execute\n  For bash or sh shells:  . ./slurm_job_17_resize.sh",
                           "RUNNING|node1|node[1-2]", "node1\nnode2")
        self.assertEqual(answer, (0, "job 17 gave back node3,node4"))
        self.assertEqual(self.calls, [self.squeue, "scontrol show hostnames node[1-4]", "scontrol update JobId=17 NodeList=node1,node2",
                                      self.squeue, "scontrol show hostnames node[1-2]"])
        self.assertNotEqual((self.folder / "3.pwd").read_text().strip(), str(self.folder / "run"))

    def test_leaves_the_node_of_the_batch_script(self):
        nodes = ["RUNNING|node1|node[1-2]", "node1\nnode2"]
        self.assertEqual(self.hook("node1,node2", *nodes, "", "RUNNING|node1|node1", "node1"),
                         (0, "job 17 gave back node2; node1 runs the batch script and stays until the job ends"))
        self.assertEqual(self.calls[2], "scontrol update JobId=17 NodeList=node1")
        self.assertEqual(self.hook("node1", *nodes),
                         (0, "job 17 has no node left to give back; node1 runs the batch script and stays until the job ends"))

    def test_does_nothing_a_second_time(self):
        self.assertEqual(self.hook("node2", "RUNNING|node1|node1", "node1"), (0, "job 17 has no node left to give back"))

    def test_keeps_nodes_that_are_neither_released_nor_in_use(self):
        self.hook("node3", "RUNNING|node1|node[1-3]", "node1\nnode2\nnode3", "", "RUNNING|node1|node[1-2]", "node1\nnode2")
        self.assertEqual(self.calls[2], "scontrol update JobId=17 NodeList=node1,node2")

    def test_knows_hosts_by_their_names_with_a_domain(self):
        answer = self.hook("node2.cluster.org", "RUNNING|node1|node[1-2]", "node1\nnode2", "", "RUNNING|node1|node1", "node1")
        self.assertEqual(answer, (0, "job 17 gave back node2"))
        answer = self.hook("node2", "RUNNING|node1.c|node1.c,node2.c", "node1.c\nnode2.c", "", "RUNNING|node1.c|node1.c", "node1.c")
        self.assertEqual(answer, (0, "job 17 gave back node2.c"))

    def test_asks_for_another_call_where_another_answer_is_likely(self):
        nodes = ["RUNNING|node1|node[1-2]", "node1\nnode2"]
        for message in ("slurm_load_jobs error: Unable to contact slurm controller (connect failure)",
                        "slurm_load_jobs error: Socket timed out on send/recv operation",
                        "slurm_load_jobs error: Slurm backup controller in standby mode"):
            self.assertEqual(self.hook("node2", fails(message)), (75, message))
        for message in ("Job can not be altered now, try again later for job 17",
                        "Job update not available right now, the DB index is being set, try again in a bit for job 17"):
            self.assertEqual(self.hook("node2", *nodes, fails(message)), (75, message))
        self.assertEqual(self.hook("node2", "SUSPENDED|node1|node[1-2]", "node1\nnode2"), (75, "job 17 is in state SUSPENDED"))
        self.assertEqual(self.hook("node2", *nodes, "", *nodes), (75, "job 17 still has node2"))
        self.assertEqual(self.hook("node2", *nodes, HANGS, DYNMO_SLURM_TIMEOUT_S="1"), (75, "no answer from scontrol within 1 s"))

    def test_says_what_it_was_refused(self):
        nodes = ["RUNNING|node1|node[1-2]", "node1\nnode2"]
        for message in ("Requested operation not supported on this system for job 17", "Invalid user id for job 17",
                        "Invalid node name specified for job 17"):
            self.assertEqual(self.hook("node2", *nodes, fails(message)), (1, "scontrol: " + message))
        message = "slurm_load_jobs error: Invalid job id specified"
        self.assertEqual(self.hook("node2", fails(message)), (1, "squeue: " + message))

    def test_never_asks_for_what_cannot_be(self):
        self.assertEqual(self.hook(""), (0, "every host still has ranks, nothing to give back"))
        self.assertEqual(self.hook("node2", job="")[0], 2)
        self.assertEqual(self.hook("node2", "COMPLETING|node1|node[1-2]", "node1\nnode2"),
                         (0, "job 17 is ending, its nodes go back with it"))
        self.assertEqual(self.hook("node2", ""), (0, "job 17 is ending, its nodes go back with it"))
        # In a job without a batch script.
        self.assertEqual(self.hook("node2", "RUNNING|login|node2", "node2"),
                         (1, "all nodes of job 17 would go: cancel the job instead"))


class Kubernetes(HookCase):
    programs = ("kubectl",)

    def hook(self, kept, *answers, **more):
        return self.run_hook("kubernetes", {"DYNMO_KEPT_HOSTS": kept, "HOSTNAME": "train-0", **more}, *answers)

    def test_lowers_parallelism_and_completions_together(self):
        self.assertEqual(self.hook("train-0,train-1", "Indexed 4 4 41", "2 2"), (0, "Job 'train' now has 2 of 4 pods"))
        self.assertEqual(self.calls, [
            "kubectl --request-timeout 20s get job train --output "
            "jsonpath={.spec.completionMode} {.spec.parallelism} {.spec.completions} {.metadata.resourceVersion}",
            "kubectl --request-timeout 20s patch job train --type merge --output jsonpath={.spec.parallelism} {.spec.completions} --patch "
            '{"metadata":{"resourceVersion":"41"},"spec":{"parallelism":2,"completions":2}}'])

    def test_keeps_all_pods_below_the_highest_kept(self):
        self.assertEqual(self.hook("train-0,train-8", "Indexed 12 12 41", "9 9"), (0, "Job 'train' now has 9 of 12 pods"))
        self.assertEqual(self.hook("train-0,train-3", "Indexed 4 4 41"), (0, "Job 'train' has no index above 3, nothing to give back"))

    def test_does_nothing_a_second_time_and_never_grows(self):
        for size in ("2 2", "1 1"):
            self.assertEqual(self.hook("train-0,train-1", f"Indexed {size} 42")[0], 0)

    def test_knows_the_job_and_its_namespace(self):
        self.assertEqual(self.hook("my-job-0.train,other-7,my-job-x", "Indexed 2 2 1", "1 1", HOSTNAME="my-job-0.train.ml.svc"),
                         (0, "Job 'my-job' now has 1 of 2 pods"))
        self.hook("my-job-0", "Indexed 2 2 1", "1 1", DYNMO_KUBE_JOB="my-job", DYNMO_KUBE_NAMESPACE="ml")
        self.assertTrue(self.calls[0].startswith("kubectl --request-timeout 20s --namespace ml get job my-job "), self.calls)
        code, line = self.hook("node1,node2")
        self.assertEqual(code, 2)
        self.assertIn("none of the kept hosts 'node1,node2' is a pod of Job 'train': set DYNMO_KUBE_JOB", line)

    def test_asks_for_another_call_where_another_answer_is_likely(self):
        conflict = ('Error from server (Conflict): Operation cannot be fulfilled on jobs.batch "train": the object has been modified; '
                    "please apply your changes to the latest version and try again")
        busy = "Error from server (TooManyRequests): the server has received too many requests and has asked us to try again later"
        for message in (conflict, busy, "Error from server (Timeout): Timeout: request did not complete within the allotted timeout",
                        "Error from server (ServiceUnavailable): apiserver not ready",
                        "Error from server (InternalError): Internal error occurred: etcdserver: request timed out",
                        "Unable to connect to the server: context deadline exceeded (Client.Timeout exceeded while awaiting headers)",
                        "The connection to the server 10.0.0.1:6443 was refused - did you specify the right host or port?"):
            self.assertEqual(self.hook("train-0", "Indexed 4 4 41", fails(message)), (75, message))
            self.assertEqual(self.hook("train-0", fails('E1123 02:07:17.303077 1 memcache.go:265] "Unhandled Error"\n' + message)),
                             (75, message))
        self.assertEqual(self.hook("train-0", "Indexed 4 4 41", "4 4"),
                         (75, "Job 'train' has size '4 4' after the patch, wanted 1 of both"))

    def test_does_not_wait_for_ever(self):
        (self.folder / "bin" / "timeout").write_text('#!/bin/sh\nshift 4\nexec /usr/bin/timeout 1 "$@"\n')
        (self.folder / "bin" / "timeout").chmod(0o755)
        self.assertEqual(self.hook("train-0", HANGS), (75, "no answer from kubectl within 25 s"))

    def test_says_what_it_is_not_allowed(self):
        for message in ('Error from server (Forbidden): jobs.batch "train" is forbidden: User "system:serviceaccount:ml:default" cannot '
                        'patch resource "jobs" in API group "batch" in the namespace "ml"',
                        "error: You must be logged in to the server (Unauthorized)"):
            self.assertEqual(self.hook("train-0", "Indexed 4 4 41", fails(message)), (77, message))

    def test_says_what_it_was_refused(self):
        for message in ('Error from server (NotFound): jobs.batch "train" not found',
                        'The request is invalid: Job.batch "train" is invalid: spec.completions: Invalid value: 2: field is immutable'):
            self.assertEqual(self.hook("train-0", "Indexed 4 4 41", fails(message)), (1, message))
        self.assertEqual(self.hook("train-0", "NonIndexed 4 4 41"), (2, "Job 'train' has completion mode 'NonIndexed', wanted Indexed"))
        self.assertEqual(self.hook("train-0", "Indexed 2 4 41")[0], 1)
        self.assertEqual(self.hook("train-0", "Indexed  4")[0], 1)


class Both(HookCase):
    programs = ("squeue", "kubectl")

    def test_say_how_they_are_used(self):
        for name in ("slurm", "kubernetes"):
            done = subprocess.run([HOOKS / name, "--help"], capture_output=True, text=True, timeout=100, check=False)
            self.assertEqual((done.returncode, done.stderr), (0, ""))
            self.assertTrue(done.stdout.startswith(f"usage: {name}\n"), done.stdout)
            self.assertEqual(self.run_hook(name, {"HOSTNAME": "a-0"})[0], 2)

    def test_end_with_all_they_have_started_when_their_time_is_over(self):
        (self.folder / "1.hangs").touch()
        for name in ("slurm", "kubernetes"):
            (self.folder / "calls").write_text("")
            environment = {"PATH": f"{self.folder / 'bin'}:/usr/bin:/bin", "TMPDIR": str(self.folder / "tmp"), "HOSTNAME": "a-0",
                           "DYNMO_KEPT_HOSTS": "a-0", "DYNMO_RELEASED_HOSTS": "a-1", "SLURM_JOB_ID": "17"}
            with subprocess.Popen([HOOKS / name], env=environment, stdout=subprocess.PIPE, text=True, start_new_session=True,
                                  stdin=subprocess.DEVNULL) as hook:
                self.assertTrue(becomes_true((self.folder / "1.pwd").exists))  # the last thing before it hangs
                os.killpg(hook.pid, signal.SIGTERM)
                self.assertEqual(hook.stdout.read(), f"{name}: stopped before it was done\n")
                self.assertEqual(hook.wait(timeout=100), 75)
            self.assertTrue(becomes_true(lambda: is_gone(hook.pid)))
            self.assertEqual(os.listdir(self.folder / "tmp"), [])
            (self.folder / "1.pwd").unlink()

    def test_need_the_programs_of_their_cluster(self):
        for program in self.programs:
            (self.folder / "bin" / program).unlink()
        (self.folder / "bin" / "bash").symlink_to("/bin/bash")
        for name, variables in (("slurm", {"SLURM_JOB_ID": "1", "DYNMO_RELEASED_HOSTS": "a"}),
                                ("kubernetes", {"HOSTNAME": "a-0", "DYNMO_KEPT_HOSTS": "a-0"})):
            for tool in ("timeout", "mktemp", "rm", "cat", "grep", "tail"):
                link = self.folder / "bin" / tool
                if not link.exists():
                    link.symlink_to(shutil.which(tool))
            code, line = self.run_hook(name, {**variables, "PATH": str(self.folder / "bin")})
            self.assertEqual(code, 1)
            self.assertIn("in PATH", line)


if __name__ == "__main__":
    unittest.main()
