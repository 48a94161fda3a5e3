# SPDX-License-Identifier: Apache-2.0
"""What holds for every command: what it loads, where its errors go, what a path may be, how it runs out of memory."""
import json
import os
import pathlib
import shlex
import subprocess
import tomllib
import unittest

from program import DYNMO, FreshFolderCase

RUNTIME = pathlib.Path(DYNMO).with_name("dynmo-runtime")
LIBTORCH = ("libtorch", "libc10")
# Sanitizers reserve terabytes of addresses and need memory of their own.
SANITIZED = os.environ.get("DYNMO_SANITIZE", "") != ""
ALL_SAMPLES = not SANITIZED if "DYNMO_SAMPLES" not in os.environ else os.environ["DYNMO_SAMPLES"] != "part"  # as tests/support/samples.h
MAX_BYTES = 25 << 20  # of resident memory; with libtorch it is 119 MB

PROFILE = {"format": "dynmo-profile-1",
           "layers": [{"name": f"layer {i}", "forward_s": 1e-3, "backward_input_s": 1e-3, "backward_weight_s": 1e-3}
                      for i in range(4)]}
SCENARIO = '[model]\nblocks = 4\n[cluster]\npipeline_ranks = 2\n[training]\nsteps = 3\nmicro_batches = 4\n'
# One wrong use of each command, which ends before any work.
WRONG = [["nope"], ["plan", "nope", "--ranks", "2"], ["simulate", "nope"], ["data", "prepare", "nope", "--out", "d"], ["data", "inspect", "nope"],
         ["report", "nope"], ["trace", "import", "nope", "--out", "p.json"], ["train", "--config", "nope"], ["generate", "nope", "--prompt", "a"],
         ["checkpoint", "verify", "nope"]]


class Case(FreshFolderCase):
    def setUp(self):
        super().setUp()
        (self.folder / "profile.json").write_text(json.dumps(PROFILE))
        (self.folder / "s.toml").write_text(SCENARIO)

    def shell(self, command, **options):
        """Runs a line of bash in which $DYNMO is the program."""
        return subprocess.run(["bash", "-c", command], capture_output=True, text=True, timeout=100, check=False, cwd=self.folder,
                              env={**os.environ, "DYNMO": DYNMO, "LC_ALL": "C"}, stdin=subprocess.DEVNULL, **options)

    def commands(self):
        """Of WRONG, those that this build can run."""
        needs_runtime = ("train", "generate", "checkpoint")
        return [words for words in WRONG if words[0] not in needs_runtime or RUNTIME.exists()]


class Start(Case):
    def test_links_nothing_of_libtorch(self):
        linked = subprocess.run(["ldd", DYNMO], capture_output=True, text=True, check=True).stdout
        for name in LIBTORCH:
            self.assertNotIn(name, linked)

    def test_a_running_plan_has_little_loaded(self):
        with subprocess.Popen([DYNMO, "plan", "/dev/stdin", "--ranks", "2", "--json"], stdin=subprocess.PIPE, stdout=subprocess.PIPE,
                              cwd=self.folder) as program:
            # More than a pipe holds: it has started once this is written.
            program.stdin.write(b" " * (1 << 20))
            program.stdin.flush()
            maps = pathlib.Path(f"/proc/{program.pid}/maps").read_text()
            status = pathlib.Path(f"/proc/{program.pid}/status").read_text()
            out, _ = program.communicate(json.dumps(PROFILE).encode(), timeout=100)
        self.assertEqual(program.returncode, 0)
        self.assertEqual(json.loads(out)["format"], "dynmo-plan-1")
        self.assertIn("libstdc++", maps)
        for name in LIBTORCH:
            self.assertNotIn(name, maps)
        peak = next(int(line.split()[1]) << 10 for line in status.splitlines() if line.startswith("VmHWM:"))
        if not SANITIZED:
            self.assertLess(peak, MAX_BYTES)

    def test_help_lists_every_command(self):
        said = self.run_program("--help").stdout
        for command in {words[0] for words in WRONG} - {"nope"}:
            self.assertRegex(said, rf"(?m)^  {command} ")

    def test_a_missing_runtime_is_said(self):
        alone = self.folder / "bin" / "dynmo"
        alone.parent.mkdir()
        alone.write_bytes(pathlib.Path(DYNMO).read_bytes())
        alone.chmod(0o755)
        for words in (["train"], ["generate", "run", "--prompt", "a"], ["checkpoint", "--help"]):
            result = subprocess.run([alone, *words], capture_output=True, text=True, check=False)
            self.assert_error(result, 2, f"dynmo {words[0]} needs dynmo-runtime", str(alone.parent), "libexec/dynmo", "DYNMO_RUNTIME=ON")

    @unittest.skipUnless(RUNTIME.exists(), "this build has no runtime")
    def test_the_runtime_has_the_same_arguments(self):
        self.assertIn("--dry-run", self.run_program("train", "--help").stdout)
        self.assert_error(self.run_program("train", "--stesp", "3"), 2, "'--stesp' is not known here, did you mean '--steps'?")


