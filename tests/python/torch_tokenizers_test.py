# SPDX-License-Identifier: Apache-2.0
"""Ids of a tokenizer.json equal those of the `tokenizers` wheel, which comes with transformers: tests/peers/tokenizer_check.py in small."""
import os
import pathlib
import sys
import tempfile
import unittest

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[1] / "peers"))
import tokenizer_check  # noqa: E402


class Tokenizers(unittest.TestCase):
    def test_ids_and_texts_are_those_of_the_wheel(self):
        with tempfile.TemporaryDirectory() as folder:
            ratios = tokenizer_check.Check(os.environ["DYNMO"], pathlib.Path(folder)).check(600_000, seed=2)
        self.assertEqual(sorted(ratios), ["gpt2", "llama3", "qwen2"])


if __name__ == "__main__":
    unittest.main()
