# SPDX-License-Identifier: Apache-2.0
"""`dynmo data` as a user meets it: what it prints, its exit codes, what a killed run leaves."""
import gzip
import json
import random
import signal
import subprocess
import time
import unittest

from program import DYNMO, FreshFolderCase


class Case(FreshFolderCase):
    def write(self, name, content):
        path = self.folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(content if isinstance(content, bytes) else content.encode())
        return path

    def corpus(self):
        draw = random.Random(1)
        words = ["".join(draw.choices("abcdefgé", k=draw.randint(1, 7))) for _ in range(300)]
        for i in range(30):
            self.write(f"text/{i}.txt", "\n".join(" ".join(draw.choices(words, k=10)) for _ in range(20)))
        return self.folder / "text"

    def dynmo(self, *words):
        return self.run_program("data", *words)

    def prepare(self, *words):
        return self.dynmo("prepare", *words, "--out", "out")

    def assert_refused(self, result, *words):
        self.assert_error(result, 2, *words)


class Prepare(Case):
    def test_says_what_it_made_and_nothing_on_standard_error(self):
        for words, vocabulary in ([], 257), (["--tokenizer", "sentencepiece", "--vocab", "400"], 400):
            result = self.succeeded(self.prepare(self.corpus(), *words, "--overwrite"))
            self.assertEqual(result.stderr, "")
            self.assertIn(f"vocabulary {vocabulary}", result.stdout)

    def test_wrong_input_is_one_line(self):
        text = self.corpus()
        trained = ["--tokenizer", "sentencepiece", "--vocab"]
        self.assert_refused(self.prepare(text, *trained, 60000), "--vocabulary is 60000", "at most")
        self.assert_refused(self.prepare(text, *trained, 100), "--vocabulary is 100", "260")
        self.assert_refused(self.prepare(text, "--tokenizer", "none.model"), "none.model")
        self.assert_refused(self.prepare(text, "--tokenizer", text / "1.txt"), "not a SentencePiece model")
        self.assert_refused(self.prepare(text, "--tokenizer", self.write("tokenizer.json", "{}")), "is JSON without a /model", "tokenizer.json")
        self.assert_refused(self.prepare(text, *trained, 400, "--algorithm", "word"), "bpe or unigram")
        self.assert_refused(self.prepare(self.write("a.jsonl.bz2", b"BZh")), "a.jsonl.bz2", "compressed", "decompress it first")
        self.assert_refused(self.prepare(self.write("a.jsonl.gz", gzip.compress(b"{}")[:-3])), "a.jsonl.gz", "compressed by gzip", "it ends early")
        self.assert_refused(self.prepare(self.write("a.txt", b"caf\xe9")), "1 not UTF-8 text", "byte 0xe9 at offset 3 is no UTF-8")
        self.assert_refused(self.prepare(self.write("b.json", "[]")), "b.json", "(--text-key, --format text)")
        damaged = '{"text": "good"}\n{"text": "caf\xe9"}'.encode("latin1")
        self.assert_refused(self.prepare(self.write("a.jsonl", damaged)), "a.jsonl:2: damaged text")
        self.assert_refused(self.prepare(self.write("b.jsonl", '{"body": "good"}')), "b.jsonl:1", "--text-key")
        self.assertFalse((self.folder / "out/dataset.json").exists())

    def test_says_what_was_taken_for_what_and_keeps_a_data_set(self):
        lines = '{"text": "one"}\n{"text": "two"}\n'
        made = self.succeeded(self.prepare(self.write("a.json", lines), self.write("b.txt", "three"), "--held-out", 0))
        self.assertRegex(made.stdout, r"taken +1 files as JSON lines \(such as \S+/a.json, by its first line\), 1 as a document each")
        self.assert_refused(self.prepare("b.txt"), "'out' holds a data set of 3 documents, tokenizer bytes", "(--overwrite)")
        self.succeeded(self.prepare("b.txt", "--overwrite"))

    def test_of_a_killed_run_leaves_no_data_set(self):
        line = json.dumps({"text": "some words and some more of them " * 8}) + "\n"
        large = self.write("large.jsonl", line * 80000)
        for old in (False, True):
            if old:
                self.succeeded(self.prepare(self.corpus()))
            before = (self.folder / "out/dataset.json").read_text() if old else None
            process = subprocess.Popen([DYNMO, "data", "prepare", str(large), "--out", "out", "--jobs", "2", "--overwrite"], cwd=self.folder,
                                       stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
            deadline = time.monotonic() + 60
            part = self.folder / "out/train.bin.tmp"
            while not (part.exists() and part.stat().st_size > 1 << 20):
                self.assertLess(time.monotonic(), deadline)
                self.assertIsNone(process.poll(), "ended too early to be interrupted")
                time.sleep(0.002)
            process.send_signal(signal.SIGINT)
            self.assertEqual(process.wait(timeout=30), -signal.SIGINT)
            if old:
                self.assertEqual((self.folder / "out/dataset.json").read_text(), before)
                self.succeeded(self.dynmo("inspect", "out"))
            else:
                self.assert_refused(self.dynmo("inspect", "out"), "out")


class Inspect(Case):
    def test_shows_and_verifies_a_folder(self):
        self.write("text/a.txt", "naïve 🎉\n" * 3)
        self.succeeded(self.prepare("text", "--held-out", 0))
        shown = self.succeeded(self.dynmo("inspect", "out"))
        self.assertIn("naïve 🎉\n" * 3, shown.stdout)
        self.assertIn("end of document 256", shown.stdout)
        described = json.loads(self.dynmo("inspect", "out", "--json").stdout)
        self.assertEqual(described["document"], [*("naïve 🎉\n" * 3).encode(), 256])
        self.assertEqual(described["train"], {"shards": 1, "documents": 1, "tokens": 37, "type": "uint16", "min_token": 10,
                                              "max_token": 256})
        self.assert_refused(self.dynmo("inspect", "out", "--document", 1), "no document 1")
        self.assert_refused(self.dynmo("inspect", "out", "--document", -1), "no document -1")
        data = bytearray((self.folder / "out/train.bin").read_bytes())
        data[3] ^= 1
        self.write("out/train.bin", bytes(data))
        self.assert_refused(self.dynmo("inspect", "out"), "digest")

    def test_of_shards_without_a_description(self):
        self.write("text/a.txt", "some text")
        self.succeeded(self.prepare("text", "--held-out", 0))
        (self.folder / "out/dataset.json").unlink()
        self.assertIn("115 111 109 101", self.dynmo("inspect", "out/train").stdout)
        self.assertIn("some text", self.dynmo("inspect", "out/train", "--tokenizer", "bytes").stdout)
        self.assert_refused(self.dynmo("inspect", "nowhere"), "nowhere")


if __name__ == "__main__":
    unittest.main()
