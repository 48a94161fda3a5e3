# SPDX-License-Identifier: Apache-2.0
"""What tests of `dynmo train` share: prepared text, a tiny model, the ranks that a run has started."""
import json
import os
import pathlib
import shutil
import subprocess
import tempfile

from program import DYNMO, ProgramCase

TINY = [
    "model.hidden=32", "model.blocks=3", "model.heads=4", "model.kv_heads=2", "model.intermediate=48", "model.sequence=16",
    "model.dropout=0.1", "batch.micro_batches=4", "batch.micro_batch_size=2", "train.validation_every=0",
    "optimizer.warmup_steps=3", "pipeline.pin=false",
]


def settings(values):
    return [word for value in values for word in ("--set", value)]


def rank_processes(marker):
    """Processes of this machine whose command line has `marker`."""
    found = []
    for entry in pathlib.Path("/proc").iterdir():
        if not entry.name.isdigit():
            continue
        try:
            line = (entry / "cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
            state = (entry / "stat").read_text().rsplit(")", 1)[1].split()[0]
        except OSError:
            continue
        if marker in line and state != "Z" and int(entry.name) != os.getpid():
            found.append((int(entry.name), line))
    return found


def losses(run):
    """By step, the last record of each (a resumed run repeats the steps after its checkpoint)."""
    found = {}
    for line in (run / "records" / "rank-0.jsonl").read_text().splitlines():
        record = json.loads(line)
        found[record["step"]] = record["loss"]
    return found


def newest_manifest(run):
    folders = sorted((run / "checkpoints").glob("step-*[0-9]"))
    return json.loads((folders[-1] / "manifest.json").read_text())


def digests(manifest):
    return {entry["layer"]: entry["digest"] for entry in manifest["files"]}


class RunCase(ProgramCase):
    """The tests of a class share a folder with prepared text."""

    @classmethod
    def setUpClass(cls):
        cls.folder = pathlib.Path(tempfile.mkdtemp(prefix="dynmo-cli-"))
        corpus = cls.folder / "corpus"
        corpus.mkdir()
        for number in range(40):
            text = "".join(f"line {i} of file {number}: {i * number % 97}\n" for i in range(60))
            (corpus / f"{number}.txt").write_text(text)
        cls.data = cls.folder / "data"
        subprocess.run([DYNMO, "data", "prepare", str(corpus), "--out", str(cls.data), "--validation", "0.1"], check=True,
                       capture_output=True, timeout=60)

    @classmethod
    def tearDownClass(cls):
        shutil.rmtree(cls.folder)

    def command(self, *words, run="run", extra=()):
        return [DYNMO, "train", "--data", str(self.data), "--out", str(self.folder / run), *settings(TINY),
                *settings(extra), *words]

    def run_command(self, command, timeout=120, env=None):
        return subprocess.run(command, capture_output=True, text=True, timeout=timeout, stdin=subprocess.DEVNULL,
                              env={**os.environ, **(env or {})}, cwd=self.folder)
