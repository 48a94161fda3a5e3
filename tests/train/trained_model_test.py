# SPDX-License-Identifier: Apache-2.0
"""What a run leaves as a model: text from it, weights in and out of Hugging Face, tokenizers."""
import json
import shlex
import shutil
import subprocess

from program import DYNMO
from run_case import TINY, RunCase, digests, losses, newest_manifest, settings


class TrainedModel(RunCase):
    @classmethod
    def setUpClass(cls):
        super().setUpClass()
        cls.run_folder = cls.folder / "run"
        subprocess.run([DYNMO, "train", "--data", str(cls.data), "--out", str(cls.run_folder), *settings(TINY), "-n", "2", "--steps",
                        "30", *settings(["checkpoint.every=15", "optimizer.learning_rate=1e-2"])], check=True, timeout=120,
                       capture_output=True)

    def test_generate_continues_a_prompt(self):
        greedy = self.succeeded(self.run_program("generate", self.run_folder, "--prompt", "line 1", "--tokens", 40))
        self.assertTrue(greedy.stdout.startswith("line 1"))
        self.assertEqual(greedy.stdout, self.run_program("generate", self.run_folder, "--prompt", "line 1", "--tokens", 40).stdout)
        # As bytes: what is drawn need not be text.
        drawn = [subprocess.run([DYNMO, "generate", str(self.run_folder), "--prompt", "line", "--temperature", "1", "--seed",
                                 str(seed)], capture_output=True, timeout=120) for seed in (1, 1, 2)]
        self.assertEqual(drawn[0].stdout, drawn[1].stdout)
        self.assertNotEqual(drawn[0].stdout, drawn[2].stdout)

    def test_generate_with_wrong_input(self):
        self.assert_error(self.run_program("generate", self.run_folder, "--prompt", ""), 2, "prompt")
        self.assert_error(self.run_program("generate", self.run_folder, "--prompt", "a", "--temperature", 1, "--top-p", 2), 2, "top-p of 2")
        self.assert_error(self.run_program("generate", self.folder / "none", "--prompt", "a"), 4, "no usable checkpoint",
                          f"'{self.folder}/none' does not exist")
        scores = self.folder / "scores"
        self.assert_error(self.run_program("generate", self.run_folder, "--prompt", "a", "--scores", scores), 2, "--prompt-tokens")

    def test_inspect_and_verify(self):
        inspected = self.run_program("checkpoint", "inspect", self.run_folder)
        self.assertIn("model.layers.2.mlp.down_proj.weight", inspected.stdout)
        verified = self.run_program("checkpoint", "verify", self.run_folder)
        self.assertIn("step 30, 8 files", verified.stdout)
        copy = self.folder / "damaged"
        shutil.copytree(self.run_folder / "checkpoints" / "step-00000030", copy)
        layer = copy / "layer-0003.safetensors"
        layer.write_bytes(layer.read_bytes()[:-1] + b"x")
        self.assert_error(self.run_program("checkpoint", "verify", copy), 4, "layer-0003")
        self.assert_error(self.run_program("generate", copy, "--prompt", "a"), 4, "layer-0003")

    def test_export_writes_what_transformers_reads(self):
        out = self.folder / "hugging-face"
        self.succeeded(self.run_program("checkpoint", "export-hf", self.run_folder, "--out", out))
        config = json.loads((out / "config.json").read_text())
        self.assertEqual((config["model_type"], config["num_hidden_layers"], config["vocab_size"]), ("llama", 3, 257))
        data = (out / "model.safetensors").read_bytes()
        header = json.loads(data[8:8 + int.from_bytes(data[:8], "little")])
        names = set(header) - {"__metadata__"}
        self.assertEqual(len(names), 1 + 3 * 9 + 2)
        self.assertEqual(header["lm_head.weight"]["shape"], [257, 32])
        self.assertFalse(any(name.startswith("optimizer") for name in names))
        words = ["checkpoint", "export-hf", self.run_folder, "--out", out]
        self.assert_error(self.run_program(*words), 2, "config.json, model.safetensors", "--overwrite")
        shards = self.succeeded(self.run_program(*words, "--overwrite", "--dtype", "bf16", "--shard-size", "20kB"))
        self.assertIn("model-00002-of-", shards.stdout)
        self.assertFalse((out / "model.safetensors").exists())
        self.assertEqual(json.loads((out / "generation_config.json").read_text()), {"eos_token_id": 256})
        self.succeeded(self.run_program("generate", out, "--prompt", "line", "--tokens", 4))