class Version(Case):
    def test_as_json_is_what_a_report_of_a_defect_needs(self):
        said = self.run_program("--version").stdout
        for words in (("--version", "--json"), ("--json", "--version")):
            result = self.run_program(*words)
            self.assertEqual((result.returncode, result.stderr), (0, ""))
            report = json.loads(result.stdout)
            self.assertEqual(list(report), ["version", "commit", "compiler", "libtorch", "processor", "processors", "system", "kernel"])
            self.assertEqual(f"dynmo {report['version']}" + (f" ({report['commit']})" if report["commit"] else "") + "\n", said)
            self.assertRegex(report["compiler"], r"^(GNU|Clang) \d+\.")
            self.assertRegex(report["libtorch"] or "", r"^\d+\.\d+\.\d+$" if RUNTIME.exists() else "^$")
            self.assertGreaterEqual(report["processors"], 1)
            self.assertIn(os.uname().release, report["kernel"])

    def test_json_without_it_is_refused(self):
        self.assert_error(self.run_program("--json", "plan", "profile.json", "--ranks", "2"), 2, "--json requires --version")
        self.assert_error(self.run_program("--json"), 2)


class Descriptors(Case):
    def test_an_error_that_nobody_can_read_keeps_its_exit_code(self):
        for words in self.commands():
            for stderr in ("2>&-", "2>/dev/full"):
                with self.subTest(words=words, stderr=stderr):
                    result = self.shell(f'"$DYNMO" {shlex.join(words)} {stderr}')
                    self.assertIn(result.returncode, (2, 4), result)

    def test_output_that_cannot_be_written_is_an_error(self):
        for words in ("--help", "--version", "plan --help", "plan profile.json --ranks 2", "simulate s.toml", "simulate s.toml --json"):
            for stdout in (">&-", ">/dev/full"):
                with self.subTest(words=words, stdout=stdout):
                    self.assert_error(self.shell(f'"$DYNMO" {words} {stdout}'), 2, "cannot write to standard output")

    def test_a_file_does_not_take_the_place_of_a_closed_descriptor(self):
        # The trace would be opened as descriptor 1 or 2, and hold the report or the error as well.
        for closed in (">&-", "2>&-", "<&-", "<&- >&- 2>&-"):
            with self.subTest(closed=closed):
                (self.folder / "plan.json").unlink(missing_ok=True)
                self.shell(f'"$DYNMO" plan profile.json --ranks 2 --out plan.json {closed}')
                self.assertEqual(json.loads((self.folder / "plan.json").read_text())["format"], "dynmo-plan-1")

    @unittest.skipUnless(RUNTIME.exists(), "this build has no runtime")
    def test_training_does_without_descriptors(self):
        result = self.shell('"$DYNMO" train --config nope <&- 2>&-')
        self.assertEqual((result.returncode, result.stdout), (2, ""))


