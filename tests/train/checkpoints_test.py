# SPDX-License-Identifier: Apache-2.0
"""Checkpoints as a user meets them: resume after SIGKILL, disks that say no, damaged files."""
import json
import os
import resource
import shutil
import subprocess

from program import DYNMO, held_port
from run_case import RunCase, digests, losses, newest_manifest, rank_processes

KILL_AT_WRITE = os.environ.get("KILL_AT_WRITE_LIBRARY", "")


class Resume(RunCase):
    SETTINGS = ("train.steps=60", "checkpoint.every=10", "freezing.enabled=true", "freezing.every=4", "checkpoint.keep=3")

    def train(self, run, ranks, *words):
        return self.command("-n", str(ranks), *words, run=run, extra=self.SETTINGS)

    def test_killed_and_resumed_on_other_ranks_equals_undisturbed(self):
        self.succeed(self.train("undisturbed", 2))
        reference = self.folder / "undisturbed"

        for ranks in (1, 3):
            run = self.folder / f"killed-{ranks}"
            killed = self.run_command(self.train(run.name, 2), env={"LD_PRELOAD": KILL_AT_WRITE, "KILL_AT_WRITE": "1",
                                                                   "KILL_AT_PATH": "step-00000030"})
            self.assertEqual(killed.returncode, 5, killed.stdout + killed.stderr)
            self.assertEqual(rank_processes(str(run)), [])
            resumed = self.succeed(self.train(run.name, ranks, "--resume"))
            self.assertIn("resume", resumed.stdout)
            self.assertEqual(losses(run), losses(reference), f"{ranks} ranks")
            self.assertEqual(digests(newest_manifest(run)), digests(newest_manifest(reference)), f"{ranks} ranks")

    def test_freezing_by_norm_resumes_with_the_same_decisions(self):
        records = self.resume_by_rule("norm", ["freezing.check_every=3", "freezing.smooth_steps=4", "freezing.tolerance=1"], 5)
        self.assertGreater(records[-1]["sources"]["freezing"]["next_norm"], 0)

    def test_freezing_by_plasticity_resumes_with_the_same_decisions(self):
        records = self.resume_by_rule("plasticity", ["freezing.check_every=3", "freezing.tolerance=0.4"], 4)
        figures = [record["sources"]["freezing"] for record in records]
        self.assertGreater(figures[9]["next_slope"], 0)
        # Behind the share `bootstrap` of 60 steps, every third one, unless all six have frozen that may.
        self.assertEqual([i for i in range(60) if "probe_s" in figures[i]],
                         [i for i in range(3, 60, 3) if records[i]["frozen_layers"] < 6])
        self.assertTrue(all(0 < one["probe_s"] < record["step_s"] for one, record in zip(figures, records) if "probe_s" in one))
        # References are int8 with a scale a row; the head has none.
        run = self.folder / "plasticity"
        names = {}
        for path in (run / "checkpoints" / "step-00000060").glob("*.safetensors"):
            data = path.read_bytes()
            names |= json.loads(data[8:8 + int.from_bytes(data[:8], "little")])
        query = names["buffer.model.layers.0.self_attn.q_proj.weight.reference"]
        self.assertEqual((query["dtype"], query["shape"]), ("I8", [32, 32]))
        self.assertEqual(names["buffer.model.layers.0.self_attn.q_proj.weight.reference_scales"]["dtype"], "F32")
        self.assertFalse([name for name in names if name.startswith("buffer.lm_head")])
        self.succeed([DYNMO, "generate", str(run), "--prompt", "line ", "--tokens", "3"])

    def resume_by_rule(self, name, keys, first_step):
        """A run by a rule of freezing, and others that go on from its checkpoints; the records of the first."""
        rule = [f"freezing.rule={name}", *keys, "freezing.patience=1", "freezing.unfreeze_below=0.5"]
        plain = ("train.steps=60", "checkpoint.every=1", "checkpoint.keep=60", "freezing.enabled=true")

        def train(run, ranks, *words):
            return self.command("-n", str(ranks), *words, run=run, extra=(*plain, *rule))

        def records(run):
            return [json.loads(line) for line in (run / "records" / "rank-0.jsonl").read_text().splitlines()]

        def frozen(run):
            return [record["frozen_layers"] for record in records(run)]

        self.succeed(train(name, 2))
        reference = self.folder / name
        prefix = frozen(reference)
        most = prefix.index(max(prefix))
        self.assertGreaterEqual(prefix[most], 2, prefix)
        self.assertIn(0, prefix[most:], "it trains all layers again")
        # From before the first freeze, from the middle of it, and from after the thaw; on other ranks.
        for step, ranks in ((first_step, 1), ((most + 2) // 3 * 3, 3), (55, 1)):
            run = self.folder / f"{name}-{step}"
            shutil.copytree(reference, run)
            for folder in (run / "checkpoints").glob("step-*[0-9]"):
                if int(folder.name[5:]) > step:
                    shutil.rmtree(folder)
            resumed = self.succeed(train(run.name, ranks, "--resume"))
            self.assertIn(f"step {step} of 60", resumed.stdout)
            self.assertEqual(frozen(run)[60:], prefix[step:], f"from step {step}")
            self.assertEqual(losses(run), losses(reference), f"from step {step}")
            self.assertEqual(digests(newest_manifest(run)), digests(newest_manifest(reference)), f"from step {step}")
        # Another rule is another training.
        other = self.command("-n", "2", "--resume", run=name, extra=plain)
        self.assert_error(self.run_command(other), 2, "checkpoint")
        return records(reference)

    def test_bf16_resumes_with_the_same_bits_and_in_bf16_only(self):
        def train(run, ranks, *words):
            return self.train(run, ranks, *words) + ["--set", "model.precision=bf16"]

        self.succeed(train("bf16", 2))
        reference, run = self.folder / "bf16", self.folder / "bf16-resumed"
        shutil.copytree(reference, run)
        for step in (50, 60):
            shutil.rmtree(run / "checkpoints" / f"step-{step:08d}")
        resumed = self.succeed(train(run.name, 3, "--resume"))
        self.assertIn("step 40", resumed.stdout)
        self.assertEqual(losses(run), losses(reference))
        self.assertEqual(digests(newest_manifest(run)), digests(newest_manifest(reference)))

        # What fp32 tools open: every tensor fp32 under its own name, no rounded copy.
        layer = (run / "checkpoints" / "step-00000060" / "layer-0007.safetensors").read_bytes()
        header = json.loads(layer[8:8 + int.from_bytes(layer[:8], "little")])
        names = ["model.norm.weight", "lm_head.weight"]
        moments = [f"optimizer.{kind}.{name}" for kind in ("exp_avg", "exp_avg_sq") for name in names]
        self.assertEqual(sorted(set(header) - {"__metadata__"}), sorted(names + moments))
        self.assertEqual({header[name]["dtype"] for name in names + moments}, {"F32"})
        self.succeed([DYNMO, "generate", str(run), "--prompt", "line ", "--tokens", "3"])
        self.assert_error(self.run_command(self.train(run.name, 2, "--resume")), 2, "checkpoint", "model")

    def test_an_adaptive_plan_goes_on_with_its_order(self):
        extra = ["--set", "pipeline.schedule=adaptive", "--set", "balance.enabled=false"]
        self.succeed(self.train("adaptive", 2) + extra)
        run = self.folder / "adaptive"
        plan = newest_manifest(run)["state"]["plan"]
        self.assertEqual(len(plan["order"]), 2)
        reference = losses(run)
        shutil.rmtree(run / "checkpoints" / "step-00000060")
        self.succeed(self.train("adaptive", 2, "--resume") + extra)
        self.assertEqual(newest_manifest(run)["state"]["plan"], plan)
        self.assertEqual(losses(run), reference)
        # Where it does not fit, it is made anew.
        shutil.rmtree(run / "checkpoints" / "step-00000060")
        halves = ["--set", "batch.micro_batches=2", "--set", "batch.accumulation=2"]
        self.succeed(self.train("adaptive", 2, "--resume") + extra + halves)
        self.assertEqual(losses(run), reference)

    def test_corrupted_checkpoints(self):
        run = self.folder / "damaged"
        self.succeed(self.train("damaged", 2))
        newest, older, oldest = sorted((run / "checkpoints").glob("step-*[0-9]"), reverse=True)
        layer = newest / "layer-0002.safetensors"
        content = bytearray(layer.read_bytes())
        content[len(content) // 2] ^= 1
        layer.write_bytes(content)
        exported = self.succeed([DYNMO, "checkpoint", "export-hf", "damaged", "--out", "damaged-hf"])
        self.assertIn("passed over a damaged checkpoint", exported.stderr)
        self.assertIn("layer-0002.safetensors", exported.stderr)
        resumed = self.succeed(self.train("damaged", 2, "--resume"))
        self.assertIn("layer-0002.safetensors", resumed.stdout + resumed.stderr)
        self.assertIn("step 50", resumed.stdout)

        for folder in (run / "checkpoints").iterdir():
            manifest = folder / "manifest.json"
            manifest.write_text(manifest.read_text()[:-20])
        self.assert_error(self.run_command(self.train("damaged", 2, "--resume")), 4, "checkpoint")

    def test_ranks_that_find_other_checkpoints_do_not_train(self):
        self.succeed(self.train("first", 2))
        shutil.copytree(self.folder / "first", self.folder / "second")
        (self.folder / "second/checkpoints/step-00000060/layer-0001.safetensors").unlink()
        with held_port() as port:
            processes = []
            for rank, run in enumerate(("first", "second")):
                env = {**os.environ, "RANK": str(rank), "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
                command = self.command("--resume", run=run, extra=self.SETTINGS)
                processes.append(subprocess.Popen(command, env=env, text=True, stdout=subprocess.PIPE, stderr=subprocess.PIPE, cwd=self.folder))
            for process in processes:
                _, err = process.communicate(timeout=120)
                self.assertEqual(process.returncode, 4, err)
                self.assertRegex(err, r"rank 1 finds that of step 50 \(\w+\) as the newest checkpoint, rank 0 that of step 60 \(\w+\): wanted")

    def test_a_refused_resume_keeps_the_settings_of_the_run(self):
        self.succeed(self.train("kept", 2))
        config = (self.folder / "kept/config.toml").read_text()
        pieces = ("--tokenizer", "sentencepiece", "--vocab", "280", "--validation", "0.1")
        self.succeed([DYNMO, "data", "prepare", "corpus", "--out", "pieces", *pieces])
        refused = self.run_command([*self.train("kept", 2, "--resume"), "--data", "pieces"])
        self.assertEqual(refused.returncode, 2, refused.stderr)
        self.assertEqual((self.folder / "kept/config.toml").read_text(), config)

    def test_resume_of_another_model_is_refused(self):
        self.succeed(self.train("other", 2))
        self.assert_error(self.run_command(self.train("other", 2, "--resume") + ["--set", "model.hidden=64"]), 2,
                          "checkpoint")


class Checkpoints(RunCase):
    """What fails while checkpoints are written, and what is said of damaged ones."""

    SETTINGS = ("train.steps=30", "checkpoint.every=10", "run.trace_steps=0")

    def train(self, run, *words, **options):
        return subprocess.run(self.command("-n", "2", *words, run=run, extra=self.SETTINGS), capture_output=True, text=True,
                              timeout=120, stdin=subprocess.DEVNULL, cwd=self.folder, **options)

    def test_a_full_disk_stops_no_training(self):
        self.succeeded(self.train("reference"))
        largest = max(path.stat().st_size for path in (self.folder / "reference/checkpoints").glob("*/layer-*"))

        def limit():
            # Writes beyond it fail like those to a full disk; all files of a run but the layers' are smaller.
            resource.setrlimit(resource.RLIMIT_FSIZE, (largest - 1, largest - 1))

        full = self.train("full", preexec_fn=limit)
        self.assertEqual(losses(self.folder / "full"), losses(self.folder / "reference"), full.stdout + full.stderr)
        alarms = [line for line in full.stdout.splitlines() if line.startswith("ALARM")]
        self.assertEqual(len(alarms), 3, full.stdout)
        for step, line in zip((10, 20, 30), alarms):
            self.assertIn(f"no checkpoint of step {step}", line)
            self.assertIn("File too large", line)
            self.assertIn("checkpoints/step-", line)
            self.assertIn("no good one yet", line)
        self.assertIn("0 checkpoints, 3 FAILED", full.stdout)
        # The trained model is lost: that is said, and by the exit code, too.
        self.assertEqual(full.returncode, 4)
        self.assertIn("its last checkpoint could not be written", full.stderr)
        self.assertEqual(list((self.folder / "full/checkpoints").iterdir()), [], "a failed one leaves room")

        # Where an older one is good, it stays and is named, and training can go on from it.
        shutil.copytree(self.folder / "reference", self.folder / "older")
        shutil.rmtree(self.folder / "older/checkpoints/step-00000030")
        older = self.train("older", "--resume", preexec_fn=limit, restore_signals=False)
        self.assertIn("still good: ", older.stdout + older.stderr)
        self.assertIn("checkpoints/step-00000020", older.stdout)
        self.succeeded(self.train("older", "--resume"))
        self.assertEqual(digests(newest_manifest(self.folder / "older")), digests(newest_manifest(self.folder / "reference")))

    def test_a_disk_without_room(self):
        """A real file system of 200 KiB, where the kernel lets this user mount one."""
        if shutil.which("unshare") is None or subprocess.run(
                ["unshare", "--map-root-user", "--mount", "true"], capture_output=True).returncode != 0:
            self.skipTest("this user may not mount anything")
        run = self.folder / "small-disk"
        (run / "checkpoints").mkdir(parents=True)
        command = self.command("-n", "2", run="small-disk", extra=self.SETTINGS)
        script = 'mount -t tmpfs -o size=200k none "$0" && exec "$@"'
        result = self.run_command(["unshare", "--map-root-user", "--mount", "sh", "-c", script, str(run / "checkpoints"), *command])
        if "mount:" in result.stderr:
            self.skipTest(f"this user may not mount a tmpfs: {result.stderr.strip()}")
        self.assertEqual(result.returncode, 4, result.stdout + result.stderr)
        self.assertEqual(result.stdout.count("No space left on device"), 3, result.stdout)
        self.assertEqual(len(losses(run)), 30)

    def test_verify_and_inspect_walk_back(self):
        self.succeeded(self.train("walk"))
        run = self.folder / "walk"
        # Another run in its folder would take these for its own.
        self.assert_error(self.train("walk"), 2, "walk/checkpoints", "--resume", "--out")
        self.assertIn("step-00000030: step 30, 8 files, all digests match", self.run_program("checkpoint", "verify", run).stdout)
        newest = run / "checkpoints" / "step-00000030"
        layer = newest / "layer-0004.safetensors"
        layer.write_bytes(layer.read_bytes()[:-5])
        (run / "checkpoints" / "step-00000040").mkdir()  # lost its manifest, or is somebody else's
        verified = self.succeeded(self.run_program("checkpoint", "verify", run))
        lines = verified.stdout.splitlines()
        self.assertIn("step-00000040", lines[0])
        self.assertIn("DAMAGED", lines[0])
        self.assertIn("layer-0004.safetensors has", lines[1])
        self.assertIn("step-00000020: step 20", lines[2])
        inspected = self.succeeded(self.run_program("checkpoint", "inspect", run))
        self.assertIn("ignored: ", inspected.stdout)
        self.assertIn("step       20", inspected.stdout)
        resumed = self.succeeded(self.train("walk", "--resume"))
        self.assertIn("layer-0004.safetensors", resumed.stdout)
        self.assertIn("step 20 of 30", resumed.stdout)

        for manifest in (run / "checkpoints").glob("*/manifest.json"):
            manifest.write_text('{"format": "something-else"}')
        for words in (("verify", run), ("inspect", run)):
            self.assert_error(self.run_program("checkpoint", *words), 4, "no usable checkpoint", "manifest.json")

    def test_killed_while_writing(self):
        """A rank is killed before its n-th operation on a checkpoint under way: what is listed verifies, resume is exact."""
        extra = ("train.steps=20", "checkpoint.every=2", "checkpoint.keep=3", "run.trace_steps=0")
        self.succeed(self.command("-n", "2", run="steady", extra=extra))
        steady = self.folder / "steady"
        wanted = digests(newest_manifest(steady))
        committed = sorted((steady / "checkpoints").glob("step-*[0-9]"))
        self.assertEqual(committed[-1].name, "step-00000020")
        ended = []
        for operation in (1, 2, 3, 5, 8, 13, 21, 34, 200):
            # With two checkpoints still to be written.
            run = self.folder / f"killed-{operation}"
            shutil.copytree(steady, run)
            for checkpoint in committed[-2:]:
                shutil.rmtree(run / "checkpoints" / checkpoint.name)
            killed = self.run_command(self.command("-n", "2", "--resume", run=run.name, extra=extra),
                                      env={"LD_PRELOAD": KILL_AT_WRITE, "KILL_AT_WRITE": str(operation)})
            ended.append(killed.returncode)
            half_written = list((run / "checkpoints").glob("step-*.tmp"))
            if killed.returncode == 0:  # it has fewer operations
                self.assertEqual(half_written, [])
                break
            self.assertEqual(killed.returncode, 5, killed.stdout + killed.stderr)
            self.assertEqual(len(half_written), 1, operation)
            self.assertFalse(rank_processes(str(run)))
            verified = self.succeeded(self.run_program("checkpoint", "verify", run))
            self.assertNotIn("DAMAGED", verified.stdout)
            self.succeed(self.command("-n", "3", "--resume", run=run.name, extra=extra))
            self.assertEqual(digests(newest_manifest(run)), wanted)
        self.assertEqual(ended[-1], 0, "all operations of a rank on two checkpoints were reached")
        self.assertGreater(len(ended), 4, ended)
