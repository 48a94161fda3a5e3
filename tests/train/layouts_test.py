# SPDX-License-Identifier: Apache-2.0
"""Replicas, schedules and emulated ranks: the same numbers, and what is refused."""
import json
import re
import shutil

from program import DYNMO, held_port
from run_case import RunCase, digests, losses, newest_manifest, settings


class Replicas(RunCase):
    """Two replicas of a pipeline: the same numbers on any number of ranks, and after a restart."""

    SETTINGS = ("train.steps=12", "checkpoint.every=4", "checkpoint.keep=3", "freezing.enabled=true", "freezing.every=4",
                "train.validation_every=6", "train.validation_steps=1")

    def train(self, run, *extra, words=()):
        return self.succeed(self.command(*words, run=run, extra=(*self.SETTINGS, *extra))).stdout

    def validation_line(self, text):
        return re.search(r"validation loss [0-9.]+", text)[0]

    def test_the_same_numbers_on_any_ranks_and_after_a_restart(self):
        two = self.train("two", "pipeline.replicas=2", "pipeline.ranks=2")
        one = self.train("one", "pipeline.replicas=2", "pipeline.ranks=1")
        reference = self.folder / "two"
        self.assertIn("each of 2 x 2 ranks", two)
        self.assertIn("ranks 2 x 2", two)
        self.assertEqual(losses(self.folder / "one"), losses(reference))
        self.assertEqual(len(losses(reference)), 12)
        self.assertEqual(digests(newest_manifest(self.folder / "one")), digests(newest_manifest(reference)))
        self.assertEqual(self.validation_line(one), self.validation_line(two))
        summary = json.loads((reference / "summary.json").read_text())
        self.assertEqual(summary["runs"][0]["ranks"], 4)
        for rank in range(4):
            record = json.loads((reference / "records" / f"rank-{rank}.jsonl").read_text().splitlines()[0])
            self.assertEqual(record["rank"], rank)
            self.assertEqual(record["tokens"], 2 * 4 * 2 * 16)
            self.assertEqual(record["first_layer"] > 0, rank % 2 == 1)
        trace = json.loads((reference / "trace.json").read_text())
        names = {(event["name"], event["pid"], event["args"]["name"]) for event in trace["traceEvents"] if event["ph"] == "M"}
        processes = sorted(name for kind, _, name in names if kind == "process_name")
        self.assertEqual(processes, ["measured, replica 0", "measured, replica 1"])
        ranks = [name for kind, _, name in names if kind == "thread_name" and name in ("rank 0", "rank 1")]
        self.assertEqual(len(ranks), 4, "two ranks of each replica")

        for run, extra in (("three", ("pipeline.replicas=2", "pipeline.ranks=3")),
                           ("alone", ("pipeline.replicas=1", "pipeline.ranks=2", "batch.accumulation=2"))):
            shutil.copytree(reference, self.folder / run)
            shutil.rmtree(self.folder / run / "checkpoints" / "step-00000012")
            resumed = self.train(run, *extra, words=("--resume",))
            self.assertIn("step 8 of 12", resumed)
            found = losses(self.folder / run)
            if run == "three":
                self.assertEqual(found, losses(reference))
                self.assertEqual(digests(newest_manifest(self.folder / run)), digests(newest_manifest(reference)))
                continue
            # The same samples in another grouping of the sums: the last bits differ.
            for step, loss in losses(reference).items():
                self.assertAlmostEqual(found[step], loss, places=4)
        self.assert_error(self.run_command(self.command("--resume", run="two", extra=(
            *self.SETTINGS, "pipeline.replicas=1", "pipeline.ranks=2"))), 2, "accumulation")

    def test_accumulated_rounds_equal_one_round(self):
        self.train("at-once", "pipeline.ranks=2")
        self.train("rounds", "pipeline.ranks=2", "batch.micro_batches=2", "batch.accumulation=2")
        self.assertEqual(losses(self.folder / "at-once"), losses(self.folder / "rounds"))
        self.assertEqual(digests(newest_manifest(self.folder / "at-once")), digests(newest_manifest(self.folder / "rounds")))

    def test_ranks_that_do_not_divide(self):
        with held_port() as port:
            # The other two are not there: said without waiting for them.
            env = {"RANK": "0", "WORLD_SIZE": "3", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
            self.assert_error(self.run_command(self.command("--set", "pipeline.replicas=2"), env=env), 2, "3 ranks",
                              "pipeline.replicas = 2")

    def test_ranks_that_others_started_are_not_those_of_the_flag(self):
        with held_port() as port:
            env = {"RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
            for words in ("-n", "2"), ("--pipeline.ranks", "2"), ("-n", "2", "--dry-run"):
                self.assert_error(self.run_command(self.command(*words, run="launched"), env=env), 2,
                                  "-n (pipeline.ranks) is 2, but a launcher has started 1 rank (RANK is set)")
            # A config may be that of another run.
            (self.folder / "two.toml").write_text("[pipeline]\nranks = 2\n")
            done = self.run_command(self.command("--config", "two.toml", run="launched", extra=("train.steps=2",)), env=env)
        self.succeeded(done)
        self.assertIn("ranks    1 of the launcher: pipeline.ranks = 2 counts ranks that `dynmo train` starts", done.stdout)

    def test_no_replicas(self):
        env = {"RANK": "0", "WORLD_SIZE": "3", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "1"}
        for started in {}, env:
            for words in (), ("--dry-run",):
                command = self.command("--set", "pipeline.replicas=0", *words)
                self.assert_error(self.run_command(command, env=started), 2, "pipeline.replicas is 0")


class Schedules(RunCase):
    def test_all_train_to_the_same_numbers(self):
        found = {}
        for schedule in ("1f1b", "gpipe", "zb-h1", "zb-v", "interleaved", "auto"):
            self.succeed(self.command("-n", "2", "--steps", "4", run=schedule, extra=[f"pipeline.schedule={schedule}"]))
            found[schedule] = losses(self.folder / schedule)
            self.assertEqual(len(found[schedule]), 4)
            self.assertEqual(found[schedule], found["1f1b"], schedule)

    def test_the_dense_run_of_a_comparison_is_that_without_sources(self):
        """Pruning changes the losses, exits and experts the layers too; the dense run in the same process has none of them."""
        sources = ("pruning.enabled=true", "pruning.start=1", "pruning.end=4", "pruning.every=1", "early_exit.enabled=true",
                   "early_exit.exit_every=1", "early_exit.warm_up=1")
        self.succeed(self.command("-n", "2", "--steps", "8", run="plain"))
        compare = ("--compare", "dense,static,balanced")
        result = self.succeed(self.command("-n", "2", "--steps", "8", *compare, run="against-dense", extra=sources))
        runs = {run["name"]: run for run in json.loads((self.folder / "against-dense/summary.json").read_text())["runs"]}
        plain = json.loads((self.folder / "plain/summary.json").read_text())["runs"][0]
        self.assertEqual(list(runs), ["dense", "static", "balanced"])
        self.assertEqual(runs["dense"]["loss_digest"], plain["loss_digest"])
        self.assertEqual(runs["static"]["loss_digest"], runs["balanced"]["loss_digest"])
        self.assertNotEqual(runs["dense"]["loss_digest"], runs["static"]["loss_digest"])
        self.assertNotIn("sources", runs["dense"])
        self.assertEqual(set(runs["balanced"]["sources"]), {"pruning", "early_exit"})
        self.assertRegex(result.stdout, r"\nlosses     the same numbers, bit for bit .*\nspeed-up .*\nover dense [0-9.]+ x")

    def test_one_that_does_not_exist(self):
        self.assert_error(self.run_command(self.command("--set", "pipeline.schedule=zbv")), 2, "pipeline.schedule", "zb-v")

    def test_micro_batches_it_cannot_take(self):
        command = self.command("-n", "3", "--set", "pipeline.schedule=interleaved", "--set", "model.blocks=8")
        result = self.run_command(command)
        self.assertEqual(result.returncode, 2, result.stdout + result.stderr)
        self.assertIn("want 3 or 6 micro-batches", result.stderr)


class Emulated(RunCase):
    def profile(self):
        layers = [{"name": f"layer{i}", "forward_s": 0.002, "backward_input_s": 0.002, "backward_weight_s": 0.002,
                   "parameter_bytes": 1 << 20, "boundary_bytes": 1 << 16} for i in range(8)]
        path = self.folder / "profile.json"
        path.write_text(json.dumps({"format": "dynmo-profile-1", "layers": layers}))
        return path

    def command(self, *words, extra=()):
        return [DYNMO, "train", "--out", str(self.folder / "emulated"), "--steps", "6", "-n", "4", "--overwrite",
                *settings(["run.device=emulated", "train.validation_every=0", "pipeline.pin=false", *extra]), *words]

    def test_ranks_sleep_for_their_layers_and_say_so(self):
        result = self.succeed(self.command(extra=[f"emulated.profile={self.profile()}", "emulated.memory_scale=0.01"]))
        # Every output says so, what the run prints at its end and what `report` says of it.
        folder = self.folder / "emulated"
        self.assertIn("device   EMULATED", result.stdout)
        self.assertRegex(result.stdout, r"step +6/6 .* EMULATED  [0-9:]{8}\n")
        self.assertIn("device     EMULATED", result.stdout)
        self.assertIn("device     EMULATED", self.run_command([DYNMO, "report", str(folder)]).stdout)
        self.assertEqual(json.loads((folder / "summary.json").read_text())["device"], "emulated")
        self.assertTrue(json.loads((folder / "profile.json").read_text())["emulated"])
        self.assertTrue(json.loads((folder / "load-trace.jsonl").read_text().splitlines()[0])["emulated"])
        self.assertIn('"emulated"', (folder / "trace.json").read_text())
        self.assertIn("EMULATED", self.run_command(self.command(
            "--dry-run", extra=[f"emulated.profile={self.profile()}"])).stdout)
        for name in "profile=profile.json", "trace=load-trace.jsonl":  # which are read back
            self.succeed(self.command("--dry-run", extra=["emulated." + name.replace("=", f"={folder}/")]))
        records = [json.loads(line) for line in (self.folder / "emulated/records/rank-0.jsonl").read_text().splitlines()]
        # 8 micro-batches through two layers of three passes of 2 ms, by the emulated device's own time: a step that follows
        # one whose end came late is shorter by the host's clock.
        for record in records:
            self.assertTrue(record["emulated"])
            self.assertGreaterEqual(record["busy_s"], 8 * 2 * 0.006 - 1e-9)

    def test_what_it_could_gain_is_of_the_given_costs_at_any_time_scale(self):
        # From a cut of 5 and 2 ms a pass, with which four micro-batches take 61 ms (the first rank works for 60 and waits for
        # 1); with the best there is, of 4 and 3 ms, 54 ms (48, and 6 of waiting).
        layers = [{"name": f"layer{i}", **{key: 0.001 * (4 if i == 0 else 1) for key in (
            "forward_s", "backward_input_s", "backward_weight_s")}, "parameter_bytes": 1 << 12} for i in range(4)]
        profile = self.folder / "profile.json"
        profile.write_text(json.dumps({"format": "dynmo-profile-1", "layers": layers}))
        best = []
        for scale in "0.5", "2":
            command = self.command("--compare", "static,balanced", extra=[
                f"emulated.profile={profile}", f"emulated.time_scale={scale}", "pipeline.cut=[2,2]", "batch.micro_batches=4"])
            command[command.index("-n") + 1] = "2"
            result = self.succeed(command)
            self.assertIn(f"layers sleep for {scale} x the times of", result.stdout)
            self.assertRegex(result.stdout, r"best possible .* from given costs\)")
            folder = self.folder / "emulated"
            summary = json.loads((folder / "summary.json").read_text())
            self.assertEqual(summary["best_speedup_costs"], "given")
            best.append(summary["best_speedup"])
            # Whatever it has decided: no cuts are better.
            self.assertGreater(summary["cuts_speedup"], 0)
            self.assertLess(summary["cuts_speedup"], 61 / 54 + 1e-6)
            for line in (folder / "static/records/rank-0.jsonl").read_text().splitlines():
                self.assertGreaterEqual(json.loads(line)["busy_s"], float(scale) * 0.060 - 1e-9)
            shutil.rmtree(folder)
        # Whatever the noise of the steps.
        for speedup in best:
            self.assertAlmostEqual(speedup, 61 / 54, places=5)

    def test_the_dense_run_keeps_the_costs_of_the_first_step(self):
        layer = {"forward_s": 0.004, "backward_input_s": 0.004, "backward_weight_s": 0.004, "parameter_bytes": 1 << 10}
        trace = self.folder / "exits.jsonl"
        trace.write_text("".join(json.dumps(line) + "\n" for line in (
            {"format": "dynmo-load-trace-1", "layers": [{"name": f"layer{i}", **layer} for i in range(4)]},
            {"step": 0}, {"step": 2, **{key: [0.001] * 4 for key in ("forward_s", "backward_input_s", "backward_weight_s")}})))
        result = self.succeed(self.command("--compare", "dense,static", extra=[
            f"emulated.trace={trace}", "pipeline.cut=[1,1,1,1]", "batch.micro_batches=4"]))
        for line in (self.folder / "emulated/dense/records/rank-0.jsonl").read_text().splitlines():
            self.assertGreaterEqual(json.loads(line)["busy_s"], 4 * 0.012 - 1e-9)
        self.assertRegex(result.stdout, r"\nover dense [0-9.]+ x")

    def test_a_rank_that_becomes_slow_is_named_once(self):
        layer = {"forward_s": 0.002, "backward_input_s": 0.001, "backward_weight_s": 0.001, "parameter_bytes": 1 << 10}
        trace = self.folder / "slow.jsonl"
        trace.write_text("".join(json.dumps(line) + "\n" for line in (
            {"format": "dynmo-load-trace-1", "layers": [{"name": f"layer{i}", **layer} for i in range(8)]}, {"step": 0})))
        command = self.command(extra=[f"emulated.trace={trace}", "pipeline.cut=[2,2,2,2]", "balance.enabled=false",
                                      "batch.micro_batches=2", "emulated.slow_ranks=[1]", "emulated.slow_speed=0.25",
                                      "emulated.slow_from=25"])
        command[command.index("--steps") + 1] = "60"
        result = self.succeed(command)
        said = [line for line in result.stdout.splitlines() if "is slow" in line]
        self.assertEqual(len(said), 1, said)
        self.assertRegex(said[0], r"step +(2[89]|3\d)  rank 1 is slow: its layers take [345]\.\d\d x as long since step 2\d")
        events = [json.loads(line) for line in (self.folder / "emulated/events.jsonl").read_text().splitlines()]
        slow = next(e for e in events if e["event"] == "speed")
        self.assertEqual((slow["rank"], slow["factor"] > 2), (1, True))

    def test_what_is_missing_or_wrong(self):
        self.assert_error(self.run_command(self.command()), 2, "emulated.profile")
        self.assert_error(self.run_command(self.command(extra=["emulated.profile=nowhere.json"])), 2, "nowhere.json")
        self.assert_error(self.run_command(self.command(extra=["run.device=gpu"])), 2, "run.device", "emulated")
        scale = [f"emulated.profile={self.profile()}", "emulated.memory_scale=3"]
        self.assert_error(self.run_command(self.command(extra=scale)), 2, "emulated.memory_scale is 3")
        scale[1] = "emulated.time_scale=0"
        self.assert_error(self.run_command(self.command(extra=scale)), 2, "emulated.time_scale is 0")
