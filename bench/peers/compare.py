#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Speed and memory of `dynmo train` beside torch.distributed.pipelining on two ranks of one core each, or
beside PyTorch's own training loop on one rank (--ranks 1), on a core or a GPU (--device cuda).

Same decoder, batch, precision, optimizer and cores. Every schedule of both sides runs once, the peer's
with its first cut, then the peer's fastest one with its other cuts; the best --keep of each side then run
in interleaved rounds. A round pairs our best schedule with the peer's best one; what is reported is the
median of the paired ratios and their spread. Memory is VmHWM, the largest resident size of a rank, read
from outside for both; on a GPU it is what nvidia-smi says is in use there, with nothing else on it, twice
a second. Each round also measures what rate PyTorch's matrix
products reach on the same cores at once (product_rate.py): the share of it that the model's products would
need at the measured speed is what others call MFU, of a measured peak.

    bench/peers/compare.py --dynmo build/release/apps/dynmo/dynmo --out build/bench-peers.json

Needs a Python with PyTorch 2.11 for the peer: --python, or $DYNMO_CACHE/peers/bin/python.
"""

import argparse
import array
import json
import os
import platform
import random
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

HERE = Path(__file__).resolve().parent
# The models of docs/performance.md, and one to try this program with. `steps` are timed, after `warmup`
# steps of the peer; ours has warmed up by measuring its cut. Cuts are blocks a stage of the peer, lists
# for one stage a rank and for two, the likeliest first (the medium model's head weighs more than a block).
MODELS = {
    "tiny": {
        "model": {"hidden": 64, "blocks": 4, "heads": 2, "kv_heads": 2, "intermediate": 128, "sequence": 32},
        "vocabulary": 257, "micro_batches": 4, "micro_batch_size": 2, "warmup": 1, "steps": 5,
        "cuts": {1: [[2, 2]], 2: [[1, 1, 1, 1]]},
    },
    "small": {
        "model": {"hidden": 256, "blocks": 8, "heads": 4, "kv_heads": 4, "intermediate": 688, "sequence": 128},
        "vocabulary": 257, "micro_batches": 8, "micro_batch_size": 4, "warmup": 1, "steps": 3,
        "cuts": {1: [[4, 4]], 2: [[2, 2, 2, 2]]},
    },
    "medium": {
        "model": {"hidden": 512, "blocks": 12, "heads": 8, "kv_heads": 8, "intermediate": 1376, "sequence": 256},
        "vocabulary": 8192, "micro_batches": 8, "micro_batch_size": 2, "warmup": 1, "steps": 1,
        "cuts": {1: [[7, 5], [6, 6]], 2: [[3, 3, 4, 2], [3, 3, 3, 3]]},
    },
    "wide": {  # for a GPU
        "model": {"hidden": 2048, "blocks": 8, "heads": 16, "kv_heads": 16, "intermediate": 5504, "sequence": 2048},
        "vocabulary": 32000, "micro_batches": 4, "micro_batch_size": 4, "warmup": 3, "steps": 10,
        "cuts": {1: [[4, 4]], 2: [[2, 2, 2, 2]]},
    },
}
LOOPS = ("eager", "compile", "eager-deterministic")  # of the peer on one rank
PEER_SCHEDULES = {"1f1b": 1, "gpipe": 1, "interleaved": 2, "interleaved-zb": 2, "zb-v": 2}  # stages a rank
OUR_SCHEDULES = ("1f1b", "zb-h1", "auto")
FASTEST = "-fastest"  # behind a schedule of ours: run.deterministic = false, on a device
OPTIMIZER = {"learning_rate": 1e-3, "beta1": 0.9, "beta2": 0.95, "epsilon": 1e-8, "weight_decay": 0.1}
ROPE_THETA, STD, SEED = 10000.0, 0.02, 1


class Failed(Exception):
    pass


def write_data(folder, vocabulary, tokens=2_000_000):
    """A prepared folder of synthetic tokens, some far likelier than others, so that losses fall."""
    folder.mkdir(parents=True)
    draw = random.Random(SEED)
    stream = array.array("H", (min(int(vocabulary ** draw.random()) - 1, vocabulary - 1) for _ in range(tokens)))
    summary = {"bin_digest": "0" * 32, "idx_digest": "0" * 32}  # train does not read them
    for name, content in (("train", stream), ("validation", array.array("H"))):
        (folder / f"{name}.bin").write_bytes(content.tobytes())
        sizes = [len(content)] if content else []
        header = b"MMIDIDX\0\0" + (1).to_bytes(8, "little") + bytes([8])  # version, uint16
        header += len(sizes).to_bytes(8, "little") + (len(sizes) + 1).to_bytes(8, "little")
        index = array.array("i", sizes).tobytes() + array.array("q", [0] * len(sizes)).tobytes()
        (folder / f"{name}.idx").write_bytes(header + index + array.array("q", range(len(sizes) + 1)).tobytes())
    description = {"format": "dynmo-dataset-1", "tokenizer": "bytes", "vocabulary": vocabulary,
                   "end_of_document": 0, "seed": SEED, "validation_share": 0.0}
    for name, content in (("train", stream), ("validation", ())):
        description[name] = {"documents": 1 if content else 0, "tokens": len(content), **summary}
    (folder / "dataset.json").write_text(json.dumps(description))


def descendants(pid):
    """Processes below `pid`, itself included."""
    parents = {}
    for entry in os.listdir("/proc"):
        if not entry.isdigit():
            continue
        try:
            stat = Path(f"/proc/{entry}/stat").read_text()
        except OSError:
            continue
        parents.setdefault(int(stat.rpartition(")")[2].split()[1]), []).append(int(entry))
    found, left = [], [pid]
    while left:
        found.append(left.pop())
        left += parents.get(found[-1], [])
    return found


def peak_bytes(pid):
    try:
        for line in Path(f"/proc/{pid}/status").read_text().splitlines():
            if line.startswith("VmHWM:"):
                return int(line.split()[1]) * 1024
    except OSError:
        pass
    return 0


def used_bytes_of_gpu():
    """Returns the bytes in use on the first GPU of CUDA_VISIBLE_DEVICES, which both sides take."""
    wanted = (os.environ.get("CUDA_VISIBLE_DEVICES") or "0").split(",")[0].strip()
    command = ["nvidia-smi", "--query-gpu=index,uuid,memory.used", "--format=csv,noheader,nounits"]
    for line in subprocess.check_output(command, text=True).splitlines():
        index, uuid, used = (word.strip() for word in line.split(","))
        if wanted == index or (wanted.startswith("GPU-") and uuid.startswith(wanted)):
            return int(used) * 2**20
    raise Failed(f"nvidia-smi has no GPU '{wanted}', the first of CUDA_VISIBLE_DEVICES")


def run_processes(commands, device="cpu"):
    """Runs (command, environment, core) at once. Returns the outputs and the largest peak of any process, or of the GPU."""
    files = [tempfile.TemporaryFile("w+") for _ in commands]
    processes = []
    for (command, environment, core), file in zip(commands, files):
        pin = (lambda c=core: os.sched_setaffinity(0, {c})) if core is not None else None
        processes.append(subprocess.Popen(command, env={**os.environ, **environment}, stdout=file,
                                          stderr=subprocess.STDOUT, preexec_fn=pin))
    peaks = {}
    while any(p.poll() is None for p in processes):
        if device == "cuda":
            peaks[device] = max(peaks.get(device, 0), used_bytes_of_gpu())
        else:
            for pid in (pid for process in processes for pid in descendants(process.pid)):
                peaks[pid] = max(peaks.get(pid, 0), peak_bytes(pid))
        if any(p.returncode not in (None, 0) for p in processes):
            for process in processes:
                process.kill()
        time.sleep(0.5)
    outputs = []
    for file in files:
        file.seek(0)
        outputs.append(file.read())
    if any(p.returncode != 0 for p in processes):
        raise Failed("\n".join(o.strip().splitlines()[-1] for o in outputs if o.strip()))
    return outputs, max(peaks.values())


def run_peer(options, shape, data, schedule, cut):
    config = {**OPTIMIZER, "schedule": schedule, "cut": cut, "precision": options.precision,
              "device": "cuda" if options.device == "cuda" else "cpu", "seed": SEED, "data": str(data / "train.bin"),
              "steps": shape["steps"], "warmup_steps": shape["warmup"], "micro_batches": shape["micro_batches"],
              "micro_batch_size": shape["micro_batch_size"],
              "model": {**shape["model"], "vocabulary": shape["vocabulary"], "rope_theta": ROPE_THETA,
                        "std": STD}}
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = str(probe.getsockname()[1])
    commands = []
    for rank, core in enumerate(options.cores):
        environment = {"RANK": str(rank), "WORLD_SIZE": str(options.ranks), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port,
                       "OMP_NUM_THREADS": "1", "TORCH_CPP_LOG_LEVEL": "ERROR", "PYTHONWARNINGS": "ignore",
                       "CUBLAS_WORKSPACE_CONFIG": ":4096:8"}  # asked for by deterministic algorithms
        command = [options.python, str(HERE / "pipelining_peer.py"), json.dumps(config)]
        commands.append((command, environment, core))
    outputs, peak = run_processes(commands, options.device)
    reports = [json.loads(line) for output in outputs for line in output.splitlines() if line.startswith("{")]
    losses = next(r["losses"] for r in reports if "losses" in r)
    return {"step_s": max(r["seconds"] for r in reports) / shape["steps"], "peak_bytes": peak, "losses": losses}


def toml(values):
    return "\n".join(f"{key} = {json.dumps(value)}" for key, value in values.items()) + "\n"


def run_ours(options, shape, data, schedule, folder):
    config = "[model]\n" + toml({**shape["model"], "rope_theta": ROPE_THETA, "precision": options.precision})
    config += "[data]\n" + toml({"path": str(data)})
    config += "[batch]\n" + toml({k: shape[k] for k in ("micro_batches", "micro_batch_size")})
    config += "[optimizer]\n" + toml({**OPTIMIZER, "minimum_learning_rate": OPTIMIZER["learning_rate"],
                                      "warmup_steps": 0, "clip_norm": 0})
    config += "[train]\n" + toml({"steps": shape["steps"], "seed": SEED, "validation_every": 0})
    fastest = {"deterministic": False} if schedule.endswith(FASTEST) else {}
    config += "[pipeline]\n" + toml({"ranks": options.ranks, "schedule": schedule.removesuffix(FASTEST), "pin": True, "measure_steps": 2})
    config += "[balance]\nenabled = false\n[run]\n" + toml({"directory": str(folder / "run"), "device": options.device, **fastest})
    (folder / "config.toml").write_text(config)
    command = ["taskset", "-c", ",".join(map(str, options.cores)), options.dynmo, "train", "--config", str(folder / "config.toml")]
    _, peak = run_processes([(command, {}, None)], options.device)
    seconds, losses, cut = [], [], []
    for rank in range(options.ranks):
        lines = (folder / "run" / "records" / f"rank-{rank}.jsonl").read_text().splitlines()
        records = [json.loads(line) for line in lines]
        seconds.append(sum(r["step_s"] for r in records))
        losses = [r["loss"] for r in records] if records[0]["loss"] is not None else losses
        cut.append(records[-1]["layers"])
    return {"step_s": max(seconds) / shape["steps"], "peak_bytes": peak, "losses": losses, "cut": cut}


def run_products(options, shape):
    """FLOP/s of all cores at once, in the shape of an MLP's products."""
    m = shape["model"]
    config = {"rows": shape["micro_batch_size"] * m["sequence"], "inner": m["hidden"], "columns": m["intermediate"],
              "precision": options.precision,
              "device": "cuda" if options.device == "cuda" else "cpu", "seconds": 1}
    command = [options.python, str(HERE / "product_rate.py"), json.dumps(config)]
    outputs, _ = run_processes([(command, {"OMP_NUM_THREADS": "1"}, core) for core in options.cores])
    return sum(json.loads(output.splitlines()[-1])["flops_per_s"] for output in outputs)