class Families(RunCase):
    """Every family by the command line: train, hand to transformers and take back, start from weights."""

    FAMILIES = {"llama": ["model.tied_embeddings=true"], "gpt2": ["model.family=gpt2", "model.positions=24"],
                "mixtral": ["model.tied_embeddings=true", "moe.enabled=true", "moe.experts=4"]}

    @classmethod
    def setUpClass(cls):
        super().setUpClass()
        for family, extra in cls.FAMILIES.items():
            subprocess.run([DYNMO, "train", "--data", str(cls.data), "--out", str(cls.folder / family), *settings([*TINY, *extra]),
                            "-n", "2", "--steps", "20", *settings(["checkpoint.every=20", "optimizer.learning_rate=1e-2"])],
                           check=True, timeout=240, capture_output=True)

    def start(self, family, init, run, *extra):
        return self.command("-n", "2", "--steps", "4", run=run,
                            extra=[*self.FAMILIES[family], f"train.init={init}", *extra])

    def test_exported_and_imported_weights_start_the_same_run(self):
        for family in self.FAMILIES:
            exported, imported = self.folder / f"{family}-hf", self.folder / f"{family}'s import of $1"
            for words in (["export-hf", self.folder / family, "--out", exported], ["import-hf", exported, imported]):
                done = self.succeed([DYNMO, "checkpoint", *map(str, words)])
            command = shlex.split(done.stdout.splitlines()[0].split("train on with: ")[1])
            self.assertEqual(command[:6], ["dynmo", "train", "--config", str(imported / "config.toml"), "--set", f"train.init={imported}"])
            self.assertEqual(json.loads((exported / "config.json").read_text())["model_type"], family)
            self.succeed([DYNMO, "plan", "--model", str(exported), "--device", "cpu", "--sequence", "16", "--ranks", "2"])
            data = (exported / "model.safetensors").read_bytes()
            self.assertNotIn(b"lm_head.weight", data[:8 + int.from_bytes(data[:8], "little")])
            found = {}
            for source in (family, exported.name, imported.name):
                done = self.succeed(self.start(family, self.folder / source, f"from-{source}"))
                self.assertIn("weights  of", done.stdout)
                found[source] = losses(self.folder / f"from-{source}")
            self.assertEqual(found[family], found[exported.name])
            self.assertEqual(found[family], found[imported.name])
            # It goes on from what was learned.
            self.assertLess(found[family][0], losses(self.folder / family)[0] - 0.5)
            words = ["--prompt", "line 1", "--tokens", "8"]  # not beyond the shortest of their longest inputs
            texts = {self.run_command([DYNMO, "generate", str(self.folder / source), *words]).stdout
                     for source in (family, exported.name, imported.name)}
            self.assertEqual(len(texts), 1, texts)
            self.assert_error(self.run_command(self.command("-n", "2", "--resume", run=imported.name)), 2, "train.init")
            self.assert_error(self.run_command([DYNMO, "checkpoint", "import-hf", str(exported), str(imported)]), 2,
                              "has checkpoints already")

    def test_weights_of_another_decoder(self):
        gpt2 = self.folder / "gpt2"
        self.assert_error(self.run_command(self.start("gpt2", gpt2, "wrong", "model.hidden=64")), 2, "train.init", "model.hidden")
        self.assert_error(self.run_command(self.start("llama", gpt2, "wrong")), 2, "train.init", "model.family = gpt2")
        mixtral = self.folder / "mixtral"
        self.assert_error(self.run_command(self.start("llama", mixtral, "wrong")), 2, "train.init", "set moe.enabled=true")
        self.assert_error(self.run_command(self.start("mixtral", mixtral, "wrong", "moe.experts=5")), 2, "train.init", "set moe.experts=4")
        self.assert_error(self.run_command(self.start("mixtral", mixtral, "wrong", "moe.top_k=3")), 2, "train.init", "set moe.top_k=2")
        self.assert_error(self.run_command(self.start("gpt2", self.folder / "nowhere", "wrong")), 4, "train.init",
                          f"'{self.folder}/nowhere' does not exist", "Hugging Face")
        self.assert_error(self.run_command(self.start("gpt2", self.data, "wrong")), 4, "train.init",
                          f"'{self.data}' has neither checkpoints nor manifest.json")

    def test_a_family_that_does_not_exist(self):
        self.assert_error(self.run_command(self.command("--set", "model.family=gpt-2")), 2, "model.family", "gpt2")
        self.assert_error(self.run_command(self.command("--set", "model.familly=gpt2")), 2, "model.family")

    def test_freezing_with_tied_embeddings(self):
        frozen = self.command("--set", "model.family=gpt2", "--set", "freezing.enabled=true")
        self.assert_error(self.run_command(frozen), 2, "tied_embeddings")
        # Nor with a rule that would freeze nothing, one that is not known, or with keys of another one.
        enabled = ("train.steps=60", "freezing.enabled=true")
        for setting, wanted in (("freezing.rule=norm", "freezing.check_every is 300"), ("freezing.rule=nrom", "did you mean 'norm'"),
                                ("freezing.rule=plasticity", "4 more are needed"), ("freezing.rule=random", "wanted schedule, norm or plasticity"),
                                ("freezing.patience=4", "freezing.rule = schedule, which does not use it")):
            result = self.run_command(self.command(extra=(*enabled, setting)))
            self.assert_error(result, 2, wanted)

    def test_tokens_in_and_out(self):
        run = str(self.folder / "gpt2")
        done = self.succeed([DYNMO, "generate", run, "--prompt-tokens", "108,105", "--tokens", "5"])
        self.assertEqual(len(done.stdout.split()), 5)
        self.assert_error(self.run_command([DYNMO, "generate", run]), 2, "--prompt-tokens")
        self.assert_error(self.run_command([DYNMO, "generate", run, "--prompt-tokens", "999"]), 2, "999")
        self.assert_error(self.run_command([DYNMO, "generate", run, "--prompt-tokens", ""]), 2, "--prompt-tokens")
        self.assert_error(self.run_command([DYNMO, "generate", run, "--prompt", "a", "--seed", "-1"]), 2, "--seed")
        for tokens, number in (("3,,4", 1), ("3,", 1), (",3", 0), ("0x10", 0), ("3,1e2", 1), ("3 4", 0), ("3, 4", 1),
                               ("7,12345678901234567890", 1), ("9" * 30, 0), ("-1", 0), ("3,4x", 1)):
            self.assert_error(self.run_command([DYNMO, "generate", run, f"--prompt-tokens={tokens}"]), 2, "--prompt-tokens",
                              f"token {number} is '")
        self.assert_error(self.run_command([DYNMO, "generate", run, "--prompt-tokens", "3,257"]), 2, "token 257", "0 to 256")

    def test_a_text_beyond_the_longest_input_is_said(self):
        run = str(self.folder / "gpt2")  # reads 16 tokens
        whole = self.run_command([DYNMO, "generate", run, "--prompt-tokens", "108,105", "--tokens", "15"])
        self.assertEqual((whole.returncode, whole.stderr), (0, ""))
        beyond = self.run_command([DYNMO, "generate", run, "--prompt-tokens", "108,105", "--tokens", "40"])
        self.assertEqual((beyond.returncode, len(beyond.stdout.split())), (0, 40))
        self.assertEqual(beyond.stderr.count("\n"), 1)
        self.assertIn("at most 16 tokens; the prompt has 2", beyond.stderr)
        self.assertEqual(beyond.stdout.split()[:15], whole.stdout.split())
        scores = self.folder / "scores.safetensors"
        refused = self.run_command([DYNMO, "generate", run, "--prompt-tokens", "108,105", "--tokens", "15", "--scores", str(scores)])
        self.assert_error(refused, 2, "--scores", "2 + 15", "16")
        self.assertEqual(refused.stdout, "")
        self.assertFalse(scores.exists())


