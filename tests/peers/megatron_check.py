#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Megatron-LM's own reader on our token shards, and our reader on what its builder writes.

usage: megatron_check.py --dynmo DYNMO [--megatron CHECKOUT]

CHECKOUT, or the variable MEGATRON, is a clone of Megatron-LM, DYNMO the command line. Needs numpy and torch. Only the module of
the indexed data set is loaded; what it imports of the rest of Megatron are stand-ins. Prints PASS or FAIL a check; exit code 1 on a failure, 77 (skipped)
without --megatron or what it needs.
"""
import argparse
import importlib.util
import json
import os
import pathlib
import random
import subprocess
import sys
import tempfile
import types

MODULE = "megatron/core/datasets/indexed_dataset.py"


def skip(why):
    print(f"SKIP megatron: {why}")
    sys.exit(77)


def stand_in(name, **members):
    module = types.ModuleType(name)
    for member, value in members.items():
        setattr(module, member, value)
    sys.modules[name] = module
    if "." in name:
        setattr(sys.modules[name.rsplit(".", 1)[0]], name.rsplit(".", 1)[1], module)


def load(checkout):
    """The module, without the packages around it, which need a GPU and more than numpy and torch."""
    class Feature:
        @staticmethod
        def is_enabled():
            return False

    class Files:
        open = staticmethod(open)

    local = lambda *_: False
    for package in ("megatron", "megatron.core", "megatron.core.datasets"):
        stand_in(package)
    stand_in("megatron.core.msc_utils", MultiStorageClientFeature=Feature, maybe_msc=Files)
    stand_in("megatron.core.utils", log_single_rank=lambda *_, **__: None)
    stand_in("megatron.core.datasets.object_storage_utils", S3Config=None, ObjectStorageConfig=None, cache_index_file=None,
             dataset_exists=None, get_index_cache_path=None, get_object_storage_access=None, is_object_storage_path=local,
             parse_s3_path=None)
    stand_in("megatron.core.datasets.utils_s3", S3Config=None, is_s3_path=local, maybe_download_file=None)
    spec = importlib.util.spec_from_file_location("megatron.core.datasets.indexed_dataset", checkout / MODULE)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


class Checks:
    def __init__(self, megatron, dynmo, folder):
        self.megatron, self.dynmo, self.folder, self.failed = megatron, dynmo, folder, 0

    def check(self, holds, name, what):
        print(f"PASS {name}: {what}" if holds else f"FAIL {name}: not so: {what}")
        self.failed += not holds

    def run(self, *words):
        done = subprocess.run([self.dynmo, *map(str, words)], capture_output=True, text=True, check=False)
        if done.returncode != 0:
            raise RuntimeError(done.stderr.strip())
        return done.stdout

    def documents(self, path, count):
        """The token ids of the first `count` documents, as our reader has them."""
        return [json.loads(self.run("data", "inspect", path, "--json", "--document", i))["document"] for i in range(count)]

    def ours_by_megatron(self, tokenizer, words):
        corpus, out = self.folder / "corpus", self.folder / tokenizer
        self.run("data", "prepare", corpus, "--out", out, "--validation", "0.3", "--tokenizer", tokenizer, *words)
        for part in ("train", "validation"):
            description = json.loads((out / "dataset.json").read_text())
            data = self.megatron.IndexedDataset(str(out / part))
            sizes = (len(data), len(data.document_indices) - 1, int(data.sequence_lengths.sum()))
            wanted = (description[part]["documents"],) * 2 + (description[part]["tokens"],)
            name = f"reads-ours-{tokenizer}-{part}"
            self.check(sizes == wanted, name, f"Megatron finds {sizes[1]} documents, {sizes[2]} tokens")
            ends = all(document[-1] == description["end_of_document"] for document in data)
            end, kind = description["end_of_document"], data.index.dtype.__name__
            self.check(ends, f"{name}-ends", f"each document ends with token {end}, as {kind}")
            same = [document.tolist() for document in data] == self.documents(out / part, len(data))
            self.check(same, f"{name}-ids", "the ids are those that we read")

    def megatrons_by_us(self, numpy, torch):
        draw = random.Random(1)
        largest = {"uint8": 255, "int8": 127, "int16": 32767, "uint16": 65535, "int32": 2**31 - 1, "int64": 2**31 - 1}
        for name, most in largest.items():
            prefix = self.folder / f"built_{name}"
            builder = self.megatron.IndexedDatasetBuilder(f"{prefix}.bin", dtype=getattr(numpy, name))
            expected = []
            for _ in range(12):
                document = []
                for _ in range(draw.randint(1, 3)):  # sequences
                    ids = [draw.choice([0, most, draw.randint(0, most)]) for _ in range(draw.randint(1, 40))]
                    builder.add_item(torch.tensor(ids, dtype=torch.int64))
                    document += ids
                builder.end_document()
                expected.append(document)
            builder.finalize(f"{prefix}.idx")
            shown = json.loads(self.run("data", "inspect", prefix, "--json"))["train"]
            tokens = sum(map(len, expected))
            self.check((shown["documents"], shown["tokens"], shown["type"]) == (12, tokens, name), f"reads-theirs-{name}",
                       f"we find 12 documents of several sequences, {tokens} tokens")
            self.check(self.documents(prefix, 12) == expected, f"reads-theirs-{name}-ids", "the ids are those that were built")


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--dynmo", required=True)
    parser.add_argument("--megatron", type=pathlib.Path, default=os.environ.get("MEGATRON"))
    arguments = parser.parse_args()
    if arguments.megatron is None:
        skip("no --megatron or MEGATRON: clone Megatron-LM and give its path")
    if not (arguments.megatron / MODULE).is_file():
        skip(f"{arguments.megatron} has no {MODULE}: wanted a checkout of Megatron-LM")
    try:
        import numpy
        import torch
    except ImportError as fault:
        skip(f"{fault.name} is not installed, which Megatron's reader needs")
    with tempfile.TemporaryDirectory() as name:
        folder = pathlib.Path(name)
        draw = random.Random(2)
        words = ["".join(draw.choices("abcdefghij", k=draw.randint(2, 8))) for _ in range(300)]
        (folder / "corpus").mkdir()
        for i in range(40):
            text = "\n".join(" ".join(draw.choices(words, k=12)) for _ in range(draw.randint(1, 30)))
            (folder / "corpus" / f"{i}.txt").write_text(text)
        checks = Checks(load(arguments.megatron), arguments.dynmo, folder)
        checks.ours_by_megatron("bytes", [])
        checks.ours_by_megatron("sentencepiece", ["--vocab", "400"])
        checks.megatrons_by_us(numpy, torch)
    print(f"{checks.failed} checks failed" if checks.failed else "all checks passed")
    return 1 if checks.failed else 0


if __name__ == "__main__":
    sys.exit(main())