def step_flops(shape):
    """Of the products of a step, forward and backward: all matrices, and attention's below the diagonal."""
    m = shape["model"]
    kv = m["kv_heads"] * m["hidden"] // m["heads"]
    block = m["hidden"] * (2 * m["hidden"] + 2 * kv + 3 * m["intermediate"])
    token = 6 * (m["blocks"] * block + m["hidden"] * shape["vocabulary"]) + 6 * m["blocks"] * m["sequence"] * m["hidden"]
    return token * shape["micro_batches"] * shape["micro_batch_size"] * m["sequence"]


class Contest:
    """The runs of one model: who runs, what each run said."""

    def __init__(self, options, name, folder):
        self.options, self.name, self.shape = options, name, MODELS[name]
        self.folder = folder
        self.data = folder / f"{name}-data"
        write_data(self.data, self.shape["vocabulary"])
        self.tokens = self.shape["micro_batches"] * self.shape["micro_batch_size"] * self.shape["model"]["sequence"]
        self.runs = {}      # (side, schedule, cut) -> list of results
        self.failures = {}  # the same -> last line of what it said
        self.products = []  # FLOP/s, by round

    def entries(self):
        if self.options.ranks == 1:
            ours = ["1f1b"] + ["1f1b" + FASTEST] * (self.options.device != "cpu")
            return [*(("dynmo", s, ()) for s in ours), *(("peer", loop, ()) for loop in self.options.peers)]
        peer = [("peer", s, tuple(self.shape["cuts"][PEER_SCHEDULES[s]][0])) for s in self.options.peer_schedules]
        return [("dynmo", s, ()) for s in self.options.schedules] + peer

    def other_cuts(self):
        _, schedule, _ = self.best("peer", 1)[0]
        if schedule in LOOPS:
            return []
        return [("peer", schedule, tuple(cut)) for cut in self.shape["cuts"][PEER_SCHEDULES[schedule]][1:]]

    def run(self, entry, steps=None):
        side, schedule, cut = entry
        shape = {**self.shape, "steps": steps or self.shape["steps"]}
        with tempfile.TemporaryDirectory(dir=self.folder) as scratch:
            result = (run_ours(self.options, shape, self.data, schedule, Path(scratch)) if side == "dynmo"
                      else run_peer(self.options, shape, self.data, schedule, list(cut)))
        self.runs.setdefault(entry, []).append(result)
        self.write_row({"round": len(self.products), "run": label(entry), "tokens_per_s": self.tokens / result["step_s"], **result})
        say(f"{self.name:7} {label(entry):28} {self.tokens / result['step_s']:9.0f} tokens/s  "
            f"{result['peak_bytes'] / 2**20:6.0f} MiB  loss {result['losses'][0]:.4f} -> {result['losses'][-1]:.4f}")

    def write_row(self, row):
        """Appends a run to --rows at once: what ends early has shown what it had."""
        if self.options.rows:
            with self.options.rows.open("a") as file:
                file.write(json.dumps({"model": self.name, "precision": self.options.precision, **row}) + "\n")

    def try_all(self, entries):
        for entry in entries:
            try:
                self.run(entry, steps=1)
            except Failed as why:
                self.failures[entry] = str(why)
                say(f"{self.name:7} {label(entry):28} does not run: {str(why)[:150]}")

    def best(self, side, count):
        ran = [e for e in self.runs if e[0] == side]
        if not ran:
            raise Failed(f"no schedule of {side} ran")
        return sorted(ran, key=lambda e: statistics.median(r["step_s"] for r in self.runs[e]))[:count]

    def compare(self):
        self.try_all(self.entries())
        self.try_all(self.other_cuts())
        kept = self.best("dynmo", self.options.keep) + self.best("peer", self.options.keep)
        for entry in kept:
            self.runs[entry].clear()
        for index in range(self.options.rounds):
            begin = time.monotonic()
            for entry in kept if index % 2 == 0 else reversed(kept):
                self.run(entry)
            self.products.append(run_products(self.options, self.shape))
            self.write_row({"round": index, "run": "products", "flops_per_s": self.products[-1]})
            # A round takes about as long as the one before.
            if 2 * time.monotonic() - begin > self.options.end:
                break
        self.runs = {e: self.runs[e] for e in kept}
        return self.result(self.best("dynmo", 1)[0], self.best("peer", 1)[0])

    def result(self, ours, theirs):
        a, b = self.runs[ours], self.runs[theirs]
        ratios = sorted(y["step_s"] / x["step_s"] for x, y in zip(a, b))
        memory = sorted(x["peak_bytes"] / y["peak_bytes"] for x, y in zip(a, b))
        rates = [[step_flops(self.shape) / r["step_s"] for r in runs] for runs in (a, b)]
        shares = [statistics.median(x / y for x, y in zip(of, self.products)) for of in rates]
        peak = [statistics.median(r["peak_bytes"] for r in runs) for runs in (a, b)]
        return {"model": self.name, "precision": self.options.precision, "device": self.options.device, "rounds": len(ratios),
                "dynmo": label(ours), "peer": label(theirs),
                "dynmo_tokens_per_s": self.tokens / statistics.median(r["step_s"] for r in a),
                "peer_tokens_per_s": self.tokens / statistics.median(r["step_s"] for r in b),
                "tokens_ratio": spread(ratios), "memory_ratio": spread(memory),
                "dynmo_peak_bytes": peak[0], "peer_peak_bytes": peak[1],
                "product_flops_per_s": statistics.median(self.products), "dynmo_flops_per_s": statistics.median(rates[0]),
                "peer_flops_per_s": statistics.median(rates[1]), "dynmo_product_share": shares[0],
                "peer_product_share": shares[1],
                "losses": {"dynmo": a[0]["losses"], "peer": b[0]["losses"]}, "dynmo_cut": a[0]["cut"],
                "does_not_run": {label(e): why for e, why in self.failures.items()},
                "runs": {label(e): self.runs[e] for e in self.runs}}