class SlicedHead(RunCase):
    """A head in slices by the command line."""
    EXTRA = ("checkpoint.every=10", "optimizer.learning_rate=1e-2")

    def train(self, run, slices, ranks, steps, *words, extra=()):
        extra = (*self.EXTRA, f"model.head_slices={slices}", *extra)
        return self.succeed(self.command("-n", str(ranks), "--steps", str(steps), *words, run=run, extra=extra)).stdout

    def test_trains_exports_and_goes_on_in_other_slices(self):
        self.train("one-rank", 2, 1, 20)
        self.assertIn("head.1 of 2", self.train("sliced", 2, 3, 20))
        self.assertEqual(digests(newest_manifest(self.folder / "sliced")), digests(newest_manifest(self.folder / "one-rank")))
        self.train("whole", 1, 2, 20)
        sliced, whole = losses(self.folder / "sliced"), losses(self.folder / "whole")
        self.assertAlmostEqual(sliced[0], whole[0], delta=1e-5)  # one start
        self.assertAlmostEqual(sliced[19], whole[19], delta=1e-2)
        for slices in (1, 2):  # of the checkpoint in two and of that in one
            output = self.train("sliced", slices, 2, 20 + 10 * slices, "--resume")
            self.assertIn("the numbers may differ", output)
            self.assertIn('"head_slices":2', output)
        exported = self.folder / "hf"
        self.succeed([DYNMO, "checkpoint", "export-hf", str(self.folder / "one-rank"), "--out", str(exported)])
        data = (exported / "model.safetensors").read_bytes()
        header = json.loads(data[8:8 + int.from_bytes(data[:8], "little")])
        self.assertEqual(header["lm_head.weight"]["shape"], [257, 32])
        words = ["--prompt", "line 1", "--tokens", "8"]
        texts = {self.run_command([DYNMO, "generate", str(self.folder / source), *words]).stdout for source in ("one-rank", "hf")}
        self.assertEqual(len(texts), 1, texts)
        for source in ("one-rank", "hf", "whole"):
            self.train(f"from-{source}", 2, 2, 4, extra=(f"train.init={self.folder / source}",))
        self.assertEqual(losses(self.folder / "from-one-rank"), losses(self.folder / "from-hf"))
        self.assertLess(losses(self.folder / "from-whole")[0], whole[0] - 0.5)

    def test_its_profile_and_load_trace_are_read_back(self):
        self.train("recorded", 8, 2, 12, extra=("model.vocabulary=1100", "run.load_trace=1", "balance.enabled=false"))
        profile, trace = self.folder / "recorded" / "profile.json", self.folder / "recorded" / "load-trace.jsonl"
        header = json.loads(trace.read_text().splitlines()[0])
        names = [f"head.{slice} of 8" for slice in range(8)]
        for layers in (json.loads(profile.read_text())["layers"], header["layers"]):
            self.assertEqual([layer["name"] for layer in layers[-8:]], names)
        planned = self.succeed([DYNMO, "plan", str(profile), "--ranks", "4", "--json"])
        self.assertEqual(sum(stage["layers"] for stage in json.loads(planned.stdout)["stages"]), 1 + 2 * 3 + 8)
        # What one slice passes to the next is 2 floats a token wider than what blocks do.
        self.assertEqual([layer["boundary_bytes"] for layer in header["layers"][-9:-1]], [2 * 16 * 32 * 4, *7 * [2 * 16 * 34 * 4]])
        for key, file in (("profile", profile), ("trace", trace)):
            extra = ("run.device=emulated", f"emulated.{key}={file}", "run.load_trace=1")
            self.succeed(self.command("-n", "3", "--steps", "12", run=f"emulated-{key}", extra=extra))
            again = json.loads((self.folder / f"emulated-{key}" / "load-trace.jsonl").read_text().splitlines()[0])["layers"]
            for field in ("name", "parameter_bytes"):
                self.assertEqual([layer[field] for layer in again], [layer[field] for layer in header["layers"]], (key, field))
            passed = [[layer["boundary_bytes"] for layer in layers[:-1]] for layers in (again, header["layers"])]
            self.assertEqual(*passed, key)
            scenario = self.folder / f"{key}.toml"
            given = f'[dynamism]\ntrace = "{file}"' if key == "trace" else f'[model]\nprofile = "{file}"'
            scenario.write_text(f"{given}\n[cluster]\npipeline_ranks = 2\n[training]\nsteps = 12\nmicro_batches = 4\n")
            simulated = self.succeed([DYNMO, "simulate", str(scenario), "--compare", "optimal,search", "--json"])
            self.assertEqual([run["name"] for run in json.loads(simulated.stdout)["runs"]], ["dense", "uniform", "optimal", "search"])

    def test_wrong_numbers_of_slices(self):
        for extra, wanted in ((("model.head_slices=3",), "model.head_slices is 3, wanted 1 to 2: slices of at least 128 of the 257 words"),
                              (("model.head_slices=0",), "model.head_slices is 0, wanted 1 to")):
            self.assert_error(self.run_command(self.command("-n", "2", run="wrong", extra=extra)), 2, wanted)


