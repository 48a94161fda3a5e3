# SPDX-License-Identifier: Apache-2.0
"""A run that changes its size as a user meets it: pack, drain, join, checkpoint and stop while it trains, and who is refused."""
import json
import os
import pathlib
import random
import shutil
import signal
import socket
import stat
import threading
import time

from elastic_case import LIMIT, ElasticCase, events, manifests
from program import DYNMO
from run_case import losses, rank_processes, settings

FAULT_PROGRAM = os.environ.get("FAULT_PROGRAM", "")


class Elastic(ElasticCase):
    def test_four_one_four_changes_no_bit(self):
        turns = 5
        run = self.folder / "elastic"
        process = self.start("elastic", 4)
        joiners = []
        for turn in range(turns):
            self.assertIn("packed onto 1 ranks" if turn % 2 == 0 else "drained", self.shrink("elastic", turn))
            self.assertEqual(self.ranks("elastic"), [0])
            for joiner in joiners:  # released: they end by themselves, with 0
                self.assertIn("joined as rank", self.ended(joiner))
            joiners = [self.join("elastic") for _ in range(3)]
            self.until(process, lambda: len(self.ranks("elastic")) == 4)
        last = self.status("elastic")["step"] + 25
        self.until(process, lambda: self.status("elastic")["step"] > last)
        self.done("elastic", "stop")
        for each in (process, *joiners):
            self.assertIn("stopped before step", self.ended(each, code=130))
        sizes = [len(event["ranks"]) for event in events(run, "size")]
        self.assertGreaterEqual(len(sizes), 2 * turns)
        self.assertEqual((min(sizes), max(sizes)), (1, 4))

        twin = self.start("twin", 2, "balance.enabled=false")
        steps = len(losses(run))
        self.until(twin, lambda: self.status("twin")["step"] >= steps)
        self.stopped("twin", twin)
        reference = losses(self.folder / "twin")
        found = losses(run)
        self.assertEqual(sorted(found), list(range(steps)))  # no step lost or repeated
        self.assertEqual(found, {step: reference[step] for step in found})
        lines = (run / "records" / "rank-0.jsonl").read_text().splitlines()
        self.assertEqual(len(lines), steps)
        ours, theirs = manifests(run), manifests(self.folder / "twin")
        both = sorted(set(ours) & set(theirs))
        self.assertGreaterEqual(len(both), 5)
        for step in both:
            self.assertEqual(ours[step], theirs[step], f"checkpoint of step {step}")
        frozen = [event["frozen_layers"] for event in events(run, "sources")]
        self.assertGreater(frozen[-1], 0)

    def shrink(self, run, turn):
        if turn % 2 == 0:
            return self.done(run, "pack", "1")
        said = ""
        for number in self.ranks(run)[1:]:
            said += self.done(run, "drain", str(number))
        return said

    def test_signals(self):
        process = self.start("signals", 3)
        pids = {rank["rank"]: rank["pid"] for rank in self.status("signals")["ranks"]}
        os.kill(pids[1], signal.SIGTERM)  # drained; the others go on
        self.until(process, lambda: self.ranks("signals") == [0, 2])
        self.assertIn("rank 1 was drained", events(self.folder / "signals", "size")[0]["why"])
        process.send_signal(signal.SIGTERM)  # to all: a checkpoint, and the end
        output = self.ended(process, code=130)
        self.assertIn("stopped before step", output)
        self.assertNotIn("was lost", output)
        steps = len(losses(self.folder / "signals"))
        self.assertEqual(max(manifests(self.folder / "signals")), steps)
        resumed = self.spawn(self.command("-n", "2", "--resume", "--steps", "100000", run="signals", extra=self.SETTINGS))
        self.until(resumed, lambda: self.status("signals").get("step", 0) > steps + 2)
        self.stopped("signals", resumed)
        self.assertEqual(sorted(losses(self.folder / "signals"))[:steps], list(range(steps)))

    def test_every_rank_may_lead(self):
        run = self.folder / "leaders"
        process = self.start("leaders", 3, "train.steps=600")
        secret = (run / "secret").read_text()
        joiner = self.join("leaders")
        self.until(process, lambda: self.ranks("leaders") == [0, 1, 2, 3])
        for leader in range(3):
            pids = {rank["rank"]: rank["pid"] for rank in self.status("leaders")["ranks"]}
            self.assertEqual(json.loads((run / "job.json").read_text())["pid"], pids[leader])
            if leader == 1:
                os.kill(pids[leader], signal.SIGTERM)
            else:
                self.assertIn(f"rank {leader} was drained", self.done("leaders", "drain", str(leader)))
                self.assertEqual(self.ranks("leaders"), list(range(leader + 1, 4)))  # whoever answers: the change is done
            self.until(joiner, lambda: self.status("leaders").get("ranks", [{}])[0].get("rank") == leader + 1)
        self.assertIn("step ", self.done("leaders", "status"))
        self.assertEqual((run / "secret").read_text(), secret)
        self.ended(process)  # its ranks have all been drained
        output = self.ended(joiner)  # which finishes the run
        self.assertIn("joined as rank 3", output)
        self.assertFalse((run / "job.json").exists())
        self.assertEqual([event["ranks"] for event in events(run, "size")], [[0, 1, 2, 3], [1, 2, 3], [2, 3], [3]])
        twin = self.start("unmoved", 2, "train.steps=600", "balance.enabled=false")
        self.ended(twin)
        ours, theirs = (json.loads((self.folder / name / "summary.json").read_text())["runs"][0] for name in ("leaders", "unmoved"))
        self.assertEqual(ours["loss_digest"], theirs["loss_digest"])
        self.assertEqual(ours["steps"], 600)
        self.assertEqual((ours["size"]["members"], ours["size"]["changes"]), (4, 4))
        both = sorted(set(manifests(run)) & set(manifests(self.folder / "unmoved")))
        self.assertGreaterEqual(len(both), 5)
        for step in both:
            self.assertEqual(manifests(run)[step], manifests(self.folder / "unmoved")[step])

    def test_a_refused_signal_is_tried_again_after_a_join(self):
        """Newcomers have not seen what was tried before they came, and decide alike all the same."""
        for replicas in 1, 2:
            name = f"tried-{replicas}"
            process = self.start(name, 2, f"pipeline.replicas={replicas}", "elastic.ranks_min=2", "elastic.release_after=40")
            pid = self.status(name)["ranks"][1]["pid"]
            os.kill(pid, signal.SIGTERM)
            output = ""
            while "elastic.ranks_min is 2" not in output:
                output = process.stdout.readline()
                self.assertTrue(output, "the run has ended")
            joiners = [self.join(name) for _ in range(replicas)]
            self.until(process, lambda: len(events(self.folder / name, "size")) == 2)
            self.assertEqual([len(event["ranks"]) for event in events(self.folder / name, "size")], [3 * replicas, 2 * replicas])
            self.assertNotIn(pid, [rank["pid"] for rank in self.status(name)["ranks"]])
            self.done(name, "stop")
            for each in (process, *joiners):
                self.ended(each, code=130)

    def test_the_leader_leaves_though_its_folder_cannot_be_written(self):
        run, away = self.folder / "unwritable", self.folder / "away"
        process = self.start("unwritable", 3, "checkpoint.every=0")
        secret = self.folder / "copy"
        shutil.copy(run / "secret", secret)
        leader = self.status("unwritable")["ranks"][0]["pid"]
        (run / "job.json").unlink()
        (run / "job.json" / "folder").mkdir(parents=True)
        os.kill(leader, signal.SIGTERM)
        line = ""
        while "this rank leads all the same, at " not in line:
            line = process.stdout.readline()
            self.assertTrue(line, "the run has ended")
        address = line.split("all the same, at ")[1].split(",")[0]
        status = self.run_command([DYNMO, "ctl", address, "--secret", str(secret), "status", "--json"], timeout=LIMIT)
        self.assertEqual([rank["rank"] for rank in json.loads(status.stdout)["ranks"]], [1, 2])
        shutil.rmtree(run / "job.json")
        self.until(process, lambda: self.status("unwritable"))  # it was tried again
        run.rename(away)  # and a folder that is not there at all
        leader = json.loads(status.stdout)["ranks"][0]["pid"]
        os.kill(leader, signal.SIGTERM)
        line = ""
        while "this rank leads all the same, at " not in line:
            line = process.stdout.readline()
            self.assertTrue(line, "the run has ended")
        away.rename(run)
        self.until(process, lambda: self.status("unwritable").get("ranks", [{}])[0].get("rank") == 2)
        self.assertIn("stopped before step", self.stopped("unwritable", process))
        self.assertEqual(sorted(losses(run)), list(range(len(losses(run)))))
        # What came while the folder was away is written once it is there.
        self.assertEqual([event["ranks"] for event in events(run, "size")], [[1, 2], [2]])

    def test_grow(self):
        process = self.start("grown", 2)
        self.assertIn("2 ranks -> 3 ranks", self.done("grown", "grow", "1"))
        self.assertIn(" -> 5 ranks", self.done("grown", "grow", "2"))
        self.assertEqual(self.ranks("grown"), [0, 1, 2, 3, 4])
        for number in (0, 1, 3):
            self.done("grown", "drain", str(number))
        self.assertEqual(self.ranks("grown"), [2, 4])  # both are ranks that came later
        self.done("grown", "grow", "1")
        pids = [rank["pid"] for rank in self.status("grown")["ranks"]]
        os.kill(pids[1], signal.SIGKILL)  # a loss like any other
        self.until(process, lambda: events(self.folder / "grown", "loss"))
        self.assertIn("rank 4 was killed by signal 9", self.stopped("grown", process))
        self.assertEqual(rank_processes(str(self.folder / "grown")), [])

    def test_commands(self):
        process = self.start("commands", 2, "elastic.ranks_min=1", "checkpoint.every=0")
        run = self.folder / "commands"
        self.assertEqual(stat.S_IMODE((run / "secret").stat().st_mode), 0o600)
        self.assertEqual(stat.S_IMODE((run / "job.json").stat().st_mode), 0o600)
        self.assertEqual(json.loads((run / "job.json").read_text())["address"], "127.0.0.1")
        text = self.done("commands", "status")
        for wanted in ("step ", "loss ", "plan ", "rank      0", "rank      1", "waiting   0"):
            self.assertIn(wanted, text)
        self.assertEqual(self.done("commands", "checkpoint"), "the checkpoint is written\n")
        self.assertEqual(len(manifests(run)), 1)
        self.assertEqual(self.done("commands", "pack", "2"), "the run is on 2 ranks already\n")
        self.refused(self.ctl("commands", "pack", "3"), "wanted at most 2: ", "; `dynmo ctl RUN grow` starts more")
        self.refused(self.ctl("commands", "pack", "0"), "1")
        self.refused(self.ctl("commands", "drain", "7"), "there is no rank 7: wanted one of 0, 1")
        self.refused(self.ctl("commands", "release"), "no release is parked")
        self.refused(self.ctl("commands", "grow", "0"), "0")
        self.refused(self.ctl("commands", "dance"), "dance")
        secret = self.folder / "wrong"
        secret.write_text("0" * 32)
        self.refused(self.ctl("commands", "--secret", str(secret), "stop"), "wanted the run's secret")
        self.refused(self.ctl("nowhere", "status"), "no elastic run goes on in", "elastic.enabled", code=5)
        self.assertEqual(self.done("commands", "drain", "1")[:11], "before step")
        self.assertEqual(self.done("commands", "pack", "1"), "the run is on 1 rank already\n")
        self.refused(self.ctl("commands", "--timeout", "nan", "status"), "--timeout", "nan", "wanted 0.1 to 1000000 seconds")
        secret.write_bytes(b"\xff\xfe\x80")
        self.refused(self.ctl("commands", "--secret", str(secret), "status"), str(secret), "wanted the secret of a run")
        said = self.done("commands", "stop")
        self.ended(process, code=130)
        steps = len(losses(run))
        self.assertEqual(said, f"stopped before step {steps} of 100000, after a checkpoint\n")
        self.assertEqual(max(manifests(run)), steps)
        self.refused(self.ctl("commands", "status"), "no elastic run goes on in", code=5)
        self.assertFalse((run / "job.json").exists() or (run / "secret").exists())

    def test_the_status_of_a_diverged_run_is_text(self):
        """JSON has no NaN, so the leader sends null for the loss of a step that train.on_nan skipped."""
        run = self.folder / "diverged"
        run.mkdir()
        status = {"step": 4, "steps": 9, "loss": None, "tokens_per_s": 10.0, "imbalance": 0.1, "bubble": 0.2, "frozen_layers": 0}
        status |= {"lost_ranks": 0, "steps_again": 0, "replicas": 1, "plan": "4|5", "generation": 1, "ranks": [], "standbys": 0}
        with socket.create_server(("127.0.0.1", 0)) as leader:
            job = {"format": "dynmo-job-1", "address": "127.0.0.1", "port": leader.getsockname()[1], "host": socket.gethostname()}
            (run / "job.json").write_text(json.dumps(job | {"pid": os.getpid()}))
            (run / "secret").write_text("0" * 32 + "\n")
            answer = {"format": "dynmo-control-1", "done": True, "text": "", "status": status}

            def serve():
                client, _ = leader.accept()
                with client:
                    client.recv(1 << 16)
                    client.sendall(json.dumps(answer).encode() + b"\n")

            server = threading.Thread(target=serve)
            server.start()
            text = self.done("diverged", "status")
            server.join(LIMIT)
        self.assertIn("step      4 of 9\nloss      nan\ntokens/s  10\n", text)

    def test_join_by_another_path_of_the_run(self):
        """As on a host that mounts it elsewhere. The log lies in the run's folder."""
        process = self.start("mounted", 2, f"run.log={self.folder / 'mounted' / 'log'}")
        (self.folder / "elsewhere").symlink_to(self.folder)
        joiner = self.join("elsewhere/mounted")
        self.until(joiner, lambda: self.ranks("mounted") == [0, 1, 2])
        self.stopped("mounted", process)
        self.assertIn("joined as rank 2", self.ended(joiner, code=130))

    def test_refused_to_join(self):
        process = self.start("strict", 2)
        run = self.folder / "strict"

        def join(*words, env=None):
            return self.run_command([DYNMO, "train", "--join", str(run), *words], env=env)

        other = self.folder / "other"
        shutil.copytree(self.data, other)
        bin_path = other / "train.bin"
        tokens = bytearray(bin_path.read_bytes())
        tokens[len(tokens) // 2 & ~1] ^= 1
        bin_path.write_bytes(tokens)
        self.refused(join("--data", str(other)), "the data of the process that wants to join")
        self.refused(join("--data", str(self.folder / "none")), "does not exist")
        self.refused(join(env={"ATEN_CPU_CAPABILITY": "default"}), "the instruction set of the process that wants to join")
        program = self.folder / "program"
        program.mkdir()
        for name in ("dynmo", "dynmo-runtime"):
            shutil.copy(pathlib.Path(DYNMO).parent / name, program / name)
        with open(program / "dynmo-runtime", "ab") as file:
            file.write(b"\0")  # another build
        self.refused(self.run_command([str(program / "dynmo"), "train", "--join", str(run)]), "the program of the process")
        secret = self.folder / "guess"
        secret.write_text("f" * 32)
        self.refused(join("--secret", str(secret)), "wanted the run's secret")
        secret.write_text("")
        self.refused(join("--secret", str(secret)), "is empty")
        job = json.loads((run / "job.json").read_text())
        address = f"{job['address']}:{job['port']}"
        self.refused(self.run_command([DYNMO, "train", "--join", address]), "wants the run's secret")
        self.refused(self.run_command([DYNMO, "train", "--join", "127.0.0.1:1", "--secret", str(run / "secret")]),
                     "no run listens at 127.0.0.1:1", code=5)
        self.refused(self.run_command([DYNMO, "train", "--join", str(self.folder / "none")]), "no elastic run goes on in", code=5)
        self.refused(join("--set", "model.hidden=64"), "takes the settings of the run")
        self.refused(join("--resume"), "takes the settings of the run")
        self.assertEqual(self.ranks("strict"), [0, 1])
        good = self.spawn([DYNMO, "train", "--join", address, "--secret", str(run / "secret")])
        self.until(process, lambda: self.ranks("strict") == [0, 1, 2])
        self.assertEqual(events(run, "size")[0]["ranks"], [0, 1, 2])
        self.stopped("strict", process)
        self.ended(good, code=130)

    def test_a_joiner_that_goes_before_it_is_taken_disturbs_nothing(self):
        # Two replicas take two at a time: one alone waits.
        process = self.start("patient", 1, "pipeline.replicas=2")
        alone = self.join("patient")
        self.until(process, lambda: self.status("patient")["standbys"] == 0 and alone.poll() is None
                   and "waiting as rank" in (alone.stdout.readline() or ""))
        alone.kill()
        alone.wait(timeout=LIMIT)
        step = self.status("patient")["step"]
        self.until(process, lambda: self.status("patient")["step"] > step + 5)
        pair = [self.join("patient"), self.join("patient")]
        self.until(process, lambda: len(self.ranks("patient")) == 4)
        self.done("patient", "stop")
        for each in (process, *pair):
            self.ended(each, code=130)

    def test_a_joiner_that_is_killed_while_it_joins_disturbs_nothing(self):
        """It dies at each eighth message that it sends, until it has become a rank: then its death is a loss like any other."""
        run = self.folder / "fragile"
        process = self.spawn([FAULT_PROGRAM, "elastic", "0", str(self.data), str(run), "launch"])
        self.until(process, lambda: self.status("fragile").get("step", 0) >= 2)
        survived = 0
        for message in range(0, 400, 8):
            joiner = self.spawn([FAULT_PROGRAM, "join", str(message), str(self.data), str(run)])
            output = self.ended(joiner, code=-signal.SIGKILL)
            if "joined as rank" in output:  # its last word was in a step
                break
            survived += 1
            step = self.status("fragile")["step"]
            self.until(process, lambda: self.status("fragile")["step"] > step + 2)
            self.assertEqual(self.ranks("fragile"), [0, 1, 2])
            self.assertEqual(self.status("fragile")["standbys"], 0)
        self.assertGreaterEqual(survived, 4)
        # Whether the one that became a rank gets layers is another question, which measured times decide.
        self.assertEqual(sum("change" in event for event in events(run, "refused")), survived)
        self.assertEqual(len(events(run, "size")), 1)
        number = events(run, "size")[0]["ranks"][-1]
        self.until(process, lambda: events(run, "recovery"))
        self.done("fragile", "stop")
        output = self.ended(process, code=130)
        self.assertEqual([event["lost"] for event in events(run, "loss")], [[number]])
        self.assertNotRegex(output, "(?m)^(\\[rank \\d+\\] )?\\[[IWEF]")  # what libtorch logs
        twin = self.folder / "unshaken"
        process = self.spawn([FAULT_PROGRAM, "elastic", "0", str(self.data), str(twin), "launch"])
        steps = len(losses(run))
        self.until(process, lambda: self.status("unshaken").get("step", 0) >= steps)
        self.stopped("unshaken", process)
        found, reference = losses(run), losses(twin)
        self.assertEqual(sorted(found), list(range(steps)))
        self.assertEqual(found, {step: reference[step] for step in found})

    def test_a_joiner_that_is_asked_to_leave_while_it_joins_leaves_as_a_rank(self):
        """SIGTERM while it hears what the others are, and before it hears that it is one: then they count on it already."""
        run = self.folder / "asked"
        process = self.spawn([FAULT_PROGRAM, "elastic", "0", str(self.data), str(run), "launch"])
        self.until(process, lambda: self.status("asked").get("step", 0) >= 2)
        for message in 0, 6:
            joiner = self.spawn([FAULT_PROGRAM, "join-asked", str(message), str(self.data), str(run)])
            self.assertIn("joined as rank", self.ended(joiner))
            self.until(process, lambda: self.ranks("asked") == [0, 1, 2])
        self.assertEqual([event["ranks"] for event in events(run, "size")], [[0, 1, 2, 3], [0, 1, 2], [0, 1, 2, 4], [0, 1, 2]])
        self.stopped("asked", process)

    def test_a_joiner_that_is_killed_at_any_moment(self):
        """At drawn moments from its start on, most of them before it can have become a rank."""
        process = self.start("moments", 3)
        draw = random.Random(11)
        for turn in range(8):
            joiner = self.join("moments")
            if turn >= 3:  # it waits: the run takes it within a step
                joiner.stdout.readline()
            time.sleep(draw.uniform(0, 1.5) if turn < 3 else draw.uniform(0, 0.03))
            joiner.kill()
            joiner.communicate(timeout=LIMIT)
            if not self.goes_on_without(process):
                self.assertIn("was lost", self.ended(process, code=5), f"turn {turn}, seed 11, rank {3 + turn}")
                process = self.spawn(self.command("-n", "3", "--resume", "auto", run="moments", extra=self.SETTINGS))
                self.until(process, lambda: self.status("moments").get("step", 0) > 0)
        self.stopped("moments", process)

    def goes_on_without(self, process):
        """Whether three ranks do steps; else the run ends, as it had a fourth. A status may be of before it has."""
        first, deadline = None, time.monotonic() + LIMIT
        while process.poll() is None:
            self.assertLess(time.monotonic(), deadline, "nothing happened")
            status = self.status("moments")
            if len(status.get("ranks", [])) == 3:
                first = status["step"] if first is None else first
                if status["step"] > first + 2:
                    return True
            time.sleep(0.02)
        return False

    def test_hooks_and_restarts(self):
        hook = self.folder / "hook"
        hook.write_text("#!/bin/sh\n"
                        "echo \"$DYNMO_RELEASE $DYNMO_RELEASE_CALL $DYNMO_RELEASED_RANKS|$DYNMO_KEPT_RANKS|$DYNMO_RELEASED_HOSTS\""
                        " >> \"$DYNMO_RUN/told\"\n"
                        "case $DYNMO_RELEASE.$DYNMO_RELEASE_CALL in 3.1) sleep 1000;; 2.*|3.*) echo no; exit 3;; esac\n")
        hook.chmod(0o755)
        extra = (f"elastic.release_command={hook}", "elastic.release_timeout_s=5")
        run = self.folder / "hooks"
        process = self.start("hooks", 4, *extra, words=("--resume", "auto"))
        for number in (3, 2, 1):
            self.done("hooks", "drain", str(number))
            self.until(process, lambda: len(events(run, "release")) == 4 - number)
        self.assertEqual((run / "told").read_text().splitlines(), ["1 1 3|0,1,2|", "2 1 2|0,1|", "3 1 1|0|"])
        self.assertEqual([event["outcome"] for event in events(run, "release")], ["done", "parked", "parked"])
        self.assertEqual(self.done("hooks", "release"), "2 releases are tried again\n")
        self.until(process, lambda: len(events(run, "release")) == 5)
        self.assertEqual((run / "told").read_text().splitlines()[3:], ["2 2 2|0|", "3 2 1|0|"])
        self.assertIn("exit code 3", self.stopped("hooks", process))
        steps = len(losses(run))
        process = self.spawn(self.command("-n", "2", "--resume", "auto", run="hooks", extra=(*self.SETTINGS, *extra)))
        self.until(process, lambda: self.status("hooks").get("step", 0) > steps)
        self.done("hooks", "stop")
        self.assertIn(f"resume   step {steps} of", self.ended(process, code=130))
        none = self.run_command(self.command("-n", "2", run="none", extra=(*self.SETTINGS, "elastic.release_command=no-such-program")))
        self.refused(none, "elastic.release_command", "no-such-program")

    def test_packs_by_itself(self):
        # Four ranks of a model that one computes as fast: each sleeps for what its layers are said to take.
        layer = {"forward_s": 1e-3, "backward_input_s": 1e-3, "backward_weight_s": 1e-3, "parameter_bytes": 4096,
                 "gradient_bytes": 4096, "optimizer_bytes": 8192, "activation_bytes": 4096, "boundary_bytes": 4096}
        names = ["embedding", *(f"blocks.{i // 2}.{'mlp' if i % 2 else 'attention'}" for i in range(14)), "head"]
        layers = [{"name": name, **layer} for name in names]
        heavy = [4e-3 if i == 15 else 1e-3 for i in range(16)]
        trace = self.folder / "trace.jsonl"
        light = [4e-3 if i == 15 else 2e-5 for i in range(16)]
        lines = [{"format": "dynmo-load-trace-1", "layers": layers},
                 {"step": 0, **{key: heavy for key in ("forward_s", "backward_input_s", "backward_weight_s")}},
                 {"step": 12, "change": True, **{key: light for key in ("forward_s", "backward_input_s", "backward_weight_s")}}]
        trace.write_text("".join(json.dumps(line) + "\n" for line in lines))
        for schedule in ("1f1b", "zb-h1", "zb-v", "auto"):
            with self.subTest(schedule=schedule):
                self.pack_by_itself(trace, schedule)

    def pack_by_itself(self, trace, schedule):
        run = self.folder / f"packed-{schedule}"
        result = self.succeed(
            [DYNMO, "train", "-n", "4", "--steps", "40", "--out", str(run), *settings((
                "run.device=emulated", f"emulated.trace={trace}", "train.validation_every=0", "elastic.enabled=true",
                "elastic.pack=auto", "elastic.release_after=5", "batch.micro_batches=8", "elastic.pack_slack=0.05",
                f"pipeline.schedule={schedule}"))], timeout=LIMIT)
        self.assertIn("rank-hours saved", result.stdout)
        size = json.loads((run / "summary.json").read_text())["runs"][0]["size"]
        self.assertGreaterEqual(size["changes"], 1, result.stdout)
        self.assertLess(size["mean_ranks"], 4)
        self.assertGreater(size["saved_s"], 0)
        # A rank without layers keeps records until it is released; behind that nobody is without.
        records = [json.loads(line) for line in (run / "records" / "rank-3.jsonl").read_text().splitlines()]
        self.assertEqual([record["layers"] for record in records[-5:]], [0] * 5)
        self.assertLess(len(records), 40)
        last = events(run, "size")[-1]
        self.assertEqual({stage["rank"] for stage in last["plan"]["stages"]}, set(range(len(last["ranks"]))))
