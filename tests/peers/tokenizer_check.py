#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""`dynmo data prepare --tokenizer tokenizer.json` gives the ids of the `tokenizers` wheel, for the pre-tokenizers of GPT-2, Llama 3 and
Qwen2 with vocabularies trained here, and takes no more processor time than one thread of it."""
import argparse
import array
import json
import os
import pathlib
import random
import resource
import subprocess
import tempfile
import time
import unicodedata

os.environ["TOKENIZERS_PARALLELISM"] = "false"
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors, trainers  # noqa: E402

CASES = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
LLAMA3 = CASES + r"|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
QWEN2 = LLAMA3.replace(r"\p{N}{1,3}", r"\p{N}")
END = "<|endoftext|>"
SPECIAL = ["<|im_start|>", "<|im_end|>", "<|im|>"]
# First and last letter of ten scripts.
SCRIPTS = ["az", "àÿ", "бя", "αω", "את", "بي", "कह", "กฮ", "一龥", "가힣"]
CODE = ["def f(x):\n    return x**2  # a square\n", "\tif (a[i] != nullptr) { b->c += 0x1F; }\r\n", "SELECT * FROM t WHERE x >= 3.14159e-7;\n", "</div>\n\n\n"]
ODD = ["don't", "WE'LL", "it'\u017f", "I’m", "e\u0301te\u0301", "\u1112\u1161\u11ab", "\u212b", "a\u0323\u0307", "\u0344", "\u180e", "\u00a0", "\u0085", "\u3000", "\u2028",
       "👩‍👩‍👧‍👦", "🏳️‍🌈", "🎉🎉", "…", "½²", "123456789", "٣٤٥", "Ⅷ", "1,000.50", " \u00a0 x", "\t\t", "   ", "\n\n \n", "\r\n\r\n", " \t ", "_x_", "\ufeff", "\u200b"]


def document(draw, points, size):
    """Mixed text of about `size` characters."""
    parts, length = [], 0
    while length < size:
        kind = draw.random()
        if kind < 0.72:
            first, last = draw.choice(SCRIPTS)
            common = min(ord(last) - ord(first), 60) if draw.random() < 0.8 else ord(last) - ord(first)
            words = ["".join(chr(ord(first) + int(common * draw.random() ** 2)) for _ in range(draw.randint(1, 9))) for _ in range(8)]
            part = " ".join(draw.choices(words, k=draw.randint(3, 30))) + draw.choice([". ", ", ", "\n", "!\n\n", "? "])
        elif kind < 0.82:
            part = draw.choice(CODE)
        elif kind < 0.93:
            part = draw.choice(["", " "]) + draw.choice(ODD)
        elif kind < 0.96:
            part = " " * draw.randint(1, 40) + draw.choice(["", "\n"])
        elif kind < 0.98:
            part = "".join(chr(draw.choice(points)) for _ in range(draw.randint(1, 8)))
        else:
            part = draw.choice(SPECIAL) + draw.choice(["", " ", "\n"])
        parts.append(part)
        length += len(part)
    return "".join(parts)


def documents(total, seed):
    """About `total` bytes; one of them without a space."""
    draw = random.Random(seed)
    # Those that Python and PCRE2 10.42 know: Unicode 14.
    points = [point for point in range(1, 0x110000) if unicodedata.category(chr(point)) not in ("Cn", "Cs", "Co")]
    texts = ["".join(draw.choices("abcdefgh", k=100_000)), "é" * 50_000, " " * 100_000, " " * 30_000 + "x"]
    size = sum(len(text.encode()) for text in texts)
    while size < total:
        texts.append(document(draw, points, draw.choice([1, 20, 300, 3000, 20000])))
        size += len(texts[-1].encode())
    return texts


def trained(name, sample):
    """A tokenizer of about 2,000 tokens as the family `name` has it."""
    made = Tokenizer(models.BPE(ignore_merges=name == "llama3"))
    if name == "gpt2":
        made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)
    else:
        pattern = LLAMA3 if name == "llama3" else QWEN2
        made.pre_tokenizer = pre_tokenizers.Sequence([pre_tokenizers.Split(Regex(pattern), "isolated"),
                                                      pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)])
    if name == "qwen2":
        made.normalizer = normalizers.NFC()
    made.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(vocab_size=2000, special_tokens=[] if name == "llama3" else [END], show_progress=False,
                                  initial_alphabet=pre_tokenizers.ByteLevel.alphabet())
    made.train_from_iterator(sample, trainer)
    made.add_special_tokens(([END] if name == "llama3" else []) + SPECIAL[:2])
    made.add_tokens([SPECIAL[2], AddedToken("e\u0301te\u0301", normalized=True)])
    made.add_tokens([AddedToken("<|pad|>", lstrip=True, rstrip=True, normalized=False)])
    if name == "llama3":
        made.post_processor = processors.TemplateProcessing(single="<|im_start|> $A", special_tokens=[("<|im_start|>", made.token_to_id("<|im_start|>"))])
    return made


def seconds_of_children():
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


class Check:
    def __init__(self, dynmo, folder):
        self.dynmo, self.folder = dynmo, folder

    def run(self, *words):
        done = subprocess.run([self.dynmo, "data", *map(str, words)], capture_output=True, text=True, check=False, timeout=1000)
        assert done.returncode == 0, (words, done.stderr)
        return done.stdout

    def prepared(self, name, jobs):
        """The folder, and the processor seconds that it took."""
        out = self.folder / f"{name}-{jobs}"
        before = seconds_of_children()
        self.run("prepare", self.folder / "texts.jsonl", "--out", out, "--held-out", 0, "--jobs", jobs, "--tokenizer", self.folder / name / "tokenizer.json")
        return out, seconds_of_children() - before

    def family(self, name, texts):
        """Compares everything; returns how much more processor time the wheel takes."""
        theirs = trained(name, [text for text in texts if len(text) < 50_000][:400])
        (self.folder / name).mkdir()
        theirs.save(str(self.folder / name / "tokenizer.json"))
        began = time.process_time()
        ids = [theirs.encode(text, add_special_tokens=False).ids for text in texts]
        their_seconds = time.process_time() - began
        out, seconds = self.prepared(name, 1)
        several, _ = self.prepared(name, 3)
        for file in sorted(path.name for path in out.iterdir()):
            assert (out / file).read_bytes() == (several / file).read_bytes(), (name, file)
        end = theirs.token_to_id(END)
        description = json.loads((out / "dataset.json").read_text())
        assert description["tokenizer"] == "byte-level-bpe" and description["end_of_document"] == end, description
        assert description["vocabulary"] == theirs.get_vocab_size(), description
        ours = array.array("H")
        ours.frombytes((out / "train.bin").read_bytes())
        place = 0
        for number, (text, wanted) in enumerate(zip(texts, ids)):
            got = ours[place:place + len(wanted) + 1].tolist()
            assert got == [*wanted, end], (name, number, difference(theirs, got, wanted))
            place += len(got)
        assert place == len(ours), (name, place, len(ours))
        for number in (0, 1, *range(4, 14)):
            shown = json.loads(self.run("inspect", out, "--json", "--document", number))
            text = texts[number] if name != "qwen2" else theirs.normalizer.normalize_str(texts[number])
            plain = text.replace("e\u0301te\u0301", "\u00e9t\u00e9") if name == "qwen2" else text
            assert shown["text"].replace("e\u0301te\u0301", "\u00e9t\u00e9") == plain.replace("e\u0301te\u0301", "\u00e9t\u00e9"), (name, number)
        return their_seconds / seconds

    def check(self, total, seed):
        texts = documents(total, seed)
        with open(self.folder / "texts.jsonl", "w", encoding="utf-8") as file:
            for text in texts:
                file.write(json.dumps({"text": text}, ensure_ascii=False) + "\n")
        return {name: self.family(name, texts) for name in ("gpt2", "llama3", "qwen2")}


def difference(theirs, got, wanted):
    at = next((i for i, (a, b) in enumerate(zip(got, wanted)) if a != b), min(len(got), len(wanted)))
    near = slice(max(0, at - 3), at + 5)
    return at, [theirs.id_to_token(i) for i in got[near]], [theirs.id_to_token(i) for i in wanted[near]]


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--dynmo", required=True)
    parser.add_argument("--bytes", type=int, default=10_000_000)
    parser.add_argument("--seed", type=int, default=1)
    arguments = parser.parse_args()
    failed = False
    with tempfile.TemporaryDirectory() as name:
        for family, ratio in Check(arguments.dynmo, pathlib.Path(name)).check(arguments.bytes, arguments.seed).items():
            print(f"PASS ids of {family}: equal on {arguments.bytes} bytes")
            slow = ratio < 1
            failed |= slow
            print(f"{'FAIL' if slow else 'PASS'} speed of {family}: {ratio:.1f} times that of one thread of the wheel")
    return 1 if failed else 0


if __name__ == "__main__":
    raise SystemExit(main())