class SmallFolder(RunCase):
    """The steps of README on little text: what is held out is said, and a run without it trains."""

    def prepare(self, texts, sizes):
        folder = self.folder / f"in-{texts}"
        folder.mkdir()
        for number in range(texts):
            (folder / f"{number}.md").write_text(f"# text {number}\n" + "some words\n" * sizes)
        made = self.succeeded(self.run_program("data", "prepare", folder, "--out", f"out-{texts}"))
        return made.stdout, self.run_program("train", "--data", f"out-{texts}", "--out", f"run-{texts}", "--steps", "2",
                                       *settings([*TINY, "train.validation_every=1"]))

    def test_of_many_texts_some_are_held_out(self):
        said, done = self.prepare(31, 20)
        self.assertRegex(said, r"validation +[1-9]\d* documents +[1-9]\d* tokens")
        self.assertRegex(said, r"held out +(one document, \d+\.md|\d of 31 documents)")
        self.assertIn("validation loss", self.succeeded(done).stdout)

    def test_of_one_text_the_end_is_held_out(self):
        said, done = self.prepare(1, 200)
        self.assertIn("held out    the end of 0.md, 2 % of it", said)
        self.assertIn("validation loss", self.succeeded(done).stdout)

    def test_where_too_little_is_held_out_a_run_trains_without_validation(self):
        said, done = self.prepare(2, 10)
        self.assertIn("held out    the end of", said)
        self.assertIn("no validation: 'out-2' holds out", self.succeeded(done).stdout)
        self.assertNotIn("validation loss", done.stdout)