class Paths(Case):
    def test_pipes_are_read(self):
        direct = self.succeeded(self.shell('"$DYNMO" plan profile.json --ranks 2 --json'))
        for words in ('plan <(cat profile.json) --ranks 2 --json', 'plan /dev/stdin --ranks 2 --json <profile.json',
                      'plan /dev/stdin --ranks 2 --json < <(cat profile.json)',
                      'plan profile.json --json --cluster <(echo \'{"format": "dynmo-cluster-1", "ranks": [{}, {}]}\')'):
            with self.subTest(words=words):
                result = self.shell(f'"$DYNMO" {words}')
                self.assertEqual((result.returncode, result.stdout, result.stderr), (0, direct.stdout, ""))
        self.succeeded(self.shell('"$DYNMO" simulate <(cat s.toml) --json'))

    def test_standard_output_is_written(self):
        alone = self.shell('"$DYNMO" plan profile.json --ranks 2 --json').stdout
        report = self.shell('"$DYNMO" plan profile.json --ranks 2').stdout
        for command in ('"$DYNMO" plan profile.json --ranks 2 --out /dev/stdout', '"$DYNMO" plan profile.json --ranks 2 --out /dev/fd/1 > f; cat f'):
            with self.subTest(command=command):
                result = self.shell(command)
                self.assertEqual((result.returncode, result.stdout, result.stderr), (0, alone + report, ""))

    def test_names_that_the_system_refuses(self):
        (self.folder / "loop").symlink_to("loop")
        tried = 0
        for path in ("loop", "loop/file", "n" * 300, "no/such/file", ""):
            for words in (["plan", path, "--ranks", 2], ["plan", "profile.json", "--ranks", 2, "--out", path],
                          ["plan", "profile.json", "--ranks", 2, "--trace", path], ["plan", "profile.json", "--cluster", path],
                          ["plan", "profile.json", "--ranks", 2, "--from", path], ["simulate", path], ["simulate", "s.toml", "--trace", path],
                          ["plan", "--model", path, "--device", "h100", "--sequence", 8, "--ranks", 2],
                          ["data", "prepare", path, "--out", "d"], ["data", "inspect", path], ["data", "prepare", "s.toml", "--tokenizer", path, "--out", "d"],
                          ["report", path], ["trace", "import", path, "--out", "p.json"]):
                tried += 1
                if path == "" and ("--trace" in words or "simulate" == words[0]) or (not ALL_SAMPLES and tried % 4 != 0):
                    continue
                with self.subTest(words=words):
                    self.assert_error(self.run_program(*words), 2)

    def test_one_file_has_one_use(self):
        (self.folder / "link.json").symlink_to("profile.json")
        for other in ("profile.json", "./profile.json", "link.json"):
            self.assert_error(self.run_program("plan", "profile.json", "--ranks", 2, "--out", other), 2, "PROFILE and --out are both")
        both = self.run_program("plan", "profile.json", "--ranks", 2, "--out", "/dev/null", "--trace", "/dev/null")
        self.assertEqual((both.returncode, both.stderr), (0, ""))


class Numbers(Case):
    def test_what_is_no_whole_number_is_refused_as_it_was_given(self):
        for text, why in [("99999999999999999999", "'99999999999999999999' is too large a number"), ("", "'' is not a whole number"), ("2.5", "'2.5' is not a whole number"),
                          ("0x10", "'0x10' is not a whole number"), ("2x", "'2x' is not a whole number"), (" 2", "' 2' is not a whole number")]:
            self.assert_error(self.run_program("plan", "profile.json", "--ranks", text), 2, "--ranks: " + why)

    def test_a_flag_given_twice_or_without_its_value_is_named(self):
        self.assert_error(self.run_program("plan", "profile.json", "--ranks", 2, "--ranks", 3), 2, "--ranks is given 2 times, wanted it once")
        self.assert_error(self.run_program("plan", "profile.json", "--ranks"), 2, "--ranks has no value, wanted one")
        self.assert_error(self.run_program("ctl", "run", "pack", "0"), 2, "ranks is '0', wanted 1 to 4096")
        self.assert_error(self.run_program("ctl", "run", "--timeout", "0", "status"), 2, "--timeout is '0', wanted 0.1 to 1000000")

    @unittest.skipUnless(RUNTIME.exists(), "this build has no runtime")
    def test_the_same_of_the_flags_of_keys(self):
        self.assert_error(self.run_program("train", "--train.steps=10", "--train.steps=20"), 2, "--train.steps is given 2 times, wanted it once")
        self.assert_error(self.run_program("train", "--data", "d", "--train.steps"), 2, "--train.steps has no value, wanted one")
        self.assert_error(self.run_program("train", "--resume=maybe"), 2, "--resume is 'maybe', wanted always or auto")

    def test_a_name_that_is_like_none_is_not_guessed(self):
        result = self.run_program("plan", "profile.json", "--gpus", 4)
        self.assert_error(result, 2, "'--gpus' is not known here, known are --help, ")
        self.assertNotIn("did you mean", result.stderr)
        self.assert_error(self.run_program("plan", "profile.json", "--rank=4"), 2, "'--rank' is not known here, did you mean '--ranks'?")

    def test_an_empty_scenario_is_refused(self):
        (self.folder / "empty.toml").write_text("  # nothing\n\n")
        self.assert_error(self.run_program("simulate", "empty.toml"), 2, "empty.toml: is empty, wanted a scenario", "examples/scenarios")

    def test_a_missing_command_names_those_there_are(self):
        self.assert_error(self.run_program(), 2, "'dynmo' wants a command: data, plan, simulate")
        self.assert_error(self.run_program("data"), 2, "'data' wants a command: prepare, inspect")

    def test_a_printed_config_is_read_back_to_itself(self):
        first = self.run_program("config", "--set", "train.steps=7", "--set", "run.tensorboard=true")
        self.assertEqual((first.returncode, first.stderr), (0, ""))
        (self.folder / "c.toml").write_text(first.stdout)
        self.assertEqual(self.run_program("config", "c.toml").stdout, first.stdout)
        defaults = tomllib.loads(self.run_program("config", "--defaults").stdout)
        self.assertEqual(defaults["train"]["steps"], 200)
        changed = tomllib.loads(first.stdout)
        for table, keys in defaults.items():
            self.assertLessEqual(set(keys), set(changed[table]))
        self.assertEqual((changed["train"]["steps"], changed["run"]["tensorboard"]), (7, True))

    def test_a_folder_without_a_report_is_said(self):
        self.assert_error(self.run_program("report", "."), 2, "'.' has no summary.json")


