# SPDX-License-Identifier: Apache-2.0
"""The program of the same build, for answers to compare with, and inputs."""
import json
import os
import pathlib
import subprocess
import tempfile
import unittest

ROOT = pathlib.Path(__file__).resolve().parents[2]
LLAMA = {
    "model_type": "llama", "hidden_size": 1024, "num_hidden_layers": 8, "num_attention_heads": 16, "num_key_value_heads": 8,
    "intermediate_size": 2816, "vocab_size": 32000, "max_position_embeddings": 4096, "tie_word_embeddings": False,
}
COLUMNS = ("forward_s", "backward_input_s", "backward_weight_s")


def profile(times, state=1 << 20, stash=1 << 16):
    layers = [{"name": f"block{i}", **{key: t for key in COLUMNS}, "parameter_bytes": state, "activation_bytes": stash,
               "boundary_bytes": 4096} for i, t in enumerate(times)]
    return {"format": "dynmo-profile-1", "layers": layers}


UNEVEN = profile([1e-3, 1e-3, 1e-3, 1e-3, 1e-3, 2e-3, 3e-3, 4e-3])


class Case(unittest.TestCase):
    def setUp(self):
        folder = tempfile.TemporaryDirectory()
        self.addCleanup(folder.cleanup)
        self.folder = pathlib.Path(folder.name)

    def write(self, name, document):
        path = self.folder / name
        path.write_text(document if isinstance(document, str) else json.dumps(document))
        return path

    def program(self, *words):
        """What the program prints, which must succeed. A wheel is tried without one."""
        if "DYNMO" not in os.environ:
            self.skipTest("no program of the same build (DYNMO)")
        command = [os.environ["DYNMO"], *map(str, words)]
        done = subprocess.run(command, capture_output=True, text=True, timeout=100, cwd=self.folder, check=False)
        self.assertEqual(done.returncode, 0, done.stdout + done.stderr)
        return done.stdout

    def assert_refused(self, kind, text, call, *arguments, **options):
        """One line that has `text`, of exactly this class."""
        with self.assertRaises(kind) as caught:
            call(*arguments, **options)
        self.assertIs(type(caught.exception), kind)
        self.assertIn(text, str(caught.exception))
        self.assertNotIn("\n", str(caught.exception))