def spread(ordered):
    quantile = lambda share: ordered[round(share * (len(ordered) - 1))]
    return {"median": statistics.median(ordered), "quartiles": [quantile(0.25), quantile(0.75)],
            "range": [ordered[0], ordered[-1]]}


def label(entry):
    side, schedule, cut = entry
    return f"{side} {schedule}" + (f" ({'+'.join(map(str, cut))})" if cut else "")


def say(line):
    print(line, file=sys.stderr, flush=True)


def machine():
    model = next((line.partition(":")[2].strip() for line in Path("/proc/cpuinfo").read_text().splitlines()
                  if line.startswith("model name")), platform.machine())
    return {"processor": model, "cores": os.cpu_count(), "kernel": platform.release(), "load_before": os.getloadavg()[0]}


def commit():
    done = subprocess.run(["git", "-C", str(HERE), "describe", "--always", "--dirty"], capture_output=True, text=True, check=False)
    return done.stdout.strip() or "unknown"


def table(results):
    rows = [["model", "precision", "what", "dynmo", "peer", "ratio", "quartiles", "range", "rounds"]]
    for r in results:
        for what, ours, theirs, ratio in (
                ("tokens/s", r["dynmo_tokens_per_s"], r["peer_tokens_per_s"], r["tokens_ratio"]),
                ("peak MiB of a rank" if r["device"] == "cpu" else "peak MiB of the GPU", r["dynmo_peak_bytes"] / 2**20,
                 r["peer_peak_bytes"] / 2**20, r["memory_ratio"])):
            rows.append([r["model"], r["precision"], what, f"{ours:.0f}", f"{theirs:.0f}", f"{ratio['median']:.2f}",
                         "{:.2f} to {:.2f}".format(*ratio["quartiles"]), "{:.2f} to {:.2f}".format(*ratio["range"]), str(r["rounds"])])
    widths = [max(map(len, column)) for column in zip(*rows)]
    rows.insert(1, ["-" * width for width in widths])
    lines = ["| " + " | ".join(cell.ljust(width) for cell, width in zip(row, widths)) + " |" for row in rows]
    lines += [f"{r['model']}: {r['dynmo']} beside {r['peer']}; products {r['product_flops_per_s'] / 1e9:.0f} GFLOP/s, of which "
              f"{100 * r['dynmo_product_share']:.0f} and {100 * r['peer_product_share']:.0f} %" for r in results]
    return "\n".join([*lines, "ratio: dynmo / peer of the same round, median; more tokens/s and less memory are better"])