@unittest.skipUnless(RUNTIME.exists(), "this build has no runtime")
class Config(Case):
    MODEL = "[model]\nhidden = 16\nblocks = 2\nheads = 2\nkv_heads = 2\nintermediate = 32\nsequence = 16\n[train]\nsteps = 50\n"

    def setUp(self):
        super().setUp()
        (self.folder / "text.txt").write_text("to be or not to be\n" * 500)
        (self.folder / "c.toml").write_text(self.MODEL)
        self.shell('"$DYNMO" data prepare text.txt --out data')

    def test_a_config_from_a_pipe_reaches_every_rank_and_keys_are_flags(self):
        for config in ("--config <(cat c.toml)", "--config=/dev/stdin < <(cat c.toml)"):
            with self.subTest(config=config):
                self.succeeded(self.shell(f'rm -rf run; "$DYNMO" train -n 2 --data data --out run --train.steps 2 --train.validation_every=0 {config}'))
                written = (self.folder / "run" / "config.toml").read_text()
                for line in ("hidden = 16", "steps = 2", "validation_every = 0", "ranks = 2"):
                    self.assertIn(line + "\n", written)

    def test_wrong_keys_and_values_are_named(self):
        self.assert_error(self.run_program("train", "--train.step", "3"), 2, "'--train.step' is not known here, did you mean '--train.steps'?")
        self.assert_error(self.run_program("train", "--train.steps", "x"), 2, "train.steps is 'x', wanted a whole number")
        self.assert_error(self.run_program("train", "--set", "train.steps=9", "--train.steps", "0"), 2, "train.steps is 0")


@unittest.skipIf(SANITIZED, "sanitizers reserve more addresses than any limit here")
class Memory(Case):
    def test_an_endless_file_is_refused_early(self):
        for words in ("plan /dev/zero --ranks 2", "plan profile.json --cluster /dev/zero", "simulate /dev/zero", "trace import /dev/zero --out p.json",
                      "plan profile.json --ranks 2 --from /dev/zero"):
            with self.subTest(words=words):
                # A trace is read as a stream, which ends at the first byte.
                said = ["/dev/zero: wanted JSON"] if "trace" in words else ["'/dev/zero' has more than", "wanted a smaller file"]
                self.assert_error(self.shell(f'ulimit -v 6000000; "$DYNMO" {words}'), 2, *said)

    def test_too_little_memory_is_said(self):
        with (self.folder / "large.json").open("w") as file:
            file.write('{"format": "dynmo-profile-1", "layers": [' + "[1]," * (8 << 20) + "1]}")
        self.assert_error(self.shell('ulimit -v 400000; "$DYNMO" plan large.json --ranks 2'), 2, "out of memory", "ulimit -v")

    @unittest.skipUnless(RUNTIME.exists(), "this build has no runtime")
    def test_a_runtime_that_could_not_load_is_not_started(self):
        for limit in (200000, 400000, 600000):
            for words in ("train", "generate run --prompt a", "checkpoint verify run"):
                self.assert_error(self.shell(f'ulimit -v {limit}; "$DYNMO" {words}'), 2, "memory is limited", "ulimit -v", "768.0 MiB")

    def test_a_line_that_does_not_fit_is_said(self):
        with (self.folder / "long.txt").open("w") as file:
            for _ in range(64):
                file.write("word " * 200000)
        self.assert_error(self.shell('ulimit -v 200000; "$DYNMO" data prepare long.txt --tokenizer sentencepiece --out d'), 2, "memory (ulimit -v")


if __name__ == "__main__":
    unittest.main()
