# SPDX-License-Identifier: Apache-2.0
"""Ranks of `dynmo train` started by the real torchrun, mpirun and srun.

Argument and output as tests/peers/run.py wants them. srun is tried where a Slurm cluster answers (its configuration may be given
in SLURM_CONF), mpirun where Open MPI is installed, torchrun where this interpreter has PyTorch.
"""
import argparse
import json
import os
import pathlib
import shutil
import signal
import subprocess
import sys
import tempfile
import time

RANKS = 3
SETTINGS = [
    "model.hidden=32", "model.blocks=3", "model.heads=4", "model.kv_heads=2", "model.intermediate=48", "model.sequence=16",
    "batch.micro_batches=4", "batch.micro_batch_size=2", "train.validation_every=0", "pipeline.pin=false", "pipeline.cut=[2,3,3]",
]
# Ends like the rank and writes its exit code down.
RECORD = 'trap "" TERM; (trap - TERM; exec "$@"); code=$?; echo $code >"$CODES/$$"; exit $code'


def launchers():
    """By name: the words before the command, or why it cannot be tried."""
    found = {}
    torchrun = pathlib.Path(sys.executable).parent / "torchrun"
    found["torchrun"] = [str(torchrun), "--standalone", f"--nproc-per-node={RANKS}", "--no-python"] if torchrun.exists() else \
        f"no torchrun beside {sys.executable}"
    mpirun = shutil.which("mpirun")
    version = subprocess.run([mpirun, "--version"], capture_output=True, text=True).stdout if mpirun else ""
    root = ["--allow-run-as-root"] if os.geteuid() == 0 else []
    found["mpirun"] = [mpirun, *root, "--oversubscribe", "-n", str(RANKS)] if "Open MPI" in version else "Open MPI is not installed"
    srun = shutil.which("srun")
    answers = srun and subprocess.run(["sinfo", "-h", "-t", "idle,mix"], capture_output=True, text=True, timeout=30).stdout.strip()
    found["srun"] = [srun, "-n", str(RANKS), "--overcommit"] if answers else "no Slurm cluster answers here"
    return found


class Test:
    def __init__(self, dynmo, folder):
        self.dynmo, self.folder = dynmo, folder
        corpus = folder / "corpus.txt"
        corpus.write_text("".join(f"line {i} of a text, {i * i % 97}\n" for i in range(4000)))
        subprocess.run([dynmo, "data", "prepare", corpus, "--out", folder / "data"], check=True, capture_output=True, timeout=60)
        run = folder / "own"
        subprocess.run([*self.command(run, 6), "-n", str(RANKS)], check=True, capture_output=True, timeout=120)
        self.wanted = losses(run)

    def command(self, run, steps):
        words = [self.dynmo, "train", "--data", str(self.folder / "data"), "--out", str(run), "--steps", str(steps)]
        for setting in SETTINGS:
            words += ["--set", setting]
        return words

    def ranks(self, run):
        """Process ids of the ranks of a run, by the rank their environment says."""
        found = {}
        for entry in pathlib.Path("/proc").iterdir():
            try:
                words = (entry / "cmdline").read_bytes().split(b"\0") if entry.name.isdigit() else []
                if words[:1] != [self.dynmo.encode()] or str(run).encode() not in words:
                    continue
                environment = dict(one.split(b"=", 1) for one in (entry / "environ").read_bytes().split(b"\0") if b"=" in one)
            except OSError:
                continue
            for name in (b"RANK", b"OMPI_COMM_WORLD_RANK", b"SLURM_PROCID"):
                if name in environment:
                    found[int(environment[name])] = int(entry.name)
                    break
        return found

    def same_losses(self, name, launcher):
        run = self.folder / name
        done = subprocess.run([*launcher, *self.command(run, 6)], capture_output=True, text=True, timeout=120)
        assert done.returncode == 0, f"exit code {done.returncode}: {done.stdout[-2000:]}{done.stderr[-2000:]}"
        assert losses(run) == self.wanted, f"losses {losses(run)}, wanted {self.wanted}"

    def disturb(self, name, launcher, what):
        """Starts a long run, waits for its first steps, calls `what`, waits for the end. Exit code and text of the launcher."""
        run = self.folder / name
        with open(self.folder / f"{name}.txt", "w+") as text:
            process = subprocess.Popen([*launcher, *self.command(run, 1000000)], stdout=text, stderr=text,
                                       stdin=subprocess.DEVNULL, start_new_session=True)
            try:
                records = [run / "records" / f"rank-{rank}.jsonl" for rank in range(RANKS)]
                wait_for(lambda: all(one.exists() and one.stat().st_size > 0 for one in records) or process.poll() is not None, 90,
                         "the first step")
                what(process, self.ranks(run))
                process.wait(timeout=30)
                wait_for(lambda: not self.ranks(run), 10, "the end of all ranks")
            finally:
                if process.poll() is None:
                    process.kill()
                for rank in self.ranks(run).values():
                    os.kill(rank, signal.SIGKILL)
            text.seek(0)
            return process.returncode, text.read()

    # Each launcher has its own exit code: torchrun has 1, mpirun and srun that of a killed rank. It ends the others, too,
    # but gives them time to say why they end.
    def killed_rank(self, name, launcher):
        codes = self.folder / f"{name}-codes"
        codes.mkdir()
        os.environ["CODES"] = str(codes)
        code, text = self.disturb(f"{name}-kill", [*launcher, "sh", "-c", RECORD, "sh"],
                                  lambda _, ranks: os.kill(ranks[1], signal.SIGKILL))
        found = sorted(one.read_text().strip() for one in codes.iterdir())
        errors = [line for line in text.splitlines() if "dynmo: error" in line]
        assert code != 0, "the launcher ended with 0"
        assert "5" in found and set(found) <= {"5", "137", "143", ""}, f"exit codes {found}"
        assert errors and all("rank 1 was lost" in line for line in errors), f"errors {errors}"

    def interrupt(self, name, launcher):
        def press(process, _):
            process.send_signal(signal.SIGINT)
            if name == "srun":  # asks for a second one
                time.sleep(0.2)
                process.send_signal(signal.SIGINT)
        code, _ = self.disturb(f"{name}-interrupt", launcher, press)
        assert code != 0, "the launcher ended with 0"


def losses(run):
    return [json.loads(line)["loss"] for line in (run / "records" / "rank-0.jsonl").read_text().splitlines()]


def wait_for(condition, seconds, what):
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, f"{what} did not come within {seconds} s"
        time.sleep(0.02)


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--dynmo", required=True)
    arguments = parser.parse_args()
    folder = pathlib.Path(tempfile.mkdtemp(prefix="dynmo-launchers-"))
    failed = 0
    try:
        test = Test(str(pathlib.Path(arguments.dynmo).resolve()), folder)
        for name, launcher in launchers().items():
            for case in (test.same_losses, test.killed_rank, test.interrupt):
                label = f"{name}.{case.__name__}"
                if isinstance(launcher, str):
                    print(f"SKIP {label}: {launcher}")
                    continue
                try:
                    case(name, launcher)
                    print(f"PASS {label}", flush=True)
                except (AssertionError, subprocess.SubprocessError, KeyError) as fault:
                    failed += 1
                    print(f"FAIL {label}: {' '.join(str(fault).split())}", flush=True)
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