def parse():
    cache = Path(os.environ.get("DYNMO_CACHE") or Path(os.environ.get("XDG_CACHE_HOME", Path.home() / ".cache")) / "dynmo")
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    names = lambda text: text.split(",")
    parser.add_argument("--dynmo", required=True, help="the dynmo program of a release build")
    parser.add_argument("--python", default=str(cache / "peers/bin/python"), help="a Python with PyTorch 2.11 (%(default)s)")
    parser.add_argument("--models", type=names, default=["small", "medium"], help="of " + ",".join(MODELS))
    parser.add_argument("--precision", choices=("fp32", "bf16"), default="fp32", help="bf16: the peer under autocast")
    parser.add_argument("--ranks", type=int, choices=(1, 2), default=2, help="1: beside PyTorch's own loop, without a pipeline")
    parser.add_argument("--device", choices=("cpu", "cuda", "strict"), default="cpu",
                        help="cuda: one rank on a GPU; strict: a program of the tests, its peer on the CPU")
    parser.add_argument("--peers", type=names, default=["eager"], help="with --ranks 1: loops of the peer, of " + ",".join(LOOPS))
    parser.add_argument("--rounds", type=int, default=10, help="at most")
    parser.add_argument("--seconds", type=float, default=float("inf"), help="no round begins that would end later")
    parser.add_argument("--rows", type=Path, help="file for a line of JSON after each run")
    parser.add_argument("--keep", type=int, default=1, help="schedules of each side that run in the rounds")
    parser.add_argument("--schedules", type=names, default=list(OUR_SCHEDULES), help="ours to try")
    parser.add_argument("--peer-schedules", type=names, default=[s for s in PEER_SCHEDULES if s != "gpipe"],
                        help="the peer's to try, of " + ",".join(PEER_SCHEDULES) + " (gpipe waits as long as 1f1b and keeps more)")
    parser.add_argument("--cores", type=lambda text: [int(c) for c in text.split(",")], help="a core a rank to pin to")
    parser.add_argument("--out", type=Path, help="JSON file for everything that was measured")
    options = parser.parse_args()
    for given, known, what in ((options.models, MODELS, "--models"), (options.peer_schedules, PEER_SCHEDULES, "--peer-schedules"),
                               (options.peers, LOOPS, "--peers")):
        for name in given:
            if name not in known:
                parser.error(f"{what} has '{name}', wanted some of {', '.join(known)}")
    if not os.access(options.dynmo, os.X_OK):
        parser.error(f"--dynmo '{options.dynmo}' is not a program: build it by `make build`")
    probe = subprocess.run([options.python, "-c", "import torch; print(torch.__version__)"], capture_output=True, text=True,
                           check=False) if os.access(options.python, os.X_OK) else None
    if probe is None or probe.returncode != 0:
        parser.error(f"'{options.python}' has no PyTorch: make one by `python3 -m venv {cache}/peers && {cache}/peers/bin/pip "
                     "install torch==2.11.0 numpy`, or give another by --python")
    options.torch = probe.stdout.strip()
    options.cores = options.cores or sorted(os.sched_getaffinity(0))[:options.ranks]
    if len(options.cores) != options.ranks:
        parser.error(f"{len(options.cores)} cores, wanted {options.ranks}")
    if options.ranks == 1 and (options.schedules != list(OUR_SCHEDULES) or "--peer-schedules" in " ".join(sys.argv)):
        parser.error("--ranks 1 has no schedules: leave out --schedules and --peer-schedules")
    if options.device != "cpu" and options.ranks != 1:
        parser.error(f"--device {options.device}: wanted --ranks 1")
    if options.device == "cuda":
        os.environ["CUDA_DEVICE_ORDER"] = "PCI_BUS_ID"  # the numbers of nvidia-smi
        try:
            used_bytes_of_gpu()
        except (Failed, OSError, subprocess.CalledProcessError) as why:
            parser.error(f"--device cuda: {why}")
    options.end = time.monotonic() + options.seconds
    if options.rounds < 1 or options.keep < 1:
        parser.error("--rounds and --keep: wanted 1 or more")
    return options


def main():
    options = parse()
    results, failed = [], []
    about = {"format": "dynmo-peers-1", "commit": commit(), "machine": machine(), "torch": options.torch, "cores": options.cores,
             "command": " ".join(sys.argv)}
    with tempfile.TemporaryDirectory(prefix="dynmo-peers-") as folder:
        for name in options.models:
            try:
                results.append(Contest(options, name, Path(folder)).compare())
            except Failed as why:
                failed.append(f"{name}: {why}")
    about["results"] = results
    about["machine"]["load_after"] = os.getloadavg()[0]
    if options.out:
        options.out.parent.mkdir(parents=True, exist_ok=True)
        options.out.write_text(json.dumps(about, indent=1) + "\n")
    print(table(results), flush=True)
    if failed:
        sys.exit("compare.py: " + "\n".join(failed))


if __name__ == "__main__":
    main()
