# SPDX-License-Identifier: Apache-2.0
"""`dynmo trace import` as users meet it. Usage: trace_command_test.py PATH_OF_DYNMO"""
import gzip
import json
import os
import pathlib
import re
import subprocess
import sys
import tempfile
import unittest

DYNMO = sys.argv.pop(1)
DATA = pathlib.Path(__file__).parent / "data"
TRACE = DATA / "pytorch_trace.json"
RANKS = [DATA / "pipeline" / f"interleaved.{rank}.json" for rank in range(2)]
SHAPE = {"model_type": "llama", "architectures": ["LlamaForCausalLM"], "hidden_size": 256, "intermediate_size": 512, "num_hidden_layers": 6,
         "num_attention_heads": 4, "num_key_value_heads": 4, "vocab_size": 4096, "max_position_embeddings": 512}


class TraceImport(unittest.TestCase):
    def setUp(self):
        folder = tempfile.TemporaryDirectory()
        self.addCleanup(folder.cleanup)
        self.out = pathlib.Path(folder.name) / "profile.json"

    def run_import(self, *arguments):
        return subprocess.run([DYNMO, "trace", "import", *map(str, arguments)], capture_output=True, text=True, timeout=60)

    def test_writes_a_profile(self):
        done = self.run_import(TRACE, "--out", self.out, "--boundary-bytes", 4096)
        self.assertEqual((done.returncode, done.stderr), (0, ""))
        self.assertIn("medians of 3 micro-batches, of the CPU's operations", done.stdout)
        profile = json.loads(self.out.read_text())
        self.assertEqual(profile["format"], "dynmo-profile-1")
        self.assertEqual([layer["name"] for layer in profile["layers"]], ["embedding", "block0.mlp", "block1.mlp", "head"])
        self.assertEqual([layer["boundary_bytes"] for layer in profile["layers"]], [4096, 4096, 4096, 0])

    def layers(self):
        return {layer["name"]: layer for layer in json.loads(self.out.read_text())["layers"]}

    def test_reads_the_ranks_of_a_pipeline(self):
        done = self.run_import(*RANKS, "--out", self.out)
        self.assertEqual((done.returncode, done.stderr), (0, ""))
        self.assertIn("each stage is one layer", done.stdout)
        stages = self.layers()
        self.assertEqual(list(stages), [f"stages.{stage}" for stage in range(4)])
        # The same by the formulas of a model: sums stay, and bytes come along.
        config = self.out.with_name("config.json")
        config.write_text(json.dumps(SHAPE))
        done = self.run_import(RANKS[1], "--blocks", "1,2,2,1", RANKS[0], "--out", self.out, "--model", config, "--device", "h100", "--sequence", 128)
        self.assertEqual((done.returncode, done.stderr), (0, ""))
        self.assertIn(f"times of 4 stages are shared out over 1, 2, 2, 1 blocks, by the formulas for {config}", done.stdout)
        shared = self.layers()
        for key in ("forward_s", "backward_input_s", "backward_weight_s"):
            sums = [sum(shared[name][key] for name in names) for names in (
                ("embedding", "blocks.0.attention", "blocks.0.mlp"), [f"blocks.{i}.{part}" for i in (1, 2) for part in ("attention", "mlp")],
                [f"blocks.{i}.{part}" for i in (3, 4) for part in ("attention", "mlp")], ("blocks.5.attention", "blocks.5.mlp", "head"))]
            for stage, total in enumerate(sums):
                self.assertAlmostEqual(total, stages[f"stages.{stage}"][key], delta=1e-12)
        self.assertEqual(shared["blocks.0.mlp"]["boundary_bytes"], 128 * 256 * 2)
        planned = subprocess.run([DYNMO, "plan", self.out, "--ranks", "2", "--emit", "torchtitan", "--emit-to", self.out.parent], capture_output=True, text=True, timeout=60)
        self.assertEqual((planned.returncode, planned.stderr), (0, ""))
        parts = json.loads(self.out.with_name("torchtitan.json").read_text())["parallelism"]["module_fqns_per_model_part"]
        self.assertEqual([name for part in parts for name in part if name.startswith("layers.")], [f"layers.{i}" for i in range(6)])

    def test_compressed_traces_give_the_profile_of_plain_ones(self):
        self.run_import(*RANKS, "--out", self.out)
        plain = self.out.read_bytes()
        packed = [self.out.with_name(f"{rank.name}.gz") for rank in RANKS]
        for rank, path in zip(RANKS, packed):
            path.write_bytes(gzip.compress(rank.read_bytes()))
        done = self.run_import(*packed, "--out", self.out)
        self.assertEqual((done.returncode, done.stderr), (0, ""))
        self.assertEqual(self.out.read_bytes(), plain)
        self.out.unlink()
        whole = packed[1].read_bytes()
        wrong = whole[:len(whole) // 2] + bytes([whole[len(whole) // 2] ^ 0x55]) + whole[len(whole) // 2 + 1:]
        for damaged, said in ((whole[:-9], "it ends early"), (wrong, ""), (whole[:-8] + bytes(8), "incorrect data check")):
            packed[1].write_bytes(damaged)
            done = self.run_import(*packed, "--out", self.out)
            self.assertEqual((done.returncode, done.stdout), (2, ""))
            self.assertRegex(done.stderr, rf"\Adynmo: error: '{re.escape(str(packed[1]))}', compressed by gzip, is damaged behind \d+ bytes "
                             rf"of its text: .*{said}; wanted a whole file: copy it again\n\Z")
            self.assertFalse(self.out.exists())

    def test_an_endless_value_of_a_compressed_trace_is_refused(self):
        packed = self.out.with_name("t.json.gz")
        packed.write_bytes(gzip.compress(b'["' + b"x" * (17 << 20) + b'"]', 1))
        done = self.run_import(packed, "--out", self.out)
        self.assertEqual((done.returncode, done.stderr), (2, f"dynmo: error: {packed}: a value has more than 16.0 MiB, wanted a trace\n"))

    def test_memory_does_not_hold_a_large_trace(self):
        """Many steps of the same ranks: the same medians, in less memory than the files have bytes. Sanitizers keep what is freed."""
        self.run_import(*RANKS, "--out", self.out)
        once = self.layers()
        paths, repeats = [], 1200
        for rank in RANKS:
            events = json.loads(rank.read_text())["traceEvents"]
            texts = [json.dumps(event | {"ts": "@", "args": event.get("args", {}) | {"of": "x" * 60}}).split('"@"') for event in events]
            path = self.out.with_name(rank.name)
            paths.append(path)
            with path.open("w") as file:
                for step in range(repeats):
                    file.write(",\n".join(f"{head}{event['ts'] + step * 2**20}{tail}" for (head, tail), event in zip(texts, events)).join(
                        ("[" if step == 0 else ",", "]" if step == repeats - 1 else "\n")))
        bytes_of_text = paths[0].stat().st_size
        packed = paths[1].with_name(f"{paths[1].name}.gz")  # one of the two is compressed
        packed.write_bytes(gzip.compress(paths[1].read_bytes(), 1))
        command = [DYNMO, "trace", "import", str(paths[0]), str(packed), "--out", str(self.out)]
        measured = "import resource, subprocess, sys; subprocess.run(sys.argv[1:], check=True); print(resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss)"
        done = subprocess.run([sys.executable, "-c", measured, *command], capture_output=True, text=True, timeout=100)
        self.assertEqual((done.returncode, done.stderr), (0, ""))
        self.assertIn(f"medians of {3 * repeats} micro-batches", done.stdout)
        for name, layer in self.layers().items():
            for key in ("forward_s", "backward_input_s", "backward_weight_s"):
                self.assertAlmostEqual(layer[key], once[name][key], delta=1e-9)
        if not os.environ.get("DYNMO_SANITIZE"):
            self.assertLess(int(done.stdout.split()[-1]) * 1024, bytes_of_text)

    def test_bad_input_is_one_line_and_leaves_no_file(self):
        for arguments, said in [
            ((self.out.with_name("no.json"), "--out", self.out), "no.json': No such file or directory"),
            ((self.out.parent, "--out", self.out), "': Is a directory"),
            ((__file__, "--out", self.out), "wanted JSON"),
            ((TRACE, "--out", self.out, "--boundary-bytes", -1), "--boundary-bytes is -1"),
            ((TRACE,), "--out is required"),
            ((RANKS[1], "--out", self.out), "no trace has stage 0, wanted the traces of all ranks"),
            ((*RANKS, RANKS[0], "--out", self.out), "TRACE and TRACE are both"),
            ((*RANKS, "--out", self.out, "--blocks", "1,1"), "--blocks is 1,1, wanted one number for each of the 4 stages"),
            ((*RANKS, "--out", self.out, "--blocks", "1,x"), "x"),
            ((TRACE, "--out", self.out, "--blocks", "1,1"), "wanted no --blocks"),
            ((*RANKS, "--out", self.out, "--model", "c.json"), "--model wants --device, such as h100, and --sequence, such as 4096"),
            ((*RANKS, "--out", self.out, "--sequence", 128), "--sequence does nothing here: wanted --model"),
            ((*RANKS, TRACE, "--out", self.out), "wanted the same in all traces"),
            ((TRACE, "--out", self.out, "--boundary-byte", 1), "did you mean '--boundary-bytes'?"),
        ]:
            done = self.run_import(*arguments)
            self.assertEqual((done.returncode, done.stdout), (2, ""), arguments)
            self.assertEqual(done.stderr.count("\n"), 1, done.stderr)
            self.assertIn(said, done.stderr)
            self.assertFalse(self.out.exists())


unittest.main()