class SentencePiece(RunCase):
    """A model whose tokens are pieces of words, and shards that say nothing of themselves."""

    TRAIN = ["--steps", "25", "-n", "2", *settings(TINY), *settings(["checkpoint.every=25", "optimizer.learning_rate=1e-2"])]

    def test_a_model_continues_text_and_validates(self):
        words = ["data", "prepare", self.folder / "corpus", "--out", "pieces", "--validation", "0.2", "--tokenizer", "sentencepiece"]
        self.succeeded(self.run_program(*words, "--vocab", 290))
        done = self.succeeded(self.run_program("train", "--data", "pieces", "--out", "run", *self.TRAIN, "--set", "train.validation_every=25"))
        self.assertIn("validation loss", done.stdout)
        prompt = "line 3 of été 🎉"
        spoken = [self.run_program("generate", "run", "--prompt", prompt, "--tokens", 30, *more)
                  for more in ([], ["--tokenizer", "pieces/tokenizer.model"], ["--temperature", 3, "--seed", 4])]
        for result in map(self.succeeded, spoken):
            self.assertTrue(result.stdout.startswith(prompt), result.stdout)  # decoded as UTF-8 by this test
            self.assertGreater(len(result.stdout), len(prompt) + 10)
        self.assertEqual(spoken[0].stdout, spoken[1].stdout)
        words[words.index("pieces")] = "larger"
        self.succeeded(self.run_program(*words, "--vocab", 294))
        self.assert_error(self.run_program("generate", "run", "--prompt", "a", "--tokenizer", "larger"), 2, "vocabulary of 294", "290")
        (self.folder / "pieces").rename(self.folder / "moved")
        self.assert_error(self.run_program("generate", "run", "--prompt", "a"), 2, "--tokenizer")
        again = self.run_program("generate", "run", "--prompt", prompt, "--tokens", 30, "--tokenizer", "moved")
        self.assertEqual(again.stdout, spoken[0].stdout)

    def test_a_tokenizer_json_goes_with_its_model(self):
        printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
        others = [byte for byte in range(256) if byte not in printable]
        tokens = {chr(byte if byte in printable else 0x100 + others.index(byte)): byte for byte in range(256)}
        tokens.update({"li": 256, "ne": 257, "line": 258})
        whole = {"model": {"type": "BPE", "vocab": tokens, "merges": ["l i", "n e", "li ne"]},
                 "pre_tokenizer": {"type": "ByteLevel", "add_prefix_space": False},
                 "added_tokens": [{"id": 259, "content": "<|endoftext|>", "special": True}]}
        path = self.folder / "theirs.json"
        path.write_text(json.dumps(whole))
        self.succeeded(self.run_program("data", "prepare", self.folder / "corpus", "--out", "json-pieces", "--validation", "0.2", "--tokenizer", path))
        done = self.succeeded(self.run_program("train", "--data", "json-pieces", "--out", "json-run", *self.TRAIN, "--set", "train.validation_every=25"))
        self.assertIn("validation loss", done.stdout)
        exported = self.run_program("checkpoint", "export-hf", "json-run", "--out", "json-exported")
        self.assertIn("tokenizer.json, tokenizer_config.json", exported.stdout, exported.stderr)
        self.assertEqual((self.folder / "json-exported/tokenizer.json").read_bytes(), path.read_bytes())
        spoken = [self.run_program("generate", model, "--prompt", "line 3 of été", "--tokens", 20) for model in ("json-run", "json-exported")]
        for result in map(self.succeeded, spoken):
            self.assertTrue(result.stdout.startswith("line 3 of été"), result.stdout)
        self.assertEqual(spoken[0].stdout, spoken[1].stdout)

    def test_shards_without_description_train_to_the_same_numbers(self):
        self.succeeded(self.run_program("train", "--data", self.data, "--out", "described", *self.TRAIN))
        bare = self.folder / "bare"
        bare.mkdir()
        for ending in (".bin", ".idx"):
            shutil.copy(self.data / f"train{ending}", bare / f"part{ending}")
        for number, path in enumerate((bare, bare / "part")):
            self.succeeded(self.run_program("train", "--data", path, "--out", f"bare-{number}", *self.TRAIN, "--set", "data.vocabulary=257"))
            self.assertEqual(losses(self.folder / f"bare-{number}"), losses(self.folder / "described"))
        train = ["train", "--data", bare / "part", "--out", "x", *self.TRAIN]
        self.assert_error(self.run_program(*train), 2, "data.vocabulary is not set")
        validated = [*train, "--set", "data.vocabulary=257", "--set", "train.validation_every=25"]
        self.assert_error(self.run_program(*validated), 2, "data.validation_path is not set")
        done = self.run_program(*validated, "--set", f"data.validation_path={self.data}/validation")
        self.assertIn("validation loss", done.stdout, done.stderr)
        self.assert_error(self.run_program("train", "--data", self.data, "--out", "x", *self.TRAIN, "--set", "data.vocabulary=9"), 2,
                          "data.vocabulary is 9", "257")
