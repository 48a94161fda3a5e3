# SPDX-License-Identifier: Apache-2.0
"""An elastic run loses ranks and goes on: its losses and checkpoints are those of a run that nobody disturbs."""
import contextlib
import json
import os
import pathlib
import re
import shutil
import signal
import socket
import time
import unittest

from elastic_case import LIMIT, events, manifests
from program import DYNMO
from run_case import rank_processes
from survival_case import SurvivalCase

KILL_AT_WRITE = os.environ.get("KILL_AT_WRITE_LIBRARY", "")


class Survival(SurvivalCase):
    STEPS = 400
    SETTINGS = ("elastic.enabled=true", "train.steps=400", "checkpoint.every=10", "checkpoint.keep=1000", "freezing.enabled=true",
                "freezing.start=0.0001", "freezing.end=0.002", "pruning.enabled=true", "pruning.start=5", "pruning.end=85",
                "pruning.every=20", "pruning.sparse_above=0.7", "model.blocks=4")

    def test_before_the_first_plan(self):
        """The first rank or another is lost while layers are measured: once for all, and again."""
        self.twin("twin", 3)
        for lost in ([0], [2], [1, 0]):
            with self.subTest(lost):
                run = "early-" + "-".join(map(str, lost))
                extra = (*self.SETTINGS, "pipeline.measure_steps=100")
                process = self.spawn(self.command("-n", "3", run=run, extra=extra))
                self.until(process, (self.folder / run / "job.json").exists)
                for number in lost:
                    os.kill(self.processes(run, process)[number], signal.SIGKILL)
                output = self.ended(process)
                self.assertRegex(output, r"rank \d was lost.*: on with ranks? [\d, ]+ from step 0 \(0 steps again\)")
                self.assertTrue((self.folder / run / "config.toml").exists())
                self.assert_as_twin(run, "twin")

    def test_before_the_first_plan_of_a_resumed_run(self):
        extra = (*self.SETTINGS, "pipeline.measure_steps=100")
        self.twin("twin", 3)
        shutil.copytree(self.folder / "twin", self.folder / "resumed")
        for folder in (self.folder / "resumed" / "checkpoints").glob("step-*"):
            if int(folder.name.split("-")[1]) > 200:
                shutil.rmtree(folder)
        process = self.spawn(self.command("-n", "2", "--resume", run="resumed", extra=extra))
        self.until(process, (self.folder / "resumed" / "job.json").exists)
        os.kill(self.processes("resumed", process)[0], signal.SIGKILL)
        self.assertIn("on with rank 1 from step 200 (0 steps again)", self.ended(process))
        self.assertEqual(manifests(self.folder / "resumed"), manifests(self.folder / "twin"))

    def test_a_slow_disk_is_no_rank_that_hangs(self):
        """Reading and writing a checkpoint takes far longer than pipeline.timeout_s, of all ranks or of one."""
        self.twin("twin", 3)
        extra = (*self.SETTINGS, "pipeline.timeout_s=1", "checkpoint.memory=0", "checkpoint.every=200")
        for slow in ({}, {"SLOW_RANK": "1"}):
            with self.subTest(slow):
                run = "slow" + "".join(slow.values())
                shutil.copytree(self.folder / "twin", self.folder / run)
                for folder in (self.folder / run / "checkpoints").glob("step-*"):
                    if int(folder.name.split("-")[1]) > 200:
                        shutil.rmtree(folder)
                env = {**os.environ, "LD_PRELOAD": KILL_AT_WRITE, "SLOW_MS": "300", "SLOW_AT_PATH": f"*/{run}/checkpoints/*/layer-*", **slow}
                output = self.ended(self.spawn(self.command("-n", "2", "--resume", run=run, extra=extra), env=env))
                self.assertIn("resume   step 200 of 400", output)
                self.assertEqual(events(self.folder / run, "loss"), [], output)
                self.assert_as_twin(run, "twin", unfinished=20)

    def test_while_the_run_ends(self):
        """The first rank before each operation on its summary, the last file; another one when that is there."""
        self.twin("twin", 3)
        for operation in (1, 2, 3, 4):
            with self.subTest(operation):
                run = f"ending-{operation}"
                env = {**os.environ, "LD_PRELOAD": KILL_AT_WRITE, "KILL_AT_WRITE": str(operation), "KILL_AT_PATH": f"{run}/summary.json",
                       "KILL_ONCE": str(self.folder / f"{run}-once")}
                process = self.spawn(self.command("-n", "3", run=run, extra=self.SETTINGS), env=env)
                self.assertIn("rank 0 was killed by signal 9", self.ended(process))
                self.assertTrue((self.folder / f"{run}-once").exists())
                self.assert_as_twin(run, "twin")
        process = self.spawn(self.command("-n", "3", run="ended", extra=self.SETTINGS))
        self.until(process, lambda: self.steps_done("ended") > 350)
        ranks = self.processes("ended", process)
        self.look(process, (self.folder / "ended" / "summary.json").exists)
        with contextlib.suppress(ProcessLookupError):  # it may have ended
            os.kill(ranks[1], signal.SIGKILL)
        self.ended(process)
        self.assert_as_twin("ended", "twin")

    def test_any_rank_may_be_killed(self):
        self.twin("twin", 3)
        for number in range(3):
            with self.subTest(number):
                run = f"lost-{number}"
                output = self.hunted(run, 3, [number])
                self.assertIn(f"rank {number} was killed by signal 9", output)
                self.assertRegex(output, r"on with ranks \d, \d from step \d+ \(\d+ steps? again\), in ")
                self.assertIn(self.recoveries(run, "from"), (["snapshot"], ["checkpoint"]))
                spent = self.recoveries(run, "ms")[0]
                self.assertGreaterEqual(spent.pop("all") + 1e-3, sum(spent.values()))
                self.assert_as_twin(run, "twin")

    def test_from_checkpoints_where_there_are_no_snapshots(self):
        self.twin("twin", 3)
        self.hunted("old", 3, [1], "elastic.snapshots=never", first=25)  # checkpoints are every ten steps
        self.assertEqual(self.recoveries("old", "from"), ["checkpoint"])
        self.assert_as_twin("old", "twin")

    def test_without_a_checkpoint_from_a_snapshot(self):
        self.twin("never-written-twin", 2, "checkpoint.every=0")
        for number in range(2):
            with self.subTest(number):
                run = f"never-written-{number}"
                self.hunted(run, 2, [number], "checkpoint.every=0")
                self.assertEqual(self.recoveries(run, "from"), ["snapshot"])
                self.assert_as_twin(run, "never-written-twin")

    def test_no_recovery_waits_for_a_disk(self):
        """A disk hangs at a checkpoint; all wait for it at the next one; each rank is killed then, also the one whose disk it is."""
        self.twin("twin", 3)
        for number in range(3):
            with self.subTest(number):
                run = f"hung-{number}"
                hangs = self.folder / f"{run}-disk"
                hangs.touch()
                env = {**os.environ, "LD_PRELOAD": KILL_AT_WRITE, "HANG_AT_PATH": f"*/{run}/checkpoints/step-00000050.*/layer-0003*",
                       "HANG_WHILE": str(hangs)}
                process = self.spawn(self.command("-n", "3", run=run, extra=self.SETTINGS), env=env)
                hung = pathlib.Path(f"{hangs}.hung")
                self.until(process, lambda run=run, hung=hung: hung.exists() and self.steps_done(run) >= 60)
                self.kill(run, process, number, 0)
                self.until(process, lambda run=run: len(events(self.folder / run, "recovery")) == 1)
                hangs.unlink()
                self.ended(process)
                self.assert_as_twin(run, "twin", unfinished=2)
                self.assertEqual(list((self.folder / run / "checkpoints").glob("*.tmp")), [])

    def test_a_rank_that_hangs_is_ended(self):
        """In a write of its own thread, which nobody notices but by what it does not send."""
        self.twin("twin", 3)
        hangs = self.folder / "hanging-disk"
        hangs.touch()
        env = {**os.environ, "LD_PRELOAD": KILL_AT_WRITE, "HANG_AT_PATH": "*/hanging/checkpoints/step-00000050.*/layer-0003*",
               "HANG_WHILE": str(hangs)}
        extra = (*self.SETTINGS, "checkpoint.asynchronous=false", "pipeline.timeout_s=5")
        process = self.spawn(self.command("-n", "3", run="hanging", extra=extra), env=env)
        output = self.ended(process)
        self.assertRegex(output, r"this rank hangs: it has neither sent nor received anything for 5 s \(pipeline.timeout_s\)")
        self.assertEqual([len(event["lost"]) for event in events(self.folder / "hanging", "loss")], [1])
        self.assert_as_twin("hanging", "twin")

    def test_a_rank_may_crash(self):
        self.twin("twin", 3)
        self.assertIn("was killed by signal 11", self.hunted("crashed", 3, [1], how=signal.SIGSEGV))
        self.assert_as_twin("crashed", "twin")

    def test_a_rank_is_started_for_one_that_is_lost(self):
        """Twice, the leader first; the numbers are those of a run that nobody disturbs, as far as it goes."""
        extra = (*self.ENDLESS, "elastic.respawn=true")
        process = self.spawn(self.command("-n", "2", run="refilled", extra=(*self.SETTINGS, *extra)))
        ranks = [[1, 2], [2, 3]]
        for turn, number in enumerate((0, 1)):
            self.kill("refilled", process, number, 30 * turn)
            self.until(process, lambda size=turn + 1: len(events(self.folder / "refilled", "size")) == size)
            self.assertEqual(events(self.folder / "refilled", "size")[turn]["ranks"], ranks[turn])
            self.until(process, lambda lost=turn + 1: self.status("refilled").get("lost_ranks") == lost)
            self.assertIn(f"lost      {turn + 1} rank", self.done("refilled", "status"))
            steps = self.status("refilled")["step"]
            self.until(process, lambda steps=steps: self.status("refilled").get("step", 0) > steps)
        self.stopped("refilled", process)
        summary = json.loads((self.folder / "refilled" / "summary.json").read_text())["runs"][0]
        self.assertEqual(summary["size"]["losses"], 2, "rank 2 leads, which came after the first loss")
        self.assertEqual(summary["steps"], len(self.losses_of("refilled")), "all that the run did, not what the last ranks saw")
        self.assert_as_endless_twin("refilled")
        twin = json.loads((self.folder / "refilled-twin" / "summary.json").read_text())["runs"][0]
        self.assertEqual(summary["loss_first"], twin["loss_first"])

    def test_another_rank_is_started_for_one_that_ends_before_it_has_joined(self):
        process = self.spawn(self.command("-n", "2", run="retried", extra=(*self.SETTINGS, *self.ENDLESS, "elastic.respawn=true")))
        self.kill("retried", process, 1, 5)

        def late():
            return [pid for pid, line in rank_processes(str(self.folder / "retried")) if " --join " in line]

        self.until(process, late)
        os.kill(late()[0], signal.SIGKILL)
        self.until(process, lambda: len(self.ranks("retried")) == 2)
        self.stopped("retried", process)

    def test_respawn_is_refused_where_somebody_else_starts_the_ranks(self):
        alone = {**os.environ, "RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "1"}
        process = self.spawn(self.command("-n", "1", run="alone", extra=(*self.SETTINGS, "elastic.respawn=true")), env=alone)
        self.assertIn("elastic.respawn is true, wanted false where", self.ended(process, code=2))

    def test_a_rank_that_is_stopped_is_ended(self):
        self.twin("twin", 3)
        for number in (0, 1):
            with self.subTest(number):
                output = self.hunted(f"stopped-{number}", 3, [number], how=signal.SIGSTOP)
                self.assertIn(f"rank {number} was killed by signal 9", output)
                self.assert_as_twin(f"stopped-{number}", "twin")

    def test_one_after_the_other_until_one_is_left(self):
        self.twin("twin", 3)
        output = self.hunted("last", 3, [0, 1])
        self.assertIn("on with rank 2 from step", output)
        self.assert_as_twin("last", "twin")

    def test_without_a_checkpoint_from_the_beginning(self):
        self.twin("bare-twin", 2, "checkpoint.every=0")
        self.hunted("bare", 2, [1], "checkpoint.every=0", "elastic.snapshots=never")
        self.assertEqual(self.recoveries("bare", "from"), ["initial values"])
        self.assert_as_twin("bare", "bare-twin")

    def test_too_few_ranks_for_the_memory_leave_a_checkpoint(self):
        """One of two is left, whose memory does not hold the model: what it has is kept, and two go on from it."""
        dense = tuple(setting for setting in self.SETTINGS if not setting.startswith(("freezing.", "pruning.")))
        self.succeed(self.command("-n", "1", run="full-twin", extra=dense))
        memory = "pipeline.memory=600KiB"  # two ranks need 510 KiB each, one 917
        # With checkpoints every ten steps the newest may be newer than the snapshots.
        for every, recompute in ((0, "none"), (0, "auto"), (10, "none")):
            with self.subTest(every=every, recompute=recompute):
                run = f"full-{every}-{recompute}"
                more = (*dense, memory, f"pipeline.recompute={recompute}")
                process = self.spawn(self.command("-n", "2", run=run, extra=(*more, f"checkpoint.every={every}")))
                self.look(process, lambda: self.steps_done(run) > 13)
                os.kill(self.processes(run, process)[0], signal.SIGKILL)
                output = self.ended(process, code=3)
                step = int(re.search(r"would do, or more ranks; there is a checkpoint of step (\d+); rank 0 was lost", output)[1])
                self.assertEqual(max(manifests(self.folder / run)), step)
                self.succeed(self.command("-n", "2", "--resume", run=run, extra=more))
                if step % 10 > 0:  # the twin has none of this step
                    shutil.rmtree(self.folder / run / "checkpoints" / f"step-{step:08}")
                self.assertEqual(self.losses_of(run), self.losses_of("full-twin"))
                theirs = manifests(self.folder / "full-twin")
                self.assertEqual(manifests(self.folder / run), {step: theirs[step] for step in manifests(self.folder / run)})

    def test_one_of_two_replicas(self):
        extra = ("pipeline.replicas=2",)
        self.twin("grid-twin", 2, *extra)
        for number in (0, 1, 3):
            with self.subTest(number):
                self.hunted(f"grid-{number}", 2, [number], *extra)
                self.assertEqual(self.recoveries(f"grid-{number}", "from"), ["live layers"])
                self.assertEqual(self.recoveries(f"grid-{number}", "steps_again"), [0])
                loss, = events(self.folder / f"grid-{number}", "loss")
                self.assertEqual(loss["lost"], [number])
                self.assertEqual(sorted([*loss["lost"], *loss["spares"], *self.recoveries(f"grid-{number}", "ranks")[0]]), [0, 1, 2, 3])
                summary = json.loads((self.folder / f"grid-{number}" / "summary.json").read_text())["runs"][0]
                self.assertEqual(summary["size"]["losses"], 1, "a spare is no loss")
                script = self.folder / "vega.js"
                script.write_text("window.vegaEmbed = null;")
                self.succeed([DYNMO, "report", str(self.folder / f"grid-{number}"), "--html", str(self.folder / "grid.html")],
                             env={"DYNMO_VEGA": str(script)})
                self.assertIn(f"; lost [{number}]; spares [{loss['spares'][0]}]", (self.folder / "grid.html").read_text())
                self.assert_as_twin(f"grid-{number}", "grid-twin", unfinished=1)

    def test_a_rank_is_lost_while_the_size_changes(self):
        """At drawn times after ranks were asked to come or to leave: no step runs from a checkpoint, as there is none."""
        extra = (*self.ENDLESS, "checkpoint.every=0")
        process = self.spawn(self.command("-n", "4", run="changing", extra=(*self.SETTINGS, *extra)))
        self.until(process, lambda: self.steps_done("changing") > 3)
        for turn, words in enumerate((("grow", "1"), ("pack", "3"), ("grow", "1"))):
            asking = self.spawn([DYNMO, "ctl", str(self.folder / "changing"), *words])
            time.sleep(self.draw.uniform(0, 0.1))
            victim = sorted(self.processes("changing", process).items())[0]
            os.kill(victim[1], signal.SIGKILL)
            self.until(process, lambda turn=turn: len(events(self.folder / "changing", "recovery")) > turn)
            asking.communicate(timeout=LIMIT)
        self.assertNotIn("checkpoint", self.recoveries("changing", "from"))
        self.assertNotIn("initial values", self.recoveries("changing", "from"))
        self.stopped("changing", process)
        self.assert_as_endless_twin("changing")

    def test_a_hook_outlives_the_loss_of_another_rank_and_hears_who_runs(self):
        """The leader lives. It was in the first call of a hook, which asks for another one."""
        hook, kept = self.folder / "hook", self.folder / "kept"
        hook.write_text(f"#!/bin/sh\necho begun >> {kept}\nsleep 1\necho $DYNMO_KEPT_RANKS >> {kept}\n"
                        f"[ $(wc -l < {kept}) -gt 2 ] || exit 75\n")
        hook.chmod(0o755)
        extra = (*self.ENDLESS, f"elastic.release_command={hook}")
        process = self.spawn(self.command("-n", "4", run="hooked", extra=(*self.SETTINGS, *extra)))
        self.until(process, lambda: self.steps_done("hooked") > 3)
        self.done("hooked", "drain", "3")
        self.until(process, kept.exists)
        os.kill(self.processes("hooked", process)[1], signal.SIGKILL)
        self.until(process, lambda: len(events(self.folder / "hooked", "release")) == 2)
        self.assertEqual([event["outcome"] for event in events(self.folder / "hooked", "release")], ["not now", "done"])
        self.assertEqual(kept.read_text().split(), ["begun", "0,1,2", "begun", "0,2"])
        self.stopped("hooked", process)

    def test_ranks_that_joined_after_a_pack_stay_after_a_loss(self):
        extra = (*self.ENDLESS, "elastic.pack_ranks=2")
        process = self.spawn(self.command("-n", "3", run="packed", extra=(*self.SETTINGS, *extra)))
        self.until(process, lambda: self.ranks("packed") == [0, 1])
        for size in (3, 4):
            self.join("packed")
            self.until(process, lambda size=size: len(self.ranks("packed")) == size)
        os.kill(self.processes("packed", process)[1], signal.SIGKILL)
        self.until(process, lambda: self.ranks("packed") == [0, 3, 4])
        steps = self.status("packed")["step"]
        self.until(process, lambda: self.status("packed").get("step", 0) > steps + 30)
        self.assertEqual(self.ranks("packed"), [0, 3, 4])
        self.stopped("packed", process)

    def test_ranks_join_after_the_leader_was_killed(self):
        """One by --join, and one that a scheduler starts again."""
        process = self.spawn(self.command("-n", "3", run="grown", extra=(*self.SETTINGS, *self.ENDLESS)))
        self.kill("grown", process, 0, 5)
        joiner = self.join("grown")
        self.until(process, lambda: len(events(self.folder / "grown", "size")) == 1)
        rank = {**os.environ, "RANK": "0", "WORLD_SIZE": "3", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "1"}
        again = self.spawn(self.command("-n", "3", "--resume=auto", run="grown", extra=(*self.SETTINGS, *self.ENDLESS)), env=rank)
        self.until(process, lambda: len(events(self.folder / "grown", "size")) == 2)
        self.assertEqual([event["ranks"] for event in events(self.folder / "grown", "size")], [[1, 2, 3], [1, 2, 3, 4]])
        self.stopped("grown", process)
        for number, each in ((3, joiner), (4, again)):
            self.assertIn(f"joined as rank {number}", self.ended(each, code=130))
        self.assert_as_endless_twin("grown")

    def test_a_rank_that_was_asked_for_waits_until_another_rank_leads(self):
        """The files name a killed leader meanwhile. A user's --join ends at once."""
        process = self.start("leaderless", 2, *self.ENDLESS)
        job = self.folder / "leaderless" / "job.json"
        leader = job.read_text()
        late = {**os.environ, "DYNMO_LAUNCHER_FD": "0"}
        for env, code in ((None, 5), (late, 130)):
            with socket.create_server(("127.0.0.1", 0)) as killed:
                killed.settimeout(LIMIT)
                other = job.with_name("other")
                other.write_text(json.dumps({**json.loads(leader), "port": killed.getsockname()[1]}))
                other.rename(job)
                joiner = self.spawn([DYNMO, "train", "--join", str(self.folder / "leaderless")], env=env)
                killed.accept()[0].close()
            if code == 5:
                self.assertIn("the run's leader does not answer", self.ended(joiner, code=5))
        other.write_text(leader)
        other.rename(job)
        self.until(process, lambda: self.ranks("leaderless") == [0, 1, 2])
        self.stopped("leaderless", process)
        self.assertIn("joined as rank 2", self.ended(joiner, code=130))


if __name__ == "__main__":
    unittest.main()
